"""Meaning of float convolutions and products, for proofs: a function of the terms of the sum, each with its place.

A sum is represented as a set of terms, each labelled with the values of its counters. `MaxOver` stands for an arbitrary
function of such a set; the proof uses nothing else about it. Two sums are equal where their sets are equal: then the
same numbers are added, in whatever order a runtime chooses for these places. Needs z3.
"""

from __future__ import annotations

from collections.abc import Sequence

import z3

from celosia.compiler.superoptimise.elements import Element, ElementAt, Index, MaxOver, Read, Uninterpreted
from celosia.compiler.superoptimise.meaning import MEANINGS, Unprovable, fresh
from celosia.compiler.superoptimise.operators import Attributes, Shape


def _float_sum(counters: Index, inside: object, *factors: Element) -> Element:
    """Return the sum of the product of `factors` over the counters for which `inside` holds, as a function of the set
    of labelled terms.
    """
    term = Uninterpreted("float term", (Read("place of a float term", counters), *factors))
    return Uninterpreted("float sum", (MaxOver(counters, inside, term),))


def _convolve_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the float sum over channels and taps inside of the image, and the bias added to it. One group only."""
    x, w, *b = args
    n, o, row, column = index
    if attributes["group"] != 1:
        raise Unprovable("groups of floats")
    c, i, j = fresh("c"), fresh("i"), fresh("j")
    y = row * attributes["strides"][0] + i * attributes["dilations"][0] - attributes["pads"][0]
    z = column * attributes["strides"][1] + j * attributes["dilations"][1] - attributes["pads"][1]
    channels, *kernel = shapes[1][1:]
    bounds = ((c, channels), (i, kernel[0]), (j, kernel[1]), (y, shapes[0][2]), (z, shapes[0][3]))
    inside = z3.And(*(z3.And(position >= 0, position < size) for position, size in bounds))
    total = _float_sum((c, i, j), inside, x((n, c, y, z)), w((o, c, i, j)))
    return Uninterpreted("float plus", (total, b[0]((o,)))) if b else total


def _multiply_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the float sum over the inner axis."""
    x, w = args
    k = fresh("k")
    return _float_sum((k,), z3.And(k >= 0, k < shapes[1][0]), x((*index[:-1], k)), w((k, index[-1])))


MEANINGS["float_convolve"] = _convolve_element
MEANINGS["float_multiply"] = _multiply_element
