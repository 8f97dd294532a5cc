"""An element of a float convolution or product, for proofs: a function of its terms, each with its place.

The terms of a sum are a set here, each labelled with the counters that it belongs to; `MaxOver` stands for a function
of such a set, of which nothing else is used. Two sums are equal where their sets are: then the same numbers are added
up, whatever the order is that whoever runs it takes for these places. Needs z3.
"""

from __future__ import annotations

from collections.abc import Sequence

import z3

from celosia.compiler.superoptimise.elements import Element, ElementAt, Index, MaxOver, Read, Uninterpreted
from celosia.compiler.superoptimise.meaning import MEANINGS, Unprovable, fresh
from celosia.compiler.superoptimise.operators import Attributes, Shape


def _sum(counters: Index, inside: object, *factors: Element) -> Element:
    term = Uninterpreted("float term", (Read("place of a float term", counters), *factors))
    return Uninterpreted("float sum", (MaxOver(counters, inside, term),))


def _convolve(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    x, w, *b = args
    n, o, row, column = at
    if given["group"] != 1:
        raise Unprovable("groups of floats")
    c, i, j = fresh("c"), fresh("i"), fresh("j")
    y = row * given["strides"][0] + i * given["dilations"][0] - given["pads"][0]
    z = column * given["strides"][1] + j * given["dilations"][1] - given["pads"][1]
    channels, *kernel = shapes[1][1:]
    bounds = ((c, channels), (i, kernel[0]), (j, kernel[1]), (y, shapes[0][2]), (z, shapes[0][3]))
    inside = z3.And(*(z3.And(each >= 0, each < size) for each, size in bounds))
    total = _sum((c, i, j), inside, x((n, c, y, z)), w((o, c, i, j)))
    return Uninterpreted("float plus", (total, b[0]((o,)))) if b else total


def _multiply(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    x, w = args
    k = fresh("k")
    return _sum((k,), z3.And(k >= 0, k < shapes[1][0]), x((*at[:-1], k)), w((k, at[-1])))


MEANINGS["float_convolve"] = _convolve
MEANINGS["float_multiply"] = _multiply
