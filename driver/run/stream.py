"""Run a stream of samples: the CPU's steps of one run overlap launches of another, in order.

Each sample in flight has a lane: tensors of the host, and memory of the device, of its own. Lanes take turns with what
there is one of, the CPU and each accelerator, so that a stream takes the larger time of the two, and not their sum.
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
"""Inputs by name, or the array of the only one; or why there are none."""
Futures = Generator["Future[Result]", None, None]
"""The runs of a stream in order, each done."""
LANES = 3
"""Lanes of an accelerator: one that it works for, one that the CPU works for, and one that is ready for whichever
ends first: with two, each delay of a thread is one of the stream."""
MAX_LANES = 64
"""Most lanes of an accelerator: each has a thread and memory of its own."""
LOOK_SECONDS = 0.1
"""Between two looks at what is waited for."""
START_SECONDS = 1.0
"""Seconds that a thread has to begin."""
OF_THE_SAMPLE = InputError, ProgramError, HostError
"""Errors that no other accelerator would avoid."""


@dataclass(frozen=True)
class ResourceLocks:
    """Locks for what exists once, held while a run uses it: an accelerator by its lanes, the cpu by all
    accelerators."""

    cpu: Lock = field(default_factory=Lock)
    device: Lock = field(default_factory=Lock)


class SampleLane(Protocol):
    """Runner of one sample at a time."""

    def where(self) -> str:
        """Description of the accelerator, for messages."""
        ...

    def run(self, inputs: Mapping[str, Array], *, trace: bool) -> Result:
        """Run one sample and return its result."""
        ...

    def shared(self) -> bool:
        """Whether the accelerator may have other lanes."""
        ...

    def clone_shared(self) -> SampleLane | None:
        """Return another lane of the accelerator; None where it cannot be had. Runs of both may overlap."""
        ...

    def abandon(self, whether: bool) -> None:
        """Whether nobody waits any more for what runs."""

    def close(self) -> None:
        """Release what the lane holds."""


class Results(Iterator[Result]):
    """Results of samples, in their order.

    Where a run fails, `next` raises its error, which says for which sample, and goes on with the sample behind it when
    it is called again. Threads end with the last result, with `close`, when an exception ends the waiting, and when
    nobody holds this any more; a traceback does.

    lost: what was said of accelerators that the stream goes on without. ended: whether nothing follows.
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
        """End the stream: runs that have begun end, others are not begun."""
        self._futures.close()


@dataclass(eq=False)
class _Accelerator:
    """An accelerator with its lanes. own: the lane that outlives the stream. lanes: those that are open; free: without
    a sample. more: how many are opened when samples come for them, one at a time."""

    own: SampleLane
    lanes: list[SampleLane]
    free: list[SampleLane]
    more: int
    lost: bool = False
    opening: Lock = field(default_factory=Lock)


class SampleStream:
    """Stream of samples on one or more accelerators; the faster takes more. lost: as of Results.

    own: a lane of each accelerator. lanes: how many each shall have. named: makes inputs by name of a sample. Further
    lanes are opened by the threads that need them, while the first samples run.
    """

    def __init__(
        self, own: Sequence[SampleLane], lanes: int, named: Callable[[Sample], Mapping[str, Array]], trace: bool,
        lost: list[str],
    ) -> None:  # fmt: skip
        self._name_inputs, self._trace, self._lost = named, trace, lost
        self._work: SimpleQueue[tuple[Future[Result], Sample] | None] = SimpleQueue()
        self._over = False
        self._returned = Condition()
        self._accelerators = [_Accelerator(lane, [lane], [lane], lanes - 1 if lane.shared() else 0) for lane in own]

    def futures(self, samples: Iterable[Sample]) -> Futures:
        """Yield the futures of `samples`, of which no more are read than are in flight, and as many ahead."""
        count = sum(len(accelerator.lanes) + accelerator.more for accelerator in self._accelerators)
        return self._run_in_this_thread(samples) if count == 1 else self._run_in_threads(samples, count)

    def _run_in_this_thread(self, samples: Iterable[Sample]) -> Futures:
        """Run the samples in this thread, which an interrupt ends at once."""
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
        """Wait until no thread is left, whatever was interrupted."""
        with self._returned:
            self._over = True
            self._returned.notify_all()
        for _ in threads:
            self._work.put(None)
        for lane in [
            lane for accelerator in self._accelerators for lane in accelerator.lanes if lane not in accelerator.free
        ]:
            lane.abandon(True)
        for thread in threads:
            end = time.monotonic() + START_SECONDS
            while thread.ident is None and time.monotonic() < end:  # an interrupt has come while it was started
                time.sleep(1e-3)
            if thread.ident is not None:
                thread.join()
        for accelerator in self._accelerators:
            accelerator.own.abandon(False)
            for lane in accelerator.lanes[1:]:
                lane.close()

    # In the threads of lanes -----------------------------------------------------------------------------------

    def _run_waiting_samples(self) -> None:
        """Run samples of the queue until it ends; each result or error goes to its future."""
        while (item := self._work.get()) is not None:
            future, sample = item
            try:
                future.set_result(self._run_with_retry(sample))
            except BaseException as error:
                future.set_exception(error)

    def _run_with_retry(self, sample: Sample) -> Result:
        """Run on any accelerator; on another one where it fails there, which then is left out."""
        inputs, first = self._name_inputs(sample), self._acquire_lane()
        if first is None:
            raise DeviceError("the stream is over")
        try:
            return self._run_on_lane(first, inputs)
        except OF_THE_SAMPLE:
            raise
        except Exception as error:
            other = self._acquire_lane(first[0])
            if other is None:
                raise
            try:
                result = self._run_on_lane(other, inputs)
            except Exception:  # perhaps the sample's fault: both accelerators go on
                raise error from None
            self._leave_out(first[0], error)
            return result

    def _run_on_lane(self, place: tuple[_Accelerator, SampleLane], inputs: Mapping[str, Array]) -> Result:
        """Run a sample on a lane, and free the lane."""
        accelerator, lane = place
        try:
            return lane.run(inputs, trace=self._trace)
        finally:
            with self._returned:
                accelerator.free.append(lane)
                self._returned.notify_all()

    def _acquire_lane(self, but: _Accelerator | None = None) -> tuple[_Accelerator, SampleLane] | None:
        """Wait for a free lane of the accelerator that has most, or open another lane.

        None where no accelerator is left, or when the stream is over.
        """
        while True:
            with self._returned:
                chosen = self._wait_for_accelerator(but)
                if chosen is None:
                    return None
                if chosen.free:
                    return chosen, chosen.free.pop(0)
                chosen.more -= 1
            with chosen.opening:
                lane = chosen.own.clone_shared()
            with self._returned:
                if lane is None:
                    chosen.more = 0
                    continue
                chosen.lanes.append(lane)
                return None if self._over else (chosen, lane)

    def _wait_for_accelerator(self, but: _Accelerator | None) -> _Accelerator | None:
        """Wait, with `_returned` held, for an accelerator with a lane that is free or can be opened; return the best.

        None: the stream is over, or no accelerator other than `but` is left.
        """
        while not self._over:
            alive = [
                accelerator for accelerator in self._accelerators if not accelerator.lost and accelerator is not but
            ]
            if not alive:
                break
            best = max(alive, key=lambda accelerator: len(accelerator.free) + accelerator.more)
            if best.free or best.more:
                return best
            self._returned.wait()
        return None

    def _leave_out(self, accelerator: _Accelerator, error: Exception) -> None:
        """Exclude an accelerator whose failed sample ran on another one."""
        with self._returned:
            other_accelerators = [other for other in self._accelerators if other is not accelerator and not other.lost]
            if other_accelerators and not accelerator.lost:
                accelerator.lost = True
                device_text = accelerator.own.where()
                self._lost.append(f"{device_text} is left out, for another one ran what failed there: {error}")
                self._returned.notify_all()


def failed_future(error: Exception) -> Future[Result]:
    """Future that has failed with this error."""
    future: Future[Result] = Future()
    future.set_exception(error)
    return future


def _wait_for_first(waiting: deque[Future[Result]]) -> Future[Result]:
    """Wait for the first future, which stays in the queue meanwhile, so that an interrupt ends it, too."""
    while not waiting[0].done():
        wait([waiting[0]], LOOK_SECONDS)  # an interrupt that comes just before would not end it
    return waiting.popleft()
