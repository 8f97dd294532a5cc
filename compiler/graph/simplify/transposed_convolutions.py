"""Replace transposed convolutions by convolutions: one for each phase of the output, side by side as channels.

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
from celosia.compiler.graph.operands import product_operands
from celosia.compiler.graph.shapes import transposed_windows_of
from celosia.compiler.graph.values import (
    RESERVED,
    attribute,
    attributes,
    constant,
    is_op,
    new_constant,
    replace_by,
    shape,
    value_names,
)
from celosia.compiler.program.host.shape_rules import WindowError

Array = NDArray[Any]
"""A numpy array of any element type."""
Transform = Callable[[Array], Array]
"""A function that makes new weights or a new bias of the old array."""


def convolve_transposed(model: ir.Model) -> None:
    """Rewrite float transposed convolutions of images, whose weights are constant, as convolutions.

    Kernels of plain convolutions are much faster, and no product has a zero that the stride inserts.
    """
    nodes = [node for node in model.graph if is_op(node, "ConvTranspose")]
    used_names = {*value_names(model.graph), *model.graph.meta.get(RESERVED, ())} if nodes else set()
    for node in nodes:
        _TransposedConvolution(model.graph, node, used_names).rewrite()


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


class _TransposedConvolution:
    """The rewriting of one transposed convolution. used_names: names of values, which new ones must not take."""

    def __init__(self, graph: ir.Graph, node: ir.Node, used_names: set[str]) -> None:
        self.graph, self.node, self.used_names = graph, node, used_names
        self.group = int(attribute(node, "group", 1))

    def rewrite(self) -> None:
        """Replace the node by convolutions, DepthToSpace and perhaps a Slice, if it can be rewritten."""
        node, axes = self.node, _axes(self.node)
        _, w, bias = (*node.inputs, None)[:3]
        dims = shape(node.outputs[0])
        if w is None or axes is None or dims is None:
            return
        if constant(w) is None or (bias is not None and constant(bias) is None):
            return
        s = axes[0].stride
        rows, columns = axes
        phase_sizes = [axis.phase_outputs for axis in axes]
        if all(len({(phase.low, phase.width) for phase in axis.phases}) == 1 for axis in axes):
            result, mode = self._convolution(rows.phases, columns.phases, axes), "CRD"
        else:
            phase_results = [self._convolution([y], [x], axes) for y in rows.phases for x in columns.phases]
            result, mode = self._emit("Concat", phase_results, [dims[0], dims[1] * s * s, *phase_sizes], axis=1), "DCR"
        if s > 1:
            interleaved = [size * s for size in phase_sizes]
            result = self._emit("DepthToSpace", [result], [*dims[:2], *interleaved], blocksize=s, mode=mode)
        if [size * s for size in phase_sizes] != list(dims[2:]):
            bounds = ([0, 0], list(dims[2:]), [2, 3])
            starts_ends_axes = [new_constant(self.graph, "bounds", np.array(bound, np.int64)) for bound in bounds]
            result = self._emit("Slice", [result, *starts_ends_axes], list(dims))
        replace_by(node, result)

    def _convolution(self, ys: Sequence[_Phase], xs: Sequence[_Phase], axes: list[_Axis]) -> ir.Value:
        """Insert the convolution of phases `ys` x `xs`, which have the same window.

        Their results are side by side as channels.
        """
        x, w, bias = (*self.node.inputs, None)[:3]
        dims = shape(self.node.outputs[0])
        assert w is not None and dims is not None
        inputs = [x, self._transformed_constant(w, lambda array: _split_weights(array, self.group, ys, xs))]
        count = len(ys) * len(xs)
        if bias is not None:
            inputs.append(self._transformed_constant(bias, lambda array: np.repeat(array, count)))
        window = ys[0], xs[0]
        (top, bottom), (left, right) = (phase.pads(axis.size, axis.phase_outputs) for phase, axis in zip(window, axes))
        return self._emit(
            "Conv", inputs, [dims[0], dims[1] * count, *(axis.phase_outputs for axis in axes)],
            pads=[top, left, bottom, right], kernel_shape=[phase.width for phase in window], group=self.group,
        )  # fmt: skip

    def _transformed_constant(self, value: ir.Value, change: Transform) -> ir.Value:
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


def _axes(node: ir.Node) -> list[_Axis] | None:
    """Return rows and columns of a transposed convolution; None if it has another rank, dilation or unequal strides."""
    x, w, _ = product_operands(node)
    dims, kernel, output_dims = (None if v is None else shape(v) for v in (x, w, node.outputs[0]))
    if dims is None or kernel is None or output_dims is None or len(dims) != 4 or 0 in (*dims, *kernel, *output_dims):
        return None
    try:
        geometry = transposed_windows_of(node, kernel[2:])
    except WindowError:
        return None
    if geometry.stride[0] != geometry.stride[1] or set(geometry.dilation) != {1} or min(geometry.before) < 0:
        return None
    return [
        _Axis(*axis) for axis in zip(geometry.size, geometry.out, geometry.kernel, geometry.stride, geometry.before)
    ]


def _split_weights(weights: Array, group: int, ys: Sequence[_Phase], xs: Sequence[_Phase]) -> Array:
    """Split the weights of a transposed convolution by phases of rows (`ys`) and columns (`xs`).

    [C, M/group, kh, kw] become [M * phases, C/group, h, w] of a convolution.
    """
    c, m = weights.shape[:2]
    by_group = weights.reshape(group, c // group, m, *weights.shape[2:]).swapaxes(1, 2)
    result = np.zeros((group, m, len(ys), len(xs), c // group, ys[0].width, xs[0].width), weights.dtype)
    for ry, y in enumerate(ys):
        for rx, x in enumerate(xs):
            for ky, dy in y.taps:
                for kx, dx in x.taps:
                    result[:, :, ry, rx, :, dy - y.low, dx - x.low] = by_group[:, :, :, ky, kx]
    return result.reshape(group * m * len(ys) * len(xs), c // group, ys[0].width, xs[0].width)
