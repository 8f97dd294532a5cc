"""Demands of operators on the shapes of their operands: ints where a graph is made, terms of z3 in proofs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celosia.compiler.superoptimise.operators import OPERATORS, Attributes, Shape

Demand = Callable[[Sequence[Shape], Attributes], Iterator[Any]]
"""Conditions, all of which must hold: bools, or terms of z3."""


def _convolve(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    x, xz, w, wz, b = shapes
    group = given["group"]
    yield len(x) == len(w) == 4 and len(xz) == 0 and len(wz) == len(b) == 1
    yield x[1] == w[1] * group
    yield w[0] % group == 0
    yield from (wz[0] == w[0], b[0] == w[0])
    yield from _windows(x, w[2:], given)


def _windows(x: Shape, kernel: Shape, given: Attributes) -> Iterator[Any]:
    yield from (pad >= 0 for pad in given["pads"])
    for size in OPERATORS["convolve"].shape([x, (), (1, 1, *kernel)], given)[2:]:
        yield size >= 1


def _multiply(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    x, xz, w, wz, b = shapes
    yield len(w) == 2 and len(xz) == 0 and len(wz) == len(b) == 1
    yield from (x[-1] == w[0], wz[0] == w[1], b[0] == w[1])


def _same(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    for other in shapes[1:]:
        yield len(other) == len(shapes[0])
        yield from (a == b for a, b in zip(shapes[0], other))


def _requantise(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield len(shapes[1]) == 1 and len(shapes[2]) == 0
    yield shapes[1][0] == shapes[0][given["axis"]]


def _largest(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    """A window has an element where pads are smaller than kernels and nothing is cut."""
    yield from _windows(shapes[0], given["kernel"], given)
    for place in (0, 1, 2, 3):
        yield given["pads"][place] < given["kernel"][place % 2]


def _concat(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    for other in shapes[1:]:
        yield len(other) == len(shapes[0])
        yield from (a == b for axis, (a, b) in enumerate(zip(shapes[0], other)) if axis != given["axis"])


def _slice(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield from (given["start"] >= 0, given["start"] < given["stop"], given["stop"] <= shapes[0][given["axis"]])


def _transpose(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield sorted(given["perm"]) == list(range(len(shapes[0])))


def _reshape(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield _product(shapes[0]) == _product(given["shape"])


def _product(shape: Shape) -> Any:
    found: Any = 1
    for size in shape:
        found = found * size
    return found


def _pad(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield len(given["pads"]) == 2 * len(shapes[0]) and len(shapes[1]) == 0
    yield from (pad >= 0 for pad in given["pads"])


def _phases(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield len(shapes[0]) == 4
    yield from (shapes[0][axis] % given["by"] == 0 for axis in (2, 3))


def _interleave(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield len(shapes[0]) == 4
    yield shapes[0][1] % (given["by"] * given["by"]) == 0


DEMANDS: dict[str, Demand] = {
    "convolve": _convolve,
    "multiply": _multiply,
    "plus": lambda shapes, given: _same(shapes, given) if len(shapes[1]) else iter(()),
    "requantise": _requantise,
    "map": _same,
    "largest": _largest,
    "concat": _concat,
    "slice": _slice,
    "transpose": _transpose,
    "reshape": _reshape,
    "pad": _pad,
    "phases": _phases,
    "interleave": _interleave,
    "spread": lambda shapes, given: iter([len(shapes[0]) == 0, *(size >= 1 for size in given["shape"])]),
}


def demands(op: str, shapes: Sequence[Shape], given: Attributes) -> list[Any]:
    """List the demands of `op` on its operands' shapes and its attributes; demands behind a False may be missing."""
    found: list[Any] = []
    try:
        for each in DEMANDS[op](shapes, given):
            found.append(each)
            if each is False:
                break
    except (IndexError, ZeroDivisionError):  # of shapes with fewer dimensions, and of no groups
        found.append(False)
    return found
