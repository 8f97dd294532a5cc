"""Threads that share the loops of kernels, and lists of calls that they work through.

Workers wait for work in machine code (llvm/team.py), where Python's lock does not matter, and wait actively for a
while: the next kernels begin within a microsecond. Then they sleep, until Python wakes them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.cpu.runtime.compiler import links_kernels
from celosia.compiler.cpu.runtime.threads import LIMIT

FUNCTIONS = ("celosia_run", "celosia_wait", "celosia_stamp", "celosia_go", "celosia_serve")
ASLEEP, IDLE, WORK, STOP = range(4)
"""States of a worker."""
LINE = 128
"""Bytes from one worker's slot to the next: no two share a line of a cache, nor the one fetched beside it."""


class Team:
    """This thread and its workers, which start when they are first needed. They do one list at a time."""

    def __init__(self, addresses: dict[str, int], held: Any) -> None:
        """addresses: of `FUNCTIONS`. held: what keeps their code alive."""
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.held = held
        self.alone = ctypes.CFUNCTYPE(None, pointer, number, number)(addresses["celosia_run"])
        self.go = ctypes.CFUNCTYPE(number, pointer, pointer, number)(addresses["celosia_go"])
        self.serve = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, number)(addresses["celosia_serve"])
        self.wait, self.stamp = addresses["celosia_wait"], addresses["celosia_stamp"]
        self.busy = threading.Lock()
        self.memory, self.barrier = _lines(1 + LIMIT)
        self.slots = self.barrier + LINE
        self.workers: list[_Worker] = []

    def run(self, lists: NDArray[Any]) -> bool:
        """Work through lists[k] in thread k, this one being the first; False, at once, where the team is at work."""
        if not self.busy.acquire(blocking=False):
            return False
        try:
            parts = len(lists)
            for part in range(len(self.workers) + 1, parts):
                self.workers.append(_Worker(self, part))
                self.workers[-1].start()
            if self.go(self.slots, lists.ctypes.data, parts):
                for worker in self.workers[: parts - 1]:
                    if worker.found() == ASLEEP:
                        worker.awake.release()
                self.alone(int(lists[0]), 0, parts)
        finally:
            self.busy.release()
        return True

    def stop(self) -> None:
        """End the workers. They run machine code, which must be there until then."""
        with self.busy:
            for worker in self.workers:
                worker.stop()
            self.workers.clear()


class _Worker(threading.Thread):
    """Does the lists that come to its slot."""

    def __init__(self, team: Team, part: int) -> None:
        super().__init__(name=f"celosia-{part}", daemon=True)
        self.serve, self.part, self.slot = team.serve, part, team.slots + part * LINE
        self.awake = threading.Semaphore(0)

    def found(self) -> int:
        """The state in which `go` found it."""
        return ctypes.c_int32.from_address(self.slot + 4).value

    def run(self) -> None:
        self.awake.acquire()
        while not self.serve(self.slot, self.part):
            self.awake.acquire()

    def stop(self) -> None:
        ctypes.c_int32.from_address(self.slot).value = STOP
        self.awake.release()
        self.join()


def _lines(count: int) -> tuple[NDArray[np.uint8], int]:
    """(memory, the address in it) of so many lines, all zero."""
    memory = np.zeros((count + 1) * LINE, np.uint8)
    return memory, -(-memory.ctypes.data // LINE) * LINE


_teams: dict[ctypes.CDLL | None, Team] = {}
_lock = threading.Lock()


def team(library: ctypes.CDLL | None = None) -> Team:
    """The team of this process, its code from a library of kernels, or made here."""
    with _lock:
        if library not in _teams:
            if library is None:
                llvm = links_kernels()
                assert llvm is not None  # or there would be no kernel that asks
                _teams[library] = Team(*llvm.link_team())
            else:
                found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS}
                _teams[library] = Team(found, library)
        return _teams[library]


@atexit.register
def _stop() -> None:
    for each in _teams.values():
        each.stop()


def _forget() -> None:
    """In a child process: the threads of its parent are not there, and may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _teams.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

# Lists of calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A kernel's call. whole: the address of what does all of its work. phases: of what does a part each, and whether
    threads share it; none where one thread does all. arguments: addresses of its tensors and of its workspace."""

    whole: int
    phases: tuple[tuple[int, bool], ...]
    arguments: Sequence[int]


class Calls:
    """Kernels that run one after the other, in up to so many threads. Their arguments may change between runs."""

    def __init__(self, calls: Sequence[Call], team: Team, threads: int = 1) -> None:
        self.team = team
        self.starts = np.cumsum([0, *(len(call.arguments) for call in calls)])
        self.arguments = np.array([address for call in calls for address in call.arguments], np.uintp)
        self._stamps = np.zeros((len(calls) + 1, 2), np.dtype(ctypes.c_long))
        given = [self.arguments.ctypes.data + int(start) * self.arguments.itemsize for start in self.starts]
        stamps = [(team.stamp, row.ctypes.data) for row in self._stamps]
        alone = [stamps[0]]
        for call, place, stamp in zip(calls, given, stamps[1:]):
            alone += [(call.whole, place), stamp]
        self._lists = [list_of(alone)]
        self._alone = self._lists[0].ctypes.data
        self._shared: NDArray[Any] | None = None
        if threads > 1 and any(call.phases for call in calls):
            first, other = self._divided(calls, given, stamps)
            self._lists += [list_of(first), list_of(other)]
            addresses = [each.ctypes.data for each in self._lists[1:]]
            self._shared = np.array([addresses[0], *addresses[1:] * (threads - 1)], np.uintp)

    def _divided(
        self, calls: Sequence[Call], given: Sequence[int], stamps: Sequence[tuple[int, int]]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The lists of this thread and of each other one, with barriers around what they share."""
        wait = self.team.wait, self.team.barrier
        first, other = [stamps[0]], []
        waited = True  # whether all threads see all that has been done
        for call, place, stamp in zip(calls, given, stamps[1:]):
            for function, shared in call.phases or ((call.whole, False),):
                if shared and not waited:
                    first.append(wait)
                    other.append(wait)
                first.append((function, place))
                if shared:
                    other += [(function, place), wait]
                    first.append(wait)
                waited = shared
            first.append(stamp)
        return first, other

    def run(self) -> Stamps:
        if self._shared is None or not self.team.run(self._shared):
            self.team.alone(self._alone, 0, 1)
        return Stamps(self._stamps.tobytes())


class Stamps(bytes):
    """The times at which the calls of a list began and ended, as the C library's `struct timespec`."""

    def seconds(self) -> list[float]:
        """What each call took."""
        times = np.frombuffer(self, ctypes.c_long).reshape(-1, 2)
        return [float(each) for each in np.diff(times[:, 0] - times[0, 0] + 1e-9 * times[:, 1])]


def list_of(records: Sequence[tuple[int, int]]) -> NDArray[Any]:
    """A list as llvm/team.py reads it: an int64 with the number of records, then the records."""
    head = np.array([len(records)], np.int64).view(np.uintp)
    return np.concatenate([head, np.array(records, np.uintp).reshape(-1)])
