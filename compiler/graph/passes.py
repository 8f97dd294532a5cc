"""How passes run over a model's graph: in order, with a check of the graph after each; a caller may watch them.

`Pipeline` runs the passes that graph/pipeline.py lists. `check` compares a graph with RULES.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from celosia.compiler.graph.shapes import contradictions
from celosia.compiler.graph.values import name_nodes, name_values, reserve_names, subgraphs, values_of
from celosia.compiler.program import PassInfo


@dataclass(frozen=True)
class FilePass:
    """A rewrite of the ONNX file, before its shapes are inferred.

    name, doc: as of a GraphPass. run: returns the rewritten model; it may raise ModelError.
    """

    name: str
    doc: str
    run: Callable[[onnx.ModelProto], onnx.ModelProto]


@dataclass(frozen=True)
class GraphPass:
    """A rewrite of the graph, in place.

    name: on the command line. doc: what it does, in one line. run: the function; it may raise ModelError. inside:
    whether it also runs on the bodies of If, Loop and Scan, each as a model of its own.
    """

    name: str
    doc: str
    run: Callable[[ir.Model], None]
    inside: bool = True


Watch = Callable[[str, ir.Model], None]
"""Called with (name of the pass that has run, the model then); "import" stands for the last pass of the import."""


class Pipeline:
    """Passes, in the order in which they run. Raises ValueError where two have the same name."""

    def __init__(self, *passes: GraphPass) -> None:
        names = [graph_pass.name for graph_pass in passes]
        if len(set(names)) != len(names):
            raise ValueError(f"two passes have the same name: {', '.join(names)}")
        self.passes = passes

    def __iter__(self) -> Iterator[GraphPass]:
        return iter(self.passes)

    def without(self, names: Collection[str]) -> Pipeline:
        """Return the pipeline without the passes of these names."""
        return Pipeline(*(graph_pass for graph_pass in self.passes if graph_pass.name not in names))

    def run(self, model: ir.Model, watch: Watch | None = None) -> list[PassInfo]:
        """Run the passes on an imported `model`, checking it before the first and after each; return what each did.

        Nodes and values get unique names first. Raises BrokenGraph, naming the pass that left an invalid graph.
        """
        name_nodes(model.graph)
        name_values(model.graph)
        reserve_names(model.graph)
        check(model.graph, "the import", shapes=False)  # the first pass completes and compares them
        if watch is not None:
            watch("import", model)
        return self._run(model, watch, checked=True)

    def run_import(self, model: ir.Model, watch: Watch | None = None) -> list[PassInfo]:
        """Run the passes on a `model` during its import: names need not be unique yet, and nothing is checked."""
        return self._run(model, watch, checked=False)

    def _run(self, model: ir.Model, watch: Watch | None, checked: bool) -> list[PassInfo]:
        """Run the passes and return, for each, the number of nodes before and after it."""
        infos = []
        for graph_pass in self.passes:
            before = node_count(model)
            for target in [model, *body_models(model)] if graph_pass.inside else [model]:
                graph_pass.run(target)
            if checked:
                name_nodes(model.graph)
                name_values(model.graph)
                check(model.graph, f"pass {graph_pass.name}")
            infos.append(PassInfo(graph_pass.name, graph_pass.doc, before, node_count(model)))
            if watch is not None:
                watch(graph_pass.name, model)
        return infos


def body_models(model: ir.Model) -> list[ir.Model]:
    """Return the graphs inside `model`, innermost first, as models with its opsets, so that passes run on them."""
    models = []
    for graph in reversed(list(model.graph.subgraphs())):
        assert isinstance(graph, ir.Graph)
        graph.opset_imports.update(model.graph.opset_imports)
        models.append(ir.Model(graph, ir_version=model.ir_version))
    return models


def node_count(model: ir.Model) -> int:
    """Return the number of nodes, those of subgraphs included."""
    return sum(1 for _ in model.graph.all_nodes())


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
    all_values = set(values_of(graph))
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
