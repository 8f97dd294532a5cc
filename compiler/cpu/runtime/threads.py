"""Threads that share the loops of kernels. Machine code runs without Python's lock, so they do run at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

VARIABLE = "CELOSIA_THREADS"
MOST = 8
"""Threads where nothing is said: more of them seldom help one inference."""

Work = tuple[Callable[[int], object], int, "SimpleQueue[BaseException | None]"]


class ThreadsError(ValueError):
    """An impossible number of threads; the message says where it comes from."""


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """What the environment variable says, or the processors that this process may use, at most MOST."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return min(processors(), MOST)
    if not text.isascii() or not text.isdigit():
        raise ThreadsError(f"{VARIABLE} is {text!r}; set it to the number of threads, at least 1")
    return thread_count(int(text), VARIABLE)


def thread_count(count: int, source: str = "threads") -> int:
    """`count`. ThreadsError where that many threads make no sense."""
    if not 1 <= count <= 1024:
        raise ThreadsError(f"{source} is {count}; take a number of threads from 1 to 1024")
    return count


class _Pool:
    """Sleeping threads, started when they are first needed. They end with the process."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[Work] = SimpleQueue()
        self.started = 0
        self.lock = threading.Lock()

    def run(self, work: Callable[[int], object], parts: int) -> None:
        """work(0), ..., work(parts - 1) at once, the first one in this thread."""
        if self.started < parts - 1:
            with self.lock:
                while self.started < parts - 1:
                    threading.Thread(target=self._serve, name="celosia", daemon=True).start()
                    self.started += 1
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for part in range(1, parts):
            self.waiting.put((work, part, done))
        try:
            work(0)
        finally:
            failures = [done.get() for _ in range(1, parts)]
        for failure in failures:
            if failure is not None:
                raise failure

    def _serve(self) -> None:
        while True:
            work, part, done = self.waiting.get()
            failure: BaseException | None = None
            try:
                work(part)
            except BaseException as error:
                failure = error
            done.put(failure)
            del work, done, failure


pool = _Pool()
if hasattr(os, "register_at_fork"):  # the threads of a parent do not exist in its child
    os.register_at_fork(after_in_child=lambda: pool.__init__())  # type: ignore[misc]
