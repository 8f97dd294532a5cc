"""Functions of one 8-bit tensor, element by element, which become one table each, whatever operators they are made of.

`compose_tables` merges quantised operators:

    t = Table(x, hard_sigmoid)                 y = Table(x, hard_swish)
    y = QLinearMul(x, t)              ->

`function_of` follows chains of float operators, for Integerise:

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
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.simplify.redundant import drop_unused
from celosia.compiler.graph.values import attributes, constant, dtype_name, is_op, new_constant, replace_keeping_name
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import quantised_form, quantised_forms
from celosia.hw.spec.scratchpads import TABLE_SIZE

# Quantised operators --------------------------------------------------------------------------------------------------


BINARY = {quantised_form(name): function.of_bytes for name, function in numerics.BINARY.items()}
"""Quantised operator of two operands -> the function of bytes that it computes."""
FUNCTIONS = {form: op_spec(form).variant_of for form in quantised_forms(*numerics.UNARY)}
"""Quantised unary operator -> the float operator whose form it is."""


def compose_tables(model: ir.Model) -> None:
    """Rewrite every operator that is a function of one 8-bit tensor, element by element, as a Table of that tensor."""
    graph = model.graph
    for node in list(graph):
        tensor_and_table = _as_table(node)
        if tensor_and_table is None:
            continue
        base, table = tensor_and_table
        if is_op(node, "Table") and node.inputs[0] is base:
            continue
        name = new_constant(graph, f"{node.name or node.outputs[0].name}_table", table)
        out = ir.Value(name=None, shape=node.outputs[0].shape, type=node.outputs[0].type)
        new_node = ir.Node(
            "celosia", "Table", [base, name], attributes(function=node.op_type), outputs=[out], name=node.name
        )
        graph.insert_before(node, new_node)
        replace_keeping_name(node, out)
    drop_unused(graph)


def _as_table(node: ir.Node) -> tuple[ir.Value, NDArray[np.int8]] | None:
    """Return (tensor, table) if `node` is a function of one tensor; else None."""
    if is_op(node, "Table"):
        x = node.inputs[0]
        table = constant(operand(node, "table"))
        assert x is not None and table is not None
        base, first_table = _table_before(x)
        return base, table.astype(np.int8)[first_table.astype(np.int64) + 128]
    if is_op(node, *FUNCTIONS):
        return _function_table(node)
    if is_op(node, *BINARY):
        return _binary_table(node)
    return None


def _table_before(value: ir.Value) -> tuple[ir.Value, NDArray[np.int8]]:
    """Return (x, table) if `value` is a Table of x; else `value` itself and the identity."""
    node = value.producer()
    if is_op(node, "Table"):
        assert node is not None
        table = constant(operand(node, "table"))
        assert table is not None and node.inputs[0] is not None
        return node.inputs[0], table.astype(np.int8)
    return value, np.arange(-128, 128).astype(np.int8)


def _function_table(node: ir.Node) -> tuple[ir.Value, NDArray[np.int8]] | None:
    """Return (tensor, table) of a quantised unary operator; None if its scales are not constant scalars."""
    numbers = scales_and_zeros(node, "xy")
    x = node.inputs[0]
    if numbers is None or x is None or x.dtype is None:
        return None
    arguments = {"alpha": node.attributes["alpha"].as_float()} if "alpha" in node.attributes else {}
    sx, zx, sy, zy = numbers
    table = numerics.unary_table(FUNCTIONS[node.op_type], arguments, sx, zx, sy, zy, x.dtype.numpy())
    base, first_table = _table_before(x)
    return base, table[first_table.astype(np.int64) + 128]


def _binary_table(node: ir.Node) -> tuple[ir.Value, NDArray[np.int8]] | None:
    """Return (tensor, table) of a quantised operator on one tensor and a scalar, or on two functions of one tensor.

    None for other operands.
    """
    a, b = operand(node, "a"), operand(node, "b")
    numbers = scales_and_zeros(node, "abc")
    if numbers is None or a is None or b is None:
        return None
    array_a, array_b = constant(a), constant(b)
    if array_a is not None and array_a.size == 1 and array_b is None:
        base, table_b = _table_before(b)
        dtype: Any = array_a.dtype
        table_a = np.full(TABLE_SIZE, _code_of(array_a))
    elif array_b is not None and array_b.size == 1 and array_a is None:
        base, table_a = _table_before(a)
        dtype = array_b.dtype
        table_b = np.full(TABLE_SIZE, _code_of(array_b))
    else:
        base, table_a = _table_before(a)
        other, table_b = _table_before(b)
        if other is not base or a.dtype is None:
            return None
        dtype = a.dtype.numpy()
    if base.shape is not None and node.outputs[0].shape is not None and base.shape != node.outputs[0].shape:
        return None
    code_offset = np.iinfo(dtype).min + 128
    values = BINARY[node.op_type](
        (table_a.astype(np.int64) + code_offset).astype(dtype),
        (table_b.astype(np.int64) + code_offset).astype(dtype),
        *numbers,
    )
    return base, (values.astype(np.int64) - code_offset).astype(np.int8)


def _code_of(value: NDArray[Any]) -> np.int8:
    """Return the code by which the accelerator stores an int8 or uint8 scalar."""
    return np.int8(int(value.item()) - (np.iinfo(value.dtype).min + 128))


def scales_and_zeros(node: ir.Node, names: str) -> list[Any] | None:
    """Return [scale, zero point, ...] of the operands `names`, a letter each; None if one is no constant scalar."""
    numbers: list[Any] = []
    for name in names:
        scale, zero = (constant(operand(node, f"{name}_{kind}")) for kind in ("scale", "zero_point"))
        if scale is None or zero is None or scale.size != 1 or zero.size != 1:
            return None
        numbers += [float(scale.item()), int(zero.item())]
    return numbers


def table_of(node: ir.Node) -> NDArray[Any] | None:
    """Return the table of a Table, or of a Clip of bytes, by the accelerator's codes; None for bounds that vary."""
    if is_op(node, "Table"):
        return constant(operand(node, "table"))
    ends = _bounds_of(node)
    if ends is None:
        return None
    code_offset = np.iinfo(dtype_name(node.outputs[0])).min + 128
    return np.arange(-128, 128).clip(ends[0] - code_offset, ends[1] - code_offset)


def _bounds_of(node: ir.Node) -> tuple[int, int] | None:
    """Return the least and the greatest result of a Clip of bytes; None if a bound is known at run time only."""
    info = np.iinfo(dtype_name(node.outputs[0]))
    ends = [int(info.min), int(info.max)]
    for number, bound in enumerate((operand(node, "min"), operand(node, "max"))):
        if bound is not None:
            array = constant(bound)
            if array is None:
                return None
            ends[number] = int(array.item())
    return min(ends), ends[1]  # if min > max, every element is max


# Chains of float operators --------------------------------------------------------------------------------------------


Function = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""A function of floats, element by element."""
FLOAT_BINARY: Mapping[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
}
"""Operators of two operands that are followed."""
FOLLOWED_OPS = frozenset((*FLOAT_BINARY, *numerics.UNARY))
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
    if not is_op(node, *FLOAT_BINARY):
        return None
    left, right = (function_of(operand, arguments, longest - 1) for operand in node.inputs)
    if left is None or right is None:
        return None
    (a, f), (b, g) = left, right
    if a is not None and b is not None and a is not b:
        return None
    combine = FLOAT_BINARY[node.op_type]
    return a or b, lambda x: np.asarray(combine(f(x), g(x)), np.float32)
