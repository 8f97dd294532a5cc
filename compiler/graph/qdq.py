"""Read the scales and zero points that QuantizeLinear and DequantizeLinear give a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import quantisation
from celosia.compiler.graph.values import (
    attribute,
    constant,
    dtype_name,
    is_op,
    only_use,
    shape,
)

MADE_OF = "celosia.dequantised"
"""Key in `meta` of a constant that a folded DequantizeLinear has computed: its Dequantisation."""


@dataclass(frozen=True)
class Quantised:
    """A tensor of integers (8 bits, or int32 for a bias), where real = (integer - zero) * scale.

    value: the integers. scale, zero: the parameters as arrays. scale_value, zero_value: the same as values of the
    graph; None if the zero point is left out. axis: the axis of the parameters, if there are several.
    """

    value: ir.Value
    scale: NDArray[np.float32]
    zero: NDArray[Any]
    scale_value: ir.Value
    zero_value: ir.Value | None
    axis: int

    @property
    def scalar(self) -> bool:
        """Whether all elements have the same scale and zero point."""
        return self.scale.size == 1 and self.zero.size == 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the integers."""
        return self.zero.dtype


@dataclass(frozen=True)
class Product:
    """An integer product x * w + bias.

    last: the operator whose result it is: the product, or the addition of the bias.
    """

    x: Quantised
    w: Quantised
    bias: ir.Value | None
    last: ir.Node


def dequantised(value: ir.Value | None) -> Quantised | None:
    """Return the quantised tensor of which a DequantizeLinear makes `value`.

    None if another operator makes it, or scale and zero point are not constants of supported types.
    """
    node = value.producer() if value is not None else None
    return _read_parameters(node, node.inputs[0]) if is_op(node, "DequantizeLinear") else None  # type: ignore[union-attr]


def quantised(value: ir.Value) -> Quantised | None:
    """Return the 8-bit tensor that the only reader of `value`, a QuantizeLinear, makes; None if there is none.

    Scale and zero point must be scalar constants.
    """
    node = only_use(value)
    return quantised_by(node) if node is not None and node.inputs[0] is value else None


def quantised_by(node: ir.Node) -> Quantised | None:
    """Return the 8-bit tensor that `node` makes, if it is a QuantizeLinear by scalar constants; else None."""
    result = _read_parameters(node, node.outputs[0]) if is_op(node, "QuantizeLinear") else None
    return result if result is not None and result.scalar and result.dtype in (np.int8, np.uint8) else None


def _read_parameters(node: ir.Node | None, value: ir.Value | None) -> Quantised | None:
    """Return the integers `value` of a QuantizeLinear or DequantizeLinear with its parameters, if these are constants.

    None for blocks, scales other than float32, and zero points other than int8, uint8 and int32.
    """
    if node is None or value is None or attribute(node, "block_size", 0):
        return None
    scale_value, zero_value = quantisation(node)
    scale = constant(scale_value)
    if scale is None or scale.dtype != np.float32:
        return None
    if node.op_type == "DequantizeLinear" and attribute(node, "output_dtype", 0) not in (0, ir.DataType.FLOAT):
        return None  # integer operators replace float32 operators only
    if zero_value is None:
        dtype = value.dtype
        if node.op_type == "QuantizeLinear" and node.attributes.get("output_dtype") is not None:
            return None
        zero: NDArray[Any] | None = np.zeros(scale.shape, np.uint8 if dtype is None else dtype.numpy())
    else:
        zero = constant(zero_value)
    if zero is None or zero.dtype not in (np.int8, np.uint8, np.int32):
        return None
    axis, dims = attribute(node, "axis", 1), shape(value)
    if scale.size > 1 and dims is not None and zero.dtype != np.int32:  # the axis of a bias is not read
        if not -len(dims) <= axis < len(dims) or scale.shape != (dims[axis],):
            return None  # the operator stays, and its computation reports the error
        axis %= len(dims)
    return Quantised(value, scale, zero, scale_value, zero_value, axis)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Dequantisation:
    """How a folded DequantizeLinear computed a float constant.

    obstacle: why integer operators cannot read its integers; "" if they can. axis: axis of its scales; None for one
    scale.
    """

    obstacle: str
    axis: int | None


def dequantisation_of(node: ir.Node) -> Dequantisation:
    """Describe the DequantizeLinear `node`, before it is folded."""
    x, (scale, _) = node.inputs[0], quantisation(node)
    assert x is not None and scale is not None
    rank, axis, block = len(x.shape or ()), attribute(node, "axis", 1), attribute(node, "block_size", 0)
    scale_axis = axis % rank if rank and prod(shape(scale) or ()) > 1 else None
    if block and len(scale.shape or ()) > 1:
        return Dequantisation(f"a scale for each {block} elements along axis {scale_axis}", scale_axis)
    if dtype_name(x) not in ("int8", "uint8"):
        return Dequantisation(f"the element type {dtype_name(x)}", scale_axis)
    return Dequantisation(f"scales of {dtype_name(scale)}" if dtype_name(scale) != "float32" else "", scale_axis)


def scale_and_zero(q: Quantised) -> tuple[float, int]:
    """Return scale and zero point of a tensor that has one of each."""
    return float(q.scale.item()), int(q.zero.item())


def have_same_parameters(x: Quantised, y: Quantised) -> bool:
    """Return whether equal integers of both tensors are equal reals."""
    return bool(np.array_equal(x.scale.ravel(), y.scale.ravel()) and np.array_equal(x.zero.ravel(), y.zero.ravel()))


def activation(value: ir.Value | None) -> Quantised | None:
    """Return the 8-bit tensor that `value` dequantises, if it has one scale and is no constant; else None."""
    q = dequantised(value)
    if q is None or not q.scalar or q.dtype not in (np.int8, np.uint8) or constant(q.value) is not None:
        return None
    return q


def adds_bias(product: ir.Node, bias: ir.Value | None) -> bool:
    """Return whether onnxruntime makes one Gemm of the MatMul `product` and the addition of `bias`."""
    x, w, b = (None if value is None else shape(value) for value in (*product.inputs, bias))
    if x is None or w is None or b is None or len(w) != 2 or len(x) < 2:
        return False
    return b == w[1:] or (len(x) == 2 and b in ((1, w[1]), (x[0], w[1]), (x[0], 1)) and b != (1, 1))
