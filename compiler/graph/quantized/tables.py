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
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.cpu.parse import parse
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.qdq import dequantised, have_same_parameters
from celosia.compiler.graph.simplify.redundant import drop_unused
from celosia.compiler.graph.values import attributes, constant, dtype_name, is_op, new_constant, replace_keeping_name
from celosia.compiler.ops import OPS, op_spec
from celosia.compiler.program.host.execute import execute
from celosia.compiler.program.host.op import HostError, HostOp
from celosia.compiler.program.op_spec import Kind, OpSpec, Role, quantised_form, quantised_forms
from celosia.hw.spec.scratchpads import TABLE_SIZE

# Quantised operators --------------------------------------------------------------------------------------------------


BINARY = {quantised_form(name): function.of_bytes for name, function in numerics.BINARY.items()}
"""Quantised operator of two operands -> the function of bytes that it computes."""


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
        attrs = table_attributes(node.op_type, base.dtype, out.dtype)
        new_node = ir.Node("celosia", "Table", [base, name], attrs, outputs=[out], name=node.name)
        graph.insert_before(node, new_node)
        replace_keeping_name(node, out)
    drop_unused(graph)


def table_attributes(function: str, x: ir.DataType | None, y: ir.DataType | None) -> list[ir.Attr]:
    """Return the attributes of a Table. function: name of the operator that it replaces. x, y: types of the tensors."""
    to = {} if x == y or y is None else {"to": int(y)}
    return attributes(function=function, **to)


def _as_table(node: ir.Node) -> tuple[ir.Value, NDArray[np.int8]] | None:
    """Return (tensor, table) if `node` is a function of one tensor; else None."""
    if is_op(node, "Table"):
        x = node.inputs[0]
        table = constant(operand(node, "table"))
        assert x is not None and table is not None
        base, first_table = _table_before(x)
        return base, table.astype(np.int8)[first_table.astype(np.int64) + 128]
    if is_op(node, *UNARY_FORMS):
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
    """Return (tensor, table) of a quantised unary operator of bytes; None if its scales are not constant scalars."""
    x, *others = node.inputs
    numbers, dtype = scales_and_zeros(node, "xy"), dtype_name(node.outputs[0])
    if numbers is None or x is None or dtype not in ("int8", "uint8") or x in others:
        return None
    lowest = np.iinfo(dtype).min
    codes = np.arange(lowest, lowest + TABLE_SIZE).astype(dtype)
    parameters = {value.name or "": constant(value) for value in others if value is not None}
    try:
        (result,) = execute(_host_operator(node), parameters | {x.name or "": codes}, once=True)
    except HostError:  # an element type for which there is no kernel
        return None
    base, first_table = _table_before(x)
    table = (result.astype(np.int64) - (lowest + 128)).astype(np.int8)
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
        table_a = np.full(TABLE_SIZE, code_of(array_a))
    elif array_b is not None and array_b.size == 1 and array_a is None:
        base, table_a = _table_before(a)
        dtype = array_b.dtype
        table_b = np.full(TABLE_SIZE, code_of(array_b))
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


def code_of(value: NDArray[Any]) -> np.int8:
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


Function = Callable[[NDArray[np.float32]], NDArray[Any]]
"""A function of float32 values [n], element by element. Parts of a chain may give other types, such as bool."""


def _is_elementwise(spec: OpSpec) -> bool:
    """Return whether an operator computes each element of its result from the elements of its operands at its place."""
    computes = spec.kind is Kind.INJECTIVE and (spec.moves is None or spec.name in ("Where", "Identity"))
    return computes and not spec.inputs_with_role(Role.SCALE, Role.ZERO_POINT, Role.BIAS, Role.WEIGHTS)


ELEMENTWISE_OPS = frozenset(name for name in OPS if _is_elementwise(op_spec(name)))
"""Operators whose kernels compute each element from the elements at its place alone. A chain consists of these."""
UNARY_OPS = frozenset(
    name for name in ELEMENTWISE_OPS if len(op_spec(name).data_inputs) == 1 and not op_spec(name).repeated
)
"""Those with one operand of data."""
UNARY_FORMS = frozenset(form for form in quantised_forms(*UNARY_OPS))
"""The quantised forms of these."""
MAX_CHAIN = 12
"""Operators between tensor and result, at most: a chain that forks is followed in both branches of each fork."""


OPSET = 24
"""The opset of ONNX whose operators `function_of_operator` takes."""


def function_of_operator(op: str, attrs: Mapping[str, Any]) -> Function:
    """Return the function of one tensor that an operator of OPSET computes. KeyError if it has other operands."""
    if op not in UNARY_OPS:
        raise KeyError(op)
    host_op = parse(onnx.helper.make_node(op, ["x"], ["y"], domain=op_spec(op).domain, **attrs), {"": OPSET})
    return lambda x: np.asarray(execute(host_op, {"x": x}, once=True)[0])


def function_of_node(node: ir.Node) -> Function | None:
    """Return the function of its first operand that `node` is; None unless its other operands are constant scalars."""
    x, *others = node.inputs
    scalars = {value.name or "": function_of(value, longest=0) for value in others if value is not None}
    if x is None or None in scalars.values():
        return None
    functions: dict[str, Function] = {name: scalar[1] for name, scalar in scalars.items() if scalar is not None}
    return compose(node, functions | {x.name or "": lambda x: x})


def function_of(value: ir.Value | None, longest: int = MAX_CHAIN) -> tuple[ir.Value | None, Function] | None:
    """Return (result of a DequantizeLinear, function of it that `value` is); None if `value` is no such function.

    The tensor is None for a constant of one element, whose function is constant. The kernels of the operators compute
    the function, so that a table has the bytes that the operators would have on the CPU.

    longest: operators that are still followed.
    """
    array, node = constant(value), value.producer() if value is not None else None
    if array is not None:
        return (None, lambda x: array.reshape(())) if array.size == 1 else None
    if node is None or longest == 0:
        return None
    if is_op(node, "DequantizeLinear"):
        return value, lambda x: x
    if not is_op(node, *ELEMENTWISE_OPS) or len(node.outputs) != 1:
        return None
    base: ir.Value | None = None
    functions: dict[str, Function] = {}
    for operand_value in node.inputs:
        if operand_value is None:
            continue
        followed = function_of(operand_value, longest - 1)
        if followed is None or (followed[0] is not None and base is not None and not _are_equal(base, followed[0])):
            return None
        base = base or followed[0]
        functions[operand_value.name or ""] = followed[1]
    return base, compose(node, functions)


def _are_equal(a: ir.Value, b: ir.Value) -> bool:
    """Return whether two results of DequantizeLinear are equal, as they have the same operands."""
    if a is b:
        return True
    p, q = dequantised(a), dequantised(b)
    return p is not None and q is not None and p.value is q.value and have_same_parameters(p, q)


def compose(node: ir.Node, operands: Mapping[str, Function]) -> Function:
    """Return the function that `node` computes of functions of one tensor, its operands by name."""
    host_op = _host_operator(node)
    return lambda x: np.asarray(execute(host_op, {name: f(x) for name, f in operands.items()}, once=True)[0])


def _host_operator(node: ir.Node) -> HostOp:
    """Return a node as an operator of the host runtime."""
    assert node.graph is not None
    return parse(ir.serde.serialize_node(node), dict(node.graph.opset_imports))
