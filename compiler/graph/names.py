"""Names for people and files: unique, and readable.

ONNX lets nodes be nameless or share a name, and a model's values may be called what a pass would call its own. The
compiler knows nodes and values by object; what this file gives them is for messages, reports and the Program's file.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from celosia.compiler.expr.names import unused_name
from celosia.compiler.graph.values import RESERVED


def name_nodes(graph: ir.Graph) -> None:
    """Give every node, those of subgraphs included, a name of its own: as it is where no other has it, else its
    operator and first output, as in `Conv:features.3`.
    """
    nodes = list(graph.all_nodes())
    count: dict[str | None, int] = {}
    for node in nodes:
        count[node.name] = count.get(node.name, 0) + 1
    taken = {name for name, times in count.items() if name and times == 1}
    for node in nodes:
        if node.name not in taken:
            output = next((out.name for out in node.outputs if out.name), "")
            node.name = unused_name(f"{node.op_type}:{output}", taken)


def name_values(graph: ir.Graph) -> None:
    """Give values that have no name, or that of another, a name of their own; inputs and outputs keep theirs.

    Those of subgraphs too: there a name may hide one outside, which a pass may have made the subgraph read.
    """
    border = {*graph.inputs, *graph.outputs}
    every = [value for value in values(graph) if value not in border]
    held = {value.name for value in border}
    taken = {name for name in (*held, *(value.name for value in every), *graph.meta.get(RESERVED, ())) if name}
    for value in every:
        if not value.name or value.name in held:
            value.name = unused_name(value.name or "value", taken)
        held.add(value.name)


def reserve_names(graph: ir.Graph) -> None:
    """Reserve the names of all values for these, also once passes have removed them: see `derived_name`."""
    reserved = frozenset(value_names(graph))
    for each in (graph, *graph.subgraphs()):
        each.meta[RESERVED] = reserved


def value_names(graph: ir.Graph) -> set[str]:
    """The names of all values, those of subgraphs included."""
    return {value.name for value in values(graph) if value.name}


def values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Inputs, constants, and what nodes make, unless it has no name and nothing uses it; then those of subgraphs."""
    for each in (graph, *graph.subgraphs()):
        yield from (*each.inputs, *each.initializers.values())
        for node in each:
            yield from (out for out in node.outputs if out.name or out.uses() or out.is_graph_output())
