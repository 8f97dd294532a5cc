"""Remove redundant operators: those that equal an earlier one, that nothing reads, or that change nothing.

`merge_equal` computes equal operators once. They are equal if operator, attributes and inputs are; constants are equal
if their elements are. Random operators, operators with subgraphs, and operators whose output the graph returns stay.

    a = Exp(x)
    b = Exp(x)         ->     a = Exp(x)
    y = Mul(a, b)             y = Mul(a, a)

`simplify` applies RULES, which replace an operator by its operand, or two operators by one. Each rule holds for every
element of the type, NaN, infinities and -0.0 included: x + 0.0 is not x where x is -0.0, so it stays, while x - 0.0 and
x + (-0.0) go.

    a = Sub(x, 0)
    b = Transpose(a) perm=[0, 2, 1]
    c = Transpose(b) perm=[0, 2, 1]     ->     y = Relu(x)
    d = Relu(c)
    y = Relu(d)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.external_data import is_mapped
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    constant,
    is_op,
    new_constant,
    replace_by,
    shape,
    subgraphs,
)
from celosia.compiler.ops import VIEWS, op_spec, operators_with
from celosia.compiler.program.host.hostops import RANDOM
from celosia.compiler.program.op_spec import registering_in


def merge_quantisations(model: ir.Model) -> None:
    """Replace each QuantizeLinear that equals an earlier one by that one.

    onnxruntime merges equal operators before it looks for integer operators, so that the two count as one reader.
    """
    merge_equal(model, only=("QuantizeLinear",))


def merge_equal(model: ir.Model, only: Collection[str] | None = None) -> None:
    """Replace each operator that equals an earlier one by that one. only: the operators to merge; None for all."""
    graph = model.graph
    value_keys: dict[ir.Value, Any] = {}
    first_with_key: dict[Any, ir.Node] = {}
    for node in list(graph):
        key = _node_key(node, value_keys) if only is None or is_op(node, *only) else None
        if key is None:
            continue
        first = first_with_key.setdefault(key, node)
        if first is not node and not any(out.is_graph_output() for out in node.outputs):
            for output, first_output in zip(node.outputs, first.outputs):
                ir.convenience.replace_all_uses_with(output, first_output)
            graph.remove(node, safe=True)


def _node_key(node: ir.Node, value_keys: dict[ir.Value, Any]) -> Any:
    """Return a key that nodes share if they compute the same; None for nodes that are not merged.

    value_keys: keys of values so far; those of the node's inputs are added.
    """
    if node.op_type in RANDOM or subgraphs(node):
        return None
    attrs = b"".join(
        ir.serde.serialize_attribute(node.attributes[name]).SerializeToString() for name in sorted(node.attributes)
    )
    inputs = tuple(
        value_keys.setdefault(value, _value_key(value)) if value is not None else None for value in node.inputs
    )
    domain = "" if node.domain == "ai.onnx" else node.domain
    return domain, node.op_type, attrs, inputs, tuple(bool(out.name) for out in node.outputs)


def _value_key(value: ir.Value) -> Any:
    """Return a key that equal constants share; other values have keys of their own."""
    if is_mapped(value):  # a hash would read the whole file
        return id(value)
    array = constant(value)
    if array is None or array.dtype.kind == "O":
        return id(value)
    return array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).digest()


def remove_dead(model: ir.Model) -> None:
    """Remove operators and constants whose outputs are neither read nor returned."""
    drop_unused(model.graph)


def drop_unused(graph: ir.Graph) -> None:
    """Remove nodes and constants of `graph` whose outputs are neither read nor returned."""
    for node in reversed(list(graph)):
        if all(not list(out.uses()) and not out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)
    for name in list(graph.initializers):
        value = graph.initializers[name]
        if not list(value.uses()) and not value.is_graph_output():
            del graph.initializers[name]


Rule = Callable[[ir.Graph, ir.Node], ir.Value | None]
"""(graph, node) -> the value that the output of the node equals, perhaps of a new node; None if the rule does not
apply."""
RULES: dict[str, Rule] = {}
"""Operator -> its rule. A value of another shape or element type than the output does not replace it."""
_rule = registering_in(RULES)
"""Decorator that registers a rule for operators."""


def simplify(model: ir.Model) -> None:
    """Apply RULES until none applies."""
    _apply(model.graph, RULES)


def remove_wires(model: ir.Model) -> None:
    """Apply WIRES, so that operators stand directly at their QuantizeLinear and DequantizeLinear."""
    _apply(model.graph, WIRES)


def is_wire(node: ir.Node) -> bool:
    """Return whether `node` only passes its first input on."""
    rule = WIRES.get(node.op_type) if node.domain in ("", "ai.onnx") and node.graph is not None else None
    return rule is not None and rule(node.graph, node) is not None  # type: ignore[arg-type]


def _apply(graph: ir.Graph, rules: Mapping[str, Rule]) -> None:
    """Apply rules to all nodes, again and again until nothing changes, and drop what is then unused."""
    changed = True
    while changed:
        changed = False
        for node in list(graph):
            rule = rules.get(node.op_type) if node.domain in ("", "ai.onnx") else None
            if rule is None or node.graph is None or not _is_typed(node):
                continue
            value = rule(graph, node)
            if value is not None and _has_same_type(node, value):
                if value.type is None:
                    value.type, value.shape = node.outputs[0].type, node.outputs[0].shape
                changed |= replace_by(node, value)
        drop_unused(graph)


def _is_typed(node: ir.Node) -> bool:
    """Return whether shape and element type of the node's output are known, as far as its rule needs them."""
    out = node.outputs[0]
    return node.op_type in TYPE_KEEPING_OPS or (out.dtype is not None and shape(out) is not None)


def _has_same_type(node: ir.Node, value: ir.Value) -> bool:
    """Return whether `value` has the shape and the element type of the node's output."""
    out = node.outputs[0]
    return node.op_type in TYPE_KEEPING_OPS or (value.dtype == out.dtype and shape(value) == shape(out))


def _insert_operator(
    graph: ir.Graph, node: ir.Node, op: str, inputs: Sequence[ir.Value | None], **attrs: Any
) -> ir.Value:
    """Insert an operator before `node` and return its output, which takes the name and type of the node's output."""
    old_output = node.outputs[0]
    out = ir.Value(name=old_output.name, shape=old_output.shape, type=old_output.type)
    old_output.name = None
    graph.insert_before(node, ir.Node("", op, inputs, attributes(**attrs), outputs=[out], name=node.name))
    return out


def _producer_among(node: ir.Node, *ops: str) -> ir.Node | None:
    """Return the producer of the first input of `node`, if it is one of `ops` in the same graph; else None."""
    producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    in_graph = producer is not None and producer.graph is node.graph and producer.domain in ("", "ai.onnx")
    return producer if in_graph and is_op(producer, *ops) else None


# Rules ----------------------------------------------------------------------------------------------------------


@_rule("Identity", *(name for name in operators_with("repeated") if op_spec(name).scale_input is None))
def _replace_single_operand(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Replace Identity, and Concat, Sum, Min, Max or Mean of one operand, by that operand."""
    return node.inputs[0] if len(node.inputs) == 1 else None


@_rule("Expand", "Tile")
def _replace_copy_of_all(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Replace an Expand or Tile by its operand; `_apply` checks that the shape stays, so that nothing is repeated."""
    return node.inputs[0]


NEUTRAL_ELEMENTS: dict[str, float] = {}
"""Operator -> the number that changes nothing as its second operand."""


def _neutral_element_rule(op: str, number: float, either: bool) -> None:
    """Register the rule "x op number = x"; with `either`, also "number op x = x"."""
    NEUTRAL_ELEMENTS[op] = number

    @_rule(op)
    def rule(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
        """Return x where the other operand is `number` everywhere, with its sign for floats."""
        for x_input, number_input in [(0, 1), (1, 0)][: 1 + either]:
            array = constant(node.inputs[number_input])
            if array is None or array.dtype.kind not in "iuf" or array.size == 0:
                continue
            sign_fits = array.dtype.kind != "f" or bool(np.all(np.signbit(array) == np.signbit(number)))
            value = node.inputs[x_input]
            if np.all(array == number) and sign_fits and value is not None and shape(value) == shape(node.outputs[0]):
                return value
        return None


_neutral_element_rule("Add", -0.0, either=True)
_neutral_element_rule("Sub", 0.0, either=False)
_neutral_element_rule("Mul", 1.0, either=True)
_neutral_element_rule("Div", 1.0, either=False)


@_rule("Relu", "Abs", "Ceil", "Floor", "Round", "Sign")
def _merge_idempotent(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Replace f(f(x)) by f(x)."""
    return node.inputs[0] if _producer_among(node, node.op_type) is not None else None


@_rule("Neg", "Not", "BitwiseNot")
def _cancel_involution(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Replace f(f(x)) by x."""
    earlier = _producer_among(node, node.op_type)
    return earlier.inputs[0] if earlier is not None else None


@_rule("Transpose")
def _merge_transposes(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Merge two transpositions into one, or remove them if the axes end in order."""
    dims = shape(node.outputs[0])
    if dims is None:
        return None
    perm, x = _permutation_of(node, len(dims)), node.inputs[0]
    earlier = _producer_among(node, "Transpose")
    if earlier is not None:
        first = _permutation_of(earlier, len(dims))
        perm, x = [first[axis] for axis in perm], earlier.inputs[0]
    if perm == sorted(perm):
        return x
    return None if earlier is None else _insert_operator(graph, node, "Transpose", [x], perm=perm)


def _permutation_of(node: ir.Node, rank: int) -> list[int]:
    """Return the permutation of a Transpose of `rank` axes; without the attribute it reverses them."""
    return list(attribute(node, "perm", range(rank)[::-1]))


LOSSLESS = frozenset((
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
))  # fmt: skip
"""Element types for which np.can_cast(..., "safe") says whether a cast keeps all values."""


@_rule("Cast")
def _merge_casts(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Remove a cast to the same type, and a first cast that keeps all values, among integers or among floats."""
    x, earlier = node.inputs[0], _producer_among(node, "Cast")
    if x is None or x.dtype == node.outputs[0].dtype:
        return x
    if earlier is None or earlier.inputs[0] is None:
        return None
    source, middle, target = earlier.inputs[0].dtype, x.dtype, node.outputs[0].dtype
    if source is None or middle is None or target is None:
        return None
    source_dtype, middle_dtype = source.numpy(), middle.numpy()
    if {source_dtype.name, middle_dtype.name} - LOSSLESS or not np.can_cast(source_dtype, middle_dtype, "safe"):
        return None
    if source == target:
        return earlier.inputs[0]
    if source_dtype.kind != "b" and (source_dtype.kind == "f") != (middle_dtype.kind == "f"):
        return None  # out of range, an integer wraps and a float does not
    return _insert_operator(graph, node, "Cast", [earlier.inputs[0]], to=int(target))


def _remove_cast_to_same_type(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Remove a cast to the type that its operand has."""
    x = node.inputs[0]
    return x if x is not None and x.dtype == node.outputs[0].dtype else None


def _remove_neutral_scalar(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Remove x + 0, x - 0, x * 1 and x / 1 for a constant of one element, also where that turns -0.0 into 0.0."""
    x, array = node.inputs[0], constant(node.inputs[1])
    is_number = array is not None and array.size == 1 and array.dtype.kind in "iuf"
    is_neutral = is_number and array.item() == NEUTRAL_ELEMENTS[node.op_type]  # type: ignore[union-attr]
    return x if is_neutral and x is not None and constant(x) is None and shape(x) == shape(node.outputs[0]) else None


RESHAPES = VIEWS - {"Identity", "Dropout"}
"""Views that may change the shape."""


@_rule(*RESHAPES)
def _merge_views(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Remove a view to the same shape, and merge two views in a row into one Reshape."""
    x, dims, earlier = node.inputs[0], shape(node.outputs[0]), _producer_among(node, *RESHAPES)
    if x is None or dims is None or 0 in dims:
        return None
    if shape(x) == dims:
        return x
    if earlier is None or earlier.inputs[0] is None:
        return None
    if shape(earlier.inputs[0]) == dims:
        return earlier.inputs[0]
    target = new_constant(graph, f"{node.outputs[0].name}_shape", np.array(dims, np.int64))
    return _insert_operator(graph, node, "Reshape", [earlier.inputs[0], target])


@_rule("Clip")
def _merge_clips(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Merge two Clips whose ranges overlap into one."""
    earlier, x = _producer_among(node, "Clip"), node.inputs[0]
    if earlier is None or x is None or x.dtype is None or len(node.inputs) < 2 or len(earlier.inputs) < 2:
        return None
    ranges = [_clip_bounds(earlier, x.dtype.numpy()), _clip_bounds(node, x.dtype.numpy())]
    if None in ranges:
        return None
    (a, b), (c, d) = ranges  # type: ignore[misc]
    low, high = max(a, c), min(b, d)
    if not (a <= b and c <= d and low <= high):
        return None
    name = node.outputs[0].name
    bounds = [
        new_constant(graph, f"{name}_{suffix}", np.array(v, x.dtype.numpy()))
        for suffix, v in (("min", low), ("max", high))
    ]
    return _insert_operator(graph, node, "Clip", [earlier.inputs[0], *bounds])


def _clip_bounds(node: ir.Node, kind: Any) -> tuple[Any, Any] | None:
    """Return both bounds of a Clip; None if they are not constant, NaN or -0.0, where merging could change bytes."""
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
def _remove_dropout(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Remove a Dropout that is not in training."""
    training = operand(node, "training_mode")
    training_array = constant(training)
    is_off = training is None or (training_array is not None and not np.any(training_array))
    version = graph.opset_imports.get("", 21)
    return node.inputs[0] if is_off and (version >= 7 or attribute(node, "is_test", 0)) else None


@_rule("Pad")
def _remove_empty_pad(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Remove a Pad by nothing."""
    pads = attribute(node, "pads", constant(operand(node, "pads")))
    return node.inputs[0] if pads is not None and not np.any(pads) else None


@_rule("Slice")
def _remove_whole_slice(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Remove a forward Slice in steps of 1; `_apply` checks that its result has the shape of its operand."""
    steps_operand = operand(node, "steps")
    steps = constant(steps_operand)
    forwards = steps_operand is None or (steps is not None and bool(np.all(steps == 1)))
    return node.inputs[0] if forwards else None


TYPE_KEEPING_OPS = frozenset(op for op, rule in RULES.items() if rule in (_replace_single_operand, _remove_dropout))
"""Operators whose output has the type of their input, even if it is not known."""
WIRES: dict[str, Rule] = {
    "Identity": _replace_single_operand,
    "Dropout": _remove_dropout,
    "Cast": _remove_cast_to_same_type,
    **dict.fromkeys(NEUTRAL_ELEMENTS, _remove_neutral_scalar),
}
"""Operator -> rule, for operators that onnxruntime removes before it looks for integer operators."""
