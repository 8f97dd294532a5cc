"""Rules that move bytes, across what computes with each by itself, and across itself."""

from __future__ import annotations

from itertools import permutations

from celosia.compiler.superoptimise.rule import Absorbs, IsIdentity, Monotone, RewriteRule
from celosia.compiler.superoptimise.rules.merging import C, H, N, W, joined, part
from celosia.compiler.superoptimise.rules.parts import RANKS, P, Q, shaped
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term, apply

F, G = ByteFunction("f"), ByteFunction("g")
Perm = tuple[int, ...]


def mapped(f: ByteFunction, *x: Term) -> Composed:
    """The function of bytes."""
    return apply("map", *x, f=f)


def transposed(x: Term, perm: Perm) -> Composed:
    """Axes in another order."""
    return apply("transpose", x, perm=perm)


def reshaped(x: Term, shape: tuple[Dim, ...]) -> Composed:
    """Reshape `x`."""
    return apply("reshape", x, shape=shape)


def _both_ways(name: str, says: str, first: Term, second: Term) -> list[RewriteRule]:
    return [
        RewriteRule(name, says, (first,), (second,)),
        RewriteRule(f"{name}, back", says, (second,), (first,)),
    ]


def _maps(rank: int, axis: int) -> list[RewriteRule]:
    of = f"of axis {axis} of {rank}"
    x, y = (Leaf(name, shaped(rank, axis, OpenSize("d"))) for name in "xy")
    a, b, c, d = (Leaf(name, shaped(rank, axis, OpenSize(f"d{(name in 'bd') + 1}_"))) for name in "abcd")
    says = "a function of single bytes and what takes or joins parts change places"
    cut, other = part(x, axis, P, Q), part(y, axis, P, Q)
    return [
        *_both_ways(f"function of a slice {of}", says, mapped(F, cut), part(mapped(F, x), axis, P, Q)),
        *_both_ways(f"function of two slices {of}", says, mapped(F, cut, other), part(mapped(F, x, y), axis, P, Q)),
        *_both_ways(
            f"function of a whole {of}", says,
            joined(axis, mapped(F, a), mapped(F, b)), mapped(F, joined(axis, a, b)),
        ),
        *_both_ways(
            f"function of two wholes {of}", says,
            joined(axis, mapped(F, a, c), mapped(F, b, d)), mapped(F, joined(axis, a, b), joined(axis, c, d)),
        ),
    ]  # fmt: skip


def _transposes(rank: int) -> list[RewriteRule]:
    sizes = tuple(OpenSize(f"d{axis}") for axis in range(rank))
    x, y = Leaf("x", sizes), Leaf("y", sizes)
    perm = OneOf("perm", tuple(permutations(range(rank))))
    turned = [apply("transpose", each, perm=perm) for each in (x, y)]
    says = "a function of single bytes and Transpose change places"
    found = [
        *_both_ways(
            f"function of a transpose of {rank}", says,
            mapped(F, turned[0]), apply("transpose", mapped(F, x), perm=perm),
        ),
        *_both_ways(
            f"function of two transposes of {rank}", says,
            mapped(F, *turned), apply("transpose", mapped(F, x, y), perm=perm),
        ),
        RewriteRule(
            f"no transpose of {rank}", "axes in their order are no Transpose",
            (transposed(x, tuple(range(rank))),), (x,), tidy=True,
        ),
    ]  # fmt: skip
    for first in permutations(range(rank)):
        back = tuple(first.index(axis) for axis in range(rank))
        found.append(RewriteRule(
            f"transpose {''.join(map(str, first))} and back", "a Transpose that undoes another one",
            (transposed(transposed(x, first), back),), (x,), tidy=True,
        ))  # fmt: skip
    return found


def _turned_parts() -> list[RewriteRule]:
    """Rules of the usual permutations: channels last and first, heads, matrices."""
    found = []
    for perm in ((0, 2, 1), (0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 1, 2), (0, 2, 3, 1)):
        rank = len(perm)
        for axis in range(1, rank):
            a, b = (Leaf(name, shaped(rank, axis, OpenSize(f"d{name}"))) for name in "ab")
            x = Leaf("x", shaped(rank, axis, OpenSize("d")))
            to, of = perm.index(axis), f"{''.join(map(str, perm))} of axis {axis}"
            found += _both_ways(
                f"concat and transpose {of}", "Concat and Transpose change places",
                transposed(joined(axis, a, b), perm), joined(to, transposed(a, perm), transposed(b, perm)),
            )  # fmt: skip
            found += _both_ways(
                f"slice and transpose {of}", "Slice and Transpose change places",
                transposed(part(x, axis, P, Q), perm), part(transposed(x, perm), to, P, Q),
            )  # fmt: skip
    return found


def _reshapes(rank: int) -> list[RewriteRule]:
    sizes = tuple(OpenSize(f"d{axis}") for axis in range(rank))
    x, y = Leaf("x", sizes), Leaf("y", sizes)
    found = [
        RewriteRule(
            f"no reshape of {rank}", "a Reshape to the shape that there is",
            (reshaped(x, sizes),), (x,), tidy=True,
        ),
    ]  # fmt: skip
    for to in (1, *RANKS, 5):
        other = tuple(OpenSize(f"e{axis}") for axis in range(to))
        says, of = "a function of single bytes and Reshape change places", f"{rank} to {to}"
        found += _both_ways(
            f"function of a reshape of {of}", says, mapped(F, reshaped(x, other)), reshaped(mapped(F, x), other)
        )
        found += _both_ways(
            f"function of two reshapes of {of}", says,
            mapped(F, reshaped(x, other), reshaped(y, other)), reshaped(mapped(F, x, y), other),
        )  # fmt: skip
        for last in (1, *RANKS, 5):
            end = tuple(OpenSize(f"g{axis}") for axis in range(last))
            found.append(RewriteRule(
                f"reshape of a reshape of {of} to {last}", "the last Reshape alone says the shape",
                (reshaped(reshaped(x, other), end),), (reshaped(x, end),), tidy=True,
            ))  # fmt: skip
    return found


def _pools() -> list[RewriteRule]:
    windows = {
        "kernel": (OpenSize("kh"), OpenSize("kw")), "pads": tuple(OpenSize(f"pad{i}", 0) for i in range(4)),
        "strides": OneOf("strides", ((1, 1), (2, 2), (3, 3))), "dilations": (1, 1),
    }  # fmt: skip
    x = Leaf("x", (N, C, H, W))
    a, b = (Leaf(name, (N, OpenSize(f"c{name}"), H, W)) for name in "ab")

    def largest(term: Term) -> Composed:
        return apply("largest", term, **windows)

    monotone = (Monotone(F),)
    says = "a function that never swaps two bytes and the largest of a window change places"
    return [
        RewriteRule("function of the largest", says, (mapped(F, largest(x)),), (largest(mapped(F, x)),), monotone),
        RewriteRule("largest of a function", says, (largest(mapped(F, x)),), (mapped(F, largest(x)),), monotone),
        *_both_ways(
            "largest of joined channels", "MaxPool is of each channel by itself",
            largest(joined(1, a, b)), joined(1, largest(a), largest(b)),
        ),
        *_both_ways(
            "largest of a slice of channels", "MaxPool is of each channel by itself",
            largest(part(x, 1, P, Q)), part(largest(x), 1, P, Q),
        ),
    ]  # fmt: skip


def _tables(rank: int) -> list[RewriteRule]:
    x = Leaf("x", tuple(OpenSize(f"d{axis}") for axis in range(rank)))
    return [
        RewriteRule(
            f"function twice of rank {rank}", "what a function makes stays as it is under another one",
            (mapped(F, mapped(G, x)),), (mapped(G, x),), (Absorbs(F, G),), tidy=True,
        ),
        RewriteRule(
            f"function of nothing of rank {rank}", "a function that gives back every byte",
            (mapped(F, x),), (x,), (IsIdentity(F),), tidy=True,
        ),
    ]  # fmt: skip


MOVING = (
    *_pools(),
    *(rule for rank in RANKS for axis in range(rank) for rule in _maps(rank, axis)),
    *(rule for rank in RANKS for rule in (*_transposes(rank), *_reshapes(rank), *_tables(rank))),
    *_turned_parts(),
)
