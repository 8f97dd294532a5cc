"""Element types by name and by ONNX's numbers. Types that numpy lacks come from ml_dtypes, if installed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

ONNX_TYPES = dict(enumerate((
    "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "object", "bool", "float16", "float64", "uint32",
    "uint64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "uint4", "int4", "float4_e2m1fn", "float8_e8m0fnu", "uint2", "int2",
), start=1))  # fmt: skip
"""onnx.TensorProto.DataType -> name of the element type; strings are numpy objects."""


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy type called `name`. Raises ImportError where it needs ml_dtypes, which is missing."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"element type {name} needs ml_dtypes; install it: pip install ml_dtypes") from None
    kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return kind


def itemsize(name: str) -> int:
    """Return the bytes of an element. Raises ImportError like `numpy_dtype`."""
    return numpy_dtype(name).itemsize


def is_float(kind: np.dtype[Any]) -> bool:
    """Return whether `kind` is a float of any width, of numpy or ml_dtypes, or complex."""
    return kind.kind in "fc" or "float" in kind.name
