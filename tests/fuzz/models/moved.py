"""Inputs and models with their numbers moved by one unit in the last place: how much rounding may do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

Array = NDArray[Any]
NUMBERS = ("Resize", "Upsample", "Range", "QuantizeLinear", "OneHot", "NonMaxSuppression", "Pow")
"""Operators with floats beside their operand from which shapes, rounding or whether there is a result follow."""


def moved(array: Array, rng: np.random.Generator) -> Array:
    """`array` with each of its floats one unit up or down, of any shape; zeros stay, and so does what is no floats."""
    if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float64):
        return array
    with np.errstate(over="ignore"):
        ends = np.where(rng.random(array.shape) < 0.5, -np.inf, np.inf).astype(array.dtype)
        result: Array = np.nextafter(array, ends)
    return np.where(array == 0, array, result).astype(array.dtype)


def _fixed(model: onnx.ModelProto) -> set[str]:
    return {name for node in model.graph.node if node.op_type in NUMBERS for name in node.input[1:]}


def moved_feed(model: onnx.ModelProto, feed: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """The inputs of `model`, moved as its constants are by `with_moved_constants`."""
    fixed = _fixed(model)
    return {name: array if name in fixed else moved(array, rng) for name, array in feed.items()}


def with_moved_constants(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """`model` with its float constants moved, but for those in which an operator's shapes or steps are written."""
    near, fixed = onnx.ModelProto(), _fixed(model)
    near.CopyFrom(model)
    for tensor in near.graph.initializer:
        if tensor.name not in fixed and tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
            tensor.CopyFrom(numpy_helper.from_array(moved(numpy_helper.to_array(tensor), rng), tensor.name))
    return near


def with_rounded_biases(model: onnx.ModelProto, optimised: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with the float biases that onnxruntime rounds to int32 for products of dequantised tensors.

    optimised: the graph that onnxruntime makes of `model`, where DequantizeLinear makes floats of such a bias.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in optimised.graph.initializer}
    makers = {name: node for node in optimised.graph.node for name in node.output}
    theirs = {node.name: node for node in optimised.graph.node if node.name}
    rounded = onnx.ModelProto()
    rounded.CopyFrom(model)
    floats = {tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    for number, node in enumerate(rounded.graph.node):
        other = theirs.get(node.name)
        if other is None or len(node.input) < 3 or len(other.input) < 3 or node.input[2] not in floats:
            continue
        maker = makers.get(other.input[2])
        if maker is None or maker.op_type != "DequantizeLinear" or not constants.keys() >= {*maker.input}:
            continue
        whole, scale = (constants[name] for name in maker.input[:2])
        bias = numpy_helper.from_array(whole.astype(np.float32) * scale, f"{node.input[2]} rounded for {number}")
        rounded.graph.initializer.append(bias)
        node.input[2] = bias.name
    return rounded


def with_moved_dequantised(
    model: onnx.ModelProto, values: Mapping[str, Any], rng: np.random.Generator
) -> onnx.ModelProto:
    """`model` where what DequantizeLinear makes, each tensor like the one in `values`, is multiplied by random factors
    next to one: moved with its scale alone, it would move as a whole, and sums that cancel would stay what they are."""
    near, fixed = onnx.ModelProto(), _fixed(model)
    near.CopyFrom(model)
    del near.graph.node[:]
    for node in model.graph.node:
        near.graph.node.append(node)
        name = node.output[0] if node.op_type == "DequantizeLinear" else ""
        if not name or name in fixed or values[name].dtype != np.float32:
            continue
        plain, factor = f"{name}_plain", f"{name}_factor"
        near.graph.node[-1].output[0] = plain
        near.graph.node.append(onnx.helper.make_node("Mul", [plain, factor], [name]))
        factors = moved(np.ones_like(values[name]), rng)
        near.graph.initializer.append(numpy_helper.from_array(factors, factor))
    return near
