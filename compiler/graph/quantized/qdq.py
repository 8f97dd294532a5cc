"""Scales and zero points that QuantizeLinear and DequantizeLinear give a tensor."""

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
"""In `meta` of a constant that a DequantizeLinear made: the Dequantisation of that."""


@dataclass(frozen=True)
class Quantised:
    """An 8-bit (or int32, for a bias) tensor and what its integers mean: real = (value - zero) * scale."""

    value: ir.Value
    scale: NDArray[np.float32]
    zero: NDArray[Any]
    scale_value: ir.Value
    zero_value: ir.Value | None
    axis: int

    @property
    def scalar(self) -> bool:
        """Whether one scale and zero point are those of all elements."""
        return self.scale.size == 1 and self.zero.size == 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the integers."""
        return self.zero.dtype


@dataclass(frozen=True)
class Product:
    """x * w + bias, of bytes and int32. last: the operator that makes it, that of the product or of the addition."""

    x: Quantised
    w: Quantised
    bias: ir.Value | None
    last: ir.Node


def dequantised(value: ir.Value | None) -> Quantised | None:
    """Return the quantised tensor that `value` dequantises, if scale and zero point are constants."""
    node = value.producer() if value is not None else None
    return _quantised(node, node.inputs[0]) if is_op(node, "DequantizeLinear") else None  # type: ignore[union-attr]


def quantised(value: ir.Value) -> Quantised | None:
    """The QuantizeLinear that alone uses `value`, where scale and zero point are scalar constants."""
    node = only_use(value)
    if not is_op(node, "QuantizeLinear") or node.inputs[0] is not value:  # type: ignore[union-attr]
        return None
    found = _quantised(node, node.outputs[0])  # type: ignore[union-attr]
    return found if found is not None and found.scalar and found.dtype in (np.int8, np.uint8) else None


def _quantised(node: ir.Node | None, value: ir.Value | None) -> Quantised | None:
    if node is None or value is None or attribute(node, "block_size", 0):
        return None
    scale_value, zero_value = quantisation(node)
    scale = constant(scale_value)
    if scale is None or scale.dtype != np.float32:
        return None
    if node.op_type == "DequantizeLinear" and attribute(node, "output_dtype", 0) not in (0, ir.DataType.FLOAT):
        return None  # integer operators stand for float32 ones
    if zero_value is None:
        kind = value.dtype
        if node.op_type == "QuantizeLinear" and node.attributes.get("output_dtype") is not None:
            return None
        zero: NDArray[Any] | None = np.zeros(scale.shape, np.uint8 if kind is None else kind.numpy())
    else:
        zero = constant(zero_value)
    if zero is None or zero.dtype not in (np.int8, np.uint8, np.int32):
        return None
    axis, dims = attribute(node, "axis", 1), shape(value)
    if scale.size > 1 and dims is not None and zero.dtype != np.int32:  # nobody looks at the axis of a bias
        if not -len(dims) <= axis < len(dims) or scale.shape != (dims[axis],):
            return None  # whoever computes it says what is wrong
        axis %= len(dims)
    return Quantised(value, scale, zero, scale_value, zero_value, axis)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Dequantisation:
    """Origin of a float constant: why integer operators cannot take it, "" where they may; the axis along which
    it has scales, None where it has one."""

    obstacle: str
    axis: int | None


def steps_of(node: ir.Node) -> Dequantisation:
    """Steps of what the DequantizeLinear `node` makes."""
    x, (scale, _) = node.inputs[0], quantisation(node)
    assert x is not None and scale is not None
    rank, axis, block = len(x.shape or ()), attribute(node, "axis", 1), attribute(node, "block_size", 0)
    along = axis % rank if rank and prod(shape(scale) or ()) > 1 else None
    if block and len(scale.shape or ()) > 1:
        return Dequantisation(f"a scale for each {block} elements along axis {along}", along)
    if dtype_name(x) not in ("int8", "uint8"):
        return Dequantisation(f"the element type {dtype_name(x)}", along)
    return Dequantisation(f"scales of {dtype_name(scale)}" if dtype_name(scale) != "float32" else "", along)


def meaning(q: Quantised) -> tuple[float, int]:
    """Scale and zero point of a tensor that has one of each."""
    return float(q.scale.item()), int(q.zero.item())


def same_meaning(x: Quantised, y: Quantised) -> bool:
    """Whether equal integers stand for equal reals."""
    return bool(np.array_equal(x.scale.ravel(), y.scale.ravel()) and np.array_equal(x.zero.ravel(), y.zero.ravel()))


def activation(value: ir.Value | None) -> Quantised | None:
    """A dequantised 8-bit tensor with one scale, not a constant."""
    q = dequantised(value)
    if q is None or not q.scalar or q.dtype not in (np.int8, np.uint8) or constant(q.value) is not None:
        return None
    return q


def adds_bias(product: ir.Node, bias: ir.Value | None) -> bool:
    """Whether onnxruntime makes one Gemm of the MatMul `product` and the addition of `bias`."""
    x, w, b = (None if value is None else shape(value) for value in (*product.inputs, bias))
    if x is None or w is None or b is None or len(w) != 2 or len(x) < 2:
        return False
    return b == w[1:] or (len(x) == 2 and b in ((1, w[1]), (x[0], w[1]), (x[0], 1)) and b != (1, 1))
