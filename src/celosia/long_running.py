"""Long-running work: report progress every minute, and stop child processes on SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

MINUTE = 60.0


@contextmanager
def every_minute(tell: Callable[[], None], seconds: float = MINUTE) -> Iterator[None]:
    """While the body runs, call `tell` every so many seconds, from another thread."""
    stopped = threading.Event()

    def repeat() -> None:
        while not stopped.wait(seconds):
            tell()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def so_far(description: str, started: float) -> str:
    """A line on work that began at `time.perf_counter()` `started`.

    >>> so_far("building", time.perf_counter() - 125)
    'building: 2 min 5 s so far'
    """
    minutes, seconds = divmod(round(time.perf_counter() - started), 60)
    spent = [f"{minutes} min"] * (minutes > 0) + [f"{seconds} s"] * (seconds > 0 or minutes == 0)
    return f"{description}: {' '.join(spent)} so far"


TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM has ended."""


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception does, so that temporary files go, and what it has started ends.

    Does nothing outside the main thread, or where the program takes care of the signal.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise SystemExit(TERMINATED)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Apply `end_on_sigterm` to the body alone."""
    before = signal.getsignal(signal.SIGTERM)
    end_on_sigterm()
    try:
        yield
    finally:
        if before == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) == _end:
            signal.signal(signal.SIGTERM, before)
