"""Differences between the original graph and the optimised one, as plain data for pictures of before and after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx

from celosia.compiler.superoptimise.graph import ONNX, ONNX_NAMES, BytesGraph, GraphOp

MAX_OPERATORS = 200
"""Limit of the operators in a picture; later ones are left out."""
NODE_FIELDS = {"name": str, "what": str, "reads": list, "changed": bool}
"""Fields of a node in a picture, with their types. what: label. reads: names of nodes. changed: whether the other graph
lacks it.
"""


def changes(before: BytesGraph, after: BytesGraph) -> dict[str, list[dict[str, Any]]]:
    """List the operators of each graph that the other one lacks, and those next to them (with `changed` false). A
    product and its requantisation are one node.
    """
    return {
        "before": _changed_and_adjacent(before, after.operations),
        "after": _changed_and_adjacent(after, before.operations),
    }


def check_changes(value: Any) -> None:
    """Raise ValueError unless `value`, read from a file, has the form that `changes` returns."""
    sides = [value.get(side) for side in ("before", "after")] if isinstance(value, dict) else [None]
    for rows in sides:
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("its changes are no lists of operators")
        for row in rows:
            for name, kind in NODE_FIELDS.items():
                if not isinstance(row.get(name), kind):
                    raise ValueError(f"an operator of its changes has no {name!r}")
            if not all(isinstance(name, str) for name in row["reads"]):
                raise ValueError("an operator of its changes reads what has no name")


def _changed_and_adjacent(graph: BytesGraph, others: Iterable[GraphOp]) -> list[dict[str, Any]]:
    """List the nodes of `graph` that are not in `others`, and those next to them, each with NODE_FIELDS."""
    unchanged = frozenset(others)
    changed = {_node_name(graph, operation) for operation in graph.operations if operation not in unchanged}
    shown = set(changed)
    for operation in graph.operations:
        name, nodes_read = _node_name(graph, operation), _nodes_read(graph, operation)
        if name in changed:
            shown |= {*nodes_read}
        elif changed & {*nodes_read}:
            shown.add(name)
    rows: dict[str, dict[str, Any]] = {
        name: {"name": name, "what": "input", "reads": [], "changed": False} for name in graph.inputs if name in shown
    }
    for operation in graph.operations:
        name = _node_name(graph, operation)
        if name in shown and operation.op != "requantise":
            reads = [node for node in _nodes_read(graph, operation) if node in shown]
            rows[name] = {"name": name, "what": _label(graph, operation), "reads": reads, "changed": name in changed}
    return [*rows.values()][:MAX_OPERATORS]


def _node_name(graph: BytesGraph, operation: GraphOp) -> str:
    """Return the name of an operation's node: its first result; for a product the requantised result."""
    readers = graph.readers.get(operation.outputs[0], [])
    return next((reader.outputs[0] for reader in readers if reader.op == "requantise"), operation.outputs[0])


def _nodes_read(graph: BytesGraph, operation: GraphOp) -> list[str]:
    """List the nodes and inputs that an operation reads, each once; constants are left out."""
    nodes = [
        _node_name(graph, graph.makers[name]) if name in graph.makers else name for name in operation.inputs
        if name in graph.makers or name in graph.inputs
    ]  # fmt: skip
    return [name for name in dict.fromkeys(nodes) if name != _node_name(graph, operation)]


def _label(graph: BytesGraph, operation: GraphOp) -> str:
    """Return the label of a node: operator, shape of the weights, shape of the result."""
    constant_shapes = [graph.constants[name].shape for name in operation.inputs if name in graph.constants]
    weights = max((shape for shape in constant_shapes if len(shape) > 1), key=len, default=())
    result = graph.kinds.get(_node_name(graph, operation))
    parts = [_operator_name(operation)]
    parts += ["×".join(map(str, weights))] if weights else []
    parts += ["→ " + "×".join(map(str, result.shape))] if result is not None and result.shape else []
    return " ".join(parts)


def _operator_name(operation: GraphOp) -> str:
    """Return the ONNX name of an operator, or ours where ONNX has none."""
    if operation.op == ONNX:
        return str(onnx.NodeProto.FromString(operation["proto"]).op_type)
    if operation.op == "map":
        return str(operation["f"].operator)
    return ONNX_NAMES.get(operation.op, operation.op.replace("_", " ").capitalize())
