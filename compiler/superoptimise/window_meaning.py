"""Meaning of averages and of MaxPool of MaxPool, for proofs.

An average is a function of its window's pixels, of the place of each in that part of the window which lies inside of
the image, and of the number of counted pixels; nothing is assumed about the order in which its floats are added. As in
float_meaning.py, `MaxOver` stands for an arbitrary function of a set. Needs z3.
"""

from __future__ import annotations

from collections.abc import Sequence

import z3

from celosia.compiler.superoptimise.elements import (
    Element,
    ElementAt,
    Index,
    MaxOver,
    Number,
    Read,
    SumOver,
    Uninterpreted,
    minus,
)
from celosia.compiler.superoptimise.meaning import MEANINGS, fresh
from celosia.compiler.superoptimise.operators import Attributes, Shape


def _average_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the average as a function of the set of its pixels and of their number. Without the attribute `counted`,
    as by products, the whole kernel counts.
    """
    starts = [index[2 + axis] * attributes["strides"][axis] - attributes["pads"][axis] for axis in (0, 1)]

    def guards(tap: Index) -> tuple[object, object]:
        """Return the conditions that a tap lies inside of the kernel, and that it lies inside of the image."""
        pixel = [start + offset for start, offset in zip(starts, tap)]
        in_kernel = z3.And(*(z3.And(offset >= 0, offset < size) for offset, size in zip(tap, attributes["kernel"])))
        in_image = z3.And(*(z3.And(position >= 0, position < size) for position, size in zip(pixel, shapes[0][2:])))
        return in_kernel, in_image

    tap, counted_tap = ((fresh("i"), fresh("j")) for _ in range(2))
    first_in_image = [z3.If(start < 0, -start, 0) for start in starts]
    place = Read("place in a window", tuple(offset - first for offset, first in zip(tap, first_in_image)))
    value = minus(args[0]((*index[:2], *(start + offset for start, offset in zip(starts, tap)))), args[1](()))
    pixels = MaxOver(tap, z3.And(*guards(tap)), Uninterpreted("pixel of a window", (place, value)))
    kernel, image = guards(counted_tap)
    count = SumOver(counted_tap, kernel if attributes.get("counted", True) else z3.And(kernel, image), Number(1))
    return Uninterpreted(f"average {attributes['f']}", (pixels, count))


def _max_pool_again_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the maximum of maxima as one maximum over both windows: each inner window has an element, so that no
    maximum is of nothing.
    """
    outer = MEANINGS["largest"](args, shapes, attributes, index)
    assert isinstance(outer, MaxOver)
    body = outer.body
    if not isinstance(body, MaxOver):
        return outer
    return MaxOver((*outer.variables, *body.variables), z3.And(outer.guard, body.guard), body.body)


MEANINGS |= {
    "average": _average_element,
    "average_by_products": _average_element,
    "largest_again": _max_pool_again_element,
}
