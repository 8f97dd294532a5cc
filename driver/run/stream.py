"""Run a stream of samples: CPU steps of one run overlap launches of another. Results come in order.

Each sample in flight has a lane: its own tensors on the host, and its own memory of the device. Lanes take turns on the
CPU and on each accelerator, so that a stream takes the larger of both times, and not their sum.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any, Protocol

from numpy.typing import NDArray

from celosia.compiler.program import InputError, ProgramError
from celosia.compiler.program.host.op import HostError
from celosia.driver.run.run_result import Result
from celosia.sim.device import DeviceError

Array = NDArray[Any]
Sample = Mapping[str, Array] | Array | Exception
"""Inputs by name, or the array of the only input; or an error that stands for a sample that cannot be read."""
Futures = Generator["Future[Result]", None, None]
"""The runs of a stream in order, each done when it is yielded."""
LANES = 3
"""Default number of lanes of an accelerator: one on the accelerator, one on the CPU, and one that is ready for either.
With two lanes, each delay of a thread would delay the stream."""
MAX_LANES = 64
"""Largest number of lanes of an accelerator; each has a thread and memory of its own."""
LOOK_SECONDS = 0.1
"""Seconds between two checks of a future that is waited for, so that an interrupt is noticed."""
START_SECONDS = 1.0
"""Seconds that a thread has to start after an interrupt."""
SAMPLE_ERRORS = InputError, ProgramError, HostError
"""Errors that a sample or a Program causes, and that another accelerator would raise as well."""


@dataclass(frozen=True)
class ResourceLocks:
    """Locks of shared resources, each held while a run uses it.

    cpu: shared by the lanes of all accelerators. device: shared by the lanes of one accelerator.
    """

    cpu: Lock = field(default_factory=Lock)
    device: Lock = field(default_factory=Lock)


class SampleLane(Protocol):
    """Runs one sample at a time on one accelerator; a ProgramRuntime is one."""

    def where(self) -> str:
        """Return a description of the accelerator, for messages."""
        ...

    def run(self, inputs: Mapping[str, Array], *, trace: bool) -> Result:
        """Run one sample and return its result."""
        ...

    def shared(self) -> bool:
        """Return whether the accelerator may have other lanes."""
        ...

    def clone_shared(self) -> SampleLane | None:
        """Return another lane of the accelerator; None where it cannot be had. Runs of both may overlap."""
        ...

    def abandon(self, whether: bool) -> None:
        """Set whether the caller has given up the current run, so that it need not end normally."""

    def close(self) -> None:
        """Release what the lane holds."""


class Results(Iterator[Result]):
    """Results of samples, in their order.

    Where a run fails, `next` raises its error with the number of the sample; the next call goes on with the sample
    behind it. Threads end with the last result, with `close`, when an exception interrupts `next`, and when this object
    is deleted, which a traceback delays.

    lost: a sentence for each accelerator that was left out after an error. ended: whether nothing follows.
    """

    def __init__(self, futures: Futures, lost: list[str]) -> None:
        self._futures, self._number, self.lost, self.ended = futures, 0, lost, False

    def __next__(self) -> Result:
        self.ended = True
        future = next(self._futures)
        self.ended = False
        name, self._number = f"sample {self._number}: ", self._number + 1
        error = future.exception()
        if error is None:
            return future.result()
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (name + error.args[0].removeprefix(name),)
        raise error

    def close(self) -> None:
        """End the stream: wait for the runs under way, and begin no others."""
        self._futures.close()


@dataclass(eq=False)
class _Accelerator:
    """An accelerator of a stream, with its lanes.

    own: the lane that outlives the stream. lanes: all open lanes. free: those without a sample. more: how many may
    still be opened, each when a sample waits for it. lost: whether it is left out after an error. opening: held while a
    lane is opened.
    """

    own: SampleLane
    lanes: list[SampleLane]
    free: list[SampleLane]
    more: int
    lost: bool = False
    opening: Lock = field(default_factory=Lock)


class SampleStream:
    """Stream of samples on one or more accelerators; a faster accelerator takes more samples.

    own: a lane of each accelerator. lanes: the number that each shall have; further ones are opened by the threads that
    need them, while the first samples run. name_inputs: converts a sample to inputs by name. trace: record times of
    instructions. lost: see Results.
    """

    def __init__(
        self, own: Sequence[SampleLane], lanes: int, name_inputs: Callable[[Sample], Mapping[str, Array]], trace: bool,
        lost: list[str],
    ) -> None:  # fmt: skip
        self._name_inputs, self._trace, self._lost = name_inputs, trace, lost
        self._work: SimpleQueue[tuple[Future[Result], Sample] | None] = SimpleQueue()
        self._over = False  # whether the stream has ended, so that no run may begin
        self._lane_freed = Condition()  # also guards the lists of lanes
        self._accelerators = [_Accelerator(lane, [lane], [lane], lanes - 1 if lane.shared() else 0) for lane in own]

    def futures(self, samples: Iterable[Sample]) -> Futures:
        """Return the futures of `samples`, which are read a few ahead of the results."""
        count = sum(len(accelerator.lanes) + accelerator.more for accelerator in self._accelerators)
        return self._run_in_this_thread(samples) if count == 1 else self._run_in_threads(samples, count)

    def _run_in_this_thread(self, samples: Iterable[Sample]) -> Futures:
        """Run the samples in the calling thread, where an interrupt ends a run at once."""
        for sample in samples:
            future: Future[Result] = Future()
            try:
                future.set_result(self._run_with_retry(sample))
            except Exception as error:
                future.set_exception(error)
            yield future

    def _run_in_threads(self, samples: Iterable[Sample], count: int) -> Futures:
        """Run samples in `count` threads, and yield their futures in order."""
        waiting: deque[Future[Result]] = deque()
        threads = [Thread(target=self._run_waiting_samples, name="celosia-lane", daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            source, failure = iter(samples), None
            while True:
                try:
                    sample = next(source)
                except StopIteration:
                    break
                except Exception as error:  # an error of the samples' iterator: raised after the results so far
                    failure = error
                    break
                waiting.append(Future())
                self._work.put((waiting[-1], sample))
                if len(waiting) > count:
                    yield _wait_for_first(waiting)
            while waiting:
                yield _wait_for_first(waiting)
            if failure is not None:
                raise failure
        finally:
            self._join_threads(threads)

    def _join_threads(self, threads: Sequence[Thread]) -> None:
        """End all threads and close the lanes that the stream has opened, also after an interrupt."""
        with self._lane_freed:
            self._over = True
            self._lane_freed.notify_all()
        for _ in threads:
            self._work.put(None)
        for accelerator in self._accelerators:
            for lane in accelerator.lanes:
                if lane not in accelerator.free:
                    lane.abandon(True)
        for thread in threads:
            end = time.monotonic() + START_SECONDS
            while thread.ident is None and time.monotonic() < end:  # an interrupt came while it was started
                time.sleep(1e-3)
            if thread.ident is not None:
                thread.join()
        for accelerator in self._accelerators:
            accelerator.own.abandon(False)
            for lane in accelerator.lanes[1:]:
                lane.close()

    # In the threads of lanes -----------------------------------------------------------------------------------

    def _run_waiting_samples(self) -> None:
        """Run samples from the queue until it yields None. Each result or error goes to the sample's future."""
        while (item := self._work.get()) is not None:
            future, sample = item
            try:
                future.set_result(self._run_with_retry(sample))
            except BaseException as error:
                future.set_exception(error)

    def _run_with_retry(self, sample: Sample) -> Result:
        """Run a sample on any accelerator. If it fails there and succeeds on another one, leave the first one out.

        Errors of the sample itself (SAMPLE_ERRORS) are raised at once. DeviceError if the stream has ended.
        """
        inputs, acquired = self._name_inputs(sample), self._acquire_lane()
        if acquired is None:
            raise DeviceError("the stream is over")
        try:
            return self._run_on_lane(acquired, inputs)
        except SAMPLE_ERRORS:
            raise
        except Exception as error:
            accelerator, _ = acquired
            other = self._acquire_lane(accelerator)
            if other is None:
                raise
            try:
                result = self._run_on_lane(other, inputs)
            except Exception:  # perhaps the sample causes it: both accelerators stay
                raise error from None
            self._leave_out(accelerator, error)
            return result

    def _run_on_lane(
        self, accelerator_and_lane: tuple[_Accelerator, SampleLane], inputs: Mapping[str, Array]
    ) -> Result:
        """Run a sample on a lane, and free the lane afterwards."""
        accelerator, lane = accelerator_and_lane
        try:
            return lane.run(inputs, trace=self._trace)
        finally:
            with self._lane_freed:
                accelerator.free.append(lane)
                self._lane_freed.notify_all()

    def _acquire_lane(self, excluded: _Accelerator | None = None) -> tuple[_Accelerator, SampleLane] | None:
        """Take a free lane of the accelerator with the most idle lanes, or open one there; wait until that is possible.

        None where no accelerator other than `excluded` is left, or the stream has ended.
        """
        while True:
            with self._lane_freed:
                chosen = self._wait_for_accelerator(excluded)
                if chosen is None:
                    return None
                if chosen.free:
                    return chosen, chosen.free.pop(0)
                chosen.more -= 1
            with chosen.opening:
                lane = chosen.own.clone_shared()
            with self._lane_freed:
                if lane is None:
                    chosen.more = 0
                    continue
                chosen.lanes.append(lane)
                return None if self._over else (chosen, lane)

    def _wait_for_accelerator(self, excluded: _Accelerator | None) -> _Accelerator | None:
        """Wait, with `_lane_freed` held, for an accelerator with a lane that is free or can be opened.

        Returns the one with most of these. None: the stream has ended, or no accelerator other than `excluded`, on
        which the sample failed, is left.
        """
        while not self._over:
            candidates = [one for one in self._accelerators if not one.lost and one is not excluded]
            if not candidates:
                break
            best = max(candidates, key=lambda accelerator: len(accelerator.free) + accelerator.more)
            if best.free or best.more:
                return best
            self._lane_freed.wait()
        return None

    def _leave_out(self, accelerator: _Accelerator, error: Exception) -> None:
        """Leave out an accelerator after an error, and say so in `lost`, unless it is the last one."""
        with self._lane_freed:
            other_accelerators = [other for other in self._accelerators if other is not accelerator and not other.lost]
            if other_accelerators and not accelerator.lost:
                accelerator.lost = True
                device_text = accelerator.own.where()
                self._lost.append(f"{device_text} is left out, for another one ran what failed there: {error}")
                self._lane_freed.notify_all()


def failed_future(error: Exception) -> Future[Result]:
    """Return a future that has failed with this error."""
    future: Future[Result] = Future()
    future.set_exception(error)
    return future


def _wait_for_first(waiting: deque[Future[Result]]) -> Future[Result]:
    """Wait until the first future is done, and remove it from the queue.

    It stays in the queue while it is waited for, so that nothing is lost by an interrupt.
    """
    while not waiting[0].done():
        wait([waiting[0]], LOOK_SECONDS)  # with a limit: an interrupt just before would not end the wait
    return waiting.popleft()
