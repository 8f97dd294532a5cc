"""The loop of an exploration: let a search propose Configs, estimate them, and measure the most promising."""

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

ESTIMATES_PER_MEASUREMENT = 4
"""Configs that a search proposes at a time, and that are estimated in closed form, for each that is measured."""
ASKS_PER_ROUND = 4
"""Times that a search is asked for so many proposals before some are measured."""
MAX_WAITING = 200
"""Estimated Configs that wait to be measured at most; older ones are dropped."""
UNFILTERED_INTERVAL = 8
"""One of so many measured Configs is the search's own first choice, whatever its estimate in closed form."""
LOG_BOX = float(np.log(64))
"""Logarithm of 64. Reported hypervolumes are shares of the box from 1/64 of the preset's objectives to 64 times
them."""


@dataclass
class ExploreState:
    """Progress of an exploration.

    budget: seconds, None without a limit. spent: seconds of earlier runs. points: Configs measured in this run; known:
    in earlier runs. looked: Configs estimated in closed form. failed: Configs that failed, by kind. front: Configs on
    the front. volume: hypervolume of the front as a share of a fixed box. ended: why it ended early, "budget", "points"
    or "interrupted"; "" if not. started: time.perf_counter of this run.
    """

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
        """Configs measured a second in this run."""
        return self.points / max(1e-9, time.perf_counter() - self.started)

    @property
    def left(self) -> float | None:
        """Seconds that remain of the budget; None without one."""
        if self.budget is None:
            return None
        return max(0.0, self.budget - self.spent - (time.perf_counter() - self.started))


class Explorer:
    """One exploration: search a space for the Pareto front in the objectives `names`.

    ladder judges Configs. search proposes them. preset: the board's own Config, the centre of the box for hypervolumes.
    told: called with the state when it changes.
    """

    def __init__(
        self, ladder: Ladder, space: ConfigSpace, search: ConfigSearch, names: Sequence[str],
        preset: Point | None = None, told: Callable[[ExploreState], None] = lambda state: None,
    ) -> None:  # fmt: skip
        self.ladder, self.space, self.search, self.names, self.told = ladder, space, search, list(names), told
        assert all(name in OBJECTIVES for name in names)
        self.preset = preset
        self.filtering = True
        """Whether estimates decide which Configs are measured; else all that the search proposes are."""
        self.state = ExploreState()
        self.waiting: dict[str, Point] = {}
        """Estimated Configs that are not measured, by digest, the oldest first."""
        self.measured: dict[str, Point] = {}
        """Measured Configs that fit the device, by digest."""
        self.correction = Correction(space, self.names)
        self.estimates: dict[str, dict[str, float]] = {}
        """Objectives in closed form, by digest of the Config."""

    def resume(self, points: Iterable[Point]) -> None:
        """Add the points of earlier runs, and tell them to the search. Points outside the space are left out."""
        in_space = [point for point in points if point.cfg in self.space]
        for point in in_space:
            if point.measured and self.ladder.fits(point):
                self.measured[point.cfg.digest] = point
                self.state.known += 1
        self.search.tell([self._outcome(point) for point in in_space if point.measured or point.failure is not None])
        self._update_state()

    def record_unfinished_round(self) -> None:
        """Record points that were measured before an interrupt ended their round."""
        for digest, point in self.ladder.points.known.items():
            if point.measured and digest not in self.measured and point.cfg in self.space and self.ladder.fits(point):
                self.measured[digest] = point
                self.state.points += 1
        self._update_state()

    def refresh_measured(self) -> None:
        """Take the ladder's new data of the measured Configs (confirmed or rewritten); drop those that no longer
        fit."""
        current = [self.ladder.points.known[digest] for digest in self.measured]
        self.measured = {point.cfg.digest: point for point in current if point.measured and self.ladder.fits(point)}
        self._update_state()

    def run(self, count_allowed: Callable[[ExploreState], int], round_size: int) -> None:
        """Search until no proposals are left, or no more Configs may be measured.

        count_allowed: returns how many more Configs may be measured. round_size: Configs that are measured in a round
        at most. Measurements that have not begun when `count_allowed` returns 0 are dropped. Raises FleetError,
        OutputError.
        """

        def is_over() -> bool:
            return count_allowed(self.state) <= 0

        while (count := min(round_size, count_allowed(self.state))) > 0:
            order: list[str] = []
            for _ in range(ASKS_PER_ROUND if self.filtering else 1):
                order += self._estimate_proposals(round_size, is_over)
            chosen = self._choose_to_measure(count, order)
            if not chosen and not order:
                return
            self._record_measured(self.ladder.measure(chosen, is_over))
            self._update_state()

    # Steps ----------------------------------------------------------------------------------------------------------

    def _estimate_proposals(self, round_size: int, is_over: Callable[[], bool]) -> list[str]:
        """Ask the search for proposals, and estimate them in closed form.

        Return their digests, in the search's order.
        """
        proposals = self.search.ask((ESTIMATES_PER_MEASUREMENT if self.filtering else 1) * round_size)
        points = self.ladder.estimate(proposals, is_over)
        self.state.looked += len(points)
        self._record_estimates(points)
        return [cfg.digest for cfg, _ in proposals]

    def _record_estimates(self, points: Sequence[Point]) -> None:
        """Sort estimated points into measured and waiting ones, and tell the search outcomes or corrected estimates."""
        for point in points:
            if point.failure is not None:
                self._count_failure(point)
            elif point.measured:
                self.measured[point.cfg.digest] = point
            else:
                self.waiting[point.cfg.digest] = point
                self.estimates[point.cfg.digest] = self.ladder.objectives_of(point)
        self.search.tell([self._outcome(point) for point in points if point.failure is not None or point.measured])
        fresh = [point for point in points if point.cfg.digest in self.waiting]
        if fresh and self.filtering:  # the search goes on from estimates, before any measurement
            expected = self.correction.apply([(point.cfg, self.estimates[point.cfg.digest]) for point in fresh])
            limits = [self.ladder.limiting_units(point) for point in fresh]
            self.search.tell(
                [ConfigOutcome(p.cfg, tuple(row), limit) for p, row, limit in zip(fresh, expected, limits)]
            )

    def _choose_to_measure(self, count: int, order: Sequence[str]) -> list[Point]:
        """Choose at most `count` waiting Configs to measure now: those with the largest expected gain of hypervolume.

        One of UNFILTERED_INTERVAL is the search's first choice. order: digests as the search proposed them. Configs
        that the front dominates at their best are dropped.
        """
        values = self.values(self.measured.values())
        if len(values) and self.filtering:
            front = values[on_front(values)]
            self.waiting = {
                digest: point for digest, point in self.waiting.items()
                if not is_dominated(front, [self.ladder.objective_bounds(point)[name] for name in self.names])
            }  # fmt: skip
        if not self.waiting:
            return []
        digests = list(self.waiting)
        if len(self.measured) < count or not self.filtering:
            picked = ([digest for digest in order if digest in self.waiting] or digests)[:count]
        else:
            expected = self.correction.apply([(self.waiting[d].cfg, self.estimates[d]) for d in digests])
            reference = reference_point(np.vstack([values[on_front(values)], expected[on_front(expected)]]))
            picked = [digests[n] for n in most_promising(values, expected, reference, count)]
            candidates = [digest for digest in order if digest in self.waiting and digest not in picked]
            if candidates and (self.state.points // count) % (max(1, UNFILTERED_INTERVAL // count)) == 0:
                picked[-1] = candidates[0]
        chosen = [self.waiting.pop(digest) for digest in picked]
        for digest in list(self.waiting)[:-MAX_WAITING]:
            del self.waiting[digest]
        return chosen

    def _record_measured(self, points: Sequence[Point]) -> None:
        """Record measured points, fit the correction of estimates to them, and tell the search."""
        for point in points:
            digest = point.cfg.digest
            if point.failure is not None:
                self._count_failure(point)
                continue
            self.measured[digest] = point
            self.state.points += 1
            if digest in self.estimates:
                self.correction.learn(point.cfg, self.estimates[digest], self.ladder.objectives_of(point))
        self.search.tell([self._outcome(point) for point in points])

    def _count_failure(self, point: Point) -> None:
        """Add a failed point to the state's counts by kind."""
        assert point.failure is not None
        self.state.failed[point.failure.kind] = self.state.failed.get(point.failure.kind, 0) + 1

    def _outcome(self, point: Point) -> ConfigOutcome:
        """Return what the search learns of a point: its objectives, or none where it failed or does not fit."""
        if not point.measured or not self.ladder.fits(point):
            return ConfigOutcome(point.cfg, None, {})
        figures = self.ladder.objectives_of(point)
        return ConfigOutcome(point.cfg, tuple(figures[name] for name in self.names), self.ladder.limiting_units(point))

    def _update_state(self) -> None:
        """Update size and hypervolume of the front in the state, and report the state."""
        values = self.values(self.measured.values())
        self.state.front = int(on_front(values).sum())
        self.state.volume = self._relative_hypervolume(values)
        self.told(self.state)

    def _relative_hypervolume(self, values: Floats) -> float:
        """Return the share of the box around the preset (LOG_BOX) that `values` dominate; 0 without a preset."""
        if self.preset is None or not len(values):
            return 0.0
        (preset,) = self.values([self.preset])
        clipped = np.clip(values / preset, np.exp(-LOG_BOX), None)
        return hypervolume(clipped, np.full(len(self.names), LOG_BOX)) / (2 * LOG_BOX) ** len(self.names)

    # Results --------------------------------------------------------------------------------------------------------

    def values(self, points: Iterable[Point]) -> Floats:
        """Return the objectives of points as an array [points, objectives]."""
        rows = [[self.ladder.objectives_of(point)[name] for name in self.names] for point in points]
        return np.array(rows, np.float64).reshape(len(rows), len(self.names))

    def hypervolume_path(self, points: Sequence[Point]) -> list[tuple[int, float]]:
        """Return how the hypervolume grew: (number of points, hypervolume) wherever it changes, and at both ends."""
        values, steps = self.values(points), [(0, 0.0)]
        front = values[:0]
        for number in range(len(values)):
            front = np.vstack([front, values[number]])
            front = front[on_front(front)]
            if (volume := self._relative_hypervolume(front)) != steps[-1][1]:
                steps.append((number + 1, volume))
        return [*steps, (len(values), steps[-1][1])]

    @property
    def front(self) -> list[Point]:
        """Measured Configs that no other dominates, sorted by the first objective."""
        points = list(self.measured.values())
        values = self.values(points)
        chosen = [(tuple(values[n]), n) for n in np.flatnonzero(on_front(values))]
        return [points[n] for _, n in sorted(chosen)]


def is_dominated(front: Floats, least: Sequence[float]) -> bool:
    """Whether a point of `front` dominates a Config whose objectives are at least `least`: it need not be measured.

    The point is no worse in any objective than these lower bounds, and better in one.
    """
    if not len(front):
        return False
    bounds = np.asarray(least)
    return bool(((front <= bounds).all(axis=1) & (front < bounds).any(axis=1)).any())
