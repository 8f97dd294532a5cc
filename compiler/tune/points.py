"""Search spaces of layers: points with named knobs, all of them legal, what each is expected to take, and what
it takes at least.

`Space` knows nothing of accelerators: a search sees points as numbers, their neighbours and expectations. `layer_space`
makes one of the points that `tensorize` has for a layer.
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
from celosia.compiler.tensorize.decide import workload_text, workloads
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.roofline import terms
from celosia.compiler.tensorize.space import ORDERS, Tiling, Workload, candidates
from celosia.compiler.tune.bound import lower_bounds
from celosia.compiler.tune.measure import COPIES, LayerCase
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import depths

P = TypeVar("P")
Floats = NDArray[np.float64]
LARGEST = 20_000
"""Points of a layer that are listed."""


class Searched(Protocol):
    """The part of a space that a search sees: points are numbers. Arrays are by these numbers."""

    @property
    def base(self) -> Floats:
        """[points] what each is expected to cost, before anything is learned."""

    @property
    def bounds(self) -> Floats:
        """[points] what each costs at least; 0 where nothing is known."""

    @property
    def features(self) -> Floats:
        """[points, features] what a model learns from."""

    def __len__(self) -> int: ...
    def legal(self, number: int) -> bool:
        """Whether the point compiles, as far as is known without compiling it."""

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """Numbers of `count` points at random, each once."""

    def neighbours(self, number: int) -> list[int]:
        """Numbers of the points that differ in one decision."""


@dataclass(frozen=True, eq=False)
class Space(Generic[P]):
    """`points`, each of which can be tried. knobs: the values of a point by name; a text is a choice without order.

    predicted: what each is expected to cost. bounds: what it costs at least, proved. features: of each, for a model.
    name: for records and people. allowed: a constraint that takes so long that it is asked only of points that a search
    comes to; those that it refuses are listed, and never tried.
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

    def legal(self, number: int) -> bool:
        """Whether the point can be tried."""
        if self.allowed is None:
            return True
        if number not in self._allowed:
            self._allowed[number] = self.allowed(self.points[number])
        return self._allowed[number]

    @cached_property
    def base(self) -> Floats:
        """What each point is expected to cost, where its bound does not say that it is more."""
        return np.maximum(self.predicted, self.bounds)

    def number(self, point: P) -> int:
        """Number of `point`. KeyError where it is not in the space."""
        return self._numbers[point]

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """Numbers of `count` different points, or of all."""
        return [int(i) for i in rng.permutation(len(self))[:count]]

    def neighbours(self, number: int) -> list[int]:
        """The nearest points on each side of each knob, the other knobs as they are if the space has such a point."""
        if number not in self._beside:
            self._beside[number] = self._nearest(number)
        return self._beside[number]

    def _nearest(self, number: int) -> list[int]:
        found: dict[int, None] = {}
        away = self._places - self._places[number]
        far = np.abs(away).sum(axis=1)
        for knob, texts in enumerate(self._texts):
            sides = [away[:, knob] < 0, away[:, knob] > 0]
            if texts:
                sides = [self._places[:, knob] == value for value in set(self._places[:, knob])]
                sides = [side for side in sides if not side[number]]
            for side in sides:
                if side.any():
                    there = np.flatnonzero(side)
                    found[int(there[np.argmin(far[there])])] = None
        return list(found)

    @cached_property
    def _allowed(self) -> dict[int, bool]:
        return {}

    @cached_property
    def _beside(self) -> dict[int, list[int]]:
        return {}

    @cached_property
    def _numbers(self) -> dict[P, int]:
        return {point: number for number, point in enumerate(self.points)}

    @cached_property
    def _values(self) -> list[list[int | str]]:
        """For each knob: the values that occur, in order."""
        rows = [self.knobs(point) for point in self.points]
        return [sorted({row[name] for row in rows}) for name in (rows[0] if rows else {})]

    @cached_property
    def _texts(self) -> list[bool]:
        return [isinstance(values[0], str) for values in self._values]

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """[points, knobs]: which of its knob's values each point has."""
        places = [{value: place for place, value in enumerate(values)} for values in self._values]
        return np.array([[at[v] for at, v in zip(places, self.knobs(p).values())] for p in self.points], np.int64)


# Layers on the accelerator ----------------------------------------------------------------------------------------

Point = tuple[Tiling, ...]
"""Tilings for each workload of a layer."""


def layer_space(cfg: Config, layer: Layer, usual: Point, memory: MemoryModel | str = ZYNQ_HP) -> Space[Point]:
    """The space of `layer`. usual: what the compiler takes for it, which is always a point. TilingError.

    memory: behind the bounds.
    """
    computations = lower_layer(cfg, layer)
    asked = [workload for computation in computations for workload in workloads(computation)]
    factors = [_points(cfg, workload, own) for workload, own in zip(asked, usual, strict=True)]
    most = int(LARGEST ** (1 / len(factors)))
    kept = [sorted(each, key=lambda row: row.cycles)[:most] for each in factors]
    for rows, all_rows, own in zip(kept, factors, usual):
        if all(row.decisions != own for row in rows):
            rows.append(next(row for row in all_rows if row.decisions == own))
    chosen = list(itertools.product(*kept))
    return Space(
        workload_text(computations),
        [tuple(row.decisions for row in each) for each in chosen],
        _knobs,
        np.array([COPIES * sum(row.cycles for row in each) for each in chosen]),
        lower_bounds(cfg, asked, [tuple(row.decisions for row in each) for each in chosen], COPIES, memory),
        np.array([np.sum([row.features for row in each], axis=0) for each in chosen]),
        LayerCase(cfg, layer).fits
        if len(asked) > 1
        else None,  # whether the tiles of groups have room beside each other
    )


def _knobs(point: Point) -> dict[str, int | str]:
    if len(point) == 1:
        return {name: getattr(point[0], name) for name in ("n", "y", "x", "k", "order")}
    return {
        f"{name}{number}": value for number, each in enumerate(point) for name, value in _knobs((each,)).items()
    }  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """A point of one workload: decisions, estimated cycles, and the estimate's terms."""

    decisions: Tiling
    cycles: float
    features: Floats = field(compare=False)


FEATURES = (
    *("cycles", "gemm", "beats", "store", "exposed", "ends", "tiles"), *("n", "y", "x", "k"), *ORDERS,
    *("steps", "out_blocks", "in_blocks", "rows", "columns", "taps", "stride", "residual", "waste"),
    *("macs", "bus", "inp", "wgt", "acc", "out", "ports"),
)  # fmt: skip
"""Logarithms of sizes; 0 and 1 for what is or is not."""


def _points(cfg: Config, p: Workload | Group, usual: Tiling) -> list[_Row]:
    if isinstance(p, Group):
        found = _with(block_space.candidates(cfg, p), usual)
        costs = [{"cycles": block_space.estimate_group(cfg, p, d)} for d in found]
        return [_Row(d, cost["cycles"], _features(cfg, p.last, d, cost)) for d, cost in zip(found, costs)]
    found = _with(candidates(cfg, p), usual)
    if not p.in_blocks:
        group = Group((p,))
        costs = [{"cycles": block_space.estimate_group(cfg, group, d)} for d in found]
    else:
        columns = terms(cfg, p, [(d.n, d.y, d.x, d.k, d.order) for d in found])
        costs = [dict(zip(columns, row)) for row in zip(*columns.values())]
    return [_Row(d, float(cost["cycles"]), _features(cfg, p, d, cost)) for d, cost in zip(found, costs)]


def _with(points: Iterator[Tiling], usual: Tiling) -> list[Tiling]:
    return list(dict.fromkeys((usual, *points)))


def _features(cfg: Config, p: Workload, d: Tiling, cost: Mapping[str, float]) -> Floats:
    tiles = -(-p.out_blocks // d.n) * d.n * -(-p.rows // d.y) * d.y * -(-p.columns // d.x) * d.x
    sizes = [cost.get(name, 0.0) for name in FEATURES[:7]]
    sizes += [d.n, d.y, d.x, d.k]
    orders = [float(d.order == order) for order in ORDERS]
    of_problem = [p.steps, p.out_blocks, p.in_blocks, p.rows, p.columns, p.places, max(p.window.strides), p.residual]
    of_problem += [tiles - p.out_blocks * p.rows * p.columns]
    of_config = [
        cfg.macs_per_cycle, cfg.bus_bytes, *(depths(cfg)[name] for name in ("inp", "wgt", "acc", "out")), cfg.ports
    ]  # fmt: skip
    logs = np.log1p(np.array([*sizes, *of_problem, *of_config], np.float64))
    return np.concatenate([logs[:11], orders, logs[11:]])
