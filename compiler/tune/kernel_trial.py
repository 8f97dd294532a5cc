"""Trial of a kernel: compile its loops under a trace, compare its outputs, and time it.

Compiler and machine code run in a process forked for the trial, because nothing can interrupt LLVM, and a crash must
end only the trial. The cost is the processor time of the fastest of many runs. They alternate with runs of the
compiler's own schedule: both run with the same clock, caches and load, so that their ratio is more reliable than a
time.
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
from celosia.compiler.expr import Schedule, is_float, verify
from celosia.compiler.expr.schedule import Trace
from celosia.compiler.expr.verify import IRError
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel import CompiledKernel, aligned_empty
from celosia.compiler.target import target
from celosia.compiler.tune.layer_trial import Status, TrialResult

Array = NDArray[Any]
VERSION = 1
"""Version of how kernels are timed: a change raises it, and records of other versions are no longer exact."""
ABORT_FACTOR = 3.0
"""Multiple of the best time at which a trial is given up."""
MAX_SECONDS = 10.0
"""Seconds in which a trial must end: compiling and all runs."""
SAMPLE_SECONDS = 4e-4
"""Seconds of a sample: shorter runs are repeated, and timed together."""
MIN_SAMPLES = 3
"""Samples of each kernel for a first comparison."""
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-9}
"""Element type -> limit of the difference of outputs, relative to their largest value: sums may change their order."""
MAX_DEPTH = 20_000
"""Limit of the depth of expressions, which are pickled recursively."""
MAX_CACHED_KERNELS = 4
"""Kernels whose inputs and expected outputs a process keeps."""
MAX_COPIES = 64
"""Limit of the copies of constants of a cold trial; small constants stay in the cache, as they would in a model."""


def processor() -> str:
    """Return the name of this processor in records, with a digest of all that compiled code depends on."""
    triple, cpu, *_ = host().split()
    return f"{cpu} {triple.split('-')[0]} #{hashlib.sha256(host().encode()).hexdigest()[:8]}"


def pickled(workload: KernelWorkload) -> bytes:
    """Serialise a workload for a KernelJob, however deep its expression is."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, MAX_DEPTH))
    try:
        return pickle.dumps(workload)
    finally:
        sys.setrecursionlimit(limit)


@dataclass(frozen=True)
class KernelJob:
    """A trial of a kernel that a device runs.

    workload: as `pickled` returns it. trace: JSON. usual: picoseconds of the compiler's own schedule, which are
    multiplied by the measured ratio; 0: its time in this trial counts. limit: picoseconds at which the trial is given
    up; 0: none. seconds: time budget of the measurement. cold: constants come from beyond the second-level cache, as in
    a model whose weights do not fit. rounds: number of measurements, of which the worst ratio counts.
    """

    workload: bytes
    trace: str
    usual: int = 0
    limit: int = 0
    seconds: float = 0.03
    cold: bool = False
    rounds: int = 1

    @property
    def group(self) -> str:
        """Digest of the workload: its trials share inputs and expected outputs."""
        return hashlib.sha256(self.workload).hexdigest()

    def run(self) -> TrialResult:
        """Run the trial; TrialResult.cycles are picoseconds of processor time."""
        started = time.perf_counter()
        case = _case(self.workload)
        try:
            function = verify(case.workload.loops(case.workload.apply(Trace.from_json(json.loads(self.trace)))))
            case.prepare(self.cold)
        except (TypeError, ValueError, IRError) as error:
            return TrialResult(Status.REFUSED, detail=str(error))
        result = _run_in_child(lambda: case.measure(compile_function(function, keep=False), self))
        return TrialResult(result.status, result.cycles, result.detail, time.perf_counter() - started)


def _run_in_child(trial: Callable[[], TrialResult]) -> TrialResult:
    """Run `trial` in a child process and return its result; a crash becomes WRONG, a timeout REFUSED."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_result, args=(sender, trial), daemon=True)
    child.start()
    sender.close()
    try:
        if receiver.poll(MAX_SECONDS):
            result = receiver.recv()
            assert isinstance(result, TrialResult)
            return result
        return TrialResult(Status.REFUSED, detail=f"it takes more than {MAX_SECONDS:g} s to compile and run")
    except EOFError:
        child.join()
        return TrialResult(Status.WRONG, detail=f"its process ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()
        receiver.close()


def _send_result(sender: Connection, trial: Callable[[], TrialResult]) -> None:
    """Run `trial` and send its result; any exception becomes REFUSED. The child process runs this."""
    try:
        result = trial()
    except Exception as error:
        result = TrialResult(Status.REFUSED, detail=f"{type(error).__name__}: {error}")
    sender.send(result)


@lru_cache(maxsize=MAX_CACHED_KERNELS)
def _case(workload: bytes) -> KernelCase:
    """Return the KernelCase of a pickled workload; a process caches some."""
    return KernelCase(pickle.loads(workload))


class KernelCase:
    """A workload with random inputs and the expected outputs, which all its trials share."""

    def __init__(self, workload: KernelWorkload) -> None:
        self.workload = workload

    def prepare(self, cold: bool) -> None:
        """Compute what all trials share, before they fork. Raises TypeError, ValueError where it cannot be compiled."""
        _ = self.default_kernel, self.expected
        if cold:
            _ = self._copies

    @cached_property
    def default_kernel(self) -> CompiledKernel:
        """The kernel under the compiler's own schedule."""
        return compile_function(self.workload.loops(self.workload.apply(self.workload.default_trace())))

    @cached_property
    def arrays(self) -> list[Array]:
        """Random inputs, the same in each process."""
        rng = np.random.default_rng(0)
        return [_random(rng, t.dtype, t.shape) for t in self.workload.inputs]

    @cached_property
    def _copies(self) -> list[list[Array]]:
        """Copies of the inputs with constants of their own, together twice as large as the second-level cache.

        Trials with `cold` take them in turn: so weights are not in the cache, as in a run of the whole model.
        """
        is_constant = [tensor in self.workload.constants for tensor in self.workload.inputs]
        count = min(MAX_COPIES, 1 + 2 * target().cache_bytes // max(1, self.workload.constant_bytes))
        return [
            [array.copy() if constant else array for array, constant in zip(self.arrays, is_constant)]
            for _ in range(count)
        ]

    @cached_property
    def expected(self) -> list[Array]:
        """Outputs of the loops without any schedule: nothing is tiled, merged, vectorised or inlined."""
        plain = compile_function(lower_kernel(Schedule(self.workload.outputs), self.workload.inputs))
        return plain(*self.arrays)

    def measure(self, kernel: CompiledKernel, job: KernelJob) -> TrialResult:
        """Compare the outputs of `kernel` with the expected ones, then time it, alternating with the default kernel."""
        outputs = [aligned_empty(numpy_dtype(dtype), shape) for dtype, shape in kernel.outputs]
        for array in outputs:
            array.view(np.uint8).fill(0xA5)  # elements that are not written differ
        kernel.run(self.arrays, outputs)
        if wrong := self._output_error(outputs):
            return TrialResult(Status.WRONG, detail=wrong)
        inputs = itertools.cycle(self._copies if job.cold else [self.arrays])
        runs = [lambda: self.default_kernel.run(next(inputs), outputs), lambda: kernel.run(next(inputs), outputs)]
        default_time, time_ = time_alternating(runs, 0, MIN_SAMPLES)
        usual = job.usual or round(default_time * 1e12)
        if job.limit and usual * time_ / default_time > job.limit:
            return TrialResult(Status.CENSORED, job.limit)
        if job.rounds == 1:
            times = [tuple(map(min, zip((default_time, time_), time_alternating(runs, job.seconds))))]
        else:
            times = [tuple(time_alternating(runs, job.seconds / job.rounds)) for _ in range(job.rounds)]
        default_time, time_ = max(times, key=lambda pair: pair[1] / pair[0])
        return TrialResult(
            Status.OK,
            max(1, round(usual * time_ / default_time)),
            f"{time_ * 1e6:.4g} us, {default_time * 1e6:.4g} us own",
        )

    def _output_error(self, outputs: Sequence[Array]) -> str:
        """Return a sentence that says which output is wrong, "" where all are within TOLERANCE."""
        for position, (actual, expected) in enumerate(zip(outputs, self.expected)):
            if (gap := difference(actual, expected)) > TOLERANCE.get(expected.dtype.name, 0.0):
                return f"output {position} differs by {gap:.3g} of its largest value"
        return ""


def difference(actual: Array, expected: Array) -> float:
    """Return the largest difference, relative to the largest magnitude in `expected`.

    It is infinite where NaN, infinities or integers differ.
    """
    if not is_float(expected.dtype.name):
        return 0.0 if np.array_equal(actual, expected) else float("inf")
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return float("inf")
    largest = np.abs(a[finite] - b[finite]).max(initial=0.0)
    return float(largest / max(np.abs(b[finite]).max(initial=0.0), 1e-30)) if largest else 0.0


def time_alternating(
    runs: Sequence[Callable[[], object]], seconds: float, samples: int = 1,
    clock: Callable[[], float] = time.thread_time,
    before: Callable[[Callable[[], object]], object] = lambda run: None,
) -> list[float]:  # fmt: skip
    """Return the seconds of the fastest call of each of `runs`, which are called in alternation.

    So a change of the processor's clock meets all of them. It takes `samples` or more samples of each, and goes on for
    `seconds`. clock: by default the processor time of this thread. before: called with a run before each of its
    samples.
    """
    counts = [max(1, round(SAMPLE_SECONDS / max(_mean_seconds(run, 1, clock), 1e-7))) for run in runs]
    best = [float("inf")] * len(runs)
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < samples or time.perf_counter() < end:
        for position, (run, count) in enumerate(zip(runs, counts)):
            before(run)
            best[position] = min(best[position], _mean_seconds(run, count, clock))
        rounds += 1
    return best


def _mean_seconds(run: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    """Return the mean duration of `count` calls."""
    start = clock()
    for _ in range(count):
        run()
    return (clock() - start) / count


def _random(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return random floats around 0, bytes of the complete range, or other integers of 0 or 1 (valid as indices)."""
    if is_float(dtype):
        return rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))
    if dtype in ("int8", "uint8"):
        return rng.integers(0, 256, shape).astype(np.uint8).view(numpy_dtype(dtype))
    return rng.integers(0, 2, shape).astype(numpy_dtype(dtype))
