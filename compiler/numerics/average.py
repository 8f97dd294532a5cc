"""Pooling. The scales are for `fold_scale`; the bias is -zero_point * count, for stored bytes and their zero points."""

from __future__ import annotations

import numpy as np

from celosia.compiler.numerics.float32 import Array, byte_type, f32, limits
from celosia.compiler.numerics.linear import dequantize_linear


@np.errstate(all="ignore")
def global_average_scale(sx: float, sy: float, count: int) -> np.float32:
    """Factor from the sum of `count` values to output steps in QLinearGlobalAveragePool: exact with `requantize`."""
    return f32(f32(sx) / (f32(sy) * f32(count)))


@np.errstate(all="ignore")
def mean_scale(sx: float, sy: float, count: int) -> np.float32:
    """Scale of a mean that the model computes in float32, between DequantizeLinear and QuantizeLinear.

    Float32 sums have no defined order, so this is the nearest factor. For count <= 2^13 and sx <= 2 * sy the result
    differs by at most one step, and only where the mean lies within (count + 5) * 2^-15 of a half step: float32 errs by
    at most 2^-24 of the largest value, which is 510 steps, for each addition and each of the few other operations.
    """
    return f32(np.float64(f32(sx)) / (np.float64(f32(sy)) * count))


SUM_ROUNDINGS, SHIFT_ROUNDING = 8, 2.0**-16
"""Roundings that a mean in float32 and the integer one differ by, beside one for each value; that of a zero point."""


MOST_PROVED = 1 << 12
"""Values of a mean up to which its sums are tried, 510 for each."""


def average_is_exact(sx: float, zx: int, sy: float, count: int) -> bool:
    """Whether means of `count` int8 with zero point zx, computed in float32 in any order, are proved to round to the
    bytes of `requantize`: no sum of integers comes nearer to a tie than both may err. docs/numerics.md has the proof.

    >>> average_is_exact(0.02, 0, 0.02, 4), average_is_exact(0.02, 0, 0.0137, 4)
    (False, True)
    """
    if count > MOST_PROVED or not 0 < f32(sy) < np.inf:
        return False
    low, high = -128 - zx, 127 - zx
    ratio = float(f32(sx)) / float(f32(sy))
    if not 0 <= ratio < np.inf:
        return False
    means = np.arange(count * low, count * high + 1) * (ratio / count)
    error = average_error(ratio, max(-low, high), count)
    seen = means[np.abs(means) < 257]  # others are clipped, whatever the zero point of the result
    return bool(error < 0.5 and np.all(np.abs(seen - np.floor(seen) - 0.5) > error))


def average_error(ratio: float, largest: int, count: int) -> float:
    """By how much, in output steps, the two means of average_is_exact may be apart before they are rounded.

    ratio: of the scales, sx / sy; largest: magnitude of a value without its zero point.
    """
    return (count + SUM_ROUNDINGS) * 2.0**-24 * largest * ratio + SHIFT_ROUNDING


@np.errstate(all="ignore")
def qlinear_average(windows: Array, sx: float, zx: int, sy: float, zy: int) -> Array:
    """com.microsoft.QLinearAveragePool of windows [..., n], their values row by row; returns [...].

    It dequantises, sums in float32 in that order, divides by n and adds the zero point before it rounds. The sum of the
    integers cannot always tell where that ends: `requantize` with `global_average_scale` differs on ties, by one step.
    """
    x = dequantize_linear(windows, sx, zx)
    total = np.zeros(x.shape[:-1], f32)
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    lo, hi = limits(byte_type(windows.dtype))
    steps = np.rint(total / f32(x.shape[-1]) / f32(sy) + f32(zy))
    return np.asarray(np.clip(steps, lo, hi).astype(windows.dtype))
