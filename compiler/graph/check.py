"""Check after each pass that the graph is valid, by a table of rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import onnx_ir as ir

from celosia.compiler.graph.names import values
from celosia.compiler.graph.shapes import contradictions
from celosia.compiler.graph.values import subgraphs


class BrokenGraph(AssertionError):
    """A pass has left an invalid graph: a fault of the compiler, not of the model."""


def check(graph: ir.Graph, after: str, shapes: bool = True) -> None:
    """Raise BrokenGraph with the first broken rule; `after` names the pass. shapes: whether shapes are checked, too."""
    for rule, find_breaches in RULES.items():
        if find_breaches is contradictions and not shapes:
            continue
        for breach in find_breaches(graph):
            raise BrokenGraph(f"after {after}: {rule}: {breach}")


def _undefined_values(graph: ir.Graph, outside: frozenset[ir.Value] = frozenset()) -> Iterator[str]:
    """Yield the values that are read or returned but not defined before; `outside`: values around a subgraph."""
    defined = {*outside, *graph.inputs, *graph.initializers.values()}
    for node in graph:
        yield from (f"{_label(node)} reads {v.name!r}" for v in node.inputs if v is not None and v not in defined)
        for subgraph in subgraphs(node):
            yield from _undefined_values(subgraph, frozenset(defined))
        defined.update(node.outputs)
    yield from (f"the output {value.name!r}" for value in graph.outputs if value not in defined)


def _duplicate_names(graph: ir.Graph) -> Iterator[str]:
    """Yield the values without a name, and the names of several values."""
    all_values = set(values(graph))
    yield from ("a value has no name" for value in all_values if not value.name)
    counts = Counter(value.name for value in all_values)
    yield from (f"{name!r}" for name, count in counts.items() if count > 1)


def _inconsistent_constants(graph: ir.Graph) -> Iterator[str]:
    """Yield the constants whose name, producer, element type or shape contradicts the value that holds them."""
    for name, value in graph.initializers.items():
        if value.name != name:
            yield f"{value.name!r} is held as {name!r}"
        elif value.producer() is not None:
            yield f"{name!r} is made by {value.producer()}"
        elif value.const_value is not None and value.dtype is not None and value.const_value.dtype != value.dtype:
            yield f"{name!r} is {value.dtype} and holds {value.const_value.dtype}"
        elif value.const_value is not None and value.shape is not None and value.const_value.shape != value.shape:
            yield f"{name!r} is {value.shape} and holds {value.const_value.shape}"


def _untyped_borders(graph: ir.Graph) -> Iterator[str]:
    """Yield the inputs and outputs of the graph without a type."""
    yield from (f"{value.name!r}" for value in (*graph.inputs, *graph.outputs) if value.type is None)


def _removed_producers(graph: ir.Graph) -> Iterator[str]:
    """Yield the reads of values whose producer a pass has removed."""
    for node in graph:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer.graph is None:
                yield f"{_label(node)} reads {value.name!r} of {_label(producer)}, which was removed"  # type: ignore[union-attr]


RULES: dict[str, Callable[[ir.Graph], Iterator[str]]] = {
    "no value of a removed operator is read": _removed_producers,
    "every value is defined before it is used": _undefined_values,
    "names are unique": _duplicate_names,
    "constants are what their types say": _inconsistent_constants,
    "types of inputs and outputs are known": _untyped_borders,
    "shapes are those that operators make": contradictions,
}
"""Rule -> the function that yields the breaches of it in a graph, as text."""


def _label(node: ir.Node) -> str:
    """Return operator and name of a node for messages."""
    return f"{node.op_type} ({node.name})"
