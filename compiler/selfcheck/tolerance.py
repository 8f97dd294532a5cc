"""Tolerance of the check: how far a tensor of the compiled model may lie from the imported model's bounds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import is_float
from celosia.compiler.selfcheck.imported_model import bounds_distance

Array = NDArray[Any]
RELATIVE, ABSOLUTE = 1e-4, 2e-5
"""Change of floats by another order of sums, relative to the element and to the largest of the tensor."""
ROUNDINGS = 8
"""Roundings of 16-bit floats, one per operator, between two compared tensors."""


def difference_from_bounds(actual: Any, low: Any, high: Any, margin: float | Array = 0.0) -> str:
    """Describe how `actual` lies outside of the bounds; "" where it does not.

    margin: added tolerance of floats, for each element or for all.
    """
    if isinstance(low, list):
        is_like = isinstance(actual, list) and len(actual) == len(low)
        return next(filter(None, map(difference_from_bounds, actual, low, high)), "") if is_like else "another sequence"
    if low is None or actual is None:
        return "" if low is actual else "one is an empty optional"
    actual, low, high = np.asarray(actual), np.asarray(low), np.asarray(high)
    if (actual.dtype, actual.shape) != (low.dtype, low.shape):
        return f"it is {actual.dtype}{list(actual.shape)}, and {low.dtype}{list(low.shape)} in the model"
    if actual is low or not actual.size:
        return ""
    if low.dtype.kind == "O":
        wrong = actual != low
    elif is_float(low.dtype):
        wrong = _is_too_far(actual, low, high, margin)
    else:
        least, most = np.minimum(low, high), np.maximum(low, high)
        wrong = (actual < least) | (actual > most)
    if not wrong.any():
        return ""
    positions = np.argwhere(wrong)
    first = tuple(int(index) for index in positions[0])
    return (
        f"{len(positions)} of {actual.size} values, the first at {list(first)}: expected {low.item(first)}, found "
        f"{actual.item(first)}"
    )


def _is_too_far(actual: Array, low: Array, high: Array, margin: float | Array) -> Array:
    """Return where floats are further from [low, high] than another order of sums explains."""
    wide = np.complex128 if actual.dtype.kind == "c" else np.float64
    a, b = actual.astype(wide), low.astype(wide)
    sizes = np.where(np.isfinite(b), np.abs(b), 0.0)
    with np.errstate(all="ignore"):
        allowed = margin + _rounding_loss(actual.dtype, sizes) + (0.0 if low is high else bounds_distance(low, high))
        is_far: Array = ~((np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b)))
    return is_far


def _rounding_loss(kind: np.dtype[Any], sizes: Array) -> Array:
    """Bound the rounding loss of elements of such sizes: in float16 one rounding after each operator, in a byte one."""
    eps = float(ml_dtypes.finfo(kind).eps)
    if kind.itemsize == 1:
        return eps * np.maximum(sizes, float(ml_dtypes.finfo(kind).smallest_subnormal))
    coarse = ROUNDINGS * eps if eps > np.finfo(np.float32).eps else 0.0
    lost: Array = (RELATIVE + coarse) * sizes + (ABSOLUTE + coarse) * np.max(sizes, initial=0.0)
    return lost
