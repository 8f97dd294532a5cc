"""Rules that move byte functions, Slice, Concat, Transpose, Reshape and MaxPool across each other, or remove them.

The parts: Slices of Slices and of Concats, all of which tidy up; operators that change places; and results that are
computed twice and are then computed once, with constants of sums added up, all of which tidy up, too.
"""

from __future__ import annotations

from itertools import permutations

from celosia.compiler.superoptimise.rule import (
    Absorbs,
    ByteFunction,
    Composed,
    Dim,
    IsIdentity,
    Leaf,
    Monotone,
    OneOf,
    OpenSize,
    RewriteRule,
    Term,
    apply,
)
from celosia.compiler.superoptimise.rules.products import (
    IMAGE,
    KERNEL,
    O1,
    PADS,
    STRIDES,
    C,
    H,
    N,
    P,
    Q,
    W,
    concat_of,
    constants,
    convolution,
    product_of,
    slice_of,
)

RANKS = (2, 3, 4)
"""Ranks of tensors for which rules of movement exist."""
R = OpenSize("r")
"""A position along an axis, as P and Q."""


def shaped(rank: int, axis: int, along: Dim) -> tuple[Dim, ...]:
    """Return a shape with the size `along` for `axis` and open sizes elsewhere."""
    return tuple(along if other == axis else OpenSize(f"d{other}") for other in range(rank))


def _part_rules(rank: int, axis: int) -> list[RewriteRule]:
    """The rules for one axis of tensors of one rank."""
    x, of = Leaf("x", shaped(rank, axis, OpenSize("d"))), f"of axis {axis} of {rank}"
    a, b = (Leaf(name, shaped(rank, axis, OpenSize(f"d{name}"))) for name in "ab")
    da = OpenSize("da")
    return [
        RewriteRule(
            f"whole slice {of}", "a Slice of all is what it is of",
            (slice_of(x, axis, 0, OpenSize("d")),), (x,), tidy=True,
        ),
        RewriteRule(
            f"slice of a slice {of}", "a Slice of a Slice is one Slice",
            (slice_of(slice_of(x, axis, P, Q), axis, OpenSize("s", 0), OpenSize("t")),),
            (slice_of(x, axis, P + OpenSize("s", 0), P + OpenSize("t")),), tidy=True,
        ),
        RewriteRule(
            f"neighbours {of}", "Slices that lie side by side, put together, are one Slice",
            (concat_of(axis, slice_of(x, axis, P, Q), slice_of(x, axis, Q, R)),), (slice_of(x, axis, P, R),), tidy=True,
        ),
        RewriteRule(
            f"neighbours behind others {of}", "the same inside of a longer Concat",
            (concat_of(axis, concat_of(axis, a, slice_of(x, axis, P, Q)), slice_of(x, axis, Q, R)),),
            (concat_of(axis, a, slice_of(x, axis, P, R)),), tidy=True,
        ),
        RewriteRule(
            f"slice of the first part {of}", "a Slice that lies in one part of a Concat is one of that part",
            (slice_of(concat_of(axis, a, b), axis, P, Q),), (slice_of(a, axis, P, Q),), (da >= Q,), tidy=True,
        ),
        RewriteRule(
            f"slice of the last part {of}", "a Slice that lies in one part of a Concat is one of that part",
            (slice_of(concat_of(axis, a, b), axis, P, Q),), (slice_of(b, axis, P - da, Q - da),), (da <= P,), tidy=True,
        ),
    ]  # fmt: skip


PARTS = tuple(rule for rank in RANKS for axis in range(rank) for rule in _part_rules(rank, axis))


# Operators that change places ----------------------------------------------------------------------------------------

F, G = ByteFunction("f"), ByteFunction("g")
"""Functions of bytes."""
Perm = tuple[int, ...]
"""Axes of the operand in the order of the result."""


def function_of(f: ByteFunction, *x: Term) -> Composed:
    """Write the function `f` of bytes, applied to one or two tensors."""
    return apply("map", *x, f=f)


def transpose_of(x: Term, perm: Perm) -> Composed:
    """Write a Transpose."""
    return apply("transpose", x, perm=perm)


def reshape_of(x: Term, shape: tuple[Dim, ...]) -> Composed:
    """Write a Reshape."""
    return apply("reshape", x, shape=shape)


def _both_ways(name: str, says: str, first: Term, second: Term) -> list[RewriteRule]:
    """Return the rule from `first` to `second`, and the one back."""
    return [RewriteRule(name, says, (first,), (second,)), RewriteRule(f"{name}, back", says, (second,), (first,))]


def _functions_and_parts(rank: int, axis: int) -> list[RewriteRule]:
    """The rules by which a function of bytes changes places with Slice and Concat along one axis."""
    of = f"of axis {axis} of {rank}"
    x, y = (Leaf(name, shaped(rank, axis, OpenSize("d"))) for name in "xy")
    a, b, c, d = (Leaf(name, shaped(rank, axis, OpenSize(f"d{(name in 'bd') + 1}_"))) for name in "abcd")
    says = "a function of single bytes and what takes or joins parts change places"
    cut, other = slice_of(x, axis, P, Q), slice_of(y, axis, P, Q)
    return [
        *_both_ways(f"function of a slice {of}", says, function_of(F, cut), slice_of(function_of(F, x), axis, P, Q)),
        *_both_ways(f"function of two slices {of}", says, function_of(F, cut, other),
            slice_of(function_of(F, x, y), axis, P, Q)),
        *_both_ways(
            f"function of a whole {of}", says,
            concat_of(axis, function_of(F, a), function_of(F, b)), function_of(F, concat_of(axis, a, b)),
        ),
        *_both_ways(
            f"function of two wholes {of}", says,
            concat_of(axis, function_of(F, a, c), function_of(F, b, d)),
            function_of(F, concat_of(axis, a, b), concat_of(axis, c, d)),
        ),
    ]  # fmt: skip


def _functions_and_transposes(rank: int) -> list[RewriteRule]:
    """The rules by which a function of bytes changes places with Transpose, and Transposes that change nothing go."""
    sizes = tuple(OpenSize(f"d{axis}") for axis in range(rank))
    x, y = Leaf("x", sizes), Leaf("y", sizes)
    perm = OneOf("perm", tuple(permutations(range(rank))))
    transposed = [apply("transpose", tensor, perm=perm) for tensor in (x, y)]
    says = "a function of single bytes and Transpose change places"
    rules = [
        *_both_ways(
            f"function of a transpose of {rank}", says,
            function_of(F, transposed[0]), apply("transpose", function_of(F, x), perm=perm),
        ),
        *_both_ways(
            f"function of two transposes of {rank}", says,
            function_of(F, *transposed), apply("transpose", function_of(F, x, y), perm=perm),
        ),
        RewriteRule(
            f"no transpose of {rank}", "axes in their order are no Transpose",
            (transpose_of(x, tuple(range(rank))),), (x,), tidy=True,
        ),
    ]  # fmt: skip
    for first in permutations(range(rank)):
        back = tuple(first.index(axis) for axis in range(rank))
        rules.append(RewriteRule(
            f"transpose {''.join(map(str, first))} and back", "a Transpose that undoes another one",
            (transpose_of(transpose_of(x, first), back),), (x,), tidy=True,
        ))  # fmt: skip
    return rules


def _parts_and_transposes() -> list[RewriteRule]:
    """The rules by which Slice and Concat change places with Transpose, for usual permutations: channels last and
    first, heads, matrices.
    """
    rules = []
    for perm in ((0, 2, 1), (0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 1, 2), (0, 2, 3, 1)):
        rank = len(perm)
        for axis in range(1, rank):
            a, b = (Leaf(name, shaped(rank, axis, OpenSize(f"d{name}"))) for name in "ab")
            x = Leaf("x", shaped(rank, axis, OpenSize("d")))
            axis_behind, of = perm.index(axis), f"{''.join(map(str, perm))} of axis {axis}"
            rules += _both_ways(
                f"concat and transpose {of}", "Concat and Transpose change places",
                transpose_of(concat_of(axis, a, b), perm),
                concat_of(axis_behind, transpose_of(a, perm), transpose_of(b, perm)),
            )  # fmt: skip
            rules += _both_ways(
                f"slice and transpose {of}", "Slice and Transpose change places",
                transpose_of(slice_of(x, axis, P, Q), perm), slice_of(transpose_of(x, perm), axis_behind, P, Q),
            )  # fmt: skip
    return rules


def _functions_and_reshapes(rank: int) -> list[RewriteRule]:
    """The rules by which a function of bytes changes places with Reshape, and Reshapes that change nothing go."""
    sizes = tuple(OpenSize(f"d{axis}") for axis in range(rank))
    x, y = Leaf("x", sizes), Leaf("y", sizes)
    rules = [
        RewriteRule(
            f"no reshape of {rank}", "a Reshape to the shape that there is",
            (reshape_of(x, sizes),), (x,), tidy=True,
        ),
    ]  # fmt: skip
    for new_rank in (1, *RANKS, 5):
        new_shape = tuple(OpenSize(f"e{axis}") for axis in range(new_rank))
        says, of = "a function of single bytes and Reshape change places", f"{rank} to {new_rank}"
        rules += _both_ways(
            f"function of a reshape of {of}",
            says,
            function_of(F, reshape_of(x, new_shape)),
            reshape_of(function_of(F, x), new_shape),
        )
        rules += _both_ways(
            f"function of two reshapes of {of}", says,
            function_of(F, reshape_of(x, new_shape), reshape_of(y, new_shape)),
            reshape_of(function_of(F, x, y), new_shape),
        )  # fmt: skip
        for last in (1, *RANKS, 5):
            end = tuple(OpenSize(f"g{axis}") for axis in range(last))
            rules.append(RewriteRule(
                f"reshape of a reshape of {of} to {last}", "the last Reshape alone says the shape",
                (reshape_of(reshape_of(x, new_shape), end),), (reshape_of(x, end),), tidy=True,
            ))  # fmt: skip
    return rules


def _functions_and_pools() -> list[RewriteRule]:
    """The rules by which MaxPool changes places with monotone functions, and with Slice and Concat of channels."""
    windows = {
        "kernel": (OpenSize("kh"), OpenSize("kw")), "pads": tuple(OpenSize(f"pad{i}", 0) for i in range(4)),
        "strides": OneOf("strides", ((1, 1), (2, 2), (3, 3))), "dilations": (1, 1),
    }  # fmt: skip
    x = Leaf("x", (N, C, H, W))
    a, b = (Leaf(name, (N, OpenSize(f"c{name}"), H, W)) for name in "ab")

    def largest(term: Term) -> Composed:
        """Write a MaxPool."""
        return apply("largest", term, **windows)

    monotone = (Monotone(F),)
    says = "a function that never swaps two bytes and the largest of a window change places"
    return [
        RewriteRule("function of the largest", says, (function_of(F, largest(x)),), (largest(function_of(F, x)),),
            monotone),
        RewriteRule("largest of a function", says, (largest(function_of(F, x)),), (function_of(F, largest(x)),),
            monotone),
        *_both_ways(
            "largest of joined channels", "MaxPool is of each channel by itself",
            largest(concat_of(1, a, b)), concat_of(1, largest(a), largest(b)),
        ),
        *_both_ways(
            "largest of a slice of channels", "MaxPool is of each channel by itself",
            largest(slice_of(x, 1, P, Q)), slice_of(largest(x), 1, P, Q),
        ),
    ]  # fmt: skip


def _redundant_functions(rank: int) -> list[RewriteRule]:
    """The rules that remove a function whose operand is a result that it does not change, and the identity."""
    x = Leaf("x", tuple(OpenSize(f"d{axis}") for axis in range(rank)))
    return [
        RewriteRule(
            f"function twice of rank {rank}", "what a function makes stays as it is under another one",
            (function_of(F, function_of(G, x)),), (function_of(G, x),), (Absorbs(F, G),), tidy=True,
        ),
        RewriteRule(
            f"function of nothing of rank {rank}", "a function that gives back every byte",
            (function_of(F, x),), (x,), (IsIdentity(F),), tidy=True,
        ),
    ]  # fmt: skip


MOVING = (
    *_functions_and_pools(),
    *(rule for rank in RANKS for axis in range(rank) for rule in _functions_and_parts(rank, axis)),
    *(
        rule
        for rank in RANKS
        for rule in (*_functions_and_transposes(rank), *_functions_and_reshapes(rank), *_redundant_functions(rank))
    ),
    *_parts_and_transposes(),
)


# Results that are shared ---------------------------------------------------------------------------------------------


def _share(name: str, term: Term) -> RewriteRule:
    """The rule that shares the result of `term`: both sides have it twice, and rewriting builds equal terms once."""
    says = "what is computed twice is computed once"
    return RewriteRule(f"{name}, once", says, (term, term), (term, term), tidy=True)


def _sharing_rules(rank: int) -> list[RewriteRule]:
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


SHARING = (*_share_products(), *(rule for rank in RANKS for rule in _sharing_rules(rank)))
