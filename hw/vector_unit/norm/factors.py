"""The factors of a row: its mean, and the number by which the lanes multiply."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import FACTOR_BITS, MIN_NORM_ROW_CYCLES, NORM_FRACTION, ROOT_BITS
from celosia.hw.vector_unit.norm.moments import VALUE_BITS
from celosia.hw.vector_unit.norm.variance import COUNT_BITS, PLACES_BITS, REST_BITS

SPARE_BITS = 32 - NORM_FRACTION
"""Bits of a product behind those of a result."""
MOST_PLACES = 29
"""The most places of a variance that is not 0."""
_LIFT = 16
"""Bits by which a product is lifted so that it is to go down, whichever its places."""
_WIDE_BITS = COUNT_BITS + ROOT_BITS
_SHIFTS = 10
"""Steps that suffice to shift by any number of places, four or one at a time."""

row_layout = data.StructLayout({
    "offset": signed(VALUE_BITS + 2), "twice": 1, "pairs": 3, "factor": FACTOR_BITS, "rest": signed(35),
})  # fmt: skip
"""The factors of a row.

A result is ((value << twice) + offset << 2 * pairs) * factor + rest, without its lowest SPARE_BITS bits.
"""


class NormFactors(wiring.Component):
    """Multiply the inverse root by the number of lanes and by the rest of the mean, a bit of these in a step.

    Members
    -------
    take : In(1)            A row comes; the one before came NORM_STEPS cycles ago, or more.
    root : In               See `InverseRoot`.
    mean, rest, places : In See `NormVariance`.
    count, spare : In       Number of lanes of a row, shifted up by `spare` bits so that its highest bit is 1; constant.
    offset : In             Added to each lane; constant.
    done : Out(1)           Pulse: the factors are there, NORM_STEPS - 1 cycles behind `take` at most:
    row : Out(row_layout)   these, in this cycle.
    """

    def __init__(self) -> None:
        super().__init__({
            "take": In(1), "root": In(ROOT_BITS), "mean": In(signed(VALUE_BITS)), "rest": In(signed(REST_BITS)),
            "places": In(PLACES_BITS), "count": In(COUNT_BITS), "spare": In(range(COUNT_BITS)),
            "offset": In(signed(VALUE_BITS)), "done": Out(1), "row": Out(row_layout),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        end = COUNT_BITS + _SHIFTS + 1
        assert end + 1 < MIN_NORM_ROW_CYCLES
        step = Signal(range(end + 2))
        m.d.comb += self.done.eq(step == end + 1)
        m.d.sync += step.eq(Mux(self.take, 1, Mux(self.done, 0, step + (step != 0))))
        root = Reg(ROOT_BITS)
        of_count = Reg(COUNT_BITS)
        wide = Reg(_WIDE_BITS)
        mean = Reg(self.mean.shape())
        places = Reg(PLACES_BITS)
        multiplies = step <= COUNT_BITS
        with m.If(self.take):
            m.d.sync += [root.eq(self.root), of_count.eq(self.count), wide.eq(0)]
            m.d.sync += [mean.eq(self.mean), places.eq(self.places)]
        with m.Elif(multiplies):
            m.d.sync += [of_count.eq(of_count << 1), wide.eq((wide << 1) + Mux(of_count[-1], root, 0))]
        rest = self._rest(m, step, root, multiplies)
        with m.If(step == end):
            m.d.sync += self.row.rest.eq((1 << SPARE_BITS - 1) - rest)
            self._row(m, wide, mean, places)
        return m

    def _rest(self, m: Module, step: Signal, root: Signal, multiplies: Value) -> Signal:
        """Compute rest * root bit by bit, and shift it to the position of the lanes' products, from which it is
        subtracted ("less" in sim/functional/norm.py)."""
        bits = Reg(REST_BITS)
        down = Reg(PLACES_BITS)
        lifted = Reg(signed(_WIDE_BITS + _LIFT))
        high = lifted[_LIFT:].as_signed()
        with m.If(self.take):
            over = self.places > MOST_PLACES
            m.d.sync += [bits.eq(self.rest), down.eq(Mux(over, 0, MOST_PLACES - self.places)), lifted.eq(0)]
        with m.Elif(multiplies):
            part, negative = Mux(bits[-1], root, 0), step == 1  # the highest bit is the sign
            total = (high << 1) + Mux(negative, -part, part)
            m.d.sync += [bits.eq(bits << 1), lifted.eq(Cat(Const(0, _LIFT), total[: len(high)]))]
        with m.Elif(down[2:].any()):
            m.d.sync += [lifted.eq(lifted >> 4), down.eq(down - 4)]
        with m.Elif(down.any()):
            m.d.sync += [lifted.eq(lifted >> 1), down.eq(down - 1)]
        return lifted

    def _row(self, m: Module, wide: Signal, mean: Signal, places: Signal) -> None:
        """Compute what the lanes need of a row: its factor, the shift of their values, and the offset.

        The factor is rounded to nearest; one that would take another bit becomes the largest number.
        """
        low = _WIDE_BITS - 2 - FACTOR_BITS  # the highest bit that is rounded off, where the one above all is 0
        over = wide[-1]
        cut = Signal(FACTOR_BITS + 1)
        nearest = Signal(FACTOR_BITS + 2)
        shift = Signal(4)
        offset = Signal(signed(VALUE_BITS + 1))
        m.d.comb += [
            cut.eq(Mux(over, wide[low + 1 :], wide[low:-1])),
            nearest.eq(cut + 1),
            shift.eq(places - self.spare + over),
            offset.eq(self.offset - mean),
        ]
        m.d.sync += [
            self.row.factor.eq(Mux(nearest[-1], -1, nearest[1:-1])),
            self.row.twice.eq(shift[0]),
            self.row.pairs.eq(shift[1:]),
            self.row.offset.eq(Mux(shift[0], offset << 1, offset)),
        ]
