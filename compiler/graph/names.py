"""Names for people and files: unique, and readable.

ONNX lets nodes be nameless or share a name, and a model's values may be called what a pass would call its own. The
compiler knows nodes and values by object; what this file gives them is for messages, reports and the Program's file.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from celosia.compiler.names import unused_name


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
    """Give values that have no name, or that of another, a name of their own; inputs and outputs keep theirs."""
    border = {*graph.inputs, *graph.outputs}
    taken = {value.name for value in (*border, *_inner(graph)) if value.name}
    for value in _values(graph):
        if value in border:
            continue
        if not value.name or value.name in taken:
            value.name = unused_name(value.name or "value", taken)
        taken.add(value.name)


def value_names(graph: ir.Graph) -> set[str]:
    """The names of all values, those of subgraphs included."""
    return {value.name for value in (*graph.inputs, *_values(graph), *_inner(graph)) if value.name}


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Constants, and what nodes make and something uses."""
    yield from list(graph.initializers.values())
    for node in graph:
        yield from (out for out in node.outputs if out.uses() or out.is_graph_output())


def _inner(graph: ir.Graph) -> Iterator[ir.Value]:
    """Values of subgraphs."""
    for inner in graph.subgraphs():
        yield from (*inner.inputs, *inner.initializers.values())
        for node in inner:
            yield from node.outputs
