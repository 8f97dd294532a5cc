"""Ways to judge a Config, the cheapest first; a Config goes up only as long as it can still be on the front.

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
from celosia.compiler.tune.measure import Status, TrialResult
from celosia.compiler.tune.pool import Fleet
from celosia.driver.explore.configs import ConfigSpace
from celosia.driver.explore.front import Floats
from celosia.driver.explore.hardware import Resources
from celosia.driver.explore.objectives import drawn, objectives
from celosia.driver.explore.records import Failure, Point, Points
from celosia.driver.explore.subject import Ask, Cost, ExploredModel, asked_of, cost_of
from celosia.hw.boards.board import Board
from celosia.hw.spec.config import Config

Told = Callable[[Point], None]
AFTER_ALL = (Status.CRASHED, Status.HUNG, Status.LOST)
"""Answers that say nothing about the Config."""


@dataclass
class Ladder:
    """Judges Configs for models on a board; what it finds out goes to `points`.

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

    def closed(self, asked: Sequence[tuple[Config, str]], over: Callable[[], bool] = lambda: False) -> list[Point]:
        """Area and closed form of Configs, each with why it is tried; what is known is not computed again. Those that
        have not begun when it is `over` are left out."""
        found: list[Point] = []
        fitting: list[Point] = []
        for cfg, how in asked:
            if (known := self.points.get(cfg)) is not None:
                found.append(self._of_device(known))
                continue
            point = self._of_device(Point(cfg, "closed", {}, self._area(cfg), how=how, at=self.clock()))
            if point.failure is None:
                fitting.append(point)
            else:
                found.append(self._kept(point))
        return found + self._measured(fitting, "closed", over)

    def timed(self, points: Sequence[Point], over: Callable[[], bool] = lambda: False) -> list[Point]:
        """The same Configs by the timing model, but for those that have not begun when it is `over`."""
        done = [point for point in points if point.measured]
        return done + self._measured([replace(p, rung="timed") for p in points if not p.measured], "timed", over)

    def _measured(self, points: Sequence[Point], rung: str, over: Callable[[], bool]) -> list[Point]:
        """Each with the Cost of every model."""
        jobs = [(number, subject) for number in range(len(points)) for subject in self.subjects]
        asks = [Ask(subject, asked_of(points[n].cfg), rung, self.memory) for n, subject in jobs]
        results: dict[int, dict[str, TrialResult]] = {number: {} for number in range(len(points))}
        found: list[Point] = []

        def keep(place: int, result: TrialResult) -> None:
            number, subject = jobs[place]
            results[number][subject.name] = result
            if len(results[number]) == len(self.subjects):
                found.append(self._kept(self._judged(points[number], results[number])))

        if asks:
            self.fleet.run(asks, keep, over)
        return found

    def _judged(self, point: Point, results: dict[str, TrialResult]) -> Point:
        for name, result in results.items():
            if result.status != Status.OK:
                kind = "lost" if result.status in AFTER_ALL else "layers"
                return replace(point, failure=Failure(kind, f"{name}: {result.detail}"), at=self.clock())
        costs = {name: cost_of(results[name]) for name in (each.name for each in self.subjects)}
        for name, cost in costs.items():
            if (more := cost.on_cpu - self.on_cpu[name]) > 0:
                why = f"{name}: {more} operators more stay on the CPU than on {self.board.config.name}"
                return replace(point, failure=Failure("cpu", why), at=self.clock())
        if point.rung == "timed" and (before := self.points.get(point.cfg)) is not None:
            costs = {n: replace(cost, bound=before.costs[n].bound) for n, cost in costs.items() if n in before.costs}
        return replace(point, costs=costs, at=self.clock())

    def _kept(self, point: Point) -> Point:
        self.points.add(point)
        self.told(point)
        return point

    # Area -----------------------------------------------------------------------------------------------------------

    def _area(self, cfg: Config) -> dict[str, object]:
        return asdict(Resources.of(cfg, self.board.device, self.model))

    def refit(self) -> None:
        """The resource model with what Yosys has counted of these points, and what it says of all others."""
        known, shipped = self.points.known, area.shipped_model().rows
        if not self.board.device.name.startswith(area.FAMILY):
            return
        found = [_counted(point) for point in known.values() if point.area["counted"]]
        self.model = area.AreaModel(
            (*shipped, *(row for row in found if row.cfg not in [each.cfg for each in shipped]))
        )
        for digest, point in known.items():
            if not point.area["counted"]:
                known[digest] = replace(point, area=self._area(point.cfg))

    def _of_device(self, point: Point) -> Point:
        """The point, failed where it does not fit as much of the device as there is to be had now."""
        device = self.board.device
        resources = Resources(**point.area)
        if point.failure is not None and point.failure.kind != "device":
            return point
        why = resources.why_not(device, self.left)
        return replace(point, failure=None if why is None else Failure("device", why))

    def holds(self, cfg: Config) -> bool:
        """Whether the device has room for it, as far as it is known."""
        return self._of_device(Point(cfg, "closed", {}, self._area(cfg))).failure is None

    def fits(self, point: Point) -> bool:
        """Whether the board's device holds it with enough to spare."""
        return self._of_device(point).failure is None

    # Objectives -----------------------------------------------------------------------------------------------------

    def costs(self, point: Point) -> dict[str, Cost]:
        """What each model, or what was made of it, costs on a point; by name."""
        found = {each.name: point.costs[each.name] for each in self.subjects}
        made = point.rewritten if self.rewriting else {}
        return found | {name: each.cost for name, each in made.items() if each.cost is not None}

    def model_on(self, point: Point, subject: ExploredModel) -> ExploredModel:
        """The model whose cost counts on a point. ModelError where its file is gone."""
        file = self.file_on(point, subject.name)
        return ExploredModel.of(self.points.path.parent / file) if file and self.points.path else subject

    def file_on(self, point: Point, name: str) -> str:
        """That of the rewritten model whose cost counts, in the folder of points; "" where it is the original's."""
        made = point.rewritten.get(name) if self.rewriting else None
        return "" if made is None or made.cost is None else made.file

    def figures(self, point: Point, costs: Sequence[Cost] | None = None) -> dict[str, float]:
        """All objectives of a point with costs, or with those given."""
        own = list(self.costs(point).values()) if costs is None else costs
        return objectives(point.cfg, own, Resources(**point.area), self.board, self.clock_of(point))

    def clock_of(self, point: Point) -> float:
        """MHz: what Yosys estimates where somebody asked, else the board's."""
        return point.clock_mhz or self.board.clock_mhz

    def power(self, point: Point) -> dict[str, float]:
        """Watts while it runs the models, on the average: dynamic ones, and those of the device at rest."""
        found = [
            drawn(point.cfg, each, Resources(**point.area), self.board, self.clock_of(point))
            for each in self.costs(point).values()
        ]
        return {
            "dynamic": sum(each.dynamic for each in found) / len(found), "static": found[0].watts["static"],
            "processors": found[0].watts["ps"],
        }  # fmt: skip

    def shares(self, point: Point) -> dict[str, float]:
        """What the point takes of each resource of the device."""
        return Resources(**point.area).shares(self.board.device)

    def least(self, point: Point) -> dict[str, float]:
        """Objectives that the point is not below, whatever a higher rung says."""
        idle = {name: 0 for name in ("load", "gemm", "vector", "store")}
        costs = [replace(point.costs[each.name], busy=idle, moved=0) for each in self.subjects]
        return self.figures(point, [replace(cost, cycles=max(1, cost.bound)) for cost in costs])

    def limits(self, point: Point) -> dict[str, float]:
        """By unit, the share of the models that it limits."""
        found: dict[str, float] = {}
        for cost in self.costs(point).values():
            found[cost.limit] = found.get(cost.limit, 0.0) + 1 / len(point.costs)
        return found


def _counted(point: Point) -> area.AreaSample:
    return area.AreaSample(point.cfg, *(point.area[name] for name in RESOURCES))


class Correction:
    """What the closed form gets wrong, learned from points that went up: a factor for each objective."""

    def __init__(self, space: ConfigSpace, names: Sequence[str]) -> None:
        self.space, self.names = space, names
        self.rows: list[Floats] = []
        self.targets: list[list[float]] = []

    def learn(self, cfg: Config, expected: dict[str, float], found: dict[str, float]) -> None:
        """From the closed form's objectives of `cfg`, and those of the timing model."""
        self.rows.append(self._features(cfg))
        self.targets.append([float(np.log(found[name] / expected[name])) for name in self.names])

    def corrected(self, asked: Sequence[tuple[Config, dict[str, float]]]) -> Floats:
        """[Configs, objectives]"""
        plain = np.array([[figures[name] for name in self.names] for _, figures in asked])
        if len(self.rows) < 8:
            return plain
        features, targets = np.array(self.rows), np.array(self.targets)
        asked_features = np.array([self._features(cfg) for cfg, _ in asked])
        for column in range(len(self.names)):
            if np.ptp(targets[:, column]) > 1e-9:
                plain[:, column] *= np.exp(ridge(features, targets[:, column])(asked_features))
        return plain

    def _features(self, cfg: Config) -> Floats:
        """Logarithms of the fields."""
        return np.log2(1.0 + np.array([float(getattr(cfg, name)) for name in self.space.searched] or [0.0]))
