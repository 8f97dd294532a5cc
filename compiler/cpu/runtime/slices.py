"""The meaning of Slice, which is not quite Python's."""

from __future__ import annotations

FOREVER = (2**31 - 1, 2**63 - 1)
"""Ends that stand for the end of an axis of any size; backwards, that is before its first element."""


def taken(size: int, start: int, end: int, step: int) -> range:
    """The positions that Slice takes of an axis of `size`. ValueError where the step is 0.

    Backwards, a start before the axis is its first element, where Python takes nothing.

    >>> [list(taken(5, start, end, -2)) for start, end in ((10, -(2**63)), (-9, -6), (3, 2**63 - 1))]
    [[4, 2, 0], [0], [3, 1]]
    """
    if not step:
        raise ValueError("a step is 0")
    low, high = (-1, size - 1) if step < 0 else (0, size)
    first, last = (place + size if place < 0 else place for place in (start, end))
    if end in FOREVER:
        last = low if step < 0 else high
    return range(min(max(first, 0), high), min(max(last, low), size), step)
