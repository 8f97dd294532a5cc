"""Average pooling: scales for `fold_scale`. The bias is -zero_point * count, for stored bytes and their zero points."""

from __future__ import annotations

import numpy as np

from celosia.compiler.numerics.quantize import Array, byte_type, dequantize_linear, f32, limits


@np.errstate(all="ignore")
def global_average_scale(sx: float, sy: float, count: int) -> np.float32:
    """Return the factor from a sum of `count` values to output units of QLinearGlobalAveragePool, exact with
    `requantize`.
    """
    return f32(f32(sx) / (f32(sy) * f32(count)))


@np.errstate(all="ignore")
def mean_scale(sx: float, sy: float, count: int) -> np.float32:
    """Return the factor for a mean that the model computes in float32, between DequantizeLinear and QuantizeLinear.

    Float32 sums have no defined order, so this is the nearest factor. For count <= 2^13 and sx <= 2 * sy the result
    differs by at most one step, and only where the mean lies within (count + 5) * 2^-15 of a half step: float32 errs by
    at most 2^-24 of the largest value, which is 510 steps, for each addition and each of the few other operations.
    """
    return f32(np.float64(f32(sx)) / (np.float64(f32(sy)) * count))


SUM_ROUNDINGS, SHIFT_ROUNDING = 8, 2.0**-16
"""Bounds of the difference between a float32 mean and the integer one: roundings besides one for each value; error of
the zero point."""


MAX_PROVED_COUNT = 1 << 12
"""Limit of the values of a mean whose sums are enumerated, 510 for each value."""


def average_is_exact(sx: float, zx: int, sy: float, count: int) -> bool:
    """Prove that float32 means of `count` int8 values, added in any order, round to the bytes of `requantize`.

    No sum of integers may come nearer to a tie than the errors of both. docs/numerics.md has the proof.

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
    seen = means[np.abs(means) < 257]  # others are clipped, whatever the zero point of the result
    return bool(error < 0.5 and np.all(np.abs(seen - np.floor(seen) - 0.5) > error))


def average_error(ratio: float, largest: int, count: int) -> float:
    """Bound the difference, in output units, of the two means of `average_is_exact` before they are rounded.

    ratio: of the scales, sx / sy; largest: greatest magnitude of a value without its zero point.
    """
    return (count + SUM_ROUNDINGS) * 2.0**-24 * largest * ratio + SHIFT_ROUNDING


@np.errstate(all="ignore")
def qlinear_average(windows: Array, sx: float, zx: int, sy: float, zy: int) -> Array:
    """Compute com.microsoft.QLinearAveragePool of windows [..., n], whose values are row by row; returns [...].

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
