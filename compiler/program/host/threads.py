"""Number of threads that share the loops of kernels."""

from __future__ import annotations

import os

from celosia.plain import Sentence

VARIABLE = "CELOSIA_THREADS"
MAX_DEFAULT_THREADS = 8
"""Threads where nothing is said: more of them seldom help one inference."""
LIMIT = 1024


class ThreadsError(Sentence, ValueError):
    """An impossible number of threads; the message says where it comes from."""


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Read the number of threads from the environment, or count the processors, at most MAX_DEFAULT_THREADS."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return min(processors(), MAX_DEFAULT_THREADS)
    if not text.isascii() or not text.isdigit():
        raise ThreadsError(f"{VARIABLE} is {text!r}; set it to the number of threads, at least 1")
    return thread_count(int(text), VARIABLE)


def thread_count(count: int, source: str = "threads") -> int:
    """`count`. ThreadsError where that many threads make no sense."""
    if not 1 <= count <= LIMIT:
        raise ThreadsError(f"{source} is {count}; take a number of threads from 1 to {LIMIT}")
    return count
