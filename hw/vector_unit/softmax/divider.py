"""Pipelined divider of positive float32, with quotients rounded to integers."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import DIVIDE_STAGES, QUOTIENT_BITS
from celosia.hw.vector_unit.softmax.adder import EXPONENT, MANTISSA, pair_layout

TO_DIVISION = 3
"""Stages before the first step of the division, which is the first stage that needs the divisor's mantissa."""
_REST = MANTISSA + 1
"""Width of a remainder, with its sign."""
_WHOLE = QUOTIENT_BITS - 1
"""Integer bits of a quotient."""


class PairDivider(wiring.Component):
    """Divide a share by a divisor as float32, round to an integer, add the zero point and clip.

    Both the quotient and the integer are rounded to nearest, ties to even. A quotient of 2^8 or more, by its exponents,
    becomes the upper limit, whatever the zero point.

    Members
    -------
    take : In(1)            Stage 0: a share comes. Without one, the registers of stage 0 do not change.
    share : In(pair)        Stage 0: the dividend.
    e : In                  Stage 0: the divisor's exponent.
    beyond : In(1)          Stage 0: the share counts as 0, as its element lies behind the end of its row.
    divisors : In           The divisor's mantissa for each step of the division, the first step first.
    zero_point, low, high : In      Constant while a division is under way; `low` is at most `high`.
    result : Out(8)         The result, DIVIDE_STAGES cycles after `take`.
    """

    def __init__(self) -> None:
        super().__init__({
            "take": In(1), "share": In(pair_layout), "e": In(EXPONENT), "beyond": In(1),
            "divisors": In(MANTISSA).array(QUOTIENT_BITS), "zero_point": In(signed(8)), "low": In(signed(8)),
            "high": In(signed(8)), "result": Out(signed(8)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        word, by, nothing, large = self._compare(m)
        rests, words = ([first] for first in self._align(m, word, by))
        for step in range(QUOTIENT_BITS):
            rest, digits = self._step(m, step, rests[-1], words[-1])
            rests.append(rest)
            words.append(digits)
        slack = self._compute_slack(m, ~Cat(rests[-2][-1], words[-2][: _WHOLE - 1]))
        for stage in range(1, TO_DIVISION + QUOTIENT_BITS):
            flags, (nothing, large) = (nothing, large), (Reg(name=f"{name}{stage}") for name in ("nothing", "large"))
            m.d.sync += Cat(nothing, large).eq(Cat(flags))
        self._round(m, *self._detect_tie(m, rest, digits, slack, nothing, large))
        assert DIVIDE_STAGES == TO_DIVISION + QUOTIENT_BITS + 3
        probes(self, rests=rests, words=words, rest=rest, digits=digits, nothing=nothing, large=large)
        return m

    def _compare(self, m: Module) -> tuple[Signal, ...]:
        """Build stage 0: compare the exponents of share and divisor.

        Returns the share's mantissa, by how much its exponent is larger (used from -1 to 8), whether the quotient
        rounds to 0, and whether it is too large for an int8.
        """
        ahead = Signal(signed(EXPONENT + 1))
        word = Reg(MANTISSA)
        by = Reg(4)
        nothing, large = Reg(name="nothing"), Reg(name="large")
        m.d.comb += ahead.eq(self.share.e - self.e)
        with m.If(self.take):
            m.d.sync += [
                word.eq(self.share.m),
                by.eq(ahead),
                nothing.eq((ahead[-1] & ~ahead[:-1].all()) | self.beyond),
                large.eq(~ahead[-1] & (ahead[4:].any() | (ahead[3] & ahead[:3].any()))),
            ]
        return word, by, nothing, large

    def _align(self, m: Module, word: Signal, by: Signal) -> tuple[Value, Value]:
        """Build stages 1 and 2: shift the mantissa `word` by the difference `by` of the exponents, -1 to 8.

        A division of integers then gives twice the quotient. Returns the dividend's upper bits, which are the first
        remainder, and its other bits.
        """
        some = Reg(MANTISSA + 3)
        by_fours = Reg(2)
        dividend = Reg(MANTISSA + QUOTIENT_BITS)
        m.d.sync += [some.eq(word << by[:2]), by_fours.eq(by[2:])]
        with m.Switch(by_fours):
            for number, shift in ((3, -3), (0, 1), (1, 5), (2, 9)):
                with m.Case(number):
                    m.d.sync += dividend.eq(some << shift if shift > 0 else some >> -shift)
        return Cat(dividend[QUOTIENT_BITS:], 0), dividend[:QUOTIENT_BITS]

    def _step(self, m: Module, step: int, rest: Value, digits: Value) -> tuple[Signal, Signal]:
        """Build one step of a non-restoring division. Returns the next remainder and the next `digits`.

        The remainder `rest` is doubled, and the divisor is subtracted, or added if the remainder is negative. digits:
        the bits of the dividend that are left, above the bits of the quotient so far, which are inverted.
        """
        negative, divisor = rest[-1], self.divisors[step]
        total = Signal(_REST + 1, name=f"total{step}")
        next_rest, next_digits = Reg(_REST, name=f"rest{step}"), Reg(QUOTIENT_BITS, name=f"digits{step}")
        twice, signed_divisor = Cat(digits[-1], rest[:-1]), Cat(divisor, 0) ^ (~negative).replicate(_REST)
        if step == 0:
            m.d.comb += total[1:].eq(twice - divisor)
        else:  # the lowest bits carry the one that an inverted divisor lacks
            m.d.comb += total.eq(Cat(1, twice) + Cat(~negative, signed_divisor))
        m.d.sync += [next_rest.eq(total[1:]), next_digits.eq(Cat(negative, digits[:-1]))]
        return next_rest, next_digits

    def _compute_slack(self, m: Module, whole: Value) -> Signal:
        """Return half a unit in the last place of the quotient as a float32, in units of the last remainder.

        That is the number in the upper bits of the divisor, as many bits as `whole`, the integer part, has up to its
        leading one.
        """
        divisor = self.divisors[QUOTIENT_BITS - 1]
        slack = Reg(_WHOLE)
        parts = []
        for bits in range(1, _WHOLE + 1):
            leading = whole[bits - 1] & ~whole[bits:].any()
            parts.append(Mux(leading, divisor[MANTISSA - bits :], 0))
        either: Value = parts[0]
        for part in parts[1:]:
            either |= part
        m.d.sync += slack.eq(either)
        return slack

    def _detect_tie(
        self, m: Module, rest: Signal, digits: Signal, slack: Signal, nothing: Signal, large: Signal
    ) -> tuple[Signal, ...]:
        """Build a stage that detects ties, quotients that float32 rounds to an integer and a half.

        They are those whose remainder `rest` is at most `slack`. nothing, large: the quotient rounds to 0, or is too
        large. Returns whether it is a tie, whether the fraction is a half or more, and the integer part, inverted.
        """
        up = Signal(_REST)
        total = Signal(_WHOLE + 2)
        positive = ~rest[-1]
        tie = Reg()
        half = Reg()
        whole = Reg(_WHOLE)
        m.d.comb += [
            up.eq(rest ^ positive.replicate(_REST)),
            total.eq(Cat(1, slack) + Cat(positive, up[:_WHOLE])),
        ]
        m.d.sync += [tie.eq(up[_WHOLE:].all() & total[-1]), half.eq(positive), whole.eq(digits)]
        with m.If(large):
            m.d.sync += [tie.eq(0), half.eq(0), whole.eq(0)]
        with m.If(nothing):
            m.d.sync += [tie.eq(0), half.eq(0), whole.eq(-1)]
        return tie, half, whole

    def _round(self, m: Module, tie: Signal, half: Signal, whole: Signal) -> None:
        """Build the last two stages: round the quotient to the nearest integer, add the zero point, and clip."""
        moved = Reg(signed(_WHOLE + 2))
        result = Reg(signed(8))
        total = Signal(_WHOLE + 3)
        # 2^9 minus the whole part, with the zero point.
        negative, no_more = self.zero_point[-1], ~Mux(tie, ~whole[0], half)
        upper = Cat(self.zero_point, negative, ~negative, 0)
        m.d.comb += [total.eq(Cat(0, upper) - Cat(no_more, whole)), self.result.eq(result)]
        m.d.sync += [
            moved.eq(total[1:]),
            result.eq(Mux(moved > self.high, self.high, Mux(moved < self.low, self.low, moved))),
        ]
