"""An element of each operator's result as an expression, for proofs. Needs z3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import z3

from celosia.compiler.superoptimise.elements import (
    Element,
    ElementAt,
    Index,
    Ite,
    MaxOver,
    Plus,
    SumOver,
    Times,
    Uninterpreted,
    minus,
)
from celosia.compiler.superoptimise.operators import Attributes, Shape
from celosia.compiler.superoptimise.sizes import quotient

Meaning = Callable[[Sequence[ElementAt], Sequence[Shape], Attributes, Index], Element]
"""An element of a result: a function of operands, their shapes, attributes, and the index in the result."""
_FRESH = count()


class Unprovable(Exception):
    """A term that the prover has no meaning for; one sentence."""


def fresh(name: str) -> Any:
    """A whole number of which nothing is known."""
    return z3.Int(f"{name}!{next(_FRESH)}")


def _within(index: Any, low: Any, high: Any) -> Any:
    return z3.And(index >= low, index < high)


def _convolve(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    x, xz, w, wz, b = args
    n, o, row, column = at
    channels, kernel, groups = shapes[2][1], shapes[2][2:], given["group"]
    c, i, j = fresh("c"), fresh("i"), fresh("j")
    y = row * given["strides"][0] + i * given["dilations"][0] - given["pads"][0]
    z = column * given["strides"][1] + j * given["dilations"][1] - given["pads"][1]
    inside = z3.And(
        _within(c, 0, channels), _within(i, 0, kernel[0]), _within(j, 0, kernel[1]),
        _within(y, 0, shapes[0][2]), _within(z, 0, shapes[0][3]),
    )  # fmt: skip
    weight = minus(w((o, c, i, j)), wz((o,)))

    def of_group(g: int) -> Element:
        factor = minus(x((n, c + g * channels, y, z)), xz(()))
        return SumOver((c, i, j), inside, Times((factor, weight)))

    if not isinstance(groups, int):
        raise Unprovable("a number of groups that is no number")
    total, per_group = of_group(groups - 1), fresh("per_group")
    if groups > 1:
        outputs = shapes[2][0]
        per_group = outputs / groups  # z3's division of whole numbers
        for g in reversed(range(groups - 1)):
            total = Ite(o < (g + 1) * per_group, of_group(g), total)
    return Plus((total, b((o,))))


def _multiply(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    x, xz, w, wz, b = args
    k = fresh("k")
    body = Times((minus(x((*at[:-1], k)), xz(())), minus(w((k, at[-1])), wz((at[-1],)))))
    return Plus((SumOver((k,), _within(k, 0, shapes[2][0]), body), b((at[-1],))))


def _largest(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    (down, across), kernel = given["strides"], given["kernel"]
    if all(isinstance(size, int) and size == 1 for size in kernel):  # a window of one pixel, which is no padding
        return args[0]((*at[:2], at[2] * down, at[3] * across))
    i, j = fresh("i"), fresh("j")
    y = at[2] * down + i * given["dilations"][0] - given["pads"][0]
    z = at[3] * across + j * given["dilations"][1] - given["pads"][1]
    inside = z3.And(
        _within(i, 0, kernel[0]), _within(j, 0, kernel[1]),
        _within(y, 0, shapes[0][2]), _within(z, 0, shapes[0][3]),
    )  # fmt: skip
    return MaxOver((i, j), inside, args[0]((*at[:2], y, z)))


def _concat(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    axis = given["axis"]
    begins = [0]
    for shape in shapes[:-1]:
        begins.append(begins[-1] + shape[axis])

    def part(number: int) -> Element:
        return args[number]((*at[:axis], at[axis] - begins[number], *at[axis + 1 :]))

    found = part(len(args) - 1)
    for number in reversed(range(len(args) - 1)):
        found = Ite(at[axis] < begins[number + 1], part(number), found)
    return found


def _slice(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    axis = given["axis"]
    return args[0]((*at[:axis], at[axis] + given["start"], *at[axis + 1 :]))


def _transpose(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    perm = given["perm"]
    return args[0](tuple(at[perm.index(axis)] for axis in range(len(perm))))


def _pad(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    inner = tuple(index - before for index, before in zip(at, given["pads"]))
    inside = z3.And(*(_within(index, 0, size) for index, size in zip(inner, shapes[0])))
    return Ite(inside, args[0](inner), args[1](()))


def _reshape(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    """Places in rows of elements are functions of which only this is known: each is the other's inverse."""
    row = _row(at, given["shape"])
    return args[0](_places(row, shapes[0]))


def _row(at: Index, shape: Shape) -> Any:
    """The place in the row of all elements."""
    sizes = [z3.IntVal(size) if isinstance(size, int) else size for size in shape]
    places = [each for each in at if z3.is_app(each) and each.decl().name().startswith("place")]
    if len(places) == len(at) and places:
        first = places[0].children()
        alike = all(z3.eq(a, b) for each in places for a, b in zip(each.children(), first))
        in_order = [each.decl().name() for each in places] == [f"place {i}" for i in range(len(at))]
        if alike and in_order and len(first) == len(sizes) + 1 and all(map(z3.eq, first[1:], sizes)):
            return first[0]
    row = z3.Function("row", *[z3.IntSort()] * (2 * len(at) + 1))
    return row(*at, *sizes)


def _places(row: Any, shape: Shape) -> Index:
    """The index of the element at a place in the row of all elements."""
    sizes = [z3.IntVal(size) if isinstance(size, int) else size for size in shape]
    if row.decl().name() == "row":
        at, of = row.children()[: len(row.children()) // 2], row.children()[len(row.children()) // 2 :]
        if len(of) == len(sizes) and all(map(z3.eq, of, sizes)):
            return tuple(at)
    sorts = [z3.IntSort()] * (len(sizes) + 2)
    return tuple(z3.Function(f"place {i}", *sorts)(row, *sizes) for i in range(len(sizes)))


def _phases(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    by, channels = given["by"], shapes[0][1]
    n, channel, row, column = at

    def of_phase(number: int) -> Element:
        i, j = divmod(number, by)
        return args[0]((n, channel - number * channels, row * by + i, column * by + j))

    found = of_phase(by * by - 1)
    for number in reversed(range(by * by - 1)):
        found = Ite(channel < (number + 1) * channels, of_phase(number), found)
    return found


def _interleave(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    by = given["by"]
    n, channel, row, column = at
    channels = quotient(shapes[0][1], by * by)

    def of_phase(number: int) -> Element:
        return args[0]((n, channel + number * channels, row / by, column / by))  # z3's division of whole numbers

    found = of_phase(by * by - 1)
    for number in reversed(range(by * by - 1)):
        i, j = divmod(number, by)
        found = Ite(z3.And(row % by == i, column % by == j), of_phase(number), found)
    return found


MEANINGS: dict[str, Meaning] = {
    "convolve": _convolve,
    "multiply": _multiply,
    "plus": lambda args, shapes, given, at: Plus((args[0](at), args[1](at if len(shapes[1]) else ()))),
    "requantise": lambda args, shapes, given, at: Uninterpreted(
        "requantise", (args[0](at), args[1]((at[given["axis"]],)), args[2](()))
    ),
    "map": lambda args, shapes, given, at: Uninterpreted(f"map {given['f']}", tuple(arg(at) for arg in args)),
    "largest": _largest,
    "concat": _concat,
    "slice": _slice,
    "transpose": _transpose,
    "pad": _pad,
    "phases": _phases,
    "interleave": _interleave,
    "spread": lambda args, shapes, given, at: args[0](()),
    "reshape": _reshape,
}
