"""Control of Python's garbage collector while many objects are made that nearly all live on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTED = 1_000_000
"""Objects after which it looks. By default after 700 (Python 3.13: 2,000), which takes a sixth of a compile's time and
a third of an elaboration's."""


@contextmanager
def raised_gc_threshold() -> Iterator[None]:
    """Let the collector look for cycles only every COLLECTED objects, unless it looks less often anyway or not at
    all."""
    before = gc.get_threshold()
    if 0 < before[0] < COLLECTED:
        gc.set_threshold(COLLECTED, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
