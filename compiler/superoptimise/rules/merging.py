"""Convolutions and products of one input become one."""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term, apply

N, C, H, W = OpenSize("n"), OpenSize("c"), OpenSize("h"), OpenSize("w")
O1, O2 = OpenSize("o1"), OpenSize("o2")
KERNEL = OpenSize("kh"), OpenSize("kw")
PADS = tuple(OpenSize(f"pad{i}", 0) for i in range(4))
STRIDES = OneOf("strides", ((1, 1), (2, 2), (1, 2), (2, 1)))
DILATIONS = OneOf("dilations", ((1, 1), (2, 2)))
IMAGE = Leaf("x", (N, C, H, W))
XZ = Leaf("xz", (), True)
Z = Leaf("z", (), True)


def joined(axis: int, *parts: Term) -> Composed:
    """`parts` put together."""
    return apply("concat", *parts, axis=axis)


def part(whole: Term, axis: int, start: object, stop: object) -> Composed:
    """Positions `start` to `stop` of an axis."""
    return apply("slice", whole, axis=axis, start=start, stop=stop)


def constants(number: int, outputs: Dim, weights: tuple[Dim, ...]) -> list[Leaf]:
    """Weights, their zero points, bias and multipliers of the product `number`."""
    rows = [Leaf(f"{name}{number}", (outputs,), True) for name in ("wz", "b", "m")]
    return [Leaf(f"w{number}", weights, True), *rows]


def convolution(x: Term, w: Term, wz: Term, b: Term, m: Term, z: Term = Z, xz: Term = XZ, **other: object) -> Composed:
    """A requantised convolution."""
    given = {"strides": STRIDES, "dilations": DILATIONS, "pads": PADS, "group": 1, **other}
    return apply("requantise", apply("convolve", x, xz, w, wz, b, **given), m, z, axis=1)


def matrices(axis: int, x: Term, w: Term, wz: Term, b: Term, m: Term) -> Composed:
    """A requantised product; axis: the last one of x."""
    return apply("requantise", apply("multiply", x, XZ, w, wz, b), m, Z, axis=axis)


def _merged_convolutions() -> RewriteRule:
    first, second = (constants(i, o, (o, C, *KERNEL)) for i, o in ((1, O1), (2, O2)))
    both = convolution(IMAGE, *(joined(0, a, b) for a, b in zip(first, second)))
    return RewriteRule(
        "merge convolutions",
        "convolutions of one input with the same windows are one whose channels are theirs",
        (convolution(IMAGE, *first), convolution(IMAGE, *second)),
        (part(both, 1, 0, O1), part(both, 1, O1, O1 + O2)),
    )


def _merged_products(rank: int) -> RewriteRule:
    k, rows = OpenSize("k"), tuple(OpenSize(f"d{i}") for i in range(rank - 1))
    x = Leaf("x", (*rows, k))
    first, second = (constants(i, o, (k, o)) for i, o in ((1, O1), (2, O2)))
    pairs = list(zip(first, second))
    both = matrices(rank - 1, x, joined(1, *pairs[0]), *(joined(0, *pair) for pair in pairs[1:]))
    return RewriteRule(
        f"merge products of rank {rank}",
        "products of one input with constants are one whose columns are theirs",
        (matrices(rank - 1, x, *first), matrices(rank - 1, x, *second)),
        (part(both, rank - 1, 0, O1), part(both, rank - 1, O1, O1 + O2)),
    )


MERGING = (_merged_convolutions(), *map(_merged_products, (2, 3, 4)))
