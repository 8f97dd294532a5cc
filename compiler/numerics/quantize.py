"""Types of arrays, and quantisation to bytes with saturation, as in onnxruntime's kernels."""

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
