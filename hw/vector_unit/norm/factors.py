"""Factors of a row of a norm: the offset that lanes add, the bits by which they shift, and the factor."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import FACTOR_BITS, MIN_NORM_ROW_CYCLES, NORM_FRACTION, ROOT_BITS
from celosia.hw.vector_unit.norm.moments import VALUE_BITS
from celosia.hw.vector_unit.norm.variance import COUNT_BITS, PLACES_BITS, REST_BITS

SPARE_BITS = 32 - NORM_FRACTION
"""Low bits of a lane's product that are not part of the result."""
MOST_PLACES = 29
"""Largest `places` (see `NormVariance`) of a variance that is not 0."""
_LIFT = 16
"""Bits by which a product is shifted up in advance, so that the shift by its places is always a shift down."""
_WIDE_BITS = COUNT_BITS + ROOT_BITS
"""Width of the product of a count and a root."""
_SHIFTS = 10
"""Largest number of steps to shift down by up to MOST_PLACES bits, four or one a step."""

row_layout = data.StructLayout({
    "offset": signed(VALUE_BITS + 2), "twice": 1, "pairs": 3, "factor": FACTOR_BITS, "rest": signed(35),
})  # fmt: skip
"""Factors of a row. The lanes compute ((value << twice) + offset << 2 * pairs) * factor + rest.

The result is that number without its lowest SPARE_BITS bits.
"""


class NormFactors(wiring.Component):
    """Multiply the inverse root by the number of values and by the rest of the mean, one bit of these a cycle.

    Members
    -------
    take : In(1)            A row comes; at least MIN_NORM_ROW_CYCLES cycles after the previous one.
    root : In               See `InverseRoot`.
    mean, rest, places : In See `NormVariance`.
    count, spare : In       Number of values in a row, shifted up by `spare` bits until its highest bit is 1; constant.
    offset : In             Added to each value; constant.
    done : Out(1)           Pulse: `row` is valid, less than MIN_NORM_ROW_CYCLES cycles after `take`.
    row : Out(row_layout)   The factors; valid in the cycle of `done`.
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
        rest = self._compute_rest(m, step, root, multiplies)
        with m.If(step == end):
            m.d.sync += self.row.rest.eq((1 << SPARE_BITS - 1) - rest)
            self._compute_row(m, wide, mean, places)
        return m

    def _compute_rest(self, m: Module, step: Signal, root: Signal, multiplies: Value) -> Signal:
        """Compute rest * root bit by bit, shifted to the binary point of the lanes' products.

        The lanes subtract it ("less" in sim/functional/norm.py), since the mean is rounded. step: number of the cycle
        since `take`. multiplies: the multiplication is under way.
        """
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

    def _compute_row(self, m: Module, wide: Signal, mean: Signal, places: Signal) -> None:
        """Drive the fields of `row` but `rest`: the factor, the shift of the values, and the offset.

        wide: root * count, from which the factor is rounded to nearest; a factor that would need another bit becomes
        the largest number. mean, places: those of the row.
        """
        low = _WIDE_BITS - 2 - FACTOR_BITS  # position of the highest bit that is rounded off, if the top bit is 0
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
