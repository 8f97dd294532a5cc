"""Rules of floats: those that leave every sum as it is, and so every bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import celosia.compiler.superoptimise.floats  # noqa: F401  the operators
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.merging import IMAGE, KERNEL, PADS, C, H, W, joined, part
from celosia.compiler.superoptimise.rules.moving import F, mapped
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize, SizeOf
from celosia.compiler.superoptimise.terms import Leaf, Term, apply

STRIDES = OneOf("down", (1, 2)), OneOf("across", (1, 2))
RATE = OneOf("rate", (1, 2))
SPLITS = (2, 3, 4, 5)
"""Into how many parts of the same size outputs are split."""
VECTOR = 16
"""Parts have a multiple of so many channels: what is less fills no vector of the widest processors."""
O1, O2 = OpenSize("o1", 2), OpenSize("o2", 2)
PIXELS = tuple(
    (size + (PADS[side] + PADS[side + 2]) - RATE * (KERNEL[side] - 1) - 1) // STRIDES[side] + 1
    for side, size in enumerate((H, W))
)
"""Rows and columns of a result."""
SEVERAL = SizeOf("<=", 3, PIXELS[0] + PIXELS[1])
"""Condition that a result has more than one pixel."""
Function = Callable[[Term], Term]
BEHIND: dict[str, Function] = {" with the function behind it": lambda y: mapped(F, y), "": lambda y: y}
"""Functions behind a convolution. Rules that include more operators come first, as time may be short."""


def convolved(weights: list[Term]) -> Term:
    """A float convolution of IMAGE; weights: w, and b where it has one."""
    given = {"strides": STRIDES, "dilations": (RATE, RATE), "pads": PADS, "group": 1}
    return apply("float_convolve", IMAGE, *weights, **given)


def _weights(number: object, outputs: Dim, biased: bool) -> list[Leaf]:
    w = Leaf(f"w{number}", (outputs, C, *KERNEL), True)
    return [w, Leaf(f"b{number}", (outputs,), True)] if biased else [w]


def _merged(biased: bool, behind: str) -> RewriteRule:
    f, first, second = BEHIND[behind], _weights(1, O1, biased), _weights(2, O2, biased)
    both = f(convolved([joined(0, a, b) for a, b in zip(first, second)]))
    return RewriteRule(
        f"merge float convolutions{behind}{', biased' * biased}",
        "float convolutions of one input with the same windows are one whose channels are theirs",
        (f(convolved([*first])), f(convolved([*second]))),
        (part(both, 1, 0, O1), part(both, 1, O1, O1 + O2)),
        (SEVERAL,),
    )


def _split(number: int, biased: bool, behind: str) -> RewriteRule:
    f, one = BEHIND[behind], VECTOR * OpenSize("q")
    whole = _weights("", number * one, biased)
    parts = [f(convolved([part(each, 0, i * one, (i + 1) * one) for each in whole])) for i in range(number)]
    return RewriteRule(
        f"split a float convolution in {number}{behind}{', biased' * biased}",
        "a float convolution is several, each of a part of its channels",
        (f(convolved([*whole])),),
        (reduce(lambda a, b: joined(1, a, b), parts),),
        (SEVERAL,),
    )


def _products(rank: int) -> RewriteRule:
    k, rows = OpenSize("k"), tuple(OpenSize(f"d{i}") for i in range(rank - 1))
    x, first, second = Leaf("x", (*rows, k)), Leaf("w1", (k, O1), True), Leaf("w2", (k, O2), True)
    both = apply("float_multiply", x, joined(1, first, second))
    return RewriteRule(
        f"merge float products of rank {rank}",
        "float products of one input with constants are one whose columns are theirs",
        (apply("float_multiply", x, first), apply("float_multiply", x, second)),
        (part(both, rank - 1, 0, O1), part(both, rank - 1, O1, O1 + O2)),
    )


FLOATS = (
    *(_split(number, biased, behind) for behind in BEHIND for number in SPLITS for biased in (True, False)),
    *(_merged(biased, behind) for behind in BEHIND for biased in (True, False)),
    *map(_products, (2, 3, 4)),
)
