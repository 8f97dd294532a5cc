"""Sizes of results, where Python or numpy mean or know something else: of Slice, and of broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

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


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of what is computed of arrays of these shapes, of any number of dimensions. ValueError where none is.

    >>> broadcast((3, 1), (4,), ())
    (3, 4)
    """
    rank = max(map(len, shapes), default=0)
    wide = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    result = tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*wide))
    if any(size not in (1, wanted) for shape in wide for size, wanted in zip(shape, result)):
        raise ValueError(f"shapes {[list(shape) for shape in shapes]} do not broadcast")
    return result
