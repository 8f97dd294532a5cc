"""An element of an average, for proofs; and that the largest of largest values is the largest of them all.

An average is a function of its window's pixels, of the place of each in what the window has of the image, and of how
many are counted: floats are added up in an order, of which nothing else is assumed. As in float_meaning.py, `MaxOver`
stands for a function of a set. Needs z3.
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


def _average(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    """`counted`: whether padding counts. Products count the whole kernel."""
    starts = [at[2 + axis] * given["strides"][axis] - given["pads"][axis] for axis in (0, 1)]

    def guards(places: Index) -> tuple[object, object]:
        pixel = [start + place for start, place in zip(starts, places)]
        kernel = z3.And(*(z3.And(place >= 0, place < size) for place, size in zip(places, given["kernel"])))
        return kernel, z3.And(*(z3.And(each >= 0, each < size) for each, size in zip(pixel, shapes[0][2:])))

    at_pixel, counted = ((fresh("i"), fresh("j")) for _ in range(2))
    first = [z3.If(start < 0, -start, 0) for start in starts]
    place = Read("place in a window", tuple(each - begin for each, begin in zip(at_pixel, first)))
    value = minus(args[0]((*at[:2], *(start + each for start, each in zip(starts, at_pixel)))), args[1](()))
    pixels = MaxOver(at_pixel, z3.And(*guards(at_pixel)), Uninterpreted("pixel of a window", (place, value)))
    kernel, image = guards(counted)
    count = SumOver(counted, kernel if given.get("counted", True) else z3.And(kernel, image), Number(1))
    return Uninterpreted(f"average {given['f']}", (pixels, count))


def _largest_again(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    """A window has an element, so that the largest of all is among the largest of each."""
    outer = MEANINGS["largest"](args, shapes, given, at)
    assert isinstance(outer, MaxOver)
    inner = outer.body
    if not isinstance(inner, MaxOver):
        return outer
    return MaxOver((*outer.variables, *inner.variables), z3.And(outer.guard, inner.guard), inner.body)


MEANINGS |= {"average": _average, "average_by_products": _average, "largest_again": _largest_again}
