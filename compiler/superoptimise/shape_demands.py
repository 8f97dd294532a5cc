"""Demands of operators on the shapes of their operands: what must hold so that a term has a meaning.

Where a rule is applied to a graph, shapes are ints and demands are bools (matching.py); in proofs both are terms of z3,
and the demands of `before` must imply those of `after` (prover.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celosia.compiler.superoptimise.operators import OPERATORS, Attributes, Shape

Demand = Callable[[Sequence[Shape], Attributes], Iterator[Any]]
"""A function that yields conditions on shapes and attributes, all of which must hold: bools, or terms of z3."""


def _convolve_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield the demands of `convolve`: ranks, channels that fit the groups, a zero point and a bias for each output."""
    x, xz, w, wz, b = shapes
    group = attributes["group"]
    yield len(x) == len(w) == 4 and len(xz) == 0 and len(wz) == len(b) == 1
    yield x[1] == w[1] * group
    yield w[0] % group == 0
    yield from (wz[0] == w[0], b[0] == w[0])
    yield from _window_demands(x, w[2:], attributes)


def _window_demands(x: Shape, kernel: Shape, attributes: Attributes) -> Iterator[Any]:
    """Yield the demands of all windows on images: no negative padding, and at least one row and column of results."""
    yield from (pad >= 0 for pad in attributes["pads"])
    for size in OPERATORS["convolve"].shape([x, (), (1, 1, *kernel)], attributes)[2:]:
        yield size >= 1


def _multiply_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield the demands of `multiply`: the inner sizes are equal, and each column has a zero point and a bias."""
    x, xz, w, wz, b = shapes
    yield len(w) == 2 and len(xz) == 0 and len(wz) == len(b) == 1
    yield from (x[-1] == w[0], wz[0] == w[1], b[0] == w[1])


def _equal_shape_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that all operands have the shape of the first."""
    for other in shapes[1:]:
        yield len(other) == len(shapes[0])
        yield from (a == b for a, b in zip(shapes[0], other))


def _requantise_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that there is one multiplier for each position of `axis`, and a scalar zero point."""
    yield len(shapes[1]) == 1 and len(shapes[2]) == 0
    yield shapes[1][0] == shapes[0][attributes["axis"]]


def _max_pool_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield the demands of `largest`. Pads smaller than the kernel ensure that each window has an element of the
    image.
    """
    yield from _window_demands(shapes[0], attributes["kernel"], attributes)
    for place in (0, 1, 2, 3):
        yield attributes["pads"][place] < attributes["kernel"][place % 2]


def _concat_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that all operands have equal sizes but for `axis`."""
    for other in shapes[1:]:
        yield len(other) == len(shapes[0])
        yield from (a == b for axis, (a, b) in enumerate(zip(shapes[0], other)) if axis != attributes["axis"])


def _slice_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that `start` to `stop` is a range of at least one position inside of `axis`."""
    yield from (
        attributes["start"] >= 0,
        attributes["start"] < attributes["stop"],
        attributes["stop"] <= shapes[0][attributes["axis"]],
    )


def _transpose_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that `perm` is a permutation of the axes."""
    yield sorted(attributes["perm"]) == list(range(len(shapes[0])))


def _reshape_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that both shapes have the same number of elements."""
    yield _product(shapes[0]) == _product(attributes["shape"])


def _product(shape: Shape) -> Any:
    """Return the number of elements of a shape."""
    total: Any = 1
    for size in shape:
        total = total * size
    return total


def _pad_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that there are two pads for each axis, none of them negative, and a scalar value."""
    yield len(attributes["pads"]) == 2 * len(shapes[0]) and len(shapes[1]) == 0
    yield from (pad >= 0 for pad in attributes["pads"])


def _phases_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that rows and columns are multiples of `by`."""
    yield len(shapes[0]) == 4
    yield from (shapes[0][axis] % attributes["by"] == 0 for axis in (2, 3))


def _interleave_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that channels are a multiple of `by` * `by`."""
    yield len(shapes[0]) == 4
    yield shapes[0][1] % (attributes["by"] * attributes["by"]) == 0


DEMANDS: dict[str, Demand] = {
    "convolve": _convolve_demands,
    "multiply": _multiply_demands,
    "plus": lambda shapes, attributes: _equal_shape_demands(shapes, attributes) if len(shapes[1]) else iter(()),
    "requantise": _requantise_demands,
    "map": _equal_shape_demands,
    "largest": _max_pool_demands,
    "concat": _concat_demands,
    "slice": _slice_demands,
    "transpose": _transpose_demands,
    "reshape": _reshape_demands,
    "pad": _pad_demands,
    "phases": _phases_demands,
    "interleave": _interleave_demands,
    "spread": lambda shapes, attributes: iter([len(shapes[0]) == 0, *(size >= 1 for size in attributes["shape"])]),
}
"""The demands of each operator by its name."""


def demands(op: str, shapes: Sequence[Shape], attributes: Attributes) -> list[Any]:
    """List the demands of the operator `op` on the shapes of its operands and on its attributes. The list ends after a
    demand that is False, as later ones may rely on it.
    """
    conditions: list[Any] = []
    try:
        for condition in DEMANDS[op](shapes, attributes):
            conditions.append(condition)
            if condition is False:
                break
    except (IndexError, ZeroDivisionError):  # a shape with too few dimensions, or 0 groups
        conditions.append(False)
    return conditions
