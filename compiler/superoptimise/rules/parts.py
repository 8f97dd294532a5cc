"""Rules that simplify Slice and Concat of each other; all of them tidy up."""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.merging import concat_of, slice_of
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Leaf

RANKS = (2, 3, 4)
"""Ranks of tensors for which rules of movement exist."""
P, Q, R = OpenSize("p", 0), OpenSize("q"), OpenSize("r")
"""Positions along an axis."""


def any_axis(rank: int) -> OneOf:
    """Return a choice of any axis of a tensor of this rank."""
    return OneOf("axis", tuple(range(rank)))


def shaped(rank: int, axis: int, along: Dim) -> tuple[Dim, ...]:
    """Return a shape with the size `along` for `axis` and open sizes elsewhere."""
    return tuple(along if other == axis else OpenSize(f"d{other}") for other in range(rank))


def _rules_of_axis(rank: int, axis: int) -> list[RewriteRule]:
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


PARTS = tuple(rule for rank in RANKS for axis in range(rank) for rule in _rules_of_axis(rank, axis))
