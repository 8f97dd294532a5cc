"""Move inputs and constants by one unit in the last place, to measure the effect of rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

Array = NDArray[Any]
NUMBERS = ("Resize", "Upsample", "Range", "QuantizeLinear", "OneHot", "NonMaxSuppression", "Pow")
"""Operators with further float inputs that decide shapes, rounding, or whether a result exists."""


def moved(array: Array, rng: np.random.Generator) -> Array:
    """Move each float of `array` one unit in the last place up or down; zeros and arrays of other types stay."""
    if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float64):
        return array
    with np.errstate(over="ignore"):
        ends = np.where(rng.random(array.shape) < 0.5, -np.inf, np.inf).astype(array.dtype)
        result: Array = np.nextafter(array, ends)
    return np.where(array == 0, array, result).astype(array.dtype)


def _fixed(model: onnx.ModelProto) -> set[str]:
    return {name for node in model.graph.node if node.op_type in NUMBERS for name in node.input[1:]}


def moved_feed(model: onnx.ModelProto, feed: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """Move the inputs of `model`, as `with_moved_constants` moves its constants."""
    fixed = _fixed(model)
    return {name: array if name in fixed else moved(array, rng) for name, array in feed.items()}


def with_moved_constants(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """Return `model` with its float constants moved, except those that decide an operator's shapes or steps."""
    result, fixed = onnx.ModelProto(), _fixed(model)
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name not in fixed and tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
            tensor.CopyFrom(numpy_helper.from_array(moved(numpy_helper.to_array(tensor), rng), tensor.name))
    return result


def with_rounded_biases(model: onnx.ModelProto, optimised: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` with biases as onnxruntime computes them: it rounds some float biases to int32.

    That happens for products of dequantised tensors. optimised: the graph that onnxruntime makes of `model`, in which
    such a bias is the output of a DequantizeLinear.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in optimised.graph.initializer}
    makers = {name: node for node in optimised.graph.node for name in node.output}
    optimised_nodes = {node.name: node for node in optimised.graph.node if node.name}
    rounded = onnx.ModelProto()
    rounded.CopyFrom(model)
    floats = {tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    for number, node in enumerate(rounded.graph.node):
        other = optimised_nodes.get(node.name)
        if other is None or len(node.input) < 3 or len(other.input) < 3 or node.input[2] not in floats:
            continue
        maker = makers.get(other.input[2])
        if maker is None or maker.op_type != "DequantizeLinear" or not constants.keys() >= {*maker.input}:
            continue
        integers, scale = (constants[name] for name in maker.input[:2])
        bias = numpy_helper.from_array(integers.astype(np.float32) * scale, f"{node.input[2]} rounded for {number}")
        rounded.graph.initializer.append(bias)
        node.input[2] = bias.name
    return rounded


def with_moved_dequantised(
    model: onnx.ModelProto, values: Mapping[str, Any], rng: np.random.Generator
) -> onnx.ModelProto:
    """Return `model` with each output of DequantizeLinear multiplied by random factors next to 1.

    If only its scale moved, all elements would move together, and sums that cancel would not change.
    values: the tensors of `model`, for their shapes and types.
    """
    result, fixed = onnx.ModelProto(), _fixed(model)
    result.CopyFrom(model)
    del result.graph.node[:]
    for node in model.graph.node:
        result.graph.node.append(node)
        name = node.output[0] if node.op_type == "DequantizeLinear" else ""
        if not name or name in fixed or values[name].dtype != np.float32:
            continue
        plain, factor = f"{name}_plain", f"{name}_factor"
        result.graph.node[-1].output[0] = plain
        result.graph.node.append(onnx.helper.make_node("Mul", [plain, factor], [name]))
        factors = moved(np.ones_like(values[name]), rng)
        result.graph.initializer.append(numpy_helper.from_array(factors, factor))
    return result
