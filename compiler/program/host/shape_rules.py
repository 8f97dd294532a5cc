"""Shape rules of ONNX that differ from Python's: the positions of Slice, and broadcasting of any number of shapes."""

from __future__ import annotations

from collections.abc import Sequence

UNBOUNDED_ENDS = (2**31 - 1, 2**63 - 1)
"""Values of `ends` that mean the end of an axis of any size; backwards, the position before its first element."""


def slice_positions(size: int, start: int, end: int, step: int) -> range:
    """Return the positions that Slice selects on an axis of `size`. Raises ValueError where the step is 0.

    With a negative step, a start before the axis selects its first element, where Python selects nothing.

    >>> [list(slice_positions(5, start, end, -2)) for start, end in ((10, -(2**63)), (-9, -6), (3, 2**63 - 1))]
    [[4, 2, 0], [0], [3, 1]]
    """
    if not step:
        raise ValueError("a step is 0")
    low, high = (-1, size - 1) if step < 0 else (0, size)
    first, last = (position + size if position < 0 else position for position in (start, end))
    if end in UNBOUNDED_ENDS:
        last = low if step < 0 else high
    return range(min(max(first, 0), high), min(max(last, low), size), step)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which `shapes`, of any ranks, broadcast. Raises ValueError where they do not.

    >>> broadcast((3, 1), (4,), ())
    (3, 4)
    """
    rank = max(map(len, shapes), default=0)
    wide = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    result = tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*wide))
    if any(size not in (1, expected) for shape in wide for size, expected in zip(shape, result)):
        raise ValueError(f"shapes {[list(shape) for shape in shapes]} do not broadcast")
    return result
