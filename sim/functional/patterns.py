"""Affine addresses of scratchpads and DRAM: gather and scatter by them, as views of an array where that is possible."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Steps = tuple[tuple[int, int], ...]
"""An affine address: (extent, stride) of each loop, from the outermost."""


@lru_cache(maxsize=8192)
def spans(pattern: Steps, depth: int) -> tuple[tuple[tuple[int, ...], int, int], ...]:
    """Return the ways to read the strides of `pattern`, modulo `depth`, as signed numbers.

    Each way is (signed strides, lowest offset, highest offset), and spans less than `depth`. A stride of `depth - 1` is
    a step of -1; with two iterations it may as well be a step of `depth - 1`.
    """
    ways: list[tuple[tuple[int, ...], int, int]] = [((), 0, 0)]
    for extent, stride in pattern:
        last, stride = extent - 1, stride % depth
        signed = (stride, stride - depth) if last and stride else (0,)
        ways = [
            ((*strides, step), low + min(step * last, 0), high + max(step * last, 0))
            for strides, low, high in ways
            for step in signed
            if abs(step) * last < depth
        ]
    return tuple((strides, low, high) for strides, low, high in ways if high - low < depth)


@lru_cache(maxsize=8192)
def offsets(pattern: Steps, depth: int) -> NDArray[np.int64]:
    """Return the entry number of each iteration of `pattern` from base 0, modulo `depth`; shape is the extents.

    The array is cached and therefore read-only.
    """
    total = np.zeros(1, np.int64)
    for extent, stride in pattern:
        if extent > 1:
            total = (total[:, None] + np.arange(extent) * stride).ravel()
    total %= depth
    total.flags.writeable = False
    return total.reshape([extent for extent, _ in pattern])


@lru_cache(maxsize=8192)
def has_distinct_addresses(pattern: Steps, depth: int) -> bool:
    """Return whether no two iterations of `pattern` have equal addresses modulo `depth`."""
    reach = 1  # entries that the loops so far span; a loop with at least this stride visits none of them again
    for step, extent in sorted((min(s % depth, -s % depth), e) for e, s in pattern if e > 1):
        if step < reach:
            break
        reach += step * (extent - 1)
    else:
        if reach <= depth:
            return True
    count = prod(extent for extent, _ in pattern)
    return count <= depth and len(set(offsets(pattern, depth).ravel().tolist())) == count


@lru_cache(maxsize=8192)
def _last_visits(pattern: Steps, depth: int) -> tuple[list[int], list[int]]:
    """Return the entries that `pattern` visits from base 0, each once, and the number of the last iteration at each.

    A scatter writes the value of that iteration alone.
    """
    last = {entry: number for number, entry in enumerate(offsets(pattern, depth).ravel().tolist())}
    return list(last), list(last.values())


def view(array: Array, base: int, pattern: Steps) -> Array | None:
    """View entries of `array` [depth, ...] in the order of `pattern`; None if addresses wrap around."""
    depth = len(array)
    for low, high, shape, strides in _layouts(pattern, array.shape, array.strides):
        if base + low >= 0 and base + high < depth:
            return np.ndarray(shape, array.dtype, array, base * array.strides[0], strides)
    return None


@lru_cache(maxsize=8192)
def _layouts(
    pattern: Steps, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]:
    """Return (lowest offset, highest offset, shape, strides) of the view for each of the `spans` of `pattern`.

    shape, strides: those of the array to view, strides in bytes.
    """
    extents = tuple(extent for extent, _ in pattern)
    return tuple(
        (low, high, (*extents, *shape[1:]), (*(step * strides[0] for step in signed), *strides[1:]))
        for signed, low, high in spans(pattern, shape[0])
    )


def gather(array: Array, base: int, pattern: Steps) -> Array:
    """Return entries of `array` in the order of `pattern`, as a view where no address wraps around."""
    picked = view(array, base % len(array), pattern)
    return array[(offsets(pattern, len(array)) + base) % len(array)] if picked is None else picked


def scatter(array: Array, base: int, pattern: Steps, values: Array, add: bool = False) -> None:
    """Write `values` to entries of `array` in the order of `pattern`, or add them.

    Where the pattern visits an entry several times, the last value stays, or all are added.
    """
    base %= len(array)
    if not has_distinct_addresses(pattern, len(array)):
        return _scatter_repeated(array, base, pattern, values, add)
    picked = view(array, base, pattern)
    if picked is not None:
        if add:
            np.add(picked, values, out=picked, casting="unsafe")
        else:
            picked[...] = values
    else:
        index = (offsets(pattern, len(array)) + base) % len(array)
        array[index] = array[index] + values if add else values


def _scatter_repeated(array: Array, base: int, pattern: Steps, values: Array, add: bool) -> None:
    """Do `scatter` for a pattern that visits entries several times, for which numpy's assignment has no order."""
    extents, entry = [extent for extent, _ in pattern], array.shape[1:]
    values = np.broadcast_to(values, (*extents, *entry)).reshape(-1, *entry)
    if add:
        np.add.at(array, (offsets(pattern, len(array)).ravel() + base) % len(array), values)
    else:
        entries, numbers = _last_visits(pattern, len(array))
        array[(np.array(entries) + base) % len(array)] = values[numbers]


def squeeze_broadcast_loops(pattern: Steps, depth: int) -> Steps:
    """Return `pattern` with extent 1 for loops that do not move the address, so that gathered arrays broadcast.

    This saves gathering parameters once for each pixel.
    """
    return tuple((extent, stride) if stride % depth else (1, 0) for extent, stride in pattern)
