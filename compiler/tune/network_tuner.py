"""Tuner of a network: its layers one by one, where most cycles can be saved, then the complete network.

Each workload is tuned alone first: its search proposes points, a fleet measures them, records keep the results. Then
the best few of each are tried in the complete stream, on the timing model, and kept where it takes fewer cycles. Known
trials are not measured again, and a search proposes the same points again, so that an interrupted tuning continues
where it was, and a finished one measures nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from celosia.compiler.layer import TilingError
from celosia.compiler.tune.cost_model import LEARNERS, CostModel
from celosia.compiler.tune.device_pool import RETRIED_STATUSES, Fleet
from celosia.compiler.tune.layer_trial import TIMED, CostSource, LayerJob, Status, TrialResult, pickled
from celosia.compiler.tune.network import Network, Occurrence, Tuned, measure_network, network_key
from celosia.compiler.tune.progress import Progress
from celosia.compiler.tune.records import Key, Records
from celosia.compiler.tune.search_algorithms import Search, check_names, create_search
from celosia.compiler.tune.search_space import Point, Space, layer_space

POINTS_PER_ASK = 8
"""Points that a search is asked for at once."""
SEARCHES_PER_ROUND = 4
"""Searches that are asked in a round; the first round asks all."""
ABORT_FACTOR = 3
"""Multiple of the best cycles at which a run is given up."""
FINALISTS = 3
"""Points of a workload that are tried in the complete stream."""


@dataclass(eq=False)
class LayerSubject:
    """A workload that is being tuned.

    usual, best: cycles of the compiler's own decisions and of the best, for two runs in a row.
    """

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
        """Fewest cycles so far, inf before the first trial."""
        return self.search.lowest

    @property
    def promise(self) -> float:
        """Cycles that can still be saved at most, divided by the trials so far; decides who gets the next trials."""
        rest = self.best - min(self.best, self.search.bound)
        return rest * self.occurrence.count / (self.trials + POINTS_PER_ASK)


@dataclass
class NetworkState(Progress):
    """Progress of the tuning of a network.

    untuned, tuned: cycles of the network, without tuning and so far. evaluations, known_evaluations: predictions of the
    complete network, made now and known from the records.
    """

    subjects: list[LayerSubject] = field(default_factory=list)
    untuned: int = 0
    tuned: int = 0
    evaluations: int = 0
    known_evaluations: int = 0
    stage: str = ""

    @property
    def regret(self) -> float:
        """Share by which all layers together may exceed the optimum, by their lower bounds."""
        pairs = [(s.best, min(s.best, s.search.bound), s.occurrence.count) for s in self.subjects]
        total = sum(best * count for best, _, count in pairs)
        bound = sum(bound * count for _, bound, count in pairs)
        return total / bound - 1 if bound and math.isfinite(total) else math.inf


class Tuner:
    """Tunes one network. trials: limit of the points of layers that are tried, known ones included."""

    def __init__(
        self, records: Records, fleet: Fleet, trials: int, judge: CostSource = TIMED, search: str = "descent",
        learner: str = "ridge", seed: int = 0, on_progress: Callable[[NetworkState], None] = lambda state: None,
        until: float = math.inf,
    ) -> None:  # fmt: skip
        """on_progress: called after each trial and each prediction of the network. search: a name of SEARCHES; learner:
        of LEARNERS.

        until: value of time.monotonic after which no trial begins. Raises ValueError for an unknown search or learner.
        """
        check_names(search, learner)
        self.records, self.fleet, self.judge = records, fleet, judge
        self.search, self.model, self.seed, self.on_progress = search, CostModel(LEARNERS[learner]), seed, on_progress
        self.state, self.until = NetworkState(trials), until
        self.chosen: Tuned = {}

    def tune(self, network: Network) -> Tuned:
        """Return the decisions under which `network` takes the fewest cycles. Raises FleetError, OutputError."""
        state = self.state
        state.stage = "layers"
        for occurrence in network.occurrences():
            if (subject := self._subject(network, occurrence)) is not None:
                state.subjects.append(subject)
        self._round(network, [(s, [s.space.index(s.occurrence.usual)]) for s in state.subjects])
        for subject in state.subjects:
            subject.usual = subject.best
        self._search(network)
        state.stage = "the whole network"
        self.chosen = self._combine(network)
        return self.chosen

    def _subject(self, network: Network, occurrence: Occurrence) -> LayerSubject | None:
        """Create the search of a workload; None where its layout is not one that the space covers."""
        try:
            space = layer_space(network.cfg, occurrence.layer, occurrence.usual, self.judge.bounds)
        except TilingError:  # its layout is not one that the space covers
            return None
        return LayerSubject(
            occurrence, space, create_search(self.search, space, self.seed, self.model), pickled(occurrence.layer)
        )

    # Layers ------------------------------------------------------------------------------------------------------

    def _search(self, network: Network) -> None:
        """Run rounds of trials, for the most promising workloads first, until the budget is spent."""
        state, first = self.state, True
        while state.spent < state.trials and not self._is_over():
            active = sorted((s for s in state.subjects if not s.done), key=lambda s: -s.promise)
            asked: list[tuple[LayerSubject, list[int]]] = []
            left = state.trials - state.spent
            for subject in active if first else active[:SEARCHES_PER_ROUND]:
                numbers = subject.search.ask(min(POINTS_PER_ASK, left))
                subject.done = not numbers
                left -= len(numbers)
                if numbers:
                    asked.append((subject, numbers))
                if not left:
                    break
            first = False
            if not active:
                return
            for part in range(
                0, len(asked), SEARCHES_PER_ROUND
            ):  # the first asks come from all layers, and may take minutes
                if not self._is_over():
                    self._round(network, asked[part : part + SEARCHES_PER_ROUND])

    def _is_over(self) -> bool:
        """Return whether the time budget is spent."""
        return time.monotonic() >= self.until

    def _round(self, network: Network, asked: list[tuple[LayerSubject, list[int]]]) -> None:
        """Measure unknown points, then tell the searches, in the order in which they asked."""
        trials = [(subject, index) for subject, numbers in asked for index in numbers]
        keys = [Key.of(network.cfg, s.space.name, s.space.points[n], self.judge.version) for s, n in trials]
        measured = self.records.measured(
            self.fleet, keys, lambda position: self._job(network, *trials[position]),
            lambda position, result, is_new: self._count(trials[position][0], result, is_new),
            lambda position, result: self._is_credible(result, *trials[position]),
        )  # fmt: skip
        results = dict(zip(trials, measured))
        for subject, numbers in asked:
            subject.search.tell([(index, results[subject, index].cost) for index in numbers])
        self.on_progress(self.state)

    def _job(self, network: Network, subject: LayerSubject, index: int) -> LayerJob:
        limit = int(ABORT_FACTOR * subject.best) if math.isfinite(subject.best) else 0
        return LayerJob(network.cfg, subject.layer, subject.space.points[index], self.judge, limit)

    def _is_credible(self, result: TrialResult, subject: LayerSubject, index: int) -> bool:
        """Return whether a known result may be used: not lost with its device, and not below the lower bound."""
        if result.status in RETRIED_STATUSES:
            return False
        return result.status != Status.OK or result.cycles >= subject.space.bounds[index]

    def _count(self, subject: LayerSubject, result: TrialResult, is_new: bool) -> None:
        """Count a trial and report the progress."""
        subject.trials += 1
        self.state.measured += is_new
        self.state.known += not is_new
        self.state.failed += result.status not in (Status.OK, Status.CENSORED)
        self.state.left_out = self.fleet.left_out
        if is_new:
            self.on_progress(self.state)

    # The whole -----------------------------------------------------------------------------------------------------

    def _combine(self, network: Network) -> Tuned:
        """Choose the decisions of the complete network: the best of all layers or none, then workload by workload."""
        state = self.state
        chosen: dict[str, Point] = {}
        cycles = state.untuned = state.tuned = int(self._network_cycles(network, chosen))
        better = [s for s in state.subjects if s.search.best is not None and s.best < s.usual]
        all_best = {s.occurrence.workload: s.space.points[s.search.best or 0] for s in better}
        if all_best and (candidate_cycles := self._network_cycles(network, all_best)) < cycles:
            chosen, cycles = all_best, int(candidate_cycles)
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
                if (candidate_cycles := self._network_cycles(network, other)) < cycles:
                    chosen, cycles = other, int(candidate_cycles)
                    state.tuned = cycles
        return chosen

    def _finalists(self, subject: LayerSubject) -> list[Point]:
        """Return the best few points that beat the compiler's own, and that one; nothing where none does."""
        known = subject.search.known
        order = sorted((n for n in known if known[n] < subject.usual), key=lambda n: (known[n], n))[:FINALISTS]
        return [subject.space.points[n] for n in order] + [subject.occurrence.usual] * bool(order)

    def _network_cycles(self, network: Network, tuned: Tuned) -> float:
        """Return the cycles of the network under `tuned` decisions, from the records or predicted now."""
        key = network_key(network, tuned, self.judge)
        result = self.records.get(key)
        if result is None:
            started = time.perf_counter()
            result = replace(measure_network(network, tuned, self.judge), seconds=time.perf_counter() - started)
            self.records.add(key, result)
            self.state.evaluations += 1
        else:
            self.state.known_evaluations += 1
        self.on_progress(self.state)
        return math.inf if result.cost is None else result.cost
