"""Moments of a row of a norm: the sum of its values, and the sum of their squares."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import MAX_NORM_ELEMENTS
from celosia.hw.vector_unit.multiply import logic_product

VALUE_BITS = 9
"""Width of a value: a byte plus the offset."""
SUM_BITS, SQUARES_BITS = 20, 28
"""Width of the sum of MAX_NORM_ELEMENTS values from -256 to 255, and of the sum of their squares."""
assert 1 << SUM_BITS == 2 * 256 * MAX_NORM_ELEMENTS and 1 << SQUARES_BITS == 2 * 256**2 * MAX_NORM_ELEMENTS


class NormMoments(wiring.Component):
    """Add up the values of a row, and their squares, several neighbouring bytes a cycle.

    Parameters
    ----------
    bytes_per_cycle : number of bytes, a power of two.

    Members
    -------
    valid : In(1)               Bytes come, all of one row.
    first, last : In(1)         They are the row's first or last ones.
    values : In(array)          The bytes.
    counted : In                A bit for each byte of `values`: it counts.
    offset : In(signed)         Added to each byte; constant.
    done : Out(1)               Pulse: the sums of a row are complete. It comes 3 cycles after the row's last bytes,
                                and one more for each level of the adder tree.
    sum, squares : Out          The sums of that row; valid in the cycle of `done`.
    """

    def __init__(self, bytes_per_cycle: int) -> None:
        self._bytes_per_cycle = bytes_per_cycle
        super().__init__({
            "valid": In(1), "first": In(1), "last": In(1), "values": In(data.ArrayLayout(signed(8), bytes_per_cycle)),
            "counted": In(bytes_per_cycle),
            "offset": In(signed(VALUE_BITS)), "done": Out(1), "sum": Out(signed(SUM_BITS)),
            "squares": Out(SQUARES_BITS),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        values = [Reg(signed(VALUE_BITS), name=f"value{lane}") for lane in range(self._bytes_per_cycle)]
        for lane, value in enumerate(values):
            m.d.sync += value.eq(Mux(self.counted[lane], self.values[lane] + self.offset, 0))
        flags = self._delay_flags(m, Cat(self.valid, self.first, self.last), 0)
        terms: list[tuple[Value, Value]] = [(value, self._square(value)) for value in values]
        level = 0
        while True:
            level += 1
            registers = [
                [Reg(part.shape(), name=f"{name}{level}_{number}") for name, part in zip(("sum", "squares"), term)]
                for number, term in enumerate(terms)
            ]
            m.d.sync += [to.eq(part) for pair, term in zip(registers, terms) for to, part in zip(pair, term)]
            flags = self._delay_flags(m, flags, level)
            if len(registers) == 1:
                break
            terms = [(a + c, b + d) for (a, b), (c, d) in zip(registers[::2], registers[1::2])]
        (total, squares), (valid, first, last) = registers[0], flags
        with m.If(valid):
            m.d.sync += [
                self.sum.eq(Mux(first, 0, self.sum) + total),
                self.squares.eq(Mux(first, 0, self.squares) + squares),
            ]
        m.d.sync += self.done.eq(valid & last)
        return m

    def _delay_flags(self, m: Module, marks: Value, stage: int) -> Signal:
        """Return the flags valid, first and last (`marks`) of a stage, delayed by a cycle."""
        after = Signal(len(marks), name=f"marks{stage}")
        m.d.sync += after.eq(marks)
        return after

    def _square(self, value: Signal) -> Value:
        """Return the square of a value, unsigned; the product's sign bit, always 0, is left out."""
        wide = Cat(value, value[-1]).as_signed()
        return logic_product(value, wide)[: 2 * VALUE_BITS - 1].as_unsigned()
