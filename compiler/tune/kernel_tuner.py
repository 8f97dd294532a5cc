"""Tuner of CPU kernels: each has a search, kernels with most time get most trials, the best are timed again for longer.

Known trials are not measured again. A search proposes the same points again for the same costs. So an interrupted
tuning continues where it was, and a finished one measures nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from celosia.compiler.cpu.schedule.kernel_schedules import KernelWorkload
from celosia.compiler.expr.schedule import ReplayError, Trace
from celosia.compiler.target import target
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.kernel_plan import KernelPlan
from celosia.compiler.tune.kernel_space import Plans, initial_plans
from celosia.compiler.tune.kernel_trial import ABORT_FACTOR, VERSION, KernelJob, pickled, processor
from celosia.compiler.tune.layer_trial import Status, TrialResult
from celosia.compiler.tune.records import Key, Progress, Records
from celosia.compiler.tune.search import LEARNERS, CostModel, Search, check_names, create_search

POINTS_PER_ASK = 4
"""Points that a search is asked for at once."""
FINALISTS = 2
"""Points of a kernel that are timed again for longer."""
FINAL_SECONDS, ROUNDS = 0.45, 3
"""Seconds for which each finalist is timed again, and the number of measurements in which it must be better."""
SHORT, LONG, COLD = f"cpu {VERSION}", f"long x{ROUNDS}", "cold"
"""Parts of measurers' names: all have the first, finalists' trials the second, trials with cold constants the third."""
MIN_GAIN = 0.02
"""Share of the time that a schedule must save to replace the compiler's own."""
OWN_SCHEDULE = "the compiler's own"
"""Detail in the record of the compiler's own schedule."""


@dataclass(eq=False)
class KernelSubject:
    """A kernel that is being tuned.

    count: how often the model runs it. space, search: its plans, and what decides which are tried. pickled: the
    workload, for jobs. cold: whether constants come from beyond the second-level cache. usual: picoseconds under the
    compiler's own schedule; 0: unknown. trials: number of points tried. done: whether its search has ended. chosen: the
    plan that won, None for the compiler's own. final: picoseconds of the winner, 0 before it is chosen.
    """

    workload: KernelWorkload
    count: int
    space: Plans
    search: Search
    pickled: bytes
    cold: bool
    usual: int = 0
    trials: int = 0
    done: bool = False
    chosen: KernelPlan | None = None
    final: int = 0

    @property
    def best(self) -> float:
        """Picoseconds of the best trial, finalists' longer trials excluded."""
        return self.search.lowest

    @property
    def promise(self) -> float:
        """Time of the kernel in a run of the model, divided by the trials so far; decides who gets the next trials."""
        return self.usual * self.count / (self.trials + POINTS_PER_ASK)

    def key(self, index: int, final: bool = False) -> Key:
        """Return the key of the trial of a point. final: with the longer measurement."""
        measurer = measurer_name(final, self.cold)
        return Key(self.workload.name, processor(), plan_text(self.space.points[index]), measurer)

    def job(self, index: int, final: bool = False) -> KernelJob:
        """Return the trial of a point, for a Fleet. final: with the longer measurement."""
        limit = int(ABORT_FACTOR * self.best) if math.isfinite(self.best) and not final else 0
        seconds, rounds = (FINAL_SECONDS, ROUNDS) if final else (KernelJob.seconds, 1)
        return KernelJob(
            self.pickled, plan_text(self.space.points[index]), self.usual, limit, seconds, self.cold, rounds
        )


def measurer_name(final: bool, cold: bool) -> str:
    """Return the name of the measurer in records. final: of finalists' trials. cold: see KernelJob."""
    return ", ".join((SHORT, *([LONG] if final else []), *([COLD] if cold else [])))


def plan_text(plan: KernelPlan) -> str:
    """Return the plan's trace as JSON, as records have it."""
    return json.dumps(plan.trace.to_json(), sort_keys=True, separators=(",", ":"))


@dataclass
class KernelState(Progress):
    """Progress of the tuning of kernels. subjects: the kernels."""

    subjects: list[KernelSubject] = field(default_factory=list)

    @property
    def untuned(self) -> float:
        """Seconds of all kernels in a run of the model under the compiler's own schedules."""
        return sum(s.usual * s.count for s in self.subjects) * 1e-12

    @property
    def tuned(self) -> float:
        """Seconds of all kernels in a run of the model under the best schedules so far."""
        return sum((s.final or min(s.usual, s.best)) * s.count for s in self.subjects) * 1e-12


class KernelTuner:
    """Tunes the CPU kernels of a model."""

    def __init__(
        self, records: Records, fleet: Fleet, trials: int, search: str = "climb", learner: str = "ridge", seed: int = 0,
        on_progress: Callable[[KernelState], None] = lambda state: None, until: float = math.inf,
    ) -> None:  # fmt: skip
        """Prepare a tuning. Raises ValueError for an unknown search or learner.

        records: known trials, to which new ones are added. fleet: devices that run trials. trials: limit of the points
        that are tried, known ones included, finalists' longer trials excluded. search: a name of SEARCHES. learner: a
        name of LEARNERS. on_progress: called after each trial. until: value of time.monotonic after which no trial
        begins.
        """
        check_names(search, learner)
        self.records, self.fleet, self.seed, self.on_progress = records, fleet, seed, on_progress
        self.search, self.learner = search, LEARNERS[learner]
        self.state, self.until = KernelState(trials), until

    def tune(
        self,
        workloads: Iterable[tuple[KernelWorkload, int]],
        begin: Callable[[KernelWorkload], Iterable[KernelPlan]] = initial_plans,
    ) -> dict[str, Trace]:
        """Tune `workloads`; return the traces that beat the compiler's own, by workload.

        workloads: each with the number of times that the model runs it. begin: returns the initial plans of a search,
        the compiler's own first. Raises FleetError, OutputError.
        """
        state, workloads = self.state, list(workloads)
        cold = sum(workload.constant_bytes * count for workload, count in workloads) > target().cache_bytes
        state.subjects += [self._create_subject(workload, count, begin, cold) for workload, count in workloads]
        self._run_round([(subject, [0]) for subject in state.subjects])
        for subject in state.subjects:
            subject.usual = 0 if math.isinf(subject.best) else int(subject.best)
            subject.done = not subject.usual  # a kernel that cannot be timed alone keeps its schedule
        while state.spent < state.trials and time.monotonic() < self.until:
            if not (active := [s for s in state.subjects if not s.done]):
                break
            subject = max(active, key=lambda s: s.promise)
            subject.space.add_remaining_plans()
            numbers = subject.search.ask(min(POINTS_PER_ASK, state.trials - state.spent))
            subject.done = not numbers
            self._run_round([(subject, numbers)])
        for subject in state.subjects:
            self._choose_finalist(subject)
        return {s.workload.name: s.chosen.trace for s in state.subjects if s.chosen is not None}

    def _create_subject(
        self, workload: KernelWorkload, count: int, begin: Callable[[KernelWorkload], Iterable[KernelPlan]], cold: bool
    ) -> KernelSubject:  # fmt: skip
        """Create the space and the search of a kernel; arguments: see `tune`."""
        space = Plans(workload, begin(workload), seed=self.seed)
        search = create_search(self.search, space, self.seed, CostModel(self.learner))
        return KernelSubject(workload, count, space, search, pickled(workload), cold and bool(workload.constants))

    def _run_round(self, asked: Sequence[tuple[KernelSubject, Sequence[int]]]) -> None:
        """Measure the points that searches asked for, unless known, then tell the searches, in the order of `asked`."""
        trials = [(subject, index) for subject, numbers in asked for index in numbers]
        results = self._measure(trials)
        for subject, numbers in asked:
            subject.trials += len(numbers)
            subject.search.tell([(index, results[subject, index].cost) for index in numbers])

    def _measure(
        self, trials: Sequence[tuple[KernelSubject, int]], final: bool = False
    ) -> Mapping[tuple[KernelSubject, int], TrialResult]:  # fmt: skip
        """Return the results of trials, from the records or measured now, and count them in the state."""

        def note(position: int, result: TrialResult, is_new: bool) -> None:
            """Count a result, and report the progress."""
            if not is_new:
                self.state.known += not final
                return
            self.state.measured += not final
            self.state.failed += result.status not in (Status.OK, Status.CENSORED)
            self.state.excluded_devices = self.fleet.excluded_devices
            self.on_progress(self.state)

        keys = [subject.key(index, final) for subject, index in trials]
        job = lambda position: trials[position][0].job(trials[position][1], final)  # noqa: E731
        return dict(zip(trials, self.records.measure_unknown(self.fleet, keys, job, note)))

    def _choose_finalist(self, subject: KernelSubject) -> None:
        """Time the best few points of a kernel for longer, and choose the fastest if it saves MIN_GAIN."""
        subject.final = subject.usual
        if not subject.usual:
            return
        known = subject.search.known
        better = sorted((n for n in known if known[n] < subject.usual * (1 - MIN_GAIN)), key=lambda n: (known[n], n))
        trials = [(subject, index) for index in better[:FINALISTS] if index != 0]
        default_key = subject.key(0, final=True)
        if trials and self.records.get(default_key) is None:
            self.records.add(default_key, TrialResult(Status.OK, subject.usual, OWN_SCHEDULE))
        for (_, index), result in self._measure(trials, final=True).items():
            if result.cost is not None and result.cost < min(subject.final, subject.usual * (1 - MIN_GAIN)):
                subject.final, subject.chosen = int(result.cost), subject.space.points[index]


def recorded_traces(records: Records) -> dict[str, Trace]:
    """Return the best trace of each workload that was tuned on this processor, where it saves MIN_GAIN.

    Trials with cold constants, as in a model, take precedence.
    """
    traces: dict[str, Trace] = {}
    for (workload, processor_), trials in records.by_workload.items():
        for cold in (False, True) if processor_ == processor() else ():
            measurer = measurer_name(True, cold)
            known = {key: r for key, r in trials.items() if key.measurer == measurer and r.cost is not None}
            default_times = [result.cycles for result in known.values() if result.detail == OWN_SCHEDULE]
            best = min(known, key=lambda key: (known[key].cycles, key.schedule), default=None)
            if best is None or not default_times or known[best].cycles >= (1 - MIN_GAIN) * default_times[0]:
                continue
            with suppress(ReplayError):
                traces[workload] = Trace.from_json(json.loads(best.schedule))
    return traces
