"""Who measures: this process, processes of this machine, or whatever an Executor reaches.

    with Fleet.local(2) as fleet:
        fleet.run(jobs, lambda number, result: ...)

Each trial is answered once: what a process takes with it when it dies is tried again by another, what does not end by
its deadline is killed with all that it has started, and answered with HUNG. A device that fails three times in a row is
left out and named.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from celosia.compiler.tune.measure import OF_THE_DEVICE, Result, Status

DEADLINE = 600.0
"""Seconds that a trial may take."""
ATTEMPTS = 2
"""Times that a trial is tried whose process dies."""
IN_A_ROW = 3
"""Failures after which a device is left out."""
COMMAND = (sys.executable, "-m", "celosia.compiler.tune.station")
Keep = Callable[[int, Result], None]


class FleetError(RuntimeError):
    """No device is left; the message names them and what was wrong."""


class Job(Protocol):
    """A trial: of a layer, or of a kernel."""

    def run(self) -> Result: ...


class Measurer(Protocol):
    """A device, known by its name."""

    name: str

    def measure(self, job: Job, deadline: float) -> Result:
        """The Result of `job`, HUNG where there is none within `deadline` seconds."""
        ...

    def close(self) -> None: ...


class Here:
    """This process. Nothing can end a trial early."""

    name = "this process"

    def measure(self, job: Job, deadline: float) -> Result:
        return job.run()

    def close(self) -> None:
        pass


class Station:
    """A process in a group of its own, started when it is needed. command: what runs; see station.py."""

    def __init__(self, name: str, command: Sequence[str] = COMMAND) -> None:
        self.name, self.command = name, list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def measure(self, job: Job, deadline: float) -> Result:
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
            return Result(Status.HUNG if late.is_set() else Status.CRASHED, detail=what)
        finally:
            timer.cancel()
        return result

    def _answer(self, job: Job) -> Result:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        result = pickle.load(process.stdout)
        if not isinstance(result, Result):
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
    """One place of an Executor, such as Dask's: where it runs, and with which of its resources, is the executor's
    affair, so is what becomes of a trial that is late."""

    def __init__(self, name: str, executor: Executor) -> None:
        self.name, self.executor = name, executor

    def measure(self, job: Job, deadline: float) -> Result:
        future = self.executor.submit(job.run)
        try:
            return future.result(deadline)
        except LateError:
            future.cancel()
            return Result(Status.HUNG, detail=f"no answer within {deadline:g} s")
        except Exception as error:  # the executor's own: a worker or its machine is gone
            return Result(Status.CRASHED, detail=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        pass


class Fleet:
    """Devices that take trials from one queue. deadline: seconds for each trial."""

    def __init__(self, devices: Sequence[Measurer], deadline: float = DEADLINE) -> None:
        self.devices, self.deadline = list(devices), deadline
        self.left_out: dict[str, str] = {}
        """What was wrong with devices that get no more trials, by name."""
        self._failures = dict.fromkeys((device.name for device in devices), 0)
        self._free = list(devices)
        self._changed = threading.Condition()
        self._closed = False
        self._keeping = threading.Lock()
        self._threads = ThreadPoolExecutor(len(self.devices), "measure")

    @staticmethod
    def local(jobs: int, deadline: float = DEADLINE) -> Fleet:
        """`jobs` processes of this machine; 0: this process itself."""
        return Fleet([Station(f"process {number}") for number in range(jobs)] or [Here()], deadline)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is under way and end all devices. Trials that this cuts off have no Result."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for device in self.devices:
            device.close()
        self._threads.shutdown()

    def run(self, jobs: Sequence[Job], keep: Keep) -> None:
        """Measure all `jobs`; `keep` gets the number and the Result of each as soon as it is there, one at a time.
        FleetError where no device is left: what was not kept then was not measured."""
        futures = [self._threads.submit(self._one, number, job, keep) for number, job in enumerate(jobs)]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()

    def _one(self, number: int, job: Job, keep: Keep) -> None:
        tried: set[str] = set()
        for _ in range(ATTEMPTS):
            device, result = self._take(tried), Result(Status.CRASHED)
            tried.add(device.name)
            try:
                result = device.measure(job, self.deadline)
            finally:
                self._give_back(device, result)
            if self._closed and result.status in OF_THE_DEVICE:
                return
            if result.status != Status.CRASHED:
                break
        with self._keeping:
            keep(number, result)

    def _take(self, tried: set[str]) -> Measurer:
        """A free device, when there is one, that is not among `tried` if there are others."""
        with self._changed:
            while alive := [device for device in self.devices if device.name not in self.left_out]:
                wanted = [device for device in alive if device.name not in tried] or alive
                for device in wanted:
                    if device in self._free:
                        self._free.remove(device)
                        return device
                self._changed.wait()
        named = "; ".join(f"{name} ({what})" for name, what in self.left_out.items())
        raise FleetError(f"no device is left to measure on: {named}")

    def _give_back(self, device: Measurer, result: Result) -> None:
        """To the others, or leave it out."""
        with self._changed:
            failed = result.status in OF_THE_DEVICE
            self._failures[device.name] = self._failures[device.name] + 1 if failed else 0
            if self._failures[device.name] < IN_A_ROW:
                self._free.append(device)
            else:
                self.left_out[device.name] = f"{result.status}: {result.detail}"
            self._changed.notify_all()
