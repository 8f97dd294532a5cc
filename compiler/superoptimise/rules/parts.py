"""Parts and wholes: Slice and Concat."""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.merging import joined, part
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Leaf

RANKS = (2, 3, 4)
P, Q, R = OpenSize("p", 0), OpenSize("q"), OpenSize("r")


def axis_of(rank: int) -> OneOf:
    """Any."""
    return OneOf("axis", tuple(range(rank)))


def shaped(rank: int, axis: int, along: Dim) -> tuple[Dim, ...]:
    """A shape with `along` in one place."""
    return tuple(along if each == axis else OpenSize(f"d{each}") for each in range(rank))


def _of(rank: int, axis: int) -> list[RewriteRule]:
    """The rules of one axis of tensors of one rank."""
    x, of = Leaf("x", shaped(rank, axis, OpenSize("d"))), f"of axis {axis} of {rank}"
    a, b = (Leaf(name, shaped(rank, axis, OpenSize(f"d{name}"))) for name in "ab")
    da = OpenSize("da")
    return [
        RewriteRule(
            f"whole slice {of}", "a Slice of all is what it is of",
            (part(x, axis, 0, OpenSize("d")),), (x,), tidy=True,
        ),
        RewriteRule(
            f"slice of a slice {of}", "a Slice of a Slice is one Slice",
            (part(part(x, axis, P, Q), axis, OpenSize("s", 0), OpenSize("t")),),
            (part(x, axis, P + OpenSize("s", 0), P + OpenSize("t")),), tidy=True,
        ),
        RewriteRule(
            f"neighbours {of}", "Slices that lie side by side, put together, are one Slice",
            (joined(axis, part(x, axis, P, Q), part(x, axis, Q, R)),), (part(x, axis, P, R),), tidy=True,
        ),
        RewriteRule(
            f"neighbours behind others {of}", "the same inside of a longer Concat",
            (joined(axis, joined(axis, a, part(x, axis, P, Q)), part(x, axis, Q, R)),),
            (joined(axis, a, part(x, axis, P, R)),), tidy=True,
        ),
        RewriteRule(
            f"slice of the first part {of}", "a Slice that lies in one part of a Concat is one of that part",
            (part(joined(axis, a, b), axis, P, Q),), (part(a, axis, P, Q),), (da >= Q,), tidy=True,
        ),
        RewriteRule(
            f"slice of the last part {of}", "a Slice that lies in one part of a Concat is one of that part",
            (part(joined(axis, a, b), axis, P, Q),), (part(b, axis, P - da, Q - da),), (da <= P,), tidy=True,
        ),
    ]  # fmt: skip


PARTS = tuple(rule for rank in RANKS for axis in range(rank) for rule in _of(rank, axis))
