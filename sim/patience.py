"""Long work that says now and then that it still goes on, and ends what it has started when it is told to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

MINUTE = 60.0


@contextmanager
def every_minute(say: Callable[[str], None], what: Callable[[], str], seconds: float = MINUTE) -> Iterator[None]:
    """While the body runs, call `say` every so many seconds with what is being done and for how long."""
    started, done = time.perf_counter(), threading.Event()

    def tell() -> None:
        while not done.wait(seconds):
            say(f"{what()}: {_spent(time.perf_counter() - started)} so far")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _spent(seconds: float) -> str:
    """
    >>> _spent(59.6), _spent(125)
    ('1 min', '2 min 5 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return " ".join([*([f"{minutes} min"] if minutes else []), *([f"{rest} s"] if rest or not minutes else [])])


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
    """`end_on_sigterm` for the body alone."""
    before = signal.getsignal(signal.SIGTERM)
    end_on_sigterm()
    try:
        yield
    finally:
        if before == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) == _end:
            signal.signal(signal.SIGTERM, before)
