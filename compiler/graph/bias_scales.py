"""Biases in steps that are nearly those of the products: onnxruntime adds their integers to the sums, as they are.

    Conv(DequantizeLinear(x, sx), DequantizeLinear(w, sw), DequantizeLinear(b, sb))
        ->      Conv(DequantizeLinear(x, sx), DequantizeLinear(w, sw), DequantizeLinear(b, sx * sw))

This is no rewriting that keeps a model's meaning but part of it, so the importer does it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.propagation import is_quantised
from celosia.compiler.graph.qdq import activation, dequantised
from celosia.compiler.graph.values import attributes, is_op, new_constant, only_use

NEAR = (0.01, 1e-6)
"""By which share of the products' scale, and by how much, that of a bias may be another for onnxruntime."""


def settle_biases(model: ir.Model) -> None:
    """Change `model`: such biases are in steps of their products."""
    for node in list(model.graph):
        place = _bias(node)
        product = node if place == 2 else None if place is None else node.inputs[1 - place].producer()  # type: ignore[union-attr]
        if place is not None and product is not None and (step := _step(product, node.inputs[place])) is not None:
            _settle(node, place, step)


def _bias(node: ir.Node) -> int | None:
    """Which input of `node` is a bias that onnxruntime adds to products of bytes."""
    if is_op(node, "Gemm") or (is_op(node, "Conv") and _is_quantised(node)):
        return 2 if len(node.inputs) > 2 else None
    if not is_op(node, "Add"):
        return None
    made = [is_op(None if value is None else value.producer(), "MatMul") for value in node.inputs]
    return made.index(False) if any(made) and not all(made) else None


def _is_quantised(node: ir.Node) -> bool:
    """Whether the result becomes bytes, perhaps those that are not below a bound, or beyond one."""
    reader = only_use(node.outputs[0])
    return is_quantised(reader if reader is not None and is_op(reader, "Relu", "Clip") else node)


def _step(product: ir.Node, bias: ir.Value | None) -> NDArray[np.float32] | None:
    """The scale of the products, where that of the bias is another one, but near it."""
    x, w, b = activation(product.inputs[0]), dequantised(product.inputs[1]), dequantised(bias)
    if x is None or w is None or b is None or b.dtype != np.int32 or np.any(b.zero):
        return None
    step = (x.scale.reshape(()) * w.scale).astype(np.float32)
    given, wanted = b.scale.reshape(-1).astype(np.float64), step.reshape(-1).astype(np.float64)
    if wanted.size not in (1, given.size) and given.size != 1:
        return None
    return None if np.array_equal(given, wanted) or not np.allclose(given, wanted, *NEAR) else step.reshape(-1)


def _settle(node: ir.Node, place: int, step: NDArray[np.float32]) -> None:
    bias = node.inputs[place]
    assert bias is not None and node.graph is not None and isinstance(node.graph, ir.Graph)
    source, name = bias.producer(), f"{bias.name}_in_steps_of_{node.outputs[0].name}"
    assert source is not None
    axis = attributes(axis=0) if step.size > 1 else []
    scale = new_constant(node.graph, f"{name}_scale", step if axis else step[0])
    out = ir.Value(name=name, shape=bias.shape, type=bias.type)
    made = ir.Node("", "DequantizeLinear", [source.inputs[0], scale], axis, outputs=[out], name=name)
    node.graph.insert_before(node, made)
    node.replace_input_with(place, out)
