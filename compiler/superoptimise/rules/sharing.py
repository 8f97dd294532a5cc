"""Rules that share what is computed twice, and sums of constants."""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.merging import (
    IMAGE,
    KERNEL,
    O1,
    PADS,
    STRIDES,
    C,
    constants,
    convolution,
    matrices,
)
from celosia.compiler.superoptimise.rules.moving import F, mapped
from celosia.compiler.superoptimise.rules.parts import RANKS, P, Q
from celosia.compiler.superoptimise.sizes import OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Leaf, Term, apply


def _twice(name: str, term: Term) -> RewriteRule:
    says = "what is computed twice is computed once"
    return RewriteRule(f"{name}, once", says, (term, term), (term, term), tidy=True)


def _of_rank(rank: int) -> list[RewriteRule]:
    sizes = tuple(OpenSize(f"d{axis}") for axis in range(rank))
    x, y, number = Leaf("x", sizes), Leaf("y", sizes), Leaf("c", (), True)
    axis = OneOf("axis", tuple(range(rank)))
    perm = OneOf("perm", ((0, 2, 1),) if rank == 3 else ((1, 0),) if rank == 2 else ((0, 2, 1, 3), (0, 1, 3, 2)))
    more = Leaf("d", (), True)
    wide = Leaf("cs", sizes, True), Leaf("ds", sizes, True)
    sums = "constants that are added one after the other are added once"
    return [
        _twice(f"function of rank {rank}", mapped(F, x)),
        _twice(f"function of two of rank {rank}", mapped(F, x, y)),
        _twice(f"slice of rank {rank}", apply("slice", x, axis=axis, start=P, stop=Q)),
        _twice(f"transpose of rank {rank}", apply("transpose", x, perm=perm)),
        RewriteRule(
            f"sums of numbers of rank {rank}", sums,
            (apply("plus", apply("plus", x, number), more),), (apply("plus", x, apply("plus", number, more)),),
            tidy=True,
        ),
        RewriteRule(
            f"sums of constants of rank {rank}", sums,
            (apply("plus", apply("plus", x, wide[0]), wide[1]),), (apply("plus", x, apply("plus", *wide)),), tidy=True,
        ),
    ]  # fmt: skip


def _products() -> list[RewriteRule]:
    rows = OpenSize("rows")
    k = OpenSize("k")
    x = Leaf("x", (rows, k))
    windows = {"kernel": KERNEL, "pads": PADS, "strides": STRIDES, "dilations": (1, 1)}
    return [
        _twice("largest of a window", apply("largest", IMAGE, **windows)),
        _twice("convolution", convolution(IMAGE, *constants(1, O1, (O1, C, *KERNEL)))),
        _twice("product", matrices(1, x, *constants(1, O1, (k, O1)))),
    ]


SHARING = (*_products(), *(rule for rank in RANKS for rule in _of_rank(rank)))
