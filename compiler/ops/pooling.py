"""Max and average pooling."""

from __future__ import annotations

import functools
from math import prod

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import Axis, Expr, Tensor, is_float, select, wrap
from celosia.compiler.expr.nest_parts import reduction_identity
from celosia.compiler.ops.reductions import reduced
from celosia.compiler.ops.registry import Node, op
from celosia.compiler.ops.shape import padded
from celosia.compiler.ops.window import SlidingWindow
from celosia.compiler.program.op_spec import Kind, Moves


def maxima(window: SlidingWindow, y: Tensor) -> Tensor:
    """Replace maxima `y` [N, C, windows...] of windows without elements by the smallest finite number.

    onnxruntime gives that number there, and -inf where all elements of a window are -inf.
    """
    empty = [(2 + d, o) for d in range(len(window.size)) for o in window.empty_windows(d)]
    if not empty or not is_float(y.dtype):
        return y
    least = wrap(float(np.finfo(y.dtype).min), y.dtype)

    def body(*i: Expr) -> Expr:
        is_empty = functools.reduce(lambda p, q: p | q, (T.equal(i[axis], o) for axis, o in empty))
        return select(is_empty, least, y[i])

    return T.compute(y.shape, body, "max_pool")


@op("MaxPool", kind=Kind.COMPLEX, moves=Moves.FILL, heavy=True, windows=True, operands="x")
def max_pool(node: Node) -> Tensor:
    """Build MaxPool, with any number of axes and dilation. Raises Unsupported with indices as a second output."""
    if node.outputs > 1:
        raise node.fail("the second output, indices")
    x = node.input(0)
    window = SlidingWindow.of(node, x.shape[2:])
    if prod(window.kernel) > MANY:
        return maxima(window, _max_by_axis(window, x))
    p = window.padded(x, reduction_identity("max", x.dtype))
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))
    shape = (*x.shape[:2], *window.out)
    return maxima(window, T.compute(shape, lambda n, c, *o: T.max(p[(n, c, *window.at(o, ks))], ks), "max_pool"))


MANY = 4
"""Largest window whose maximum is computed at once; larger ones reduce axis by axis, as neighbours share lines."""


def _max_by_axis(window: SlidingWindow, x: Tensor) -> Tensor:
    """Reduce maxima along one axis after another; only along the last, vectorised one x is padded."""
    before, after = window.margins()
    least, last = reduction_identity("max", x.dtype), len(x.shape) - 1
    for d in range(2, last):
        size, first, k = x.shape[d], before[d - 2], T.reduce_axis(window.kernel[d - 2], f"k{d - 2}")

        def body(*i: Expr, d: int = d, x: Tensor = x, first: int = first, size: int = size, k: Axis = k) -> Expr:
            at = i[d] * window.stride[d - 2] + k * window.dilation[d - 2] - first
            return T.max(select((at >= 0) & (at < size), x[(*i[:d], at, *i[d + 1 :])], least), (k,))

        x = T.compute((*x.shape[:d], window.out[d - 2], *x.shape[d + 1 :]), body, "lines")
    lead = (0,) * last
    p = padded(x, (*lead, before[-1]), (*lead, after[-1]), least)
    k = T.reduce_axis(window.kernel[-1], f"k{last - 2}")
    return T.compute(
        (*x.shape[:last], window.out[-1]),
        lambda *i: T.max(p[(*i[:last], i[last] * window.stride[-1] + k * window.dilation[-1])], (k,)),
        "max_pool",
    )


@op("AveragePool", kind=Kind.COMPLEX, wide=True, heavy=True, windows=True, operands="x")
def average_pool(node: Node) -> Tensor:
    """Build AveragePool, with any number of axes and ONNX's divisor."""
    x = node.input(0)
    window = SlidingWindow.of(node, x.shape[2:])
    p = window.padded(x, wrap(0, x.dtype))
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))

    def body(n: Expr, c: Expr, *o: Expr) -> Expr:
        return T.sum(p[(n, c, *window.at(o, ks))], ks) / window.count(o).astype(x.dtype)

    return T.compute((*x.shape[:2], *window.out), body, "average_pool")


@op("GlobalAveragePool", kind=Kind.REDUCTION, wide=True, operands="x")
@op("GlobalMaxPool", kind=Kind.REDUCTION, operands="x")
def global_pool(node: Node) -> Tensor:
    """Build GlobalMaxPool or GlobalAveragePool: complete images become [n, c, 1, ...]."""
    x = node.input(0)
    axes = range(2, len(x.shape))
    if node.op == "GlobalMaxPool":
        return reduced(x, axes, True, T.max, "global_max")
    return reduced(x, axes, True, lambda v, ks: T.sum(v, ks) / prod(x.shape[2:]), "global_average")
