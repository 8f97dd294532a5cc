"""Devices that measure: this process, processes of this machine, or whatever an Executor reaches.

    with Fleet.local(2) as fleet:
        fleet.run(jobs, lambda number, result: ...)

Each trial is answered once: what a process takes with it when it dies is tried again by another, what does not end by
its deadline is killed with all that it has started, and answered with HUNG. A device that fails three times in a row is
left out and named. A device keeps to trials of one kind, as of one Config, as long as there are some.
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

from celosia.compiler.tune.choices import DEADLINE
from celosia.compiler.tune.measure import OF_THE_DEVICE, Status, TrialResult
from celosia.plain import Sentence

ATTEMPTS = 2
"""Times that a trial is tried whose process dies, or whose connection is lost."""
GONE = (Status.CRASHED, Status.LOST)
"""Failures that say nothing about the trial."""
IN_A_ROW = 3
"""Failures after which a device is left out."""
LOOK, LONGER = 1.0, 60.0
"""Seconds between two looks at whether an executor's place is still there, and that it may take longer than a trial."""
MODULE = ("-m", "celosia.compiler.tune.worker_process")
"""What Python runs to measure."""
Keep = Callable[[int, TrialResult], None]


class FleetError(Sentence, RuntimeError):
    """No device is left; the message names them and what was wrong."""


class Job(Protocol):
    """A trial: of a layer, or of a kernel."""

    @property
    def alike(self) -> str:
        """A device that has run such a one has what others like it need."""
        ...

    def run(self) -> TrialResult:
        """Measures it in this process. What goes wrong is a Status of the TrialResult."""


class Measurer(Protocol):
    """A device, known by its name."""

    name: str

    def measure(self, job: Job, deadline: float) -> TrialResult:
        """The TrialResult of `job`, HUNG where there is none within `deadline` seconds."""
        ...

    def close(self) -> None:
        """Ends what it has started."""


class InProcess:
    """This process. Nothing can end a trial early."""

    name = "this process"

    def measure(self, job: Job, deadline: float) -> TrialResult:
        return job.run()

    def close(self) -> None:
        pass


class WorkerProcess:
    """A process in a group of its own, started when it is needed. command: what runs; see worker_process.py."""

    def __init__(self, name: str, command: Sequence[str] = (sys.executable, *MODULE)) -> None:
        self.name, self.command = name, list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def measure(self, job: Job, deadline: float) -> TrialResult:
        late = threading.Event()

        def end() -> None:
            late.set()
            self.close()

        timer = threading.Timer(deadline, end)
        timer.start()
        try:
            result = self._answer(job)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
            self.close()
            what = f"no answer within {deadline:g} s" if late.is_set() else f"{type(error).__name__} {error}".strip()
            return TrialResult(Status.HUNG if late.is_set() else Status.CRASHED, detail=what)
        finally:
            timer.cancel()
        return result

    def _answer(self, job: Job) -> TrialResult:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        result = pickle.load(process.stdout)
        if not isinstance(result, TrialResult):
            raise ValueError(f"the answer is no Result but {str(result)[:60]}")
        return result

    def _started(self) -> subprocess.Popen[bytes]:
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
        """End the process, and all that it has started."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError, AttributeError):
                    stream.close()  # type: ignore[union-attr]


class Executed:
    """One place of an Executor, such as Dask's. There a WorkerProcess measures, so that it is the worker that ends
    what is late, with all that it has started. module: what Python runs for it; alive: whether the place is still
    there."""

    def __init__(
        self, name: str, executor: Executor, module: Sequence[str] = MODULE, alive: Callable[[], bool] = lambda: True
    ) -> None:
        self.name, self.executor, self.module, self.alive = name, executor, tuple(module), alive
        self._closed = False

    def measure(self, job: Job, deadline: float) -> TrialResult:
        end = time.monotonic() + deadline + LONGER
        future = None
        try:
            future = self.executor.submit(measure_apart, self.module, job, deadline)
            while True:
                try:
                    return future.result(max(0.0, min(LOOK, end - time.monotonic())))
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


_own = threading.local()
"""Worker processes of each thread of a worker."""


def measure_apart(module: Sequence[str], job: Job, deadline: float) -> TrialResult:
    """Measure `job` in a process beside this one, which stays for the next job of this thread."""
    stations: dict[Sequence[str], WorkerProcess] = _own.__dict__.setdefault("stations", {})
    if module not in stations:
        stations[module] = WorkerProcess(f"beside {os.getpid()}", (sys.executable, *module))
    return stations[module].measure(job, deadline)


class Fleet:
    """Devices that take trials from one queue. deadline: seconds for each trial. ended: called after all."""

    def __init__(
        self, devices: Sequence[Measurer], deadline: float = DEADLINE, ended: Callable[[], object] = lambda: None
    ) -> None:
        self.devices, self.deadline, self.ended = list(devices), deadline, ended
        self.left_out: dict[str, str] = {}
        """What was wrong with devices that get no more trials, by name."""
        self._failures = dict.fromkeys((device.name for device in devices), 0)
        self._before: dict[str, str] = {}
        """What each device's last job was alike to."""
        self._changed = threading.Condition()
        self._closed = False
        self._keeping = threading.Lock()
        self._threads = ThreadPoolExecutor(len(self.devices), "measure")

    @staticmethod
    def local(jobs: int, deadline: float = DEADLINE) -> Fleet:
        """`jobs` processes of this machine; 0: this process itself."""
        return Fleet([WorkerProcess(f"process {number}") for number in range(jobs)] or [InProcess()], deadline)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is under way and end all devices. Trials that this cuts off have no TrialResult."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for device in self.devices:
            device.close()
        self._threads.shutdown()
        self.ended()

    def run(self, jobs: Sequence[Job], keep: Keep, over: Callable[[], bool] = lambda: False) -> None:
        """Measure all `jobs`; `keep` gets the number and the TrialResult of each as soon as it is there, one at a time.
        over: asked before each job; once it is true, no other is begun. FleetError where no device is left: what was
        not kept then was not measured."""
        queue = _Queue(jobs, over)
        futures = [self._threads.submit(self._work, device, queue, keep) for device in self._alive()]
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
            named = "; ".join(f"{name} ({what})" for name, what in self.left_out.items())
            raise FleetError(f"no device is left to measure on: {named}")

    def line(self) -> JobLine:
        """For jobs that come one by one."""
        return JobLine(self)

    def _alive(self) -> list[Measurer]:
        return [device for device in self.devices if device.name not in self.left_out]

    def _work(self, device: Measurer, queue: _Queue, keep: Keep) -> None:
        """Measure on `device` until nothing is left for it."""
        while (number := self._next(device, queue)) is not None:
            result = TrialResult(Status.CRASHED)
            try:
                result = device.measure(queue.jobs[number], self.deadline)
            finally:
                again = self._judge(device, queue, number, result)
            if self._closed and result.status in OF_THE_DEVICE:
                return
            if not again:
                with self._keeping:
                    keep(number, result)

    def _next(self, device: Measurer, queue: _Queue) -> int | None:
        """The next job for `device`, when there is one."""
        with self._changed:
            while not (self._closed or queue.given_up or queue.has_ended() or device.name in self.left_out):
                others = {each.name for each in self._alive()} - {device.name}
                number = queue.take(device.name, others, self._before.get(device.name))
                if number is not None:
                    self._before[device.name] = queue.jobs[number].alike
                    return number
                if not queue.open:
                    break
                self._changed.wait()
            queue.working.discard(device.name)
        return None

    def _judge(self, device: Measurer, queue: _Queue, number: int, result: TrialResult) -> bool:
        """What a TrialResult says of its device; whether another is to try the job again."""
        with self._changed:
            failed = result.status in OF_THE_DEVICE
            self._failures[device.name] = self._failures[device.name] + 1 if failed else 0
            if self._failures[device.name] >= IN_A_ROW:
                self.left_out[device.name] = f"{result.status}: {result.detail}"
            again = result.status in GONE and queue.put_back(number, device.name)
            if not again:
                queue.open.discard(number)
            self._changed.notify_all()
            return again


class JobLine:
    """Jobs of a Fleet that come one by one, each with a Future of its TrialResult. Nothing else runs on the Fleet until
    the line is closed."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._queue = _Queue((), lambda: False)
        self._futures: dict[int, Future[TrialResult]] = {}
        self._count = 0

    @property
    def is_dead(self) -> bool:
        """Whether no device is left: what has no answer by then gets none."""
        return not self.fleet._alive()

    def submit(self, job: Job) -> Future[TrialResult]:
        """Put `job` behind the others."""
        fleet, queue, future = self.fleet, self._queue, Future[TrialResult]()
        with fleet._changed:
            number, self._count = self._count, self._count + 1
            queue.jobs[number], self._futures[number] = job, future
            queue.waiting.append(number)
            queue.open.add(number)
            for device in fleet._alive():
                if device.name not in queue.working:
                    queue.working.add(device.name)
                    fleet._threads.submit(fleet._work, device, queue, self._keep)
            fleet._changed.notify_all()
        return future

    def _keep(self, number: int, result: TrialResult) -> None:
        del self._queue.jobs[number]
        self._futures.pop(number).set_result(result)

    def close(self) -> None:
        """Begin no more jobs, and wait for those that are under way."""
        with self.fleet._changed:
            self._queue.given_up = True
            self.fleet._changed.notify_all()
            while self._queue.working and not self.fleet._closed:
                self.fleet._changed.wait(LOOK)


class _Queue:
    """Jobs that wait. open: numbers of those without an answer. ended: no other is to begin, as `over` had it."""

    def __init__(self, jobs: Sequence[Job], over: Callable[[], bool]) -> None:
        self.jobs, self.over, self.ended = dict(enumerate(jobs)), over, False
        self.waiting, self.open = list(self.jobs), set(self.jobs)
        self.tried: dict[int, list[str]] = {}
        self.given_up = False
        self.working: set[str] = set()
        """Devices that look for jobs, of a JobLine."""

    def has_ended(self) -> bool:
        """Whether it is over, now or before."""
        self.ended = self.ended or self.over()
        return self.ended

    def take(self, name: str, others: set[str], before: str | None) -> int | None:
        """The first job that `name` may take, alike to what it had `before` if there is one. What it has tried goes to
        `others`, if there are some that have not."""
        free = [n for n in self.waiting if name not in (tried := self.tried.get(n, ())) or not others.difference(tried)]
        if not free:
            return None
        number = next((n for n in free if self.jobs[n].alike == before), free[0])
        self.waiting.remove(number)
        return number

    def put_back(self, number: int, name: str) -> bool:
        """For another try; whether it has one."""
        tried = self.tried.setdefault(number, [])
        tried.append(name)
        if len(tried) < ATTEMPTS:
            self.waiting.insert(0, number)
        return len(tried) < ATTEMPTS
