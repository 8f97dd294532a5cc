"""Pools of devices that run trials: this process, processes of this machine, or workers of an Executor.

    with Fleet.local(2) as fleet:
        fleet.run(jobs, lambda number, result: ...)

Each trial has one result. A trial whose process dies is tried again by another device. A trial that misses its deadline
is killed with all its child processes; its result is HUNG. A device that fails three times in a row is excluded and
named. A device prefers trials of one group, such as one Config, for which it has a simulator loaded.
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

from celosia.compiler.tune.layer_trial import DEVICE_FAILURES, Status, TrialResult
from celosia.compiler.tune.tuner_options import DEADLINE
from celosia.plain import Sentence

MAX_ATTEMPTS = 2
"""Limit of the attempts of a trial whose process dies, or whose connection is lost."""
RETRIED_STATUSES = (Status.CRASHED, Status.LOST)
"""Outcomes that say nothing about the schedule, so that the trial is repeated."""
MAX_FAILURES = 3
"""Consecutive failures after which a device is excluded."""
POLL_SECONDS = 1.0
"""Seconds between two checks that an executor's worker is alive."""
EXTRA_SECONDS = 60.0
"""Seconds that an executor's worker may take beyond the deadline of a trial."""
WORKER_ARGUMENTS = ("-m", "celosia.compiler.tune.worker_process")
"""Arguments with which Python runs a process that answers trials."""
OnResult = Callable[[int, TrialResult], None]
"""Function that takes the index of a job and its result."""


class FleetError(Sentence, RuntimeError):
    """No device is left; the message names them and their failures."""


class Job(Protocol):
    """A trial of a layer or of a kernel."""

    @property
    def group(self) -> str:
        """Name that jobs share which need the same data loaded; a device prefers jobs of the group it ran last."""
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
        """End all processes that the device has started."""


class InProcess:
    """A device that runs trials in this process, where nothing can end one early."""

    name = "this process"

    def measure(self, job: Job, deadline: float) -> TrialResult:
        return job.run()

    def close(self) -> None:
        pass


class WorkerProcess:
    """A device that runs trials in a process of its own, in its own process group, which it starts on demand.

    command: starts a process that answers jobs as worker_process.py does.
    """

    def __init__(self, name: str, command: Sequence[str] = (sys.executable, *WORKER_ARGUMENTS)) -> None:
        self.name, self.command = name, list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def measure(self, job: Job, deadline: float) -> TrialResult:
        """Run `job` in the process and return its result.

        The process group is killed at the deadline, and the result is HUNG. It is CRASHED if the process ends or gives
        another answer.
        """
        late = threading.Event()

        def kill_late_process() -> None:
            late.set()
            self.close()

        timer = threading.Timer(deadline, kill_late_process)
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
        """Send a job to the process and wait for its result. Raises ValueError for another answer."""
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        result = pickle.load(process.stdout)
        if not isinstance(result, TrialResult):
            raise ValueError(f"the answer is no Result but {str(result)[:60]}")
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        """Return the process; start it if there is none."""
        with self._lock:
            if self._process is None:
                # Many processes run side by side, and threads of BLAS would wait for each other.
                one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                paths = os.pathsep.join(path for path in sys.path if path)
                self._process = subprocess.Popen(
                    self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                    env=os.environ | one_thread | {"PYTHONPATH": paths},
                )  # fmt: skip
            return self._process

    def close(self) -> None:
        """Kill the process and all processes that it has started."""
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
    """A device that is a worker of an Executor, such as Dask's; a WorkerProcess beside it runs the trials.

    The process can be killed at its deadline, the worker cannot. module: arguments with which Python runs the process.
    alive: returns whether the worker still exists.
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
        """Submit `job` to the executor and wait for its result, checking that the worker is alive."""
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
        except Exception as error:  # of a class of the executor's: a worker or its machine is gone
            return TrialResult(Status.CRASHED, detail=f"{type(error).__name__}: {error}")
        finally:
            if future is not None:
                future.cancel()

    def close(self) -> None:
        self._closed = True


_thread_workers = threading.local()
"""For each thread of an executor's worker its WorkerProcesses."""


def measure_apart(module: Sequence[str], job: Job, deadline: float) -> TrialResult:
    """Run `job` in a WorkerProcess beside this process, which is a worker of an executor.

    The WorkerProcess stays for the next job of this thread.
    """
    processes: dict[Sequence[str], WorkerProcess] = _thread_workers.__dict__.setdefault("processes", {})
    if module not in processes:
        processes[module] = WorkerProcess(f"beside {os.getpid()}", (sys.executable, *module))
    return processes[module].measure(job, deadline)


class Fleet:
    """Devices that take trials from one queue, each in a thread of its own.

    deadline: seconds for each trial. ended: called after all devices are closed.
    """

    def __init__(
        self, devices: Sequence[Measurer], deadline: float = DEADLINE, ended: Callable[[], object] = lambda: None
    ) -> None:
        self.devices, self.deadline, self.ended = list(devices), deadline, ended
        self.excluded_devices: dict[str, str] = {}
        """Excluded devices by name, with their last failure."""
        self._failures = dict.fromkeys((device.name for device in devices), 0)
        """Consecutive failures of each device."""
        self._last_group: dict[str, str] = {}
        """Group of each device's last job."""
        self._changed = threading.Condition()
        """Guards queues and the fields above; notified at each change."""
        self._closed = False
        self._reporting = threading.Lock()
        """Held while a result is handed over, so that results come one at a time."""
        self._threads = ThreadPoolExecutor(len(self.devices), "measure")

    @staticmethod
    def local(jobs: int, deadline: float = DEADLINE) -> Fleet:
        """Create a fleet of `jobs` processes on this machine; with 0, this process is the only device."""
        return Fleet([WorkerProcess(f"process {index}") for index in range(jobs)] or [InProcess()], deadline)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running trials, which then have no result, and end all devices."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for device in self.devices:
            device.close()
        self._threads.shutdown()
        self.ended()

    def run(self, jobs: Sequence[Job], on_result: OnResult, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run all `jobs`; `on_result` gets the index and the result of each as soon as it is known, one at a time.

        is_over: called before each job; once it returns True, no other begins. Raises FleetError where no device is
        left; jobs without a result were not run then.
        """
        queue = _Queue(jobs, is_over)
        futures = [
            self._threads.submit(self._serve_device, device, queue, on_result) for device in self._alive_devices()
        ]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            with self._changed:
                queue.is_closed = True
                self._changed.notify_all()
        if queue.open and not queue.is_ended:
            if self._closed:
                raise CancelledError
            failures = "; ".join(f"{name} ({failure})" for name, failure in self.excluded_devices.items())
            raise FleetError(f"no device is left to measure on: {failures}")

    def open_line(self) -> JobLine:
        """Return a line for jobs that come one by one."""
        return JobLine(self)

    def _alive_devices(self) -> list[Measurer]:
        """Return the devices that are not excluded."""
        return [device for device in self.devices if device.name not in self.excluded_devices]

    def _serve_device(self, device: Measurer, queue: _Queue, on_result: OnResult) -> None:
        """Run jobs of `queue` on `device` until none is left for it; a thread of the fleet runs this."""
        while (index := self._next_job(device, queue)) is not None:
            result = TrialResult(Status.CRASHED)
            try:
                result = device.measure(queue.jobs[index], self.deadline)
            finally:
                is_retried = self._note_result(device, queue, index, result)
            if self._closed and result.status in DEVICE_FAILURES:
                return
            if not is_retried:
                with self._reporting:
                    on_result(index, result)

    def _next_job(self, device: Measurer, queue: _Queue) -> int | None:
        """Wait for a job that `device` may run and return its index; None where there will be none."""
        with self._changed:
            while not (self._closed or queue.is_closed or queue.check_ended() or device.name in self.excluded_devices):
                others = {other.name for other in self._alive_devices()} - {device.name}
                index = queue.take(device.name, others, self._last_group.get(device.name))
                if index is not None:
                    self._last_group[device.name] = queue.jobs[index].group
                    return index
                if not queue.open:
                    break
                self._changed.wait()
            queue.serving.discard(device.name)
        return None

    def _note_result(self, device: Measurer, queue: _Queue, index: int, result: TrialResult) -> bool:
        """Count failures of the device, exclude it after MAX_FAILURES, and return whether the job is tried again."""
        with self._changed:
            failed = result.status in DEVICE_FAILURES
            self._failures[device.name] = self._failures[device.name] + 1 if failed else 0
            if self._failures[device.name] >= MAX_FAILURES:
                self.excluded_devices[device.name] = f"{result.status}: {result.detail}"
            is_retried = result.status in RETRIED_STATUSES and queue.put_back(index, device.name)
            if not is_retried:
                queue.open.discard(index)
            self._changed.notify_all()
            return is_retried


class JobLine:
    """Jobs of a Fleet that come one by one, each with a Future of its result.

    Nothing else may use the Fleet at the same time.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._queue = _Queue((), lambda: False)
        self._futures: dict[int, Future[TrialResult]] = {}
        self._count = 0

    @property
    def is_dead(self) -> bool:
        """Whether all devices are excluded; jobs without a result will get none then."""
        return not self.fleet._alive_devices()

    def submit(self, job: Job) -> Future[TrialResult]:
        """Append `job` to the line, let idle devices serve it, and return a Future of its result."""
        fleet, queue, future = self.fleet, self._queue, Future[TrialResult]()
        with fleet._changed:
            index, self._count = self._count, self._count + 1
            queue.jobs[index], self._futures[index] = job, future
            queue.waiting.append(index)
            queue.open.add(index)
            for device in fleet._alive_devices():
                if device.name not in queue.serving:
                    queue.serving.add(device.name)
                    fleet._threads.submit(fleet._serve_device, device, queue, self._set_result)
            fleet._changed.notify_all()
        return future

    def _set_result(self, index: int, result: TrialResult) -> None:
        """Answer the Future of a job."""
        del self._queue.jobs[index]
        self._futures.pop(index).set_result(result)

    def close(self) -> None:
        """Begin no more jobs, and wait for those that are running."""
        with self.fleet._changed:
            self._queue.is_closed = True
            self.fleet._changed.notify_all()
            while self._queue.serving and not self.fleet._closed:
                self.fleet._changed.wait(POLL_SECONDS)


class _Queue:
    """Jobs of a Fleet by index, and which of them wait for a device.

    jobs: by index. waiting: indices of jobs that no device runs. open: indices of jobs without a result. tried: for
    each job the names of the devices that have failed on it. is_ended: whether `is_over` has returned True. is_closed:
    whether the caller takes no more results. serving: names of the devices that serve a JobLine.
    """

    def __init__(self, jobs: Sequence[Job], is_over: Callable[[], bool]) -> None:
        self.jobs, self.is_over = dict(enumerate(jobs)), is_over
        self.waiting, self.open = list(self.jobs), set(self.jobs)
        self.tried: dict[int, list[str]] = {}
        self.is_ended = self.is_closed = False
        self.serving: set[str] = set()

    def check_ended(self) -> bool:
        """Ask `is_over` until it returns True, keep the answer in `is_ended`, and return it."""
        self.is_ended = self.is_ended or self.is_over()
        return self.is_ended

    def take(self, name: str, others: set[str], last_group: str | None) -> int | None:
        """Remove the first waiting job that device `name` may run, and return its index; None where there is none.

        Jobs of `last_group`, the group that the device ran last, come first. A job on which the device has failed is
        left to one of the devices `others` that has not tried it, if there is any.
        """

        def may_run(index: int) -> bool:
            tried = self.tried.get(index, ())
            return name not in tried or not others.difference(tried)

        eligible = [index for index in self.waiting if may_run(index)]
        if not eligible:
            return None
        index = next((n for n in eligible if self.jobs[n].group == last_group), eligible[0])
        self.waiting.remove(index)
        return index

    def put_back(self, index: int, name: str) -> bool:
        """Note that device `name` failed on a job; return whether it has another attempt, for which it waits again."""
        tried = self.tried.setdefault(index, [])
        tried.append(name)
        if len(tried) < MAX_ATTEMPTS:
            self.waiting.insert(0, index)
        return len(tried) < MAX_ATTEMPTS
