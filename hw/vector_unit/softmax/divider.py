"""Quotients of positive float32, rounded to integers."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.pipeline import DIVIDE_STAGES, QUOTIENT_BITS
from celosia.hw.signals import Reg
from celosia.hw.vector_unit.softmax.adder import EXPONENT, MANTISSA, pair_layout

_FIRST = 3
"""Stages in front of the first step of the division."""
_REST = MANTISSA + 1
"""Bits of a remainder, which has a sign."""
_WHOLE = QUOTIENT_BITS - 1
"""Bits of a quotient without what is behind its point."""


class PairDivider(wiring.Component):
    """share / divisor as a float32, that as an integer, each time to the nearest, ties to even; + zero_point, clipped.

    A quotient of 2^8 and more, by its exponents, is one that every zero point brings to the upper limit.

    Members
    -------
    take : In(1)            A share comes: what follows stands still without one.
    share : In(pair), e : In, beyond : In(1)    Stage 0: what is divided, the divisor's exponent, and whether the
                            result is that of 0 instead.
    divisors : In           The divisor's mantissa as each stage of the division sees it, the first step of it first.
    zero_point, low, high   As long as anything is under way; `low` is at most `high`.
    result : Out(8)         DIVIDE_STAGES cycles after `take`.
    """

    def __init__(self) -> None:
        super().__init__({
            "take": In(1), "share": In(pair_layout), "e": In(EXPONENT), "beyond": In(1),
            "divisors": In(MANTISSA).array(QUOTIENT_BITS), "zero_point": In(signed(8)), "low": In(signed(8)),
            "high": In(signed(8)), "result": Out(signed(8)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        word, shift, nothing, large = self._compare(m)
        rest, digits = self._align(m, word, shift)
        for step in range(QUOTIENT_BITS):
            if step == QUOTIENT_BITS - 1:
                slack = self._slack(m, Cat(~rest[-1], digits[: _WHOLE - 1]))
            rest, digits = self._step(m, step, rest, digits)
        tie, whole, half = self._tie(m, rest, digits, slack)
        assert DIVIDE_STAGES == _FIRST + QUOTIENT_BITS + 3
        for stage in range(1, DIVIDE_STAGES - 2):
            flags, (nothing, large) = (nothing, large), (Reg(name=f"{name}{stage}") for name in ("nothing", "large"))
            m.d.sync += Cat(nothing, large).eq(Cat(flags))
        self._result(m, tie, whole, half, nothing, large)
        return m

    def _compare(self, m: Module) -> tuple[Signal, ...]:
        """How far the share's mantissa is to be shifted up, for twice the quotient; nothing: the quotient is 0."""
        ahead, word, shift = Signal(signed(EXPONENT + 2)), Reg(MANTISSA), Reg(range(QUOTIENT_BITS))
        nothing, large = Reg(name="nothing"), Reg(name="large")
        m.d.comb += ahead.eq(self.share.e - self.e + 1)
        with m.If(self.take):
            m.d.sync += [
                word.eq(self.share.m),
                shift.eq(ahead),
                nothing.eq((ahead < 0) | self.beyond),
                large.eq(ahead >= QUOTIENT_BITS),
            ]
        return word, shift, nothing, large

    def _align(self, m: Module, word: Signal, shift: Signal) -> tuple[Value, Value]:
        """The dividend, below the divisor 2^QUOTIENT_BITS times; its upper bits are the first remainder."""
        some, by_fours, dividend = Reg(MANTISSA + 3), Reg(2), Reg(MANTISSA + QUOTIENT_BITS)
        m.d.sync += [some.eq(word << shift[:2]), by_fours.eq(shift[2:]), dividend.eq(some << (by_fours << 2))]
        return Cat(dividend[QUOTIENT_BITS:], 0), dividend[:QUOTIENT_BITS]

    def _step(self, m: Module, step: int, rest: Value, digits: Value) -> tuple[Signal, Signal]:
        """Twice the remainder, less the divisor, or with it where the remainder was negative: a bit of the dividend
        goes, and one of the quotient comes, a step later."""
        negative, divisor = rest[-1], self.divisors[step]
        total = Signal(_REST + 1, name=f"total{step}")
        next_rest, next_digits = Reg(_REST, name=f"rest{step}"), Reg(QUOTIENT_BITS, name=f"digits{step}")
        signed_divisor = Cat(divisor, 0) ^ (~negative).replicate(_REST)
        # The lowest bits carry the one that a negated divisor lacks.
        m.d.comb += total.eq(Cat(1, digits[-1], rest[:-1]) + Cat(~negative, signed_divisor))
        m.d.sync += [next_rest.eq(total[1:]), next_digits.eq(Cat(~negative & (step > 0), digits[:-1]))]
        return next_rest, next_digits

    def _slack(self, m: Module, whole: Value) -> Signal:
        """Half a unit in the quotient's last place, as the last remainder is counted: as many of the divisor's upper
        bits as the quotient has in front of its point."""
        divisor, slack = self.divisors[QUOTIENT_BITS - 1], Reg(_WHOLE)
        parts = []
        for bits in range(1, _WHOLE + 1):
            leading = whole[bits - 1] & ~whole[bits:].any()
            parts.append(Mux(leading, divisor[MANTISSA - bits :], 0))
        either: Value = parts[0]
        for part in parts[1:]:
            either |= part
        m.d.sync += slack.eq(either)
        return slack

    def _tie(self, m: Module, rest: Signal, digits: Signal, slack: Signal) -> tuple[Signal, ...]:
        """Whether float32 have no better way to tell the quotient from an integer and a half: a remainder of one sign
        or the other is at most `slack`."""
        up, tie, whole, half = Signal(_REST), Reg(), Reg(_WHOLE), Reg()
        total = Signal(_WHOLE + 2)
        positive = ~rest[-1]
        m.d.comb += [
            up.eq(rest ^ positive.replicate(_REST)),
            total.eq(Cat(1, up[:_WHOLE]) + Cat(positive, slack)),
        ]
        m.d.sync += [tie.eq(up[_WHOLE:].all() & total[-1]), whole.eq(digits), half.eq(positive)]
        return tie, whole, half

    def _result(self, m: Module, tie: Signal, whole: Signal, half: Signal, nothing: Signal, large: Signal) -> None:
        """To the nearest integer, + zero_point, and clipped."""
        moved, result = Reg(signed(_WHOLE + 2)), Reg(signed(8))
        bits = (whole | large.replicate(_WHOLE)) & (~nothing).replicate(_WHOLE)
        one_more = Mux(tie, whole[0], half) & ~nothing & ~large
        total = Signal(_WHOLE + 3)
        # Of the lowest bits the one is the carry into those above.
        low = Cat(one_more, self.zero_point, self.zero_point[-1].replicate(3))
        m.d.comb += [total.eq(low + Cat(1, bits)), self.result.eq(result)]
        m.d.sync += [
            moved.eq(total[1:]),
            result.eq(Mux(moved > self.high, self.high, Mux(moved < self.low, self.low, moved))),
        ]
