"""Shapes and types that onnx's inference leaves open come from the operators' own tensor expressions.

x: float[2, 3]                                x: float[2, 3]
y = com.microsoft.FastGelu(x)        ->       y = com.microsoft.FastGelu(x)
y: ?                                          y: float[2, 3]
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from celosia.compiler.cpu import Unsupported, build
from celosia.compiler.cpu.ops import OPS
from celosia.compiler.cpu.parse import parse
from celosia.compiler.cpu.runtime.op import DOMAINS, bodies
from celosia.compiler.cpu.types import TYPES
from celosia.compiler.expr import placeholder
from celosia.compiler.graph.custom import custom, infer_custom
from celosia.compiler.graph.values import attribute, constant, is_op, shape

UNKNOWN = (None, ir.DataType.UNDEFINED)


def infer_shapes(model: ir.Model) -> None:
    """Set what is still open of every operator's outputs."""
    for node in model.graph:
        infer(node, model.graph.opset_imports.get("", 21))


def infer(node: ir.Node, opset: int) -> None:
    """Set the shapes of outputs that are still open, from the operator's tensor expression."""
    if all(shape(value) is not None and value.dtype not in UNKNOWN for value in node.outputs):
        return
    if (op := custom(node)) is not None:
        return infer_custom(node, op)
    if is_op(node, "GatherBlockQuantized"):
        return _infer_gathered(node)
    if node.domain not in DOMAINS or node.op_type not in OPS:
        return
    inputs, values = [], []
    for value in node.inputs:
        dims = None if value is None else shape(value)
        if value is not None and (dims is None or value.dtype in UNKNOWN or value.dtype.numpy().name not in TYPES):
            return
        inputs.append(None if value is None else placeholder(dims, value.dtype.numpy().name, "x"))  # type: ignore[union-attr,arg-type]
        values.append(constant(value))
    parsed = parse(ir.to_proto(node), {"": opset})
    if any(bodies(parsed)):
        return
    try:
        built = build(
            parsed.op, parsed.attrs, inputs, values, outputs=parsed.wanted, opset=opset, name=parsed.name
        )  # fmt: skip
    except Unsupported:
        return
    for value, tensor in zip(node.outputs, built):
        value.shape = ir.Shape(tensor.shape)
        value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(tensor.dtype)))


def _infer_gathered(node: ir.Node) -> None:
    """Of GatherBlockQuantized, which is no tensor expression: its numbers may have fewer bits than kernels know."""
    x, indices, scales = (None if value is None else shape(value) for value in node.inputs[:3])
    bits = attribute(node, "bits", 4)
    if not x or indices is None or scales is None or bits not in (2, 4, 8):
        return
    along = attribute(node, "gather_axis", 0) % len(x)
    sizes = list(x)
    if node.inputs[0].dtype == ir.DataType.UINT8:  # type: ignore[union-attr]
        sizes[-1] *= 8 // bits
    node.outputs[0].shape = ir.Shape((*sizes[:along], *indices, *sizes[along + 1 :]))
    node.outputs[0].type = ir.TensorType(node.inputs[2].dtype)  # type: ignore[union-attr, arg-type]
