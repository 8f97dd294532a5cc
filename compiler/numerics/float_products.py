"""Integers with the bytes of convolutions and matrix products that onnxruntime computes in float32.

Float32 holds integers up to 2^24. A sum of products is exact in every order, with and without fused multiply-adds, if
all its terms are multiples of one power of two, the unit, and their magnitudes add up to at most 2^24 units. The range
of the activations and the weights bound that sum. Scales that are powers of two give such sums, others of few
significant bits may.

The float result is then one monotone function of the integer sum, and QuantizeLinear rounds it once. The requantiser
has the same bytes if it changes from one byte to the next at the same integers, which `fit_float_product` verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from celosia.compiler.numerics.requantiser import (
    MULTIPLIER_BITS,
    Float32,
    Float64,
    Int32,
    Int64,
    byte_type,
    conv_scale,
    f32,
    global_average_scale,
    limits,
    quantize_linear,
    requantize_f32,
)

SMALLEST_UNIT = -126
"""Exponent of the least unit: that of the smallest normal float32, as processors may flush smaller ones to zero."""
SCALE_STEPS = (0, 1, -1, 2, -2)
"""Floats that are tried as the scale of a channel's weights: places above the model's."""
LARGEST_BIAS = 2.0**30
"""Limit of a bias, so that its sums are those of int32."""
WINDOW = 2
"""Integers on each side of a threshold of the requantiser at which `fit_float_product` compares bytes."""


class RoundingError(ValueError):
    """No integers have the bytes of a float product; the message says why."""


@dataclass(frozen=True)
class FloatProduct:
    """Operands with which QLinearConv has the bytes of a product of floats.

    bias: int32 [channels]. w_scale: [channels]. zero_point: of the result.
    """

    bias: Int32
    w_scale: Float32
    zero_point: int


def fit_float_product(
    w: NDArray[Any], sw: ArrayLike, bias: ArrayLike, sx: float, zx: int, x_dtype: DTypeLike, sy: float, zy: int,
    y_dtype: DTypeLike,
) -> FloatProduct:  # fmt: skip
    """Return the operands with which integers have the bytes of quantise(sum(dequantise(x) * w * sw) + bias).

    w: integer weights without their zero point, [channels, ...]. sw: their scale, or one for each channel. bias:
    float32, for each channel. Raises RoundingError if a float32 sum may round, or if no operands have the same bytes.

    >>> fit_float_product(np.array([[3], [-2]]), 0.25, [0.125, 1.0], 0.5, 0, np.int8, 1.0, 0, np.int8).bias.tolist()
    [1, 8]
    """
    kind_x, kind_y = byte_type(x_dtype), byte_type(y_dtype)
    channels = len(w)
    weights = w.reshape(channels, -1).astype(np.int64)
    scales = np.broadcast_to(np.asarray(sw, f32).reshape(-1), (channels,))
    offsets = np.broadcast_to(np.asarray(bias, f32).reshape(-1), (channels,)).astype(np.float64)
    if not 0 < f32(sy) < np.inf:
        raise RoundingError(f"the scale of its result is {sy}")
    span = _span(weights, zx, kind_x)
    step = _exact_step(span, scales, offsets, sx)

    def float_bytes(acc: Int64) -> NDArray[Any]:
        """Return the bytes that the model computes from integer sums [channels, n]."""
        return quantize_linear(acc * step[:, None] + offsets[:, None], sy, zy, kind_y)

    steps = offsets / step  # exact, or rounded if the bias lies between two integer sums
    for zero in dict.fromkeys((zy, *limits(kind_y))):
        fitted = _fit_channels(float_bytes, span, steps, scales, (sx, sy, zy), zero, kind_y)
        if fitted is not None:
            return fitted
    raise RoundingError("no integer bias and scale of 24 bits round as its floats do")


def nearest_float_product(
    w: NDArray[Any], sw: ArrayLike, bias: ArrayLike, sx: float, zx: int, x_dtype: DTypeLike, sy: float, zy: int,
    y_dtype: DTypeLike,
) -> FloatProduct:  # fmt: skip
    """Return the operands with which integers compute the same product as `fit_float_product`, but round correctly.

    The bias is rounded to steps of the products. The sum is exact, and is rounded once. RoundingError if an int32 may
    not hold it.
    """
    kind_x, channels = byte_type(x_dtype), len(w)
    weights = w.reshape(channels, -1).astype(np.int64)
    scales = np.broadcast_to(np.asarray(sw, f32).reshape(-1), (channels,)).copy()
    offsets = np.broadcast_to(np.asarray(bias, f32).reshape(-1), (channels,)).astype(np.float64)
    step = np.float64(f32(sx)) * scales.astype(np.float64)
    factor = conv_scale(sx, scales, sy)
    if not (np.all(step > 0) and np.all((factor > 0) & np.isfinite(factor)) and np.all(np.isfinite(offsets))):
        raise RoundingError("a scale is not positive and finite, or a bias is not finite")
    low, high = _span(weights, zx, kind_x)
    steps = np.rint(offsets / step)
    if np.any(np.maximum(high, -low) + np.abs(steps) >= 2.0**31):
        raise RoundingError("its sums, or its bias in steps of the products, are beyond int32")
    return FloatProduct(steps.astype(np.int32), scales, zy)


@np.errstate(all="ignore")
def fit_scaled_mean(
    count: int, factor: float, sx: float, zx: int, sy: float, zy: int, dtype: DTypeLike
) -> np.float32 | None:
    """Return the scale of the input with which QLinearGlobalAveragePool has the bytes of quantise(mean * factor).

    onnxruntime computes the mean of `count` dequantised values in float32 as their sum over `count`, and multiplies the
    result by `factor`. None if a sum may round, or if no scale has the same bytes.

    >>> float(fit_scaled_mean(49, 1.0048828125, 0.03125, 0, 0.03125, 0, np.int8))
    0.031402587890625
    """
    kind, divisor, number = byte_type(dtype), f32(count), f32(factor)
    span = _span(np.ones((1, count), np.int64), zx, kind)
    try:
        (step,) = _exact_step(span, np.ones(1, f32), np.zeros(1), sx)
    except RoundingError:
        return None
    if not (0 < f32(sy) < np.inf and 0 < number < np.inf):
        return None

    def float_bytes(acc: Int64) -> NDArray[Any]:
        """Return the bytes that the model computes from integer sums."""
        return quantize_linear((acc * step).astype(f32) / divisor * number, sy, zy, kind)

    nearest = np.asarray([f32(sx) * number], f32)
    for places in SCALE_STEPS:
        candidate = (nearest.view(np.int32) + places).view(f32)
        scale = global_average_scale(candidate[0], sy, count).reshape(1)
        if 0 < scale[0] < np.inf and _has_same_bytes(float_bytes, span, np.zeros(1, np.int64), scale, zy, kind)[0]:
            return np.float32(candidate[0])
    return None


def _span(weights: Int64, zx: int, kind: np.dtype[Any]) -> tuple[Int64, Int64]:
    """Return the least and the greatest integer sum of each channel, and so of each part of its products.

    Padding is 0, so that any products may be missing.
    """
    low, high = (np.int64(end - zx) for end in limits(kind))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    positive, negative = np.maximum(weights, 0).sum(axis=1), np.minimum(weights, 0).sum(axis=1)
    return positive * low + negative * high, positive * high + negative * low


def _exact_step(span: tuple[Int64, Int64], scales: Float32, offsets: Float64, sx: float) -> Float64:
    """Return the real that 1 in the integer sum stands for, [channels], if no sum of the products rounds.

    Raises RoundingError if one may.
    """
    numbers = np.concatenate(([f32(sx)], scales)).astype(np.float64)
    if not np.all(np.isfinite(numbers)) or np.any(numbers <= 0) or not np.all(np.isfinite(offsets)):
        raise RoundingError("a scale is not positive and finite, or a bias is not finite")
    step = numbers[0] * numbers[1:]
    exponent = _lowest_bit(numbers[:1]) + _lowest_bit(numbers[1:])
    unit_exponent = np.where(offsets == 0, exponent, np.minimum(exponent, _lowest_bit(offsets)))
    largest = np.maximum(np.maximum(offsets, 0) + span[1] * step, np.maximum(-offsets, 0) - span[0] * step)
    worst = float(np.ldexp(largest, -unit_exponent).max(initial=0))
    if worst > 2.0**MULTIPLIER_BITS:
        bits = int(np.ceil(np.log2(worst)))
        raise RoundingError(f"its sums may take {bits} bits, and float32 holds {MULTIPLIER_BITS}")
    if unit_exponent.min(initial=0) < SMALLEST_UNIT or not np.all(largest < float(np.finfo(f32).max)):
        raise RoundingError("its sums are beyond the range of float32")
    return np.asarray(step, np.float64)


def _lowest_bit(values: NDArray[Any]) -> Int64:
    """Return the exponent of the largest power of two of which each float32 is a multiple; 0 for zero."""
    significand, exponent = np.frexp(values.astype(np.float64))
    integers = np.abs(np.ldexp(significand, MULTIPLIER_BITS)).astype(np.int64)
    lowest = integers & -integers
    return np.where(integers == 0, 0, exponent - MULTIPLIER_BITS + np.frexp(lowest)[1] - 1).astype(np.int64)


def _fit_channels(
    float_bytes: Callable[[Int64], NDArray[Any]], span: tuple[Int64, Int64], steps: Float64, scales: Float32,
    numbers: tuple[float, float, int], zero: int, kind: np.dtype[Any],
) -> FloatProduct | None:  # fmt: skip
    """Return integers for all channels with the zero point `zero`; None if a channel has none.

    steps: the bias in steps of the integer sum. numbers: sx, sy, zy.

    A bias between two integer sums never gives a tie: one of the two rounds up, the other down. With the least byte as
    zero point, all results are sums above 0, and a scale that is one place larger rounds their ties up. With the
    greatest byte all are below 0, and a smaller scale does. Channels whose bias is an integer need ties to even, which
    one of the two zero points keeps: that at an even distance from zy.
    """
    sx, sy, zy = numbers
    bias, fitted_scales = np.zeros(len(steps), np.int64), scales.copy()
    is_exact = np.zeros(len(steps), bool)
    with np.errstate(all="ignore"):
        shifted = steps + (zy - zero) * (1 / conv_scale(sx, scales, sy).astype(np.float64))
    for places in SCALE_STEPS:
        candidate_scales = (scales.view(np.int32) + places).view(f32)
        for rounded in dict.fromkeys((np.floor, np.ceil)):
            candidate = rounded(shifted)
            scale = conv_scale(sx, candidate_scales, sy)
            is_possible = ~is_exact & (np.abs(candidate) < LARGEST_BIAS) & (scale > 0) & np.isfinite(scale)
            integers = np.where(is_possible, candidate, 0).astype(np.int64)
            is_right = is_possible & _has_same_bytes(float_bytes, span, integers, scale, zero, kind)
            bias, fitted_scales = (
                np.where(is_right, integers, bias),
                np.where(is_right, candidate_scales, fitted_scales),
            )
            is_exact |= is_right
            if is_exact.all():
                return FloatProduct(bias.astype(np.int32), fitted_scales, zero)
    return None


@np.errstate(all="ignore")
def _has_same_bytes(
    float_bytes: Callable[[Int64], NDArray[Any]], span: tuple[Int64, Int64], bias: Int64, scale: Float32, zero: int,
    kind: np.dtype[Any],
) -> NDArray[np.bool_]:  # fmt: skip
    """Return for which channels the requantiser has the bytes of `float_bytes` at all integer sums within `span`.

    Both are monotone. They are equal if, for each byte, they are equal at a few integers in a row, and both reach the
    byte among these.
    """
    low, high = limits(kind)
    targets = np.arange(low + 1, high + 1)
    thresholds = (targets - zero - 0.5) / scale.astype(np.float64)[:, None] - bias[:, None]
    centres = np.clip(np.rint(thresholds), span[0][:, None], span[1][:, None]).astype(np.int64)  # [channels, targets]
    is_right = np.ones(len(bias), bool)
    for offset in range(-WINDOW, WINDOW + 1):
        acc = np.clip(centres + offset, span[0][:, None], span[1][:, None])
        floats = float_bytes(acc).astype(np.int32)
        own = requantize_f32(acc, bias[:, None], scale[:, None], zero, low, high)
        is_right &= (floats == own).all(axis=1)
        if offset == -WINDOW:
            is_right &= ((own < targets) | (acc == span[0][:, None])).all(axis=1)
        elif offset == WINDOW:
            is_right &= ((own >= targets) | (acc == span[1][:, None])).all(axis=1)
    return is_right
