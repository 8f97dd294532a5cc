"""Differences between a graph and the one that was made of it: plain data, for pictures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx

from celosia.compiler.superoptimise.graph import ONNX, ONNX_NAMES, BytesGraph, GraphOp

MAX_OPERATORS = 200
"""Operators of a picture; what comes later is left out."""
NODE = {"name": str, "what": str, "reads": list, "changed": bool}
"""Fields of a node in a picture, with their types; reads: names of nodes."""


def changes(before: BytesGraph, after: BytesGraph) -> dict[str, list[dict[str, Any]]]:
    """The operators of each that the other has not, and beside them, with `changed` false, those next to these.

    A product stands for what requantises it, too."""
    return {"before": _rows(before, after.operations), "after": _rows(after, before.operations)}


def checked(found: Any) -> None:
    """ValueError where it is not what `changes` makes."""
    sides = [found.get(side) for side in ("before", "after")] if isinstance(found, dict) else [None]
    for rows in sides:
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("its changes are no lists of operators")
        for row in rows:
            for name, kind in NODE.items():
                if not isinstance(row.get(name), kind):
                    raise ValueError(f"an operator of its changes has no {name!r}")
            if not all(isinstance(each, str) for each in row["reads"]):
                raise ValueError("an operator of its changes reads what has no name")


def _rows(graph: BytesGraph, others: Iterable[GraphOp]) -> list[dict[str, Any]]:
    same = frozenset(others)
    changed = {_node(graph, each) for each in graph.operations if each not in same}
    near = set(changed)
    for each in graph.operations:
        mine, read = _node(graph, each), _reads(graph, each)
        if mine in changed:
            near |= {*read}
        elif changed & {*read}:
            near.add(mine)
    rows: dict[str, dict[str, Any]] = {
        name: {"name": name, "what": "input", "reads": [], "changed": False} for name in graph.inputs if name in near
    }
    for each in graph.operations:
        name = _node(graph, each)
        if name in near and each.op != "requantise":
            reads = [read for read in _reads(graph, each) if read in near]
            rows[name] = {"name": name, "what": _what(graph, each), "reads": reads, "changed": name in changed}
    return [*rows.values()][:MAX_OPERATORS]


def _node(graph: BytesGraph, each: GraphOp) -> str:
    """The first tensor that it makes; of a product what it becomes by being requantised."""
    readers = graph.readers.get(each.outputs[0], [])
    return next((other.outputs[0] for other in readers if other.op == "requantise"), each.outputs[0])


def _reads(graph: BytesGraph, each: GraphOp) -> list[str]:
    """Names of nodes, each once; nothing of constants."""
    found = [
        _node(graph, graph.makers[name]) if name in graph.makers else name for name in each.inputs
        if name in graph.makers or name in graph.inputs
    ]  # fmt: skip
    return [name for name in dict.fromkeys(found) if name != _node(graph, each)]


def _what(graph: BytesGraph, each: GraphOp) -> str:
    """The operator, the shape of its weights, and that of what it makes."""
    weights = [graph.constants[name].shape for name in each.inputs if name in graph.constants]
    largest = max((shape for shape in weights if len(shape) > 1), key=len, default=())
    made = graph.kinds.get(_node(graph, each))
    parts = [_operator(each)]
    parts += ["×".join(map(str, largest))] if largest else []
    parts += ["→ " + "×".join(map(str, made.shape))] if made is not None and made.shape else []
    return " ".join(parts)


def _operator(each: GraphOp) -> str:
    """The ONNX name of an operation, or ours where ONNX has none."""
    if each.op == ONNX:
        return str(onnx.NodeProto.FromString(each["proto"]).op_type)
    if each.op == "map":
        return str(each["f"].operator)
    return ONNX_NAMES.get(each.op, each.op.replace("_", " ").capitalize())
