"""Estimate of how far rounding alone may move a float tensor, such as a small difference of large numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.selfcheck.imported_model import Bounds, Original, perturb
from celosia.compiler.selfcheck.tolerance import difference_from_bounds

Array = NDArray[Any]
ROUNDING_DRAWS, SAFETY_FACTOR = 3, 16
"""Random perturbations that estimate the effect of rounding, and the factor by which their maximum is multiplied."""
SIGN_DRAWS = 32
"""Perturbations that tell whether rounding decides that a result is finite, such as the root of a difference."""


def beyond_rounding(original: Original, tensor: int, given: Mapping[int, Any], bounds: Bounds, actual: Array) -> str:
    """Describe how `actual` lies outside of float `bounds` further than rounding explains; "" where it does not.

    If perturbed results are too close, inputs are perturbed, too, as within a sum that cancels: each element is allowed
    its own movement, and rounding may decide whether a result is finite, or which infinity it is.
    """
    plain = bounds[0]
    perturbed = _perturbed_results(original, tensor, given, plain, ROUNDING_DRAWS)
    movement: Any = max((np.max(_distance(result, plain), initial=0.0) for result in perturbed), default=0.0)
    if not difference_from_bounds(actual, *bounds, SAFETY_FACTOR * float(movement)):
        return ""
    movement = np.zeros(plain.shape)
    is_finite, is_open = np.isfinite(plain), np.zeros(plain.shape, bool)
    for result_ in _perturbed_results(original, tensor, given, plain, SIGN_DRAWS, inputs=True):
        movement = np.maximum(movement, _distance(result_, plain))
        is_finite, is_open = (
            is_finite | np.isfinite(result_),
            is_open | (_number_class(result_) != _number_class(plain)),
        )
    undefined = is_open & (_number_class(actual) != _number_class(plain)) & (is_finite | ~np.isfinite(actual))
    return difference_from_bounds(np.where(undefined, plain, actual), *bounds, SAFETY_FACTOR * movement)


def _number_class(array: Array) -> NDArray[np.int8]:
    """Classify floats: 0 for finite ones, 1 and -1 for infinite ones, 2 for NaN."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(array), 2, np.isinf(array) * np.sign(array)).astype(np.int8)


def _perturbed_results(
    original: Original, tensor: int, values: Mapping[int, Any], plain: Array, count: int, inputs: bool = False
) -> Iterator[Array]:
    """Yield `tensor` with each result of the imported model's operators moved by one unit in the last place at random.

    (CESTAC: Vignes 1993.) inputs: `values`, from which it is computed, are moved, too.
    """
    for seed in range(count):
        rng = np.random.default_rng(seed)
        known = {each: (perturb(value, rng) if inputs else value,) * 2 for each, value in values.items()}
        result, _ = original.compute(tensor, known, shake=rng)
        if np.shape(result) == plain.shape:
            yield result


def _distance(result: Array, plain: Array) -> Array:
    """Return the distance of each element from `plain`; 0 where that is no number."""
    with np.errstate(all="ignore"):
        distance = np.abs(result.astype(np.float64) - plain)
    return np.where(np.isfinite(distance), distance, 0.0)
