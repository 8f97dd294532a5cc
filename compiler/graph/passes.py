"""How passes run over a model's graph: in order, with a check of the graph after each; a caller may watch them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from celosia.compiler.graph.check import check
from celosia.compiler.graph.names import name_nodes, name_values, reserve_names
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

        Nodes and values get unique names first. Raises check.BrokenGraph, naming the pass that left an invalid graph.
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
            before = _node_count(model)
            for target in [model, *body_models(model)] if graph_pass.inside else [model]:
                graph_pass.run(target)
            if checked:
                name_nodes(model.graph)
                name_values(model.graph)
                check(model.graph, f"pass {graph_pass.name}")
            infos.append(PassInfo(graph_pass.name, graph_pass.doc, before, _node_count(model)))
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


def _node_count(model: ir.Model) -> int:
    """Return the number of nodes, those of subgraphs included."""
    return sum(1 for _ in model.graph.all_nodes())
