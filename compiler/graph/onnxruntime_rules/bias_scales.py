"""Biases in other steps than those of the products: onnxruntime adds their integers to the sums, as they are.

    Gemm(DequantizeLinear(x, sx), DequantizeLinear(w, sw), DequantizeLinear(b, sb, zb))
        ->      Gemm(DequantizeLinear(x, sx), DequantizeLinear(w, sw), DequantizeLinear(b, sx * sw))

So for a Gemm, and a MatMul to which a bias is added, whatever sb and zb are, where onnxruntime multiplies bytes; for a
Conv where sb is nearly sx * sw. This is no rewriting that keeps a model's meaning but part of it, so the importer does
it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.onnxruntime_rules.propagation import (
    bytes_behind,
    is_passed_on,
    is_superfluous,
    maker,
    only_reader,
    origin,
    past_bounds,
    quantiser,
)
from celosia.compiler.graph.quantized.qdq import Quantised, adds_bias, dequantised
from celosia.compiler.graph.values import attribute, attributes, is_op, new_constant, shape
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Role

BIAS_SCALE_TOLERANCE = (0.01, 1e-6)
"""Largest relative and absolute difference between the scale of a Conv's bias and the scale of its products, at which
onnxruntime takes them for equal. graph/quantized/integerise.py asks for equal scales (`_bias_scale_fits`)."""


def settle_biases(model: ir.Model) -> None:
    """Change `model`: such biases are in steps of their products."""
    for node in list(model.graph):
        place = _place(node)
        if place is None or len(node.inputs) <= place:
            continue
        product = maker(node.inputs[1 - place]) if is_op(node, "Add") else node
        if product is not None and (step := _step(product, node, node.inputs[place])) is not None:
            _settle(node, place, step)


def _place(node: ir.Node) -> int | None:
    """Number of the input of `node` that is a bias that onnxruntime may add to products of bytes."""
    if is_op(node, "Conv", "Gemm"):
        plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
        return op_spec(node.op_type).having(Role.BIAS)[0] if plain else None
    if not is_op(node, "Add"):
        return None
    for place, value in enumerate(node.inputs):
        product, bias = maker(value), node.inputs[1 - place]
        if product is not None and is_op(product, "MatMul") and is_passed_on(product) and adds_bias(product, bias):
            return 1 - place
    return None


def _step(product: ir.Node, last: ir.Node, bias: ir.Value | None) -> NDArray[np.float32] | None:
    """The scale of the products, where onnxruntime takes `bias` to be in such steps, and it is not."""
    x, w, b = _bytes_of(product.inputs[0]), _bytes_of(product.inputs[1]), _bytes_of(bias, moved=False)
    if x is None or w is None or b is None or not x.scalar or b.dtype != np.int32:
        return None
    if not _is_of_bytes(product, last, x, w):
        return None
    step = (x.scale.reshape(()) * w.scale).astype(np.float32).reshape(-1)
    if step.size > 1 and (shape(b.value) or (0,))[-1] != step.size:
        return None
    given, wanted, shifted = b.scale.reshape(-1).astype(np.float64), step.astype(np.float64), bool(np.any(b.zero))
    fits = given.size in (1, step.size) or step.size == 1
    if is_op(product, "Conv") and (shifted or not fits or not np.allclose(given, wanted, *BIAS_SCALE_TOLERANCE)):
        return None
    return step if shifted or not np.array_equal(given, wanted) else None


def _bytes_of(value: ir.Value | None, moved: bool = True) -> Quantised | None:
    """Return the quantised tensor of one scale that `value` dequantises, also through operators that only move it."""
    source = maker(value)
    if moved and not is_op(source, "DequantizeLinear"):
        source = origin(value)
    q = dequantised(source.outputs[0]) if source is not None else None
    return q if q is None or q.scalar or maker(value) is source else None


def _is_of_bytes(product: ir.Node, last: ir.Node, x: Quantised, w: Quantised) -> bool:
    """Whether onnxruntime multiplies bytes to make the result of `last`, which is `product` or adds the bias."""
    if x.dtype not in (np.int8, np.uint8) or w.dtype not in (np.int8, x.dtype):
        return False
    flat = product is last or len(product.inputs[0].shape or ()) == 2  # type: ignore[union-attr]
    end = past_bounds(last) if flat else last
    if quantiser(end) is not None and (flat or is_passed_on(end)):
        y = bytes_behind(end)
        return y is not None and y.dtype == x.dtype
    return not is_op(product, "Conv") and (not flat or _stays_integer(last))


def _stays_integer(node: ir.Node) -> bool:
    """Whether onnxruntime multiplies bytes for a Gemm whose result stays float: not where a QuantizeLinear is among
    several readers, nor before a Relu or Clip alone that itself has one reader, the end of a product of bytes to it."""
    user = only_reader(node)
    if user is not None and is_op(user, "Relu", "Clip") and is_passed_on(user):
        return False
    return not any(_becomes_bytes(use.node) for use in node.outputs[0].uses())


def _becomes_bytes(reader: ir.Node) -> bool:
    """Whether `reader` is QuantizeLinear, or a bound that leaves nothing but that."""
    if not is_op(reader, "Relu", "Clip"):
        return is_op(reader, "QuantizeLinear")
    y = bytes_behind(reader) if is_passed_on(reader) else None
    return y is not None and is_superfluous(reader, y)


def _settle(node: ir.Node, place: int, step: NDArray[np.float32]) -> None:
    bias = node.inputs[place]
    assert bias is not None and node.graph is not None and isinstance(node.graph, ir.Graph)
    source, name = maker(bias), f"{bias.name}_in_steps_of_{node.outputs[0].name}"
    assert source is not None
    axis = attributes(axis=len(shape(bias) or (0,)) - 1) if step.size > 1 else []
    scale = new_constant(node.graph, f"{name}_scale", step if axis else step[0])
    out = ir.Value(name=name, shape=bias.shape, type=bias.type)
    made = ir.Node("", "DequantizeLinear", [source.inputs[0], scale], axis, outputs=[out], name=name)
    node.graph.insert_before(node, made)
    node.replace_input_with(place, out)
