"""Long-running work: report progress every minute, and stop child processes on SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

MINUTE = 60.0
"""Seconds between two reports."""


@contextmanager
def every_minute(report: Callable[[], None], seconds: float = MINUTE) -> Iterator[None]:
    """Call `report` every `seconds` from another thread, while the body runs."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            report()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def progress_line(work: str, started: float) -> str:
    """Return a line on the time that `work` has taken since `started`, a value of `time.perf_counter()`.

    >>> progress_line("building", time.perf_counter() - 125)
    'building: 2 min 5 s so far'
    """
    minutes, seconds = divmod(round(time.perf_counter() - started), 60)
    spent = [f"{minutes} min"] * (minutes > 0) + [f"{seconds} s"] * (seconds > 0 or minutes == 0)
    return f"{work}: {' '.join(spent)} so far"


TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM has ended."""


def end_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that temporary files are removed and child processes are stopped.

    Does nothing outside the main thread, or if the program already handles the signal.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(*_: Any) -> NoReturn:
    """Handle SIGTERM: ignore further ones, and raise SystemExit."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Apply `end_on_sigterm` to the body, and restore the former handler."""
    before = signal.getsignal(signal.SIGTERM)
    end_on_sigterm()
    try:
        yield
    finally:
        if before == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) == _exit:
            signal.signal(signal.SIGTERM, before)
