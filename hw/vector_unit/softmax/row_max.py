"""Search for the largest byte of each row."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg


class RowMax(wiring.Component):
    """Find the largest byte of each row, one entry a cycle, by a tree of comparators.

    Parameters
    ----------
    lanes : bytes of an entry, a power of two.
    row_bits : bits of a row's number.

    Members
    -------
    valid : In(1)       An entry of a row comes.
    entry : In(array)   The entry's bytes.
    inside : In(lanes)  A bit for each byte that counts: the first byte and some next to it.
    first, last : In(1) The entry is its row's first or last one.
    row : In            The row's number.
    done : Out(1)       Pulse: the search of a row is complete.
    largest : Out       Largest byte of that row.
    number : Out        Number of that row.
    """

    def __init__(self, lanes: int, row_bits: int) -> None:
        self._lanes = lanes
        super().__init__({
            "valid": In(1), "entry": In(data.ArrayLayout(signed(8), lanes)), "inside": In(lanes),
            "first": In(1), "last": In(1), "row": In(row_bits),
            "done": Out(1), "largest": Out(signed(8)), "number": Out(row_bits),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        values: list[Value] = [self.entry[lane] for lane in range(self._lanes)]
        inside, row_info, valid = list(self.inside), Cat(self.first, self.last, self.row), self.valid
        level = 0
        while len(values) > 1:
            level += 1
            carried = Reg(len(inside) // 2 + len(row_info), name=f"kept{level}")
            now_valid = Signal(name=f"valid{level}")
            m.d.sync += now_valid.eq(valid)
            with m.If(valid):
                pairs = enumerate(zip(values[::2], values[1::2], inside[1::2]))
                values = [self._larger(m, f"level{level}_{number}", *pair) for number, pair in pairs]
                m.d.sync += carried.eq(Cat(*inside[::2], row_info))
            inside, row_info, valid = list(carried[: len(inside) // 2]), carried[len(inside) // 2 :], now_valid
        first, last, row = row_info[0], row_info[1], row_info[2:]
        with m.If(valid):
            m.d.sync += [
                self.largest.eq(Mux(first | (values[0] > self.largest), values[0], self.largest)),
                self.number.eq(row),
            ]
        m.d.sync += self.done.eq(valid & last)
        return m

    def _larger(self, m: Module, name: str, low: Value, high: Value, counts: Value) -> Signal:
        """Return the larger of two bytes, a cycle later. counts: `high` belongs to the row; else `low` is returned."""
        larger = Reg(signed(8), name=name)
        m.d.sync += larger.eq(Mux(counts & (high > low), high, low))
        return larger
