"""Windows of graph nodes, by compiler/program/host/shape_rules.py, as rows and columns of images."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.values import attributes_of, constant, shape
from celosia.compiler.program.host.shape_rules import (
    TransposedWindows,
    WindowError,
    Windows,
    transposed_windows,
    windows,
)


def windows_of(node: ir.Node, kernel: Sequence[int] | None = None) -> Windows:
    """Return the windows of `node` over the rows and columns of its first input; a 1-D input gets one row.

    kernel: sizes of its weights, if it has weights. Raises WindowError, also where they contradict the output's shape.
    """
    geometry = windows(node.op_type, attributes_of(node), _sizes(node.inputs[0]), kernel)
    _check_output_sizes(geometry.out, node)
    return geometry.with_unit_row() if len(geometry.out) == 1 else geometry


def transposed_windows_of(node: ir.Node, kernel: Sequence[int]) -> TransposedWindows:
    """Return the windows of a transposed convolution over rows and columns; a 1-D input gets one row.

    Raises WindowError, also where they contradict the output's shape.
    """
    geometry = transposed_windows(attributes_of(node), _sizes(node.inputs[0]), kernel)
    _check_output_sizes(geometry.out, node)
    return geometry.with_unit_row() if len(geometry.out) == 1 else geometry


def dims_on_host(node: ir.Node) -> tuple[int, ...] | None:
    """Return the output shape of an operator with windows that only the host computes; None for other operators.

    These have no tensor expression to derive it from. Raises WindowError.
    """
    x, attrs = None if not node.inputs or node.inputs[0] is None else shape(node.inputs[0]), attributes_of(node)
    if x is None or node.domain not in ("", "ai.onnx"):
        return None
    match node.op_type:
        case "MaxPool" | "LpPool":
            return (*x[:2], *windows(node.op_type, attrs, x[2:]).out)
        case "MaxUnpool" if len(node.inputs) == 2:
            return (*x[:2], *transposed_windows(attrs, x[2:]).out)
        case "Col2Im":
            image, kernel = (constant(operand(node, name)) for name in ("image_shape", "block_shape"))
            return None if image is None or kernel is None else (x[0], x[1] // prod(kernel.tolist()), *image.tolist())
    return None


def whole_image(size: tuple[int, int]) -> Windows:
    """Return the one window of global pooling, over all rows and columns."""
    return windows("GlobalPool", {"kernel_shape": size}, size)


def _sizes(value: ir.Value | None) -> tuple[int, ...]:
    """Return the sizes of the axes behind batch and channels. Raises WindowError where there are none."""
    dims = None if value is None else shape(value)
    if dims is None or len(dims) < 3:
        raise WindowError("an input without rows or columns")
    return dims[2:]


def _check_output_sizes(out: tuple[int, ...], node: ir.Node) -> None:
    """Raise WindowError if the windows give other rows and columns than the output's shape has."""
    declared = _sizes(node.outputs[0])
    if out != declared:
        raise WindowError(f"windows with {list(out)} outputs, of which its shape has {list(declared)}")
