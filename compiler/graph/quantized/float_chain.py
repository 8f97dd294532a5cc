"""Follow chains of float operators that together are a function of one 8-bit tensor, element by element.

x = DequantizeLinear(x8)
s = Sigmoid(x)                    ->     y8 = Table(x8)
y8 = QuantizeLinear(Mul(x, s))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.values import constant, is_op

Float32 = NDArray[np.float32]
"""A float32 array."""
Function = Callable[[Float32], Float32]
"""A function of floats, element by element."""
BINARY: Mapping[str, Callable[..., Any]] = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
"""Operators of two operands that are followed."""
FOLLOWED_OPS = frozenset((*BINARY, *numerics.UNARY))
"""Operators that may be part of a chain."""
MAX_CHAIN = 12
"""Operators between tensor and result, at most: a chain that forks is followed in both branches of each fork."""


def function_of(
    value: ir.Value | None, arguments: Callable[[ir.Node], dict[str, float] | None], longest: int = MAX_CHAIN
) -> tuple[ir.Value | None, Function] | None:
    """Return (result of a DequantizeLinear, function of it that `value` is); None if `value` is no such function.

    The tensor is None for a float32 scalar constant, whose function is constant.

    arguments: returns the arguments of a unary operator by name, or None if it depends on other tensors. longest:
    operators that are still followed.
    """
    array, node = constant(value), value.producer() if value is not None else None
    if array is not None:
        return (None, lambda x: array.reshape(())) if array.size == 1 and array.dtype == np.float32 else None
    if node is None or longest == 0:
        return None
    if is_op(node, "DequantizeLinear"):
        return value, lambda x: x
    if is_op(node, *numerics.UNARY):
        followed, values = function_of(node.inputs[0], arguments, longest - 1), arguments(node)
        if followed is None or values is None:
            return None
        base, f = followed
        op = numerics.UNARY[node.op_type]
        return base, lambda x: np.asarray(op(f(x), **values), np.float32)
    if not is_op(node, *BINARY):
        return None
    left, right = (function_of(operand, arguments, longest - 1) for operand in node.inputs)
    if left is None or right is None:
        return None
    (a, f), (b, g) = left, right
    if a is not None and b is not None and a is not b:
        return None
    combine = BINARY[node.op_type]
    return a or b, lambda x: np.asarray(combine(f(x), g(x)), np.float32)
