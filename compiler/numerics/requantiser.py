"""Quantisation to bytes, requantisation of int32 sums to int8, and means on the requantiser.

In order: types of arrays, QuantizeLinear and DequantizeLinear with saturation, as in onnxruntime's kernels; the
requantiser of QLinearConv, QGemm and QLinearMatMul; the scale that replaces the division of a mean, for
`scale_to_multiplier`. The requantiser's bias of a mean is -zero_point * count, for stored bytes and their zero points.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Array = NDArray[Any]
Int8 = NDArray[np.int8]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

f32 = np.float32
"""Short name, as formulas round to float32 after each operation."""


def byte_type(dtype: DTypeLike) -> np.dtype[Any]:
    """Return int8 or uint8 as a numpy dtype. Raises TypeError for other types."""
    kind = np.dtype(dtype)
    if kind not in (np.dtype(np.int8), np.dtype(np.uint8)):
        raise TypeError(f"expected int8 or uint8, not {kind}")
    return kind


def limits(kind: np.dtype[Any]) -> tuple[int, int]:
    """Return the least and the greatest value of an integer type."""
    return int(np.iinfo(kind).min), int(np.iinfo(kind).max)


def convert_saturating(x: Float32, dtype: np.dtype[Any]) -> Array:
    """Round to even and saturate as x86 does (cvtps2dq, then packing): NaN and x >= 2^31 give the smallest value."""
    lo, hi = limits(dtype)
    return np.where(x < 2.0**31, np.clip(np.rint(x), lo, hi), lo).astype(dtype)


@np.errstate(all="ignore")
def quantize_linear(x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike, dtype: DTypeLike) -> Array:
    """Compute QuantizeLinear: rne(x / scale) + zero_point in `dtype` (int8 or uint8), saturated.

    NaN gives the smallest value.
    """
    lo, hi = limits(byte_type(dtype))
    zero = np.asarray(zero_point, np.int32)
    steps = np.rint(np.asarray(x, f32) / np.asarray(scale, f32))
    steps = np.where(np.isnan(steps), lo - zero, np.clip(steps, lo - zero, hi - zero))
    return np.asarray((steps + zero).astype(dtype))


@np.errstate(all="ignore")
def dequantize_linear(q: Array, scale: ArrayLike, zero_point: ArrayLike) -> Float32:
    """Compute DequantizeLinear: (q - zero_point) * scale in float32. q: bytes."""
    return np.asarray((q.astype(np.int32) - np.asarray(zero_point, np.int32)).astype(f32) * np.asarray(scale, f32))


MULTIPLIER_BITS = 24
"""Bits of a multiplier: those of the significand of a float32."""
SHIFT_BITS = 6
"""Bits of a shift."""


def conv_scale(sx: ArrayLike, sw: ArrayLike, sy: ArrayLike) -> Float32:
    """Return the scale of a convolution, from accumulator to output units: f32(f32(sx * sw) / sy), as onnxruntime.

    sx, sw, sy: scales of input, weights and output; they broadcast.

    >>> conv_scale(0.5, [0.25, 0.5], 0.125).tolist()
    [1.0, 2.0]
    """
    with np.errstate(all="ignore"):  # callers refuse results that are not finite
        product = np.asarray(sx, f32) * np.asarray(sw, f32)
        return np.asarray(product / np.asarray(sy, f32), f32)


def scale_to_multiplier(scale: ArrayLike) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return the multiplier (2^23 <= m < 2^24, or 0) and shift (0..63) with which `requantize` equals `requantize_f32`.

    scale: any shape, float32, finite and not negative (else ValueError). m * 2^-shift is `scale` exactly for
    2^-40 <= scale < 2^24. Below, every int32 times `scale` rounds to 0 and so does m = 0; above, every int32 but 0
    leaves the range of a byte and so it does with m = 2^23, shift = 0.

    >>> [int(v) for v in scale_to_multiplier(0.75)]
    [12582912, 24]
    """
    s = np.asarray(scale, f32)
    if not np.all(np.isfinite(s)) or np.any(s < 0):
        raise ValueError(f"a scale must be finite and not negative, not {s[~np.isfinite(s) | (s < 0)].flat[0]}")
    significand, exponent = np.frexp(s)  # s = significand * 2^exponent, 1/2 <= significand < 1
    multiplier = np.ldexp(significand, MULTIPLIER_BITS).astype(np.int64)
    shift = MULTIPLIER_BITS - exponent.astype(np.int64)
    tiny, huge = shift >= 1 << SHIFT_BITS, shift < 0
    multiplier = np.where(tiny, 0, np.where(huge, 1 << (MULTIPLIER_BITS - 1), multiplier))
    shift = np.where(tiny | huge | (s == 0), 0, shift)
    return np.asarray(multiplier, np.uint32), np.asarray(shift, np.uint8)


def requantize_f32(acc: ArrayLike, bias: ArrayLike, scale: ArrayLike, zero_point: int, lo: int, hi: int) -> Int32:
    """Compute onnxruntime's clip(rne(f32(f32(acc + bias) * scale)) + zero_point, lo, hi). Broadcasts.

    acc, bias: int32, their sum wraps. Returns int32, so that lo, hi may be those of int8 or of uint8.
    """
    total = _wrapping_sum(acc, bias).astype(f32)
    with np.errstate(over="ignore"):
        steps = np.rint(total * np.asarray(scale, f32))
    return (np.clip(steps, lo - zero_point, hi - zero_point) + zero_point).astype(np.int32)


def fit_slopes(slopes: ArrayLike, sx: float, zx: int, sy: float, zy: int, dtype: DTypeLike) -> Float32 | None:
    """Return weight scales [channels] for a QLinearConv that gives the bytes of a float PRelu with these `slopes`.

    The weight of a slope is its sign. onnxruntime computes quantise(dequantise(x) * slope) in float32; the scales are
    the slopes without sign, or floats next to them, for which all x below zx give its bytes. None if there are none.

    >>> fit_slopes([0.25, -0.1], 0.5, 3, 0.25, -2, np.int8).tolist()
    [0.25, 0.10000000149011612]
    """
    kind = byte_type(dtype)
    lo, hi = limits(kind)
    factors = np.asarray(slopes, f32).reshape(-1, 1)
    if not np.all(np.isfinite(factors)):
        return None
    x = np.arange(lo, zx).astype(kind)
    expected = quantize_linear(dequantize_linear(x, sx, zx) * factors, sy, zy, kind)
    acc = (x.astype(np.int32) - zx) * np.sign(factors).astype(np.int32)
    nearest = np.where(factors == 0, f32(1), np.abs(factors))
    fitted, is_exact = nearest, np.zeros(factors.shape, bool)
    for steps in (0, 1, -1, 2, -2):
        scales = (nearest.view(np.int32) + steps).view(f32)  # the floats `steps` places above
        with np.errstate(all="ignore"):
            same = requantize_f32(acc, 0, conv_scale(sx, scales, sy), zy, lo, hi) == expected
        is_right = same.all(axis=1, keepdims=True) & (scales > 0)
        fitted = np.where(is_right & ~is_exact, scales, fitted)
        is_exact |= is_right
    return fitted.reshape(-1) if is_exact.all() else None


def requantize(
    acc: ArrayLike,
    bias: ArrayLike,
    multiplier: ArrayLike,
    shift: ArrayLike,
    zero_point: int,
    lo: int = -128,
    hi: int = 127,
) -> Int8:
    """Compute the hardware's requantiser, in integers only.

    acc and bias are int32; arguments broadcast; returns int8.

    1. v = acc + bias, wrapping; beyond 2^24 rounded to 24 significant bits, nearest even (as int32 -> float32 does).
    2. p = v * multiplier, exact (at most 55 bits and a sign).
    3. y = p / 2^shift rounded to nearest; to even where |fraction - 1/2| <= half a unit of p's 24th significant bit.
       Those are the p whose float32 rounding is the tie itself.
    4. clip(y + zero_point, lo, hi).
    """
    v = _round_to_24_bits(_wrapping_sum(acc, bias).astype(np.int64))
    p = v * np.asarray(multiplier, np.int64)
    return np.clip(_divide_f32(p, np.asarray(shift, np.int64)) + zero_point, lo, hi).astype(np.int8)


def _wrapping_sum(acc: ArrayLike, bias: ArrayLike) -> Int32:
    """Return acc + bias modulo 2^32, as the hardware adds int32."""
    total = np.asarray(acc, np.int64) + np.asarray(bias, np.int64)
    return np.asarray(total & 0xFFFFFFFF, np.uint32).view(np.int32)


def _bit_length(magnitude: Int64) -> Int64:
    """Return the number of bits of each integer, none negative or with more than 53 significant bits."""
    return np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)


def _round_to_24_bits(v: Int64) -> Int64:
    """Round to 24 significant bits, to nearest even, as int32 -> float32 does."""
    drop = np.maximum(_bit_length(np.abs(v)) - MULTIPLIER_BITS, 0)
    return np.left_shift(divide_even(v, drop), drop)


def divide_even(x: Int64, shift: ArrayLike) -> Int64:
    """Divide x by 2^shift (0..62), rounded to nearest, ties to even."""
    down = np.right_shift(x, shift)
    twice_remainder = (x - np.left_shift(down, shift)) << 1
    divisor = np.left_shift(np.int64(1), shift)
    rounds_up = (twice_remainder > divisor) | ((twice_remainder == divisor) & (down & 1 == 1))
    return np.asarray(down + rounds_up, np.int64)


def _divide_f32(p: Int64, shift: Int64) -> Int64:
    """Divide p (|p| < 2^56) by 2^shift, rounded to nearest, ties to even.

    Fractions that float32 cannot distinguish from 1/2 count as ties, as onnxruntime rounds the product to float32.
    """
    p, shift = np.broadcast_arrays(p, shift)
    is_zero = shift > 58  # |p| / 2^59 < 1/4: rounds to 0
    shift = np.where(is_zero, 0, shift)
    down = np.right_shift(p, shift)
    fraction = p - np.left_shift(down, shift)
    half = np.left_shift(np.int64(1), shift) >> 1
    excess = _bit_length(np.abs(p)) - MULTIPLIER_BITS  # bits that the product loses in float32
    tie_width = np.where(excess > 0, np.left_shift(np.int64(1), np.maximum(excess, 1) - 1), 0)
    is_tie = (np.abs(fraction - half) <= tie_width) & (shift > 0)
    up = np.where(is_tie, down & 1 == 1, fraction > half)
    return np.asarray(np.where(is_zero, 0, down + (up & (shift > 0))), np.int64)


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
