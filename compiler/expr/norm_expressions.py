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
"""Element type of the arithmetic."""
OfRow = Callable[..., Expr]
"""A per-row value, as a function of the indices of the row."""
StoreRow = Callable[[str, OfRow], OfRow]
"""Stores a per-row value under a name, where that is better than to compute it again for each element."""
_SPARE = 32 - NORM_FRACTION
"""Fractional bits of a product of an element and its row's factor that the result does not keep."""
_LANES_BITS = MAX_NORM_ELEMENTS.bit_length()
"""Bits of the number of elements of a row."""


@dataclass(frozen=True)
class NormRow:
    """Per-row values (int64) that normalise the elements of a row.

    nearest: the mean, rounded, which is subtracted; 0 without centring. shift, factor: exponent and mantissa of 1 /
    standard deviation: the difference is shifted left and then multiplied. less: the rounding error of `nearest` times
    factor, which is subtracted from the product.
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
    """Return (sum, sum of squares) of each row, as functions of the row's indices.

    element: the int64 element at the indices of a row and its number in the row. count: elements of a row.
    """

    def sum_of(part: Callable[[Expr], Expr]) -> OfRow:
        k = reduce_axis(count, "k")
        return lambda *row: sum(part(element(*row, k)), k)

    return sum_of(lambda u: u), sum_of(lambda u: u * u)


def norm_row(total: OfRow, squares: OfRow, epsilon: Expr, count: int, centre: bool, store_row: StoreRow) -> NormRow:
    """Return the per-row values of rows of `count` elements, from their sums and sums of squares, all int64.

    epsilon: is added to count^2 times the variance, in its scale. centre: whether to subtract the mean (LayerNorm), or
    not (RMSNorm). store_row: stores values that several elements use. The steps are those of sim/functional/norm.py.
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
    """Return 0 for every row: the mean of an RMSNorm, which does not subtract it."""
    return wrap(0, INT)
