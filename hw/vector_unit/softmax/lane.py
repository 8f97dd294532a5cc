"""One lane of a softmax: looks up powers, adds them up, divides."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.config import Config
from celosia.hw.layout import write_port
from celosia.hw.pipeline import QUOTIENT_BITS, SUMS
from celosia.hw.scratchpads import scratchpads
from celosia.hw.signals import Reg
from celosia.hw.vector_unit.softmax.adder import EXPONENT, MANTISSA, PairAdder, pair_layout, pair_of
from celosia.hw.vector_unit.softmax.divider import PairDivider
from celosia.hw.vector_unit.softmax.steps import BUFFERS


class SoftmaxLane(wiring.Component):
    """Sums of SUMS rows of a tile, number `lane` and each `softmax`-th behind it; and of all rows each share there.

    Parameters
    ----------
    cfg : Config
    lane : its number.

    Members
    -------
    load : In(WritePort)        Writes powers.
    part : In(8 * softmax)      Neighbouring bytes of a row.
    keep : In(1), kept_at : In  Of one of its rows they are kept in a place, that of a buffer and a sum.
    found : In(1), number, largest : In     The largest byte of a row, all rows' in all lanes.
    look : In(1)                An element of the row `row` comes: of a kept part that in place `byte`, or, where
                                `divide`, this lane's byte of `part`.
    look_at, byte, row, divide : In
    step, first, nothing, total As of PairAdder, for the power of what came LOOK_STAGES before.
    take, e, beyond, divisors, zero_point, low, high, result    As of PairDivider, likewise.
    """

    def __init__(self, cfg: Config, lane: int) -> None:
        self._cfg, self._lane = cfg, lane
        place, row = exact_log2(BUFFERS * SUMS), exact_log2(SUMS * cfg.softmax)
        super().__init__({
            "load": In(write_port(scratchpads(cfg)["exp"])),
            "part": In(8 * cfg.softmax), "keep": In(1), "kept_at": In(place),
            "found": In(1), "number": In(row), "largest": In(signed(8)),
            "look": In(1), "look_at": In(place), "byte": In(exact_log2(cfg.softmax)), "row": In(row), "divide": In(1),
            "step": In(1), "first": In(1), "nothing": In(1), "total": Out(pair_layout),
            "take": In(1), "e": In(EXPONENT), "beyond": In(1), "divisors": In(MANTISSA).array(QUOTIENT_BITS),
            "zero_point": In(signed(8)), "low": In(signed(8)), "high": In(signed(8)), "result": Out(signed(8)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.adder, m.submodules.divider = adder, divider = PairAdder(), PairDivider()
        power = self._look_up(m, self._distance(m))
        m.d.comb += [
            adder.step.eq(self.step), adder.first.eq(self.first), adder.nothing.eq(self.nothing),
            adder.addend.eq(power), self.total.eq(adder.total),
            divider.take.eq(self.take), divider.share.eq(power), divider.e.eq(self.e),
            divider.beyond.eq(self.beyond), divider.zero_point.eq(self.zero_point), divider.low.eq(self.low),
            divider.high.eq(self.high), self.result.eq(divider.result),
            *(of.eq(divisor) for of, divisor in zip(divider.divisors, self.divisors)),
        ]  # fmt: skip
        return m

    def _distance(self, m: Module) -> Signal:
        """255 less how far an element is below the largest one of its row, in the cycle after `look`."""
        parts = Memory(shape=len(self.part), depth=BUFFERS * SUMS, init=[])
        # The largest bytes, with every bit inverted: what is to be added.
        largest = Memory(shape=8, depth=1 << len(self.row), init=[])
        m.submodules.parts, m.submodules.largest_bytes = parts, largest
        keep, kept = parts.write_port(), parts.read_port(domain="comb")
        put, of_row = largest.write_port(), largest.read_port(domain="comb")
        element, less, distance = Reg(8), Reg(8), Signal(8)
        m.d.comb += [
            keep.en.eq(self.keep), keep.addr.eq(self.kept_at), keep.data.eq(self.part), kept.addr.eq(self.look_at),
            put.en.eq(self.found), put.addr.eq(self.number), put.data.eq(~self.largest), of_row.addr.eq(self.row),
            distance.eq(element + less),
        ]  # fmt: skip
        own = self.part.word_select(self._lane, 8)
        with m.If(self.look):
            m.d.sync += [element.eq(Mux(self.divide, own, kept.data.word_select(self.byte, 8))), less.eq(of_row.data)]
        return distance

    def _look_up(self, m: Module, distance: Signal) -> Signal:
        """Of a row's element the power, or what is divided."""
        m.submodules.powers = powers = Memory(shape=32, depth=scratchpads(self._cfg)["exp"].depth, init=[])
        to, of = powers.write_port(), powers.read_port()
        looked, found, divide, power = Signal(), Signal(), Reg(), Reg(pair_layout)
        m.d.sync += [looked.eq(self.look), found.eq(looked), divide.eq(self.divide)]
        m.d.comb += [
            to.en.eq(self.load.en & self.load.mask), to.addr.eq(self.load.addr), to.data.eq(self.load.data),
            self.load.ready.eq(1), of.en.eq(looked), of.addr.eq(Cat(distance, divide)),
        ]  # fmt: skip
        with m.If(found):
            m.d.sync += power.eq(pair_of(of.data))
        return power
