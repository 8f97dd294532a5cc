"""The number of threads that share the loops of kernels."""

from __future__ import annotations

import os

from celosia.plain import Sentence

THREADS_VARIABLE = "CELOSIA_THREADS"
MAX_DEFAULT_THREADS = 8
"""Limit of the default: more threads seldom help one inference."""
MAX_THREADS = 1024


class ThreadsError(Sentence, ValueError):
    """An impossible number of threads; the message says where it comes from."""


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Read the number of threads from the environment, or count the processors, at most MAX_DEFAULT_THREADS."""
    text = os.environ.get(THREADS_VARIABLE)
    if text is None:
        return min(processors(), MAX_DEFAULT_THREADS)
    if not text.isascii() or not text.isdigit():
        raise ThreadsError(f"{THREADS_VARIABLE} is {text!r}; set it to the number of threads, at least 1")
    return check_thread_count(int(text), THREADS_VARIABLE)


def check_thread_count(count: int, source: str = "threads") -> int:
    """Return `count`; ThreadsError where it is no sensible number of threads. source: where it comes from."""
    if not 1 <= count <= MAX_THREADS:
        raise ThreadsError(f"{source} is {count}; take a number of threads from 1 to {MAX_THREADS}")
    return count
