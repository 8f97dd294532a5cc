"""Transposed convolutions as convolutions: one for each phase of the output, side by side as channels.

    y = ConvTranspose(x, w), stride s     ->     z = Conv(x, v)       s * s times the channels
                                                 y = DepthToSpace(z)

Output position o = s * q + r reads x[q + d] * w[k] for the k with r + before - k = s * d, `before` being the padding at
the begin. So phase r is a convolution of the positions q with the taps of w whose remainder fits; phases with fewer
taps have zeros. With a kernel of s there is one tap for each, and nothing is multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.names import values
from celosia.compiler.graph.values import attribute, attributes, constant, is_op, new_constant, replace_by, shape
from celosia.compiler.names import unused_name

Array = NDArray[Any]
Change = Callable[[Array], Array]


def convolve_transposed(model: ir.Model) -> None:
    """Rewrite those of images whose weights are constant."""
    nodes = [node for node in model.graph if is_op(node, "ConvTranspose")]
    taken = {value.name for value in values(model.graph) if value.name} if nodes else set()
    for node in nodes:
        _Phases(model.graph, node, taken).rewrite()


@dataclass(frozen=True)
class _Axis:
    """One axis: `size` inputs and `out` outputs, with `before` outputs cut at the begin."""

    size: int
    out: int
    kernel: int
    stride: int
    before: int

    @property
    def taps(self) -> list[tuple[int, int, int]]:
        """(phase r, index k of the kernel, distance d) of all products."""
        pairs = ((r, k, r + self.before - k) for r in range(self.stride) for k in range(self.kernel))
        return [(r, k, distance // self.stride) for r, k, distance in pairs if distance % self.stride == 0]

    @property
    def reach(self) -> tuple[int, int]:
        """The smallest and the largest distance, 0 among them."""
        distances = [0, *(d for _, _, d in self.taps)]
        return min(distances), max(distances)

    @property
    def width(self) -> int:
        low, high = self.reach
        return high - low + 1

    @property
    def pads(self) -> tuple[int, int]:
        before = -self.reach[0]
        return before, max(0, -(-self.out // self.stride) - self.size - before + self.width - 1)

    @property
    def made(self) -> int:
        """Outputs, of which the first `out` are wanted."""
        return (self.size + sum(self.pads) - self.width + 1) * self.stride


class _Phases:
    """One transposed convolution. taken: names of values."""

    def __init__(self, graph: ir.Graph, node: ir.Node, taken: set[str]) -> None:
        self.graph, self.node, self.taken = graph, node, taken
        self.group = int(attribute(node, "group", 1))

    def rewrite(self) -> None:
        node, axes = self.node, _axes(self.node)
        x, w, bias = (*node.inputs, None)[:3]
        dims = shape(node.outputs[0])
        if x is None or w is None or axes is None or dims is None:
            return
        s = axes[0].stride

        inputs = [x, self._changed(w, lambda array: _by_phases(array, self.group, axes))]
        if bias is not None:
            inputs.append(self._changed(bias, lambda array: np.repeat(array, s * s)))
        if None in inputs:
            return
        (top, bottom), (left, right) = (axis.pads for axis in axes)
        made = [axis.made for axis in axes]
        found = self._emit(
            "Conv", inputs, [dims[0], dims[1] * s * s, *(size // s for size in made)],
            pads=[top, left, bottom, right], kernel_shape=[axis.width for axis in axes], group=self.group,
        )  # fmt: skip
        if s > 1:
            found = self._emit("DepthToSpace", [found], [*dims[:2], *made], blocksize=s, mode="CRD")
        if made != list(dims[2:]):
            bounds = ([0, 0], list(dims[2:]), [2, 3])
            starts_ends_axes = [new_constant(self.graph, "bounds", np.array(each, np.int64)) for each in bounds]
            found = self._emit("Slice", [found, *starts_ends_axes], list(dims))
        replace_by(node, found)

    def _changed(self, value: ir.Value, change: Change) -> ir.Value | None:
        """A constant, changed; None where it is none."""
        array = constant(value)
        return None if array is None else new_constant(self.graph, f"{value.name}.phases", change(array))

    def _emit(self, op: str, inputs: Sequence[ir.Value | None], dims: Sequence[int], **attrs: Any) -> ir.Value:
        """The output of a new operator before the old one."""
        y = self.node.outputs[0]
        name = unused_name(f"{y.name}.{op.lower()}", self.taken)
        kind = ir.TensorType(y.dtype or ir.DataType.FLOAT)
        out = ir.Value(name=name, shape=ir.Shape([int(size) for size in dims]), type=kind)
        label = self.node.name if op == "Conv" else name
        self.graph.insert_before(self.node, ir.Node("", op, inputs, attributes(**attrs), outputs=[out], name=label))
        return out


def _axes(node: ir.Node) -> list[_Axis] | None:
    """Rows and columns; None for what is not rewritten."""
    x, w = node.inputs[:2]
    dims, kernel, out = (None if v is None else shape(v) for v in (x, w, node.outputs[0]))
    if dims is None or kernel is None or out is None or len(dims) != 4 or 0 in (*dims, *kernel, *out):
        return None
    strides, dilations = attribute(node, "strides", [1, 1]), attribute(node, "dilations", [1, 1])
    pads = attribute(node, "pads", [0, 0, 0, 0])
    if strides[0] != strides[1] or set(dilations) != {1} or min(pads) < 0:
        return None
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET" or "output_shape" in node.attributes:
        return None
    axes = [_Axis(dims[d], out[d], kernel[d], strides[d - 2], pads[d - 2]) for d in (2, 3)]
    return axes if all(axis.made >= axis.out for axis in axes) else None


def _by_phases(weights: Array, group: int, axes: list[_Axis]) -> Array:
    """[C, M/group, kh, kw] of the transposed convolution as [M * s * s, C/group, h, w] of the convolution."""
    c, m = weights.shape[:2]
    rows, columns = axes
    s, (top, _), (left, _) = rows.stride, rows.reach, columns.reach
    split = weights.reshape(group, c // group, m, *weights.shape[2:]).swapaxes(1, 2)
    found = np.zeros((group, m, s, s, c // group, rows.width, columns.width), weights.dtype)
    for ry, ky, dy in rows.taps:
        for rx, kx, dx in columns.taps:
            found[:, :, ry, rx, :, dy - top, dx - left] = split[:, :, :, ky, kx]
    return found.reshape(group * m * s * s, c // group, rows.width, columns.width)
