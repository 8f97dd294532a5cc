"""Operators of a user's own domains, which the tile language defines (compiler/language/custom_operators.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.values import attributes_of, constant, shape

Array = NDArray[Any]


@dataclass(frozen=True)
class CustomOp:
    """shapes: (shapes and types of inputs as empty arrays, attributes) to those of outputs. compute: arrays to arrays.
    place: makes a layer of a node (select.Placement, node), or raises NotOffloadable with the reason.
    """

    shapes: Callable[[Sequence[Array], Mapping[str, Any]], list[tuple[tuple[int, ...], str]]]
    compute: Callable[[Sequence[Array], Mapping[str, Any]], list[Array]]
    place: Callable[[Any, ir.Node], None]


CUSTOM: dict[tuple[str, str], CustomOp] = {}
"""By domain and name."""


def custom(node: ir.Node) -> CustomOp | None:
    """Return the operator that the tile language defines for `node`; None for an operator of ONNX."""
    return CUSTOM.get((node.domain, node.op_type))


def infer_custom(node: ir.Node, op: CustomOp) -> None:
    """Set the shapes and types of what `node` makes, where those of all its inputs are known."""
    inputs = []
    for value in node.inputs:
        dims = None if value is None else shape(value)
        if value is None or dims is None or value.dtype in (None, ir.DataType.UNDEFINED):
            return
        fixed = constant(value)
        inputs.append(np.empty(dims, value.dtype.numpy()) if fixed is None else fixed)
    for value, (dims, dtype) in zip(node.outputs, op.shapes(inputs, attributes_of(node))):
        value.shape = ir.Shape(dims)
        value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
