"""Mean and variance of a row of a norm, from its sums."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import EPSILON_SHIFT, MAX_NORM_ELEMENTS, MIN_NORM_ROW_CYCLES
from celosia.hw.vector_unit.norm.moments import SQUARES_BITS, SUM_BITS, VALUE_BITS

COUNT_BITS = MAX_NORM_ELEMENTS.bit_length()
"""Width of the number of values in a row."""
REST_BITS = COUNT_BITS
"""Width of sum - count * mean: at most half of the number of values, and a sign."""
EPSILON_BITS = 47
"""Width of epsilon, the constant that is added to the variance: `scale_c` without its sign."""
WORD_BITS = 32
"""Number of highest bits of the variance that the root uses."""
PLACES_BITS = 6
"""Width of the number of bit pairs by which the variance is shifted up."""
_VARIANCE_BITS = 60
"""Width of count * squares - sum^2 + epsilon, with EPSILON_SHIFT fraction bits."""
_TO_VARIANCE, _TO_MEAN = SUM_BITS + 1, 2
"""Cycles after which count * squares - sum^2 is complete, and after which the division for the mean begins."""


class NormVariance(wiring.Component):
    """Compute count * squares - sum^2 + epsilon, and sum / count; one bit of factors and quotient a cycle.

    Members
    -------
    take : In(1)                A row comes; at least MIN_NORM_ROW_CYCLES cycles after the previous one.
    sum, squares : In           Sums of the row; sum is 0 if the mean is not subtracted (RMSNorm).
    count, epsilon : In         Number of values in a row, and the constant that is added; constant.
    done : Out(1)               Pulse: the results are valid, MIN_NORM_ROW_CYCLES cycles after `take`.
    mean : Out(signed)          The mean, rounded to nearest.
    rest : Out(signed)          sum - count * mean.
    word : Out(WORD_BITS)       The highest bits of the variance, which is shifted up by pairs of bits until one is 1.
    places : Out                Number of these pairs.
    """

    def __init__(self) -> None:
        super().__init__({
            "take": In(1), "sum": In(signed(SUM_BITS)), "squares": In(SQUARES_BITS), "count": In(COUNT_BITS),
            "epsilon": In(EPSILON_BITS), "done": Out(1), "mean": Out(signed(VALUE_BITS)),
            "rest": Out(signed(REST_BITS)), "word": Out(WORD_BITS), "places": Out(PLACES_BITS),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        step = Signal(range(MIN_NORM_ROW_CYCLES + 1))
        m.d.comb += self.done.eq(step == MIN_NORM_ROW_CYCLES)
        with m.If(self.take):
            m.d.sync += step.eq(1)
        with m.Elif(self.done):
            m.d.sync += step.eq(0)
        with m.Else():
            m.d.sync += step.eq(step + (step != 0))
        self._divide(m, step)
        self._normalise(m, step, self._compute_products(m, step))
        probes(self, step=step)
        return m

    def _compute_products(self, m: Module, step: Signal) -> Signal:
        """Compute count * squares - sum^2 bit by bit, from the highest bits of count and sum on.

        step: number of the cycle since `take`.
        """
        total = Reg(signed(_VARIANCE_BITS - EPSILON_SHIFT))
        magnitude = Reg(SUM_BITS)
        squares = Reg(SQUARES_BITS)
        of_sum = Reg(SUM_BITS)
        of_count = Reg(SUM_BITS)
        with m.If(self.take):
            size = Mux(self.sum[-1], -self.sum, self.sum)
            m.d.sync += [
                magnitude.eq(size), squares.eq(self.squares), of_sum.eq(size), of_count.eq(self.count), total.eq(0),
            ]  # fmt: skip
        with m.Elif(step < _TO_VARIANCE):
            m.d.sync += [
                of_sum.eq(of_sum << 1),
                of_count.eq(of_count << 1),
                total.eq((total << 1) + Mux(of_count[-1], squares, 0) - Mux(of_sum[-1], magnitude, 0)),
            ]
        return total

    def _divide(self, m: Module, step: Signal) -> None:
        """Divide 2 * sum + count by 2 * count, rounded down, one quotient bit a cycle: the mean, rounded to nearest.

        The divisor times 2^8 is first added to the dividend, which makes it positive; inverting the top bit of the
        quotient subtracts 2^8 again. step: number of the cycle since `take`.
        """
        rest = Reg(SUM_BITS + 3)
        divisor = Reg(COUNT_BITS + VALUE_BITS)
        quotient = Reg(VALUE_BITS)
        less = Signal(signed(len(rest) + 1))
        m.d.comb += [
            less.eq(rest - divisor), self.mean.eq(Cat(quotient[:-1], ~quotient[-1])),
            self.rest.eq((rest - self.count) >> 1),
        ]  # fmt: skip
        with m.If(self.take):
            m.d.sync += [rest.eq((self.sum << 1) + self.count), divisor.eq(self.count << VALUE_BITS)]
        with m.Elif(step < _TO_MEAN):
            m.d.sync += rest.eq(rest + divisor)
        with m.Elif(step < _TO_MEAN + VALUE_BITS):
            m.d.sync += [divisor.eq(divisor >> 1), quotient.eq(Cat(~less[-1], quotient[:-1]))]
            with m.If(~less[-1]):
                m.d.sync += rest.eq(less)
        probes(self, rest=rest, divisor=divisor, quotient=quotient, less=less)

    def _normalise(self, m: Module, step: Signal, total: Signal) -> None:
        """Add epsilon, and normalise the variance: shift it up by 8 bits a cycle while these are 0, then by 2 bits.

        `places` counts pairs of bits, as the root needs an even shift. step: number of the cycle since `take`. total:
        count * squares - sum^2.
        """
        value = Reg(_VARIANCE_BITS)
        m.d.comb += self.word.eq(value[-WORD_BITS:])
        with m.If(step == _TO_VARIANCE):
            above = total.as_unsigned() + self.epsilon[EPSILON_SHIFT:]
            m.d.sync += [value.eq(Cat(self.epsilon[:EPSILON_SHIFT], above[: len(total)])), self.places.eq(0)]
        with m.Elif(step > _TO_VARIANCE):
            with m.If(~value[-8:].any()):
                m.d.sync += [value.eq(value << 8), self.places.eq(self.places + 4)]
            with m.Elif(~value[-2:].any()):
                m.d.sync += [value.eq(value << 2), self.places.eq(self.places + 1)]
