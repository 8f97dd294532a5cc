"""Move DequantizeLinear and QuantizeLinear as onnxruntime does before it looks for products of bytes.

DequantizeLinear of one scale changes places with what moves elements behind it, QuantizeLinear with what moves elements
before it, unless that is returned, or read by others. Which results an operator reads or makes in bytes follows from
there. What hands elements on, such as Identity, goes first, but where it is returned. Operators whose results nobody
reads are readers there, and gone here: importing notes what they read (`note_idle_readers`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.quantized.qdq import Quantised, quantised
from celosia.compiler.graph.simplify.identities import is_wire
from celosia.compiler.graph.values import attribute, captured, constant, is_folded, is_op

IDLE = "read by an operator whose result nobody reads"
"""In `meta` of a value."""
MOVING = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def hands_on(node: ir.Node) -> bool:
    """Whether `node` is a wire, which onnxruntime takes away: it leaves those whose result is returned."""
    return is_wire(node) and not node.outputs[0].is_graph_output()


def note_idle_readers(graph: ir.Graph) -> None:
    """Note in `graph`, before they are removed, what operators read whose results nobody does. They count as readers
    where they are no wires, and where no operator that stays does the same: onnxruntime makes those one."""
    needed = set(graph.outputs)
    for node in reversed(graph):
        if not needed.isdisjoint(node.outputs):
            needed.update(value for value in (*node.inputs, *captured(node)) if value is not None)
    same: dict[ir.Value | None, ir.Value | None] = {}
    staying = {_described(node, same): node for node in graph if not needed.isdisjoint(node.outputs)}
    for node in graph:
        if not needed.isdisjoint(node.outputs):
            continue
        if is_wire(node):
            same[node.outputs[0]] = same.get(node.inputs[0], node.inputs[0])
        elif (other := staying.get(_described(node, same))) is not None:
            same.update(zip(node.outputs, other.outputs))
        elif not all(map(is_folded, node.outputs)):
            for value in needed.intersection(same.get(value, value) for value in node.inputs):
                value.meta[IDLE] = True


def _described(node: ir.Node, same: Mapping[ir.Value | None, ir.Value | None]) -> Hashable:
    """Equal for operators that do the same to the same values, for some of which others stand in `same`."""
    attrs = sorted((name, repr(attr.value)) for name, attr in node.attributes.items())
    return node.domain, node.op_type, (*attrs,), tuple(same.get(value, value) for value in node.inputs)


def maker(value: ir.Value | None) -> ir.Node | None:
    """The operator that makes `value`, without what hands it on."""
    node = value.producer() if value is not None else None
    while node is not None and hands_on(node):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node


def origin(value: ir.Value | None) -> ir.Node | None:
    """The operator that makes the elements of `value`, behind which some may move them: the DequantizeLinear that
    comes to stand before what reads `value`, if it is one."""
    node = maker(value)
    while node is not None and is_op(node, *MOVING):
        node = maker(node.inputs[0])
    return node


def only_reader(node: ir.Node) -> ir.Node | None:
    """The operator that alone reads the result of `node`, without what hands it on. That it is returned does not
    count."""
    while len(uses := list(node.outputs[0].uses())) == 1 and uses[0].node.graph is node.graph:
        if IDLE in node.outputs[0].meta:
            return None
        node = uses[0].node
        if not hands_on(node):
            return node
    return None


def is_passed_on(node: ir.Node) -> bool:
    """Whether one operator reads the result of `node`, which is not returned."""
    return not node.outputs[0].is_graph_output() and only_reader(node) is not None


def is_quantised(node: ir.Node) -> bool:
    """Whether QuantizeLinear comes to stand behind `node`, as its only reader."""
    return quantiser(node) is not None


def quantiser(node: ir.Node) -> ir.Node | None:
    """The QuantizeLinear that comes to stand behind `node`, as its only reader. It changes places with a Transpose also
    where what is transposed is returned, but with nothing that is returned itself."""
    user = only_reader(node)
    while user is not None and is_op(user, *MOVING):
        if not (is_passed_on(node) or is_op(user, "Transpose")) or not is_passed_on(user):
            return None
        node, user = user, only_reader(user)
    return user if is_op(user, "QuantizeLinear") else None


def past_bounds(node: ir.Node) -> ir.Node:
    """The last of Relu and Clip behind `node` where QuantizeLinear makes them superfluous, else `node`."""
    chain = [node]
    while is_passed_on(chain[-1]) and (user := only_reader(chain[-1])) is not None and is_op(user, "Relu", "Clip"):
        chain.append(user)
    y = bytes_behind(chain[-1])
    return chain[-1] if y is not None and all(is_superfluous(each, y) for each in chain[1:]) else node


def bytes_behind(node: ir.Node) -> Quantised | None:
    """Return the quantised result of `node`, if a QuantizeLinear makes bytes of it."""
    quantise = quantiser(node)
    return quantised(quantise.inputs[0]) if quantise is not None and quantise.inputs[0] is not None else None


def is_superfluous(bound: ir.Node, y: Quantised) -> bool:
    """Whether all that `y` can be lies between the bounds of a Relu or Clip."""
    info, scale, zero = np.iinfo(y.dtype), y.scale.item(), y.zero.item()
    if is_op(bound, "Relu"):
        return bool(zero == info.min)
    ends = [attribute(bound, "min", -np.inf), attribute(bound, "max", np.inf)]
    for place, value in enumerate(bound.inputs[1:]):
        if value is not None:
            end = constant(value)
            ends[place] = np.nan if end is None or end.size != 1 else end.item()
    return bool(ends[0] <= (info.min - zero) * scale and (info.max - zero) * scale <= ends[1])
