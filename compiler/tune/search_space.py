"""Search spaces: points with named knobs, their estimated costs and lower bounds.

A point is a schedule; a knob is one of its decisions, such as a tile size. `Space` is independent of accelerators: a
search sees indices of points, their neighbours and estimates. `layer_space` builds the space of a layer from the points
that `tensorize` enumerates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import Layer
from celosia.compiler.tensorize import block_space
from celosia.compiler.tensorize.block_space import Group
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.roofline import terms
from celosia.compiler.tensorize.schedule_policy import workload_text, workloads
from celosia.compiler.tensorize.space import ORDERS, Tiling, Workload, candidates
from celosia.compiler.tune.cycle_bounds import lower_bounds
from celosia.compiler.tune.layer_trial import COPIES, LayerCase
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import depths

P = TypeVar("P")
"""Type of a point."""
Floats = NDArray[np.float64]
MAX_POINTS = 20_000
"""Limit of the points of a layer."""


class SearchSpace(Protocol):
    """Interface of a space to a search: points by index, and arrays over these indices."""

    @property
    def base(self) -> Floats:
        """[points] estimated cost before anything is learned."""

    @property
    def bounds(self) -> Floats:
        """[points] lower bound of the cost; 0 where nothing is known."""

    @property
    def features(self) -> Floats:
        """[points, features] inputs of the cost model."""

    def __len__(self) -> int: ...
    def is_legal(self, index: int) -> bool:
        """Return whether the point should compile."""

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return `count` different indices at random."""

    def neighbours(self, index: int) -> list[int]:
        """Return the indices of points that differ in one decision."""


@dataclass(frozen=True, eq=False)
class Space(Generic[P]):
    """A search space with a list of points.

    name: for records and people. knobs: returns the decisions of a point by name; a string is a choice without order.
    predicted: estimated cost of each point. bounds: proved lower bound of its cost. features: of each point, for the
    cost model. allowed: an expensive constraint that is checked only for points that a search proposes; those that it
    refuses are never tried.
    """

    name: str
    points: Sequence[P]
    knobs: Callable[[P], Mapping[str, int | str]]
    predicted: Floats
    bounds: Floats
    features: Floats
    allowed: Callable[[P], bool] | None = None

    def __len__(self) -> int:
        return len(self.points)

    def is_legal(self, index: int) -> bool:
        """Return whether the point may be tried."""
        if self.allowed is None:
            return True
        if index not in self._allowed:
            self._allowed[index] = self.allowed(self.points[index])
        return self._allowed[index]

    @cached_property
    def base(self) -> Floats:
        """Estimated cost of each point, raised to its lower bound where it is below."""
        return np.maximum(self.predicted, self.bounds)

    def index(self, point: P) -> int:
        """Return the index of `point`. Raises KeyError where it is not in the space."""
        return self._indices[point]

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return the indices of `count` different points, or of all."""
        return [int(i) for i in rng.permutation(len(self))[:count]]

    def neighbours(self, index: int) -> list[int]:
        """Return the nearest points on each side of each knob, with the other knobs equal if possible."""
        if index not in self._neighbours:
            self._neighbours[index] = self._nearest(index)
        return self._neighbours[index]

    def _nearest(self, index: int) -> list[int]:
        """Find the nearest point in each direction of each knob; for a choice, with each other value."""
        nearest: dict[int, None] = {}
        distances = self._positions - self._positions[index]
        total_distance = np.abs(distances).sum(axis=1)
        for knob, is_choice in enumerate(self._is_choice):
            sides = [distances[:, knob] < 0, distances[:, knob] > 0]
            if is_choice:
                sides = [self._positions[:, knob] == value for value in set(self._positions[:, knob])]
                sides = [side for side in sides if not side[index]]
            for side in sides:
                if side.any():
                    candidates = np.flatnonzero(side)
                    nearest[int(candidates[np.argmin(total_distance[candidates])])] = None
        return list(nearest)

    @cached_property
    def _allowed(self) -> dict[int, bool]:
        """Cache of `is_legal`."""
        return {}

    @cached_property
    def _neighbours(self) -> dict[int, list[int]]:
        """Cache of `neighbours`."""
        return {}

    @cached_property
    def _indices(self) -> dict[P, int]:
        """Point -> its index."""
        return {point: index for index, point in enumerate(self.points)}

    @cached_property
    def _values(self) -> list[list[int | str]]:
        """The values of each knob that occur in points, sorted."""
        rows = [self.knobs(point) for point in self.points]
        return [sorted({row[name] for row in rows}) for name in (rows[0] if rows else {})]

    @cached_property
    def _is_choice(self) -> list[bool]:
        """Whether each knob has strings as values, which have no order."""
        return [isinstance(values[0], str) for values in self._values]

    @cached_property
    def _positions(self) -> NDArray[np.int64]:
        """[points, knobs]: the position of each point's value among the knob's values."""
        position_of = [{value: position for position, value in enumerate(values)} for values in self._values]
        rows = [
            [positions[value] for positions, value in zip(position_of, self.knobs(point).values())]
            for point in self.points
        ]
        return np.array(rows, np.int64)


# Layers on the accelerator ----------------------------------------------------------------------------------------

Point = tuple[Tiling, ...]
"""Tiling for each workload of a layer, in order."""


def layer_space(cfg: Config, layer: Layer, usual: Point, memory: MemoryModel | str = ZYNQ_HP) -> Space[Point]:
    """Build the search space of `layer`: combinations of the best points of its workloads. Raises TilingError.

    usual: the compiler's own decisions, which are always a point. memory: memory model for the bounds.
    """
    computations = lower_layer(cfg, layer)
    layer_workloads = [workload for computation in computations for workload in workloads(computation)]
    candidate_rows = [
        _candidates(cfg, workload, usual_decisions)
        for workload, usual_decisions in zip(layer_workloads, usual, strict=True)
    ]
    limit = int(MAX_POINTS ** (1 / len(candidate_rows)))  # of points for each workload
    best_rows = [sorted(combination, key=lambda row: row.cycles)[:limit] for combination in candidate_rows]
    for rows, all_rows, usual_decisions in zip(best_rows, candidate_rows, usual):
        if all(row.decisions != usual_decisions for row in rows):
            rows.append(next(row for row in all_rows if row.decisions == usual_decisions))
    combinations = list(itertools.product(*best_rows))
    points = [tuple(row.decisions for row in combination) for combination in combinations]
    return Space(
        workload_text(computations),
        points,
        _knobs,
        np.array([COPIES * sum(row.cycles for row in combination) for combination in combinations]),
        lower_bounds(cfg, layer_workloads, points, COPIES, memory),
        np.array([np.sum([row.features for row in combination], axis=0) for combination in combinations]),
        LayerCase(cfg, layer).fits if len(layer_workloads) > 1 else None,  # whether the tiles of groups fit together
    )


def _knobs(point: Point) -> dict[str, int | str]:
    """Return the decisions of a point by name; with several workloads, names end in the number of the workload."""
    if len(point) == 1:
        return {name: getattr(point[0], name) for name in ("n", "y", "x", "k", "order")}
    return {
        f"{name}{index}": value for index, decisions in enumerate(point) for name, value in _knobs((decisions,)).items()
    }  # fmt: skip


@dataclass(frozen=True)
class _Candidate:
    """A point of one workload: its decisions, estimated cycles, and features for the cost model (FEATURES)."""

    decisions: Tiling
    cycles: float
    features: Floats = field(compare=False)


FEATURES = (
    *("cycles", "gemm", "beats", "store", "exposed", "ends", "tiles"), *("n", "y", "x", "k"), *ORDERS,
    *("steps", "out_blocks", "in_blocks", "rows", "columns", "taps", "stride", "residual", "waste"),
    *("macs", "bus", "inp", "wgt", "acc", "out", "ports"),
)  # fmt: skip
"""Names of features of a point: terms of the estimate, tile sizes, loop order, the workload, and the Config.

Their values are logarithms of sizes, and 0 or 1 for orders.
"""


def _candidates(cfg: Config, p: Workload | Group, usual: Tiling) -> list[_Candidate]:
    """Enumerate the points of workload p with their estimates; the decisions `usual` are the first."""
    if isinstance(p, Group):
        points = _with_usual(block_space.candidates(cfg, p), usual)
        costs = [{"cycles": block_space.estimate_group(cfg, p, d)} for d in points]
        return [_Candidate(d, cost["cycles"], _features(cfg, p.last, d, cost)) for d, cost in zip(points, costs)]
    points = _with_usual(candidates(cfg, p), usual)
    if not p.in_blocks:
        group = Group((p,))
        costs = [{"cycles": block_space.estimate_group(cfg, group, d)} for d in points]
    else:
        columns = terms(cfg, p, [(d.n, d.y, d.x, d.k, d.order) for d in points])
        costs = [dict(zip(columns, row)) for row in zip(*columns.values())]
    return [_Candidate(d, float(cost["cycles"]), _features(cfg, p, d, cost)) for d, cost in zip(points, costs)]


def _with_usual(points: Iterator[Tiling], usual: Tiling) -> list[Tiling]:
    """Return `usual`, the compiler's own decisions, and then all other points: the tuner measures `usual` first."""
    return list(dict.fromkeys((usual, *points)))


def _features(cfg: Config, p: Workload, d: Tiling, cost: Mapping[str, float]) -> Floats:
    """Return the features of decisions d for workload p, see FEATURES. cost: terms of the estimate by name."""
    computed = -(-p.out_blocks // d.n) * d.n * -(-p.rows // d.y) * d.y * -(-p.columns // d.x) * d.x
    sizes = [cost.get(name, 0.0) for name in FEATURES[:7]]
    sizes += [d.n, d.y, d.x, d.k]
    orders = [float(d.order == order) for order in ORDERS]
    of_workload = [p.steps, p.out_blocks, p.in_blocks, p.rows, p.columns, p.places, max(p.window.strides), p.residual]
    of_workload += [computed - p.out_blocks * p.rows * p.columns]  # waste at the edges of tiles
    of_config = [
        cfg.macs_per_cycle, cfg.bus_bytes, *(depths(cfg)[name] for name in ("inp", "wgt", "acc", "out")), cfg.ports
    ]  # fmt: skip
    logs = np.log1p(np.array([*sizes, *of_workload, *of_config], np.float64))
    return np.concatenate([logs[:11], orders, logs[11:]])
