"""A team of threads that share the loops of kernels (Team), and the lists of calls that each works through (CallList).

Workers stay in machine code (llvm/team_code.py), where they neither need Python's global lock nor raise exceptions.
They spin for a while, so that the next kernels begin within a microsecond, and then sleep.
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

from celosia.compiler.program.host.kernel_compiler import kernel_linker
from celosia.plain import Sentence

THREADS_VARIABLE = "CELOSIA_THREADS"
"""Environment variable with the default number of threads."""
MAX_DEFAULT_THREADS = 8
"""Limit of the default number of threads: more seldom help one inference."""
MAX_THREADS = 1024
"""Limit of the number of threads that a user may choose."""


class ThreadsError(Sentence, ValueError):
    """An impossible number of threads; the message says where it comes from."""


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Return the number of threads from the environment, else the number of processors up to MAX_DEFAULT_THREADS.

    Raises ThreadsError where the environment variable is no sensible number.
    """
    text = os.environ.get(THREADS_VARIABLE)
    if text is None:
        return min(processors(), MAX_DEFAULT_THREADS)
    if not text.isascii() or not text.isdigit():
        raise ThreadsError(f"{THREADS_VARIABLE} is {text!r}; set it to the number of threads, at least 1")
    return check_thread_count(int(text), THREADS_VARIABLE)


def check_thread_count(count: int, source: str = "threads") -> int:
    """Return `count`. Raises ThreadsError, which names the `source` of the number, unless it is 1 to MAX_THREADS."""
    if not 1 <= count <= MAX_THREADS:
        raise ThreadsError(f"{source} is {count}; take a number of threads from 1 to {MAX_THREADS}")
    return count


FUNCTIONS = tuple(f"celosia_{name}" for name in ("run", "wait", "stamp", "go", "serve", "prepare", "wake"))
"""Functions of llvm/team_code.py: run a list of calls alone; wait at the barrier; write a time stamp; run a list in
each thread; serve a worker's slot until it is stopped; prepare a slot; wake a worker in a new state."""
ASLEEP, IDLE, WORK, STOP = range(4)
"""States of a worker, as the machine code has them."""
SLOT_BYTES = 128
"""Bytes between the slots of two workers, so that none share a cache line or the line prefetched with it."""


class Team:
    """The calling thread and its workers, which start when they are first needed.

    The team runs one set of lists at a time. Slots are memory through which the caller gives a worker its list.
    """

    def __init__(self, addresses: dict[str, int], code_owner: Any) -> None:
        """addresses: of `FUNCTIONS`. code_owner: an object that keeps their code alive."""
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.code_owner = code_owner
        self.alone = ctypes.CFUNCTYPE(None, pointer)(addresses["celosia_run"])
        """Runs a list of calls on this thread alone; declared with one argument like CompiledKernel._entry."""
        self.go = ctypes.CFUNCTYPE(None, pointer, pointer, integer)(addresses["celosia_go"])
        self.serve = ctypes.CFUNCTYPE(None, pointer, integer)(addresses["celosia_serve"])
        self.prepare = ctypes.CFUNCTYPE(None, pointer)(addresses["celosia_prepare"])
        self.wake = ctypes.CFUNCTYPE(None, pointer, ctypes.c_int32)(addresses["celosia_wake"])
        self.wait, self.stamp = addresses["celosia_wait"], addresses["celosia_stamp"]
        self.busy = threading.Lock()
        self.memory, self.barrier = _zeroed_lines(1 + MAX_THREADS)
        self.slots = self.barrier + SLOT_BYTES
        self.workers: list[_Worker] = []

    def run(self, lists: Any) -> bool:
        """Run the list at address lists[k] in thread k, where thread 0 is the calling one; return whether it ran.

        It returns False at once where the team is busy or the system gives no threads.
        """
        if self.busy.locked():
            return False
        with self.busy:  # unlike acquire(), it cannot be interrupted between taking the lock and the block
            if self._start_workers(len(lists)):
                self.go(self.slots, lists, len(lists))
                return True
        return False

    def _start_workers(self, parts: int) -> bool:
        """Start the workers for `parts` threads, the caller included; return False where the system gives no more."""
        while len(self.workers) < parts - 1:
            self.workers.append(_Worker(self, len(self.workers) + 1))
        try:
            for worker in self.workers[: parts - 1]:
                if worker.ident is None:
                    worker.start()
        except RuntimeError:  # the system gives no more threads
            return False
        return True

    def reset_after_fork(self) -> None:
        """Forget the workers in a child process, where their threads do not exist and the lock may be taken for ever.

        Calls that were prepared for the team stay valid: slots and barrier keep their addresses.
        """
        self.busy = threading.Lock()
        self.workers.clear()
        ctypes.memset(self.memory, 0, len(self.memory))

    def stop(self) -> None:
        """End the workers; until then, the machine code that they run must exist."""
        with self.busy:
            for worker in self.workers:
                worker.stop()
            self.workers.clear()


class _Worker(threading.Thread):
    """A thread that runs the lists which appear in its slot."""

    def __init__(self, team: Team, part: int) -> None:
        super().__init__(name=f"celosia-{part}", daemon=True)
        self.team, self.part, self.slot = team, part, team.slots + part * SLOT_BYTES
        team.prepare(self.slot)

    def run(self) -> None:
        self.team.serve(self.slot, self.part)

    def stop(self) -> None:
        if self.ident is not None:
            self.team.wake(self.slot, STOP)
            self.join()


def _zeroed_lines(count: int) -> tuple[Any, int]:
    """Allocate `count` zeroed slots of SLOT_BYTES. Returns the memory, and the aligned address of the first slot."""
    memory = (ctypes.c_char * ((count + 1) * SLOT_BYTES))()
    return memory, -(-_address(memory) // SLOT_BYTES) * SLOT_BYTES


_team: Team | None = None
"""The team of this process."""
_lock = threading.Lock()
"""Held while the team is created."""


def team(library: ctypes.CDLL | None = None) -> Team:
    """Return the team of this process, created by the first call.

    library: shared object of kernels that contains the team's machine code; None: it is compiled.
    """
    global _team
    with _lock:
        if _team is None and library is not None:
            addresses = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS}
            _team = Team(addresses, library)
        elif _team is None:
            llvm = kernel_linker()
            assert llvm is not None  # without LLVM no kernel is compiled that could need a team
            _team = Team(*llvm.link_team())
        return _team


@atexit.register
def _stop() -> None:
    """End the workers before the process ends."""
    if _team is not None:
        _team.stop()


def _reset_after_fork() -> None:
    """Replace the locks in a child process."""
    global _lock
    _lock = threading.Lock()
    if _team is not None:
        _team.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)

# Lists of calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelCall:
    """A prepared call of a kernel.

    alone: address of the function that does all of its work on one thread. phases: for each phase the address of the
    function that does one thread's part, and whether threads share the phase; empty where one thread does all.
    arguments: addresses of tensors and workspace.
    """

    alone: int
    phases: tuple[tuple[int, bool], ...]
    arguments: Sequence[int]


class CallList:
    """Kernels that run one after the other, in up to `threads` threads.

    arguments: the argument lists of all calls, which may change between runs; that of call k begins at starts[k].
    """

    def __init__(self, calls: Sequence[KernelCall], team: Team, threads: int = 1) -> None:
        """Encode the calls once, with time stamps around each; for several threads also with barriers."""
        self.team = team
        self.starts = [0, *itertools.accumulate(len(call.arguments) for call in calls)]
        self.arguments = _pointer_array([address for call in calls for address in call.arguments])
        self._stamps = (_Time * (len(calls) + 1))()
        argument_addresses = [_address(self.arguments) + start * _WORD for start in self.starts]
        stamps = [(team.stamp, _address(self._stamps) + k * ctypes.sizeof(_Time)) for k in range(len(calls) + 1)]
        alone = [stamps[0]]
        for call, arguments, stamp in zip(calls, argument_addresses, stamps[1:]):
            alone += [(call.alone, arguments), stamp]
        self._lists = [encode_calls(alone)]
        self._alone = _address(self._lists[0])
        self._shared: Any = None
        if threads > 1 and any(call.phases for call in calls):
            first, other = self._parallel_lists(calls, argument_addresses, stamps)
            self._lists += [encode_calls(first), encode_calls(other)]
            first_at, other_at = map(_address, self._lists[1:])
            self._shared = _pointer_array([first_at] + [other_at] * (threads - 1))

    def _parallel_lists(
        self, calls: Sequence[KernelCall], argument_addresses: Sequence[int], stamps: Sequence[tuple[int, int]]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the list of the calling thread and that of every other one, with barriers around shared phases."""
        wait = self.team.wait, self.team.barrier
        first, other = [stamps[0]], []
        synchronised = True  # whether all threads see the results of all earlier calls
        for call, arguments, stamp in zip(calls, argument_addresses, stamps[1:]):
            for function, shared in call.phases or ((call.alone, False),):
                if shared and not synchronised:
                    first.append(wait)
                    other.append(wait)
                first.append((function, arguments))
                if shared:
                    other += [(function, arguments), wait]
                    first.append(wait)
                synchronised = shared
            first.append(stamp)
        return first, other

    def run(self) -> Stamps:
        """Run all calls, on this thread alone where the team is busy; return the times when each began and ended."""
        if self._shared is None or not self.team.run(self._shared):
            self.team.alone(self._alone)
        return Stamps(bytes(self._stamps))


class Stamps(bytes):
    """The times at which the calls of a list began and ended, as raw bytes."""

    def seconds(self) -> list[float]:
        """Return the duration of each call."""
        times = (_Time * (len(self) // ctypes.sizeof(_Time))).from_buffer_copy(self)
        pairs = itertools.pairwise(times)
        return [b.seconds - a.seconds + 1e-9 * (b.nanoseconds - a.nanoseconds) for a, b in pairs]


def encode_calls(records: Sequence[tuple[int, int]]) -> Any:
    """Encode a list for llvm/team_code.py: the number of records as int64, then pairs (function, arguments)."""
    head = [len(records)] + [0] * (8 // _WORD - 1)
    return _pointer_array([*head, *itertools.chain.from_iterable(records)])


# Memory comes from ctypes: an interrupt during the creation of a numpy 2 array leaves a broken array behind.


class _Time(ctypes.Structure):
    """The C library's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_WORD = ctypes.sizeof(ctypes.c_void_p)
"""Bytes of a pointer."""


def _pointer_array(values: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(values))(*values)


def _address(array: Any) -> int:
    return ctypes.addressof(array)
