"""The operator Gradient: derivatives as nodes of the graph, backwards from a value to the ones it depends on.

c = Add(a, b); da, db = Gradient<xs=[a, b], y=c>(a, b)   ->   c = Add(a, b); one = ...; da = Identity(one); ...
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import NodeProto, helper

DOMAIN = "ai.onnx.preview.training"
Rule = Callable[["_Tape", NodeProto, str], list[str | None]]
"""(tape, node, gradient of its output) -> gradients of its inputs."""


class NoGradient(ValueError):
    """A Gradient that cannot be written as nodes; the message names the operator in the way."""


class _Tape:
    """Nodes that compute gradients, with fresh names."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[NodeProto] = []

    def add(self, op: str, *inputs: str) -> str:
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


def expand_gradients(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` without Gradient. Raises NoGradient. Operands must have the same shape: nothing is broadcast."""
    if not any(node.op_type == "Gradient" and node.domain == DOMAIN for node in proto.graph.node):
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    nodes: list[NodeProto] = []
    names = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    for number, node in enumerate(proto.graph.node):
        gradient = node.op_type == "Gradient" and node.domain == DOMAIN
        nodes += _expand(nodes, node, _free(f"{node.name or 'gradient'}.{number}", names)) if gradient else [node]
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result


def _free(prefix: str, names: set[str]) -> str:
    """`prefix`, or what is made of it so that none of `names` begins so."""
    while any(name.startswith(prefix) for name in names):
        prefix += "_"
    return prefix


def _expand(before: list[NodeProto], node: NodeProto, prefix: str) -> list[NodeProto]:
    given = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
    xs, y = [name.decode() for name in given["xs"]], given["y"].decode()
    tape = _Tape(prefix)
    depends = set(xs)
    for each in before:
        if depends & set(each.input):
            depends |= set(each.output)
    zero = tape.add("Sub", y, y)
    gradients: dict[str, str] = {y: tape.add("Exp", zero)}
    values = dict(zip(xs, node.input))
    for each in reversed(before):
        g = next((gradients[name] for name in each.output if name in gradients), None)
        if g is None or not depends & set(each.input):
            continue
        if each.op_type not in RULES or each.domain not in ("", "ai.onnx"):
            raise NoGradient(f"Gradient ({node.name}): there is no derivative of {each.op_type} ({each.name})")
        for name, part in zip(each.input, RULES[each.op_type](tape, each, g)):
            if name in depends and part is not None:
                gradients[name] = tape.add("Add", gradients[name], part) if name in gradients else part
    for x, out in zip(xs, node.output):
        if out:
            source = gradients.get(x) or tape.add("Sub", values.get(x, x), values.get(x, x))
            tape.nodes.append(helper.make_node("Identity", [source], [out], name=f"{prefix}.{out}"))
    return tape.nodes
