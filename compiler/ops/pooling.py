"""Max and average pooling, of floats and of quantised bytes."""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import Axis, Expr, Tensor, is_float, select, wrap
from celosia.compiler.expr.lower import reduction_identity
from celosia.compiler.ops.products import SlidingWindow
from celosia.compiler.ops.quantized import accept_channels_last, dequantize, requantize
from celosia.compiler.ops.reductions import reduce_axes
from celosia.compiler.ops.registry import F32, Node, op, round_even, saturate
from celosia.compiler.ops.shape import padded
from celosia.compiler.program.op_spec import Kind, Moves


def replace_empty_maxima(window: SlidingWindow, y: Tensor) -> Tensor:
    """Replace the maxima of windows that lie in the padding alone by the smallest finite number, as onnxruntime does.

    y: maxima [N, C, windows...]. Windows whose elements are all -inf keep -inf.
    """
    empty = [(2 + d, o) for d in range(len(window.size)) for o in window.empty_windows(d)]
    if not empty or not is_float(y.dtype):
        return y
    least = wrap(float(np.finfo(y.dtype).min), y.dtype)

    def body(*i: Expr) -> Expr:
        is_empty = functools.reduce(lambda p, q: p | q, (T.equal(i[axis], o) for axis, o in empty))
        return select(is_empty, least, y[i])

    return T.compute(y.shape, body, "max_pool")


@op("MaxPool", kind=Kind.COMPLEX, moves=Moves.FILL, needs_kernel=True, windows=True, operands="x")
def max_pool(node: Node) -> Tensor:
    """Build MaxPool, with any number of axes and dilation. Raises Unsupported with indices as a second output."""
    if node.outputs > 1:
        raise node.fail("the second output, indices")
    x = node.input(0)
    window = SlidingWindow.of(node, x.shape[2:])
    if prod(window.kernel) > MAX_DIRECT_WINDOW:
        return replace_empty_maxima(window, _max_by_axis(window, x))
    p = window.padded(x, reduction_identity("max", x.dtype))
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))
    shape = (*x.shape[:2], *window.out)
    return replace_empty_maxima(
        window, T.compute(shape, lambda n, c, *o: T.max(p[(n, c, *window.at(o, ks))], ks), "max_pool")
    )


MAX_DIRECT_WINDOW = 4
"""Elements of the largest window whose maximum is computed at once.

Larger ones are reduced axis by axis, so that neighbouring windows share maxima of lines.
"""


def _max_by_axis(window: SlidingWindow, x: Tensor) -> Tensor:
    """Compute the maxima of windows along one axis after another.

    Only the last axis, which is vectorised, reads a padded copy; the others test their index.
    """
    before, after = window.margins()
    least, last = reduction_identity("max", x.dtype), len(x.shape) - 1
    for d in range(2, last):
        size, first, k = x.shape[d], before[d - 2], T.reduce_axis(window.kernel[d - 2], f"k{d - 2}")

        def body(*i: Expr, d: int = d, x: Tensor = x, first: int = first, size: int = size, k: Axis = k) -> Expr:
            position = i[d] * window.stride[d - 2] + k * window.dilation[d - 2] - first
            element = x[(*i[:d], position, *i[d + 1 :])]
            return T.max(select((position >= 0) & (position < size), element, least), (k,))

        x = T.compute((*x.shape[:d], window.out[d - 2], *x.shape[d + 1 :]), body, "lines")
    lead = (0,) * last
    p = padded(x, (*lead, before[-1]), (*lead, after[-1]), least)
    k = T.reduce_axis(window.kernel[-1], f"k{last - 2}")
    return T.compute(
        (*x.shape[:last], window.out[-1]),
        lambda *i: T.max(p[(*i[:last], i[last] * window.stride[-1] + k * window.dilation[-1])], (k,)),
        "max_pool",
    )


@op("AveragePool", kind=Kind.COMPLEX, rounded_once=True, needs_kernel=True, windows=True, operands="x")
def average_pool(node: Node) -> Tensor:
    """Build AveragePool, with any number of axes and ONNX's divisor."""
    x = node.input(0)
    window = SlidingWindow.of(node, x.shape[2:])
    p = window.padded(x, wrap(0, x.dtype))
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))

    def body(n: Expr, c: Expr, *o: Expr) -> Expr:
        return T.sum(p[(n, c, *window.at(o, ks))], ks) / window.count(o).astype(x.dtype)

    return T.compute((*x.shape[:2], *window.out), body, "average_pool")


@op("GlobalAveragePool", kind=Kind.REDUCTION, rounded_once=True, operands="x")
@op("GlobalMaxPool", kind=Kind.REDUCTION, operands="x")
def global_pool(node: Node) -> Tensor:
    """Build GlobalMaxPool or GlobalAveragePool: [N, C, ...] to [N, C, 1, ...]."""
    x = node.input(0)
    axes = range(2, len(x.shape))
    if node.op == "GlobalMaxPool":
        return reduce_axes(x, axes, True, T.max, "global_max")
    return reduce_axes(x, axes, True, lambda v, ks: T.sum(v, ks) / prod(x.shape[2:]), "global_average")


@op(
    "QLinearGlobalAveragePool", kind=Kind.REDUCTION, domain="com.microsoft", variant_of="GlobalAveragePool",
    operands="x<T> x_scale x_zero_point y_scale y_zero_point<T>",
)  # fmt: skip
@accept_channels_last
def qlinear_global_average_pool(node: Node) -> Tensor:
    """Build QLinearGlobalAveragePool; with the attribute channels_last, channels are the last axis."""
    return _global_average(node)


def _global_average(node: Node) -> Tensor:
    """Return the mean of each channel of images [N, C, ...] of bytes, by an int32 sum that is requantised."""
    x = node.input(0)
    zx, count = node.scalar("x_zero_point", "int32"), prod(x.shape[2:])
    scale = node.scalar("x_scale", F32) / (node.scalar("y_scale", F32) * float(count))
    zy = node.scalar("y_zero_point", x.dtype)

    def mean(v: Expr, ks: Any) -> Expr:
        return requantize(T.sum(v.astype("int32") - zx, ks), scale, zy, x.dtype)

    return reduce_axes(x, range(2, len(x.shape)), True, mean, "average")


@op(
    "QLinearMean", kind=Kind.REDUCTION, domain="celosia", variant_of="ReduceMean",
    operands="x x_scale x_zero_point y_scale y_zero_point",
)  # fmt: skip
def qlinear_mean(node: Node) -> Tensor:
    """Build our QLinearMean: the mean over rows and columns, with the accelerator's factor (numerics.mean_scale)."""
    x = node.input(0)
    zx, count = node.scalar("x_zero_point", "int32"), prod(x.shape[2:])
    sx, sy = (node.scalar(name, F32).astype("float64") for name in ("x_scale", "y_scale"))
    scale, zy = sx / (sy * float(count)), node.scalar("y_zero_point", x.dtype)

    def mean(v: Expr, ks: Any) -> Expr:
        return requantize(T.sum(v.astype("int32") - zx, ks), scale.astype(F32), zy, x.dtype)

    return reduce_axes(x, range(2, len(x.shape)), True, mean, "average")


@op(
    "QLinearAveragePool", kind=Kind.COMPLEX, needs_kernel=True, windows=True, domain="com.microsoft",
    variant_of="AveragePool", shaped_as="MaxPool", operands="x<T> x_scale x_zero_point? y_scale y_zero_point<T>?",
)  # fmt: skip
@accept_channels_last
def qlinear_average_pool(node: Node) -> Tensor:
    """Build QLinearAveragePool: float32 sums in the order of elements, integer sums for a global window.

    With our attribute `integers` all sums are those of integers, as on the accelerator.
    """
    x = node.input(0)
    window = SlidingWindow.of(node, x.shape[2:])
    if window.is_global:
        return _global_average(node)
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))
    if node.attrs.get("integers"):
        return _average_of_integers(node, x, window, ks)
    p = window.padded(x, wrap(0, F32), lambda v: dequantize(node, v))
    sy, zy = node.scalar("y_scale", F32), node.scalar("y_zero_point", F32)

    def body(n: Expr, c: Expr, *o: Expr) -> Expr:
        total = T.ordered_sum(p[(n, c, *window.at(o, ks))], ks)
        mean = total / window.count(o).astype(F32)
        return saturate(round_even(mean / sy + zy), x.dtype)

    return T.compute((*x.shape[:2], *window.out), body, "average")


def _average_of_integers(node: Node, x: Tensor, window: SlidingWindow, ks: tuple[T.Axis, ...]) -> Tensor:
    """Return the means of windows by integer sums, requantised with a scale for the divisor of each window."""
    zx = node.scalar("x_zero_point", "int32")
    p = window.padded(x, wrap(0, "int32"), lambda v: v.astype("int32") - zx)
    sx, sy, zy = node.scalar("x_scale", F32), node.scalar("y_scale", F32), node.scalar("y_zero_point", x.dtype)

    def body(n: Expr, c: Expr, *o: Expr) -> Expr:
        scale = sx / (sy * window.count(o).astype(F32))
        return requantize(T.sum(p[(n, c, *window.at(o, ks))], ks), scale, zy, x.dtype)

    return T.compute((*x.shape[:2], *window.out), body, "average")
