"""Passes over a model's graph: they run in order, the graph is checked after each, and a caller may watch them."""

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
    """A change of a model as ONNX has it, before its shapes are inferred.

    name, doc: as of a GraphPass. run: returns the changed model; it may raise ModelError.
    """

    name: str
    doc: str
    run: Callable[[onnx.ModelProto], onnx.ModelProto]


@dataclass(frozen=True)
class GraphPass:
    """A change of the graph, in place.

    name: on the command line. doc: one line, what it does. run: the function; it may raise ModelError. inside: whether
    it runs on the bodies of If, Loop and Scan, too, each as a model of its own.
    """

    name: str
    doc: str
    run: Callable[[ir.Model], None]
    inside: bool = True


Watch = Callable[[str, ir.Model], None]
"""Called with the name of a pass that has run, or "import" after the last one of the import, and the model then."""


class Pipeline:
    """Passes in order."""

    def __init__(self, *passes: GraphPass) -> None:
        names = [each.name for each in passes]
        if len(set(names)) != len(names):
            raise ValueError(f"two passes have the same name: {', '.join(names)}")
        self.passes = passes

    def __iter__(self) -> Iterator[GraphPass]:
        return iter(self.passes)

    def without(self, names: Collection[str]) -> Pipeline:
        """The pipeline without the passes of these names."""
        return Pipeline(*(each for each in self.passes if each.name not in names))

    def run(self, model: ir.Model, watch: Watch | None = None) -> list[PassInfo]:
        """Change an imported `model`, whose nodes and values get unique names, and check it before and after each pass.

        Raises check.BrokenGraph, naming the pass, where one leaves a graph that is none.
        """
        name_nodes(model.graph)
        name_values(model.graph)
        reserve_names(model.graph)
        check(model.graph, "the import", shapes=False)  # the first pass completes and compares them
        if watch is not None:
            watch("import", model)
        return self._run(model, watch, checked=True)

    def run_import(self, model: ir.Model, watch: Watch | None = None) -> list[PassInfo]:
        """Change a `model` that is being imported: its names need not be unique yet, and nothing is checked."""
        return self._run(model, watch, checked=False)

    def _run(self, model: ir.Model, watch: Watch | None, checked: bool) -> list[PassInfo]:
        infos = []
        for each in self.passes:
            before = _size(model)
            for part in [model, *bodies(model)] if each.inside else [model]:
                each.run(part)
            if checked:
                name_nodes(model.graph)
                name_values(model.graph)
                check(model.graph, f"pass {each.name}")
            infos.append(PassInfo(each.name, each.doc, before, _size(model)))
            if watch is not None:
                watch(each.name, model)
        return infos


def bodies(model: ir.Model) -> list[ir.Model]:
    """The graphs inside of `model`, innermost first, as models of its versions."""
    found = []
    for graph in reversed(list(model.graph.subgraphs())):
        assert isinstance(graph, ir.Graph)
        graph.opset_imports.update(model.graph.opset_imports)
        found.append(ir.Model(graph, ir_version=model.ir_version))
    return found


def _size(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes())
