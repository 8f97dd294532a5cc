"""Bound what rounding alone may make of a float tensor, as of a small difference of large numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.selfcheck.original import Bounds, Original, shaken
from celosia.compiler.selfcheck.tolerance import outside

Array = NDArray[Any]
DRAWS, SHARE = 3, 16
"""Of what rounding alone does, and by which its largest is multiplied: another order of roundings is one draw more."""
SIGNS = 32
"""Draws that tell whether rounding decides that there is a result, as of the root of what cancels."""


def beyond_rounding(original: Original, tensor: int, given: Mapping[int, Any], bounds: Bounds, found: Array) -> str:
    """How `found` lies outside of `bounds`, which are floats, further than rounding explains; "" where it does not.

    Where it moves results by what is too little, it may move all that is given, too, as within a sum that cancels: for
    each element by what it does to that alone, and it may decide whether there is a result, or which infinite one.
    """
    plain = bounds[0]
    drawn = _drawn(original, tensor, given, plain, DRAWS)
    moved: Any = max((np.max(_apart(each, plain), initial=0.0) for each in drawn), default=0.0)
    if not outside(found, *bounds, SHARE * float(moved)):
        return ""
    moved = np.zeros(plain.shape)
    is_finite, is_open = np.isfinite(plain), np.zeros(plain.shape, bool)
    for again in _drawn(original, tensor, given, plain, SIGNS, inputs=True):
        moved = np.maximum(moved, _apart(again, plain))
        is_finite, is_open = is_finite | np.isfinite(again), is_open | (_kind(again) != _kind(plain))
    undefined = is_open & (_kind(found) != _kind(plain)) & (is_finite | ~np.isfinite(found))
    return outside(np.where(undefined, plain, found), *bounds, SHARE * moved)


def _kind(array: Array) -> NDArray[np.int8]:
    """0 for each number, 1 and -1 for the infinite ones, 2 for what is none."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(array), 2, np.isinf(array) * np.sign(array)).astype(np.int8)


def _drawn(
    original: Original, tensor: int, given: Mapping[int, Any], plain: Array, count: int, inputs: bool = False
) -> Iterator[Array]:
    """`tensor` from `given`, where each result of the imported model's operators moves by one unit in the last place at
    random (CESTAC: Vignes 1993), and so does what is given where `inputs`."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        known = {each: (shaken(value, rng) if inputs else value,) * 2 for each, value in given.items()}
        again, _ = original.compute(tensor, known, shake=rng)
        if np.shape(again) == plain.shape:
            yield again


def _apart(again: Array, plain: Array) -> Array:
    """How far elements lie from `plain`; 0 where that is no number."""
    with np.errstate(all="ignore"):
        apart = np.abs(again.astype(np.float64) - plain)
    return np.where(np.isfinite(apart), apart, 0.0)
