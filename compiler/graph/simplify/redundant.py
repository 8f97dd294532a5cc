"""Operators that compute the same are computed once.

    a = Exp(x)
    b = Exp(x)         ->     a = Exp(x)
    y = Mul(a, b)             y = Mul(a, a)

Two operators are the same where operator, attributes and inputs are; constants are the same where their elements are.
Random operators, those with subgraphs, and those whose output is returned stay.
"""

from __future__ import annotations

import hashlib
from typing import Any

import onnx_ir as ir

from celosia.compiler.graph.importing.external_data import is_mapped
from celosia.compiler.graph.values import constant
from celosia.compiler.program.host.hostops import RANDOM

SUBGRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def merge_equal(model: ir.Model) -> None:
    """Let the first of several equal operators stand for all."""
    graph = model.graph
    names: dict[ir.Value, Any] = {}
    seen: dict[Any, ir.Node] = {}
    for node in list(graph):
        key = _key(node, names)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node and not any(out.is_graph_output() for out in node.outputs):
            for old, new in zip(node.outputs, first.outputs):
                ir.convenience.replace_all_uses_with(old, new)
            graph.remove(node, safe=True)


def _key(node: ir.Node, names: dict[ir.Value, Any]) -> Any:
    """Return a key that nodes share if they compute the same; None if `node` is not merged.

    names: keys of the inputs so far.
    """
    if node.op_type in RANDOM or any(attr.type in SUBGRAPHS for attr in node.attributes.values()):
        return None
    attrs = b"".join(
        ir.serde.serialize_attribute(node.attributes[name]).SerializeToString() for name in sorted(node.attributes)
    )
    inputs = tuple(names.setdefault(value, _name(value)) if value is not None else None for value in node.inputs)
    domain = "" if node.domain == "ai.onnx" else node.domain
    return domain, node.op_type, attrs, inputs, tuple(bool(out.name) for out in node.outputs)


def _name(value: ir.Value) -> Any:
    if is_mapped(value):  # and not read for this
        return id(value)
    array = constant(value)
    if array is None or array.dtype.kind == "O":
        return id(value)
    return array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).digest()


def remove_dead(model: ir.Model) -> None:
    """Remove operators and constants of which no output is read or returned."""
    drop_unused(model.graph)


def drop_unused(graph: ir.Graph) -> None:
    """Change `graph`: nodes and constants go."""
    for node in reversed(list(graph)):
        if all(not list(out.uses()) and not out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)
    for name in list(graph.initializers):
        value = graph.initializers[name]
        if not list(value.uses()) and not value.is_graph_output():
            del graph.initializers[name]
