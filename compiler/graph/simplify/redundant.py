"""Common subexpressions and dead code: compute equal operators once, and remove what nothing reads.

    a = Exp(x)
    b = Exp(x)         ->     a = Exp(x)
    y = Mul(a, b)             y = Mul(a, a)

Operators are equal if operator, attributes and inputs are; constants are equal if their elements are. Random operators,
operators with subgraphs, and operators whose output the graph returns are not merged.
"""

from __future__ import annotations

import hashlib
from typing import Any

import onnx_ir as ir

from celosia.compiler.graph.external_data import is_mapped
from celosia.compiler.graph.values import constant
from celosia.compiler.program.host.hostops import RANDOM

SUBGRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
"""Types of attributes that hold graphs."""


def merge_equal(model: ir.Model) -> None:
    """Replace each operator that equals an earlier one by that one."""
    graph = model.graph
    value_keys: dict[ir.Value, Any] = {}
    first_with_key: dict[Any, ir.Node] = {}
    for node in list(graph):
        key = _node_key(node, value_keys)
        if key is None:
            continue
        first = first_with_key.setdefault(key, node)
        if first is not node and not any(out.is_graph_output() for out in node.outputs):
            for old, new in zip(node.outputs, first.outputs):
                ir.convenience.replace_all_uses_with(old, new)
            graph.remove(node, safe=True)


def _node_key(node: ir.Node, value_keys: dict[ir.Value, Any]) -> Any:
    """Return a key that nodes share if they compute the same; None for nodes that are not merged.

    value_keys: keys of values so far; those of the node's inputs are added.
    """
    if node.op_type in RANDOM or any(attr.type in SUBGRAPHS for attr in node.attributes.values()):
        return None
    attrs = b"".join(
        ir.serde.serialize_attribute(node.attributes[name]).SerializeToString() for name in sorted(node.attributes)
    )
    inputs = tuple(
        value_keys.setdefault(value, _value_key(value)) if value is not None else None for value in node.inputs
    )
    domain = "" if node.domain == "ai.onnx" else node.domain
    return domain, node.op_type, attrs, inputs, tuple(bool(out.name) for out in node.outputs)


def _value_key(value: ir.Value) -> Any:
    """Return a key that equal constants share; other values have keys of their own."""
    if is_mapped(value):  # a hash would read the whole file
        return id(value)
    array = constant(value)
    if array is None or array.dtype.kind == "O":
        return id(value)
    return array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).digest()


def remove_dead(model: ir.Model) -> None:
    """Remove operators and constants whose outputs are neither read nor returned."""
    drop_unused(model.graph)


def drop_unused(graph: ir.Graph) -> None:
    """Remove nodes and constants of `graph` whose outputs are neither read nor returned."""
    for node in reversed(list(graph)):
        if all(not list(out.uses()) and not out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)
    for name in list(graph.initializers):
        value = graph.initializers[name]
        if not list(value.uses()) and not value.is_graph_output():
            del graph.initializers[name]
