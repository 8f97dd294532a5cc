"""Pareto fronts and their hypervolumes, by moocore. Hypervolumes are of logarithms: a factor counts alike anywhere."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.driver.workstation.oracle import MissingLibrary

Floats = NDArray[np.float64]
LOG_MARGIN = float(np.log(1.1))
"""Logarithm of 1.1: the reference point is 10% worse than the worst point in each objective."""


def _import_moocore() -> Any:
    """Import moocore, which only explorations need. MissingLibrary where it is not installed."""
    try:
        return importlib.import_module("moocore")
    except ImportError:
        raise MissingLibrary('Pareto fronts need moocore: pip install "celosia[explore]"') from None


def on_front(points: Floats) -> NDArray[np.bool_]:
    """Return a mask of the points, [count, objectives], that no other point dominates; of equal ones the first."""
    if not len(points):
        return np.zeros(0, bool)
    return np.asarray(_import_moocore().is_nondominated(points), bool)


def ranks(points: Floats) -> NDArray[np.int64]:
    """Return the rank of each point: 0 on the front, 1 on the front of the others, and so on (NSGA-II)."""
    return np.asarray(_import_moocore().pareto_rank(points), np.int64)


def reference_point(points: Floats) -> Floats:
    """Return the logarithms of a reference point that is worse than all `points` in each objective."""
    return np.asarray(np.log(points).max(axis=0) + LOG_MARGIN, np.float64)


def hypervolume(points: Floats, worst: Floats) -> float:
    """Return the hypervolume that `points` dominate, in logarithms, up to `worst` (a `reference_point`)."""
    if not len(points):
        return 0.0
    return float(_import_moocore().hypervolume(np.log(points), ref=worst))


def most_promising(known_values: Floats, expected: Floats, worst: Floats, count: int) -> list[int]:
    """Choose the Configs to measure next: the numbers of the `count` points that would add most to the hypervolume.

    Each choice counts as measured for the next one. Points that add nothing follow, those nearest to adding something
    first. known_values [points, objectives]: of measured Configs. expected: estimates of the candidates. worst: a
    `reference_point`.
    """
    front = known_values[on_front(known_values)] if len(known_values) else known_values.reshape(0, expected.shape[1])
    chosen: list[int] = []
    remaining = list(range(len(expected)))

    def promise(number: int) -> tuple[float, float]:
        """Return the hypervolume with this point, and its negated distance to the front for points that add nothing."""
        point = expected[number]
        return hypervolume(np.vstack([front, point]), worst), -_distance_to_front(front, point)

    while remaining and len(chosen) < count:
        best = max(remaining, key=promise)
        chosen.append(best)
        remaining.remove(best)
        front = np.vstack([front, expected[best]])
        front = front[on_front(front)]
    return chosen


def _distance_to_front(front: Floats, point: Floats) -> float:
    """Return the logarithm of the factor by which `point` must improve in every objective to be on `front`."""
    if not len(front):
        return 0.0
    return float((np.log(point) - np.log(front)).min(axis=1).max())


def knee(points: Sequence[Sequence[float]]) -> int:
    """Return the index of the most balanced point: nearest to the best value of each objective.

    Distances are Euclidean, of logarithms scaled to the range of each objective.
    """
    logs = np.log(np.asarray(points, np.float64))
    span = np.maximum(np.ptp(logs, axis=0), 1e-12)
    return int(np.argmin(np.linalg.norm((logs - logs.min(axis=0)) / span, axis=1)))
