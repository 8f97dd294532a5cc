"""Products of bytes that onnxruntime computes in floats, although no sum of these floats can round.

    yf = Conv(DequantizeLinear(x8, 2^-5), DequantizeLinear(w8, 2^-8), DequantizeLinear(b8, 2^-8))
    y8 = QuantizeLinear(yf, 2^-4)       ->      y8 = QLinearConv(x8, ..., w8, ..., bias in steps of 2^-13)

onnxruntime computes floats where a bias is int8, or where the result has another type than its operand. The integers
have the same bytes if float32 holds all sums exactly (numerics/float_products), as it often does for scales that are
powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.operands import product_operands
from celosia.compiler.graph.qdq import Quantised, activation, dequantised, scale_and_zero
from celosia.compiler.graph.values import attribute, constant, is_op, only_use, shape
from celosia.compiler.ops import OPS, op_spec
from celosia.compiler.program.op_spec import quantised_forms

ROUNDED = "celosia.rounded once"
"""Key in `meta` of an integer product whose bytes may differ from onnxruntime's: a remark that says why."""
ROUNDED_NOTE = "onnxruntime multiplies in floats; a value next to a tie can differ by one step"
"""That remark, where onnxruntime's floats may round otherwise."""
ADVICE = (
    "quantise operands and result to one 8-bit type, and a bias to int32 in steps of the operands' scales, or compile "
    'with rounding="correct"'
)
"""Advice at the end of the reason why a product stays in floats."""
PRODUCTS = (
    *(name for name in OPS if any(op_spec(form).multiplies_bytes for form in quantised_forms(name))), "ConvTranspose"
)  # fmt: skip
"""Float operators that multiply by weights and have a form of bytes: onnxruntime's, or ours for ConvTranspose."""


@dataclass(frozen=True)
class DequantisedProduct:
    """A product of a dequantised tensor by constant dequantised weights.

    node: the product. output_axis: axis of the weights along the outputs. bias: float32, one for all or for each
    output.
    """

    node: ir.Node
    x: Quantised
    w: Quantised
    output_axis: int
    bias: NDArray[np.float32]

    def fit(self, y: Quantised, nearest: bool = False) -> numerics.FloatProduct:
        """Return the operands with which integers have the bytes of the result `y`. Raises RoundingError if none do.

        nearest: integers that are rounded correctly instead, whose bytes may differ next to ties.
        """
        weights, zero = constant(self.w.value), self.w.zero
        assert weights is not None
        outputs_first = np.moveaxis(weights.astype(np.int32), self.output_axis, 0)
        outputs_first = outputs_first - zero.reshape(-1, *(1,) * (weights.ndim - 1)).astype(np.int32)
        find = numerics.nearest_float_product if nearest else numerics.fit_float_product
        x, y_numbers = scale_and_zero(self.x), scale_and_zero(y)
        return find(outputs_first, self.w.scale, self.bias, *x, self.x.dtype, *y_numbers, y.dtype)


def dequantised_product(last: ir.Node) -> DequantisedProduct | None:
    """Return the product whose result `last` computes, itself or by adding a bias behind a MatMul; None for others."""
    node, bias_value = last, None
    if is_op(last, "Add"):
        product = next((p for p in map(_producer, last.inputs[:2]) if is_op(p, "MatMul")), None)
        if product is None or only_use(product.outputs[0]) is not last:
            return None
        node = product
        bias_value = next(value for value in last.inputs if value is not product.outputs[0])
        if _constant_floats(bias_value) is None:
            return None
    if not is_op(node, *PRODUCTS):
        return None
    x_value, w_value, own_bias = product_operands(node)
    x, w = activation(x_value), dequantised(w_value)
    weights = None if w is None else constant(w.value)
    if x is None or w is None or weights is None or w.dtype not in (np.int8, np.uint8):
        return None
    output_axis = _output_axis(node, weights)
    bias = _constant_floats(own_bias if node is last else bias_value)
    if output_axis is None or bias is None or not (w.scalar or w.axis % weights.ndim == output_axis):
        return None
    outputs = weights.shape[output_axis]
    rows = bias.size == 1 or (bias.shape[-1:] == (outputs,) and bias.size == outputs)
    return DequantisedProduct(node, x, w, output_axis, bias.reshape(-1)) if rows and weights.size else None


def scaled_mean(node: ir.Node, y: Quantised) -> tuple[ir.Node, Quantised, NDArray[np.float32]] | None:
    """Return (pool, its operand, another scale of that) of a GlobalAveragePool times a constant.

    With the other scale, the average of bytes is the result `y` of the Mul `node`. Quantisers for AMD's DPU multiply
    so, because that divides by a power of two. None for other operators, and if no scale has the same bytes.
    """
    pool = next((p for p in map(_producer, node.inputs) if is_op(p, "GlobalAveragePool")), None)
    factor = next((array for value in node.inputs if (array := constant(value)) is not None), None)
    if pool is None or factor is None or factor.size != 1 or only_use(pool.outputs[0]) is not node:
        return None
    x, dims = activation(pool.inputs[0]), shape(pool.inputs[0])  # type: ignore[arg-type]
    if x is None or x.dtype != y.dtype or dims is None or shape(node.outputs[0]) != shape(pool.outputs[0]):
        return None
    scale = numerics.fit_scaled_mean(
        prod(dims[2:]), factor.item(), *scale_and_zero(x), *scale_and_zero(y), y.dtype
    )  # fmt: skip
    return None if scale is None else (pool, x, np.asarray(scale, np.float32))


def _producer(value: ir.Value | None) -> ir.Node | None:
    """Return the operator that computes `value`."""
    return value.producer() if value is not None else None


def _output_axis(node: ir.Node, weights: NDArray[np.generic]) -> int | None:
    """Return the axis of the weights along the outputs; None for products that have no integer form."""
    if is_op(node, "Conv"):
        return 0
    if is_op(node, "ConvTranspose"):
        group = attribute(node, "group", 1)
        return 1 if group == 1 else 0 if group == weights.shape[0] and weights.shape[1] == 1 else None
    if weights.ndim != 2:
        return None
    if is_op(node, "MatMul"):
        return 1
    if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0:
        return None
    return 0 if attribute(node, "transB", 0) else 1


def _constant_floats(value: ir.Value | None) -> NDArray[np.float32] | None:
    """Return a bias as float32, dequantised as onnxruntime does; 0 if there is none, None if it is no constant."""
    if value is None:
        return np.zeros(1, np.float32)
    array, q = constant(value), dequantised(value)
    if array is not None:
        return array if array.dtype == np.float32 else None
    integers = None if q is None else constant(q.value)
    if q is None or integers is None or not (q.scalar or integers.ndim == 1):
        return None
    if q.dtype == np.int32:  # onnxruntime converts to float32 before it multiplies
        return np.asarray((integers.astype(np.int64) - q.zero).astype(np.float32) * q.scale, np.float32)
    return numerics.dequantize_linear(integers, q.scale, q.zero)
