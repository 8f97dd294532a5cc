"""Types of arrays, and saturation to bytes as onnxruntime's kernels do it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Int8 = NDArray[np.int8]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

f32 = np.float32


def byte_type(dtype: DTypeLike) -> np.dtype[Any]:
    """`dtype` as numpy's. TypeError where it is neither int8 nor uint8."""
    kind = np.dtype(dtype)
    if kind not in (np.dtype(np.int8), np.dtype(np.uint8)):
        raise TypeError(f"expected int8 or uint8, not {kind}")
    return kind


def limits(kind: np.dtype[Any]) -> tuple[int, int]:
    """The least and the largest value of an integer type."""
    return int(np.iinfo(kind).min), int(np.iinfo(kind).max)


def convert_saturating(x: Float32, dtype: np.dtype[Any]) -> Array:
    """Round to even and saturate as cvtps2dq and the packs after it do: NaN and x >= 2^31 give the smallest value."""
    lo, hi = limits(dtype)
    return np.where(x < 2.0**31, np.clip(np.rint(x), lo, hi), lo).astype(dtype)
