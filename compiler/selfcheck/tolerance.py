"""Bound how far a tensor of the compiled model may lie from what the imported one says."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import is_float
from celosia.compiler.selfcheck.original import spread

Array = NDArray[Any]
RELATIVE, ABSOLUTE = 1e-4, 2e-5
"""What another order of sums may change of floats: a share of the element, and of the largest of the tensor."""
ROUNDINGS = 8
"""Of 16-bit floats, one per operator, between two tensors that are compared."""


def outside(found: Any, low: Any, high: Any, more: float | Array = 0.0) -> str:
    """How `found` lies outside of what the model allows, floats by `more`, for each element or
    for all; "" where it does not."""
    if isinstance(low, list):
        same = isinstance(found, list) and len(found) == len(low)
        return next(filter(None, map(outside, found, low, high)), "") if same else "another sequence"
    if low is None or found is None:
        return "" if low is found else "one is an empty optional"
    found, low, high = np.asarray(found), np.asarray(low), np.asarray(high)
    if (found.dtype, found.shape) != (low.dtype, low.shape):
        return f"it is {found.dtype}{list(found.shape)}, and {low.dtype}{list(low.shape)} in the model"
    if found is low or not found.size:
        return ""
    if low.dtype.kind == "O":
        wrong = found != low
    elif is_float(low.dtype):
        wrong = _far(found, low, high, more)
    else:
        least, most = np.minimum(low, high), np.maximum(low, high)
        wrong = (found < least) | (found > most)
    if not wrong.any():
        return ""
    places = np.argwhere(wrong)
    first = tuple(int(index) for index in places[0])
    return (
        f"{len(places)} of {found.size} values, the first at {list(first)}: expected {low.item(first)}, found "
        f"{found.item(first)}"
    )


def _far(found: Array, low: Array, high: Array, more: float | Array) -> Array:
    """Where floats are further from what lies between `low` and `high` than another order of sums takes them."""
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    a, b = found.astype(wide), low.astype(wide)
    sizes = np.where(np.isfinite(b), np.abs(b), 0.0)
    with np.errstate(all="ignore"):
        allowed = more + _lost(found.dtype, sizes) + (0.0 if low is high else spread(low, high))
        far: Array = ~((np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b)))
    return far


def _lost(kind: np.dtype[Any], sizes: Array) -> Array:
    """What elements of such sizes may lose: in float16 a rounding after each operator, in a byte, which only holds
    numbers, one."""
    eps = float(ml_dtypes.finfo(kind).eps)
    if kind.itemsize == 1:
        return eps * np.maximum(sizes, float(ml_dtypes.finfo(kind).smallest_subnormal))
    coarse = ROUNDINGS * eps if eps > np.finfo(np.float32).eps else 0.0
    lost: Array = (RELATIVE + coarse) * sizes + (ABSOLUTE + coarse) * np.max(sizes, initial=0.0)
    return lost
