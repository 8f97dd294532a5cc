"""Expand the operator Gradient into nodes, by reverse-mode differentiation of the nodes before it.

c = Add(a, b); da, db = Gradient<xs=[a, b], y=c>(a, b)   ->   c = Add(a, b); one = ...; da = Identity(one); ...
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import NodeProto, helper

DOMAIN = "ai.onnx.preview.training"
"""Domain of the operator Gradient."""
Rule = Callable[["_Tape", NodeProto, str], list[str | None]]
"""(tape, node, gradient of its output) -> gradients of its inputs."""


class NoGradient(ValueError):
    """A Gradient that cannot be written as nodes; the message names the operator without a derivative."""


class _Tape:
    """The nodes that compute gradients, in order; the names of their outputs begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[NodeProto] = []

    def add(self, op: str, *inputs: str) -> str:
        """Append a node and return the name of its output."""
        name = f"{self.prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name))
        return name


RULES: dict[str, Rule] = {
    "Identity": lambda t, n, g: [g],
    "Add": lambda t, n, g: [g, g],
    "Sub": lambda t, n, g: [g, t.add("Neg", g)],
    "Mul": lambda t, n, g: [t.add("Mul", g, n.input[1]), t.add("Mul", g, n.input[0])],
    "Div": lambda t, n, g: [
        t.add("Div", g, n.input[1]), t.add("Neg", t.add("Div", t.add("Mul", g, n.output[0]), n.input[1]))
    ],
    "Neg": lambda t, n, g: [t.add("Neg", g)],
    "Exp": lambda t, n, g: [t.add("Mul", g, n.output[0])],
    "Log": lambda t, n, g: [t.add("Div", g, n.input[0])],
    "Sqrt": lambda t, n, g: [t.add("Div", g, t.add("Add", n.output[0], n.output[0]))],
    "Relu": lambda t, n, g: [t.add("Mul", g, t.add("Sign", n.output[0]))],
    "Sin": lambda t, n, g: [t.add("Mul", g, t.add("Cos", n.input[0]))],
    "Cos": lambda t, n, g: [t.add("Neg", t.add("Mul", g, t.add("Sin", n.input[0])))],
    "Tanh": lambda t, n, g: [t.add("Sub", g, t.add("Mul", g, t.add("Mul", n.output[0], n.output[0])))],
    "Sigmoid": lambda t, n, g: [
        t.add("Mul", g, t.add("Sub", n.output[0], t.add("Mul", n.output[0], n.output[0])))
    ],
}  # fmt: skip
"""Operator -> the rule of its derivative."""


def expand_gradients(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` without Gradient. Raises NoGradient.

    Operands of differentiated operators must have the same shape: the rules do not sum over broadcast axes.
    """
    if not any(node.op_type == "Gradient" and node.domain == DOMAIN for node in proto.graph.node):
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    nodes: list[NodeProto] = []
    names = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    for number, node in enumerate(proto.graph.node):
        is_gradient = node.op_type == "Gradient" and node.domain == DOMAIN
        nodes += (
            _differentiate(nodes, node, _unused_prefix(f"{node.name or 'gradient'}.{number}", names))
            if is_gradient
            else [node]
        )
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result


def _unused_prefix(prefix: str, names: set[str]) -> str:
    """Return `prefix`, lengthened by "_" until no name in `names` begins with it."""
    while any(name.startswith(prefix) for name in names):
        prefix += "_"
    return prefix


def _differentiate(before: list[NodeProto], node: NodeProto, prefix: str) -> list[NodeProto]:
    """Return the nodes that compute a Gradient `node` from the nodes `before` it.

    Gradients flow from y backwards through each node that depends on one of xs; several paths to one value are added
    up.
    """
    attributes = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
    xs, y = [name.decode() for name in attributes["xs"]], attributes["y"].decode()
    tape = _Tape(prefix)
    dependent = set(xs)
    for earlier in before:
        if dependent & set(earlier.input):
            dependent |= set(earlier.output)
    zero = tape.add("Sub", y, y)
    gradients: dict[str, str] = {y: tape.add("Exp", zero)}
    values = dict(zip(xs, node.input))
    for earlier in reversed(before):
        g = next((gradients[name] for name in earlier.output if name in gradients), None)
        if g is None or not dependent & set(earlier.input):
            continue
        if earlier.op_type not in RULES or earlier.domain not in ("", "ai.onnx"):
            raise NoGradient(f"Gradient ({node.name}): there is no derivative of {earlier.op_type} ({earlier.name})")
        for name, contribution in zip(earlier.input, RULES[earlier.op_type](tape, earlier, g)):
            if name in dependent and contribution is not None:
                gradients[name] = tape.add("Add", gradients[name], contribution) if name in gradients else contribution
    for x, out in zip(xs, node.output):
        if out:
            source = gradients.get(x) or tape.add("Sub", values.get(x, x), values.get(x, x))
            tape.nodes.append(helper.make_node("Identity", [source], [out], name=f"{prefix}.{out}"))
    return tape.nodes
