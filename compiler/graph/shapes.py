"""Shapes and types from the operators' own tensor expressions: where onnx's inference leaves them open they are set,
and where it does not they are compared, for every stage of the compiler takes the shapes of the graph.

x: float[2, 3]                                x: float[2, 3]
y = com.microsoft.FastGelu(x)        ->       y = com.microsoft.FastGelu(x)
y: ?                                          y: float[2, 3]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler.expr import placeholder
from celosia.compiler.graph.custom import custom, infer_custom
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.values import attribute, constant, dtype_name, is_op, shape
from celosia.compiler.graph.windows import dims_on_host
from celosia.compiler.ops import OPS, Unsupported, build
from celosia.compiler.ops.types import TYPES
from celosia.compiler.program.host.hostops.value_types import block_shape_error
from celosia.compiler.program.host.op import DOMAINS
from celosia.compiler.program.host.window_geometry import WindowError


class Disagreement(ModelError):
    """Shapes that a model declares and its operators do not make."""


UNKNOWN = (None, ir.DataType.UNDEFINED)
FEW = 64
"""Elements of constants that say what a shape is, at most."""
AGREED = "celosia.shapes.agreed"
"""In an operator's metadata: what it was like when its shapes were right."""
Made = list[tuple[tuple[int, ...], ir.DataType]] | None
"""Shape and type of each output; None where the expression is not known."""


def infer_shapes(model: ir.Model) -> None:
    """Set what is still open of every operator's outputs. Disagreement where the rest is not what operators make."""
    for node in model.graph:
        infer(node, model.graph.opset_imports.get("", 21))
    require_agreement(model)


def require_agreement(model: ir.Model) -> None:
    """Disagreement where the shapes of a model as it was imported are not what its operators make."""
    for what in contradictions(model.graph):
        raise Disagreement(f"{what}; infer its shapes again, or export it anew")


def infer(node: ir.Node, opset: int) -> None:
    """Set the shapes of outputs that are still open, from the operator's tensor expression."""
    if all(shape(value) is not None and value.dtype not in UNKNOWN for value in node.outputs):
        return
    if (op := custom(node)) is not None:
        return infer_custom(node, op)
    for value, (dims, dtype) in zip(node.outputs, made_by(node, opset) or ()):
        value.shape, value.type = ir.Shape(dims), ir.TensorType(dtype)


def contradictions(graph: ir.Graph) -> Iterator[str]:
    """Outputs of operators whose shape or type is another than that of the operator's expression. Operators that are
    as they were when they last agreed are passed over.
    """
    opset = graph.opset_imports.get("", 21)
    for node in graph:
        state = _state(node)
        if node.meta.get(AGREED) == state:
            continue
        wrong = False
        for value, (dims, dtype) in zip(node.outputs, made_by(node, opset) or ()):
            known = shape(value)
            if (known is not None and known != dims) or value.dtype not in (*UNKNOWN, dtype):
                wrong = True
                has = f"{value.dtype}{'?' if known is None else list(known)}"
                yield f"{value.name!r} is {has} and {node.op_type} ({node.name}) makes {dtype}{list(dims)}"
        if not wrong:
            node.meta[AGREED] = state


def _state(node: ir.Node) -> tuple[Any, ...]:
    """All that a contradiction may depend on."""
    inputs = [(v, v.const_value, *_kind(v)) for v in node.inputs if v is not None]
    return (node.op_type, len(node.inputs), *inputs, *map(_kind, node.outputs), *node.attributes.values())


def _kind(value: ir.Value) -> tuple[Any, ...]:
    return None if value.shape is None else value.shape.dims, value.type


def made_by(node: ir.Node, opset: int) -> Made:
    """Return shapes and types of the results of `node`. The graph caches them for equal operators on equal inputs."""
    if is_op(node, "GatherBlockQuantized"):
        return _gathered(node)
    if node.domain not in DOMAINS or node.op_type not in OPS:
        return _made_on_host(node)
    attrs = _attributes(node)
    if attrs is None:
        return None
    inputs: list[tuple[tuple[int, ...], str] | None] = []
    key: list[Any] = [node.op_type, opset, len(node.outputs), *((k, _hashable(v)) for k, v in sorted(attrs.items()))]
    for value in node.inputs:
        known = None
        if value is not None:
            dims, dtype = shape(value), value.dtype
            if dims is None or dtype is None or dtype in UNKNOWN or dtype.numpy().name not in TYPES:
                return None
            known = dims, dtype.numpy().name
        inputs.append(known)
        key.append((known, _content(value)))
    kept: dict[Any, Made] = {} if node.graph is None else node.graph.meta.setdefault("celosia.shapes.made", {})
    if tuple(key) not in kept:
        kept[tuple(key)] = _built(node, attrs, opset, inputs)
    return kept[tuple(key)]


def _attributes(node: ir.Node) -> dict[str, Any] | None:
    """None where there are others than numbers, texts, lists of them and tensors."""
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
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return tuple(value) if isinstance(value, list) else value


def _content(value: ir.Value | None) -> bytes | None:
    """Return the part of a constant on which shapes may depend; weights count by shape and type alone."""
    if value is None or value.const_value is None:
        return None
    array = constant(value) if value.const_value.size <= FEW else None
    return b"" if array is None or array.dtype == object else array.tobytes()


def _built(node: ir.Node, attrs: dict[str, Any], opset: int, inputs: list[tuple[tuple[int, ...], str] | None]) -> Made:
    tensors = [None if known is None else placeholder(*known, name="x") for known in inputs]
    values = [constant(value) for value in node.inputs]
    try:
        made = build(node.op_type, attrs, tensors, values, outputs=len(node.outputs), opset=opset, name=node.name or "")
    except Unsupported:
        return _made_on_host(node)
    return [(tensor.shape, ir.DataType.from_numpy(np.dtype(tensor.dtype))) for tensor in made]


def _gathered(node: ir.Node) -> Made:
    """Shape of GatherBlockQuantized, which is no tensor expression: its numbers may have fewer bits than kernels
    know."""
    given = [value for name in ("data", "scales", "zero_points") if (value := operand(node, name)) is not None]
    places = operand(node, "indices")
    shapes, indices = [shape(value) for value in given], None if places is None else shape(places)
    dtype, sizes = dtype_name(given[0]), list(shapes[0] or ())
    bits, along = attribute(node, "bits", 4) if dtype == "uint8" else 8, attribute(node, "gather_axis", 0)
    if indices is None or None in shapes:
        return None
    axes = along, attribute(node, "quantize_axis", 1)
    if why := block_shape_error(
        [dims or () for dims in shapes], dtype, bits, attribute(node, "block_size", 128), *axes
    ):
        raise ModelError(f"GatherBlockQuantized ({node.name}): {why}")
    sizes[-1] *= 8 // bits
    made = (*sizes[: along % len(sizes)], *indices, *sizes[along % len(sizes) + 1 :])
    return [(made, given[1].dtype)]  # type: ignore[list-item]


def _made_on_host(node: ir.Node) -> Made:
    """By those whose shapes follow from windows: values of the input's type, and their places."""
    try:
        dims = dims_on_host(node)
    except WindowError:
        return None
    if dims is None or node.inputs[0] is None or node.inputs[0].dtype in UNKNOWN:
        return None
    return [(dims, node.inputs[0].dtype), (dims, ir.DataType.INT64)][: len(node.outputs)]
