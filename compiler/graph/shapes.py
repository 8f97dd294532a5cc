"""Shapes and types from the operators' own tensor expressions, and the windows of convolutions and poolings.

Where onnx's inference leaves shapes open they are set. Elsewhere they are compared, because every stage of the compiler
relies on the shapes of the graph.

    x: float[2, 3]                                x: float[2, 3]
    y = com.microsoft.FastGelu(x)        ->       y = com.microsoft.FastGelu(x)
    y: ?                                          y: float[2, 3]

`windows_of` gives the windows of a node as rows and columns of images, if its output has the shape that they give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler.expr import placeholder
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.operands import CustomOp, custom, operand
from celosia.compiler.graph.values import attribute, attributes_of, constant, dtype_name, is_op, shape
from celosia.compiler.ops import OPS, Unsupported, build
from celosia.compiler.ops.registry import TYPES
from celosia.compiler.program.host.hostops.value_types import block_shape_error
from celosia.compiler.program.host.op import DOMAINS
from celosia.compiler.program.host.shape_rules import (
    TransposedWindows,
    WindowError,
    Windows,
    transposed_windows,
    windows,
)


class Disagreement(ModelError):
    """A model declares other shapes or types than its operators compute."""


UNKNOWN = (None, ir.DataType.UNDEFINED)
"""Element types that stand for none."""
MAX_SHAPE_ELEMENTS = 64
"""Elements of the largest constant on whose values a shape may depend."""
AGREED = "celosia.shapes.agreed"
"""Key in the meta of a node: its state (`_state`) when its declared shapes last agreed with its expression."""
ResultTypes = list[tuple[tuple[int, ...], ir.DataType]] | None
"""Shape and element type of each output; None where no expression tells them."""


def infer_shapes(model: ir.Model) -> None:
    """Set open shapes and types of every operator's outputs. Raises Disagreement where the others are wrong."""
    for node in model.graph:
        infer(node, model.graph.opset_imports.get("", 21))
    require_agreement(model)


def require_agreement(model: ir.Model) -> None:
    """Raise Disagreement where declared shapes of an imported model are not those that its operators compute."""
    for contradiction in contradictions(model.graph):
        raise Disagreement(f"{contradiction}; infer its shapes again, or export it anew")


def infer(node: ir.Node, opset: int) -> None:
    """Set open shapes and types of the outputs of `node` from its tensor expression."""
    if all(shape(value) is not None and value.dtype not in UNKNOWN for value in node.outputs):
        return
    if (op := custom(node)) is not None:
        return _infer_custom(node, op)
    for value, (dims, dtype) in zip(node.outputs, result_types(node, opset) or ()):
        value.shape, value.type = ir.Shape(dims), ir.TensorType(dtype)


def _infer_custom(node: ir.Node, op: CustomOp) -> None:
    """Set shapes and types of the outputs of `node`, if those of all its inputs are known."""
    inputs = []
    for value in node.inputs:
        dims = None if value is None else shape(value)
        if value is None or dims is None or value.dtype in (None, ir.DataType.UNDEFINED):
            return
        array = constant(value)
        inputs.append(np.empty(dims, value.dtype.numpy()) if array is None else array)
    for value, (dims, dtype) in zip(node.outputs, op.shapes(inputs, attributes_of(node))):
        value.shape = ir.Shape(dims)
        value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))


def contradictions(graph: ir.Graph) -> Iterator[str]:
    """Yield a sentence for each output whose shape or type is not that of the operator's expression.

    Operators that have not changed since they last agreed are skipped, since passes check the graph often.
    """
    opset = graph.opset_imports.get("", 21)
    for node in graph:
        state = _state(node)
        if node.meta.get(AGREED) == state:
            continue
        disagrees = False
        for value, (dims, dtype) in zip(node.outputs, result_types(node, opset) or ()):
            declared = shape(value)
            if (declared is not None and declared != dims) or value.dtype not in (*UNKNOWN, dtype):
                disagrees = True
                declaration = f"{value.dtype}{'?' if declared is None else list(declared)}"
                yield f"{value.name!r} is {declaration} and {node.op_type} ({node.name}) makes {dtype}{list(dims)}"
        if not disagrees:
            node.meta[AGREED] = state


def _state(node: ir.Node) -> tuple[Any, ...]:
    """Return everything on which a contradiction at `node` may depend."""
    inputs = [(v, v.const_value, *_kind(v)) for v in node.inputs if v is not None]
    return (node.op_type, len(node.inputs), *inputs, *map(_kind, node.outputs), *node.attributes.values())


def _kind(value: ir.Value) -> tuple[Any, ...]:
    """Return shape and type of a value for comparison."""
    return None if value.shape is None else value.shape.dims, value.type


def result_types(node: ir.Node, opset: int) -> ResultTypes:
    """Return shapes and types of the results of `node`; None where they are not known.

    The graph caches them, for equal operators on equal inputs.
    """
    if is_op(node, "GatherBlockQuantized"):
        return _gather_types(node)
    if node.domain not in DOMAINS or node.op_type not in OPS:
        return _types_on_host(node)
    attrs = _attributes(node)
    if attrs is None:
        return None
    inputs: list[tuple[tuple[int, ...], str] | None] = []
    key: list[Any] = [node.op_type, opset, len(node.outputs), *((k, _hashable(v)) for k, v in sorted(attrs.items()))]
    for value in node.inputs:
        input_type = None
        if value is not None:
            dims, dtype = shape(value), value.dtype
            if dims is None or dtype is None or dtype in UNKNOWN or dtype.numpy().name not in TYPES:
                return None
            input_type = dims, dtype.numpy().name
        inputs.append(input_type)
        key.append((input_type, _shape_content(value)))
    cache: dict[Any, ResultTypes] = {} if node.graph is None else node.graph.meta.setdefault("celosia.shapes.made", {})
    if tuple(key) not in cache:
        cache[tuple(key)] = _types_by_expression(node, attrs, opset, inputs)
    return cache[tuple(key)]


def _attributes(node: ir.Node) -> dict[str, Any] | None:
    """Return attributes as Python values; None if there are others than numbers, texts, lists and tensors."""
    attrs: dict[str, Any] = {}
    for name, attr in node.attributes.items():
        if attr.type == ir.AttributeType.TENSOR:
            attrs[name] = np.asarray(attr.value.numpy())
        elif isinstance(attr.value, int | float | str | tuple):
            attrs[name] = list(attr.value) if isinstance(attr.value, tuple) else attr.value
        else:
            return None
    return attrs


def _hashable(value: Any) -> Any:
    """Return an attribute's value as a key of the cache."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return tuple(value) if isinstance(value, list) else value


def _shape_content(value: ir.Value | None) -> bytes | None:
    """Return the bytes of a small constant, on which shapes may depend; b"" for a large one, None for no constant."""
    if value is None or value.const_value is None:
        return None
    array = constant(value) if value.const_value.size <= MAX_SHAPE_ELEMENTS else None
    return b"" if array is None or array.dtype == object else array.tobytes()


def _types_by_expression(
    node: ir.Node, attrs: dict[str, Any], opset: int, inputs: list[tuple[tuple[int, ...], str] | None]
) -> ResultTypes:
    """Build the operator's tensor expression and return the shapes and types of its outputs."""
    tensors = [None if known is None else placeholder(*known, name="x") for known in inputs]
    values = [constant(value) for value in node.inputs]
    try:
        results = build(
            node.op_type, attrs, tensors, values, outputs=len(node.outputs), opset=opset, name=node.name or ""
        )
    except Unsupported:
        return _types_on_host(node)
    return [(tensor.shape, ir.DataType.from_numpy(np.dtype(tensor.dtype))) for tensor in results]


def _gather_types(node: ir.Node) -> ResultTypes:
    """Return shape and type of GatherBlockQuantized, which has no tensor expression: kernels know no 4-bit numbers.

    Raises ModelError where its operands do not fit.
    """
    operands = [value for name in ("data", "scales", "zero_points") if (value := operand(node, name)) is not None]
    indices_value = operand(node, "indices")
    shapes, indices = [shape(value) for value in operands], None if indices_value is None else shape(indices_value)
    dtype, sizes = dtype_name(operands[0]), list(shapes[0] or ())
    bits, gather_axis = attribute(node, "bits", 4) if dtype == "uint8" else 8, attribute(node, "gather_axis", 0)
    if indices is None or None in shapes:
        return None
    axes = gather_axis, attribute(node, "quantize_axis", 1)
    if why := block_shape_error(
        [dims or () for dims in shapes], dtype, bits, attribute(node, "block_size", 128), *axes
    ):
        raise ModelError(f"GatherBlockQuantized ({node.name}): {why}")
    sizes[-1] *= 8 // bits
    result_shape = (*sizes[: gather_axis % len(sizes)], *indices, *sizes[gather_axis % len(sizes) + 1 :])
    return [(result_shape, operands[1].dtype)]  # type: ignore[list-item]


def _types_on_host(node: ir.Node) -> ResultTypes:
    """Return shapes and types of the results of an operator with windows that runs on the host.

    These are values of the input's type, and then int64 indices.
    """
    try:
        dims = _dims_on_host(node)
    except WindowError:
        return None
    if dims is None or node.inputs[0] is None or node.inputs[0].dtype in UNKNOWN:
        return None
    return [(dims, node.inputs[0].dtype), (dims, ir.DataType.INT64)][: len(node.outputs)]


def _dims_on_host(node: ir.Node) -> tuple[int, ...] | None:
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


def windows_of(node: ir.Node, kernel: Sequence[int] | None = None) -> Windows:
    """Return the windows of `node` over the rows and columns of its first input; a 1-D input gets one row.

    kernel: sizes of its weights, if it has weights. Raises WindowError, also where they contradict the output's shape.
    """
    geometry = windows(node.op_type, attributes_of(node), _image_sizes(node.inputs[0]), kernel)
    _check_output_sizes(geometry.out, node)
    return geometry.with_unit_row() if len(geometry.out) == 1 else geometry


def transposed_windows_of(node: ir.Node, kernel: Sequence[int]) -> TransposedWindows:
    """Return the windows of a transposed convolution over rows and columns; a 1-D input gets one row.

    Raises WindowError, also where they contradict the output's shape.
    """
    geometry = transposed_windows(attributes_of(node), _image_sizes(node.inputs[0]), kernel)
    _check_output_sizes(geometry.out, node)
    return geometry.with_unit_row() if len(geometry.out) == 1 else geometry


def whole_image(size: tuple[int, int]) -> Windows:
    """Return the one window of global pooling, over all rows and columns."""
    return windows("GlobalPool", {"kernel_shape": size}, size)


def _image_sizes(value: ir.Value | None) -> tuple[int, ...]:
    """Return the sizes of the axes behind batch and channels. Raises WindowError where there are none."""
    dims = None if value is None else shape(value)
    if dims is None or len(dims) < 3:
        raise WindowError("an input without rows or columns")
    return dims[2:]


def _check_output_sizes(out: tuple[int, ...], node: ir.Node) -> None:
    """Raise WindowError if the windows give other rows and columns than the output's shape has."""
    declared = _image_sizes(node.outputs[0])
    if out != declared:
        raise WindowError(f"windows with {list(out)} outputs, of which its shape has {list(declared)}")
