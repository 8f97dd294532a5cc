"""Find where QuantizeLinear and DequantizeLinear stand once onnxruntime has moved them, and fuse pairs in a row.

onnxruntime moves them before it looks for products of bytes: a DequantizeLinear of one scale behind operators that move
elements, and a QuantizeLinear before them, unless a tensor between is returned or has other readers. The functions here
answer, without changing the graph, which operators then read or make bytes. Wires such as Identity are removed first,
except those whose result is returned.

Operators whose results nobody reads still count as readers in onnxruntime, but are gone here: `note_idle_readers` notes
what they read before they are removed.

`fuse_qdq_pairs` changes the graph: two QDQ pairs become one whose range is the intersection of both. This changes
bytes, and the model means the changed ones, so it is part of the import.

    q = QuantizeLinear(x, s, z)    d = DequantizeLinear(q, s, z)
    p = QuantizeLinear(d, t, y)    r = DequantizeLinear(p, t, y)
        ->      q = QuantizeLinear(x, u, v)    r = DequantizeLinear(q, u, v)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import quantisation, quantisation_names, set_operand
from celosia.compiler.graph.qdq import Quantised, quantised
from celosia.compiler.graph.simplify.redundant import drop_unused, is_wire
from celosia.compiler.graph.values import attribute, captured, constant, is_folded, is_op, new_constant

IDLE = "read by an operator whose result nobody reads"
"""Key in `meta` of a value: an operator whose result nobody reads has read it."""
MOVING = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that onnxruntime exchanges with QuantizeLinear and DequantizeLinear."""


# Wires and idle readers -----------------------------------------------------------------------------------------------


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


# Producers and readers once quantisation has moved --------------------------------------------------------------------


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


def quantised_result(node: ir.Node) -> Quantised | None:
    """Return the 8-bit tensor that a QuantizeLinear makes of the result of `node`; None without one."""
    quantise = quantiser(node)
    return quantised(quantise.inputs[0]) if quantise is not None and quantise.inputs[0] is not None else None


def last_superfluous_bound(node: ir.Node) -> ir.Node:
    """Return the last of the Relus and Clips behind `node`, if quantisation makes all of them superfluous.

    Returns `node` if there are none, or not all are superfluous.
    """
    chain = [node]
    while has_one_reader(chain[-1]) and (user := only_reader(chain[-1])) is not None and is_op(user, "Relu", "Clip"):
        chain.append(user)
    y = quantised_result(chain[-1])
    return chain[-1] if y is not None and all(is_superfluous_bound(bound, y) for bound in chain[1:]) else node


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


# Pairs in a row -------------------------------------------------------------------------------------------------------


KINDS = (np.int8, np.uint8, np.int16, np.uint16)
"""Element types of pairs that onnxruntime fuses."""


class PairSteps(NamedTuple):
    """The parameters of a pair: float32 scale and zero point, one of each."""

    scale: NDArray[np.float32]
    zero: NDArray[Any]


def fuse_qdq_pairs(model: ir.Model) -> None:
    """Fuse pairs in a row, if nothing else reads the tensors between them, until none is left."""
    for node in list(model.graph):
        while is_op(node, "QuantizeLinear") and node.graph is not None and _fuse_next(model.graph, node):
            pass


def _fuse_next(graph: ir.Graph, first: ir.Node) -> bool:
    """Fuse the pair that begins with the QuantizeLinear `first` and the next pair; return False if it cannot be."""
    first_dequantise = _only_reader(first)
    second = _only_reader(first_dequantise) if is_op(first_dequantise, "DequantizeLinear") else None  # type: ignore[arg-type]
    if first_dequantise is None or second is None or not is_op(second, "QuantizeLinear"):
        return False
    last_dequantises, result = [use.node for use in second.outputs[0].uses()], second.outputs[0]
    if (
        not last_dequantises
        or result.is_graph_output()
        or not all(is_op(node, "DequantizeLinear") for node in last_dequantises)
    ):
        return False
    first_steps, second_steps = _common_steps([first, first_dequantise]), _common_steps([second, *last_dequantises])
    if first_steps is None or second_steps is None or first_steps.zero.dtype != second_steps.zero.dtype:
        return False
    steps = first_steps if first_steps == second_steps else _intersect(first_steps, second_steps)
    if not steps.scale > 0:
        return False
    name = first.outputs[0].name or ""
    parameters = [new_constant(graph, f"{name}_{suffix}", array) for suffix, array in zip(PairSteps._fields, steps)]
    for node in (first, *last_dequantises):
        for parameter, value in zip(quantisation_names(node.op_type), parameters):
            set_operand(node, parameter, value)
    for node in last_dequantises:
        node.replace_input_with(0, first.outputs[0])
    drop_unused(graph)
    return True


def _only_reader(node: ir.Node) -> ir.Node | None:
    """Return the only operator that reads the result of `node`, which is not returned; else None."""
    return only_reader(node) if has_one_reader(node) else None


def _common_steps(nodes: list[ir.Node]) -> PairSteps | None:
    """Return the parameters of all `nodes`, if they are constant scalars and equal; else None."""
    all_steps = []
    for node in nodes:
        scale, zero = (constant(value) for value in quantisation(node))
        if scale is None or zero is None or scale.dtype != np.float32 or scale.size != 1 or zero.size != 1:
            return None
        all_steps.append(PairSteps(scale.reshape(()), zero.reshape(())))
    are_equal = all(steps == all_steps[0] and steps.zero.dtype == all_steps[0].zero.dtype for steps in all_steps)
    return all_steps[0] if are_equal and all_steps[0].zero.dtype in KINDS and all_steps[0].scale > 0 else None


def _intersect(a: PairSteps, b: PairSteps) -> PairSteps:
    """Return the parameters whose range is the intersection of the ranges of `a` and `b`, computed in float32."""
    info = np.iinfo(a.zero.dtype)
    ranges = [
        [np.float32(integer - int(steps.zero)) * steps.scale for integer in (info.min, info.max)] for steps in (a, b)
    ]
    low, high = max(ranges[0][0], ranges[1][0]), min(ranges[0][1], ranges[1][1])
    scale = np.asarray((high - low) / np.float32(info.max - info.min), np.float32)
    if not scale > 0:
        return PairSteps(scale, a.zero)
    zero = float(np.float32(info.min) - np.float32(low / scale))
    return PairSteps(scale, np.asarray(np.trunc(zero + np.copysign(0.5, zero)), a.zero.dtype))
