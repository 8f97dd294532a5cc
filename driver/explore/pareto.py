"""Pareto fronts and their hypervolumes, by moocore. Objectives are compared as logarithms: in proportion."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.driver.host.oracle import MissingLibrary

Floats = NDArray[np.float64]
ROOM = float(np.log(1.1))
"""The reference is a tenth worse than the worst."""


def _import_moocore() -> Any:
    try:
        return importlib.import_module("moocore")
    except ImportError:
        raise MissingLibrary('Pareto fronts need moocore: pip install "celosia[explore]"') from None


def on_front(points: Floats) -> NDArray[np.bool_]:
    """Mask of the points, [count, objectives], that no other point dominates; of equal ones the first."""
    if not len(points):
        return np.zeros(0, bool)
    return np.asarray(_import_moocore().is_nondominated(points), bool)


def ranks(points: Floats) -> NDArray[np.int64]:
    """Rank of each point: 0 for those on the front, 1 for those on the front of the others, and so on."""
    return np.asarray(_import_moocore().pareto_rank(points), np.int64)


def reference_point(points: Floats) -> Floats:
    """Reference point that is worse than all, in logarithms."""
    return np.asarray(np.log(points).max(axis=0) + ROOM, np.float64)


def hypervolume(points: Floats, worst: Floats) -> float:
    """Hypervolume that `points` dominate, up to `worst` (a `reference_point`)."""
    if not len(points):
        return 0.0
    return float(_import_moocore().hypervolume(np.log(points), ref=worst))


def most_promising(known_values: Floats, expected: Floats, worst: Floats, count: int) -> list[int]:
    """Choose the `count` expected points that would add most to the hypervolume, one after the other.

    Points that add nothing follow, those nearest to adding something first.
    """
    front = known_values[on_front(known_values)] if len(known_values) else known_values.reshape(0, expected.shape[1])
    chosen: list[int] = []
    rest = list(range(len(expected)))

    def promise(number: int) -> tuple[float, float]:
        point = expected[number]
        return hypervolume(np.vstack([front, point]), worst), -_distance_to_front(front, point)

    while rest and len(chosen) < count:
        best = max(rest, key=promise)
        chosen.append(best)
        rest.remove(best)
        front = np.vstack([front, expected[best]])
        front = front[on_front(front)]
    return chosen


def _distance_to_front(front: Floats, point: Floats) -> float:
    """Distance, in logarithms, by which `point` must improve in every objective to be on `front`."""
    if not len(front):
        return 0.0
    return float((np.log(point) - np.log(front)).min(axis=1).max())


def knee(points: Sequence[Sequence[float]]) -> int:
    """Point with the least product of its objectives' ranges: nearest to the best of all, in proportion."""
    logs = np.log(np.asarray(points, np.float64))
    span = np.maximum(np.ptp(logs, axis=0), 1e-12)
    return int(np.argmin(np.linalg.norm((logs - logs.min(axis=0)) / span, axis=1)))
