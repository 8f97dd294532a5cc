"""Widen tensors of fewer than 8 bits to bytes, which integer operators multiply.

    wf = DequantizeLinear(w4, scale, z4)      ->      wf = DequantizeLinear(w8, scale)          w8 = w4 - z4, int8

    q = QuantizeLinear(x, scale, z4)          ->      q = Clip(QuantizeLinear(x, scale, z8), low, high)
    y = DequantizeLinear(q, scale, z4)                y = DequantizeLinear(q, scale, z8)

The reals are the same, to the last bit. onnxruntime 1.31 has integer operators of bytes only, and multiplies floats
where weights have fewer bits. We define the bytes of such a model as those that onnxruntime computes with its weights
in bytes (docs/low_precision.md), so this is part of the import.
"""

from __future__ import annotations

from collections.abc import Collection

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.onnxruntime_rules.block_quantised_products import find_block_products
from celosia.compiler.graph.operands import operand, quantisation, quantisation_names, set_operand
from celosia.compiler.graph.values import attribute, constant, dtype_name, is_op, new_constant
from celosia.compiler.program.host.hostops.value_types import broadcast_parameters

NARROW = frozenset(("int2", "uint2", "int4", "uint4"))
"""Element types whose values, less a zero point of the same type, fit into int8."""


def widen(model: ir.Model, unchanged: Collection[ir.Node | None] = ()) -> None:
    """Widen to bytes the narrow integers that DequantizeLinears read or QuantizeLinears make, in bodies too.

    unchanged: nodes that stay as they are.
    """
    for node in list(model.graph.all_nodes()):
        if is_op(node, "QuantizeLinear") and dtype_name(node.outputs[0]) in NARROW:
            _widen_quantise(node)
        if is_op(node, "DequantizeLinear") and node not in unchanged and _is_narrow(node):
            _widen_dequantise(node)


def in_bytes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that onnxruntime computes in integers where we do; `proto` itself if it has no narrow integers.

    Two kinds of DequantizeLinear stay: those that become part of a MatMulNBits, and those by blocks. For blocks
    onnxruntime has no integer operators, yet would use one for a product of bytes.
    """
    model = ir.from_proto(proto)
    if not any(is_op(node, "DequantizeLinear") and _is_narrow(node) for node in model.graph.all_nodes()):
        return proto
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    unchanged = [product.dequantise for product in find_block_products(model).values()]
    widen(model, [*unchanged, *(node for node in model.graph.all_nodes() if attribute(node, "block_size", 0))])
    return ir.to_proto(model)


def _is_narrow(node: ir.Node) -> bool:
    """Return whether a node's first input has fewer than 8 bits."""
    return node.inputs[0] is not None and dtype_name(node.inputs[0]) in NARROW


def _widen_dequantise(node: ir.Node) -> None:
    """Let a DequantizeLinear read int8 without a zero point; leave it if its operands vary or do not fit."""
    x, zero = operand(node, "x"), operand(node, "x_zero_point")
    values, zero_values = constant(x), constant(zero)
    if x is None or values is None or node.graph is None or (zero is not None and zero.dtype != x.dtype):
        return
    if zero is not None and zero_values is None:
        return
    try:
        widened = values.astype(np.int8) - _broadcast_zeros(node, zero_values, values)
    except ValueError:  # the operator stays, and its computation reports the error
        return
    assert isinstance(node.graph, ir.Graph)
    node.replace_input_with(0, new_constant(node.graph, f"{x.name}_int8", widened))
    node.resize_inputs(2)


def _widen_quantise(node: ir.Node) -> None:
    """Let a QuantizeLinear and its readers use bytes, with a Clip between; leave it if others read it or zeros vary."""
    y, graph = node.outputs[0], node.graph
    readers = [use.node for use in y.uses()]
    nodes = [node, *readers]
    if not readers or y.is_graph_output() or not isinstance(graph, ir.Graph) or y.dtype is None:
        return
    if not all(is_op(reader, "DequantizeLinear") and reader.graph is graph for reader in readers):
        return
    zeros = [operand(node, "y_zero_point"), *(operand(reader, "x_zero_point") for reader in readers)]
    if any(zero is not None and (constant(zero) is None or zero.dtype != y.dtype) for zero in zeros):
        return
    info, wide_dtype = ml_dtypes.iinfo(y.dtype.numpy()), np.dtype(np.int8 if dtype_name(y)[0] == "i" else np.uint8)
    for quantiser, zero in zip(nodes, zeros):
        array = constant(zero)
        wide_zero = np.zeros((), wide_dtype) if array is None else array.astype(wide_dtype)
        name = f"{quantisation(quantiser)[0].name}_zero" if zero is None else f"{zero.name}_{wide_dtype}"  # type: ignore[union-attr]
        set_operand(quantiser, quantisation_names(quantiser.op_type)[1], new_constant(graph, name, wide_zero))
    node.attributes.pop("output_dtype", None)
    bounds = [
        new_constant(graph, f"{wide_dtype}_{bound}", np.array(bound, wide_dtype))
        for bound in (int(info.min), int(info.max))
    ]
    clipped = ir.Node("", "Clip", [y, *bounds])
    clipped.outputs[0].shape, clipped.outputs[0].type = y.shape, ir.TensorType(ir.DataType.from_numpy(wide_dtype))
    clipped.outputs[0].name = f"{y.name}_{wide_dtype}"
    y.type = ir.TensorType(ir.DataType.from_numpy(wide_dtype))
    graph.insert_after(node, clipped)
    for reader in readers:
        reader.replace_input_with(0, clipped.outputs[0])


def _broadcast_zeros(node: ir.Node, zero: NDArray[np.generic] | None, values: NDArray[np.generic]) -> NDArray[np.int8]:
    """Return the zero points as int8, in a shape that broadcasts to `values`."""
    if zero is None:
        return np.zeros((), np.int8)
    axis, block = attribute(node, "axis", 1), attribute(node, "block_size", 0)
    return broadcast_parameters(zero.astype(np.int8), values.shape, axis, block)
