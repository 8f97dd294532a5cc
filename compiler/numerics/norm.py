"""LayerNormalization and RMSNormalization of bytes to bytes, in integers: their constants, then their expressions.

The results of a row are gamma / sy (z + beta / gamma), rounded, where z is the normalised row; the scale of the input,
sx, occurs in epsilon only. The CPU's kernel and the accelerator's lowering share the expressions.
sim/functional/norm.py has the arithmetic in numpy and bounds its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

import numpy as np

from celosia.compiler.expr.nodes import Expr, call, maximum, minimum, wrap
from celosia.compiler.expr.tensor import reduce_axis, sum
from celosia.compiler.numerics.requantiser import Float32, Float64, Int32, f32, scale_to_multiplier
from celosia.hw.spec.pipeline import EPSILON_SHIFT, FACTOR_BITS, MAX_NORM_ELEMENTS, NORM_FRACTION, ROOT_BITS
from celosia.sim.functional.norm import VARIANCE_BITS

MAX_ERROR = 2.0**-14
"""Limit of the error of results before rounding, in output units."""
MAX_RESULT = 128
"""Largest magnitude of a result, in output units, to which MAX_ERROR applies."""
MAX_EPSILON = 1 << 17
"""Limit of epsilon, in squared units of the input."""


class NormError(ValueError):
    """A normalisation that the integers cannot represent; the message says why, and what would help."""


@dataclass(frozen=True)
class NormConstants:
    """Constants of one normalisation.

    epsilon: added to N^2 times the variance of rows of N elements, in squared input units of 2^-EPSILON_SHIFT. bias:
    beta / gamma of each channel with NORM_FRACTION fractional bits. scale: gamma / sy * 2^-NORM_FRACTION of each
    channel, for `scale_to_multiplier`. error_bound: of results before rounding, in output units.
    """

    epsilon: int
    bias: Int32
    scale: Float32
    error_bound: float


def norm_constants(gamma: Float32, beta: Float32, sx: float, sy: float, epsilon: float) -> NormConstants:
    """Derive the constants of a normalisation of rows with as many elements as `gamma` and `beta` have.

    gamma, beta: scale and offset of each element. sx, sy: scales of input and result. Raises NormError where integers
    cannot represent them.

    >>> norm_constants(np.ones(4, f32), np.full(4, 0.5, f32), 0.5, 0.25, 0.0).bias.tolist()
    [16777216, 16777216, 16777216, 16777216]
    """
    count = len(gamma)
    if count > MAX_NORM_ELEMENTS:
        raise NormError(f"rows of {count} elements; sums are for {MAX_NORM_ELEMENTS} at most")
    if not (np.isfinite(gamma).all() and np.isfinite(beta).all()):
        raise NormError("a scale or an offset is not finite; train or quantise again")
    if (gamma <= 0).any():
        channel = int(np.argmax(gamma <= 0))
        raise NormError(f"the scale of channel {channel} is {gamma[channel]:g}, and multipliers are positive")
    for name, step in (("input", sx), ("result", sy)):
        if not 0 < f32(step) < np.inf:
            raise NormError(f"a step of the {name} is {step:g}, and must be positive and finite")
    if not 0 <= f32(epsilon) < np.inf:
        raise NormError(f"epsilon is {epsilon:g}, and must be finite and not negative")
    scaled_epsilon = Fraction(float(f32(epsilon))) / Fraction(float(f32(sx))) ** 2
    if scaled_epsilon > MAX_EPSILON:
        raise NormError(f"epsilon is {epsilon:g} for steps of {sx:g}: {float(scaled_epsilon):g} of their squares")
    g, b = (array.astype(np.float64) / float(f32(sy)) for array in (gamma, beta))
    with np.errstate(over="ignore"):
        bias, scale = np.rint(b / g * 2.0**NORM_FRACTION), (g * 2.0**-NORM_FRACTION).astype(f32)
    is_unrepresentable = np.abs(bias) + ((isqrt(count) + 2) << NORM_FRACTION) >= 2.0**31
    error_bound = _error_bound(g, b)
    is_unrepresentable |= (error_bound > MAX_ERROR) | (
        scale_to_multiplier(np.where(np.isfinite(scale), scale, 0))[0] == 0
    )
    if is_unrepresentable.any():
        channel = int(np.argmax(is_unrepresentable))
        raise NormError(
            f"channel {channel} has a scale of {gamma[channel]:g} and an offset of {beta[channel]:g} for steps of "
            f"{sy:g}, which integers do not hold"
        )
    integer_epsilon = round(count**2 * scaled_epsilon * 2**EPSILON_SHIFT)
    return NormConstants(integer_epsilon, bias.astype(np.int32), scale, float(error_bound.max(initial=0.0)))


def _error_bound(gamma: Float64, beta: Float64) -> Float64:
    """Return the error bound of each channel that sim/functional/norm.py proves, in output units."""
    return 2.0**-24 * (1.52 * (MAX_RESULT + np.abs(beta)) + 1.76 * gamma + 3.01 * MAX_RESULT)


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
