"""onnx's inference of shapes, kept from what it does not survive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from celosia.compiler.graph.operands import named_input

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
