"""Fuse Q→DQ→Q→DQ into one pair with the intersection of both ranges, as onnxruntime does.

    q = QuantizeLinear(x, s, z)    d = DequantizeLinear(q, s, z)
    p = QuantizeLinear(d, t, y)    r = DequantizeLinear(p, t, y)
        ->      q = QuantizeLinear(x, u, v)    r = DequantizeLinear(q, u, v)

This is no rewriting that keeps a model's meaning but part of it, so the importer does it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.onnxruntime_rules.propagation import is_passed_on, only_reader
from celosia.compiler.graph.operands import quantisation, quantisation_names, set_operand
from celosia.compiler.graph.simplify.redundant import drop_unused
from celosia.compiler.graph.values import constant, is_op, new_constant

KINDS = (np.int8, np.uint8, np.int16, np.uint16)


class PairSteps(NamedTuple):
    """Meaning of a tensor's integers: scale, a float32, and zero point."""

    scale: NDArray[np.float32]
    zero: NDArray[Any]


def fuse_qdq_pairs(model: ir.Model) -> None:
    """Change `model`: pairs of roundings behind each other become one, where nothing else reads what is between."""
    for node in list(model.graph):
        while is_op(node, "QuantizeLinear") and node.graph is not None and _merge(model.graph, node):
            pass


def _merge(graph: ir.Graph, first: ir.Node) -> bool:
    back = _reader(first)
    second = _reader(back) if is_op(back, "DequantizeLinear") else None  # type: ignore[arg-type]
    if back is None or second is None or not is_op(second, "QuantizeLinear"):
        return False
    last, result = [use.node for use in second.outputs[0].uses()], second.outputs[0]
    if not last or result.is_graph_output() or not all(is_op(node, "DequantizeLinear") for node in last):
        return False
    before, after = _same_steps([first, back]), _same_steps([second, *last])
    if before is None or after is None or before.zero.dtype != after.zero.dtype:
        return False
    steps = before if before == after else _of_both(before, after)
    if not steps.scale > 0:
        return False
    name = first.outputs[0].name or ""
    parameters = [new_constant(graph, f"{name}_{part}", array) for part, array in zip(PairSteps._fields, steps)]
    for node in (first, *last):
        for parameter, value in zip(quantisation_names(node.op_type), parameters):
            set_operand(node, parameter, value)
    for node in last:
        node.replace_input_with(0, first.outputs[0])
    drop_unused(graph)
    return True


def _reader(node: ir.Node) -> ir.Node | None:
    """The operator that alone reads the result of `node`, which is not returned."""
    return only_reader(node) if is_passed_on(node) else None


def _same_steps(nodes: list[ir.Node]) -> PairSteps | None:
    """Those of all `nodes`, where they are constants, one for all elements, and equal."""
    found = []
    for node in nodes:
        scale, zero = (constant(value) for value in quantisation(node))
        if scale is None or zero is None or scale.dtype != np.float32 or scale.size != 1 or zero.size != 1:
            return None
        found.append(PairSteps(scale.reshape(()), zero.reshape(())))
    same = all(steps == found[0] and steps.zero.dtype == found[0].zero.dtype for steps in found)
    return found[0] if same and found[0].zero.dtype in KINDS and found[0].scale > 0 else None


def _of_both(a: PairSteps, b: PairSteps) -> PairSteps:
    """Steps from the larger of the least values of `a` and `b` to the smaller of their largest, in float32."""
    info = np.iinfo(a.zero.dtype)
    ends = [[np.float32(end - int(each.zero)) * each.scale for end in (info.min, info.max)] for each in (a, b)]
    low, high = max(ends[0][0], ends[1][0]), min(ends[0][1], ends[1][1])
    scale = np.asarray((high - low) / np.float32(info.max - info.min), np.float32)
    if not scale > 0:
        return PairSteps(scale, a.zero)
    zero = float(np.float32(info.min) - np.float32(low / scale))
    return PairSteps(scale, np.asarray(np.trunc(zero + np.copysign(0.5, zero)), a.zero.dtype))
