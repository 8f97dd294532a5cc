"""Average pooling on the requantiser: the scale that replaces the division, for `fold_scale`.

The requantiser's bias is -zero_point * count, for stored bytes and their zero points.
"""

from __future__ import annotations

import numpy as np

from celosia.compiler.numerics.quantize import Array, byte_type, dequantize_linear, f32, limits


@np.errstate(all="ignore")
def global_average_scale(sx: float, sy: float, count: int) -> np.float32:
    """Return the scale with which `requantize` of a sum of `count` bytes equals QLinearGlobalAveragePool."""
    return f32(f32(sx) / (f32(sy) * f32(count)))


@np.errstate(all="ignore")
def mean_scale(sx: float, sy: float, count: int) -> np.float32:
    """Return the scale for a mean that the model computes in float32, between DequantizeLinear and QuantizeLinear.

    Float32 sums have no defined order, so this is the nearest scale. For count <= 2^13 and sx <= 2 * sy the result
    differs by at most one step, and only where the mean lies within (count + 5) * 2^-15 of a half step: float32 errs by
    at most 2^-24 of the largest value, which is 510 steps, for each addition and each of the few other operations.
    """
    return f32(np.float64(f32(sx)) / (np.float64(f32(sy)) * count))


SUM_ROUNDINGS = 8
"""Bound of the float32 roundings of a mean besides one for each value, for `average_error`."""
SHIFT_ROUNDING = 2.0**-16
"""Bound of the error by rounding the zero point, in output units, for `average_error`."""
MAX_PROVED_COUNT = 1 << 12
"""Limit of the values of a mean that `average_is_exact` proves: it enumerates all their sums, 256 for each value."""


def average_is_exact(sx: float, zx: int, sy: float, count: int) -> bool:
    """Return whether float32 means of `count` int8 values, in any order of addition, surely equal `requantize`.

    It enumerates all sums: none may lie nearer to a tie than the errors of both computations. docs/numerics.md has the
    proof. False where that is not shown.

    >>> average_is_exact(0.02, 0, 0.02, 4), average_is_exact(0.02, 0, 0.0137, 4)
    (False, True)
    """
    if count > MAX_PROVED_COUNT or not 0 < f32(sy) < np.inf:
        return False
    low, high = -128 - zx, 127 - zx
    ratio = float(f32(sx)) / float(f32(sy))
    if not 0 <= ratio < np.inf:
        return False
    means = np.arange(count * low, count * high + 1) * (ratio / count)
    error = average_error(ratio, max(-low, high), count)
    unclipped = means[np.abs(means) < 257]  # others are clipped, whatever the zero point of the result
    return bool(error < 0.5 and np.all(np.abs(unclipped - np.floor(unclipped) - 0.5) > error))


def average_error(ratio: float, largest: int, count: int) -> float:
    """Bound the difference, in output units, of the two means of `average_is_exact` before they are rounded.

    ratio: of the scales, sx / sy; largest: greatest magnitude of a value without its zero point.
    """
    return (count + SUM_ROUNDINGS) * 2.0**-24 * largest * ratio + SHIFT_ROUNDING


@np.errstate(all="ignore")
def qlinear_average(windows: Array, sx: float, zx: int, sy: float, zy: int) -> Array:
    """Compute com.microsoft.QLinearAveragePool of windows [..., n], whose values are in row-major order; returns [...].

    It dequantises, sums in float32 in that order, divides by n and adds the zero point before it rounds. No function of
    the integer sum is always equal: `requantize` with `global_average_scale` differs on some ties, by one unit.
    """
    x = dequantize_linear(windows, sx, zx)
    total = np.zeros(x.shape[:-1], f32)
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    lo, hi = limits(byte_type(windows.dtype))
    steps = np.rint(total / f32(x.shape[-1]) / f32(sy) + f32(zy))
    return np.asarray(np.clip(steps, lo, hi).astype(windows.dtype))
