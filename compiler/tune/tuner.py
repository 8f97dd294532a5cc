"""Tunes a network: its layers one by one, trials going where there is most to be won, then all of it together.

First every workload alone: its search is asked for points, a fleet measures them, records keep what it finds. Then the
best few of each are tried in the whole stream, on the timing model, and kept where the whole takes fewer cycles. What
is in the records is not measured again, and a search asks the same again, so that a tuning that was interrupted goes on
where it was, and one that was finished measures nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from celosia.compiler.layer import TilingError
from celosia.compiler.tune.cost_model import LEARNERS, CostModel
from celosia.compiler.tune.measure import TIMED, CostSource, LayerJob, Status, TrialResult, packed
from celosia.compiler.tune.network import Network, Occurrence, Tuned, network_key, whole
from celosia.compiler.tune.points import Point, Space, layer_space
from celosia.compiler.tune.pool import GONE, Fleet
from celosia.compiler.tune.progress import Progress
from celosia.compiler.tune.records import Key, Records
from celosia.compiler.tune.search import Search, begun, check_names

AT_ONCE = 8
"""Points that a search is asked for."""
TOGETHER = 4
"""Searches that are asked in a round, but for the first, which asks all."""
ABORT = 3
"""Times the cycles of the best at which a run is given up."""
FINALISTS = 3
"""Points of a workload that are tried in the whole stream."""


@dataclass(eq=False)
class LayerSubject:
    """A workload that is tuned. usual, best: cycles of what the compiler takes, and the fewest, twice in a row."""

    occurrence: Occurrence
    space: Space[Point]
    search: Search
    layer: bytes
    usual: float = math.inf
    trials: int = 0
    done: bool = False

    @property
    def name(self) -> str:
        """Name of its layer."""
        return self.occurrence.layer.name

    @property
    def best(self) -> float:
        """The fewest cycles found, inf before the first trial."""
        return self.search.lowest

    @property
    def promise(self) -> float:
        """Cycles that are still to be won at most, for each trial that it has had."""
        rest = self.best - min(self.best, self.search.bound)
        return rest * self.occurrence.count / (self.trials + AT_ONCE)


@dataclass
class NetworkState(Progress):
    """untuned, tuned: cycles of the network, without and as far as it is tuned. evaluations, known_evaluations: looks
    at the whole, now and from the records."""

    subjects: list[LayerSubject] = field(default_factory=list)
    untuned: int = 0
    tuned: int = 0
    evaluations: int = 0
    known_evaluations: int = 0
    stage: str = ""

    @property
    def regret(self) -> float:
        """The share by which all layers together could take fewer cycles at most, by their bounds."""
        pairs = [(s.best, min(s.best, s.search.bound), s.occurrence.count) for s in self.subjects]
        total = sum(best * count for best, _, count in pairs)
        bound = sum(bound * count for _, bound, count in pairs)
        return total / bound - 1 if bound and math.isfinite(total) else math.inf


class Tuner:
    """Tunes one network. trials: most points of layers that are tried, those in the records among them."""

    def __init__(
        self, records: Records, fleet: Fleet, trials: int, judge: CostSource = TIMED, search: str = "descent",
        learner: str = "ridge", seed: int = 0, told: Callable[[NetworkState], None] = lambda state: None,
        until: float = math.inf,
    ) -> None:  # fmt: skip
        """told: called after each trial and each look at the whole. search: a name of SEARCHES; learner: of LEARNERS.
        until: of time.monotonic, when no trials are begun any more. ValueError for others."""
        check_names(search, learner)
        self.records, self.fleet, self.judge = records, fleet, judge
        self.search, self.model, self.seed, self.told = search, CostModel(LEARNERS[learner]), seed, told
        self.state, self.until = NetworkState(trials), until
        self.chosen: Tuned = {}

    def tune(self, network: Network) -> Tuned:
        """The decisions under which `network` takes the fewest cycles. FleetError, OutputError."""
        state = self.state
        state.stage = "layers"
        for each in network.occurrences():
            if (subject := self._subject(network, each)) is not None:
                state.subjects.append(subject)
        self._round(network, [(s, [s.space.number(s.occurrence.usual)]) for s in state.subjects])
        for subject in state.subjects:
            subject.usual = subject.best
        self._search(network)
        state.stage = "the whole network"
        self.chosen = self._together(network)
        return self.chosen

    def _subject(self, network: Network, each: Occurrence) -> LayerSubject | None:
        try:
            space = layer_space(network.cfg, each.layer, each.usual, self.judge.bounds)
        except TilingError:  # what is not laid out as the space knows it
            return None
        return LayerSubject(each, space, begun(self.search, space, self.seed, self.model), packed(each.layer))

    # Layers ------------------------------------------------------------------------------------------------------

    def _search(self, network: Network) -> None:
        state, first = self.state, True
        while state.spent < state.trials and not self._is_over():
            active = sorted((s for s in state.subjects if not s.done), key=lambda s: -s.promise)
            asked: list[tuple[LayerSubject, list[int]]] = []
            left = state.trials - state.spent
            for subject in active if first else active[:TOGETHER]:
                numbers = subject.search.ask(min(AT_ONCE, left))
                subject.done = not numbers
                left -= len(numbers)
                if numbers:
                    asked.append((subject, numbers))
                if not left:
                    break
            first = False
            if not active:
                return
            for part in range(0, len(asked), TOGETHER):  # the first asks come from all layers, and may take minutes
                if not self._is_over():
                    self._round(network, asked[part : part + TOGETHER])

    def _is_over(self) -> bool:
        """Whether the budget of time is spent."""
        return time.monotonic() >= self.until

    def _round(self, network: Network, asked: list[tuple[LayerSubject, list[int]]]) -> None:
        """Measure what is not known, then tell the searches, in the order in which they asked."""
        trials = [(subject, number) for subject, numbers in asked for number in numbers]
        keys = [Key.of(network.cfg, s.space.name, s.space.points[n], self.judge.version) for s, n in trials]
        found = self.records.measured(
            self.fleet, keys, lambda place: self._job(network, *trials[place]),
            lambda place, result, fresh: self._count(trials[place][0], result, fresh),
            lambda place, result: self._credible(result, *trials[place]),
        )  # fmt: skip
        results = dict(zip(trials, found))
        for subject, numbers in asked:
            subject.search.tell([(number, results[subject, number].cost) for number in numbers])
        self.told(self.state)

    def _job(self, network: Network, subject: LayerSubject, number: int) -> LayerJob:
        limit = int(ABORT * subject.best) if math.isfinite(subject.best) else 0
        return LayerJob(network.cfg, subject.layer, subject.space.points[number], self.judge, limit)

    def _credible(self, result: TrialResult, subject: LayerSubject, number: int) -> bool:
        """Nothing takes fewer cycles than it can: who says so is not believed, and the trial runs again, as does one
        that was lost with its device."""
        if result.status in GONE:
            return False
        return result.status != Status.OK or result.cycles >= subject.space.bounds[number]

    def _count(self, subject: LayerSubject, result: TrialResult, fresh: bool) -> None:
        subject.trials += 1
        self.state.measured += fresh
        self.state.known += not fresh
        self.state.failed += result.status not in (Status.OK, Status.CENSORED)
        self.state.left_out = self.fleet.left_out
        if fresh:
            self.told(self.state)

    # The whole -----------------------------------------------------------------------------------------------------

    def _together(self, network: Network) -> Tuned:
        """Tilings under which the whole stream takes the fewest cycles: all that layers found best, or none of it;
        then workload by workload."""
        state = self.state
        chosen: dict[str, Point] = {}
        cycles = state.untuned = state.tuned = int(self._whole(network, chosen))
        better = [s for s in state.subjects if s.search.best is not None and s.best < s.usual]
        every = {s.occurrence.workload: s.space.points[s.search.best or 0] for s in better}
        if every and (found := self._whole(network, every)) < cycles:
            chosen, cycles = every, int(found)
        state.tuned = cycles
        for subject in sorted(state.subjects, key=lambda s: -s.occurrence.count * (s.usual - s.best)):
            for option in self._finalists(subject):
                if self._is_over():
                    return chosen
                other = {name: point for name, point in chosen.items() if name != subject.occurrence.workload}
                if option != subject.occurrence.usual:
                    other[subject.occurrence.workload] = option
                if other == chosen:
                    continue
                if (found := self._whole(network, other)) < cycles:
                    chosen, cycles = other, int(found)
                    state.tuned = cycles
        return chosen

    def _finalists(self, subject: LayerSubject) -> list[Point]:
        """The best few that are better than what the compiler takes, and that itself; nothing where none are."""
        known = subject.search.known
        order = sorted((n for n in known if known[n] < subject.usual), key=lambda n: (known[n], n))[:FINALISTS]
        return [subject.space.points[n] for n in order] + [subject.occurrence.usual] * bool(order)

    def _whole(self, network: Network, tuned: Tuned) -> float:
        key = network_key(network, tuned, self.judge)
        result = self.records.get(key)
        if result is None:
            started = time.perf_counter()
            result = replace(whole(network, tuned, self.judge), seconds=time.perf_counter() - started)
            self.records.add(key, result)
            self.state.evaluations += 1
        else:
            self.state.known_evaluations += 1
        self.told(self.state)
        return math.inf if result.cost is None else result.cost
