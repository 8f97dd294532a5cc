"""Rules of floats on the CPU that keep every sum, and so every bit: convolutions merged or split by outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import celosia.compiler.superoptimise.floats  # noqa: F401  adds the operators on floats
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.merging import IMAGE, KERNEL, PADS, C, H, W, concat_of, slice_of
from celosia.compiler.superoptimise.rules.moving import F, function_of
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize, SizeOf
from celosia.compiler.superoptimise.terms import Leaf, Term, apply

STRIDES = OneOf("down", (1, 2)), OneOf("across", (1, 2))
"""Strides of rows and columns."""
RATE = OneOf("rate", (1, 2))
"""Dilation of rows and columns."""
SPLITS = (2, 3, 4, 5)
"""Numbers of equal parts into which a convolution's outputs are split."""
VECTOR_CHANNELS = 16
"""Parts have a multiple of so many channels: fewer do not fill a vector of the widest processors."""
O1, O2 = OpenSize("o1", 2), OpenSize("o2", 2)
PIXELS = tuple(
    (size + (PADS[side] + PADS[side + 2]) - RATE * (KERNEL[side] - 1) - 1) // STRIDES[side] + 1
    for side, size in enumerate((H, W))
)
"""Rows and columns of a convolution's result."""
SEVERAL = SizeOf("<=", 3, PIXELS[0] + PIXELS[1])
"""Condition that a result has more than one pixel, without which onnxruntime adds in another order
(superoptimise/floats.py).
"""
Function = Callable[[Term], Term]
FUNCTIONS_BEHIND: dict[str, Function] = {" with the function behind it": lambda y: function_of(F, y), "": lambda y: y}
"""The function behind a convolution that a rule includes, by its addition to the rule's name. Rules with more operators
come first, as the search's time may be short.
"""


def convolved(weights: list[Term]) -> Term:
    """Write a float convolution of IMAGE. weights: w, and b where it has a bias."""
    attributes = {"strides": STRIDES, "dilations": (RATE, RATE), "pads": PADS, "group": 1}
    return apply("float_convolve", IMAGE, *weights, **attributes)


def _weights(number: object, outputs: Dim, biased: bool) -> list[Leaf]:
    """Write the constants of convolution `number` ("" for a rule's only one): weights and, if `biased`, a bias."""
    w = Leaf(f"w{number}", (outputs, C, *KERNEL), True)
    return [w, Leaf(f"b{number}", (outputs,), True)] if biased else [w]


def _merge(biased: bool, behind: str) -> RewriteRule:
    """The rule that merges two float convolutions of one input."""
    f, first, second = FUNCTIONS_BEHIND[behind], _weights(1, O1, biased), _weights(2, O2, biased)
    merged = f(convolved([concat_of(0, a, b) for a, b in zip(first, second)]))
    return RewriteRule(
        f"merge float convolutions{behind}{', biased' * biased}",
        "float convolutions of one input with the same windows are one whose channels are theirs",
        (f(convolved([*first])), f(convolved([*second]))),
        (slice_of(merged, 1, 0, O1), slice_of(merged, 1, O1, O1 + O2)),
        (SEVERAL,),
    )


def _split(number: int, biased: bool, behind: str) -> RewriteRule:
    """The rule that splits a float convolution into `number` ones, each with a part of the outputs."""
    f, outputs = FUNCTIONS_BEHIND[behind], VECTOR_CHANNELS * OpenSize("q")
    weights = _weights("", number * outputs, biased)
    convolutions = [
        f(convolved([slice_of(constant, 0, i * outputs, (i + 1) * outputs) for constant in weights]))
        for i in range(number)
    ]
    return RewriteRule(
        f"split a float convolution in {number}{behind}{', biased' * biased}",
        "a float convolution is several, each of a part of its channels",
        (f(convolved([*weights])),),
        (reduce(lambda a, b: concat_of(1, a, b), convolutions),),
        (SEVERAL,),
    )


def _merge_products(rank: int) -> RewriteRule:
    """The rule that merges two float products of one input of this rank."""
    k, rows = OpenSize("k"), tuple(OpenSize(f"d{i}") for i in range(rank - 1))
    x, first, second = Leaf("x", (*rows, k)), Leaf("w1", (k, O1), True), Leaf("w2", (k, O2), True)
    merged = apply("float_multiply", x, concat_of(1, first, second))
    return RewriteRule(
        f"merge float products of rank {rank}",
        "float products of one input with constants are one whose columns are theirs",
        (apply("float_multiply", x, first), apply("float_multiply", x, second)),
        (slice_of(merged, rank - 1, 0, O1), slice_of(merged, rank - 1, O1, O1 + O2)),
    )


FLOATS = (
    *(_split(number, biased, behind) for behind in FUNCTIONS_BEHIND for number in SPLITS for biased in (True, False)),
    *(_merge(biased, behind) for behind in FUNCTIONS_BEHIND for biased in (True, False)),
    *map(_merge_products, (2, 3, 4)),
)
