"""Transposed convolutions as convolutions: one for each phase of the output, side by side as channels.

    y = ConvTranspose(x, w), stride s     ->     z = Conv(x, v)       s * s times the channels
                                                 y = DepthToSpace(z)

Output position o = s * q + r reads x[q + d] * w[k] for the k with r + before - k = s * d, `before` being the padding at
the begin. So phase r is a convolution of the positions q with the taps of w whose remainder fits. Where all phases read
the same distances d, as with a kernel of s, they are one convolution; else each is one of its own, and no tap is zero:

    z = Concat(Conv(x, v0), Conv(x, v1), ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.expr.unique_names import unused_name
from celosia.compiler.graph.names import values
from celosia.compiler.graph.operands import product_operands
from celosia.compiler.graph.values import (
    RESERVED,
    attribute,
    attributes,
    constant,
    is_op,
    new_constant,
    replace_by,
    shape,
)
from celosia.compiler.graph.windows import transposed_windows_of
from celosia.compiler.program.host.window_geometry import WindowError

Array = NDArray[Any]
Change = Callable[[Array], Array]


def convolve_transposed(model: ir.Model) -> None:
    """Rewrite those of images whose weights are constant."""
    nodes = [node for node in model.graph if is_op(node, "ConvTranspose")]
    taken = (
        {*(value.name for value in values(model.graph) if value.name), *model.graph.meta.get(RESERVED, ())}
        if nodes
        else set()
    )
    for node in nodes:
        _Phases(model.graph, node, taken).rewrite()


@dataclass(frozen=True)
class _Phase:
    """One phase of an axis. taps: (index of the kernel, distance) of its products, from the `low`est distance on."""

    taps: tuple[tuple[int, int], ...]

    @property
    def low(self) -> int:
        return min(0, *(d for _, d in self.taps)) if self.taps else 0

    @property
    def width(self) -> int:
        return max(0, *(d for _, d in self.taps)) - self.low + 1 if self.taps else 1

    def pads(self, size: int, made: int) -> tuple[int, int]:
        """Pads of `size` inputs for `made` outputs."""
        return -self.low, made - size + self.low + self.width - 1


@dataclass(frozen=True)
class _Axis:
    """One axis: `size` inputs and `out` outputs, with `before` outputs cut at the begin."""

    size: int
    out: int
    kernel: int
    stride: int
    before: int

    @property
    def phases(self) -> list[_Phase]:
        pairs = [[(k, r + self.before - k) for k in range(self.kernel)] for r in range(self.stride)]
        return [_Phase(tuple((k, d // self.stride) for k, d in row if d % self.stride == 0)) for row in pairs]

    @property
    def made(self) -> int:
        """Outputs of each phase; more than are wanted where fewer would need a negative padding."""
        least = max(self.size - each.low - each.width + 1 for each in self.phases)
        return max(-(-self.out // self.stride), least)


class _Phases:
    """One transposed convolution. taken: names of values."""

    def __init__(self, graph: ir.Graph, node: ir.Node, taken: set[str]) -> None:
        self.graph, self.node, self.taken = graph, node, taken
        self.group = int(attribute(node, "group", 1))

    def rewrite(self) -> None:
        node, axes = self.node, _axes(self.node)
        _, w, bias = (*node.inputs, None)[:3]
        dims = shape(node.outputs[0])
        if w is None or axes is None or dims is None:
            return
        if constant(w) is None or (bias is not None and constant(bias) is None):
            return
        s = axes[0].stride
        rows, columns = axes
        made = [axis.made for axis in axes]
        if all(len({(phase.low, phase.width) for phase in axis.phases}) == 1 for axis in axes):
            found, mode = self._convolution(rows.phases, columns.phases, axes), "CRD"
        else:
            parts = [self._convolution([y], [x], axes) for y in rows.phases for x in columns.phases]
            found, mode = self._emit("Concat", parts, [dims[0], dims[1] * s * s, *made], axis=1), "DCR"
        if s > 1:
            wide = [size * s for size in made]
            found = self._emit("DepthToSpace", [found], [*dims[:2], *wide], blocksize=s, mode=mode)
        if [size * s for size in made] != list(dims[2:]):
            bounds = ([0, 0], list(dims[2:]), [2, 3])
            starts_ends_axes = [new_constant(self.graph, "bounds", np.array(each, np.int64)) for each in bounds]
            found = self._emit("Slice", [found, *starts_ends_axes], list(dims))
        replace_by(node, found)

    def _convolution(self, ys: Sequence[_Phase], xs: Sequence[_Phase], axes: list[_Axis]) -> ir.Value:
        """Build the convolution of these phases, which have the same window, side by side as channels."""
        x, w, bias = (*self.node.inputs, None)[:3]
        dims = shape(self.node.outputs[0])
        assert w is not None and dims is not None
        inputs = [x, self._changed(w, lambda array: _by_phases(array, self.group, ys, xs))]
        count = len(ys) * len(xs)
        if bias is not None:
            inputs.append(self._changed(bias, lambda array: np.repeat(array, count)))
        window = ys[0], xs[0]
        (top, bottom), (left, right) = (phase.pads(axis.size, axis.made) for phase, axis in zip(window, axes))
        return self._emit(
            "Conv", inputs, [dims[0], dims[1] * count, *(axis.made for axis in axes)],
            pads=[top, left, bottom, right], kernel_shape=[phase.width for phase in window], group=self.group,
        )  # fmt: skip

    def _changed(self, value: ir.Value, change: Change) -> ir.Value:
        """A constant, changed."""
        array = constant(value)
        assert array is not None
        return new_constant(self.graph, f"{value.name}.phases", change(array))

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
    x, w, _ = product_operands(node)
    dims, kernel, out = (None if v is None else shape(v) for v in (x, w, node.outputs[0]))
    if dims is None or kernel is None or out is None or len(dims) != 4 or 0 in (*dims, *kernel, *out):
        return None
    try:
        to = transposed_windows_of(node, kernel[2:])
    except WindowError:
        return None
    if to.stride[0] != to.stride[1] or set(to.dilation) != {1} or min(to.before) < 0:
        return None
    return [_Axis(*axis) for axis in zip(to.size, to.out, to.kernel, to.stride, to.before)]


def _by_phases(weights: Array, group: int, ys: Sequence[_Phase], xs: Sequence[_Phase]) -> Array:
    """[C, M/group, kh, kw] of the transposed convolution as [M * phases, C/group, h, w] of the convolution."""
    c, m = weights.shape[:2]
    split = weights.reshape(group, c // group, m, *weights.shape[2:]).swapaxes(1, 2)
    found = np.zeros((group, m, len(ys), len(xs), c // group, ys[0].width, xs[0].width), weights.dtype)
    for ry, y in enumerate(ys):
        for rx, x in enumerate(xs):
            for ky, dy in y.taps:
                for kx, dx in x.taps:
                    found[:, :, ry, rx, :, dy - y.low, dx - x.low] = split[:, :, :, ky, kx]
    return found.reshape(group * m * len(ys) * len(xs), c // group, ys[0].width, xs[0].width)
