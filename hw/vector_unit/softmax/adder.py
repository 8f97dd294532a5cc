"""Pipelined adder of positive float32, with four sums in turn."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import SOFTMAX_SUMS
from celosia.hw.spec.scratchpads import FLOAT_FIELDS
from celosia.hw.vector_unit.masks import ones  # ones(n): a mask of the lowest n bits

MANTISSA, EXPONENT = FLOAT_FIELDS["fraction"].width + 1, FLOAT_FIELDS["exponent"].width
"""Width of a mantissa with its leading one, and of an exponent."""

pair_layout = data.StructLayout({"m": MANTISSA, "e": EXPONENT})
"""A positive float32 as a pair of mantissa and exponent: m * 2^(e - 150). m includes the leading one; a subnormal has
e = 1 and no leading one."""


def pair_of(word: Value) -> Value:
    """Convert the bits of a float32, an entry of exp, to `pair_layout`. The sign is ignored: powers are positive."""
    fraction, exponent = (word[part.offset :][: part.width] for part in FLOAT_FIELDS.values())
    normal = exponent.any()
    return Cat(fraction, normal, exponent[0] | ~normal, exponent[1:])


class PairAdder(wiring.Component):
    """Add up SOFTMAX_SUMS sums in turn. They circulate through the adder's stages; in each cycle one is at `total`.

    Sums are rounded to nearest, ties to even, with gradual underflow. An exponent that is too large wraps.

    Members
    -------
    first : In(1)       The sum at `total` is replaced by `addend`.
    nothing : In(1)     The sum at `total` does not change.
    addend : In(pair)   Else it is added to the sum at `total`.
    total : Out(pair)   A sum. Its new value is here SOFTMAX_SUMS cycles later.
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
        """Build stage 1: order the two numbers by their exponents.

        Returns the mantissa with the larger exponent, the other mantissa, the difference of the exponents (5 bits),
        whether the other number does not count (`far`), as the difference is larger, and the larger exponent.
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
            far.eq(by[len(shift) :].any() | self.first | self.nothing),  # too small to change the sum
            e.eq(Mux(less, addend.e, total.e)),
        ]
        return large, small, shift, far, e

    def _shift(
        self, m: Module, large: Signal, small: Signal, shift: Signal, far: Signal, e: Signal
    ) -> tuple[Signal, ...]:
        """Build stage 2: shift the smaller number down by the low 4 bits of `shift`, keeping one bit below.

        Returns `large`, the shifted number, whether it must be shifted by 16 more, `far`, whether any bit of it that is
        1 is lost by both shifts, and the exponent.
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
        """Build stage 3: shift the smaller number by 16 if necessary, in the adder's look-up tables, and add.

        Returns the sum, whether any bit that is 1 was lost, and the exponent.
        """
        total = Reg(MANTISSA + 2)
        still_lost = Reg()
        same_e = Reg(EXPONENT, name="sum_e")
        small = Mux(far, 0, Mux(by_16, shifted >> 16, shifted))
        m.d.sync += [total.eq(Cat(0, large) + small), still_lost.eq(lost), same_e.eq(e)]
        return total, still_lost, same_e

    def _round(self, m: Module, total: Signal, lost: Signal, e: Signal) -> tuple[Signal, ...]:
        """Build stage 4: shift the sum down by one bit if it has a carry, and round it to nearest, ties to even.

        Returns mantissa and exponent.
        """
        carry = total[-1]
        kept = Signal(MANTISSA)
        rounded = Signal(MANTISSA + 1)
        mantissa = Reg(MANTISSA)
        exponent = Reg(EXPONENT)
        half, below = Mux(carry, total[1], total[0]), lost | (carry & total[0])
        m.d.comb += [
            kept.eq(Mux(carry, total[2:], total[1:])),
            # Rounding up adds 1 through a carry into an additional lowest bit, which takes no adder of its own.
            rounded.eq(((half & (kept[0] | below)) + Cat(1, kept))[1:]),
        ]
        m.d.sync += [
            mantissa.eq(Cat(rounded[: MANTISSA - 1], rounded[MANTISSA - 1 :].any())),
            exponent.eq(e + (carry | rounded[-1])),
        ]
        return mantissa, exponent
