"""Rules that compute once what is computed twice, and that add constants of sums up. All of them tidy up."""

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
    product_of,
)
from celosia.compiler.superoptimise.rules.moving import F, function_of
from celosia.compiler.superoptimise.rules.parts import RANKS, P, Q
from celosia.compiler.superoptimise.sizes import OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Leaf, Term, apply


def _share(name: str, term: Term) -> RewriteRule:
    """The rule that shares the result of `term`: both sides have it twice, and rewriting builds equal terms once."""
    says = "what is computed twice is computed once"
    return RewriteRule(f"{name}, once", says, (term, term), (term, term), tidy=True)


def _rules_of_rank(rank: int) -> list[RewriteRule]:
    """The rules for tensors of this rank."""
    sizes = tuple(OpenSize(f"d{axis}") for axis in range(rank))
    x, y, number = Leaf("x", sizes), Leaf("y", sizes), Leaf("c", (), True)
    axis = OneOf("axis", tuple(range(rank)))
    perm = OneOf("perm", ((0, 2, 1),) if rank == 3 else ((1, 0),) if rank == 2 else ((0, 2, 1, 3), (0, 1, 3, 2)))
    second_number = Leaf("d", (), True)
    tensors = Leaf("cs", sizes, True), Leaf("ds", sizes, True)
    sums = "constants that are added one after the other are added once"
    return [
        _share(f"function of rank {rank}", function_of(F, x)),
        _share(f"function of two of rank {rank}", function_of(F, x, y)),
        _share(f"slice of rank {rank}", apply("slice", x, axis=axis, start=P, stop=Q)),
        _share(f"transpose of rank {rank}", apply("transpose", x, perm=perm)),
        RewriteRule(
            f"sums of numbers of rank {rank}", sums,
            (apply("plus", apply("plus", x, number), second_number),),
            (apply("plus", x, apply("plus", number, second_number)),),
            tidy=True,
        ),
        RewriteRule(
            f"sums of constants of rank {rank}", sums,
            (apply("plus", apply("plus", x, tensors[0]), tensors[1]),), (apply("plus", x, apply("plus", *tensors)),),
            tidy=True,
        ),
    ]  # fmt: skip


def _share_products() -> list[RewriteRule]:
    """The rules that share MaxPools, convolutions and matrix products."""
    rows = OpenSize("rows")
    k = OpenSize("k")
    x = Leaf("x", (rows, k))
    windows = {"kernel": KERNEL, "pads": PADS, "strides": STRIDES, "dilations": (1, 1)}
    return [
        _share("largest of a window", apply("largest", IMAGE, **windows)),
        _share("convolution", convolution(IMAGE, *constants(1, O1, (O1, C, *KERNEL)))),
        _share("product", product_of(1, x, *constants(1, O1, (k, O1)))),
    ]


SHARING = (*_share_products(), *(rule for rank in RANKS for rule in _rules_of_rank(rank)))
