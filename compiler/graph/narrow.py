"""Constants of fewer than 8 bits become bytes, which integer operators multiply.

    wf = DequantizeLinear(w4, scale, z4)      ->      wf = DequantizeLinear(w8, scale)          w8 = w4 - z4, int8

The reals are the same, to the last bit. onnxruntime 1.31 has integer operators of bytes only, and multiplies floats
where weights have fewer bits. What a model with such weights computes is, for us, what onnxruntime makes of it with its
weights in bytes (docs/low_precision.md): this is part of what the model means, so the importer does it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.values import attribute, constant, dtype_name, is_op, new_constant
from celosia.compiler.graph.weights import rounds
from celosia.compiler.program.host.hostops.types import spread

NARROW = frozenset(("int2", "uint2", "int4", "uint4"))
"""Element types whose values, less a zero point of the same type, fit into int8."""


def widen(model: ir.Model, kept: Collection[ir.Node | None] = ()) -> None:
    """Change `model`, bodies of its operators too: what DequantizeLinear reads of constants of few bits is int8.

    kept: those that stay as they are.
    """
    for node in list(model.graph.all_nodes()):
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
    kept = [node.inputs[1].producer() for node in model.graph if rounds(node) and node.inputs[1] is not None]
    widen(model, [*kept, *(node for node in model.graph.all_nodes() if attribute(node, "block_size", 0))])
    return ir.to_proto(model)


def _is_narrow(node: ir.Node) -> bool:
    return node.inputs[0] is not None and dtype_name(node.inputs[0]) in NARROW


def _widen(node: ir.Node) -> None:
    """Leaves `node` as it is where integers or zero points vary, or these are not of that type and number."""
    x, zero = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
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


def _zeros(node: ir.Node, zero: NDArray[np.generic] | None, values: NDArray[np.generic]) -> NDArray[np.int8]:
    if zero is None:
        return np.zeros((), np.int8)
    axis, block = attribute(node, "axis", 1), attribute(node, "block_size", 0)
    return spread(zero.astype(np.int8), values.shape, axis, block)
