"""Functions of bytes as tables: element-wise functions with 256 results, and the powers of QLinearSoftmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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
from celosia.compiler.program.host.float32_math import logistic


def unary_table(
    op: str | Callable[[Float32], Array],
    attributes: Mapping[str, float],
    sx: float,
    zx: int,
    sy: float,
    zy: int,
    dtype: DTypeLike,
) -> Int8:
    """Tabulate dequantise -> op -> quantise for all bytes: [256] int8, entry i for the stored byte i - 128.

    op: a key of UNARY, or a function of a float32 array, which gets no attributes. dtype: int8 or uint8, of input and
    result. "Identity" changes the scale, as QLinearConcat does with each operand. Raises KeyError for an unknown name.

    >>> unary_table("Relu", {}, 0.5, 0, 0.5, 0, np.int8)[[0, 127, 128, 255]].tolist()
    [0, 0, 0, 127]
    """
    kind = byte_type(dtype)
    lo, hi = limits(kind)
    x = dequantize_linear(np.arange(lo, hi + 1).astype(kind), sx, zx)
    with np.errstate(all="ignore"):
        y = UNARY[op](x, **attributes) if isinstance(op, str) else op(x)
    return (quantize_linear(y, sy, zy, kind).astype(np.int64) - (lo + 128)).astype(np.int8)


def _hard_sigmoid(x: Float32, alpha: float = 0.2, beta: float = 0.5) -> Float32:
    """Return clip(alpha * x + beta, 0, 1) in float32."""
    return np.asarray(np.clip(f32(alpha) * x + f32(beta), f32(0), f32(1)))


def _clip(x: Float32, min: float = -np.inf, max: float = np.inf) -> Float32:
    """Return x within [min, max]; a bound that is NaN has no effect."""
    x = np.where(x < f32(min), f32(min), x)
    return np.where(f32(max) < x, f32(max), x)


def _gelu(x: Array) -> Array:
    """Return gelu(x) by erf."""
    return np.asarray(0.5 * x * (1 + _erf(x * math.sqrt(0.5))))


def _in_float64(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return `function` of its argument converted to float64, so that only the table rounds its result."""
    return lambda x, **attributes: function(x.astype(np.float64), **attributes)


_erf: Callable[[Array], Array] = np.vectorize(math.erf, otypes=[np.float64])

UNARY: dict[str, Callable[..., Array]] = {
    "Identity": lambda x: x,
    "Relu": lambda x: np.maximum(x, f32(0)),
    "LeakyRelu": lambda x, alpha=0.01: np.where(x >= 0, x, f32(alpha) * x),
    "Clip": _clip,
    "Sigmoid": logistic,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda x: x * _hard_sigmoid(x, 1 / 6),
    "ThresholdedRelu": lambda x, alpha=1.0: np.where(x > f32(alpha), x, f32(0)),
    "Abs": np.abs,
    "Neg": np.negative,
    "Sqrt": np.sqrt,
    "Reciprocal": lambda x: f32(1) / x,
    "Ceil": np.ceil,
    "Floor": np.floor,
    "Round": np.rint,
    # The functions above repeat onnxruntime bit by bit. Those below round once, where onnxruntime errs by a few units
    # of the last place of float32: an entry can differ where its value is that near to a tie (see docs/numerics.md).
    "Elu": _in_float64(lambda x, alpha=1.0: np.where(x >= 0, x, alpha * np.expm1(x))),
    "Erf": _in_float64(_erf),
    "Exp": _in_float64(np.exp),
    "Gelu": _in_float64(_gelu),
    "Log": _in_float64(np.log),
    "Mish": _in_float64(lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "Softplus": _in_float64(lambda x: np.logaddexp(x, 0)),
    "Softsign": _in_float64(lambda x: x / (1 + np.abs(x))),
    "Tanh": _in_float64(np.tanh),
}
"""Operator -> function of a float32 array and, by name, of the operator's attributes."""


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
