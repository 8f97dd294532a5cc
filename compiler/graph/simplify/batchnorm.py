"""Fold scales and offsets of channels into the weights of the operator before them.

    h = Conv(x, w, b)
    y = BatchNormalization(h, scale, offset, mean, var)     ->     y = Conv(x, w * a, (b - mean) * a + offset)

where a = scale / sqrt(var + epsilon). Also behind ConvTranspose and Gemm, and for Mul, Div, Add and Sub by a constant
for each channel. Only floats: operators between quantised tensors must round where the model says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import operand, product_names, product_operands, set_operand
from celosia.compiler.graph.values import (
    attribute,
    constant,
    is_op,
    new_constant,
    only_use,
    replace_keeping_name,
    shape,
)

Array = NDArray[Any]
"""A numpy array of any element type."""
Affine = tuple[Array, Array]
"""(a, b) of y = a * x + b: one number for each channel, as float64."""


def fold_batchnorm(model: ir.Model) -> None:
    """Fold every scale and offset behind a Conv, ConvTranspose or Gemm, until none is left."""
    for node in list(model.graph):
        if is_op(node, "Conv", "ConvTranspose", "Gemm"):
            while _fold_next(model.graph, node):
                pass


def _fold_next(graph: ir.Graph, node: ir.Node) -> bool:
    """Fold the only reader of `node` into its weights and bias; return False where that is impossible."""
    x, weights, bias = product_operands(node)
    _, weights_name, bias_name = product_names(node.op_type)
    reader, dims = only_use(node.outputs[0]), shape(node.outputs[0])
    w = constant(weights)
    if (
        reader is None
        or reader.graph is not graph
        or w is None
        or w.dtype not in (np.float32, np.float64)
        or dims is None
    ):
        return False
    if x is None or is_op(x.producer(), "DequantizeLinear") or _is_quantised(reader) or len(dims) < 2:
        return False
    affine, old_bias = _affine(reader, node.outputs[0], dims), _bias(node, bias, dims[1])
    if affine is None or old_bias is None:
        return False
    a, b = affine
    with np.errstate(over="ignore", invalid="ignore"):
        new_weights = (w * along_outputs(node, a, w)).astype(w.dtype)
        new_bias = (old_bias * a + b).astype(w.dtype)
    if not (np.all(np.isfinite(new_weights)) and np.all(np.isfinite(new_bias))):
        return False
    name = node.name or node.outputs[0].name
    set_operand(node, weights_name, new_constant(graph, f"{name}_weights", new_weights))
    set_operand(node, bias_name, new_constant(graph, f"{name}_bias", new_bias))
    if node.op_type == "Gemm":
        node.attributes["beta"] = ir.AttrFloat32("beta", 1.0)
    return replace_keeping_name(reader, node.outputs[0])


def is_training(node: ir.Node) -> bool:
    """Return whether a BatchNormalization uses the statistics of its batch.

    An attribute says so, or, before opset 14, that it has several outputs.
    """
    return len(node.outputs) > 1 or bool(attribute(node, "training_mode", 0))


def _is_quantised(node: ir.Node) -> bool:
    """Return whether a QuantizeLinear reads the result of `node`."""
    return any(is_op(use.node, "QuantizeLinear") for use in node.outputs[0].uses())


def _affine(node: ir.Node, x: ir.Value, dims: tuple[int, ...]) -> Affine | None:
    """Return scale and offset of each channel of `x` that `node` applies; None if `node` does anything else.

    dims: shape of `x`, with channels on axis 1.
    """
    channels = dims[1]
    if is_op(node, "BatchNormalization"):
        if is_training(node):
            return None
        values = [constant(operand(node, name)) for name in ("scale", "b", "input_mean", "input_var")]
        if node.inputs[0] is not x or any(v is None or v.shape != (channels,) for v in values):
            return None
        scale, offset, mean, var = (np.asarray(v, np.float64) for v in values)
        with np.errstate(divide="ignore", invalid="ignore"):
            a = scale / np.sqrt(var + np.float64(attribute(node, "epsilon", 1e-5)))
        return (a, offset - mean * a) if np.all(np.isfinite(a)) else None
    if not is_op(node, "Mul", "Div", "Add", "Sub") or shape(node.outputs[0]) != dims:
        return None
    x_is_first = node.inputs[0] is x
    c = _per_channel(node.inputs[1] if x_is_first else node.inputs[0], dims)
    if c is None or (not x_is_first and node.op_type == "Div"):
        return None
    ones, zeros = np.ones(channels), np.zeros(channels)
    with np.errstate(divide="ignore"):
        affine_of = {
            "Mul": (c, zeros), "Div": (1 / c, zeros), "Add": (ones, c), "Sub": (ones, -c) if x_is_first else (-ones, c)
        }  # fmt: skip
    return affine_of[node.op_type]


def _per_channel(value: ir.Value | None, dims: tuple[int, ...]) -> Array | None:
    """Return a constant as one number for each channel (axis 1 of `dims`); None if it varies along other axes."""
    array = constant(value)
    if array is None or array.dtype.kind != "f" or array.ndim > len(dims):
        return None
    padded_shape = (1,) * (len(dims) - array.ndim) + array.shape
    if any(size != 1 for axis, size in enumerate(padded_shape) if axis != 1):
        return None
    return np.broadcast_to(array.reshape(-1), (dims[1],)).astype(np.float64)


def _bias(node: ir.Node, bias: ir.Value | None, channels: int) -> Array | None:
    """Return the bias of each channel, zeros for no bias; None if it is not constant or not one for each channel."""
    if bias is None:
        return np.zeros(channels)
    array = constant(bias)
    if array is None or (array.size not in (1, channels)) or (array.ndim > 1 and array.shape[-1] != array.size):
        return None
    beta = float(attribute(node, "beta", 1.0)) if node.op_type == "Gemm" else 1.0
    return np.broadcast_to(array.reshape(-1).astype(np.float64) * beta, (channels,))


def along_outputs(node: ir.Node, a: Array, w: Array) -> Array:
    """Reshape `a` (one number for each output channel, or one for all) so that it multiplies the weights `w`."""
    if node.op_type == "Gemm":
        return a[:, None] if attribute(node, "transB", 0) else a[None, :]
    kernel_axes = (1,) * (w.ndim - 2)
    if node.op_type == "Conv":
        return a.reshape(-1, 1, *kernel_axes)
    groups = attribute(node, "group", 1) if a.size > 1 else 1  # w is [input channels, output channels of a group, ...]
    return np.repeat(a.reshape(groups, -1), w.shape[0] // groups, axis=0).reshape(w.shape[0], -1, *kernel_axes)
