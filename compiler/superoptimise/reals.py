"""Operators of terms that compute with real numbers: what floats are where rounding is left out of account (fast-math).

    real_convolve(x, w[, b])     [n, o, h, w]: a convolution, and b; what float_convolve is in real numbers
    real_multiply(x, w)          [..., o]: the product of the last axis of x and the first of w; float_multiply
    real_plus(a, b), real_minus(a, b)    of two tensors of one shape
    real_scale(x, m), real_shift(x, b)   x times m, and x plus b, which have a number for each place of `axis`
    real_pad(x)                  with zeros around it
    real_average(x)              of each window; padding is left out, or `counted` as zeros
    real_filled(x)               `value` everywhere, as large as x
    real_diagonal(w, m)          weights [o, o, kh, kw], and m[i] more where outputs and inputs are i, at the tap `at`
    real_carried(b, w)           [o]: what a convolution with weights w makes of images that are b[c] everywhere
    real_normalised(x, s, b, mean, var, epsilon)    BatchNormalization
    real_deviation(s, var, epsilon)                 s over the root of var + epsilon

Rules name float_convolve and float_multiply, as graphs do; `in_reals` puts these in their places, for proofs and
trials. Constants are computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import celosia.compiler.superoptimise.floats  # noqa: F401  the operators on floats
from celosia.compiler.superoptimise.legal import DEMANDS
from celosia.compiler.superoptimise.operators import (
    OPERATORS,
    Array,
    Attributes,
    Shape,
    TermOperator,
    window_shape,
)
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term

IN_REALS = {"float_convolve": "real_convolve", "float_multiply": "real_multiply"}


def in_reals(rule: RewriteRule) -> RewriteRule:
    """`rule` of operators on real numbers, where it has those on floats."""
    before, after = (tuple(map(_of_reals, side)) for side in (rule.before, rule.after))
    return replace(rule, before=before, after=after)


def _of_reals(term: Term) -> Term:
    if isinstance(term, Leaf):
        return term
    return Composed(IN_REALS.get(term.op, term.op), tuple(map(_of_reals, term.args)), term.attributes)


# In numpy ------------------------------------------------------------------------------------------------------------


def _computed(args: Sequence[Array], found: Array) -> Array:
    """Round to float32 where the first operand is one; integers of trials stay float64, which is exact. ValueError
    for a constant that float32 does not hold."""
    if args[0].dtype != np.float32:
        return found
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = found.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError("a constant would not be finite in float32")
    return rounded


def _windowed(x: Array, kernel: Sequence[int], given: Attributes) -> Array:
    """[n, c, h, w, kh, kw] of x [n, c, h, w], with zeros around it."""
    top, left, bottom, right = given["pads"]
    rows, columns = window_shape(x.shape, tuple(kernel), given)
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    reach = [rate * (size - 1) + 1 for rate, size in zip(given["dilations"], kernel)]
    every = np.lib.stride_tricks.sliding_window_view(padded, reach, (2, 3))
    (down, across), (dh, dw) = given["strides"], given["dilations"]
    return every[:, :, ::down, ::across, ::dh, ::dw][:, :, :rows, :columns]


def _convolve(args: Sequence[Array], given: Attributes) -> Array:
    """Convolve in one group, as rules do."""
    x, w, *b = (arg.astype(np.float64) for arg in args)
    sums = np.einsum("nchwij,ocij->nohw", _windowed(x, w.shape[2:], given), w, optimize=True)
    return _computed(args, sums + b[0][:, None, None] if b else sums)


def _multiply(args: Sequence[Array], given: Attributes) -> Array:
    return _computed(args, args[0].astype(np.float64) @ args[1].astype(np.float64))


def _along(args: Sequence[Array], given: Attributes) -> tuple[Array, Array]:
    shape = [1] * args[0].ndim
    shape[given["axis"]] = -1
    return args[0].astype(np.float64), args[1].astype(np.float64).reshape(shape)


def _scale(args: Sequence[Array], given: Attributes) -> Array:
    x, m = _along(args, given)
    return _computed(args, x * m)


def _shift(args: Sequence[Array], given: Attributes) -> Array:
    x, b = _along(args, given)
    return _computed(args, x + b)


def _pad(args: Sequence[Array], given: Attributes) -> Array:
    pads, rank = given["pads"], args[0].ndim
    return np.pad(args[0], [(pads[i], pads[rank + i]) for i in range(rank)])


def _average(args: Sequence[Array], given: Attributes) -> Array:
    x = args[0].astype(np.float64)
    sums = _windowed(x, given["kernel"], given).sum((4, 5))
    counts = _windowed(np.ones_like(x), given["kernel"], given).sum((4, 5))
    return _computed(args, sums / (np.prod(given["kernel"]) if given["counted"] else counts))


def _filled(args: Sequence[Array], given: Attributes) -> Array:
    return _computed(args, np.full(args[0].shape, given["value"], np.float64))


def _diagonal(args: Sequence[Array], given: Attributes) -> Array:
    found, (i, j) = args[0].astype(np.float64), given["at"]
    each = np.arange(len(found))
    found[each, each, i, j] += args[1]
    return _computed(args, found)


def _carried(args: Sequence[Array], given: Attributes) -> Array:
    b, w = (arg.astype(np.float64) for arg in args)
    return _computed(args, np.einsum("c,ocij->o", b, w))


def _deviation(args: Sequence[Array], given: Attributes) -> Array:
    s, var, epsilon = (arg.astype(np.float64) for arg in args)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _computed(args, s / np.sqrt(var + epsilon))


def _normalised(args: Sequence[Array], given: Attributes) -> Array:
    x, s, b, mean, var, epsilon = args
    factor = _deviation((s, var, epsilon), given).astype(np.float64)
    x, factor = _along((x, factor), {"axis": 1})
    _, offset = _along((x, b - mean * factor.reshape(-1)), {"axis": 1})
    return _computed(args, x * factor + offset)


# Of shapes -----------------------------------------------------------------------------------------------------------


def _first(shapes: Sequence[Shape], given: Attributes) -> Shape:
    return shapes[0]


def _convolved(shapes: Sequence[Shape], given: Attributes) -> Shape:
    return OPERATORS["float_convolve"].shape(shapes, given)


def _padded(shapes: Sequence[Shape], given: Attributes) -> Shape:
    return OPERATORS["pad"].shape(shapes, given)


def _averaged(shapes: Sequence[Shape], given: Attributes) -> Shape:
    return (*shapes[0][:2], *window_shape(shapes[0], given["kernel"], given))


def _alike(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield len(shapes[0]) == len(shapes[1])
    yield from (a == b for a, b in zip(*shapes))


def _by_axis(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield len(shapes[1]) == 1
    yield shapes[0][given["axis"]] == shapes[1][0]


def _pads(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield len(given["pads"]) == 2 * len(shapes[0])
    yield from (pad >= 0 for pad in given["pads"])


def _windows(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    yield len(shapes[0]) == 4
    yield from DEMANDS["largest"](shapes, given)


def _square(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    w, m = shapes
    yield len(w) == 4 and len(m) == 1
    yield from (w[0] == w[1], m[0] == w[0])
    for at, size in zip(given["at"], w[2:]):
        yield from (at >= 0, at < size)


def _bias(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    b, w = shapes
    yield len(b) == 1 and len(w) == 4
    yield b[0] == w[1]


def _channels(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    x, *rows, epsilon = shapes
    yield len(x) == 4 and not len(epsilon) and all(len(row) == 1 for row in rows)
    yield from (row[0] == x[1] for row in rows)


def _rows(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    s, var, epsilon = shapes
    yield len(s) == len(var) == 1 and not len(epsilon)
    yield s[0] == var[0]


OPERATORS |= {
    "real_convolve": TermOperator(_convolved, _convolve),
    "real_multiply": TermOperator(lambda shapes, given: (*shapes[0][:-1], shapes[1][1]), _multiply),
    "real_plus": TermOperator(
        _first, lambda args, given: _computed(args, args[0].astype(np.float64) + args[1].astype(np.float64))
    ),
    "real_minus": TermOperator(
        _first, lambda args, given: _computed(args, args[0].astype(np.float64) - args[1].astype(np.float64))
    ),
    "real_scale": TermOperator(_first, _scale),
    "real_shift": TermOperator(_first, _shift),
    "real_pad": TermOperator(_padded, _pad),
    "real_average": TermOperator(_averaged, _average),
    "real_filled": TermOperator(_first, _filled),
    "real_diagonal": TermOperator(_first, _diagonal),
    "real_carried": TermOperator(lambda shapes, given: (shapes[1][0],), _carried),
    "real_normalised": TermOperator(_first, _normalised),
    "real_deviation": TermOperator(_first, _deviation),
}
DEMANDS |= {
    "real_convolve": DEMANDS["float_convolve"],
    "real_multiply": DEMANDS["float_multiply"],
    "real_plus": _alike,
    "real_minus": _alike,
    "real_scale": _by_axis,
    "real_shift": _by_axis,
    "real_pad": _pads,
    "real_average": _windows,
    "real_filled": lambda shapes, given: iter(()),
    "real_diagonal": _square,
    "real_carried": _bias,
    "real_normalised": _channels,
    "real_deviation": _rows,
}
