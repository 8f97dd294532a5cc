"""Slow down Python's garbage collector while a program creates many objects that live on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

GC_THRESHOLD = 1_000_000
"""New objects after which the collector runs. Python's default is 700 (3.13: 2,000), with which the collector takes a
sixth of the time to compile a model, and a third of the time to elaborate the hardware."""


@contextmanager
def raised_gc_threshold() -> Iterator[None]:
    """Let the collector look for cycles only every COLLECTED objects, unless it looks less often anyway or not at
    all."""
    before = gc.get_threshold()
    if 0 < before[0] < GC_THRESHOLD:
        gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
