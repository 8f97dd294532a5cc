"""Judge a Config by rungs, the cheapest first. Only a Config that may still be on the front gets to the next rung.

area      the resource model: whether it fits the device               milliseconds
closed    the compiler's estimate of each layer, and a lower bound     tens of milliseconds
timed     compiled, its instructions on the timing model               seconds
yosys     cells that Yosys counts, and its estimate of the clock       minutes
rtl       the models on the simulated RTL                              minutes

This file does the first three; `confirm.py` does the others, for the points of the front only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from celosia.bitstreams import area
from celosia.bitstreams.synthesis import RESOURCES
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.layer_trial import Status, TrialResult
from celosia.compiler.tune.search import ridge
from celosia.driver.explore.configs import ConfigSpace
from celosia.driver.explore.model_cost import Cost, CostJob, ExploredModel, config_for_cycles, parse_cost
from celosia.driver.explore.objectives import objectives, power_drawn
from celosia.driver.explore.pareto import Floats
from celosia.driver.explore.records import Failure, Point, Points
from celosia.driver.explore.resource_use import Resources
from celosia.hw.boards.board import Board
from celosia.hw.spec.config import Config

Told = Callable[[Point], None]
"""Callback for each point that is judged."""
PROCESS_FAILURES = (Status.CRASHED, Status.HUNG, Status.LOST)
"""Failures of the process that measured, which say nothing about the Config."""


@dataclass
class Ladder:
    """Judges Configs for models on a board, and adds the results to `points`.

    subjects: the models. memory: name of the memory model. left: share of every resource that must stay free. fleet:
    processes that measure. clock: returns the seconds of exploration until now. on_cpu: by model, the number of
    operators that may stay on the CPU; a Config that leaves more there fails. told: called with each judged point.
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
    """Whether the costs of rewritten models, where there are some, count in place of the originals'."""

    def __post_init__(self) -> None:
        self.model = area.shipped_model()
        self.refit()

    # Rungs ----------------------------------------------------------------------------------------------------------

    def estimate(
        self, requests: Sequence[tuple[Config, str]], is_over: Callable[[], bool] = lambda: False
    ) -> list[Point]:
        """Estimate Configs in closed form, if their area fits the device. Known Configs are not computed again.

        requests: Configs, each with the reason why it is tried. Configs that have not begun when time `is_over` are
        left out.
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
        return points + self._measure(fitting, "closed", is_over)

    def measure(self, points: Sequence[Point], is_over: Callable[[], bool] = lambda: False) -> list[Point]:
        """Measure these Configs by the timing model, except those that have not begun when time `is_over`."""
        measured = [point for point in points if point.measured]
        return measured + self._measure([replace(p, rung="timed") for p in points if not p.measured], "timed", is_over)

    def _measure(self, points: Sequence[Point], rung: str, is_over: Callable[[], bool]) -> list[Point]:
        """Compute the Cost of every model on these points at `rung`, in the fleet.

        Return the points that are complete.
        """
        jobs = [(number, subject) for number in range(len(points)) for subject in self.subjects]
        cost_jobs = [CostJob(subject, config_for_cycles(points[n].cfg), rung, self.memory) for n, subject in jobs]
        results: dict[int, dict[str, TrialResult]] = {number: {} for number in range(len(points))}
        complete: list[Point] = []

        def record_result(index: int, result: TrialResult) -> None:
            """Record the result of a job; a point is complete when all its models have one."""
            number, subject = jobs[index]
            results[number][subject.name] = result
            if len(results[number]) == len(self.subjects):
                complete.append(self._keep_and_report(self._with_costs(points[number], results[number])))

        if cost_jobs:
            self.fleet.run(cost_jobs, record_result, is_over)
        return complete

    def _with_costs(self, point: Point, results: dict[str, TrialResult]) -> Point:
        """Return the point with the costs in `results` (by model).

        The point is a failure if a model failed, or leaves more operators on the CPU than `on_cpu` allows.
        """
        for name, result in results.items():
            if result.status != Status.OK:
                kind = "lost" if result.status in PROCESS_FAILURES else "layers"
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
        """Add a judged point to `points`, report it, and return it."""
        self.points.add(point)
        self.told(point)
        return point

    # Area -----------------------------------------------------------------------------------------------------------

    def _estimate_area(self, cfg: Config) -> dict[str, object]:
        """Return the Resources of a Config as a dict, as a Point holds them."""
        return asdict(Resources.of(cfg, self.board.device, self.model))

    def refit(self) -> None:
        """Fit the resource model to the points that Yosys has counted, too, and update the area of all others.

        Nothing to do for a device of another family than the model's.
        """
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
        """Return the point with a failure of kind "device" where it takes too much of the device, else without one.

        A failure of another kind stays.
        """
        device = self.board.device
        resources = Resources(**point.area)
        if point.failure is not None and point.failure.kind != "device":
            return point
        reason = resources.explain_misfit(device, self.left)
        return replace(point, failure=None if reason is None else Failure("device", reason))

    def fits_config(self, cfg: Config) -> bool:
        """Whether the board's device holds a Config, by its estimated area."""
        return self._check_device(Point(cfg, "closed", {}, self._estimate_area(cfg))).failure is None

    def fits(self, point: Point) -> bool:
        """Whether the board's device holds a point with the share `left` free, and the point has no other failure."""
        return self._check_device(point).failure is None

    # Objectives -----------------------------------------------------------------------------------------------------

    def costs(self, point: Point) -> dict[str, Cost]:
        """Return the cost of each model on a point, by name; of its rewritten form if that counts (`rewriting`)."""
        costs = {subject.name: point.costs[subject.name] for subject in self.subjects}
        rewritten = point.rewritten if self.rewriting else {}
        return costs | {name: rewriting.cost for name, rewriting in rewritten.items() if rewriting.cost is not None}

    def model_on(self, point: Point, subject: ExploredModel) -> ExploredModel:
        """Return the model whose cost counts on a point: the original or its rewritten form.

        ModelError without its file.
        """
        file = self.file_on(point, subject.name)
        return ExploredModel.of(self.points.path.parent / file) if file and self.points.path else subject

    def file_on(self, point: Point, name: str) -> str:
        """Return the file of the rewritten model whose cost counts, relative to the folder; "" where the original's
        counts."""
        rewriting = point.rewritten.get(name) if self.rewriting else None
        return "" if rewriting is None or rewriting.cost is None else rewriting.file

    def objectives_of(self, point: Point, costs: Sequence[Cost] | None = None) -> dict[str, float]:
        """Return all objectives of a point by name, from its own costs, or from `costs`."""
        all_costs = list(self.costs(point).values()) if costs is None else costs
        return objectives(point.cfg, all_costs, Resources(**point.area), self.board, self.clock_of(point))

    def clock_of(self, point: Point) -> float:
        """Return the clock in MHz: Yosys' estimate where there is one, else the board's."""
        return point.clock_mhz or self.board.clock_mhz

    def power(self, point: Point) -> dict[str, float]:
        """Return average watts while the models run: dynamic, static (the device at rest), and of the processors."""
        powers = [
            power_drawn(point.cfg, cost, Resources(**point.area), self.board, self.clock_of(point))
            for cost in self.costs(point).values()
        ]
        return {
            "dynamic": sum(power.dynamic for power in powers) / len(powers), "static": powers[0].watts["static"],
            "processors": powers[0].watts["ps"],
        }  # fmt: skip

    def shares(self, point: Point) -> dict[str, float]:
        """Return the share of each resource of the device that the point takes, by resource."""
        return Resources(**point.area).shares(self.board.device)

    def objective_bounds(self, point: Point) -> dict[str, float]:
        """Return lower bounds of a point's objectives, which no measurement can beat: idle units, fewest cycles."""
        idle = {name: 0 for name in ("load", "gemm", "vector", "store")}
        costs = [replace(point.costs[subject.name], busy=idle, moved=0) for subject in self.subjects]
        return self.objectives_of(point, [replace(cost, cycles=max(1, cost.bound)) for cost in costs])

    def limiting_units(self, point: Point) -> dict[str, float]:
        """Return for each unit, and "latency", the share of the models that it limits at this point.

        The bottleneck search changes the Config fields of these units next.
        """
        shares: dict[str, float] = {}
        for cost in self.costs(point).values():
            shares[cost.limit] = shares.get(cost.limit, 0.0) + 1 / len(point.costs)
        return shares


def _area_sample(point: Point) -> area.AreaSample:
    """Return a counted point as a sample that the resource model is fitted to."""
    return area.AreaSample(point.cfg, *(point.area[name] for name in RESOURCES))


MIN_CORRECTION_POINTS = 8
"""Timed Configs before estimates are corrected."""


class Correction:
    """Corrects estimates in closed form: a factor for each objective, by ridge regression over points that were timed.

    rows: logarithms of the fields of those Configs. targets: logarithms of measured over estimated objectives.
    """

    def __init__(self, space: ConfigSpace, names: Sequence[str]) -> None:
        self.space, self.names = space, names
        self.rows: list[Floats] = []
        self.targets: list[list[float]] = []

    def learn(self, cfg: Config, expected: dict[str, float], measured: dict[str, float]) -> None:
        """Add a Config with its objectives in closed form (`expected`) and by the timing model (`measured`)."""
        self.rows.append(self._log_fields(cfg))
        self.targets.append([float(np.log(measured[name] / expected[name])) for name in self.names])

    def apply(self, requests: Sequence[tuple[Config, dict[str, float]]]) -> Floats:
        """Return corrected objectives, [Configs, objectives], of Configs with their objectives in closed form.

        They stay as they are until MIN_CORRECTION_POINTS are known.
        """
        corrected = np.array([[figures[name] for name in self.names] for _, figures in requests])
        if len(self.rows) < MIN_CORRECTION_POINTS:
            return corrected
        features, targets = np.array(self.rows), np.array(self.targets)
        asked_features = np.array([self._log_fields(cfg) for cfg, _ in requests])
        for column in range(len(self.names)):
            if np.ptp(targets[:, column]) > 1e-9:
                corrected[:, column] *= np.exp(ridge(features, targets[:, column])(asked_features))
        return corrected

    def _log_fields(self, cfg: Config) -> Floats:
        """Return log2(1 + value) of each searched field: the features of the regression."""
        return np.log2(1.0 + np.array([float(getattr(cfg, name)) for name in self.space.searched] or [0.0]))
