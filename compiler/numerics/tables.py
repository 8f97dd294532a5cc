"""Tables of functions of bytes: 256 results of an element-wise function, and the powers of QLinearSoftmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from celosia.compiler.numerics.requantiser import (
    Array,
    Float32,
    Int8,
    byte_type,
    dequantize_linear,
    f32,
    limits,
    quantize_linear,
)


def unary_table(
    function: Callable[[Float32], Array], sx: float, zx: int, sy: float, zy: int, dtype: DTypeLike,
    result_dtype: DTypeLike | None = None,
) -> Int8:  # fmt: skip
    """Tabulate dequantise -> function -> quantise for all bytes: [256] int8, entry i for the stored byte i - 128.

    function: of a float32 array, element by element. dtype: int8 or uint8, of the input. result_dtype: of the result;
    None for that of the input.

    >>> unary_table(np.abs, 0.5, 0, 0.5, 0, np.int8)[[0, 127, 128, 255]].tolist()
    [127, 1, 0, 127]
    """
    kind = byte_type(dtype)
    result_kind = kind if result_dtype is None else byte_type(result_dtype)
    lo, hi = limits(kind)
    x = dequantize_linear(np.arange(lo, hi + 1).astype(kind), sx, zx)
    with np.errstate(all="ignore"):
        y = function(x)
    return (quantize_linear(y, sy, zy, result_kind).astype(np.int64) - (limits(result_kind)[0] + 128)).astype(np.int8)


def identity_table(sx: float, zx: int, sy: float, zy: int, dtype: DTypeLike) -> Int8:
    """Tabulate a change of scale and zero point, as QLinearConcat does it with each operand."""
    return unary_table(lambda x: x, sx, zx, sy, zy, dtype)


def exponent_room(count: int) -> float:
    """Return the exponent to which QLinearSoftmax shifts the largest element of a row of `count`.

    With it the sum of all powers stays a finite float32. The logarithm is rounded to float32 as in onnxruntime: it
    decides the last bit of the powers, and so ties of a few equal values.
    """
    largest_sum_term = np.float64(np.finfo(f32).max / f32(count))
    return max(0.0, float(f32(np.log(largest_sum_term))) - 5)


def largest_power(count: int) -> float:
    """Return an upper bound of the powers of a row of `count` elements, with a margin for float32 scales."""
    return float(np.exp(exponent_room(count))) * (1 + 1e-4)


def softmax_powers(count: int, sx: float, sy: float) -> Array:
    """Return the tables of QLinearSoftmax for rows of `count` elements: [512] float32.

    An index of either half is 255 plus the distance from the row's largest element, -255 to 0. The first half holds
    powers, the second half the powers times the output units in 1.
    """
    sx = float(f32(sx))
    powers = np.exp((np.arange(256) - 255 + exponent_room(count) / sx) * sx).astype(f32)
    with np.errstate(over="ignore"):
        return np.concatenate([powers, powers * np.floor(f32(1) / f32(sy))])


def qlinear_softmax(x: Array, sx: float, sy: float, zy: int) -> Array:
    """Compute com.microsoft.QLinearSoftmax over the last axis.

    x: int8 or uint8; its zero point does not matter. Returns that type.

    Exponentials come from a table, scaled so that the sum stays below the largest float32; the row's maximum selects
    its last entry. Sums run left to right in float32, and the output scale counts as 1 / floor(1 / sy). A power times
    floor(1 / sy) may be infinite, as in a row of one element with sy = 1/256. Then the result is what x86 converts
    infinity to: the smallest int32, or 0 as uint32.
    """
    lo, hi = limits(byte_type(x.dtype))
    powers, scaled_powers = np.split(softmax_powers(x.shape[-1], sx, sy), 2)
    steps = x.astype(np.int64)
    indices = 255 + steps - steps.max(axis=-1, keepdims=True)
    total = np.zeros(x.shape[:-1], f32)
    for i in range(x.shape[-1]):
        total = total + powers[indices[..., i]]
    y = np.rint(scaled_powers[indices] / total[..., None])
    if lo < 0:
        units = np.where(y < 2**31, y, f32(-(2**31))).astype(np.int32) + np.int32(zy)  # wraps
    else:
        units = np.where(y < 2**63, y, f32(0)).astype(np.int64) % 2**32 + zy
    return np.asarray(np.clip(units, lo, hi).astype(x.dtype))
