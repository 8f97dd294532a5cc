"""Rewrite convolutions: what stands behind them moves into their weights, and transposed ones become plain ones.

Scales and offsets of channels (`fold_batchnorm`), where a = scale / sqrt(var + epsilon):

    h = Conv(x, w, b)
    y = BatchNormalization(h, scale, offset, mean, var)     ->     y = Conv(x, w * a, (b - mean) * a + offset)

Also behind ConvTranspose and Gemm, and for Mul, Div, Add and Sub by a constant for each channel. Only floats: operators
between quantised tensors must round where the model says so.

A transposed convolution becomes one convolution for each phase of the output, side by side as channels
(`convolve_transposed`):

    y = ConvTranspose(x, w), stride s     ->     z = Conv(x, v)       s * s times the channels
                                                 y = DepthToSpace(z)

Output position o = s * q + r reads x[q + d] * w[k] for the k with r + before - k = s * d, where `before` is the padding
at the begin. So phase r is a convolution over positions q with those taps of w whose remainder fits. If all phases read
the same distances d, as with a kernel of size s, they are one convolution. Otherwise each phase is its own convolution,
so that no tap is zero:

    z = Concat(Conv(x, v0), Conv(x, v1), ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.expr.nodes import unused_name
from celosia.compiler.graph.operands import operand, product_names, product_operands, set_operand
from celosia.compiler.graph.shapes import transposed_windows_of
from celosia.compiler.graph.values import (
    RESERVED,
    attribute,
    attributes,
    constant,
    is_op,
    new_constant,
    only_use,
    replace_by,
    replace_keeping_name,
    shape,
    value_names,
)
from celosia.compiler.program.host.shape_rules import WindowError

Array = NDArray[Any]
"""A numpy array of any element type."""


# Scales and offsets of channels ---------------------------------------------------------------------------------------


Affine = tuple[Array, Array]
"""(a, b) of y = a * x + b: one number for each channel, as float64."""


def fold_batchnorm(model: ir.Model) -> None:
    """Fold every scale and offset behind a Conv, ConvTranspose or Gemm, until none is left."""
    for node in list(model.graph):
        if is_op(node, "Conv", "ConvTranspose", "Gemm"):
            while _fold_next(model.graph, node):
                pass


def _fold_next(graph: ir.Graph, node: ir.Node) -> bool:
    """Fold the only reader of `node` into its weights and bias; return False where that is impossible."""
    x, weights, bias = product_operands(node)
    _, weights_name, bias_name = product_names(node.op_type)
    reader, dims = only_use(node.outputs[0]), shape(node.outputs[0])
    w = constant(weights)
    if (
        reader is None
        or reader.graph is not graph
        or w is None
        or w.dtype not in (np.float32, np.float64)
        or dims is None
    ):
        return False
    if x is None or is_op(x.producer(), "DequantizeLinear") or _is_quantised(reader) or len(dims) < 2:
        return False
    affine, old_bias = _affine(reader, node.outputs[0], dims), _bias(node, bias, dims[1])
    if affine is None or old_bias is None:
        return False
    a, b = affine
    with np.errstate(over="ignore", invalid="ignore"):
        new_weights = (w * along_outputs(node, a, w)).astype(w.dtype)
        new_bias = (old_bias * a + b).astype(w.dtype)
    if not (np.all(np.isfinite(new_weights)) and np.all(np.isfinite(new_bias))):
        return False
    name = node.name or node.outputs[0].name
    set_operand(node, weights_name, new_constant(graph, f"{name}_weights", new_weights))
    set_operand(node, bias_name, new_constant(graph, f"{name}_bias", new_bias))
    if node.op_type == "Gemm":
        node.attributes["beta"] = ir.AttrFloat32("beta", 1.0)
    return replace_keeping_name(reader, node.outputs[0])


def _affine(node: ir.Node, x: ir.Value, dims: tuple[int, ...]) -> Affine | None:
    """Return scale and offset of each channel of `x` that `node` applies; None if `node` does anything else.

    dims: shape of `x`, with channels on axis 1.
    """
    channels = dims[1]
    if is_op(node, "BatchNormalization"):
        if is_training(node):
            return None
        values = [constant(operand(node, name)) for name in ("scale", "b", "input_mean", "input_var")]
        if node.inputs[0] is not x or any(v is None or v.shape != (channels,) for v in values):
            return None
        scale, offset, mean, var = (np.asarray(v, np.float64) for v in values)
        with np.errstate(divide="ignore", invalid="ignore"):
            a = scale / np.sqrt(var + np.float64(attribute(node, "epsilon", 1e-5)))
        return (a, offset - mean * a) if np.all(np.isfinite(a)) else None
    if not is_op(node, "Mul", "Div", "Add", "Sub") or shape(node.outputs[0]) != dims:
        return None
    x_is_first = node.inputs[0] is x
    c = _per_channel(node.inputs[1] if x_is_first else node.inputs[0], dims)
    if c is None or (not x_is_first and node.op_type == "Div"):
        return None
    ones, zeros = np.ones(channels), np.zeros(channels)
    with np.errstate(divide="ignore"):
        affine_of = {
            "Mul": (c, zeros), "Div": (1 / c, zeros), "Add": (ones, c), "Sub": (ones, -c) if x_is_first else (-ones, c)
        }  # fmt: skip
    return affine_of[node.op_type]


def _per_channel(value: ir.Value | None, dims: tuple[int, ...]) -> Array | None:
    """Return a constant as one number for each channel (axis 1 of `dims`); None if it varies along other axes."""
    array = constant(value)
    if array is None or array.dtype.kind != "f" or array.ndim > len(dims):
        return None
    padded_shape = (1,) * (len(dims) - array.ndim) + array.shape
    if any(size != 1 for axis, size in enumerate(padded_shape) if axis != 1):
        return None
    return np.broadcast_to(array.reshape(-1), (dims[1],)).astype(np.float64)


def _bias(node: ir.Node, bias: ir.Value | None, channels: int) -> Array | None:
    """Return the bias of each channel, zeros for no bias; None if it is not constant or not one for each channel."""
    if bias is None:
        return np.zeros(channels)
    array = constant(bias)
    if array is None or (array.size not in (1, channels)) or (array.ndim > 1 and array.shape[-1] != array.size):
        return None
    beta = float(attribute(node, "beta", 1.0)) if node.op_type == "Gemm" else 1.0
    return np.broadcast_to(array.reshape(-1).astype(np.float64) * beta, (channels,))


def _is_quantised(node: ir.Node) -> bool:
    """Return whether a QuantizeLinear reads the result of `node`."""
    return any(is_op(use.node, "QuantizeLinear") for use in node.outputs[0].uses())


def is_training(node: ir.Node) -> bool:
    """Return whether a BatchNormalization uses the statistics of its batch.

    An attribute says so, or, before opset 14, that it has several outputs.
    """
    return len(node.outputs) > 1 or bool(attribute(node, "training_mode", 0))


def along_outputs(node: ir.Node, a: Array, w: Array) -> Array:
    """Reshape `a` (one number for each output channel, or one for all) so that it multiplies the weights `w`."""
    if node.op_type == "Gemm":
        return a[:, None] if attribute(node, "transB", 0) else a[None, :]
    kernel_axes = (1,) * (w.ndim - 2)
    if node.op_type == "Conv":
        return a.reshape(-1, 1, *kernel_axes)
    groups = attribute(node, "group", 1) if a.size > 1 else 1  # w is [input channels, output channels of a group, ...]
    return np.repeat(a.reshape(groups, -1), w.shape[0] // groups, axis=0).reshape(w.shape[0], -1, *kernel_axes)


# Transposed convolutions ----------------------------------------------------------------------------------------------


def convolve_transposed(model: ir.Model) -> None:
    """Rewrite float transposed convolutions of images, whose weights are constant, as convolutions.

    Kernels of plain convolutions are much faster, and no product has a zero that the stride inserts.
    """
    nodes = [node for node in model.graph if is_op(node, "ConvTranspose")]
    used_names = {*value_names(model.graph), *model.graph.meta.get(RESERVED, ())} if nodes else set()
    for node in nodes:
        _TransposedConvolution(model.graph, node, used_names).rewrite()


class _TransposedConvolution:
    """The rewriting of one transposed convolution. used_names: names of values, which new ones must not take."""

    def __init__(self, graph: ir.Graph, node: ir.Node, used_names: set[str]) -> None:
        self.graph, self.node, self.used_names = graph, node, used_names
        self.group = int(attribute(node, "group", 1))

    def rewrite(self) -> None:
        """Replace the node by convolutions, an interleaving of their results and perhaps a Slice, if it can be."""
        node, axes = self.node, _axes(self.node)
        _, w, bias = (*node.inputs, None)[:3]
        dims = shape(node.outputs[0])
        if w is None or axes is None or dims is None:
            return
        if constant(w) is None or (bias is not None and constant(bias) is None):
            return
        rows, columns = axes
        phases, skipped = rows.stride * columns.stride, 4 - len(dims)  # a row image has no axis of rows
        phase_sizes = [axis.phase_outputs for axis in axes][skipped:]
        if all(len({(phase.low, phase.width) for phase in axis.phases}) == 1 for axis in axes):
            result, mode = self._convolution(rows.phases, columns.phases, axes), "CRD"
        else:
            phase_results = [self._convolution([y], [x], axes) for y in rows.phases for x in columns.phases]
            result, mode = self._emit("Concat", phase_results, [dims[0], dims[1] * phases, *phase_sizes], axis=1), "DCR"
        strides = [axis.stride for axis in axes][skipped:]
        if phases > 1:
            result = self._interleave(result, mode, dims[1], phase_sizes, strides)
        if [size * stride for size, stride in zip(phase_sizes, strides)] != list(dims[2:]):
            bounds = ([0] * len(strides), list(dims[2:]), list(range(2, len(dims))))
            starts_ends_axes = [new_constant(self.graph, "bounds", np.array(bound, np.int64)) for bound in bounds]
            result = self._emit("Slice", [result, *starts_ends_axes], list(dims))
        replace_by(node, result)

    def _interleave(
        self, x: ir.Value, mode: str, channels: int, sizes: Sequence[int], strides: Sequence[int]
    ) -> ir.Value:
        """Interleave the phases of an image, which are side by side as channels: [N, M * phases, H, W] to [N, M, ...].

        mode: "CRD" where the phases of one channel lie together, "DCR" where the channels of one phase do.
        """
        dims = shape(x)
        assert dims is not None
        interleaved = [dims[0], channels, *(size * stride for size, stride in zip(sizes, strides))]
        if len(strides) == 2 and strides[0] == strides[1]:
            return self._emit("DepthToSpace", [x], interleaved, blocksize=strides[0], mode=mode)
        rank = len(strides)
        phase_dims = [dims[0], channels, *strides, *sizes] if mode == "CRD" else [dims[0], *strides, channels, *sizes]
        channel, first = (1, 2) if mode == "CRD" else (1 + rank, 1)
        order = [0, channel, *(axis for k in range(rank) for axis in (2 + rank + k, first + k))]
        y = self._emit("Reshape", [x, new_constant(self.graph, "dims", np.array(phase_dims, np.int64))], phase_dims)
        y = self._emit("Transpose", [y], [phase_dims[axis] for axis in order], perm=order)
        return self._emit(
            "Reshape", [y, new_constant(self.graph, "dims", np.array(interleaved, np.int64))], interleaved
        )

    def _convolution(self, ys: Sequence[_Phase], xs: Sequence[_Phase], axes: list[_Axis]) -> ir.Value:
        """Insert the convolution of phases `ys` x `xs`, which have the same window.

        Their results are side by side as channels.
        """
        x, w, bias = (*self.node.inputs, None)[:3]
        dims = shape(self.node.outputs[0])
        assert w is not None and dims is not None
        skipped = 4 - len(dims)
        inputs = [x, self._transformed_constant(w, lambda array: _split_weights(array, self.group, ys, xs))]
        count = len(ys) * len(xs)
        if bias is not None:
            inputs.append(self._transformed_constant(bias, lambda array: np.repeat(array, count)))
        window = ys[0], xs[0]
        pads = [phase.pads(axis.size, axis.phase_outputs) for phase, axis in zip(window, axes)][skipped:]
        return self._emit(
            "Conv", inputs, [dims[0], dims[1] * count, *[axis.phase_outputs for axis in axes][skipped:]],
            pads=[*(before for before, _ in pads), *(after for _, after in pads)],
            kernel_shape=[phase.width for phase in window][skipped:], group=self.group,
        )  # fmt: skip

    def _transformed_constant(self, value: ir.Value, change: Callable[[Array], Array]) -> ir.Value:
        """Add a constant that `change` makes of the constant `value`."""
        array = constant(value)
        assert array is not None
        return new_constant(self.graph, f"{value.name}.phases", change(array))

    def _emit(self, op: str, inputs: Sequence[ir.Value | None], dims: Sequence[int], **attrs: Any) -> ir.Value:
        """Insert an operator before the old one and return its output, of shape `dims`."""
        y = self.node.outputs[0]
        name = unused_name(f"{y.name}.{op.lower()}", self.used_names)
        tensor_type = ir.TensorType(y.dtype or ir.DataType.FLOAT)
        out = ir.Value(name=name, shape=ir.Shape([int(size) for size in dims]), type=tensor_type)
        label = self.node.name if op == "Conv" else name
        self.graph.insert_before(self.node, ir.Node("", op, inputs, attributes(**attrs), outputs=[out], name=label))
        return out


@dataclass(frozen=True)
class _Axis:
    """One axis of the image: `size` inputs and `out` outputs, of which `before` were cut at the begin."""

    size: int
    out: int
    kernel: int
    stride: int
    before: int

    @property
    def phases(self) -> list[_Phase]:
        """The phases of the outputs, by remainder of the position."""
        pairs = [[(k, r + self.before - k) for k in range(self.kernel)] for r in range(self.stride)]
        return [_Phase(tuple((k, d // self.stride) for k, d in row if d % self.stride == 0)) for row in pairs]

    @property
    def phase_outputs(self) -> int:
        """Outputs that each phase computes: more than needed where fewer would need negative padding."""
        padding_bound = max(self.size - phase.low - phase.width + 1 for phase in self.phases)
        return max(-(-self.out // self.stride), padding_bound)


@dataclass(frozen=True)
class _Phase:
    """One phase of an axis.

    taps: (index in the kernel, distance d) of its products.
    """

    taps: tuple[tuple[int, int], ...]

    @property
    def low(self) -> int:
        """The least distance of a tap, at most 0."""
        return min(0, *(d for _, d in self.taps)) if self.taps else 0

    @property
    def width(self) -> int:
        """The size of the convolution's kernel: from `low` to the largest distance, at least 0."""
        return max(0, *(d for _, d in self.taps)) - self.low + 1 if self.taps else 1

    def pads(self, size: int, outputs: int) -> tuple[int, int]:
        """Return the pads (begin, end) with which `size` inputs give `outputs` outputs."""
        return -self.low, outputs - size + self.low + self.width - 1


def _axes(node: ir.Node) -> list[_Axis] | None:
    """Return rows and columns of a transposed convolution, one row for 1-D; None for other ranks, and with dilation."""
    x, w, _ = product_operands(node)
    dims, kernel, output_dims = (None if v is None else shape(v) for v in (x, w, node.outputs[0]))
    if (
        dims is None
        or kernel is None
        or output_dims is None
        or len(dims) not in (3, 4)
        or 0 in (*dims, *kernel, *output_dims)
    ):
        return None
    try:
        geometry = transposed_windows_of(node, kernel[2:])
    except WindowError:
        return None
    if set(geometry.dilation) != {1} or min(geometry.before) < 0:
        return None
    return [
        _Axis(*axis) for axis in zip(geometry.size, geometry.out, geometry.kernel, geometry.stride, geometry.before)
    ]


def _split_weights(weights: Array, group: int, ys: Sequence[_Phase], xs: Sequence[_Phase]) -> Array:
    """Split the weights of a transposed convolution by phases of rows (`ys`) and columns (`xs`).

    [C, M/group, kh, kw] become [M * phases, C/group, h, w] of a convolution; without kh and h in 1-D.
    """
    if weights.ndim == 3:
        return _split_weights(weights[:, :, None], group, ys, xs).squeeze(2)
    c, m = weights.shape[:2]
    by_group = weights.reshape(group, c // group, m, *weights.shape[2:]).swapaxes(1, 2)
    result = np.zeros((group, m, len(ys), len(xs), c // group, ys[0].width, xs[0].width), weights.dtype)
    for ry, y in enumerate(ys):
        for rx, x in enumerate(xs):
            for ky, dy in y.taps:
                for kx, dx in x.taps:
                    result[:, :, ry, rx, :, dy - y.low, dx - x.low] = by_group[:, :, :, ky, kx]
    return result.reshape(group * m * len(ys) * len(xs), c // group, ys[0].width, xs[0].width)
