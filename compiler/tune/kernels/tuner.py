"""Tunes kernels of the CPU: each has a search, trials go where there is most time, winners are timed again for long.

What is in the records is not measured again. A search asks the same again when it is told the same, so that a tuning
that was interrupted goes on where it was, and one that was finished measures nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from celosia.compiler.cpu.schedule.kernel_schedules import KernelWorkload
from celosia.compiler.cpu.target import target
from celosia.compiler.expr.trace import ReplayError, Trace
from celosia.compiler.tune.cost_model import LEARNERS, CostModel
from celosia.compiler.tune.kernels.plan import KernelPlan
from celosia.compiler.tune.kernels.schedules import Plans, beginning
from celosia.compiler.tune.kernels.trial import ABORT, VERSION, KernelJob, packed, processor
from celosia.compiler.tune.measure import Status, TrialResult
from celosia.compiler.tune.pool import Fleet
from celosia.compiler.tune.progress import Progress
from celosia.compiler.tune.records import Key, Records
from celosia.compiler.tune.search import Search, begun, check_names

AT_ONCE = 4
"""Points that a search is asked for."""
FINALISTS = 2
FINAL_SECONDS, ROUNDS = 0.45, 3
"""For how long each of the best few is timed again, beside the compiler's own, and how often it has to be better."""
SHORT, LONG, COLD = f"cpu {VERSION}", f"long x{ROUNDS}", "cold"
"""Measurers: trials; finalists; with constants that come from beyond the second cache."""
MIN_GAIN = 0.02
"""A schedule that saves less of the time is not worth taking."""
OWN = "the compiler's own"
"""What a record says of the schedule that others are compared with."""


@dataclass(eq=False)
class KernelSubject:
    """A kernel that is tuned. usual: picoseconds under the compiler's own schedule. taken: what is better, for sure."""

    workload: KernelWorkload
    count: int
    space: Plans
    search: Search
    packed: bytes
    cold: bool
    usual: int = 0
    trials: int = 0
    done: bool = False
    taken: KernelPlan | None = None
    final: int = 0

    @property
    def best(self) -> float:
        """Picoseconds, by short trials."""
        return self.search.lowest

    @property
    def promise(self) -> float:
        """Time, for each trial that it has had."""
        return self.usual * self.count / (self.trials + AT_ONCE)

    def key(self, number: int, final: bool = False) -> Key:
        """Under which the trial of point `number` is kept. final: with the longer measurement."""
        measurer = measured_by(final, self.cold)
        return Key(self.workload.name, processor(), text(self.space.points[number]), measurer)

    def job(self, number: int, final: bool = False) -> KernelJob:
        """The trial of point `number`, for a Fleet. final: as of `key`."""
        limit = int(ABORT * self.best) if math.isfinite(self.best) and not final else 0
        seconds, rounds = (FINAL_SECONDS, ROUNDS) if final else (KernelJob.seconds, 1)
        return KernelJob(self.packed, text(self.space.points[number]), self.usual, limit, seconds, self.cold, rounds)


def measured_by(final: bool, cold: bool) -> str:
    """Name of the measurer, as it stands in a record."""
    return ", ".join((SHORT, *([LONG] if final else []), *([COLD] if cold else [])))


def text(plan: KernelPlan) -> str:
    """As it stands in a record."""
    return json.dumps(plan.trace.to_json(), sort_keys=True, separators=(",", ":"))


@dataclass
class KernelState(Progress):
    """subjects: the kernels."""

    subjects: list[KernelSubject] = field(default_factory=list)

    @property
    def untuned(self) -> float:
        """Seconds of all kernels under the compiler's own schedules."""
        return sum(s.usual * s.count for s in self.subjects) * 1e-12

    @property
    def tuned(self) -> float:
        """Seconds of all kernels as far as they are tuned."""
        return sum((s.final or min(s.usual, s.best)) * s.count for s in self.subjects) * 1e-12


class KernelTuner:
    """trials: the most points that are tried, those in the records among them; finalists are not counted."""

    def __init__(
        self, records: Records, fleet: Fleet, trials: int, search: str = "climb", learner: str = "ridge", seed: int = 0,
        told: Callable[[KernelState], None] = lambda state: None, until: float = math.inf,
    ) -> None:  # fmt: skip
        """told: called after each trial. until: of time.monotonic, when no trials are begun any more. ValueError for a
        search or a learner that there is not."""
        check_names(search, learner)
        self.records, self.fleet, self.seed, self.told = records, fleet, seed, told
        self.search, self.learner = search, LEARNERS[learner]
        self.state, self.until = KernelState(trials), until

    def tune(
        self,
        workloads: Iterable[tuple[KernelWorkload, int]],
        begin: Callable[[KernelWorkload], Iterable[KernelPlan]] = beginning,
    ) -> dict[str, Trace]:
        """Traces of kernels that are better than the compiler's own, by workload. FleetError, OutputError.

        workloads: with how often each occurs. begin: the points that a search begins with; the compiler's own is first.
        """
        state, workloads = self.state, list(workloads)
        cold = sum(workload.constant_bytes * count for workload, count in workloads) > target().cache_bytes
        state.subjects += [self._subject(workload, count, begin, cold) for workload, count in workloads]
        self._round([(subject, [0]) for subject in state.subjects])
        for subject in state.subjects:
            subject.usual = 0 if math.isinf(subject.best) else int(subject.best)
            subject.done = not subject.usual  # a kernel that cannot be timed alone keeps its schedule
        while state.spent < state.trials and time.monotonic() < self.until:
            if not (active := [s for s in state.subjects if not s.done]):
                break
            subject = max(active, key=lambda s: s.promise)
            subject.space.fill()
            numbers = subject.search.ask(min(AT_ONCE, state.trials - state.spent))
            subject.done = not numbers
            self._round([(subject, numbers)])
        for subject in state.subjects:
            self._final(subject)
        return {s.workload.name: s.taken.trace for s in state.subjects if s.taken is not None}

    def _subject(
        self, workload: KernelWorkload, count: int, begin: Callable[[KernelWorkload], Iterable[KernelPlan]], cold: bool
    ) -> KernelSubject:  # fmt: skip
        space = Plans(workload, begin(workload), seed=self.seed)
        search = begun(self.search, space, self.seed, CostModel(self.learner))
        return KernelSubject(workload, count, space, search, packed(workload), cold and bool(workload.constants))

    def _round(self, asked: Sequence[tuple[KernelSubject, Sequence[int]]]) -> None:
        """Measure what is not known, then tell the searches, in the order in which they asked."""
        trials = [(subject, number) for subject, numbers in asked for number in numbers]
        results = self._measured(trials)
        for subject, numbers in asked:
            subject.trials += len(numbers)
            subject.search.tell([(number, results[subject, number].cost) for number in numbers])

    def _measured(
        self, trials: Sequence[tuple[KernelSubject, int]], final: bool = False
    ) -> Mapping[tuple[KernelSubject, int], TrialResult]:  # fmt: skip
        def note(place: int, result: TrialResult, fresh: bool) -> None:
            if not fresh:
                self.state.known += not final
                return
            self.state.measured += not final
            self.state.failed += result.status not in (Status.OK, Status.CENSORED)
            self.state.left_out = self.fleet.left_out
            self.told(self.state)

        keys = [subject.key(number, final) for subject, number in trials]
        job = lambda place: trials[place][0].job(trials[place][1], final)  # noqa: E731
        return dict(zip(trials, self.records.measured(self.fleet, keys, job, note)))

    def _final(self, subject: KernelSubject) -> None:
        """Time the best few for long, and take the first if it is worth it."""
        subject.final = subject.usual
        if not subject.usual:
            return
        known = subject.search.known
        better = sorted((n for n in known if known[n] < subject.usual * (1 - MIN_GAIN)), key=lambda n: (known[n], n))
        trials = [(subject, number) for number in better[:FINALISTS] if number != 0]
        own = subject.key(0, final=True)
        if trials and self.records.get(own) is None:
            self.records.add(own, TrialResult(Status.OK, subject.usual, OWN))
        for (_, number), result in self._measured(trials, final=True).items():
            if result.cost is not None and result.cost < min(subject.final, subject.usual * (1 - MIN_GAIN)):
                subject.final, subject.taken = int(result.cost), subject.space.points[number]


def recorded(records: Records) -> dict[str, Trace]:
    """Schedules of all workloads that were tuned on this processor: the best trace, where it is worth it; where that
    differs, with cold constants, as in a model."""
    found: dict[str, Trace] = {}
    for (workload, where), trials in records.by_workload.items():
        for cold in (False, True) if where == processor() else ():
            measurer = measured_by(True, cold)
            known = {key: r for key, r in trials.items() if key.measurer == measurer and r.cost is not None}
            own = [result.cycles for result in known.values() if result.detail == OWN]
            best = min(known, key=lambda key: (known[key].cycles, key.schedule), default=None)
            if best is None or not own or known[best].cycles >= (1 - MIN_GAIN) * own[0]:
                continue
            with suppress(ReplayError):
                found[workload] = Trace.from_json(json.loads(best.schedule))
    return found
