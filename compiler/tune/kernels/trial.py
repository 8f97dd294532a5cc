"""One trial of a kernel: its loops under a trace, compiled, compared with what the expression means, and timed.

Compiler and machine code run in a process forked for the trial, since nothing can interrupt LLVM, and a fault of the
machine code must end no more than the trial. The time is the processor's, of the fastest of many runs by turns with the
compiler's own schedule: both meet the same clock, caches and neighbours, so that their ratio says more than any time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.cpu.llvm import compile_function, host
from celosia.compiler.cpu.schedule.kernel_schedules import KernelWorkload, lower_kernel
from celosia.compiler.cpu.target import target
from celosia.compiler.expr import Schedule, is_float, verify
from celosia.compiler.expr.trace import Trace
from celosia.compiler.expr.verify import IRError
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel import CompiledKernel, aligned_empty
from celosia.compiler.tune.measure import Status, TrialResult

Array = NDArray[Any]
VERSION = 1
"""Version of how kernels are timed: a change raises it, and records of other versions are no longer exact."""
ABORT = 3.0
"""Times the best so far at which a trial is given up."""
MOST_SECONDS = 10.0
"""To compile a kernel and run it once."""
SAMPLE_SECONDS = 4e-4
"""Shorter runs are timed several at once."""
LEAST_SAMPLES = 3
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-9}
"""Largest difference of floats over their largest value: sums may be added up in another order."""
DEPTH = 20_000
"""Most levels of expressions, which are pickled recursively."""
REMEMBERED = 4
MOST_COPIES = 64
"""Most copies of constants; small ones stay in the cache, as they would in a model."""


def processor() -> str:
    """Name of this processor, and a digest of all that machine code made here depends on."""
    triple, cpu, *_ = host().split()
    return f"{cpu} {triple.split('-')[0]} #{hashlib.sha256(host().encode()).hexdigest()[:8]}"


def packed(workload: KernelWorkload) -> bytes:
    """`workload` as bytes that a process unpickles, however deep its expression is."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEPTH))
    try:
        return pickle.dumps(workload)
    finally:
        sys.setrecursionlimit(limit)


@dataclass(frozen=True)
class KernelJob:
    """A trial. workload: as `packed`. trace: JSON. seconds: for how long it is timed.

    usual: picoseconds that the compiler's own schedule takes, by which the ratio is multiplied; 0 where that is not
    known, and its time here counts. limit: picoseconds at which the trial is given up (0: none). cold: constants come
    from beyond the second cache, as in a model whose weights do not fit into it. rounds: the time is measured so often,
    and the worst of the ratios counts.
    """

    workload: bytes
    trace: str
    usual: int = 0
    limit: int = 0
    seconds: float = 0.03
    cold: bool = False
    rounds: int = 1

    @property
    def alike(self) -> str:
        """Trials of one workload share what they are compared with."""
        return hashlib.sha256(self.workload).hexdigest()

    def run(self) -> TrialResult:
        """TrialResult.cycles are picoseconds of the processor."""
        started = time.perf_counter()
        case = _case(self.workload)
        try:
            function = verify(case.workload.loops(case.workload.apply(Trace.from_json(json.loads(self.trace)))))
            case.prepare(self.cold)
        except (TypeError, ValueError, IRError) as error:
            return TrialResult(Status.REFUSED, detail=str(error))
        result = _apart(lambda: case.timed(compile_function(function, keep=False), self))
        return TrialResult(result.status, result.cycles, result.detail, time.perf_counter() - started)


def _apart(trial: Callable[[], TrialResult]) -> TrialResult:
    """The result of `trial`, which runs in a child of this process."""
    fork = multiprocessing.get_context("fork")
    answers, answer = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(answer, trial), daemon=True)
    child.start()
    answer.close()
    try:
        if answers.poll(MOST_SECONDS):
            found = answers.recv()
            assert isinstance(found, TrialResult)
            return found
        return TrialResult(Status.REFUSED, detail=f"it takes more than {MOST_SECONDS:g} s to compile and run")
    except EOFError:
        child.join()
        return TrialResult(Status.WRONG, detail=f"its process ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()
        answers.close()


def _answer(answer: Connection, trial: Callable[[], TrialResult]) -> None:
    try:
        found = trial()
    except Exception as error:
        found = TrialResult(Status.REFUSED, detail=f"{type(error).__name__}: {error}")
    answer.send(found)


@lru_cache(maxsize=REMEMBERED)
def _case(workload: bytes) -> KernelCase:
    return KernelCase(pickle.loads(workload))


class KernelCase:
    """A workload with random inputs, and what the kernel must make of them."""

    def __init__(self, workload: KernelWorkload) -> None:
        self.workload = workload

    def prepare(self, cold: bool) -> None:
        """Make what all trials share, before they fork. TypeError, ValueError where it cannot be compiled."""
        for name in ("own", "expected", *(["_copies"] if cold else [])):
            getattr(self, name)

    @cached_property
    def own(self) -> CompiledKernel:
        """Under the compiler's own schedule."""
        return compile_function(self.workload.loops(self.workload.apply(self.workload.default_trace())))

    @cached_property
    def arrays(self) -> list[Array]:
        """Random inputs, always the same."""
        rng = np.random.default_rng(0)
        return [_random(rng, t.dtype, t.shape) for t in self.workload.inputs]

    @cached_property
    def _copies(self) -> list[list[Array]]:
        """The inputs several times, each with constants of its own, together twice what the second cache holds."""
        constants = [tensor in self.workload.constants for tensor in self.workload.inputs]
        count = min(MOST_COPIES, 1 + 2 * target().cache_bytes // max(1, self.workload.constant_bytes))
        return [
            [array.copy() if constant else array for array, constant in zip(self.arrays, constants)]
            for _ in range(count)
        ]

    @cached_property
    def expected(self) -> list[Array]:
        """By loops under no schedule: nothing is tiled, merged, in vectors or inlined."""
        plain = compile_function(lower_kernel(Schedule(self.workload.outputs), self.workload.inputs))
        return plain(*self.arrays)

    def timed(self, kernel: CompiledKernel, job: KernelJob) -> TrialResult:
        """Picoseconds of `kernel`, beside the compiler's own by turns; WRONG where its outputs are."""
        outputs = [aligned_empty(numpy_dtype(dtype), shape) for dtype, shape in kernel.outputs]
        for array in outputs:
            array.view(np.uint8).fill(0xA5)  # what is not written shows
        kernel.run(self.arrays, outputs)
        if wrong := self._wrong(outputs):
            return TrialResult(Status.WRONG, detail=wrong)
        given = itertools.cycle(self._copies if job.cold else [self.arrays])
        runs = [lambda: self.own.run(next(given), outputs), lambda: kernel.run(next(given), outputs)]
        own, found = by_turns(runs, 0, LEAST_SAMPLES)
        usual = job.usual or round(own * 1e12)
        if job.limit and usual * found / own > job.limit:
            return TrialResult(Status.CENSORED, job.limit)
        if job.rounds == 1:
            times = [tuple(map(min, zip((own, found), by_turns(runs, job.seconds))))]
        else:
            times = [tuple(by_turns(runs, job.seconds / job.rounds)) for _ in range(job.rounds)]
        own, found = max(times, key=lambda pair: pair[1] / pair[0])
        return TrialResult(
            Status.OK, max(1, round(usual * found / own)), f"{found * 1e6:.4g} us, {own * 1e6:.4g} us own"
        )

    def _wrong(self, outputs: Sequence[Array]) -> str:
        for number, (found, expected) in enumerate(zip(outputs, self.expected)):
            if (gap := difference(found, expected)) > TOLERANCE.get(expected.dtype.name, 0.0):
                return f"output {number} differs by {gap:.3g} of its largest value"
        return ""


def difference(found: Array, expected: Array) -> float:
    """Over the largest of `expected`; infinite where one has NaN, infinities or integers that the other has not."""
    if not is_float(expected.dtype.name):
        return 0.0 if np.array_equal(found, expected) else float("inf")
    a, b = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return float("inf")
    gap = np.abs(a[finite] - b[finite]).max(initial=0.0)
    return float(gap / max(np.abs(b[finite]).max(initial=0.0), 1e-30)) if gap else 0.0


def by_turns(
    runs: Sequence[Callable[[], object]], seconds: float, samples: int = 1,
    clock: Callable[[], float] = time.thread_time,
    before: Callable[[Callable[[], object]], object] = lambda run: None,
) -> list[float]:  # fmt: skip
    """Seconds of the fastest run of each, for so many seconds and samples; by default those of the processor, in this
    thread. before: what is done with each before its samples."""
    counts = [max(1, round(SAMPLE_SECONDS / max(_once(run, 1, clock), 1e-7))) for run in runs]
    best = [float("inf")] * len(runs)
    end, taken = time.perf_counter() + seconds, 0
    while taken < samples or time.perf_counter() < end:
        for number, (run, count) in enumerate(zip(runs, counts)):
            before(run)
            best[number] = min(best[number], _once(run, count, clock))
        taken += 1
    return best


def _once(run: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        run()
    return (clock() - start) / count


def _random(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    """Floats around 0, bytes of the whole range, other integers 0 and 1, which are positions everywhere."""
    if is_float(dtype):
        return rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))
    if dtype in ("int8", "uint8"):
        return rng.integers(0, 256, shape).astype(np.uint8).view(numpy_dtype(dtype))
    return rng.integers(0, 2, shape).astype(numpy_dtype(dtype))
