"""Fuse two QDQ pairs in a row into one whose range is the intersection of both, as onnxruntime does.

    q = QuantizeLinear(x, s, z)    d = DequantizeLinear(q, s, z)
    p = QuantizeLinear(d, t, y)    r = DequantizeLinear(p, t, y)
        ->      q = QuantizeLinear(x, u, v)    r = DequantizeLinear(q, u, v)

This changes bytes, and the model means the changed ones, so it is part of the import.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.onnxruntime_rules.propagation import has_one_reader, only_reader
from celosia.compiler.graph.operands import quantisation, quantisation_names, set_operand
from celosia.compiler.graph.simplify.redundant import drop_unused
from celosia.compiler.graph.values import constant, is_op, new_constant

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
