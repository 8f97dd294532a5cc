"""Requantisation of int32 sums to int8, as in QLinearConv, QGemm, QLinearMatMul and QLinearGlobalAveragePool."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from celosia.compiler.numerics.quantize import Float32, Int8, Int32, Int64, f32

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


def fold_scale(scale: ArrayLike) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return the multiplier (2^23 <= m < 2^24, or 0) and shift (0..63) with which `requantize` equals `requantize_f32`.

    scale: any shape, float32, finite and not negative (else ValueError). m * 2^-shift is `scale` exactly for
    2^-40 <= scale < 2^24. Below, every int32 times `scale` rounds to 0 and so does m = 0; above, every int32 but 0
    leaves the range of a byte and so it does with m = 2^23, shift = 0.

    >>> [int(v) for v in fold_scale(0.75)]
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
