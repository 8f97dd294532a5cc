"""Inputs of a model, known before it is compiled, and the same model for other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import read
from celosia.compiler.graph.inference import inferred
from celosia.compiler.program import TensorInfo
from celosia.compiler.program.dtypes import ONNX_TYPES


def inputs_of(source: str | Path | onnx.ModelProto) -> tuple[TensorInfo, ...]:
    """The inputs of an ONNX model; -1 stands for sizes that it leaves open. ModelError."""
    graph = (source if isinstance(source, onnx.ModelProto) else read(Path(source), data=False)).graph
    constants = {tensor.name for tensor in (*graph.initializer, *(each.values for each in graph.sparse_initializer))}
    return tuple(_info(value) for value in graph.input if value.name not in constants)


def is_quantised(proto: onnx.ModelProto) -> bool:
    """Whether a model computes with quantised integers already."""
    return any("QuantizeLinear" in node.op_type or node.op_type.startswith("QLinear") for node in proto.graph.node)


def _info(value: onnx.ValueInfoProto) -> TensorInfo:
    kind, inner = "tensor", value.type
    while (which := inner.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = which.removesuffix("_type")
        inner = getattr(inner, which).elem_type
    tensor = inner.tensor_type
    if which != "tensor_type" or tensor.elem_type not in ONNX_TYPES:
        raise ModelError(f"input {value.name!r} has no element type; export the model with types")
    if kind == "tensor" and not tensor.HasField("shape"):
        raise ModelError(
            f"input {value.name!r} has no shape; give it one with --shape (shapes= in Python), or export it with one"
        )
    dims = (dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return TensorInfo(value.name, ONNX_TYPES[tensor.elem_type], tuple(max(size, -1) for size in dims), kind)


def resized(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """`proto` for inputs of `shapes`, by name. What it declares of other shapes is inferred again, and not believed."""
    sized = onnx.ModelProto()
    sized.CopyFrom(proto)
    for value in sized.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ())):
            dim.dim_value = size
    del sized.graph.value_info[:]
    for value in sized.graph.output:
        value.type.tensor_type.ClearField("shape")
    return inferred(sized)
