"""Operators of terms that compute in floats, where sums hang on their order.

    float_convolve(x, w[, b])    floats [n, o, h, w]: a convolution, and b
    float_multiply(x, w)         floats [..., o]: the product of the last axis of x and the first of w

Who runs a model adds up in an order of its own. So nothing is computed here, and what is known of a sum is little: it
is a function of its terms and of the place of each (float_meaning.py). No law that takes a sum apart, or orders it
anew, holds then; other channels of the result, more or fewer of them, change no bit.

onnxruntime keeps that where a convolution has two outputs at least and more than one pixel: for one output, or one
pixel, it takes a product of a matrix and a vector, which adds up in another order. That is with one thread: with
several, its order hangs on how products are shared out among them, so that it differs from itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from celosia.compiler.superoptimise.legal import DEMANDS
from celosia.compiler.superoptimise.operators import OPERATORS, Array, Attributes, Shape, TermOperator, window_shape


def _nowhere(args: Sequence[Array], given: Attributes) -> Array:
    raise ValueError("floats are added up in the order of whoever runs the model, which is not known here")


def _convolved(shapes: Sequence[Shape], given: Attributes) -> Shape:
    x, w = shapes[:2]
    return (x[0], w[0], *window_shape(x, w[2:], given))


def _convolve(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    x, w, *b = shapes
    yield len(x) == len(w) == 4 and all(len(each) == 1 for each in b)
    yield from (x[1] == w[1] * given["group"], w[0] % given["group"] == 0)
    yield from (each[0] == w[0] for each in b)
    yield from (pad >= 0 for pad in given["pads"])
    yield from (size >= 1 for size in window_shape(x, w[2:], given))


def _multiply(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    x, w = shapes
    yield len(w) == 2
    yield x[-1] == w[0]


OPERATORS["float_convolve"] = TermOperator(_convolved, _nowhere)
OPERATORS["float_multiply"] = TermOperator(lambda shapes, given: (*shapes[0][:-1], shapes[1][1]), _nowhere)
DEMANDS["float_convolve"] = _convolve
DEMANDS["float_multiply"] = _multiply
