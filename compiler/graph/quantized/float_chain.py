"""Float functions of one 8-bit tensor, element by element, whatever operators they are written in.

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
Function = Callable[[Float32], Float32]
BINARY: Mapping[str, Callable[..., Any]] = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
FOLLOWED_OPS = frozenset((*BINARY, *numerics.UNARY))
LONGEST = 12
"""Operators from the tensor to the result; a chain that forks at each of them is followed in both branches."""


def function_of(
    value: ir.Value | None, arguments: Callable[[ir.Node], dict[str, float] | None], longest: int = LONGEST
) -> tuple[ir.Value | None, Function] | None:
    """(what comes out of a DequantizeLinear, the function of it that `value` is), (None, a constant function) for a
    float32 scalar, or None. arguments: of a unary operator by name, or None where it is none of one tensor.
    """
    fixed, node = constant(value), value.producer() if value is not None else None
    if fixed is not None:
        return (None, lambda x: fixed.reshape(())) if fixed.size == 1 and fixed.dtype == np.float32 else None
    if node is None or longest == 0:
        return None
    if is_op(node, "DequantizeLinear"):
        return value, lambda x: x
    if is_op(node, *numerics.UNARY):
        inner, given = function_of(node.inputs[0], arguments, longest - 1), arguments(node)
        if inner is None or given is None:
            return None
        base, f = inner
        op = numerics.UNARY[node.op_type]
        return base, lambda x: np.asarray(op(f(x), **given), np.float32)
    if not is_op(node, *BINARY):
        return None
    left, right = (function_of(each, arguments, longest - 1) for each in node.inputs)
    if left is None or right is None:
        return None
    (a, f), (b, g) = left, right
    if a is not None and b is not None and a is not b:
        return None
    combine = BINARY[node.op_type]
    return a or b, lambda x: np.asarray(combine(f(x), g(x)), np.float32)
