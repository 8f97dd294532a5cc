"""Row normalisation (LayerNorm, RMSNorm) in exact integer arithmetic, as expressions.

The CPU's kernel and the accelerator's lowering share it. sim/functional/norm.py has the arithmetic in numpy and bounds
its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celosia.compiler.expr.nodes import Expr, call, maximum, minimum, wrap
from celosia.compiler.expr.tensor import reduce_axis, sum
from celosia.hw.spec.pipeline import EPSILON_SHIFT, FACTOR_BITS, MAX_NORM_ELEMENTS, NORM_FRACTION, ROOT_BITS
from celosia.sim.functional.norm import VARIANCE_BITS

INT = "int64"
OfRow = Callable[..., Expr]
"""A per-row value, as a function of the indices of the row."""
StoreRow = Callable[[str, OfRow], OfRow]
"""Stores a per-row value under a name, where that is better than to compute it again for each element."""
_SPARE = 32 - NORM_FRACTION
_LANES_BITS = MAX_NORM_ELEMENTS.bit_length()


@dataclass(frozen=True)
class NormRow:
    """Per-row values (int64) that normalise each element: subtract `nearest`, shift, multiply by `factor`, correct by
    `less`.
    """

    nearest: OfRow
    factor: OfRow
    shift: OfRow
    less: OfRow

    def element(self, u: Expr, *row: Expr) -> Expr:
        """Normalise the element `u` (int64) of `row`: int32 with NORM_FRACTION fractional bits."""
        near = ((u - self.nearest(*row)) << self.shift(*row)).astype("int16").astype(INT)
        product = near * self.factor(*row)
        return ((product + (1 << _SPARE - 1) - self.less(*row)) >> _SPARE).astype("int32")


def sums(element: OfRow, count: int) -> tuple[OfRow, OfRow]:
    """Return the sum and the sum of squares of each row; the last index of `element` (int64) counts the elements."""

    def sum_of(part: Callable[[Expr], Expr]) -> OfRow:
        k = reduce_axis(count, "k")
        return lambda *row: sum(part(element(*row, k)), k)

    return sum_of(lambda u: u), sum_of(lambda u: u * u)


def norm_row(total: OfRow, squares: OfRow, epsilon: Expr, count: int, centre: bool, store_row: StoreRow) -> NormRow:
    """Compute the per-row values of rows of `count` elements from their sums, all int64.

    centre: subtract the mean (LayerNorm); without it, RMSNorm. store_row: stores values that several elements use.
    """
    spare = _LANES_BITS - count.bit_length()

    def variance_of(*row: Expr) -> Expr:
        scaled_squares = squares(*row) * count
        return ((scaled_squares - total(*row) * total(*row) if centre else scaled_squares) << EPSILON_SHIFT) + epsilon

    def root_of(*row: Expr) -> Expr:
        return call("inverse_root", (variance(*row) << up(*row)) >> VARIANCE_BITS - 32)

    def factor_of(*row: Expr) -> Expr:
        rounded = ((root(*row) * (count << spare)) >> over(*row) + (down - 1)) + 1
        return minimum(rounded >> 1, (1 << FACTOR_BITS) - 1)

    def less_of(*row: Expr) -> Expr:
        rest = total(*row) - nearest(*row) * count
        return ((rest * root(*row)) << 16) >> maximum(29 - (up(*row) >> 1), 0)

    down = _LANES_BITS + ROOT_BITS - 1 - FACTOR_BITS
    nearest = store_row("nearest", lambda *row: (total(*row) * 2 + count) // (2 * count)) if centre else _zero
    variance = store_row("variance", variance_of)
    up = store_row("up", lambda *row: (call("leading_zeros", variance(*row)) - (64 - VARIANCE_BITS)) & -2)
    root = store_row("root", root_of)
    over = store_row("over", lambda *row: (root(*row) * (count << spare)) >> down + FACTOR_BITS)
    shift = store_row("shift", lambda *row: ((up(*row) >> 1) - spare + over(*row)) & 15)
    return NormRow(nearest, store_row("factor", factor_of), shift, store_row("less", less_of) if centre else _zero)


def _zero(*row: Expr) -> Expr:
    return wrap(0, INT)
