"""Ladder of ways to judge a Config, the cheapest first; a Config climbs only as long as it can still be on the front.

area      the resource model: whether it fits the device               milliseconds
closed    the compiler's estimate of each layer, and a lower bound     tens of milliseconds
timed     compiled, its instructions on the timing model               seconds
yosys     what Yosys counts, and its estimate of the clock             minutes
rtl       the models on the simulated RTL                              minutes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from celosia.bitstreams import area
from celosia.bitstreams.synthesis import RESOURCES
from celosia.compiler.tune.cost_model import ridge
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.layer_trial import Status, TrialResult
from celosia.driver.explore.configs import ConfigSpace
from celosia.driver.explore.objectives import objectives, power_drawn
from celosia.driver.explore.pareto import Floats
from celosia.driver.explore.records import Failure, Point, Points
from celosia.driver.explore.resource_use import Resources
from celosia.driver.explore.subject import Ask, Cost, ExploredModel, config_for_cycles, parse_cost
from celosia.hw.boards.board import Board
from celosia.hw.spec.config import Config

Told = Callable[[Point], None]
AFTER_ALL = (Status.CRASHED, Status.HUNG, Status.LOST)
"""Answers that say nothing about the Config."""


@dataclass
class Ladder:
    """Judge of Configs for models on a board; results go to `points`.

    left: share of every resource that must be free. memory: the name of the model behind the ports. clock: seconds of
    exploring until now. on_cpu: operators of each model, by name, that may stay on the CPU.
    """

    subjects: list[ExploredModel]
    board: Board
    memory: str
    left: float
    fleet: Fleet
    points: Points
    clock: Callable[[], float]
    on_cpu: dict[str, int]
    told: Told = lambda point: None
    rewriting: bool = False
    """Whether what rewritten models cost counts, where there are some."""

    def __post_init__(self) -> None:
        self.model = area.shipped_model()
        self.refit()

    # Rungs ----------------------------------------------------------------------------------------------------------

    def estimate(self, requests: Sequence[tuple[Config, str]], over: Callable[[], bool] = lambda: False) -> list[Point]:
        """Estimate area and closed form of Configs, each with why it is tried; known ones are not computed again.

        Configs that have not begun when it is `over` are left out.
        """
        points: list[Point] = []
        fitting: list[Point] = []
        for cfg, origin in requests:
            if (known_point := self.points.get(cfg)) is not None:
                points.append(self._check_device(known_point))
                continue
            point = self._check_device(Point(cfg, "closed", {}, self._estimate_area(cfg), how=origin, at=self.clock()))
            if point.failure is None:
                fitting.append(point)
            else:
                points.append(self._keep_and_report(point))
        return points + self._measure(fitting, "closed", over)

    def measure(self, points: Sequence[Point], over: Callable[[], bool] = lambda: False) -> list[Point]:
        """Measure these Configs by the timing model, except those that have not begun when it is `over`."""
        measured = [point for point in points if point.measured]
        return measured + self._measure([replace(p, rung="timed") for p in points if not p.measured], "timed", over)

    def _measure(self, points: Sequence[Point], rung: str, over: Callable[[], bool]) -> list[Point]:
        """Measure the Cost of every model on the points, in the fleet; return the points that were measured."""
        jobs = [(number, subject) for number in range(len(points)) for subject in self.subjects]
        asks = [Ask(subject, config_for_cycles(points[n].cfg), rung, self.memory) for n, subject in jobs]
        results: dict[int, dict[str, TrialResult]] = {number: {} for number in range(len(points))}
        timed: list[Point] = []

        def keep(place: int, result: TrialResult) -> None:
            number, subject = jobs[place]
            results[number][subject.name] = result
            if len(results[number]) == len(self.subjects):
                timed.append(self._keep_and_report(self._with_costs(points[number], results[number])))

        if asks:
            self.fleet.run(asks, keep, over)
        return timed

    def _with_costs(self, point: Point, results: dict[str, TrialResult]) -> Point:
        """Return the point with the costs in `results`, or failed where a model failed or more of it stays on the
        CPU."""
        for name, result in results.items():
            if result.status != Status.OK:
                kind = "lost" if result.status in AFTER_ALL else "layers"
                return replace(point, failure=Failure(kind, f"{name}: {result.detail}"), at=self.clock())
        costs = {name: parse_cost(results[name]) for name in (subject.name for subject in self.subjects)}
        for name, cost in costs.items():
            if (extra := cost.on_cpu - self.on_cpu[name]) > 0:
                reason = f"{name}: {extra} operators more stay on the CPU than on {self.board.config.name}"
                return replace(point, failure=Failure("cpu", reason), at=self.clock())
        if point.rung == "timed" and (before := self.points.get(point.cfg)) is not None:
            costs = {n: replace(cost, bound=before.costs[n].bound) for n, cost in costs.items() if n in before.costs}
        return replace(point, costs=costs, at=self.clock())

    def _keep_and_report(self, point: Point) -> Point:
        self.points.add(point)
        self.told(point)
        return point

    # Area -----------------------------------------------------------------------------------------------------------

    def _estimate_area(self, cfg: Config) -> dict[str, object]:
        return asdict(Resources.of(cfg, self.board.device, self.model))

    def refit(self) -> None:
        """Fit the resource model to Yosys' counts of these points, and update its estimates of all others."""
        known_points, shipped = self.points.known, area.shipped_model().rows
        if not self.board.device.name.startswith(area.FAMILY):
            return
        counted = [_area_sample(point) for point in known_points.values() if point.area["counted"]]
        self.model = area.AreaModel(
            (*shipped, *(row for row in counted if row.cfg not in [row.cfg for row in shipped]))
        )
        for digest, point in known_points.items():
            if not point.area["counted"]:
                known_points[digest] = replace(point, area=self._estimate_area(point.cfg))

    def _check_device(self, point: Point) -> Point:
        """Return the point, failed where it takes more of the device than is available."""
        device = self.board.device
        resources = Resources(**point.area)
        if point.failure is not None and point.failure.kind != "device":
            return point
        reason = resources.why_not(device, self.left)
        return replace(point, failure=None if reason is None else Failure("device", reason))

    def holds(self, cfg: Config) -> bool:
        """Whether the device has room for a point, as far as its area is known."""
        return self._check_device(Point(cfg, "closed", {}, self._estimate_area(cfg))).failure is None

    def fits(self, point: Point) -> bool:
        """Whether the board's device holds a point with enough to spare."""
        return self._check_device(point).failure is None

    # Objectives -----------------------------------------------------------------------------------------------------

    def costs(self, point: Point) -> dict[str, Cost]:
        """Cost of each model, or of its rewritten form, on a point; by name."""
        costs = {subject.name: point.costs[subject.name] for subject in self.subjects}
        rewritten = point.rewritten if self.rewriting else {}
        return costs | {name: rewriting.cost for name, rewriting in rewritten.items() if rewriting.cost is not None}

    def model_on(self, point: Point, subject: ExploredModel) -> ExploredModel:
        """Model file whose cost counts on a point. ModelError where its file is gone."""
        file = self.file_on(point, subject.name)
        return ExploredModel.of(self.points.path.parent / file) if file and self.points.path else subject

    def file_on(self, point: Point, name: str) -> str:
        """File of the rewritten model whose cost counts, in the folder of points; "" where the original's counts."""
        rewriting = point.rewritten.get(name) if self.rewriting else None
        return "" if rewriting is None or rewriting.cost is None else rewriting.file

    def figures(self, point: Point, costs: Sequence[Cost] | None = None) -> dict[str, float]:
        """All objectives of a point with its own costs, or with `costs`."""
        all_costs = list(self.costs(point).values()) if costs is None else costs
        return objectives(point.cfg, all_costs, Resources(**point.area), self.board, self.clock_of(point))

    def clock_of(self, point: Point) -> float:
        """Clock in MHz: Yosys' estimate where it was asked for, else the board's."""
        return point.clock_mhz or self.board.clock_mhz

    def power(self, point: Point) -> dict[str, float]:
        """Average watts while it runs the models: dynamic ones, and those of the device at rest."""
        powers = [
            power_drawn(point.cfg, cost, Resources(**point.area), self.board, self.clock_of(point))
            for cost in self.costs(point).values()
        ]
        return {
            "dynamic": sum(power.dynamic for power in powers) / len(powers), "static": powers[0].watts["static"],
            "processors": powers[0].watts["ps"],
        }  # fmt: skip

    def shares(self, point: Point) -> dict[str, float]:
        """Share of each resource of the device that the point takes."""
        return Resources(**point.area).shares(self.board.device)

    def least(self, point: Point) -> dict[str, float]:
        """Lower bounds of a point's objectives, whatever a higher rung measures."""
        idle = {name: 0 for name in ("load", "gemm", "vector", "store")}
        costs = [replace(point.costs[subject.name], busy=idle, moved=0) for subject in self.subjects]
        return self.figures(point, [replace(cost, cycles=max(1, cost.bound)) for cost in costs])

    def limits(self, point: Point) -> dict[str, float]:
        """Share of the models that each unit limits, by unit."""
        corrections: dict[str, float] = {}
        for cost in self.costs(point).values():
            corrections[cost.limit] = corrections.get(cost.limit, 0.0) + 1 / len(point.costs)
        return corrections


def _area_sample(point: Point) -> area.AreaSample:
    return area.AreaSample(point.cfg, *(point.area[name] for name in RESOURCES))


class Correction:
    """Correction of the closed form, learned from points that were also timed: a factor for each objective."""

    def __init__(self, space: ConfigSpace, names: Sequence[str]) -> None:
        self.space, self.names = space, names
        self.rows: list[Floats] = []
        self.targets: list[list[float]] = []

    def learn(self, cfg: Config, expected: dict[str, float], measured: dict[str, float]) -> None:
        """Learn from the closed form's objectives of `cfg`, and those of the timing model."""
        self.rows.append(self._log_fields(cfg))
        self.targets.append([float(np.log(measured[name] / expected[name])) for name in self.names])

    def correct(self, requests: Sequence[tuple[Config, dict[str, float]]]) -> Floats:
        """Corrected objectives, [Configs, objectives]."""
        plain = np.array([[figures[name] for name in self.names] for _, figures in requests])
        if len(self.rows) < 8:
            return plain
        features, targets = np.array(self.rows), np.array(self.targets)
        asked_features = np.array([self._log_fields(cfg) for cfg, _ in requests])
        for column in range(len(self.names)):
            if np.ptp(targets[:, column]) > 1e-9:
                plain[:, column] *= np.exp(ridge(features, targets[:, column])(asked_features))
        return plain

    def _log_fields(self, cfg: Config) -> Floats:
        """Logarithms of the fields."""
        return np.log2(1.0 + np.array([float(getattr(cfg, name)) for name in self.space.searched] or [0.0]))
