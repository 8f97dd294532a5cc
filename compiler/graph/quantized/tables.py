"""Functions of one 8-bit tensor become one table each, whatever operators they were built from.

t = Table(x, hard_sigmoid)                 y = Table(x, hard_swish)
y = QLinearMul(x, t)              ->
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.simplify.redundant import drop_unused
from celosia.compiler.graph.values import attributes, constant, dtype_name, is_op, new_constant
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import quantised_form, quantised_forms
from celosia.hw.spec.scratchpads import TABLE_SIZE

BINARY = {quantised_form(name): function.of_bytes for name, function in numerics.BINARY.items()}
FUNCTIONS = {form: op_spec(form).variant_of for form in quantised_forms(*numerics.UNARY)}


def compose_tables(model: ir.Model) -> None:
    """Rewrite every operator that is a function of one tensor, element by element, as a Table of that tensor."""
    graph = model.graph
    for node in list(graph):
        found = _as_table(node)
        if found is None:
            continue
        base, table = found
        if is_op(node, "Table") and node.inputs[0] is base:
            continue
        name = new_constant(graph, f"{node.name or node.outputs[0].name}_table", table)
        out = ir.Value(name=None, shape=node.outputs[0].shape, type=node.outputs[0].type)
        fresh = ir.Node(
            "celosia", "Table", [base, name], attributes(function=node.op_type), outputs=[out], name=node.name
        )
        graph.insert_before(node, fresh)
        old = node.outputs[0]
        ir.convenience.replace_all_uses_with(old, out, replace_graph_outputs=True)
        label, old.name = old.name, None
        out.name = label
        graph.remove(node, safe=True)
    drop_unused(graph)


def _function_of(value: ir.Value) -> tuple[ir.Value, NDArray[np.int8]]:
    """The tensor that `value` is a table of, and the table; `value` itself where it is not one."""
    node = value.producer()
    if is_op(node, "Table"):
        assert node is not None
        table = constant(operand(node, "table"))
        assert table is not None and node.inputs[0] is not None
        return node.inputs[0], table.astype(np.int8)
    return value, np.arange(-128, 128).astype(np.int8)


def _as_table(node: ir.Node) -> tuple[ir.Value, NDArray[np.int8]] | None:
    if is_op(node, "Table"):
        x = node.inputs[0]
        table = constant(operand(node, "table"))
        assert x is not None and table is not None
        base, inner = _function_of(x)
        return base, table.astype(np.int8)[inner.astype(np.int64) + 128]
    if is_op(node, *FUNCTIONS):
        return _function_table(node)
    if is_op(node, *BINARY):
        return _binary_table(node)
    return None


def _function_table(node: ir.Node) -> tuple[ir.Value, NDArray[np.int8]] | None:
    numbers = _numbers(node, "xy")
    x = node.inputs[0]
    if numbers is None or x is None or x.dtype is None:
        return None
    arguments = {"alpha": node.attributes["alpha"].as_float()} if "alpha" in node.attributes else {}
    sx, zx, sy, zy = numbers
    table = numerics.unary_table(FUNCTIONS[node.op_type], arguments, sx, zx, sy, zy, x.dtype.numpy())
    base, inner = _function_of(x)
    return base, table[inner.astype(np.int64) + 128]


def _binary_table(node: ir.Node) -> tuple[ir.Value, NDArray[np.int8]] | None:
    a, b = operand(node, "a"), operand(node, "b")
    numbers = _numbers(node, "abc")
    if numbers is None or a is None or b is None:
        return None
    fixed_a, fixed_b = constant(a), constant(b)
    if fixed_a is not None and fixed_a.size == 1 and fixed_b is None:
        base, table_b = _function_of(b)
        kind: Any = fixed_a.dtype
        table_a = np.full(TABLE_SIZE, _stored(fixed_a))
    elif fixed_b is not None and fixed_b.size == 1 and fixed_a is None:
        base, table_a = _function_of(a)
        kind = fixed_b.dtype
        table_b = np.full(TABLE_SIZE, _stored(fixed_b))
    else:
        base, table_a = _function_of(a)
        other, table_b = _function_of(b)
        if other is not base or a.dtype is None:
            return None
        kind = a.dtype.numpy()
    if base.shape is not None and node.outputs[0].shape is not None and base.shape != node.outputs[0].shape:
        return None
    flip = np.iinfo(kind).min + 128
    values = BINARY[node.op_type](
        (table_a.astype(np.int64) + flip).astype(kind), (table_b.astype(np.int64) + flip).astype(kind), *numbers
    )
    return base, (values.astype(np.int64) - flip).astype(np.int8)


def table_of(node: ir.Node) -> NDArray[Any] | None:
    """Return the table of a Table, or of a Clip of bytes; None for bounds that vary."""
    if is_op(node, "Table"):
        return constant(operand(node, "table"))
    ends = bounds_of(node)
    if ends is None:
        return None
    flip = np.iinfo(dtype_name(node.outputs[0])).min + 128
    return np.arange(-128, 128).clip(ends[0] - flip, ends[1] - flip)


def bounds_of(node: ir.Node) -> tuple[int, int] | None:
    """The least and the largest value that a Clip of bytes gives; None where they are known at run time only."""
    info = np.iinfo(dtype_name(node.outputs[0]))
    ends = [int(info.min), int(info.max)]
    for number, given in enumerate((operand(node, "min"), operand(node, "max"))):
        if given is not None:
            fixed = constant(given)
            if fixed is None:
                return None
            ends[number] = int(fixed.item())
    return min(ends), ends[1]  # where the least is above the largest, every element is the largest


def _stored(value: NDArray[Any]) -> np.int8:
    """The byte that the accelerator holds for an int8 or uint8 scalar."""
    return np.int8(int(value.item()) - (np.iinfo(value.dtype).min + 128))


def _numbers(node: ir.Node, names: str) -> list[Any] | None:
    """Scale and zero point of each of `names`, a letter each; None where one is no constant scalar."""
    numbers: list[Any] = []
    for name in names:
        scale, zero = (constant(operand(node, f"{name}_{kind}")) for kind in ("scale", "zero_point"))
        if scale is None or zero is None or scale.size != 1 or zero.size != 1:
            return None
        numbers += [float(scale.item()), int(zero.item())]
    return numbers
