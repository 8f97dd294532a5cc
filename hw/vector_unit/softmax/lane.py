"""One lane of the softmax engine: it adds up the powers of some rows, and divides some elements of all rows."""

from __future__ import annotations

from amaranth import Cat, Module, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.layout import write_port
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import QUOTIENT_BITS, SOFTMAX_SUMS, softmax_parts
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.softmax.adder import EXPONENT, MANTISSA, PairAdder, pair_layout, pair_of
from celosia.hw.vector_unit.softmax.addresses import BUFFERS, TILES, row_number_bits
from celosia.hw.vector_unit.softmax.divider import PairDivider


class SoftmaxLane(wiring.Component):
    """Add up the powers of SOFTMAX_SUMS rows of each tile, and divide one element of each part.

    Lane n adds up row n of the tile and every `softmax`-th row after it. It divides element n of each part of any row.

    Parameters
    ----------
    cfg : Config
    lane : number of the lane.

    Members
    -------
    load : In(WritePort)        LOAD writes powers to the lower half of the table, shares to the upper half.
    part : In(array)            Neighbouring bytes of a row.
    keep : In(1)                They belong to one of the lane's rows, and are stored.
    kept_at : In                Address at which they are stored: buffer, part and sum.
    put_largest : In(1)         Pulse: the largest byte of a row is known.
    number, largest : In        Number of that row, and its largest byte.
    look_at, byte : In          The element to add up: address of its part, and number of its byte there.
    tile, slot : In             Number of its tile modulo TILES, and of its sum in the lane.
    first, nothing : In         See `PairAdder`, for the element of LOOK_STAGES cycles ago.
    complete : In(1), sum : In  The sum at the adder's output is complete; `sum` is its number in the lane.
    wanted : In, total : Out    total: the complete sum number `wanted`.
    element : In                The element to divide.
    less : In                   The largest byte of its row, inverted.
    take, e, beyond, divisors : In      See `PairDivider`, for the element of LOOK_STAGES cycles ago.
    zero_point, low, high : In, result : Out    See `PairDivider`.
    """

    def __init__(self, cfg: Config, lane: int) -> None:
        self._cfg, self._lane = cfg, lane
        slot, byte = exact_log2(SOFTMAX_SUMS), exact_log2(cfg.softmax)
        self._place = exact_log2(BUFFERS) + exact_log2(softmax_parts(cfg)) + slot
        row = row_number_bits(cfg)
        super().__init__({
            "load": In(write_port(scratchpads(cfg)["exp"])),
            "part": In(data.ArrayLayout(8, cfg.softmax)), "keep": In(1), "kept_at": In(self._place),
            "put_largest": In(1), "number": In(row), "largest": In(signed(8)),
            "look_at": In(self._place), "byte": In(byte), "tile": In(exact_log2(TILES)), "slot": In(slot),
            "first": In(1), "nothing": In(1), "complete": In(1), "sum": In(slot), "wanted": In(slot),
            "total": Out(pair_layout),
            "element": In(8), "less": In(8),
            "take": In(1), "e": In(EXPONENT), "beyond": In(1), "divisors": In(MANTISSA).array(QUOTIENT_BITS),
            "zero_point": In(signed(8)), "low": In(signed(8)), "high": In(signed(8)), "result": Out(signed(8)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.adder, m.submodules.divider = adder, divider = PairAdder(), PairDivider()
        m.submodules.totals = totals = Memory(shape=pair_layout, depth=SOFTMAX_SUMS, init=[])
        put = totals.write_port()
        total = totals.read_port(domain="comb")
        power = self._look_up(m, "powers", 0, self._build_buffers(m))
        share = self._look_up(m, "shares", 1, self.element + self.less)
        m.d.comb += [
            adder.first.eq(self.first), adder.nothing.eq(self.nothing), adder.addend.eq(power),
            put.en.eq(self.complete), put.addr.eq(self.sum), put.data.eq(adder.total),
            total.addr.eq(self.wanted), self.total.eq(total.data), self.load.ready.eq(1),
            divider.take.eq(self.take), divider.share.eq(share), divider.e.eq(self.e),
            divider.beyond.eq(self.beyond), divider.zero_point.eq(self.zero_point), divider.low.eq(self.low),
            divider.high.eq(self.high), self.result.eq(divider.result),
            *(of.eq(divisor) for of, divisor in zip(divider.divisors, self.divisors)),
        ]  # fmt: skip
        return m

    def _build_buffers(self, m: Module) -> Value:
        """Build the buffers of parts and of largest bytes. Returns the index of the next power to add in its table.

        The index is 255 minus the distance of the element from the largest byte of its row.
        """
        parts = Memory(shape=self.part.shape(), depth=1 << self._place, init=[])
        # The largest bytes are stored inverted, so that an addition gives the index.
        largest = Memory(shape=8, depth=SOFTMAX_SUMS * TILES, init=[])
        m.submodules.parts, m.submodules.largest_bytes = parts, largest
        keep = parts.write_port()
        kept = parts.read_port(domain="comb")
        put = largest.write_port()
        of_row = largest.read_port(domain="comb")
        element = Reg(8)
        less = Reg(8)
        lane, row = self.number[: len(self.byte)], self.number[len(self.byte) :]
        m.d.comb += [
            keep.en.eq(self.keep), keep.addr.eq(self.kept_at), keep.data.eq(self.part), kept.addr.eq(self.look_at),
            put.en.eq(self.put_largest & (lane == self._lane)), put.addr.eq(row), put.data.eq(~self.largest),
            of_row.addr.eq(Cat(self.slot, self.tile)),
        ]  # fmt: skip
        m.d.sync += [element.eq(kept.data[self.byte]), less.eq(of_row.data)]
        return element + less

    def _look_up(self, m: Module, name: str, half: int, distance: Value) -> Signal:
        """Build one half of the table, 0 for powers or 1 for shares. Returns the entry at index `distance`.

        The entry comes two cycles later, as a pair. name: name of the memory.
        """
        m.submodules[name] = table = Memory(shape=32, depth=scratchpads(self._cfg)["exp"].depth // 2, init=[])
        to = table.write_port()
        of = table.read_port()
        pair = Reg(pair_layout, name=f"{name}_pair")
        addr = self.load.addr
        m.d.comb += [
            to.en.eq(self.load.en & self.load.mask & (addr[-1] == half)), to.addr.eq(addr[:-1]),
            to.data.eq(self.load.data), of.en.eq(1), of.addr.eq(distance),
        ]  # fmt: skip
        m.d.sync += Value.cast(pair).eq(pair_of(of.data))
        return pair
