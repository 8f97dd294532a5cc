"""Meaning of each operator, for proofs: an element of its result as an expression (elements.py). Needs z3.

These definitions repeat those in operators.py element by element; tests compare the two. window_meaning.py,
float_meaning.py and real_meaning.py add those of further operators to MEANINGS.
"""

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
"""A function that returns an element of a result, from its operands, their shapes, the attributes, and the index in the
result.
"""
_FRESH = count()
"""Numbers the variables that `fresh` returns."""


class Unprovable(Exception):
    """Raised for a term whose meaning the prover does not know. The message is one sentence."""


def fresh(name: str) -> Any:
    """Return a new integer variable of z3, such as the counter of a sum."""
    return z3.Int(f"{name}!{next(_FRESH)}")


def _is_between(index: Any, low: Any, high: Any) -> Any:
    """Return the condition low <= index < high."""
    return z3.And(index >= low, index < high)


def _convolve_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the sum over channels and taps that lie inside of the image, plus the bias; with a case for each group."""
    x, xz, w, wz, b = args
    n, o, row, column = index
    channels, kernel, groups = shapes[2][1], shapes[2][2:], attributes["group"]
    c, i, j = fresh("c"), fresh("i"), fresh("j")
    y = row * attributes["strides"][0] + i * attributes["dilations"][0] - attributes["pads"][0]
    z = column * attributes["strides"][1] + j * attributes["dilations"][1] - attributes["pads"][1]
    inside = z3.And(
        _is_between(c, 0, channels), _is_between(i, 0, kernel[0]), _is_between(j, 0, kernel[1]),
        _is_between(y, 0, shapes[0][2]), _is_between(z, 0, shapes[0][3]),
    )  # fmt: skip
    weight = minus(w((o, c, i, j)), wz((o,)))

    def sum_of_group(g: int) -> Element:
        factor = minus(x((n, c + g * channels, y, z)), xz(()))
        return SumOver((c, i, j), inside, Times((factor, weight)))

    if not isinstance(groups, int):
        raise Unprovable("a number of groups that is no number")
    total, per_group = sum_of_group(groups - 1), fresh("per_group")
    if groups > 1:
        outputs = shapes[2][0]
        per_group = outputs / groups  # z3's integer division
        for g in reversed(range(groups - 1)):
            total = Ite(o < (g + 1) * per_group, sum_of_group(g), total)
    return Plus((total, b((o,))))


def _multiply_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the sum over the inner axis, plus the bias."""
    x, xz, w, wz, b = args
    k = fresh("k")
    body = Times((minus(x((*index[:-1], k)), xz(())), minus(w((k, index[-1])), wz((index[-1],)))))
    return Plus((SumOver((k,), _is_between(k, 0, shapes[2][0]), body), b((index[-1],))))


def _max_pool_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the maximum over those pixels of the window that lie inside of the image."""
    (down, across), kernel = attributes["strides"], attributes["kernel"]
    if all(isinstance(size, int) and size == 1 for size in kernel):  # a window of one pixel lies inside of the image
        return args[0]((*index[:2], index[2] * down, index[3] * across))
    i, j = fresh("i"), fresh("j")
    y = index[2] * down + i * attributes["dilations"][0] - attributes["pads"][0]
    z = index[3] * across + j * attributes["dilations"][1] - attributes["pads"][1]
    inside = z3.And(
        _is_between(i, 0, kernel[0]), _is_between(j, 0, kernel[1]),
        _is_between(y, 0, shapes[0][2]), _is_between(z, 0, shapes[0][3]),
    )  # fmt: skip
    return MaxOver((i, j), inside, args[0]((*index[:2], y, z)))


def _concat_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the element of the operand in which the index lies, with a case for each operand."""
    axis = attributes["axis"]
    begins = [0]
    for shape in shapes[:-1]:
        begins.append(begins[-1] + shape[axis])

    def operand_element(number: int) -> Element:
        return args[number]((*index[:axis], index[axis] - begins[number], *index[axis + 1 :]))

    element = operand_element(len(args) - 1)
    for number in reversed(range(len(args) - 1)):
        element = Ite(index[axis] < begins[number + 1], operand_element(number), element)
    return element


def _slice_element(args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index) -> Element:
    """Return the operand's element at the index moved by `start`."""
    axis = attributes["axis"]
    return args[0]((*index[:axis], index[axis] + attributes["start"], *index[axis + 1 :]))


def _transpose_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the operand's element at the permuted index."""
    perm = attributes["perm"]
    return args[0](tuple(index[perm.index(axis)] for axis in range(len(perm))))


def _pad_element(args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index) -> Element:
    """Return the operand's element, or the padding value where the index lies outside of it."""
    source = tuple(position - before for position, before in zip(index, attributes["pads"]))
    inside = z3.And(*(_is_between(position, 0, size) for position, size in zip(source, shapes[0])))
    return Ite(inside, args[0](source), args[1](()))


def _reshape_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the element with the same flat index in the operand. Flattening and unflattening an index are
    uninterpreted functions; the proof knows only that they are inverse to each other for one shape.
    """
    flat = _flat_index(index, attributes["shape"])
    return args[0](_unflatten(flat, shapes[0]))


def _flat_index(index: Index, shape: Shape) -> Any:
    """Return the row-major flat index of the element at `index` as an uninterpreted function of the index and the
    shape. An index that `_unflatten` made of a flat index for the same shape gives that flat index back.
    """
    sizes = [z3.IntVal(size) if isinstance(size, int) else size for size in shape]
    places = [position for position in index if z3.is_app(position) and position.decl().name().startswith("place")]
    if len(places) == len(index) and places:  # the index may come from _unflatten with the same shape
        first_arguments = places[0].children()
        have_equal_arguments = all(z3.eq(a, b) for place in places for a, b in zip(place.children(), first_arguments))
        in_order = [place.decl().name() for place in places] == [f"place {i}" for i in range(len(index))]
        is_same_shape = len(first_arguments) == len(sizes) + 1 and all(map(z3.eq, first_arguments[1:], sizes))
        if have_equal_arguments and in_order and is_same_shape:
            return first_arguments[0]
    row = z3.Function("row", *[z3.IntSort()] * (2 * len(index) + 1))
    return row(*index, *sizes)


def _unflatten(flat: Any, shape: Shape) -> Index:
    """Return the index with the row-major flat index `flat`, as one uninterpreted function for each axis. A flat index
    that `_flat_index` made of an index for the same shape gives that index back.
    """
    sizes = [z3.IntVal(size) if isinstance(size, int) else size for size in shape]
    if flat.decl().name() == "row":  # it comes from _flat_index; its arguments are an index and the sizes of a shape
        rank = len(flat.children()) // 2
        index, flattened_sizes = flat.children()[:rank], flat.children()[rank:]
        if len(flattened_sizes) == len(sizes) and all(map(z3.eq, flattened_sizes, sizes)):
            return tuple(index)
    sorts = [z3.IntSort()] * (len(sizes) + 2)
    return tuple(z3.Function(f"place {i}", *sorts)(flat, *sizes) for i in range(len(sizes)))


def _phases_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the element of SpaceToDepth, with a case for each phase of rows and columns."""
    by, channels = attributes["by"], shapes[0][1]
    n, channel, row, column = index

    def phase_element(number: int) -> Element:
        i, j = divmod(number, by)
        return args[0]((n, channel - number * channels, row * by + i, column * by + j))

    element = phase_element(by * by - 1)
    for number in reversed(range(by * by - 1)):
        element = Ite(channel < (number + 1) * channels, phase_element(number), element)
    return element


def _interleave_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the element of DepthToSpace, with a case for each phase of rows and columns."""
    by = attributes["by"]
    n, channel, row, column = index
    channels = quotient(shapes[0][1], by * by)

    def phase_element(number: int) -> Element:
        return args[0]((n, channel + number * channels, row / by, column / by))  # / is z3's integer division

    element = phase_element(by * by - 1)
    for number in reversed(range(by * by - 1)):
        i, j = divmod(number, by)
        element = Ite(z3.And(row % by == i, column % by == j), phase_element(number), element)
    return element


MEANINGS: dict[str, Meaning] = {
    "convolve": _convolve_element,
    "multiply": _multiply_element,
    "plus": lambda args, shapes, attributes, index: Plus((args[0](index), args[1](index if len(shapes[1]) else ()))),
    "requantise": lambda args, shapes, attributes, index: Uninterpreted(
        "requantise", (args[0](index), args[1]((index[attributes["axis"]],)), args[2](()))
    ),
    "map": lambda args, shapes, attributes, index: Uninterpreted(
        f"map {attributes['f']}", tuple(arg(index) for arg in args)
    ),
    "largest": _max_pool_element,
    "concat": _concat_element,
    "slice": _slice_element,
    "transpose": _transpose_element,
    "pad": _pad_element,
    "phases": _phases_element,
    "interleave": _interleave_element,
    "spread": lambda args, shapes, attributes, index: args[0](()),
    "reshape": _reshape_element,
}
"""Meaning of each operator by its name."""
