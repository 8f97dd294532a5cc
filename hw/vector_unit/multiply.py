"""Multiplication in look-up tables, for products that would take too many DSP blocks."""

from __future__ import annotations

from amaranth import Cat, Const, Mux, Value

LOW_BITS = 7
"""Low bits of a wide factor that are multiplied in look-up tables, so that the others fit a DSP48E1 of 25 x 18 bits."""


def logic_product(a: Value, b: Value) -> Value:
    """Return a * b from adders alone, by radix-4 Booth recoding, so that no tool puts it into a DSP block.

    b: unsigned and of odd width, so that its last digit is not negative, or signed and of even width.
    """
    a = a if a.shape().signed else Cat(a, 0).as_signed()
    bits = Cat(0, b, 0)
    # A term is (weight, value): value * 2^weight is `a` times a digit from -2 to 2. A negative one is inverted here;
    # the 1 that completes its negation is the carry of the next term.
    terms: list[tuple[int, Value]] = []
    carry: Value | None = None
    for i in range(0, len(b), 2):
        below, middle, negative = bits[i], bits[i + 1], bits[i + 2]
        twice = (below == middle) & (middle != negative)
        multiple = Mux(twice, a << 1, Mux(below != middle, a, 0))
        row = (multiple ^ negative.replicate(len(a) + 1))[: len(a) + 1].as_signed()
        terms.append((0, row) if carry is None else (i - 2, Cat(carry, Const(0, 1), row).as_signed()))
        carry = negative
    if b.shape().signed:
        terms.append((len(b) - 2, Cat(carry, 0).as_signed()))
    while len(terms) > 1:
        joined = [_join(*pair) for pair in zip(terms[::2], terms[1::2])]
        terms = joined + terms[len(terms) & ~1 :]
    return terms[0][1]


def _join(low: tuple[int, Value], high: tuple[int, Value]) -> tuple[int, Value]:
    """Return the sum of two terms (weight, value). The bits of `low` below the weight of `high` need no adder."""
    (weight, a), shift = low, high[0] - low[0]
    upper = a[shift:].as_signed() + high[1]
    return weight, Cat(a[:shift], upper).as_signed()
