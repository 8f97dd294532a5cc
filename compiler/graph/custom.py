"""Custom operators, in domains of a user's own, which the tile language defines (language/custom_operators.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.values import attributes_of, constant, shape

Array = NDArray[Any]
"""A numpy array of any element type."""


@dataclass(frozen=True)
class CustomOp:
    """How the compiler treats an operator that a user defines.

    shapes: (inputs as arrays, empty if not constant; attributes) -> shape and element type of each output. compute:
    arrays to arrays. place: makes a layer of (select.Placement, node), or raises NotOffloadable with the reason.
    """

    shapes: Callable[[Sequence[Array], Mapping[str, Any]], list[tuple[tuple[int, ...], str]]]
    compute: Callable[[Sequence[Array], Mapping[str, Any]], list[Array]]
    place: Callable[[Any, ir.Node], None]


CUSTOM: dict[tuple[str, str], CustomOp] = {}
"""(domain, name) -> operator."""


def custom(node: ir.Node) -> CustomOp | None:
    """Return the operator that a user has defined for `node`; None for an operator of ONNX."""
    return CUSTOM.get((node.domain, node.op_type))


def infer_custom(node: ir.Node, op: CustomOp) -> None:
    """Set shapes and types of the outputs of `node`, if those of all its inputs are known."""
    inputs = []
    for value in node.inputs:
        dims = None if value is None else shape(value)
        if value is None or dims is None or value.dtype in (None, ir.DataType.UNDEFINED):
            return
        array = constant(value)
        inputs.append(np.empty(dims, value.dtype.numpy()) if array is None else array)
    for value, (dims, dtype) in zip(node.outputs, op.shapes(inputs, attributes_of(node))):
        value.shape = ir.Shape(dims)
        value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
