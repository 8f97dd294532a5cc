"""Unique and readable names of nodes and values, for messages, reports and the Program's file.

ONNX lets nodes be nameless or share a name, and a model's values may be called what a pass would call its own. The
compiler itself identifies nodes and values by object, not by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from celosia.compiler.expr.unique_names import unused_name
from celosia.compiler.graph.values import RESERVED


def name_nodes(graph: ir.Graph) -> None:
    """Give every node, those of subgraphs included, a unique name.

    A name that no other node has stays; others become operator and first output, as in `Conv:features.3`.
    """
    nodes = list(graph.all_nodes())
    count: dict[str | None, int] = {}
    for node in nodes:
        count[node.name] = count.get(node.name, 0) + 1
    used_names = {name for name, times in count.items() if name and times == 1}
    for node in nodes:
        if node.name not in used_names:
            output = next((out.name for out in node.outputs if out.name), "")
            node.name = unused_name(f"{node.op_type}:{output}", used_names)


def name_values(graph: ir.Graph) -> None:
    """Give values without a name, or with that of another value, a unique one; inputs and outputs keep theirs.

    Values of subgraphs count, too: their names may hide an outer value that a pass makes the subgraph read.
    """
    border = {*graph.inputs, *graph.outputs}
    inner_values = [value for value in values(graph) if value not in border]
    seen_names = {value.name for value in border}
    used_names = {
        name for name in (*seen_names, *(value.name for value in inner_values), *graph.meta.get(RESERVED, ())) if name
    }
    for value in inner_values:
        if not value.name or value.name in seen_names:
            value.name = unused_name(value.name or "value", used_names)
        seen_names.add(value.name)


def reserve_names(graph: ir.Graph) -> None:
    """Reserve the names of all values, so that `derived_name` never gives them to others, even after their removal."""
    reserved = frozenset(value_names(graph))
    for any_graph in (graph, *graph.subgraphs()):
        any_graph.meta[RESERVED] = reserved


def value_names(graph: ir.Graph) -> set[str]:
    """Return the names of all values, those of subgraphs included."""
    return {value.name for value in values(graph) if value.name}


def values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield inputs, constants and results of nodes; results without a name that nothing uses are left out.

    Values of the graph come first, then those of its subgraphs.
    """
    for any_graph in (graph, *graph.subgraphs()):
        yield from (*any_graph.inputs, *any_graph.initializers.values())
        for node in any_graph:
            yield from (out for out in node.outputs if out.name or out.uses() or out.is_graph_output())
