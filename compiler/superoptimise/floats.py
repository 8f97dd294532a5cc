"""Operators of terms that compute in floats, where a sum depends on the order of its terms.

    float_convolve(x, w[, b])    floats [n, o, h, w]: a convolution, and b
    float_multiply(x, w)         floats [..., o]: the product of the last axis of x and the first of w

The runtime that executes a model adds in an order of its own. So these operators are not evaluated here, and proofs
know little of a sum: it is a function of its terms and of the place of each (float_meaning.py). No rule may split or
reorder a sum; computing more or fewer channels changes no bit of the others.

onnxruntime keeps that promise for convolutions with at least two outputs and more than one pixel: for one output, or
one pixel, it multiplies a matrix by a vector, which adds in another order. It keeps it with one thread only: with
several threads its order depends on how it shares the work, so that it differs from itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from celosia.compiler.superoptimise.operators import OPERATORS, Array, Attributes, Shape, TermOperator, window_shape
from celosia.compiler.superoptimise.shape_demands import DEMANDS


def _refuse_to_evaluate(args: Sequence[Array], attributes: Attributes) -> Array:
    """Raise ValueError, so that no constant is ever computed from float sums."""
    raise ValueError("floats are added up in the order of whoever runs the model, which is not known here")


def _convolve_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of a convolution: batch of x, outputs of w, and the rows and columns of its windows."""
    x, w = shapes[:2]
    return (x[0], w[0], *window_shape(x, w[2:], attributes))


def _convolve_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield the demands of `float_convolve` on ranks, channels, groups, padding and the size of the result."""
    x, w, *b = shapes
    yield len(x) == len(w) == 4 and all(len(bias) == 1 for bias in b)
    yield from (x[1] == w[1] * attributes["group"], w[0] % attributes["group"] == 0)
    yield from (bias[0] == w[0] for bias in b)
    yield from (pad >= 0 for pad in attributes["pads"])
    yield from (size >= 1 for size in window_shape(x, w[2:], attributes))


def _multiply_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that w is a matrix whose rows fit the last axis of x."""
    x, w = shapes
    yield len(w) == 2
    yield x[-1] == w[0]


OPERATORS["float_convolve"] = TermOperator(_convolve_shape, _refuse_to_evaluate)
OPERATORS["float_multiply"] = TermOperator(
    lambda shapes, attributes: (*shapes[0][:-1], shapes[1][1]), _refuse_to_evaluate
)
DEMANDS["float_convolve"] = _convolve_demands
DEMANDS["float_multiply"] = _multiply_demands
