"""Prove that the adder of softmax is float32's, and that its divider is float32's division with rounding to integers.

A division of 24 bits is too hard for a solver at once. One property is about the steps: each keeps the remainder
between the divisor and its negative, and loses nothing, so the last step leaves the remainder of the division. The
other one is about rounding, for any remainder and any quotient that is known up to one bit behind the point.
"""

from __future__ import annotations

from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value, signed

from celosia.hw.spec.pipeline import DIVIDE_STAGES, QUOTIENT_BITS, SOFTMAX_SUMS
from celosia.hw.vector_unit.softmax.adder import MANTISSA, PairAdder, pair_layout
from celosia.hw.vector_unit.softmax.divider import PairDivider
from proofs.declare import Method, Mutant, prove
from proofs.harness import Harness, implies
from proofs.requantiser import half_even

BEHIND = 32
"""Number of bits behind the mantissa of the larger float, enough for the right rounding."""


def float_sum(m: Module, a: Any, b: Any) -> Value:
    """Return the bits of a + b, rounded to nearest with ties to even from the exact sum.

    A number far below the other one counts as very small.
    """
    large, small, more = Signal(pair_layout), Signal(pair_layout), Signal(len(a.e))
    exact = Signal(MANTISSA + BEHIND + 1)
    m.d.comb += [
        large.eq(Mux(a.e >= b.e, a, b)),
        small.eq(Mux(a.e >= b.e, b, a)),
        more.eq(large.e - small.e),
        exact.eq((large.m << BEHIND) + Mux(more < BEHIND, ((small.m << BEHIND) >> more[:5]), small.m.any())),
    ]
    carry = exact[-1]
    nearest = half_even(m, exact, BEHIND + carry, 0, "sum")
    over = nearest[MANTISSA]
    e = Signal(len(large.e))
    m.d.comb += e.eq(large.e + carry + over)
    return Cat(nearest[: MANTISSA - 1], nearest[MANTISSA - 1] | over, e)


def adder() -> Harness:
    """A sum begins with a; SOFTMAX_SUMS steps later, the adder adds b or nothing to it."""
    h = Harness()
    m, dut = h.m, PairAdder()
    h.add(dut)
    a, b, nothing = h.constant(pair_layout, "a"), h.constant(pair_layout, "b"), h.constant(1, "nothing")
    cycle = Signal(5)
    m.d.sync += cycle.eq(cycle + 1)
    h.assume(implies(cycle == 0, dut.first & ~dut.nothing & (Value.cast(dut.addend) == Value.cast(a))))
    h.assume(implies(cycle == SOFTMAX_SUMS, ~dut.first & (dut.nothing == nothing)))
    h.assume(implies(cycle == SOFTMAX_SUMS, Value.cast(dut.addend) == Value.cast(b)))
    total = Value.cast(dut.total)
    h.ensure(implies(cycle == SOFTMAX_SUMS, total == Value.cast(a)), "begins")
    h.ensure(implies((cycle == 2 * SOFTMAX_SUMS) & nothing, total == Value.cast(a)), "stays")
    h.ensure(implies((cycle == 2 * SOFTMAX_SUMS) & ~nothing, total == float_sum(m, a, b)), "sum")
    return h


def between(rest: Value, divisor: Value) -> Value:
    """Return whether the remainder is in the range of a division that adds and subtracts."""
    return (rest.as_signed() < divisor) & (rest.as_signed() >= -divisor)


def steps() -> Harness:
    """Each step makes a remainder of twice the remainder plus a bit of the dividend, minus or plus the divisor.

    The sign of the remainder is the bit of the quotient, which is passed on inverted.
    """
    h = Harness()
    dut = PairDivider()
    inside = h.add(dut)
    for step in range(QUOTIENT_BITS):
        rest, word, divisor = inside[f"rests.{step}"], inside[f"words.{step}"], dut.divisors[step]
        twice = Cat(word[-1], rest).as_signed()
        exact = Signal(signed(len(rest) + 2), name=f"exact{step}")
        h.m.d.comb += exact.eq(twice + Mux(rest[-1], divisor, -divisor))
        held = h.register(between(rest, divisor), f"held{step}")
        after, divided = inside[f"rests.{step + 1}"], h.register(divisor, f"divisor{step}")
        h.ensure(implies(held, after.as_signed() == h.register(exact, f"was{step}")), f"exact{step}")
        h.ensure(implies(held, between(after, divided)), f"between{step}")
        moved = h.register(Cat(rest[-1], word[:-1]), f"word{step}")
        h.ensure(implies(held, inside[f"words.{step + 1}"] == moved), f"digits{step}")
    return h


def rounding() -> Harness:
    """The remainder and the quotient, known up to one bit behind the point, give the right integer.

    The fraction of the exact quotient counts as a half if it is within half a unit of the 24th bit of the integer part.
    """
    h = Harness()
    m, dut = h.m, PairDivider()
    inside = h.add(dut, constant=("zero_point", "low", "high"))
    h.assume(dut.low <= dut.high)

    def before(value: Value, cycles: int, name: str) -> Value:
        for cycle in range(cycles):
            value = h.register(value, f"{name}{cycle}")
        return value

    divisor = before(dut.divisors[QUOTIENT_BITS - 1], 4, "divisor")
    rest, digits = before(inside["rest"], 3, "rest").as_signed(), before(inside["digits"], 3, "digits")
    nothing, large = before(inside["nothing"], 3, "nothing"), before(inside["large"], 3, "large")
    whole, half = ~digits[: QUOTIENT_BITS - 1], rest >= 0
    bits, below = Signal(4), Signal(5)
    for bit in range(len(whole)):
        with m.If(whole[bit]):
            m.d.comb += bits.eq(bit + 1)
    away, nearest, moved = Signal(MANTISSA + 2), Signal(QUOTIENT_BITS), Signal(signed(QUOTIENT_BITS + 2))
    m.d.comb += [
        below.eq(MANTISSA - bits),
        away.eq(Mux(half, rest, -rest)),
        nearest.eq(whole + Mux((away << below) <= divisor, whole[0], half)),
        moved.eq(Mux(nothing, 0, Mux(large, (1 << QUOTIENT_BITS - 1) - 1, nearest)) + dut.zero_point),
    ]
    wanted = Mux(moved > dut.high, dut.high, Mux(moved < dut.low, dut.low, moved))
    age = Signal(3)
    m.d.sync += age.eq(age + ~age.all())
    h.ensure(implies((age >= 4) & between(rest, divisor), dut.result == wanted), "result")
    return h


FILE = "vector_unit/softmax/adder.py"
prove(
    "softmax adder equals float32",
    Mutant(FILE, "(half & (kept[0] | below))", "(half & below)"),
    Mutant(FILE, "lost | (carry & total[0])", "lost"),
    Mutant(FILE, "by_16.eq(shift[4])", "by_16.eq(0)"),
    Mutant(FILE, "self.first | (down[-1] & ~self.nothing)", "self.first | down[-1]"),
    method=Method.BOUNDED,
    depth=2 * SOFTMAX_SUMS + 1,
    reach=2 * SOFTMAX_SUMS + 1,
)(adder)
FILE = "vector_unit/softmax/divider.py"
prove(
    "softmax divider steps",
    Mutant(FILE, "Cat(~negative, signed_divisor)", "Cat(0, signed_divisor)"),
    Mutant(FILE, "next_digits.eq(Cat(negative, digits[:-1]))", "next_digits.eq(Cat(~negative, digits[:-1]))"),
    depth=1,
)(steps)
prove(
    "softmax divider rounds as float32",
    Mutant(FILE, "divisor[MANTISSA - bits :]", "divisor[MANTISSA - bits + 1 :]"),
    Mutant(FILE, "Mux(tie, ~whole[0], half)", "half"),
    Mutant(FILE, "up[_WHOLE:].all() & total[-1]", "total[-1]"),
    depth=5,
    reach=DIVIDE_STAGES + 2,
)(rounding)
