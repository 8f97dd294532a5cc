"""Averages of quantised bytes: global and windowed average pooling, and means with the accelerator's factor."""

from __future__ import annotations

from math import prod
from typing import Any

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor, wrap
from celosia.compiler.ops.quantized import F32, dequantized, requantize, with_channels_last
from celosia.compiler.ops.reductions import reduced
from celosia.compiler.ops.registry import Node, op, round_even, saturate
from celosia.compiler.ops.window import SlidingWindow
from celosia.compiler.program.op_spec import Kind


@op(
    "QLinearGlobalAveragePool", kind=Kind.REDUCTION, domain="com.microsoft", variant_of="GlobalAveragePool",
    operands="x<T> x_scale x_zero_point y_scale y_zero_point<T>",
)  # fmt: skip
@with_channels_last
def qlinear_global_average_pool(node: Node) -> Tensor:
    """Build QLinearGlobalAveragePool; with channels_last, channels are the last axis."""
    return global_average(node)


def global_average(node: Node) -> Tensor:
    """Return the mean of each image [n, c, ...] of bytes, requantised."""
    x = node.input(0)
    zx, count = node.scalar("x_zero_point", "int32"), prod(x.shape[2:])
    scale = node.scalar("x_scale", F32) / (node.scalar("y_scale", F32) * float(count))
    zy = node.scalar("y_zero_point", x.dtype)

    def mean(v: Expr, ks: Any) -> Expr:
        return requantize(T.sum(v.astype("int32") - zx, ks), scale, zy, x.dtype)

    return reduced(x, range(2, len(x.shape)), True, mean, "average")


@op(
    "QLinearMean", kind=Kind.REDUCTION, domain="celosia", variant_of="ReduceMean",
    operands="x x_scale x_zero_point y_scale y_zero_point",
)  # fmt: skip
def qlinear_mean(node: Node) -> Tensor:
    """Build our QLinearMean: the mean over rows and columns with the factor that the accelerator has."""
    x = node.input(0)
    zx, count = node.scalar("x_zero_point", "int32"), prod(x.shape[2:])
    sx, sy = (node.scalar(name, F32).astype("float64") for name in ("x_scale", "y_scale"))
    scale, zy = sx / (sy * float(count)), node.scalar("y_zero_point", x.dtype)

    def mean(v: Expr, ks: Any) -> Expr:
        return requantize(T.sum(v.astype("int32") - zx, ks), scale.astype(F32), zy, x.dtype)

    return reduced(x, range(2, len(x.shape)), True, mean, "average")


@op(
    "QLinearAveragePool", kind=Kind.COMPLEX, heavy=True, windows=True, domain="com.microsoft",
    variant_of="AveragePool", shaped_as="MaxPool", operands="x<T> x_scale x_zero_point? y_scale y_zero_point<T>?",
)  # fmt: skip
@with_channels_last
def qlinear_average_pool(node: Node) -> Tensor:
    """Build QLinearAveragePool: float32 sums in the order of elements, integers for a global window.

    With our attribute `integers` it adds integers, as the accelerator does.
    """
    x = node.input(0)
    window = SlidingWindow.of(node, x.shape[2:])
    if window.is_global:
        return global_average(node)
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))
    if node.attrs.get("integers"):
        return _average_of_integers(node, x, window, ks)
    p = window.padded(x, wrap(0, F32), lambda v: dequantized(node, v))
    sy, zy = node.scalar("y_scale", F32), node.scalar("y_zero_point", F32)

    def body(n: Expr, c: Expr, *o: Expr) -> Expr:
        total = T.ordered_sum(p[(n, c, *window.at(o, ks))], ks)
        mean = total / window.count(o).astype(F32)
        return saturate(round_even(mean / sy + zy), x.dtype)

    return T.compute((*x.shape[:2], *window.out), body, "average")


def _average_of_integers(node: Node, x: Tensor, window: SlidingWindow, ks: tuple[T.Axis, ...]) -> Tensor:
    """Return windows' means by integer sums, requantised by the divisor of each window."""
    zx = node.scalar("x_zero_point", "int32")
    p = window.padded(x, wrap(0, "int32"), lambda v: v.astype("int32") - zx)
    sx, sy, zy = node.scalar("x_scale", F32), node.scalar("y_scale", F32), node.scalar("y_zero_point", x.dtype)

    def body(n: Expr, c: Expr, *o: Expr) -> Expr:
        scale = sx / (sy * window.count(o).astype(F32))
        return requantize(T.sum(p[(n, c, *window.at(o, ks))], ks), scale, zy, x.dtype)

    return T.compute((*x.shape[:2], *window.out), body, "average")
