"""Rows over their deviation, as expressions. sim/functional/norm.py has the same in numpy, and says how exact it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celosia.compiler.expr.nodes import Expr, call, maximum, minimum, wrap
from celosia.compiler.expr.tensor import reduce_axis, sum
from celosia.hw.spec.pipeline import EPSILON_SHIFT, FACTOR_BITS, MAX_NORM_ELEMENTS, NORM_FRACTION, ROOT_BITS
from celosia.sim.functional.norm import VARIANCE_BITS

INT = "int64"
OfRow = Callable[..., Expr]
"""A number of a row, by the indices of the row."""
Kept = Callable[[str, OfRow], OfRow]
"""Gives a number of a row a name and a place, where that is better than to compute it again."""
_SPARE = 32 - NORM_FRACTION
_LANES_BITS = MAX_NORM_ELEMENTS.bit_length()


@dataclass(frozen=True)
class NormRow:
    """Values that the elements of a row have in common, int64."""

    nearest: OfRow
    factor: OfRow
    shift: OfRow
    less: OfRow

    def element(self, u: Expr, *row: Expr) -> Expr:
        """z of the element u, int64, of `row`, int32 with NORM_FRACTION bits behind the point."""
        near = ((u - self.nearest(*row)) << self.shift(*row)).astype("int16").astype(INT)
        product = near * self.factor(*row)
        return ((product + (1 << _SPARE - 1) - self.less(*row)) >> _SPARE).astype("int32")


def sums(element: OfRow, count: int) -> tuple[OfRow, OfRow]:
    """The sum of rows, of which the last index of `element`, int64, counts the elements, and that of their squares."""

    def summed(part: Callable[[Expr], Expr]) -> OfRow:
        k = reduce_axis(count, "k")
        return lambda *row: sum(part(element(*row, k)), k)

    return summed(lambda u: u), summed(lambda u: u * u)


def norm_row(total: OfRow, squares: OfRow, epsilon: Expr, count: int, centre: bool, kept: Kept) -> NormRow:
    """Normalise rows of `count` elements with these sums, all int64. centre: LayerNorm, not RMSNorm."""
    spare = _LANES_BITS - count.bit_length()

    def variance_of(*row: Expr) -> Expr:
        found = squares(*row) * count
        return ((found - total(*row) * total(*row) if centre else found) << EPSILON_SHIFT) + epsilon

    def root_of(*row: Expr) -> Expr:
        return call("inverse_root", (variance(*row) << up(*row)) >> VARIANCE_BITS - 32)

    def factor_of(*row: Expr) -> Expr:
        rounded = ((root(*row) * (count << spare)) >> over(*row) + (down - 1)) + 1
        return minimum(rounded >> 1, (1 << FACTOR_BITS) - 1)

    def less_of(*row: Expr) -> Expr:
        rest = total(*row) - nearest(*row) * count
        return ((rest * root(*row)) << 16) >> maximum(29 - (up(*row) >> 1), 0)

    down = _LANES_BITS + ROOT_BITS - 1 - FACTOR_BITS
    nearest = kept("nearest", lambda *row: (total(*row) * 2 + count) // (2 * count)) if centre else _nothing
    variance = kept("variance", variance_of)
    up = kept("up", lambda *row: (call("leading_zeros", variance(*row)) - (64 - VARIANCE_BITS)) & -2)
    root = kept("root", root_of)
    over = kept("over", lambda *row: (root(*row) * (count << spare)) >> down + FACTOR_BITS)
    shift = kept("shift", lambda *row: ((up(*row) >> 1) - spare + over(*row)) & 15)
    return NormRow(nearest, kept("factor", factor_of), shift, kept("less", less_of) if centre else _nothing)


def _nothing(*row: Expr) -> Expr:
    return wrap(0, INT)
