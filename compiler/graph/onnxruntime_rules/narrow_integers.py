"""Tensors of fewer than 8 bits become bytes, which integer operators multiply.

    wf = DequantizeLinear(w4, scale, z4)      ->      wf = DequantizeLinear(w8, scale)          w8 = w4 - z4, int8

    q = QuantizeLinear(x, scale, z4)          ->      q = Clip(QuantizeLinear(x, scale, z8), low, high)
    y = DequantizeLinear(q, scale, z4)                y = DequantizeLinear(q, scale, z8)

The reals are the same, to the last bit. onnxruntime 1.31 has integer operators of bytes only, and multiplies floats
where weights have fewer bits. What a model with such weights computes is, for us, what onnxruntime makes of it with its
weights in bytes (docs/low_precision.md): this is part of what the model means, so the importer does it.
"""

from __future__ import annotations

from collections.abc import Collection

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.onnxruntime_rules.block_quantised_products import products
from celosia.compiler.graph.operands import operand, quantisation, quantisation_names, set_operand
from celosia.compiler.graph.values import attribute, constant, dtype_name, is_op, new_constant
from celosia.compiler.program.host.hostops.value_types import broadcast_parameters

NARROW = frozenset(("int2", "uint2", "int4", "uint4"))
"""Element types whose values, less a zero point of the same type, fit into int8."""


def widen(model: ir.Model, kept: Collection[ir.Node | None] = ()) -> None:
    """Change `model`, bodies of its operators too: what DequantizeLinear reads of few bits is in bytes.

    kept: those that stay as they are.
    """
    for node in list(model.graph.all_nodes()):
        if is_op(node, "QuantizeLinear") and dtype_name(node.outputs[0]) in NARROW:
            _clip(node)
        if is_op(node, "DequantizeLinear") and node not in kept and _is_narrow(node):
            _widen(node)


def in_bytes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model that onnxruntime computes in integers where we do; `proto` itself where its weights are bytes already.

    What it makes a MatMulNBits of stays as it is, and what has blocks, for which it has no integer operators and, of
    bytes in a product, takes one nevertheless.
    """
    model = ir.from_proto(proto)
    if not any(is_op(node, "DequantizeLinear") and _is_narrow(node) for node in model.graph.all_nodes()):
        return proto
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    kept = [product.dequantise for product in products(model).values()]
    widen(model, [*kept, *(node for node in model.graph.all_nodes() if attribute(node, "block_size", 0))])
    return ir.to_proto(model)


def _is_narrow(node: ir.Node) -> bool:
    return node.inputs[0] is not None and dtype_name(node.inputs[0]) in NARROW


def _widen(node: ir.Node) -> None:
    """Leaves `node` as it is where integers or zero points vary, or these are not of that type and number."""
    x, zero = operand(node, "x"), operand(node, "x_zero_point")
    values, start = constant(x), constant(zero)
    if x is None or values is None or node.graph is None or (zero is not None and zero.dtype != x.dtype):
        return
    if zero is not None and start is None:
        return
    try:
        whole = values.astype(np.int8) - _zeros(node, start, values)
    except ValueError:  # whoever computes it says so
        return
    assert isinstance(node.graph, ir.Graph)
    node.replace_input_with(0, new_constant(node.graph, f"{x.name}_int8", whole))
    node.resize_inputs(2)


def _clip(node: ir.Node) -> None:
    """Leaves `node` as it is where others than DequantizeLinear read its result, or a zero point varies."""
    y, graph = node.outputs[0], node.graph
    readers = [use.node for use in y.uses()]
    pair = [node, *readers]
    if not readers or y.is_graph_output() or not isinstance(graph, ir.Graph) or y.dtype is None:
        return
    if not all(is_op(reader, "DequantizeLinear") and reader.graph is graph for reader in readers):
        return
    zeros = [operand(node, "y_zero_point"), *(operand(reader, "x_zero_point") for reader in readers)]
    if any(zero is not None and (constant(zero) is None or zero.dtype != y.dtype) for zero in zeros):
        return
    info, kind = ml_dtypes.iinfo(y.dtype.numpy()), np.dtype(np.int8 if dtype_name(y)[0] == "i" else np.uint8)
    for each, zero in zip(pair, zeros):
        fixed = constant(zero)
        number = np.zeros((), kind) if fixed is None else fixed.astype(kind)
        name = f"{quantisation(each)[0].name}_zero" if zero is None else f"{zero.name}_{kind}"  # type: ignore[union-attr]
        set_operand(each, quantisation_names(each.op_type)[1], new_constant(graph, name, number))
    node.attributes.pop("output_dtype", None)
    ends = [new_constant(graph, f"{kind}_{end}", np.array(end, kind)) for end in (int(info.min), int(info.max))]
    clipped = ir.Node("", "Clip", [y, *ends])
    clipped.outputs[0].shape, clipped.outputs[0].type = y.shape, ir.TensorType(ir.DataType.from_numpy(kind))
    clipped.outputs[0].name = f"{y.name}_{kind}"
    y.type = ir.TensorType(ir.DataType.from_numpy(kind))
    graph.insert_after(node, clipped)
    for reader in readers:
        reader.replace_input_with(0, clipped.outputs[0])


def _zeros(node: ir.Node, zero: NDArray[np.generic] | None, values: NDArray[np.generic]) -> NDArray[np.int8]:
    if zero is None:
        return np.zeros((), np.int8)
    axis, block = attribute(node, "axis", 1), attribute(node, "block_size", 0)
    return broadcast_parameters(zero.astype(np.int8), values.shape, axis, block)
