"""Threads that share the loops of kernels, and lists of calls that they work through.

Workers are in machine code (llvm/team.py) all the time, where Python's lock does not matter and no exception comes.
They wait actively for a while, so that the next kernels begin within a microsecond, and then sleep.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celosia.compiler.program.host.compiler import links_kernels
from celosia.compiler.program.host.threads import LIMIT

FUNCTIONS = tuple(f"celosia_{name}" for name in ("run", "wait", "stamp", "go", "serve", "prepare", "wake"))
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
        self.alone = ctypes.CFUNCTYPE(None, pointer)(addresses["celosia_run"])
        """Works through a list of calls which read no number of parts, see CompiledKernel._entry."""
        self.go = ctypes.CFUNCTYPE(None, pointer, pointer, number)(addresses["celosia_go"])
        self.serve = ctypes.CFUNCTYPE(None, pointer, number)(addresses["celosia_serve"])
        self.prepare = ctypes.CFUNCTYPE(None, pointer)(addresses["celosia_prepare"])
        self.wake = ctypes.CFUNCTYPE(None, pointer, ctypes.c_int32)(addresses["celosia_wake"])
        self.wait, self.stamp = addresses["celosia_wait"], addresses["celosia_stamp"]
        self.busy = threading.Lock()
        self.memory, self.barrier = _lines(1 + LIMIT)
        self.slots = self.barrier + LINE
        self.workers: list[_Worker] = []

    def run(self, lists: Any) -> bool:
        """Work through the list at address lists[k] in thread k, this one being the first; False, at once, where the
        team is at work or the system gives no threads."""
        if self.busy.locked():
            return False
        with self.busy:  # the one way to take a lock that an interrupt cannot come after
            if self._ready(len(lists)):
                self.go(self.slots, lists, len(lists))
                return True
        return False

    def _ready(self, parts: int) -> bool:
        """Whether there are workers for so many parts."""
        while len(self.workers) < parts - 1:
            self.workers.append(_Worker(self, len(self.workers) + 1))
        try:
            for worker in self.workers[: parts - 1]:
                if worker.ident is None:
                    worker.start()
        except RuntimeError:  # the system gives no more threads
            return False
        return True

    def renew(self) -> None:
        """In a child process: the parent's workers are not there, and its threads may have held the lock, or waited at
        the barrier. What was made for the team stays right: slots and barrier are where they were."""
        self.busy = threading.Lock()
        self.workers.clear()
        ctypes.memset(self.memory, 0, len(self.memory))

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
        self.team, self.part, self.slot = team, part, team.slots + part * LINE
        team.prepare(self.slot)

    def run(self) -> None:
        self.team.serve(self.slot, self.part)

    def stop(self) -> None:
        if self.ident is not None:
            self.team.wake(self.slot, STOP)
            self.join()


def _lines(count: int) -> tuple[Any, int]:
    """(memory, the address in it) of so many lines, all zero."""
    memory = (ctypes.c_char * ((count + 1) * LINE))()
    return memory, -(-_place(memory) // LINE) * LINE


_team: Team | None = None
_lock = threading.Lock()


def team(library: ctypes.CDLL | None = None) -> Team:
    """The team of this process: its code is made here, or that of the first `library` of kernels which asks."""
    global _team
    with _lock:
        if _team is None and library is not None:
            found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS}
            _team = Team(found, library)
        elif _team is None:
            llvm = links_kernels()
            assert llvm is not None  # or there would be no kernel that asks
            _team = Team(*llvm.link_team())
        return _team


@atexit.register
def _stop() -> None:
    if _team is not None:
        _team.stop()


def _renew() -> None:
    """In a child process."""
    global _lock
    _lock = threading.Lock()
    if _team is not None:
        _team.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

# Lists of calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelCall:
    """A kernel's call. whole: the address of what does all of its work. phases: of what does a part each, and whether
    threads share it; none where one thread does all. arguments: addresses of its tensors and of its workspace."""

    whole: int
    phases: tuple[tuple[int, bool], ...]
    arguments: Sequence[int]


class Calls:
    """Kernels that run one after the other, in up to so many threads. Their arguments may change between runs."""

    def __init__(self, calls: Sequence[KernelCall], team: Team, threads: int = 1) -> None:
        self.team = team
        self.starts = [0, *itertools.accumulate(len(call.arguments) for call in calls)]
        self.arguments = _words([address for call in calls for address in call.arguments])
        self._stamps = (_Time * (len(calls) + 1))()
        given = [_place(self.arguments) + start * _WORD for start in self.starts]
        stamps = [(team.stamp, _place(self._stamps) + k * ctypes.sizeof(_Time)) for k in range(len(calls) + 1)]
        alone = [stamps[0]]
        for call, place, stamp in zip(calls, given, stamps[1:]):
            alone += [(call.whole, place), stamp]
        self._lists = [list_of(alone)]
        self._alone = _place(self._lists[0])
        self._shared: Any = None
        if threads > 1 and any(call.phases for call in calls):
            first, other = self._divided(calls, given, stamps)
            self._lists += [list_of(first), list_of(other)]
            first_at, other_at = map(_place, self._lists[1:])
            self._shared = _words([first_at] + [other_at] * (threads - 1))

    def _divided(
        self, calls: Sequence[KernelCall], given: Sequence[int], stamps: Sequence[tuple[int, int]]
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
        """Runs all, on this thread where the team is busy. Returns when each began and ended."""
        if self._shared is None or not self.team.run(self._shared):
            self.team.alone(self._alone)
        return Stamps(bytes(self._stamps))


class Stamps(bytes):
    """The times at which the calls of a list began and ended."""

    def seconds(self) -> list[float]:
        """What each call took."""
        times = (_Time * (len(self) // ctypes.sizeof(_Time))).from_buffer_copy(self)
        pairs = itertools.pairwise(times)
        return [b.seconds - a.seconds + 1e-9 * (b.nanoseconds - a.nanoseconds) for a, b in pairs]


def list_of(records: Sequence[tuple[int, int]]) -> Any:
    """A list as llvm/team.py reads it: an int64 with the number of records, then the records."""
    head = [len(records)] + [0] * (8 // _WORD - 1)
    return _words([*head, *itertools.chain.from_iterable(records)])


# By ctypes: numpy 2 leaves a broken array behind where an interrupt comes while it makes one.


class _Time(ctypes.Structure):
    """The C library's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_WORD = ctypes.sizeof(ctypes.c_void_p)


def _words(values: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(values))(*values)


def _place(array: Any) -> int:
    return ctypes.addressof(array)
