"""The search: propose Configs, judge them rung by rung, and measure the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from celosia.driver.choices import OBJECTIVES
from celosia.driver.explore.configs import ConfigSpace
from celosia.driver.explore.ladder import Correction, Ladder
from celosia.driver.explore.pareto import Floats, hypervolume, most_promising, on_front, reference_point
from celosia.driver.explore.records import Point
from celosia.driver.explore.search import ConfigOutcome, ConfigSearch

WIDE, STEPS = 4, 4
"""Configs in closed form for each that is measured, and how often a search is asked for so many before."""
KEPT = 200
"""Configs in closed form that wait for their turn."""
UNFILTERED = 8
"""One of so many measured Configs is the search's own first choice, whatever the closed form estimates for it."""
FAR = float(np.log(64))
"""The hypervolume that is told is a share of the box from a 64th of the preset's objectives to 64 times them."""


@dataclass
class ExploreState:
    """Progress of an exploration. points: those measured by the search; known: before it; looked: Configs judged in
    closed form. front: Configs on it. volume: of the front, a share of a box that does not change. budget: seconds,
    None without. ended: why it ended before nothing was left: "budget", "points" or "interrupted"."""

    budget: float | None = None
    spent: float = 0.0
    points: int = 0
    known: int = 0
    looked: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    front: int = 0
    volume: float = 0.0
    ended: str = ""
    started: float = field(default_factory=time.perf_counter)

    @property
    def rate(self) -> float:
        """Points a second that were measured."""
        return self.points / max(1e-9, time.perf_counter() - self.started)

    @property
    def left(self) -> float | None:
        """Seconds of the budget."""
        if self.budget is None:
            return None
        return max(0.0, self.budget - self.spent - (time.perf_counter() - self.started))


class Explorer:
    """Search for the front of `names` of OBJECTIVES with one search over one space."""

    def __init__(
        self, ladder: Ladder, space: ConfigSpace, search: ConfigSearch, names: Sequence[str],
        preset: Point | None = None, told: Callable[[ExploreState], None] = lambda state: None,
    ) -> None:  # fmt: skip
        """preset: what the hypervolume that is told is measured by."""
        self.ladder, self.space, self.search, self.names, self.told = ladder, space, search, list(names), told
        assert all(name in OBJECTIVES for name in names)
        self.preset = preset
        self.filtering = True
        """Whether the closed form decides what is measured; else all that the search asks for is."""
        self.state = ExploreState()
        self.waiting: dict[str, Point] = {}
        self.measured: dict[str, Point] = {}
        self.correction = Correction(space, self.names)
        self.closed: dict[str, dict[str, float]] = {}
        """Objectives in closed form."""

    def resume(self, points: Iterable[Point]) -> None:
        """Continue with the points of earlier runs."""
        in_space = [point for point in points if point.cfg in self.space]
        for point in in_space:
            if point.measured and self.ladder.fits(point):
                self.measured[point.cfg.digest] = point
                self.state.known += 1
        self.search.tell([self._outcome(point) for point in in_space if point.measured or point.failure is not None])
        self._update_state()

    def gather(self) -> None:
        """Take points that were measured in a round that did not end."""
        for digest, point in self.ladder.points.known.items():
            if point.measured and digest not in self.measured and point.cfg in self.space and self.ladder.fits(point):
                self.measured[digest] = point
                self.state.points += 1
        self._update_state()

    def reconsider(self) -> None:
        """Update the measured Configs; drop those that no longer fit."""
        now = [self.ladder.points.known[digest] for digest in self.measured]
        self.measured = {point.cfg.digest: point for point in now if point.measured and self.ladder.fits(point)}
        self._update_state()

    def run(self, room: Callable[[ExploreState], int], at_once: int) -> None:
        """Search until no proposals are left, or `room`, how many more Configs may be measured, is 0.

        At most `at_once` Configs are measured between two calls of `room`; measurements that have not begun when it
        reaches 0 are dropped. Raises FleetError, OutputError.
        """

        def over() -> bool:
            return room(self.state) <= 0

        while (count := min(at_once, room(self.state))) > 0:
            order = [
                digest for _ in range(STEPS if self.filtering else 1) for digest in self._judge_proposals(at_once, over)
            ]
            chosen = self._choose_to_measure(count, order)
            if not chosen and not order:
                return
            timed = self.ladder.measure(chosen, over)
            self._record_measured(timed)
            self._update_state()

    # Steps ----------------------------------------------------------------------------------------------------------

    def _judge_proposals(self, at_once: int, over: Callable[[], bool]) -> list[str]:
        """Judge the search's proposals in closed form."""
        proposals = self.search.ask((WIDE if self.filtering else 1) * at_once)
        looked = self.ladder.estimate(proposals, over)
        self.state.looked += len(looked)
        self._record_judged(looked)
        return [cfg.digest for cfg, _ in proposals]

    def _record_judged(self, looked: Sequence[Point]) -> None:
        """Tell failures to the search; other points wait."""
        for point in looked:
            if point.failure is not None:
                self._count_failure(point)
            elif point.measured:
                self.measured[point.cfg.digest] = point
            else:
                self.waiting[point.cfg.digest] = point
                self.closed[point.cfg.digest] = self.ladder.figures(point)
        self.search.tell([self._outcome(point) for point in looked if point.failure is not None or point.measured])
        fresh = [point for point in looked if point.cfg.digest in self.waiting]
        if fresh and self.filtering:  # the search walks on in closed form
            expected = self.correction.correct([(point.cfg, self.closed[point.cfg.digest]) for point in fresh])
            limits = [self.ladder.limits(point) for point in fresh]
            self.search.tell(
                [ConfigOutcome(p.cfg, tuple(row), limit) for p, row, limit in zip(fresh, expected, limits)]
            )

    def _choose_to_measure(self, count: int, order: Sequence[str]) -> list[Point]:
        """Choose the Configs to measure now: by their expected gain, and one of UNFILTERED as the search proposes."""
        values = self.values(self.measured.values())
        if len(values) and self.filtering:
            front = values[on_front(values)]
            self.waiting = {
                digest: point for digest, point in self.waiting.items()
                if not is_dominated(front, [self.ladder.least(point)[name] for name in self.names])
            }  # fmt: skip
        if not self.waiting:
            return []
        digests = list(self.waiting)
        if len(self.measured) < count or not self.filtering:
            picked = ([digest for digest in order if digest in self.waiting] or digests)[:count]
        else:
            expected = self.correction.correct([(self.waiting[d].cfg, self.closed[d]) for d in digests])
            worst = reference_point(np.vstack([values[on_front(values)], expected[on_front(expected)]]))
            picked = [digests[n] for n in most_promising(values, expected, worst, count)]
            candidates = [digest for digest in order if digest in self.waiting and digest not in picked]
            if candidates and (self.state.points // count) % (max(1, UNFILTERED // count)) == 0:
                picked[-1] = candidates[0]
        chosen = [self.waiting.pop(digest) for digest in picked]
        for digest in list(self.waiting)[:-KEPT]:
            del self.waiting[digest]
        return chosen

    def _record_measured(self, points: Sequence[Point]) -> None:
        """Record measured points, correct the closed form by them, and tell the search."""
        for point in points:
            digest = point.cfg.digest
            if point.failure is not None:
                self._count_failure(point)
                continue
            self.measured[digest] = point
            self.state.points += 1
            if digest in self.closed:
                self.correction.learn(point.cfg, self.closed[digest], self.ladder.figures(point))
        self.search.tell([self._outcome(point) for point in points])

    def _count_failure(self, point: Point) -> None:
        assert point.failure is not None
        self.state.failed[point.failure.kind] = self.state.failed.get(point.failure.kind, 0) + 1

    def _outcome(self, point: Point) -> ConfigOutcome:
        if not point.measured or not self.ladder.fits(point):
            return ConfigOutcome(point.cfg, None, {})
        figures = self.ladder.figures(point)
        return ConfigOutcome(point.cfg, tuple(figures[name] for name in self.names), self.ladder.limits(point))

    def _update_state(self) -> None:
        values = self.values(self.measured.values())
        self.state.front = int(on_front(values).sum())
        self.state.volume = self._relative_hypervolume(values)
        self.told(self.state)

    def _relative_hypervolume(self, values: Floats) -> float:
        """Share of the box around the preset that `values` dominate; 0 without a preset."""
        if self.preset is None or not len(values):
            return 0.0
        (middle,) = self.values([self.preset])
        clipped = np.clip(values / middle, np.exp(-FAR), None)
        return hypervolume(clipped, np.full(len(self.names), FAR)) / (2 * FAR) ** len(self.names)

    # Results --------------------------------------------------------------------------------------------------------

    def values(self, points: Iterable[Point]) -> Floats:
        """Objectives of points, [points, objectives]."""
        rows = [[self.ladder.figures(point)[name] for name in self.names] for point in points]
        return np.array(rows, np.float64).reshape(len(rows), len(self.names))

    def path(self, points: Sequence[Point]) -> list[tuple[int, float]]:
        """Hypervolume after each of `points`, where it changes."""
        values, steps = self.values(points), [(0, 0.0)]
        best = values[:0]
        for number in range(len(values)):
            best = np.vstack([best, values[number]])
            best = best[on_front(best)]
            if (volume := self._relative_hypervolume(best)) != steps[-1][1]:
                steps.append((number + 1, volume))
        return [*steps, (len(values), steps[-1][1])]

    @property
    def front(self) -> list[Point]:
        """Measured Configs that no other dominates, by the first objective."""
        points = list(self.measured.values())
        values = self.values(points)
        chosen = [(tuple(values[n]), n) for n in np.flatnonzero(on_front(values))]
        return [points[n] for _, n in sorted(chosen)]


def is_dominated(front: Floats, least: Sequence[float]) -> bool:
    """Whether something on `front` is no worse in any objective than the best possible values of a point, and better in
    one."""
    if not len(front):
        return False
    at_best = np.asarray(least)
    return bool(((front <= at_best).all(axis=1) & (front < at_best).any(axis=1)).any())
