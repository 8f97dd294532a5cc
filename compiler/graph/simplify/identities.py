"""Operators that change nothing go, and two that make one become one.

    a = Sub(x, 0)
    b = Transpose(a) perm=[0, 2, 1]
    c = Transpose(b) perm=[0, 2, 1]     ->     y = Relu(x)
    d = Relu(c)
    y = Relu(d)

Each rule holds for every element of the type, NaN, infinities and -0.0 included: x + 0.0 is not x where x is -0.0, so
it stays, while x - 0.0 and x + (-0.0) go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.simplify.redundant import drop_unused
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    constant,
    is_op,
    new_constant,
    replace_by,
    shape,
)
from celosia.compiler.ops import VIEWS, op_spec, operators_with
from celosia.compiler.program.op_spec import filling

Rule = Callable[[ir.Graph, ir.Node], ir.Value | None]
"""(graph, node) -> the value that the output of the node equals, perhaps that of a new node; None where none."""
RULES: dict[str, Rule] = {}
"""What each operator may equal. An output that differs from the value in shape or element type keeps its operator."""
_rule = filling(RULES)


def simplify(model: ir.Model) -> None:
    """Apply RULES until none applies."""
    _apply(model.graph, RULES)


def remove_wires(model: ir.Model) -> None:
    """Apply WIRES, after which operators stand beside the QuantizeLinear and DequantizeLinear that they belong to."""
    _apply(model.graph, WIRES)


def is_wire(node: ir.Node) -> bool:
    """Whether `node` only hands its first input on."""
    rule = WIRES.get(node.op_type) if node.domain in ("", "ai.onnx") and node.graph is not None else None
    return rule is not None and rule(node.graph, node) is not None  # type: ignore[arg-type]


def _apply(graph: ir.Graph, rules: Mapping[str, Rule]) -> None:
    changed = True
    while changed:
        changed = False
        for node in list(graph):
            rule = rules.get(node.op_type) if node.domain in ("", "ai.onnx") else None
            if rule is None or node.graph is None or not _is_typed(node):
                continue
            value = rule(graph, node)
            if value is not None and _same_type(node, value):
                if value.type is None:
                    value.type, value.shape = node.outputs[0].type, node.outputs[0].shape
                changed |= replace_by(node, value)
        drop_unused(graph)


def _is_typed(node: ir.Node) -> bool:
    out = node.outputs[0]
    return node.op_type in PASSED_ON or (out.dtype is not None and shape(out) is not None)


def _same_type(node: ir.Node, value: ir.Value) -> bool:
    out = node.outputs[0]
    return node.op_type in PASSED_ON or (value.dtype == out.dtype and shape(value) == shape(out))


def _new(graph: ir.Graph, node: ir.Node, op: str, inputs: Sequence[ir.Value | None], **attrs: Any) -> ir.Value:
    """The output of a new operator in front of `node`, of the type of its output."""
    old = node.outputs[0]
    out = ir.Value(name=old.name, shape=old.shape, type=old.type)
    old.name = None
    graph.insert_before(node, ir.Node("", op, inputs, attributes(**attrs), outputs=[out], name=node.name))
    return out


def _before(node: ir.Node, *ops: str) -> ir.Node | None:
    """The operator that makes the first input of `node`, where it is one of `ops` in the same graph."""
    producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    same = producer is not None and producer.graph is node.graph and producer.domain in ("", "ai.onnx")
    return producer if same and is_op(producer, *ops) else None


# Rules ----------------------------------------------------------------------------------------------------------


@_rule("Identity", *(name for name in operators_with("repeated") if op_spec(name).scale is None))
def _itself(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """The only input: Identity, and Concat, Sum, Min, Max, Mean of one."""
    return node.inputs[0] if len(node.inputs) == 1 else None


@_rule("Expand", "Tile")
def _same_shape(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """An operator that can only copy where its output has the shape of its input: Expand, Tile."""
    return node.inputs[0]


def _neutral(number: float, either: bool) -> Rule:
    """x op number = x; also number op x where `either`."""

    def rule(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
        for x, c in [(0, 1), (1, 0)][: 1 + either]:
            array = constant(node.inputs[c])
            if array is None or array.dtype.kind not in "iuf" or array.size == 0:
                continue
            signed = array.dtype.kind != "f" or bool(np.all(np.signbit(array) == np.signbit(number)))
            value = node.inputs[x]
            if np.all(array == number) and signed and value is not None and shape(value) == shape(node.outputs[0]):
                return value
        return None

    return rule


_rule("Add")(_neutral(-0.0, either=True))
_rule("Sub")(_neutral(0.0, either=False))
_rule("Mul")(_neutral(1.0, either=True))
_rule("Div")(_neutral(1.0, either=False))


@_rule("Relu", "Abs", "Ceil", "Floor", "Round", "Sign")
def _twice(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """f(f(x)) = f(x)."""
    return node.inputs[0] if _before(node, node.op_type) is not None else None


@_rule("Neg", "Not", "BitwiseNot")
def _undone(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """f(f(x)) = x."""
    inner = _before(node, node.op_type)
    return inner.inputs[0] if inner is not None else None


@_rule("Transpose")
def _transpose(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    dims = shape(node.outputs[0])
    if dims is None:
        return None
    perm, x = _permutation(node, len(dims)), node.inputs[0]
    inner = _before(node, "Transpose")
    if inner is not None:
        first = _permutation(inner, len(dims))
        perm, x = [first[axis] for axis in perm], inner.inputs[0]
    if perm == sorted(perm):
        return x
    return None if inner is None else _new(graph, node, "Transpose", [x], perm=perm)


def _permutation(node: ir.Node, rank: int) -> list[int]:
    return list(attribute(node, "perm", range(rank)[::-1]))


LOSSLESS = frozenset((
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
))  # fmt: skip
"""Types of which numpy knows which hold the values of which."""


@_rule("Cast")
def _cast(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """To the type it has; or of a type that holds all values of the type before, among integers or among floats."""
    x, inner = node.inputs[0], _before(node, "Cast")
    if x is None or x.dtype == node.outputs[0].dtype:
        return x
    if inner is None or inner.inputs[0] is None:
        return None
    source, between, target = inner.inputs[0].dtype, x.dtype, node.outputs[0].dtype
    if source is None or between is None or target is None:
        return None
    narrow, wide = source.numpy(), between.numpy()
    if {narrow.name, wide.name} - LOSSLESS or not np.can_cast(narrow, wide, "safe"):
        return None
    if source == target:
        return inner.inputs[0]
    if narrow.kind != "b" and (narrow.kind == "f") != (wide.kind == "f"):
        return None  # out of range, an integer wraps and a float does not
    return _new(graph, node, "Cast", [inner.inputs[0]], to=int(target))


def _same_cast(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """To the type it has."""
    x = node.inputs[0]
    return x if x is not None and x.dtype == node.outputs[0].dtype else None


RESHAPES = VIEWS - {"Identity", "Dropout"}


@_rule(*RESHAPES)
def _view(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """A view of the same shape, or of a view."""
    x, dims, inner = node.inputs[0], shape(node.outputs[0]), _before(node, *RESHAPES)
    if x is None or dims is None or 0 in dims:
        return None
    if shape(x) == dims:
        return x
    if inner is None or inner.inputs[0] is None:
        return None
    if shape(inner.inputs[0]) == dims:
        return inner.inputs[0]
    target = new_constant(graph, f"{node.outputs[0].name}_shape", np.array(dims, np.int64))
    return _new(graph, node, "Reshape", [inner.inputs[0], target])


@_rule("Clip")
def _clip(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Two ranges that overlap become one."""
    inner, x = _before(node, "Clip"), node.inputs[0]
    if inner is None or x is None or x.dtype is None or len(node.inputs) < 2 or len(inner.inputs) < 2:
        return None
    ranges = [_range(inner, x.dtype.numpy()), _range(node, x.dtype.numpy())]
    if None in ranges:
        return None
    (a, b), (c, d) = ranges  # type: ignore[misc]
    low, high = max(a, c), min(b, d)
    if not (a <= b and c <= d and low <= high):
        return None
    name = node.outputs[0].name
    given = [
        new_constant(graph, f"{name}_{what}", np.array(v, x.dtype.numpy())) for what, v in (("min", low), ("max", high))
    ]
    return _new(graph, node, "Clip", [inner.inputs[0], *given])


def _range(node: ir.Node, kind: Any) -> tuple[Any, Any] | None:
    """Both bounds of a Clip where they are constants, no NaN and no -0.0."""
    if kind.kind == "f":
        bounds: list[Any] = [-np.inf, np.inf]
    elif kind.kind in "iu":
        bounds = [np.iinfo(kind).min, np.iinfo(kind).max]
    else:
        return None
    for number, name in enumerate(("min", "max")):
        if (value := operand(node, name)) is None:
            continue
        array = constant(value)
        if array is None or array.size != 1:
            return None
        bounds[number] = array.item()
        if kind.kind == "f" and (np.isnan(array.item()) or (array.item() == 0 and np.signbit(array.item()))):
            return None
    return bounds[0], bounds[1]


@_rule("Dropout")
def _dropout(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Outside of training."""
    training = operand(node, "training_mode")
    fixed = constant(training)
    off = training is None or (fixed is not None and not np.any(fixed))
    version = graph.opset_imports.get("", 21)
    return node.inputs[0] if off and (version >= 7 or attribute(node, "is_test", 0)) else None


@_rule("Pad")
def _pad(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    pads = attribute(node, "pads", constant(operand(node, "pads")))
    return node.inputs[0] if pads is not None and not np.any(pads) else None


@_rule("Slice")
def _slice(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Forwards with steps of 1, as long as the whole."""
    given = operand(node, "steps")
    steps = constant(given)
    forwards = given is None or (steps is not None and bool(np.all(steps == 1)))
    return node.inputs[0] if forwards else None


PASSED_ON = frozenset(op for op, rule in RULES.items() if rule in (_itself, _dropout))
"""Operators whose output has the type of their input, known or not."""
WIRES: dict[str, Rule] = {"Identity": _itself, "Dropout": _dropout, "Cast": _same_cast}
"""What onnxruntime removes before it looks for integer operators."""
