"""Sums of positive float32: four additions are under way, each of another sum."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import SOFTMAX_SUMS
from celosia.hw.spec.scratchpads import FLOAT_FIELDS
from celosia.hw.vector_unit.masks import ones

MANTISSA, EXPONENT = FLOAT_FIELDS["fraction"].width + 1, FLOAT_FIELDS["exponent"].width

pair_layout = data.StructLayout({"m": MANTISSA, "e": EXPONENT})
"""A positive float32, m * 2^(e - 150). m includes the leading one. A subnormal number has e = 1 and no leading one."""


def pair_of(word: Value) -> Value:
    """Convert the bits of a float32 to `pair_layout`. The sign is ignored."""
    fraction, exponent = (word[part.offset :][: part.width] for part in FLOAT_FIELDS.values())
    normal = exponent.any()
    return Cat(fraction, normal, exponent[0] | ~normal, exponent[1:])


class PairAdder(wiring.Component):
    """Add to SUMS sums in turn, which go around a ring: each cycle `addend` is added to the sum at `total`.

    Sums are rounded to nearest, ties to even, with gradual underflow. An exponent that is too large wraps.

    Members
    -------
    first : In(1)       The new sum is `addend` alone.
    nothing : In(1)     The sum stays as it is.
    addend : In(pair)   The number that is added.
    total : Out(pair)   The sum whose turn it is. The new one is here SUMS cycles later.
    """

    def __init__(self) -> None:
        super().__init__({
            "first": In(1), "nothing": In(1), "addend": In(pair_layout), "total": Out(pair_layout),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        stages = (self._order, self._shift, self._add, self._round)
        assert len(stages) == SOFTMAX_SUMS
        values: tuple[Signal, ...] = ()
        for stage in stages:
            values = stage(m, *values)
        m.d.comb += Value.cast(self.total).eq(Cat(values))
        return m

    def _order(self, m: Module) -> tuple[Signal, ...]:
        """Order the two numbers by their exponents.

        Returns the mantissa with the larger exponent, the other one, the difference of the exponents, whether that is
        more than 31, and the larger exponent.
        """
        total, addend = self.total, self.addend
        down = Signal(EXPONENT + 1)
        up = Signal(EXPONENT)
        by = Signal(EXPONENT)
        less = Signal()
        large = Reg(MANTISSA)
        small = Reg(MANTISSA)
        shift = Reg(5)
        far = Reg()
        e = Reg(EXPONENT)
        m.d.comb += [
            down.eq(total.e - addend.e), up.eq(addend.e - total.e), by.eq(Mux(down[-1], up, down)),
            less.eq(self.first | (down[-1] & ~self.nothing)),
        ]  # fmt: skip
        m.d.sync += [
            large.eq(Mux(less, addend.m, total.m)),
            small.eq(Mux(less, total.m, addend.m)),
            shift.eq(by),
            far.eq(by[len(shift) :].any() | self.first | self.nothing),  # what is that far away makes no difference
            e.eq(Mux(less, addend.e, total.e)),
        ]
        return large, small, shift, far, e

    def _shift(
        self, m: Module, large: Signal, small: Signal, shift: Signal, far: Signal, e: Signal
    ) -> tuple[Signal, ...]:
        """Shift the smaller number down by the low 4 bits of the exponents' difference, with one more fraction bit.

        Also returns whether any bit of it is lost in the end, that is, after the shift by 16 in the next stage.
        """
        same = Reg(MANTISSA)
        shifted = Reg(MANTISSA + 1)
        by_16 = Reg()
        nowhere = Reg()
        lost = Reg()
        same_e = Reg(EXPONENT)
        below = ones(shift)[1 : MANTISSA + 1] | far.replicate(MANTISSA)
        m.d.sync += [
            same.eq(large),
            shifted.eq(Cat(0, small) >> shift[:4]),
            by_16.eq(shift[4]),
            nowhere.eq(far),
            lost.eq((small & below).any()),
            same_e.eq(e),
        ]
        return same, shifted, by_16, nowhere, lost, same_e

    def _add(
        self, m: Module, large: Signal, shifted: Signal, by_16: Signal, far: Signal, lost: Signal, e: Signal
    ) -> tuple[Signal, ...]:
        """Shift the smaller number by 16 if necessary, and add. The shift fits into the adder's look-up tables."""
        total = Reg(MANTISSA + 2)
        still_lost = Reg()
        same_e = Reg(EXPONENT, name="sum_e")
        small = Mux(far, 0, Mux(by_16, shifted >> 16, shifted))
        m.d.sync += [total.eq(Cat(0, large) + small), still_lost.eq(lost), same_e.eq(e)]
        return total, still_lost, same_e

    def _round(self, m: Module, total: Signal, lost: Signal, e: Signal) -> tuple[Signal, ...]:
        """Shift the sum down by one bit if it has one more, and round it to nearest, ties to even."""
        carry = total[-1]
        kept = Signal(MANTISSA)
        rounded = Signal(MANTISSA + 1)
        mantissa = Reg(MANTISSA)
        exponent = Reg(EXPONENT)
        half, below = Mux(carry, total[1], total[0]), lost | (carry & total[0])
        m.d.comb += [
            kept.eq(Mux(carry, total[2:], total[1:])),
            # One more is a carry into a lowest bit in front, which is no adder of its own.
            rounded.eq(((half & (kept[0] | below)) + Cat(1, kept))[1:]),
        ]
        m.d.sync += [
            mantissa.eq(Cat(rounded[: MANTISSA - 1], rounded[MANTISSA - 1 :].any())),
            exponent.eq(e + (carry | rounded[-1])),
        ]
        return mantissa, exponent
