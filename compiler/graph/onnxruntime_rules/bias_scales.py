"""Give biases the scale of their products: onnxruntime adds the bias's integers to the sums, whatever its scale.

    Gemm(DequantizeLinear(x, sx), DequantizeLinear(w, sw), DequantizeLinear(b, sb, zb))
        ->      Gemm(DequantizeLinear(x, sx), DequantizeLinear(w, sw), DequantizeLinear(b, sx * sw))

This holds for a Gemm, and for a MatMul with an added bias, for any sb and zb, where onnxruntime multiplies bytes. For a
Conv it holds where sb is nearly sx * sw. This changes bytes, and the model means the changed ones, so it is part of the
import.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.onnxruntime_rules.propagation import (
    has_one_reader,
    is_superfluous_bound,
    last_superfluous_bound,
    only_reader,
    producer_before_moves,
    producer_before_wires,
    quantised_result,
    quantiser,
)
from celosia.compiler.graph.qdq import Quantised, adds_bias, dequantised
from celosia.compiler.graph.values import attribute, attributes, is_op, new_constant, shape
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Role

BIAS_SCALE_TOLERANCE = (0.01, 1e-6)
"""Relative and absolute difference between a Conv's bias scale and sx * sw up to which onnxruntime ignores it.

graph/quantized/integerise.py asks for equal scales (`_bias_scale_fits`).
"""


def rescale_biases(model: ir.Model) -> None:
    """Let biases whose scale onnxruntime ignores be dequantised by the scale of their products."""
    for node in list(model.graph):
        bias_input = _bias_input(node)
        if bias_input is None or len(node.inputs) <= bias_input:
            continue
        product = producer_before_wires(node.inputs[1 - bias_input]) if is_op(node, "Add") else node
        if product is not None and (scale := _new_scale(product, node, node.inputs[bias_input])) is not None:
            _set_bias_scale(node, bias_input, scale)


def _bias_input(node: ir.Node) -> int | None:
    """Return the number of the input of `node` that is a bias onnxruntime may add to products of bytes; else None."""
    if is_op(node, "Conv", "Gemm"):
        is_unscaled = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
        return op_spec(node.op_type).having(Role.BIAS)[0] if is_unscaled else None
    if not is_op(node, "Add"):
        return None
    for number, value in enumerate(node.inputs):
        product, bias = producer_before_wires(value), node.inputs[1 - number]
        if product is not None and is_op(product, "MatMul") and has_one_reader(product) and adds_bias(product, bias):
            return 1 - number
    return None


def _new_scale(product: ir.Node, last: ir.Node, bias: ir.Value | None) -> NDArray[np.float32] | None:
    """Return the scale of the products, if onnxruntime takes `bias` to have it although it has another; else None.

    last: the operator that adds the bias: `product` itself, or an Add behind it.
    """
    x, w, b = (
        _dequantised_operand(product.inputs[0]),
        _dequantised_operand(product.inputs[1]),
        _dequantised_operand(bias, moved=False),
    )
    if x is None or w is None or b is None or not x.scalar or b.dtype != np.int32:
        return None
    if not _is_byte_product(product, last, x, w):
        return None
    step = (x.scale.reshape(()) * w.scale).astype(np.float32).reshape(-1)
    if step.size > 1 and (shape(b.value) or (0,))[-1] != step.size:
        return None
    bias_scale, product_scale, has_zero_point = (
        b.scale.reshape(-1).astype(np.float64),
        step.astype(np.float64),
        bool(np.any(b.zero)),
    )
    fits = bias_scale.size in (1, step.size) or step.size == 1
    if is_op(product, "Conv") and (
        has_zero_point or not fits or not np.allclose(bias_scale, product_scale, *BIAS_SCALE_TOLERANCE)
    ):
        return None
    return step if has_zero_point or not np.array_equal(bias_scale, product_scale) else None


def _dequantised_operand(value: ir.Value | None, moved: bool = True) -> Quantised | None:
    """Return the quantised tensor that `value` dequantises.

    moved: look also behind operators that only move elements, if it has one scale.
    """
    source = producer_before_wires(value)
    if moved and not is_op(source, "DequantizeLinear"):
        source = producer_before_moves(value)
    q = dequantised(source.outputs[0]) if source is not None else None
    return q if q is None or q.scalar or producer_before_wires(value) is source else None


def _is_byte_product(product: ir.Node, last: ir.Node, x: Quantised, w: Quantised) -> bool:
    """Return whether onnxruntime multiplies bytes to make the result of `last`, which is `product` or adds the bias."""
    if x.dtype not in (np.int8, np.uint8) or w.dtype not in (np.int8, x.dtype):
        return False
    is_matrix = product is last or len(product.inputs[0].shape or ()) == 2  # type: ignore[union-attr]
    end = last_superfluous_bound(last) if is_matrix else last
    if quantiser(end) is not None and (is_matrix or has_one_reader(end)):
        y = quantised_result(end)
        return y is not None and y.dtype == x.dtype
    return not is_op(product, "Conv") and (not is_matrix or _stays_integer(last))


def _stays_integer(node: ir.Node) -> bool:
    """Return whether onnxruntime multiplies bytes for a Gemm whose result stays float.

    It does not if a QuantizeLinear is among several readers, nor before a lone Relu or Clip with one reader, which it
    takes for the end of a product of bytes.
    """
    user = only_reader(node)
    if user is not None and is_op(user, "Relu", "Clip") and has_one_reader(user):
        return False
    return not any(_becomes_bytes(use.node) for use in node.outputs[0].uses())


def _becomes_bytes(reader: ir.Node) -> bool:
    """Return whether `reader` is a QuantizeLinear, or a superfluous bound before one."""
    if not is_op(reader, "Relu", "Clip"):
        return is_op(reader, "QuantizeLinear")
    y = quantised_result(reader) if has_one_reader(reader) else None
    return y is not None and is_superfluous_bound(reader, y)


def _set_bias_scale(node: ir.Node, number: int, step: NDArray[np.float32]) -> None:
    """Let input `number` of `node` dequantise its integers by `step` and without a zero point."""
    bias = node.inputs[number]
    assert bias is not None and node.graph is not None and isinstance(node.graph, ir.Graph)
    source, name = producer_before_wires(bias), f"{bias.name}_in_steps_of_{node.outputs[0].name}"
    assert source is not None
    axis = attributes(axis=len(shape(bias) or (0,)) - 1) if step.size > 1 else []
    scale = new_constant(node.graph, f"{name}_scale", step if axis else step[0])
    out = ir.Value(name=name, shape=bias.shape, type=bias.type)
    dequantise = ir.Node("", "DequantizeLinear", [source.inputs[0], scale], axis, outputs=[out], name=name)
    node.graph.insert_before(node, dequantise)
    node.replace_input_with(number, out)
