"""Products of floats by quantised constants: onnxruntime quantises the floats by blocks, and multiplies bytes.

    wf = DequantizeLinear(w4, scale, zero, axis=0, block_size=32)         xr = RoundBlocks(x, block_size=32)
    y = MatMul(x, wf)                                               ->    y = MatMul(xr, wf)

onnxruntime makes a MatMulNBits of these, at accuracy_level 4. `RoundBlocks` is our own: x as the bytes times their
scales, so that the product of floats is that of the bytes. Which products it takes is onnxruntime's choice. This is no
rewriting that keeps a model's meaning but part of it, so the importer does it.
"""

from __future__ import annotations

import onnx_ir as ir

from celosia.compiler.cpu.ops.contrib import BYTES_OF_BLOCKS
from celosia.compiler.graph.propagation import is_quantised, origin
from celosia.compiler.graph.values import attribute, attributes, constant, dtype_name, is_op, only_use, shape

BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
BLOCK_OF_COLUMNS = 32
"""How many activations share a scale where a whole column of weights, or all of them, have one."""


def round_activations(model: ir.Model) -> None:
    """Change `model`: what products by such constants read is rounded first. A MatMulNBits multiplies floats where its
    weights are no constants."""
    for node in list(model.graph):
        if is_op(node, "MatMulNBits") and not all(map(_is_fixed, node.inputs[1:4])):
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
        if size := rounds(node):
            _round(node, size)


def _is_fixed(value: ir.Value | None) -> bool:
    """Whether it is left out, a constant, or made of constants alone."""
    if value is None or value.const_value is not None:
        return True
    producer = value.producer()
    return producer is not None and all(map(_is_fixed, producer.inputs))


def rounds(node: ir.Node) -> int:
    """The size of the blocks in which the activations of `node`, a product by quantised constants, become bytes; 0
    where they do not."""
    size = _block(node) if is_op(node, "Gemm", "MatMul") else 0
    return 0 if not size or _stays_float(node) else size


def _round(node: ir.Node, size: int) -> None:
    x = node.inputs[0]
    assert x is not None and node.graph is not None
    name = f"{x.name}_rounded_{node.name or node.outputs[0].name}"
    out = ir.Value(name=name, shape=x.shape, type=x.type)
    made = ir.Node("celosia", "RoundBlocks", [x], attributes(block_size=size), outputs=[out], name=name)
    node.graph.insert_before(node, made)
    node.replace_input_with(0, out)


def _block(node: ir.Node) -> int:
    """The size of the blocks in which the activations of `node` become bytes; 0 where it multiplies floats."""
    x, weights = node.inputs[:2]
    dequantise = weights.producer() if weights is not None else None
    if x is None or weights is None or dequantise is None or not is_op(dequantise, "DequantizeLinear"):
        return 0
    if constant(x) is not None or only_use(weights) is not node or is_op(origin(x), "DequantizeLinear"):
        return 0
    given = [value for value in dequantise.inputs if value is not None]
    dims, of_scales = shape(given[0]), shape(given[1])
    if any(value.const_value is None for value in given) or dims is None or of_scales is None or len(dims) != 2:
        return 0
    if dtype_name(given[1]) != "float32" or (node.op_type == "Gemm" and not _adds_a_row(node, dims[1])):
        return 0
    axis, size = attribute(dequantise, "axis", 1), attribute(dequantise, "block_size", 0)
    by_column = of_scales == () or (axis == 1 and of_scales == dims[1:])
    if axis != 0 if size else not by_column:
        return 0
    size = size or BLOCK_OF_COLUMNS
    return size if size in BYTES_OF_BLOCKS.get(BITS.get(dtype_name(given[0]), 0), ()) else 0


def _adds_a_row(node: ir.Node, columns: int) -> bool:
    """Whether a Gemm turns and scales nothing, and adds at most one number for each column."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    turned = attribute(node, "transA", 0) or attribute(node, "transB", 0)
    plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
    return not turned and plain and (bias is None or shape(bias) == (columns,))


def _stays_float(node: ir.Node) -> bool:
    """Whether what reads the result, or the result with a bias, keeps onnxruntime from it: a QuantizeLinear, or a Relu
    or Clip alone that itself has one reader, which it takes for the end of a product of bytes.
    """
    assert node.inputs[0] is not None
    y, flat = node.outputs[0], len(node.inputs[0].shape or ()) == 2
    add = only_use(y)
    bias = next((shape(v) for v in add.inputs if v is not None and v is not y), None) if is_op(add, "Add") else None  # type: ignore[union-attr]
    if node.op_type == "MatMul" and bias is not None and y.shape is not None:
        if flat and bias == (1, y.shape[-1]):
            return True
        if bias == (y.shape[-1],):
            y = add.outputs[0]  # type: ignore[union-attr]
    readers, last = [use.node for use in y.uses()], y.producer()
    if any(is_op(reader, "QuantizeLinear") for reader in readers) or (last is not None and is_quantised(last)):
        return True
    reshaped = not flat and y is not node.outputs[0]
    if reshaped or len(readers) != 1 or not is_op(readers[0], "Relu", "Clip"):
        return False
    result = readers[0].outputs[0]
    return len(result.uses()) == 1 and not result.is_graph_output()
