"""Normalisation by sums over axes: softmax and Hardmax; layer, group, instance and batch normalisation, LRN.

Sums are added in the order of onnxruntime's kernels, so that float32 results are equal to theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, call, select, wrap
from celosia.compiler.expr.nodes import Value
from celosia.compiler.numerics.requantiser import f32
from celosia.compiler.ops.reductions import reduce_axes
from celosia.compiler.ops.registry import Node, at, op, reshaped
from celosia.compiler.ops.shape import padded
from celosia.compiler.program.op_spec import Kind
from celosia.compiler.target import target


@op("Softmax", "LogSoftmax", kind=Kind.REDUCTION, rounded_once=True, operands="input")
def softmax(node: Node) -> Tensor:
    """Build Softmax or LogSoftmax along an axis, or, before opset 13, all axes from one on."""
    return _apply_along_axis(node, partial(_softmax, node))


def _apply_along_axis(node: Node, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply `function`, which computes a softmax or Hardmax, to the input along the attribute `axis`.

    Before opset 13, all axes from that one on count as one axis.
    """
    x = node.input(0)
    rank = len(x.shape)
    axis = node.axis(-1 if node.opset >= 13 else 1, rank)
    if node.opset < 13 and axis < rank - 1:
        flat = reshaped(x, (*x.shape[:axis], prod(x.shape[axis:])))
        return reshaped(function(flat, axis), x.shape)
    return function(x, axis)


def _softmax(node: Node, x: Tensor, axis: int) -> Tensor:
    """Return softmax or its logarithm along `axis`, in onnxruntime's order of operations."""
    m = reduce_axes(x, [axis], True, T.max, "max", lambda i: nan_to_lowest(x[i]))
    power = exp_of_normal_floats if x.dtype == "float32" and target().vector_bytes < 64 else partial(call, "exp")
    e = T.compute(x.shape, lambda *i: power(x[i] - at(m, i)), "exp")
    total = sum_in_lanes(e, axis) if x.dtype == "float32" else reduce_axes(e, [axis], True, T.sum, "sum")
    if node.op == "LogSoftmax":
        if x.dtype == "float64":
            total = _clamp_tiny_sum(total)
        log = T.compute(total.shape, lambda *i: call("log", total[i].astype("float64")).astype(x.dtype), "log")
        return T.compute(x.shape, lambda *i: x[i] - at(m, i) - at(log, i), "logsoftmax")
    scale = T.compute(total.shape, lambda *i: wrap(1, x.dtype) / total[i], "scale")
    return T.compute(x.shape, lambda *i: e[i] * at(scale, i), "softmax")


def _clamp_tiny_sum(total: Tensor) -> Tensor:
    """Return max(total, 1e-20), as onnxruntime does with doubles; 1e-20 for NaN, too."""
    least = float(f32(1e-20))
    return T.compute(total.shape, lambda *i: select(total[i] > least, total[i], least), "at_least")


def nan_to_lowest(x: Expr) -> Expr:
    """Return x, or -inf for NaN, so that a maximum ignores NaN; the exponentials bring NaN back into the result."""
    return select(T.equal(x, x), x, wrap(-math.inf, x.dtype))


def exp_of_normal_floats(x: Expr) -> Expr:
    """Return exp(x), and 0 where its exponent is below -126, as onnxruntime's softmax without AVX-512."""
    magic = wrap(12582912.0, x.dtype)  # 1.5 * 2^23: adding and subtracting it rounds to an integer
    return select(call("fma", x, wrap(math.log2(math.e), x.dtype), magic) - magic < -126, 0, call("exp", x))


def sum_in_lanes(x: Tensor, axis: int) -> Tensor:
    """Return the float32 sum along an axis, which stays as 1, in the order of onnxruntime's kernel for this processor.

    A vector holds one partial sum in each lane. Of 16 lanes the upper half is added to the lower, then neighbours
    (github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/mlas/lib/x86_64/TransKernelAvx512F.S).
    """
    count, lane_count = x.shape[axis], target().lanes(x.dtype)
    k = T.reduce_axis(count // lane_count, "k")

    def part(*i: Expr) -> Expr:
        return T.sum(x[(*i[:axis], k * lane_count + i[axis], *i[axis + 1 :])], k)

    lanes = T.compute((*x.shape[:axis], lane_count, *x.shape[axis + 1 :]), part, "lanes")

    def total(*i: Expr) -> Expr:
        """Return the sum at index `i`: elements beyond the last full vector go to the first lanes, then all are added.

        The lanes are added in onnxruntime's order.
        """

        def index_along_axis(position: int) -> tuple[Value, ...]:
            return (*i[:axis], position, *i[axis + 1 :])

        sums = [lanes[index_along_axis(lane)] for lane in range(lane_count)]
        for lane, position in enumerate(range(count // lane_count * lane_count, count)):
            sums[lane] = sums[lane] + x[index_along_axis(position)]
        if lane_count == 16:
            sums = [low + high for low, high in zip(sums[:8], sums[8:])]
        while len(sums) > 1:
            sums = [low + high for low, high in zip(sums[::2], sums[1::2])]
        return sums[0]

    return T.compute((*x.shape[:axis], 1, *x.shape[axis + 1 :]), total, "sum")


@op("Hardmax", kind=Kind.REDUCTION, operands="input")
def hardmax(node: Node) -> Tensor:
    """Build Hardmax: 1 at the first maximum along an axis (before opset 13: all axes from one on), else 0."""
    return _apply_along_axis(node, _hardmax)


def _hardmax(x: Tensor, axis: int) -> Tensor:
    """Return 1 at the first maximum along `axis`, else 0."""
    best = reduce_axes(x, [axis], True, T.max, "best")
    n = x.shape[axis]
    first = reduce_axes(x, [axis], True, T.min, "first", lambda i: select(T.equal(x[i], at(best, i)), i[axis], n))
    return T.compute(x.shape, lambda *i: select(T.equal(at(first, i), i[axis]), wrap(1, x.dtype), 0), "hardmax")


def moments(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return (mean, variance) of x over `axes`, which stay in the shapes as 1."""
    count = prod(x.shape[d] for d in axes)
    mean = reduce_axes(x, axes, True, lambda v, ks: T.sum(v, ks) / count, "mean")
    return mean, mean_square(x, mean, axes)


def mean_square(x: Tensor, mean: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the mean squared distance of x from `mean` over `axes`, which stay in the shape as 1."""
    count = prod(x.shape[d] for d in axes)

    def square(i: tuple[Expr, ...]) -> Expr:
        d = x[i] - at(mean, i)
        return d * d

    return reduce_axes(x, axes, True, lambda v, ks: T.sum(v, ks) / count, "variance", square)


def epsilon(node: Node) -> float:
    """Return the attribute `epsilon`, the term added to a variance; its default depends on the operator."""
    return float(node.attrs.get("epsilon", 1e-12 if "Skip" in node.op or "Embed" in node.op else 1e-5))


ROW_LANES = 8
"""Number of partial sums of squares in onnxruntime's row kernel, which does not take shorter rows."""


def row_mean_square(x: Tensor, mean: Tensor | None = None) -> Tensor:
    """Return the mean squared distance from `mean`, or from 0, along the last axis, in onnxruntime's order for AVX2.

    Eight partial sums are added in pairs, then the remaining elements: four squares that are rounded, and the others
    with fused multiply-adds (github.com/microsoft/onnxruntime/pull/31973; onnxruntime rounds these four).
    """
    count = x.shape[-1]
    k = T.reduce_axis(count // ROW_LANES, "k")

    def distance(row: tuple[Expr, ...], position: Value) -> Expr:
        return x[(*row, position)] if mean is None else x[(*row, position)] - mean[(*row, 0)]

    def square(row: tuple[Expr, ...], position: Value) -> Expr:
        return distance(row, position) * distance(row, position)

    lanes = T.compute((*x.shape[:-1], ROW_LANES), lambda *i: T.sum(square(i[:-1], k * ROW_LANES + i[-1]), k), "lanes")

    def mean_of(*i: Expr) -> Expr:
        """Add the partial sums and the remaining squares of a row, and divide by its length."""
        row = i[:-1]
        halves = [lanes[(*row, lane)] + lanes[(*row, lane + 4)] for lane in range(4)]
        total = (halves[0] + halves[2]) + (halves[1] + halves[3])
        remaining = [distance(row, position) for position in range(count // ROW_LANES * ROW_LANES, count)]
        rounded_squares = 4 if len(remaining) >= 4 else 0
        for d in remaining[:rounded_squares]:
            total = total + d * d
        for d in remaining[rounded_squares:]:
            total = call("fma", d, d, total)
        return total / count

    return T.compute((*x.shape[:-1], 1), mean_of, "variance")


def layer_norm(
    node: Node, x: Tensor, axis: int, scale: Tensor | None, bias: Tensor | None, by_rows: bool = False
) -> list[Tensor]:
    """Return (normalised x, mean, inverse deviation) over the axes from `axis` on.

    scale, bias: of each element, broadcast; None for none. by_rows: compute float32 along the last axis bit by bit as
    onnxruntime's row kernel does. As in onnxruntime the mean is summed in doubles, so that a row of equal elements
    becomes exactly 0.
    """
    eps, axes = epsilon(node), range(axis, len(x.shape))
    count = prod(x.shape[d] for d in axes)
    mean = reduce_axes(
        x, axes, True, lambda v, ks: (T.sum(v, ks) / count).astype(x.dtype), "mean", lambda i: x[i].astype("float64")
    )
    exact = by_rows and x.dtype == "float32" and len(axes) == 1 and count >= ROW_LANES
    variance = row_mean_square(x, mean) if exact else mean_square(x, mean, axes)
    inverse = T.compute(mean.shape, lambda *i: wrap(1, x.dtype) / call("sqrt", variance[i] + eps), "inverse")

    def body(*i: Expr) -> Expr:
        y = (x[i] - at(mean, i)) * at(inverse, i)
        if exact and scale is not None and bias is not None:
            return call("fma", y, at(scale, i), at(bias, i))
        y = y if scale is None else y * at(scale, i)
        return y if bias is None else y + at(bias, i)

    return [T.compute(x.shape, body, "layer_norm"), mean, inverse]


@op("LayerNormalization", kind=Kind.REDUCTION, rounded_once=True, operands="x scale:weights b:bias?")
def layer_normalization(node: Node) -> list[Tensor]:
    """Build LayerNormalization; mean and inverse deviation are further outputs."""
    x = node.input(0)
    bias, axis = node.optional("b"), node.axis(-1, len(x.shape))
    return layer_norm(node, x, axis, node.input("scale"), bias, by_rows=True)[: node.outputs]


@op(
    "SkipLayerNormalization", kind=Kind.REDUCTION, domain="com.microsoft",
    operands="input skip gamma:weights beta:bias? bias:bias?",
)  # fmt: skip
def skip_layer_normalization(node: Node) -> list[Tensor]:
    """Build SkipLayerNormalization: LayerNormalization of input + skip + bias; output 3 is that sum."""
    tensors = [node.input(name) for name in ("input", "skip", "bias") if name != "bias" or node.has(name)]
    total = node.elementwise(lambda *v: sum(v[1:], v[0]), *tensors)
    bias = node.optional("beta")
    y, mean, inverse = layer_norm(node, total, len(total.shape) - 1, node.input("gamma"), bias)
    return [y, mean, inverse, total][: node.outputs]


@op("RMSNormalization", kind=Kind.REDUCTION, rounded_once=True, operands="x scale:weights")
def rms_normalization(node: Node) -> Tensor:
    """Build RMSNormalization: division by the root mean square over all axes from one on."""
    x, scale = node.input("x"), node.input("scale")
    axes = range(node.axis(-1, len(x.shape)), len(x.shape))
    count, eps = prod(x.shape[d] for d in axes), node.attrs.get("epsilon", 1e-5)
    if x.dtype == "float32" and len(axes) == 1 and count >= 2 * ROW_LANES:
        squares = row_mean_square(x)
        inverse = T.compute(squares.shape, lambda *i: wrap(1, x.dtype) / call("sqrt", squares[i] + eps), "inverse")
        return T.compute(x.shape, lambda *i: x[i] * at(inverse, i) * at(scale, i), "rms_norm")
    inverse = reduce_axes(
        x, axes, True, lambda v, ks: wrap(1, x.dtype) / call("sqrt", T.sum(v * v, ks) / count + eps), "inverse"
    )
    return T.compute(x.shape, lambda *i: x[i] * at(inverse, i) * at(scale, i), "rms_norm")


@op("InstanceNormalization", kind=Kind.REDUCTION, rounded_once=True, operands="input scale:weights b:bias")
def instance_normalization(node: Node) -> Tensor:
    """Build InstanceNormalization in onnxruntime's form x * factor + (bias - mean * factor).

    Another form would round differently, visibly so where a channel is nearly constant.
    """
    x, scale, bias = node.input("input"), node.input("scale"), node.input("b")
    mean, variance = moments(x, range(2, len(x.shape)))
    eps = node.attrs.get("epsilon", 1e-5)
    shape = x.shape[:2]

    def at_channel(tensor: Tensor, n: Expr, c: Expr) -> Expr:
        return tensor[(n, c, *[wrap(0, INDEX)] * (len(x.shape) - 2))]

    factor = T.compute(
        shape, lambda n, c: wrap(1, x.dtype) / call("sqrt", at_channel(variance, n, c) + eps) * scale[c], "factor"
    )
    shift = T.compute(shape, lambda n, c: bias[c] - at_channel(mean, n, c) * factor[n, c], "shift")
    return T.compute(x.shape, lambda n, c, *s: x[(n, c, *s)] * factor[n, c] + shift[n, c], "instance_norm")


@op("GroupNormalization", kind=Kind.REDUCTION, rounded_once=True, operands="x scale:weights bias:bias")
def group_normalization(node: Node) -> Tensor:
    """Build GroupNormalization over groups of channels and all pixels; parameters by channel or group."""
    x, scale, bias = node.input("x"), node.input("scale"), node.input("bias")
    groups = int(node.attrs.get("num_groups", x.shape[1]))
    size = x.shape[1] // groups
    eps = node.attrs.get("epsilon", 1e-5)
    shape = (x.shape[0], groups, size, *x.shape[2:])
    grouped = T.compute(shape, lambda n, g, c, *s: x[(n, g * size + c, *s)], "grouped")
    mean, variance = moments(grouped, range(2, len(shape)))
    inverse = T.compute(mean.shape, lambda *i: wrap(1, x.dtype) / call("sqrt", variance[i] + eps), "inverse")

    def body(n: Expr, c: Expr, *s: Expr) -> Expr:
        group = (n, c // size, *[wrap(0, INDEX)] * (len(s) + 1))
        parameter = c if scale.size == x.shape[1] else c // size
        return (x[(n, c, *s)] - mean[group]) * inverse[group] * scale[parameter] + bias[parameter]

    return T.compute(x.shape, body, node.op.lower())


@op(
    "BatchNormalization", kind=Kind.INJECTIVE, rounded_once=True,
    operands="x scale:weights b:bias input_mean input_var",
)  # fmt: skip
def batch_normalization(node: Node) -> Tensor:
    """Build BatchNormalization by given statistics. Raises Unsupported in training mode."""
    if node.attrs.get("training_mode", 0):
        raise node.fail("training mode")
    # In onnxruntime's order: later operators may subtract nearly equal values, which shows its rounding.
    x, scale, bias, mean, variance = map(node.input, ("x", "scale", "b", "input_mean", "input_var"))
    eps = node.attrs.get("epsilon", 1e-5)
    factor = T.compute(scale.shape, lambda c: wrap(1, x.dtype) / call("sqrt", variance[c] + eps) * scale[c], "factor")
    shift = T.compute(scale.shape, lambda c: bias[c] - mean[c] * factor[c], "shift")
    return T.compute(x.shape, lambda *i: x[i] * factor[i[1]] + shift[i[1]], "batch_norm")


@op("MeanVarianceNormalization", kind=Kind.REDUCTION, rounded_once=True, operands="x")
def mean_variance_normalization(node: Node) -> Tensor:
    """Build MeanVarianceNormalization as in onnxruntime: a variance of 0 divides, extra axes are ignored."""
    x = node.input(0)
    rank = len(x.shape)
    mean, variance = moments(x, [int(a) % rank for a in node.attrs.get("axes", (0, 2, 3)) if a < rank])
    return T.compute(x.shape, lambda *i: (x[i] - at(mean, i)) / call("sqrt", at(variance, i)), "mean_variance")


@op("LpNormalization", kind=Kind.REDUCTION, rounded_once=True, operands="input")
def lp_normalization(node: Node) -> Tensor:
    """Build LpNormalization: division by the norm along an axis; 0 where the norm is 0."""
    x, p = node.input(0), int(node.attrs.get("p", 2))
    axis = node.axis(-1, len(x.shape))
    total = reduce_axes(x, [axis], True, lambda v, ks: T.sum(call("abs", v) if p == 1 else v * v, ks), "total")

    def body(*i: Expr) -> Expr:
        norm = at(total, i) if p == 1 else call("sqrt", at(total, i))
        return select(T.equal(norm, 0), wrap(0, x.dtype), x[i] / norm)

    return T.compute(x.shape, body, "lp_normalization")


@op("LRN", kind=Kind.COMPLEX, rounded_once=True, operands="x")
def lrn(node: Node) -> Tensor:
    """Build LRN: local response normalisation by squares of neighbouring channels."""
    x, size = node.input(0), int(node.attrs["size"])
    alpha, beta, bias = (node.attrs.get(k, d) for k, d in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    before, after = [0] * len(x.shape), [0] * len(x.shape)
    before[1] = (size - 1) // 2
    after[1] = size - 1 - before[1]
    p = padded(x, tuple(before), tuple(after), wrap(0, x.dtype), lambda v: v * v)
    k = T.reduce_axis(size, "k")
    total = T.compute(x.shape, lambda n, c, *s: T.sum(p[(n, c + k, *s)], k), "squares")
    return T.compute(
        x.shape, lambda *i: x[i] / T.binary("pow", total[i] * (alpha / size) + bias, wrap(beta, x.dtype)), "lrn"
    )
