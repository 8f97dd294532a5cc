"""Pools of devices that run trials: this process, processes of this machine, or workers of an Executor.

    with Fleet.local(2) as fleet:
        fleet.run(jobs, lambda number, result: ...)

Each trial is answered once. A trial whose process dies is tried again by another; one that misses its deadline is
killed with all its children and answered with HUNG. A device that fails three times in a row is excluded and named. A
device keeps to trials of one group, such as one Config, as long as there are some.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from celosia.compiler.tune.layer_trial import OF_THE_DEVICE, Status, TrialResult
from celosia.compiler.tune.tuner_options import DEADLINE
from celosia.plain import Sentence

MAX_ATTEMPTS = 2
"""Attempts of a trial whose process dies, or whose connection is lost."""
RETRIED_STATUSES = (Status.CRASHED, Status.LOST)
"""Failures that say nothing about the trial, so that it is tried again."""
MAX_FAILURES = 3
"""Consecutive failures after which a device is excluded."""
POLL_SECONDS, EXTRA_SECONDS = 1.0, 60.0
"""Seconds between two checks that an executor's worker is alive; seconds that it may take beyond a trial's deadline."""
WORKER_ARGUMENTS = ("-m", "celosia.compiler.tune.worker_process")
"""Arguments with which Python runs a measuring process."""
Keep = Callable[[int, TrialResult], None]


class FleetError(Sentence, RuntimeError):
    """No device is left; the message names them and their failures."""


class Job(Protocol):
    """A trial of a layer or of a kernel."""

    @property
    def group(self) -> str:
        """Name of jobs that share what a device loads; a device prefers jobs of the group it ran last."""
        ...

    def run(self) -> TrialResult:
        """Run the trial in this process; failures become a Status of the result."""


class Measurer(Protocol):
    """A device that runs trials, with a unique name."""

    name: str

    def measure(self, job: Job, deadline: float) -> TrialResult:
        """Run `job`; the result is HUNG where it takes more than `deadline` seconds."""
        ...

    def close(self) -> None:
        """End what the device has started."""


class InProcess:
    """Runs trials in this process, where nothing can end one early."""

    name = "this process"

    def measure(self, job: Job, deadline: float) -> TrialResult:
        return job.run()

    def close(self) -> None:
        pass


class WorkerProcess:
    """Runs trials in a process of its own, in its own process group, started on demand.

    command: see worker_process.py.
    """

    def __init__(self, name: str, command: Sequence[str] = (sys.executable, *WORKER_ARGUMENTS)) -> None:
        self.name, self.command = name, list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def measure(self, job: Job, deadline: float) -> TrialResult:
        """Run `job` in the process; kill the process group at the deadline."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self.close()

        timer = threading.Timer(deadline, end)
        timer.start()
        try:
            result = self._exchange(job)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
            self.close()
            detail = f"no answer within {deadline:g} s" if late.is_set() else f"{type(error).__name__} {error}".strip()
            return TrialResult(Status.HUNG if late.is_set() else Status.CRASHED, detail=detail)
        finally:
            timer.cancel()
        return result

    def _exchange(self, job: Job) -> TrialResult:
        """Send a job to the process and wait for its result."""
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        result = pickle.load(process.stdout)
        if not isinstance(result, TrialResult):
            raise ValueError(f"the answer is no Result but {str(result)[:60]}")
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        """Return the process, started if necessary with one thread for BLAS."""
        with self._lock:
            if self._process is None:
                # One thread each: they are many, and the threads of BLAS wait for each other.
                alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                paths = os.pathsep.join(path for path in sys.path if path)
                self._process = subprocess.Popen(
                    self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                    env=os.environ | alone | {"PYTHONPATH": paths},
                )  # fmt: skip
            return self._process

    def close(self) -> None:
        """Kill the process and all that it has started."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError, AttributeError):
                    stream.close()  # type: ignore[union-attr]


class ExecutorWorker:
    """A worker of an Executor, such as Dask's; there a WorkerProcess runs the trials, so that deadlines hold.

    module: what Python runs as that process. alive: returns whether the worker still exists.
    """

    def __init__(
        self,
        name: str,
        executor: Executor,
        module: Sequence[str] = WORKER_ARGUMENTS,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name, self.executor, self.module, self.alive = name, executor, tuple(module), alive
        self._closed = False

    def measure(self, job: Job, deadline: float) -> TrialResult:
        """Submit `job` to the executor and wait, checking that the worker is alive."""
        end = time.monotonic() + deadline + EXTRA_SECONDS
        future = None
        try:
            future = self.executor.submit(measure_apart, self.module, job, deadline)
            while True:
                try:
                    return future.result(max(0.0, min(POLL_SECONDS, end - time.monotonic())))
                except LateError:
                    if self._closed or not self.alive():
                        return TrialResult(Status.CRASHED, detail="its worker is gone")
                    if time.monotonic() >= end:
                        return TrialResult(Status.HUNG, detail=f"no answer within {deadline:g} s")
        except Exception as error:  # the executor's own: a worker or its machine is gone
            return TrialResult(Status.CRASHED, detail=f"{type(error).__name__}: {error}")
        finally:
            if future is not None:
                future.cancel()

    def close(self) -> None:
        self._closed = True


_thread_workers = threading.local()
"""WorkerProcesses of each thread of an executor's worker."""


def measure_apart(module: Sequence[str], job: Job, deadline: float) -> TrialResult:
    """Run `job` in a process beside this one, which stays for the next job of this thread."""
    stations: dict[Sequence[str], WorkerProcess] = _thread_workers.__dict__.setdefault("stations", {})
    if module not in stations:
        stations[module] = WorkerProcess(f"beside {os.getpid()}", (sys.executable, *module))
    return stations[module].measure(job, deadline)


class Fleet:
    """Devices that take trials from one queue. deadline: seconds for each trial. ended: called after closing."""

    def __init__(
        self, devices: Sequence[Measurer], deadline: float = DEADLINE, ended: Callable[[], object] = lambda: None
    ) -> None:
        self.devices, self.deadline, self.ended = list(devices), deadline, ended
        self.left_out: dict[str, str] = {}
        """Excluded devices by name, with their last failure."""
        self._failures = dict.fromkeys((device.name for device in devices), 0)
        self._last_group: dict[str, str] = {}
        """Group of each device's last job."""
        self._changed = threading.Condition()
        self._closed = False
        self._keeping = threading.Lock()
        self._threads = ThreadPoolExecutor(len(self.devices), "measure")

    @staticmethod
    def local(jobs: int, deadline: float = DEADLINE) -> Fleet:
        """Create a fleet of `jobs` processes of this machine; 0: this process itself."""
        return Fleet([WorkerProcess(f"process {index}") for index in range(jobs)] or [InProcess()], deadline)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running trials and end all devices. Cancelled trials have no result."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for device in self.devices:
            device.close()
        self._threads.shutdown()
        self.ended()

    def run(self, jobs: Sequence[Job], keep: Keep, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run all `jobs`; `keep` gets the index and the result of each as soon as it is known, one at a time.

        is_over: asked before each job; once it is true, no other begins. Raises FleetError where no device is left;
        jobs that were not kept were not measured then.
        """
        queue = _Queue(jobs, is_over)
        futures = [self._threads.submit(self._serve_device, device, queue, keep) for device in self._alive()]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            with self._changed:
                queue.given_up = True
                self._changed.notify_all()
        if queue.open and not queue.ended:
            if self._closed:
                raise CancelledError
            failures = "; ".join(f"{name} ({failure})" for name, failure in self.left_out.items())
            raise FleetError(f"no device is left to measure on: {failures}")

    def open_line(self) -> JobLine:
        """Open a line for jobs that come one by one."""
        return JobLine(self)

    def _alive(self) -> list[Measurer]:
        return [device for device in self.devices if device.name not in self.left_out]

    def _serve_device(self, device: Measurer, queue: _Queue, keep: Keep) -> None:
        """Run jobs on `device` until none is left for it."""
        while (index := self._next_job(device, queue)) is not None:
            result = TrialResult(Status.CRASHED)
            try:
                result = device.measure(queue.jobs[index], self.deadline)
            finally:
                is_retried = self._note_result(device, queue, index, result)
            if self._closed and result.status in OF_THE_DEVICE:
                return
            if not is_retried:
                with self._keeping:
                    keep(index, result)

    def _next_job(self, device: Measurer, queue: _Queue) -> int | None:
        """Wait for the next job for `device`; None where there is none."""
        with self._changed:
            while not (self._closed or queue.given_up or queue.check_ended() or device.name in self.left_out):
                others = {other.name for other in self._alive()} - {device.name}
                index = queue.take(device.name, others, self._last_group.get(device.name))
                if index is not None:
                    self._last_group[device.name] = queue.jobs[index].group
                    return index
                if not queue.open:
                    break
                self._changed.wait()
            queue.working.discard(device.name)
        return None

    def _note_result(self, device: Measurer, queue: _Queue, index: int, result: TrialResult) -> bool:
        """Count failures of the device, and return whether another device shall try the job again."""
        with self._changed:
            failed = result.status in OF_THE_DEVICE
            self._failures[device.name] = self._failures[device.name] + 1 if failed else 0
            if self._failures[device.name] >= MAX_FAILURES:
                self.left_out[device.name] = f"{result.status}: {result.detail}"
            is_retried = result.status in RETRIED_STATUSES and queue.put_back(index, device.name)
            if not is_retried:
                queue.open.discard(index)
            self._changed.notify_all()
            return is_retried


class JobLine:
    """Jobs of a Fleet that come one by one, each with a Future of its result. The line has the Fleet for itself."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._queue = _Queue((), lambda: False)
        self._futures: dict[int, Future[TrialResult]] = {}
        self._count = 0

    @property
    def is_dead(self) -> bool:
        """Whether no device is left; unanswered jobs will get no answer then."""
        return not self.fleet._alive()

    def submit(self, job: Job) -> Future[TrialResult]:
        """Append `job` to the line, and start idle devices."""
        fleet, queue, future = self.fleet, self._queue, Future[TrialResult]()
        with fleet._changed:
            index, self._count = self._count, self._count + 1
            queue.jobs[index], self._futures[index] = job, future
            queue.waiting.append(index)
            queue.open.add(index)
            for device in fleet._alive():
                if device.name not in queue.working:
                    queue.working.add(device.name)
                    fleet._threads.submit(fleet._serve_device, device, queue, self._keep)
            fleet._changed.notify_all()
        return future

    def _keep(self, index: int, result: TrialResult) -> None:
        del self._queue.jobs[index]
        self._futures.pop(index).set_result(result)

    def close(self) -> None:
        """Begin no more jobs, and wait for those that are running."""
        with self.fleet._changed:
            self._queue.given_up = True
            self.fleet._changed.notify_all()
            while self._queue.working and not self.fleet._closed:
                self.fleet._changed.wait(POLL_SECONDS)


class _Queue:
    """Jobs that wait for a device.

    open: indices of jobs without an answer. ended: whether no other job is to begin.
    """

    def __init__(self, jobs: Sequence[Job], is_over: Callable[[], bool]) -> None:
        """is_over: asked before each job; once it is true, no other begins."""
        self.jobs, self.is_over, self.ended = dict(enumerate(jobs)), is_over, False
        self.waiting, self.open = list(self.jobs), set(self.jobs)
        self.tried: dict[int, list[str]] = {}
        self.given_up = False
        self.working: set[str] = set()
        """Devices that wait for jobs of a JobLine."""

    def check_ended(self) -> bool:
        """Return whether no more jobs shall begin, and remember it."""
        self.ended = self.ended or self.is_over()
        return self.ended

    def take(self, name: str, others: set[str], last_group: str | None) -> int | None:
        """Take the first job that device `name` may run, preferably of the group it ran last; None where there is none.

        A job that it has tried goes to one of `others` that has not, if there is any.
        """
        free = [n for n in self.waiting if name not in (tried := self.tried.get(n, ())) or not others.difference(tried)]
        if not free:
            return None
        index = next((n for n in free if self.jobs[n].group == last_group), free[0])
        self.waiting.remove(index)
        return index

    def put_back(self, index: int, name: str) -> bool:
        """Queue a job again, and return whether it has another attempt."""
        tried = self.tried.setdefault(index, [])
        tried.append(name)
        if len(tried) < MAX_ATTEMPTS:
            self.waiting.insert(0, index)
        return len(tried) < MAX_ATTEMPTS
