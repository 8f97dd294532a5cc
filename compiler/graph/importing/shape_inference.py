"""onnx's inference of shapes, kept from what it does not survive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from celosia.compiler.graph.operands import named_input
from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.window_geometry import WindowError, transposed_windows, windows

FURTHEST = 1 << 30
"""Steps beyond which onnx, whose counter has 32 bits, reads outside of a list that it slices, or never ends."""
MOVES = frozenset(("Identity", "Cast", "Concat", "Gather", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators that make no larger numbers than they take."""


def inferred(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` with the shapes that onnx infers; also from lists of sizes that it computes, where no step of a Slice may
    be beyond FURTHEST."""
    graphs = [proto.graph, *_inner(proto.graph)]
    nodes = [node for graph in graphs for node in graph.node]
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    slices = (node for node in nodes if node.op_type == "Slice")
    steps = [name for node in slices if (name := named_input(node, "steps"))]
    result: onnx.ModelProto = onnx.shape_inference.infer_shapes(proto, data_prop=_are_near(steps, nodes, tensors))
    return result


def _inner(graph: GraphProto) -> Iterator[GraphProto]:
    waiting = [graph]
    while waiting:
        for node in waiting.pop().node:
            for attr in node.attribute:
                inner = [attr.g] if attr.type == onnx.AttributeProto.GRAPH else list(attr.graphs)
                waiting += inner
                yield from inner


def _are_near(names: list[str], nodes: list[NodeProto], tensors: list[TensorProto]) -> bool:
    """Whether all of these lists are constant, with numbers no further than FURTHEST."""
    if not names:
        return True
    made = {name: node for node in nodes for name in node.output}
    fixed = {tensor.name: tensor for tensor in tensors}
    if len(made) < sum(len(node.output) for node in nodes) or len(fixed) < len(tensors):
        return False  # names of several graphs, of which any may be meant
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        node = made.get(name)
        if name in fixed:
            tensor = fixed[name]
            if tensor.data_location == TensorProto.EXTERNAL or not _is_near(numpy_helper.to_array(tensor)):
                return False
        elif node is not None and node.op_type == "Constant":
            if not all(_is_near(_value(attr)) for attr in node.attribute):
                return False
        elif node is not None and node.op_type in MOVES:
            waiting += [each for each in node.input if each]
        elif node is not None:
            return False
    return True  # inputs of the model are not known to onnx either


def _value(attr: onnx.AttributeProto) -> object:
    value = helper.get_attribute_value(attr)
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def _is_near(value: object) -> bool:
    array = np.asarray(value)
    return array.dtype.kind not in "iu" or not array.size or bool(np.all(np.abs(array.astype(np.float64)) <= FURTHEST))


Dims = tuple[int, ...]


def corrected_window_shapes(graph: onnx.GraphProto, inferred: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the right shapes, by name, of outputs that onnx has inferred otherwise than onnxruntime computes them.

    The importer then infers again all that depends on them. Raises ValueError for attributes without a meaning, and for
    a difference at attributes for which onnx is known to be right.
    """
    known = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    types = {value.name: value.type.tensor_type for value in (*graph.input, *inferred.value_info, *inferred.output)}
    wrong: dict[str, onnx.ValueInfoProto] = {}
    tainted: set[str] = set()
    for node in graph.node:
        if tainted.intersection(node.input):
            tainted.update(node.output)
            continue
        if node.domain not in ("", "ai.onnx") or not op_spec(node.op_type).windows:
            continue
        place = op_spec(node.op_type).weights
        x, w, y = (_dims(known, types, name) for name in (node.input[0], node.input[place or 0], node.output[0]))
        if x is None or w is None or y is None or len(x) < 3:
            continue
        attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
        attrs["auto_pad"] = attrs.get("auto_pad", b"NOTSET").decode()
        label = f"{node.op_type} ({node.name or node.output[0]})"
        try:
            out = _out(node.op_type, attrs, x[2:], None if place is None else w[2:])
        except WindowError as error:
            raise ValueError(f"{label}: {error}") from None
        if out == y[2:]:
            continue
        is_partial = len(y) < len(x) and "output_shape" in attrs  # onnx stops where an output is shorter than the input
        if not (_onnx_may_differ(node.op_type, attrs) or is_partial) or len(y) < 2:
            raise ValueError(f"{label} has windows with {list(out)} outputs, of which onnx infers {list(y[2:])}")
        for name in filter(None, node.output):
            wrong[name] = onnx.helper.make_tensor_value_info(name, types[name].elem_type, [*y[:2], *out])
        tainted.update(node.output)
    return wrong


def _out(op: str, attrs: Mapping[str, Any], size: Dims, kernel: Dims | None) -> Dims:
    return (
        transposed_windows(attrs, size, kernel).out if op == "ConvTranspose" else windows(op, attrs, size, kernel).out
    )


def _onnx_may_differ(op: str, attrs: Mapping[str, Any]) -> bool:
    """Transposed: automatic padding where kernels are shorter than strides. Pooling: a last window that would begin
    outside (ceil_mode), and automatic padding, which onnxruntime makes without dilations and onnx with them."""
    same = attrs["auto_pad"] in ("SAME_UPPER", "SAME_LOWER")
    if op == "ConvTranspose":
        return same
    return op.endswith("Pool") and bool(attrs.get("ceil_mode") or (same and max(attrs.get("dilations") or [1]) > 1))


def _dims(known: Mapping[str, Dims], types: Mapping[str, Any], name: str) -> Dims | None:
    if name in known:
        return known[name]
    kind = types.get(name)
    if kind is None or not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return None
    return tuple(dim.dim_value for dim in kind.shape.dim)
