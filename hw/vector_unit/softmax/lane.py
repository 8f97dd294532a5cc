"""One lane of a softmax: looks up powers and adds them up, looks up shares and divides them."""

from __future__ import annotations

from amaranth import Cat, Module, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.layout import write_port
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import QUOTIENT_BITS, SOFTMAX_SUMS, softmax_parts
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.softmax.adder import EXPONENT, MANTISSA, PairAdder, pair_layout, pair_of
from celosia.hw.vector_unit.softmax.divider import PairDivider
from celosia.hw.vector_unit.softmax.walk import BUFFERS, TILES, row_bits


class SoftmaxLane(wiring.Component):
    """Sums of SOFTMAX_SUMS rows of a tile, number `lane` and each `softmax`-th behind it; and each share of all rows.

    Parameters
    ----------
    cfg : Config
    lane : its number.

    Members
    -------
    load : In(WritePort)        Writes powers, and behind them shares.
    part : In(8 * softmax)      Neighbouring bytes of a row.
    keep : In(1), kept_at : In  Of one of its rows they are kept in a place, that of a buffer, a part and a sum.
    found : In(1), number, largest : In     The largest byte of a row, all rows' in all lanes.
    look_at, byte : In          An element comes to be added up: of this place this byte;
    tile, slot : In             of this tile and sum.
    first, nothing : In         As of PairAdder, for what came LOOK_STAGES before.
    complete : In(1), sum : In  A sum is complete, the one that is the adder's next, of this slot.
    wanted : In, total : Out    A complete sum, by its slot.
    element, less : In          An element comes to be divided; the largest one of its row, inverted.
    take, e, beyond, divisors, zero_point, low, high, result    As of PairDivider, for what came LOOK_STAGES before.
    """

    def __init__(self, cfg: Config, lane: int) -> None:
        self._cfg, self._lane = cfg, lane
        slot, byte = exact_log2(SOFTMAX_SUMS), exact_log2(cfg.softmax)
        self._place = exact_log2(BUFFERS) + exact_log2(softmax_parts(cfg)) + slot
        row = row_bits(cfg) + exact_log2(TILES)
        super().__init__({
            "load": In(write_port(scratchpads(cfg)["exp"])),
            "part": In(8 * cfg.softmax), "keep": In(1), "kept_at": In(self._place),
            "found": In(1), "number": In(row), "largest": In(signed(8)),
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
        power = self._look_up(m, "powers", 0, self._distance(m))
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

    def _distance(self, m: Module) -> Value:
        """255 less how far an element that is added up is below the largest one of its row."""
        parts = Memory(shape=len(self.part), depth=1 << self._place, init=[])
        # The largest bytes, with every bit inverted: what is to be added.
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
            put.en.eq(self.found & (lane == self._lane)), put.addr.eq(row), put.data.eq(~self.largest),
            of_row.addr.eq(Cat(self.slot, self.tile)),
        ]  # fmt: skip
        m.d.sync += [element.eq(kept.data.word_select(self.byte, 8)), less.eq(of_row.data)]
        return element + less

    def _look_up(self, m: Module, name: str, half: int, distance: Value) -> Signal:
        """What one half of the table has for an element at this distance, two cycles later."""
        m.submodules[name] = table = Memory(shape=32, depth=scratchpads(self._cfg)["exp"].depth // 2, init=[])
        to = table.write_port()
        of = table.read_port()
        found = Reg(pair_layout, name=f"{name}_found")
        addr = self.load.addr
        m.d.comb += [
            to.en.eq(self.load.en & self.load.mask & (addr[-1] == half)), to.addr.eq(addr[:-1]),
            to.data.eq(self.load.data), of.en.eq(1), of.addr.eq(distance),
        ]  # fmt: skip
        m.d.sync += Value.cast(found).eq(pair_of(of.data))
        return found
