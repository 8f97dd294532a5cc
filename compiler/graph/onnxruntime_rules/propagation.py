"""Find where QuantizeLinear and DequantizeLinear stand once onnxruntime has moved them.

onnxruntime moves them before it looks for products of bytes: a DequantizeLinear of one scale behind operators that move
elements, and a QuantizeLinear before them, unless a tensor between is returned or has other readers. These functions
answer, without changing the graph, which operators then read or make bytes. Wires such as Identity are removed first,
except those whose result is returned.

Operators whose results nobody reads still count as readers in onnxruntime, but are gone here: `note_idle_readers` notes
what they read before they are removed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.qdq import Quantised, quantised
from celosia.compiler.graph.simplify.identities import is_wire
from celosia.compiler.graph.values import attribute, captured, constant, is_folded, is_op

IDLE = "read by an operator whose result nobody reads"
"""Key in `meta` of a value: an operator whose result nobody reads has read it."""
MOVING = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that onnxruntime exchanges with QuantizeLinear and DequantizeLinear."""


def is_removed_wire(node: ir.Node) -> bool:
    """Return whether `node` is a wire that onnxruntime removes: it keeps those whose result is returned."""
    return is_wire(node) and not node.outputs[0].is_graph_output()


def note_idle_readers(graph: ir.Graph) -> None:
    """Mark the values that operators without readers read, before these operators are removed.

    Such operators do not count if they are wires or constant, or if an operator that stays computes the same as they
    do: onnxruntime merges the two.
    """
    needed = set(graph.outputs)
    for node in reversed(graph):
        if not needed.isdisjoint(node.outputs):
            needed.update(value for value in (*node.inputs, *captured(node)) if value is not None)
    equal_value: dict[ir.Value | None, ir.Value | None] = {}
    staying_nodes = {_description(node, equal_value): node for node in graph if not needed.isdisjoint(node.outputs)}
    for node in graph:
        if not needed.isdisjoint(node.outputs):
            continue
        if is_wire(node):
            equal_value[node.outputs[0]] = equal_value.get(node.inputs[0], node.inputs[0])
        elif (twin := staying_nodes.get(_description(node, equal_value))) is not None:
            equal_value.update(zip(node.outputs, twin.outputs))
        elif not all(map(is_folded, node.outputs)):
            for value in needed.intersection(equal_value.get(value, value) for value in node.inputs):
                value.meta[IDLE] = True


def _description(node: ir.Node, same: Mapping[ir.Value | None, ir.Value | None]) -> Hashable:
    """Return a key that is equal for operators that compute the same.

    same: value -> an equal value that stands for it.
    """
    attrs = sorted((name, repr(attr.value)) for name, attr in node.attributes.items())
    return node.domain, node.op_type, (*attrs,), tuple(same.get(value, value) for value in node.inputs)


def producer_before_wires(value: ir.Value | None) -> ir.Node | None:
    """Return the operator that computes `value`, before wires (operators that change nothing) that onnxruntime
    removes."""
    node = value.producer() if value is not None else None
    while node is not None and is_removed_wire(node):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node


def producer_before_moves(value: ir.Value | None) -> ir.Node | None:
    """Return the operator that computes the elements of `value`, skipping operators that move them.

    If it is a DequantizeLinear, it comes to stand directly before the readers of `value`.
    """
    node = producer_before_wires(value)
    while node is not None and is_op(node, *MOVING):
        node = producer_before_wires(node.inputs[0])
    return node


def only_reader(node: ir.Node) -> ir.Node | None:
    """Return the only operator that reads the result of `node`, skipping wires; None if there are several or none.

    The result may be returned as well.
    """
    while len(uses := list(node.outputs[0].uses())) == 1 and uses[0].node.graph is node.graph:
        if IDLE in node.outputs[0].meta:
            return None
        node = uses[0].node
        if not is_removed_wire(node):
            return node
    return None


def has_one_reader(node: ir.Node) -> bool:
    """Return whether one operator alone reads the result of `node`, which is not returned."""
    return not node.outputs[0].is_graph_output() and only_reader(node) is not None


def is_quantised(node: ir.Node) -> bool:
    """Return whether a QuantizeLinear comes to stand directly behind `node`, as its only reader."""
    return quantiser(node) is not None


def quantiser(node: ir.Node) -> ir.Node | None:
    """Return the QuantizeLinear that comes to stand directly behind `node`, as its only reader; else None.

    It moves before operators that move elements. None of the tensors that it passes may be returned, except the operand
    of a Transpose.
    """
    user = only_reader(node)
    while user is not None and is_op(user, *MOVING):
        if not (has_one_reader(node) or is_op(user, "Transpose")) or not has_one_reader(user):
            return None
        node, user = user, only_reader(user)
    return user if is_op(user, "QuantizeLinear") else None


def last_superfluous_bound(node: ir.Node) -> ir.Node:
    """Return the last of the Relus and Clips behind `node`, if quantisation makes all of them superfluous.

    Returns `node` if there are none, or not all are superfluous.
    """
    chain = [node]
    while has_one_reader(chain[-1]) and (user := only_reader(chain[-1])) is not None and is_op(user, "Relu", "Clip"):
        chain.append(user)
    y = quantised_result(chain[-1])
    return chain[-1] if y is not None and all(is_superfluous_bound(bound, y) for bound in chain[1:]) else node


def quantised_result(node: ir.Node) -> Quantised | None:
    """Return the 8-bit tensor that a QuantizeLinear makes of the result of `node`; None without one."""
    quantise = quantiser(node)
    return quantised(quantise.inputs[0]) if quantise is not None and quantise.inputs[0] is not None else None


def is_superfluous_bound(bound: ir.Node, y: Quantised) -> bool:
    """Return whether all reals that `y` can represent lie between the bounds of a Relu or Clip."""
    info, scale, zero = np.iinfo(y.dtype), y.scale.item(), y.zero.item()
    if is_op(bound, "Relu"):
        return bool(zero == info.min)
    ends = [attribute(bound, "min", -np.inf), attribute(bound, "max", np.inf)]
    for place, value in enumerate(bound.inputs[1:]):
        if value is not None:
            end = constant(value)
            ends[place] = np.nan if end is None or end.size != 1 else end.item()
    return bool(ends[0] <= (info.min - zero) * scale and (info.max - zero) * scale <= ends[1])
