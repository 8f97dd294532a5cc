"""Tolerance of the second check: how far a compiled model's tensor may lie from the imported model's bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import is_float
from celosia.compiler.selfcheck.imported_model import Bounds, Original, bounds_distance, perturb

Array = NDArray[Any]
RELATIVE, ABSOLUTE = 1e-4, 2e-5
"""How much another order of a sum may change a float: relative to the element, and to the largest element of the
tensor.
"""
ROUNDINGS = 8
"""Number of roundings of 16-bit floats, one per operator, that may lie between two compared tensors."""


def difference_from_bounds(actual: Any, low: Any, high: Any, margin: float | Array = 0.0) -> str:
    """Describe how the tensor `actual` lies outside of the bounds; "" where it does not.

    low, high: the bounds; one object for both where the tensor is exact. They may be lists, for sequences, or None, for
    an empty optional. margin: added tolerance of floats, for each element or for all.
    """
    if isinstance(low, list):
        if not isinstance(actual, list) or len(actual) != len(low):
            return "another sequence"
        return next(filter(None, map(difference_from_bounds, actual, low, high)), "")
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
    """Return, for each element, whether a float is further from [low, high] than another order of sums and the margin
    explain.
    """
    wide = np.complex128 if actual.dtype.kind == "c" else np.float64
    a, b = actual.astype(wide), low.astype(wide)
    sizes = np.where(np.isfinite(b), np.abs(b), 0.0)
    with np.errstate(all="ignore"):
        allowed = margin + _rounding_loss(actual.dtype, sizes) + (0.0 if low is high else bounds_distance(low, high))
        is_far: Array = ~((np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b)))
    return is_far


def _rounding_loss(kind: np.dtype[Any], sizes: Array) -> Array:
    """Bound what rounding may change in elements of these sizes: ROUNDINGS roundings of 16-bit floats, or one of a
    byte.
    """
    eps = float(ml_dtypes.finfo(kind).eps)
    if kind.itemsize == 1:
        return eps * np.maximum(sizes, float(ml_dtypes.finfo(kind).smallest_subnormal))
    coarse = ROUNDINGS * eps if eps > np.finfo(np.float32).eps else 0.0
    lost: Array = (RELATIVE + coarse) * sizes + (ABSOLUTE + coarse) * np.max(sizes, initial=0.0)
    return lost


ROUNDING_DRAWS, SAFETY_FACTOR = 3, 16
"""Number of random perturbations that estimate the effect of rounding, and the factor by which the largest effect is
multiplied.
"""
SIGN_DRAWS = 32
"""Number of perturbations that tell whether rounding decides that a result is finite, such as the root of a
difference.
"""


def difference_beyond_rounding(
    original: Original, tensor: int, inputs: Mapping[int, Any], bounds: Bounds, actual: Array
) -> str:
    """Describe how `actual` lies outside of float `bounds` further than rounding explains; "" where it does not.

    inputs: values of the tensors from which both models compute it, by value number. The imported model is computed
    again with perturbed results; where these are too close, inputs are perturbed, too, as for a sum that cancels. Then
    each element may move as far as it did, and rounding may decide whether it is finite, or which infinity it is.
    """
    plain = bounds[0]
    perturbed = _perturbed_results(original, tensor, inputs, plain, ROUNDING_DRAWS)
    movement: Any = max((np.max(_distance(result, plain), initial=0.0) for result in perturbed), default=0.0)
    if not difference_from_bounds(actual, *bounds, SAFETY_FACTOR * float(movement)):
        return ""
    movement = np.zeros(plain.shape)
    is_finite, is_open = np.isfinite(plain), np.zeros(plain.shape, bool)
    for result in _perturbed_results(original, tensor, inputs, plain, SIGN_DRAWS, perturb_inputs=True):
        movement = np.maximum(movement, _distance(result, plain))
        is_finite |= np.isfinite(result)
        is_open |= _number_class(result) != _number_class(plain)
    undefined = is_open & (_number_class(actual) != _number_class(plain)) & (is_finite | ~np.isfinite(actual))
    return difference_from_bounds(np.where(undefined, plain, actual), *bounds, SAFETY_FACTOR * movement)


def _number_class(array: Array) -> NDArray[np.int8]:
    """Classify floats: 0 for finite ones, 1 and -1 for infinite ones, 2 for NaN."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(array), 2, np.isinf(array) * np.sign(array)).astype(np.int8)


def _perturbed_results(
    original: Original, tensor: int, inputs: Mapping[int, Any], plain: Array, count: int, perturb_inputs: bool = False
) -> Iterator[Array]:
    """Yield `tensor` computed `count` times, with each result of an operator moved at random by one unit in the last
    place.

    (CESTAC: Vignes 1993.) plain: the unperturbed result. perturb_inputs: whether `inputs` are moved, too.
    """
    for seed in range(count):
        rng = np.random.default_rng(seed)
        known = {number: (perturb(value, rng) if perturb_inputs else value,) * 2 for number, value in inputs.items()}
        result, _ = original.compute(tensor, known, shake=rng)
        if np.shape(result) == plain.shape:
            yield result


def _distance(result: Array, plain: Array) -> Array:
    """Return the distance of each element of `result` from `plain`; 0 where it is no finite number, as whether an
    element is finite is compared apart.
    """
    with np.errstate(all="ignore"):
        distance = np.abs(result.astype(np.float64) - plain)
    return np.where(np.isfinite(distance), distance, 0.0)
