"""Element-wise functions of bytes, as tables of their 256 results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import DTypeLike

from celosia.compiler.numerics.quantize import (
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
