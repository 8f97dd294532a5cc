"""Tuner of a network: first its layers one by one, where most cycles can be saved, then the complete network.

Each workload is first tuned alone: its search proposes points, a fleet measures them, records keep the results. Then
the best few points of each are tried in the complete instruction stream, on the timing model, and kept where it takes
fewer cycles. Known trials are not measured again, and a search proposes the same points again. So an interrupted tuning
continues where it was, and a finished one measures nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from celosia.compiler.layer import TilingError
from celosia.compiler.tune.device_pool import RETRIED_STATUSES, Fleet
from celosia.compiler.tune.layer_space import Point, layer_space
from celosia.compiler.tune.layer_trial import TIMED, CostSource, LayerJob, Status, TrialResult, pickled
from celosia.compiler.tune.network import Network, Occurrence, Tuned, measure_network, network_key
from celosia.compiler.tune.records import Key, Progress, Records
from celosia.compiler.tune.search import LEARNERS, CostModel, Search, Space, check_names, create_search

POINTS_PER_ASK = 8
"""Points that a search is asked for at once."""
SEARCHES_PER_ROUND = 4
"""Searches that are asked in a round, the most promising ones; the first round asks all."""
ABORT_FACTOR = 3
"""Multiple of the fewest cycles so far at which a trial is given up."""
FINALISTS = 3
"""Points of a workload that are tried in the complete stream."""


@dataclass(eq=False)
class LayerSubject:
    """A workload that is being tuned.

    space, search: its points, and what decides which are tried. layer: its layer, pickled for jobs. usual, best: cycles
    of the compiler's own decisions and of the best ones, for two runs in a row. trials: number of points tried. done:
    whether its search has ended.
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
        """Bound of the cycles that can still be saved, divided by the trials so far: who gets the next trials."""
        savings = self.best - min(self.best, self.search.bound)
        return savings * self.occurrence.count / (self.trials + POINTS_PER_ASK)


@dataclass
class NetworkState(Progress):
    """Progress of the tuning of a network.

    subjects: its workloads. untuned, tuned: cycles of the network without tuning, and so far. evaluations,
    known_evaluations: predictions of the complete network that were computed now, and that records had. stage: what is
    being done, for people.
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
    """Tunes one network."""

    def __init__(
        self, records: Records, fleet: Fleet, trials: int, judge: CostSource = TIMED, search: str = "descent",
        learner: str = "ridge", seed: int = 0, on_progress: Callable[[NetworkState], None] = lambda state: None,
        until: float = math.inf,
    ) -> None:  # fmt: skip
        """Prepare a tuning. Raises ValueError for an unknown search or learner.

        records: known trials, to which new ones are added. fleet: devices that run trials. trials: limit of the points
        of layers that are tried, known ones included. judge: what the cycles of layers come from. search: a name of
        SEARCHES. learner: a name of LEARNERS. on_progress: called after each trial and each prediction of the network.
        until: value of time.monotonic after which no trial begins.
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
            if (subject := self._create_subject(network, occurrence)) is not None:
                state.subjects.append(subject)
        self._run_round(network, [(s, [s.space.index(s.occurrence.usual)]) for s in state.subjects])
        for subject in state.subjects:
            subject.usual = subject.best
        self._search(network)
        state.stage = "the whole network"
        self.chosen = self._choose_combination(network)
        return self.chosen

    def _create_subject(self, network: Network, occurrence: Occurrence) -> LayerSubject | None:
        """Create the search of a workload; None where search spaces do not cover the layout of its layer."""
        try:
            space = layer_space(network.cfg, occurrence.layer, occurrence.usual, self.judge.bounds)
        except TilingError:
            return None
        return LayerSubject(
            occurrence, space, create_search(self.search, space, self.seed, self.model), pickled(occurrence.layer)
        )

    # Layers ------------------------------------------------------------------------------------------------------

    def _search(self, network: Network) -> None:
        """Run rounds of trials, for the most promising workloads first, until the budget is spent."""
        state, is_first_round = self.state, True
        while state.spent < state.trials and not self._is_over():
            active = sorted((s for s in state.subjects if not s.done), key=lambda s: -s.promise)
            asked: list[tuple[LayerSubject, list[int]]] = []
            remaining = state.trials - state.spent
            for subject in active if is_first_round else active[:SEARCHES_PER_ROUND]:
                numbers = subject.search.ask(min(POINTS_PER_ASK, remaining))
                subject.done = not numbers
                remaining -= len(numbers)
                if numbers:
                    asked.append((subject, numbers))
                if not remaining:
                    break
            is_first_round = False
            if not active:
                return
            for part in range(
                0, len(asked), SEARCHES_PER_ROUND
            ):  # the first asks come from all layers, and may take minutes
                if not self._is_over():
                    self._run_round(network, asked[part : part + SEARCHES_PER_ROUND])

    def _is_over(self) -> bool:
        """Return whether the time budget is spent."""
        return time.monotonic() >= self.until

    def _run_round(self, network: Network, asked: list[tuple[LayerSubject, list[int]]]) -> None:
        """Measure the points that searches asked for, unless known, then tell the searches, in the order of `asked`."""
        trials = [(subject, index) for subject, numbers in asked for index in numbers]
        keys = [Key.of(network.cfg, s.space.name, s.space.points[n], self.judge.version) for s, n in trials]
        measured = self.records.measure_unknown(
            self.fleet, keys, lambda position: self._create_job(network, *trials[position]),
            lambda position, result, is_new: self._count(trials[position][0], result, is_new),
            lambda position, result: self._is_credible(result, *trials[position]),
        )  # fmt: skip
        results = dict(zip(trials, measured))
        for subject, numbers in asked:
            subject.search.tell([(index, results[subject, index].cost) for index in numbers])
        self.on_progress(self.state)

    def _create_job(self, network: Network, subject: LayerSubject, index: int) -> LayerJob:
        """Return the trial of a point, with the cycles at which it is given up."""
        limit = int(ABORT_FACTOR * subject.best) if math.isfinite(subject.best) else 0
        return LayerJob(network.cfg, subject.layer, subject.space.points[index], self.judge, limit)

    def _is_credible(self, result: TrialResult, subject: LayerSubject, index: int) -> bool:
        """Return whether a known result may be used: not lost with its device, and not below the lower bound."""
        if result.status in RETRIED_STATUSES:
            return False
        return result.status != Status.OK or result.cycles >= subject.space.bounds[index]

    def _count(self, subject: LayerSubject, result: TrialResult, is_new: bool) -> None:
        """Count a trial as measured or known, and as failed unless it was only given up early; report progress."""
        subject.trials += 1
        self.state.measured += is_new
        self.state.known += not is_new
        self.state.failed += result.status not in (Status.OK, Status.CENSORED)
        self.state.excluded_devices = self.fleet.excluded_devices
        if is_new:
            self.on_progress(self.state)

    # The complete network ------------------------------------------------------------------------------------------

    def _choose_combination(self, network: Network) -> Tuned:
        """Choose the decisions under which the complete network takes the fewest predicted cycles.

        It begins with the best decisions of all workloads, or none, then tries finalists workload by workload.
        """
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
        """Return the best few points that beat the compiler's own, then that one; [] where none beats it."""
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
