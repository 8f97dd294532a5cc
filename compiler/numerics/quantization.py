"""QuantizeLinear and DequantizeLinear, as onnxruntime computes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from celosia.compiler.numerics.array_types import Array, Float32, byte_type, f32, limits


@np.errstate(all="ignore")
def quantize_linear(x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike, dtype: DTypeLike) -> Array:
    """Compute rne(x / scale) + zero_point, saturated; NaN gives the smallest value. dtype: int8 or uint8."""
    lo, hi = limits(byte_type(dtype))
    zero = np.asarray(zero_point, np.int32)
    steps = np.rint(np.asarray(x, f32) / np.asarray(scale, f32))
    steps = np.where(np.isnan(steps), lo - zero, np.clip(steps, lo - zero, hi - zero))
    return np.asarray((steps + zero).astype(dtype))


@np.errstate(all="ignore")
def dequantize_linear(q: Array, scale: ArrayLike, zero_point: ArrayLike) -> Float32:
    """Compute (q - zero_point) * scale in float32."""
    return np.asarray((q.astype(np.int32) - np.asarray(zero_point, np.int32)).astype(f32) * np.asarray(scale, f32))
