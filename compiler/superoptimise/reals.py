"""Operators of terms that compute in real numbers, for fast-math: floats whose rounding is left out of account.

    real_convolve(x, w[, b])     [n, o, h, w]: a convolution, and b; float_convolve in real numbers
    real_multiply(x, w)          [..., o]: the product of the last axis of x and the first of w; float_multiply
    real_plus(a, b), real_minus(a, b)    sum and difference of two tensors of one shape
    real_scale(x, m), real_shift(x, b)   x times m, and x plus b, with one number for each position of `axis`
    real_pad(x)                  x padded with zeros
    real_average(x)              AveragePool; padding is left out, or counted as zeros where `counted`
    real_filled(x)               a tensor of the shape of x that is `value` everywhere
    real_diagonal(w, m)          weights w [o, o, kh, kw] with m[i] added at output i, input i and the tap `at`
    real_carried(b, w)           [o]: what a convolution with weights w makes of an image that is b[c] in each channel c
    real_normalised(x, s, b, mean, var, epsilon)    BatchNormalization
    real_deviation(s, var, epsilon)                 s / sqrt(var + epsilon), the scale of a BatchNormalization

Rules of fast-math name float_convolve and float_multiply, as graphs do; `in_reals` replaces these by real_convolve and
real_multiply for proofs and trials. Constants are computed in float64 and rounded to float32 once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import celosia.compiler.superoptimise.floats  # noqa: F401  adds the operators on floats
from celosia.compiler.superoptimise.operators import (
    OPERATORS,
    Array,
    Attributes,
    Shape,
    TermOperator,
    window_shape,
)
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.shape_demands import DEMANDS
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term

IN_REALS = {"float_convolve": "real_convolve", "float_multiply": "real_multiply"}
"""The operator on real numbers that stands for each operator on floats in proofs."""


def in_reals(rule: RewriteRule) -> RewriteRule:
    """Replace the operators on floats in `rule` by those on real numbers, for its proof."""
    before, after = (tuple(map(_term_in_reals, side)) for side in (rule.before, rule.after))
    return replace(rule, before=before, after=after)


def _term_in_reals(term: Term) -> Term:
    """Replace the operators on floats in `term` by those on real numbers."""
    if isinstance(term, Leaf):
        return term
    return Composed(IN_REALS.get(term.op, term.op), tuple(map(_term_in_reals, term.args)), term.attributes)


# Evaluation in numpy -------------------------------------------------------------------------------------------------


def _round_like_first(args: Sequence[Array], result: Array) -> Array:
    """Round `result` to float32 if the first operand is float32. Trials compute with integers, whose float64 results
    are exact and stay. ValueError for a constant that float32 cannot hold.
    """
    if args[0].dtype != np.float32:
        return result
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = result.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError("a constant would not be finite in float32")
    return rounded


def _view_windows(x: Array, kernel: Sequence[int], attributes: Attributes) -> Array:
    """View the windows of x [n, c, h, w], padded with zeros: [n, c, rows, columns, kernel rows, kernel columns]."""
    top, left, bottom, right = attributes["pads"]
    rows, columns = window_shape(x.shape, tuple(kernel), attributes)
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    reach = [rate * (size - 1) + 1 for rate, size in zip(attributes["dilations"], kernel)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, (2, 3))
    (down, across), (dh, dw) = attributes["strides"], attributes["dilations"]
    return windows[:, :, ::down, ::across, ::dh, ::dw][:, :, :rows, :columns]


def _convolve(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute a convolution of one group; rules have no others."""
    x, w, *b = (arg.astype(np.float64) for arg in args)
    sums = np.einsum("nchwij,ocij->nohw", _view_windows(x, w.shape[2:], attributes), w, optimize=True)
    return _round_like_first(args, sums + b[0][:, None, None] if b else sums)


def _multiply(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute a matrix product."""
    return _round_like_first(args, args[0].astype(np.float64) @ args[1].astype(np.float64))


def _broadcast_along_axis(args: Sequence[Array], attributes: Attributes) -> tuple[Array, Array]:
    """Return both operands in float64, the second one shaped to broadcast along `axis`."""
    shape = [1] * args[0].ndim
    shape[attributes["axis"]] = -1
    return args[0].astype(np.float64), args[1].astype(np.float64).reshape(shape)


def _scale(args: Sequence[Array], attributes: Attributes) -> Array:
    """Multiply each position of `axis` by its factor."""
    x, m = _broadcast_along_axis(args, attributes)
    return _round_like_first(args, x * m)


def _shift(args: Sequence[Array], attributes: Attributes) -> Array:
    """Add a number to each position of `axis`."""
    x, b = _broadcast_along_axis(args, attributes)
    return _round_like_first(args, x + b)


def _pad(args: Sequence[Array], attributes: Attributes) -> Array:
    """Pad with zeros."""
    pads, rank = attributes["pads"], args[0].ndim
    return np.pad(args[0], [(pads[i], pads[rank + i]) for i in range(rank)])


def _average(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute averages of windows; padding counts where `counted`."""
    x = args[0].astype(np.float64)
    sums = _view_windows(x, attributes["kernel"], attributes).sum((4, 5))
    counts = _view_windows(np.ones_like(x), attributes["kernel"], attributes).sum((4, 5))
    return _round_like_first(args, sums / (np.prod(attributes["kernel"]) if attributes["counted"] else counts))


def _filled(args: Sequence[Array], attributes: Attributes) -> Array:
    """Return a tensor of the shape of the operand that is `value` everywhere."""
    return _round_like_first(args, np.full(args[0].shape, attributes["value"], np.float64))


def _diagonal(args: Sequence[Array], attributes: Attributes) -> Array:
    """Add m[i] to the weight of output i and input i at the tap `at`, so that a convolution adds its own input."""
    weights, (i, j) = args[0].astype(np.float64), attributes["at"]
    channels = np.arange(len(weights))
    weights[channels, channels, i, j] += args[1]
    return _round_like_first(args, weights)


def _carried(args: Sequence[Array], attributes: Attributes) -> Array:
    """Sum bias times weights: what a convolution without padding makes of constant channels."""
    b, w = (arg.astype(np.float64) for arg in args)
    return _round_like_first(args, np.einsum("c,ocij->o", b, w))


def _deviation(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute s / sqrt(var + epsilon)."""
    s, var, epsilon = (arg.astype(np.float64) for arg in args)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _round_like_first(args, s / np.sqrt(var + epsilon))


def _normalised(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute BatchNormalization."""
    x, s, b, mean, var, epsilon = args
    factor = _deviation((s, var, epsilon), attributes).astype(np.float64)
    x, factor = _broadcast_along_axis((x, factor), {"axis": 1})
    _, offset = _broadcast_along_axis((x, b - mean * factor.reshape(-1)), {"axis": 1})
    return _round_like_first(args, x * factor + offset)


# Shapes of results, and demands on shapes of operands ----------------------------------------------------------------


def _first_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of an element-wise operator: that of its first operand."""
    return shapes[0]


def _convolve_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of a convolution, as of float_convolve."""
    return OPERATORS["float_convolve"].shape(shapes, attributes)


def _pad_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape after padding, as of `pad`."""
    return OPERATORS["pad"].shape(shapes, attributes)


def _average_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of a pooling: batch and channels of x, and the rows and columns of its windows."""
    return (*shapes[0][:2], *window_shape(shapes[0], attributes["kernel"], attributes))


def _equal_shape_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that both operands have the same shape."""
    yield len(shapes[0]) == len(shapes[1])
    yield from (a == b for a, b in zip(*shapes))


def _axis_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that the second operand has a number for each position of `axis`."""
    yield len(shapes[1]) == 1
    yield shapes[0][attributes["axis"]] == shapes[1][0]


def _pad_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that there are two pads for each axis, none of them negative."""
    yield len(attributes["pads"]) == 2 * len(shapes[0])
    yield from (pad >= 0 for pad in attributes["pads"])


def _window_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that the operand is an image and that each window has a pixel."""
    yield len(shapes[0]) == 4
    yield from DEMANDS["largest"](shapes, attributes)


def _diagonal_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that there are as many outputs as inputs and numbers, and that the tap exists."""
    w, m = shapes
    yield len(w) == 4 and len(m) == 1
    yield from (w[0] == w[1], m[0] == w[0])
    for at, size in zip(attributes["at"], w[2:]):
        yield from (at >= 0, at < size)


def _carried_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that there is a bias for each input channel of the weights."""
    b, w = shapes
    yield len(b) == 1 and len(w) == 4
    yield b[0] == w[1]


def _normalised_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that each parameter has a number for each channel of the image."""
    x, *rows, epsilon = shapes
    yield len(x) == 4 and not len(epsilon) and all(len(row) == 1 for row in rows)
    yield from (row[0] == x[1] for row in rows)


def _deviation_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that there is a variance for each scale."""
    s, var, epsilon = shapes
    yield len(s) == len(var) == 1 and not len(epsilon)
    yield s[0] == var[0]


OPERATORS |= {
    "real_convolve": TermOperator(_convolve_shape, _convolve),
    "real_multiply": TermOperator(lambda shapes, attributes: (*shapes[0][:-1], shapes[1][1]), _multiply),
    "real_plus": TermOperator(
        _first_shape,
        lambda args, attributes: _round_like_first(args, args[0].astype(np.float64) + args[1].astype(np.float64)),
    ),
    "real_minus": TermOperator(
        _first_shape,
        lambda args, attributes: _round_like_first(args, args[0].astype(np.float64) - args[1].astype(np.float64)),
    ),
    "real_scale": TermOperator(_first_shape, _scale),
    "real_shift": TermOperator(_first_shape, _shift),
    "real_pad": TermOperator(_pad_shape, _pad),
    "real_average": TermOperator(_average_shape, _average),
    "real_filled": TermOperator(_first_shape, _filled),
    "real_diagonal": TermOperator(_first_shape, _diagonal),
    "real_carried": TermOperator(lambda shapes, attributes: (shapes[1][0],), _carried),
    "real_normalised": TermOperator(_first_shape, _normalised),
    "real_deviation": TermOperator(_first_shape, _deviation),
}
DEMANDS |= {
    "real_convolve": DEMANDS["float_convolve"],
    "real_multiply": DEMANDS["float_multiply"],
    "real_plus": _equal_shape_demands,
    "real_minus": _equal_shape_demands,
    "real_scale": _axis_demands,
    "real_shift": _axis_demands,
    "real_pad": _pad_demands,
    "real_average": _window_demands,
    "real_filled": lambda shapes, attributes: iter(()),
    "real_diagonal": _diagonal_demands,
    "real_carried": _carried_demands,
    "real_normalised": _normalised_demands,
    "real_deviation": _deviation_demands,
}
