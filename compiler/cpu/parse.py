"""Convert ONNX nodes and subgraphs to operators of the host runtime."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import ONNX_TYPES
from celosia.compiler.program.host.op import Body, HostOp, bodies, check_size

Array = NDArray[Any]


def parse(node: onnx.NodeProto, opsets: Mapping[str, int]) -> HostOp:
    """Convert `node`, with its subgraphs, to a HostOp. opsets: version of each domain that the model imports."""
    attrs = {attr.name: _attribute(attr, opsets) for attr in node.attribute}
    key = b"".join(sorted(attr.SerializeToString(deterministic=True) for attr in node.attribute))
    domain = "" if node.domain == "ai.onnx" else node.domain
    return HostOp(
        node.op_type, domain, node.name, tuple(node.input), tuple(node.output), attrs, opsets.get(domain, 1), key
    )


def _attribute(attr: onnx.AttributeProto, opsets: Mapping[str, int]) -> Any:
    """Convert an attribute to a Python value; a graph becomes a Body. opsets: version of each domain."""
    value = onnx.helper.get_attribute_value(attr)
    match attr.type:
        case onnx.AttributeProto.STRING:
            return value.decode()
        case onnx.AttributeProto.STRINGS:
            return [element.decode() for element in value]
        case onnx.AttributeProto.TENSOR:
            return to_array(value)
        case onnx.AttributeProto.TENSORS:
            return [to_array(element) for element in value]
        case onnx.AttributeProto.GRAPH:
            return parse_body(value, opsets)
        case onnx.AttributeProto.GRAPHS:
            return [parse_body(element, opsets) for element in value]
        case onnx.AttributeProto.SPARSE_TENSOR:
            return dense(value)
        case onnx.AttributeProto.FLOATS | onnx.AttributeProto.INTS:
            return list(value)
        case onnx.AttributeProto.TYPE_PROTO | onnx.AttributeProto.TYPE_PROTOS:
            return None  # the type of an empty optional or sequence, which Python does not need
    return value


def parse_body(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> Body:
    """Convert a subgraph to a Body, with the names that it captures from outside. opsets: as in `parse`."""
    inputs = tuple(value.name for value in graph.input)
    outputs = tuple(value.name for value in graph.output)
    constants = {tensor.name: to_array(tensor) for tensor in graph.initializer}
    constants |= {tensor.values.name: dense(tensor) for tensor in graph.sparse_initializer}
    ops = tuple(parse(node, opsets) for node in graph.node)
    known = {"", *inputs, *constants}
    captured: dict[str, None] = {}
    for op in ops:
        read = [*op.inputs, *(name for body in bodies(op) for name in body.captured)]
        captured |= dict.fromkeys(name for name in read if name not in known)
        known |= set(op.outputs)
    captured |= dict.fromkeys(name for name in outputs if name not in known)
    return Body(
        inputs, outputs, constants, ops, tuple(captured), tuple(_tensor_type(value.type) for value in graph.output)
    )


def _tensor_type(kind: onnx.TypeProto) -> tuple[str, tuple[int, ...]]:
    """Return (element type, shape) of a tensor; float32 and 0 where they are not known."""
    tensor = kind.tensor_type
    return ONNX_TYPES.get(tensor.elem_type, "float32"), tuple(max(dim.dim_value, 0) for dim in tensor.shape.dim)


def to_array(tensor: onnx.TensorProto) -> Array:
    """Convert a tensor to an array; strings become an object array of str."""
    array = np.asarray(onnx.numpy_helper.to_array(tensor))
    if tensor.data_type == onnx.TensorProto.STRING:
        texts = [element.decode() if isinstance(element, bytes) else str(element) for element in array.reshape(-1)]
        array = np.array(texts, object).reshape(array.shape)
    return array


def dense(tensor: onnx.SparseTensorProto) -> Array:
    """Convert a sparse tensor, whose indices are element numbers or coordinates, to a dense array."""
    values, indices = to_array(tensor.values), to_array(tensor.indices)
    shape = tuple(tensor.dims)
    check_size(prod(shape) * values.itemsize, "a sparse tensor")
    array = np.zeros(prod(shape), values.dtype)
    array[indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)] = values
    return array.reshape(shape)
