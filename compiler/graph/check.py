"""Verify a graph between two passes by a table of rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import onnx_ir as ir

from celosia.compiler.graph.names import values
from celosia.compiler.graph.shapes import contradictions
from celosia.compiler.graph.values import subgraphs


class BrokenGraph(AssertionError):
    """A pass has left a graph that is none: a fault of the compiler, not of the model."""


def check(graph: ir.Graph, after: str, shapes: bool = True) -> None:
    """Raises BrokenGraph, with the first broken rule and `after`, whose work the graph is. shapes: if they count."""
    for rule, broken in RULES.items():
        if broken is contradictions and not shapes:
            continue
        for what in broken(graph):
            raise BrokenGraph(f"after {after}: {rule}: {what}")


def _undefined(graph: ir.Graph, outside: frozenset[ir.Value] = frozenset()) -> Iterator[str]:
    known = {*outside, *graph.inputs, *graph.initializers.values()}
    for node in graph:
        yield from (f"{_name(node)} reads {v.name!r}" for v in node.inputs if v is not None and v not in known)
        for inner in subgraphs(node):
            yield from _undefined(inner, frozenset(known))
        known.update(node.outputs)
    yield from (f"the output {value.name!r}" for value in graph.outputs if value not in known)


def _names(graph: ir.Graph) -> Iterator[str]:
    found = set(values(graph))
    yield from ("a value has no name" for value in found if not value.name)
    counts = Counter(value.name for value in found)
    yield from (f"{name!r}" for name, count in counts.items() if count > 1)


def _strange_constants(graph: ir.Graph) -> Iterator[str]:
    for name, value in graph.initializers.items():
        if value.name != name:
            yield f"{value.name!r} is held as {name!r}"
        elif value.producer() is not None:
            yield f"{name!r} is made by {value.producer()}"
        elif value.const_value is not None and value.dtype is not None and value.const_value.dtype != value.dtype:
            yield f"{name!r} is {value.dtype} and holds {value.const_value.dtype}"
        elif value.const_value is not None and value.shape is not None and value.const_value.shape != value.shape:
            yield f"{name!r} is {value.shape} and holds {value.const_value.shape}"


def _untyped(graph: ir.Graph) -> Iterator[str]:
    yield from (f"{value.name!r}" for value in (*graph.inputs, *graph.outputs) if value.type is None)


def _foreign(graph: ir.Graph) -> Iterator[str]:
    for node in graph:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer.graph is None:
                yield f"{_name(node)} reads {value.name!r} of {_name(producer)}, which was removed"  # type: ignore[union-attr]


RULES: dict[str, Callable[[ir.Graph], Iterator[str]]] = {
    "no value of a removed operator is read": _foreign,
    "every value is defined before it is used": _undefined,
    "names are unique": _names,
    "constants are what their types say": _strange_constants,
    "types of inputs and outputs are known": _untyped,
    "shapes are those that operators make": contradictions,
}
"""Rule -> what breaks it in a graph."""


def _name(node: ir.Node) -> str:
    return f"{node.op_type} ({node.name})"
