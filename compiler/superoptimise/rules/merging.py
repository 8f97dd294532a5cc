"""Rules that merge convolutions and products of one input; and functions that write terms, which all files of rules
use.
"""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term, apply

N, C, H, W = OpenSize("n"), OpenSize("c"), OpenSize("h"), OpenSize("w")
O1, O2 = OpenSize("o1"), OpenSize("o2")
KERNEL = OpenSize("kh"), OpenSize("kw")
"""Rows and columns of a kernel."""
PADS = tuple(OpenSize(f"pad{i}", 0) for i in range(4))
"""Padding of a convolution: top, left, bottom, right."""
STRIDES = OneOf("strides", ((1, 1), (2, 2), (1, 2), (2, 1)))
DILATIONS = OneOf("dilations", ((1, 1), (2, 2)))
IMAGE = Leaf("x", (N, C, H, W))
"""The operand of most rules of convolutions."""
XZ = Leaf("xz", (), True)
"""Zero point of the operand."""
Z = Leaf("z", (), True)
"""Zero point of the result."""


def concat_of(axis: int, *parts: Term) -> Composed:
    """Write the Concat of `parts` along an axis."""
    return apply("concat", *parts, axis=axis)


def slice_of(x: Term, axis: int, start: object, stop: object) -> Composed:
    """Write the Slice of positions `start` to `stop` of an axis."""
    return apply("slice", x, axis=axis, start=start, stop=stop)


def constants(number: int, outputs: Dim, weights: tuple[Dim, ...]) -> list[Leaf]:
    """Write the constants of product `number`: weights, and for each output a zero point of weights, bias and
    multiplier.
    """
    rows = [Leaf(f"{name}{number}", (outputs,), True) for name in ("wz", "b", "m")]
    return [Leaf(f"w{number}", weights, True), *rows]


def convolution(x: Term, w: Term, wz: Term, b: Term, m: Term, z: Term = Z, xz: Term = XZ, **other: object) -> Composed:
    """Write a requantised convolution. other: attributes that replace the open ones."""
    attributes = {"strides": STRIDES, "dilations": DILATIONS, "pads": PADS, "group": 1, **other}
    return apply("requantise", apply("convolve", x, xz, w, wz, b, **attributes), m, z, axis=1)


def product_of(axis: int, x: Term, w: Term, wz: Term, b: Term, m: Term) -> Composed:
    """Write a requantised matrix product. axis: the last one of x."""
    return apply("requantise", apply("multiply", x, XZ, w, wz, b), m, Z, axis=axis)


def _merge_convolutions() -> RewriteRule:
    """The rule that merges two convolutions of one input: weights are joined, and the result is cut."""
    first, second = (constants(i, o, (o, C, *KERNEL)) for i, o in ((1, O1), (2, O2)))
    merged = convolution(IMAGE, *(concat_of(0, a, b) for a, b in zip(first, second)))
    return RewriteRule(
        "merge convolutions",
        "convolutions of one input with the same windows are one whose channels are theirs",
        (convolution(IMAGE, *first), convolution(IMAGE, *second)),
        (slice_of(merged, 1, 0, O1), slice_of(merged, 1, O1, O1 + O2)),
    )


def _merge_products(rank: int) -> RewriteRule:
    """The rule that merges two products of one input of this rank."""
    k, rows = OpenSize("k"), tuple(OpenSize(f"d{i}") for i in range(rank - 1))
    x = Leaf("x", (*rows, k))
    first, second = (constants(i, o, (k, o)) for i, o in ((1, O1), (2, O2)))
    pairs = list(zip(first, second))
    merged = product_of(rank - 1, x, concat_of(1, *pairs[0]), *(concat_of(0, *pair) for pair in pairs[1:]))
    return RewriteRule(
        f"merge products of rank {rank}",
        "products of one input with constants are one whose columns are theirs",
        (product_of(rank - 1, x, *first), product_of(rank - 1, x, *second)),
        (slice_of(merged, rank - 1, 0, O1), slice_of(merged, rank - 1, O1, O1 + O2)),
    )


MERGING = (_merge_convolutions(), *map(_merge_products, (2, 3, 4)))
