"""Run onnx's shape inference safely, and correct the windows that onnx infers otherwise than onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from celosia.compiler.graph.operands import named_input
from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.shape_rules import WindowError, transposed_windows, windows

MAX_SLICE_STEP = 1 << 30
"""Largest step of a Slice for onnx, whose counter has 32 bits: beyond, it reads outside of a list or never ends."""
SIZE_MOVING_OPS = frozenset(("Identity", "Cast", "Concat", "Gather", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators on lists of sizes whose results contain no larger number than their operands."""


def infer_with_onnx(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with the shapes that onnx infers.

    onnx also computes lists of sizes ("data propagation"), unless a Slice may have steps beyond MAX_SLICE_STEP.
    """
    graphs = [proto.graph, *_inner_graphs(proto.graph)]
    nodes = [node for graph in graphs for node in graph.node]
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    slices = (node for node in nodes if node.op_type == "Slice")
    steps = [name for node in slices if (name := named_input(node, "steps"))]
    result: onnx.ModelProto = onnx.shape_inference.infer_shapes(
        proto, data_prop=_are_small_constants(steps, nodes, tensors)
    )
    return result


def _inner_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield all graphs inside `graph`, at any depth."""
    waiting = [graph]
    while waiting:
        for node in waiting.pop().node:
            for attr in node.attribute:
                subgraphs = [attr.g] if attr.type == onnx.AttributeProto.GRAPH else list(attr.graphs)
                waiting += subgraphs
                yield from subgraphs


def _are_small_constants(names: list[str], nodes: list[NodeProto], tensors: list[TensorProto]) -> bool:
    """Return whether the tensors of these `names` are constants with no number beyond MAX_SLICE_STEP.

    Inputs of the model count as small: onnx does not know their values either.
    """
    if not names:
        return True
    producers = {name: node for node in nodes for name in node.output}
    constants = {tensor.name: tensor for tensor in tensors}
    if len(producers) < sum(len(node.output) for node in nodes) or len(constants) < len(tensors):
        return False  # several graphs share a name, and any of its values may be meant
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        node = producers.get(name)
        if name in constants:
            tensor = constants[name]
            if tensor.data_location == TensorProto.EXTERNAL or not _is_small(numpy_helper.to_array(tensor)):
                return False
        elif node is not None and node.op_type == "Constant":
            if not all(_is_small(_value(attr)) for attr in node.attribute):
                return False
        elif node is not None and node.op_type in SIZE_MOVING_OPS:
            waiting += [operand for operand in node.input if operand]
        elif node is not None:
            return False
    return True


def _value(attr: onnx.AttributeProto) -> object:
    """Return the Python value of an attribute, tensors as arrays."""
    value = helper.get_attribute_value(attr)
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def _is_small(value: object) -> bool:
    """Return whether no integer in `value` is beyond MAX_SLICE_STEP."""
    array = np.asarray(value)
    return (
        array.dtype.kind not in "iu"
        or not array.size
        or bool(np.all(np.abs(array.astype(np.float64)) <= MAX_SLICE_STEP))
    )


Dims = tuple[int, ...]
"""A static shape."""


def corrected_window_shapes(graph: onnx.GraphProto, inferred: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the right shapes, by name, of outputs of windows that onnx infers otherwise than onnxruntime computes.

    Outputs that depend on a wrong one are left out: the importer infers again all that depends on the result. Raises
    ValueError for attributes without a meaning, and for a difference where onnx is known to be right.
    """
    known = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    types = {value.name: value.type.tensor_type for value in (*graph.input, *inferred.value_info, *inferred.output)}
    wrong: dict[str, onnx.ValueInfoProto] = {}
    dependent: set[str] = set()
    for node in graph.node:
        if dependent.intersection(node.input):
            dependent.update(node.output)
            continue
        if node.domain not in ("", "ai.onnx") or not op_spec(node.op_type).windows:
            continue
        weights_number = op_spec(node.op_type).weights
        x, w, y = (
            _dims(known, types, name) for name in (node.input[0], node.input[weights_number or 0], node.output[0])
        )
        if x is None or w is None or y is None or len(x) < 3:
            continue
        attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
        attrs["auto_pad"] = attrs.get("auto_pad", b"NOTSET").decode()
        label = f"{node.op_type} ({node.name or node.output[0]})"
        try:
            out = _window_outputs(node.op_type, attrs, x[2:], None if weights_number is None else w[2:])
        except WindowError as error:
            raise ValueError(f"{label}: {error}") from None
        if out == y[2:]:
            continue
        is_partial = len(y) < len(x) and "output_shape" in attrs  # onnx stops where an output is shorter than the input
        if not (_onnx_may_differ(node.op_type, attrs) or is_partial) or len(y) < 2:
            raise ValueError(f"{label} has windows with {list(out)} outputs, of which onnx infers {list(y[2:])}")
        for name in filter(None, node.output):
            wrong[name] = onnx.helper.make_tensor_value_info(name, types[name].elem_type, [*y[:2], *out])
        dependent.update(node.output)
    return wrong


def _window_outputs(op: str, attrs: Mapping[str, Any], size: Dims, kernel: Dims | None) -> Dims:
    """Return the sizes of the output of an operator with windows, as onnxruntime computes them.

    size, kernel: of the input and the weights, without batch and channels, as the result.
    """
    return (
        transposed_windows(attrs, size, kernel).out if op == "ConvTranspose" else windows(op, attrs, size, kernel).out
    )


def _onnx_may_differ(op: str, attrs: Mapping[str, Any]) -> bool:
    """Return whether onnx is known to infer other sizes than onnxruntime computes for these attributes.

    ConvTranspose: automatic padding where kernels are shorter than strides. Pooling: a last window that would begin
    outside (ceil_mode), and automatic padding, which onnxruntime computes without dilations and onnx with them.
    """
    same = attrs["auto_pad"] in ("SAME_UPPER", "SAME_LOWER")
    if op == "ConvTranspose":
        return same
    return op.endswith("Pool") and bool(attrs.get("ceil_mode") or (same and max(attrs.get("dilations") or [1]) > 1))


def _dims(known: Mapping[str, Dims], types: Mapping[str, Any], name: str) -> Dims | None:
    """Return the shape of the tensor `name`, from constants (`known`) or `types`; None where a size is not known."""
    if name in known:
        return known[name]
    kind = types.get(name)
    if kind is None or not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return None
    return tuple(dim.dim_value for dim in kind.shape.dim)
