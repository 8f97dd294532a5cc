"""Passes over the graph of a model, run in order: each is checked, and can be watched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from celosia.compiler.graph.check import check
from celosia.compiler.graph.names import name_nodes, name_values
from celosia.compiler.program import PassInfo


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
"""Called with "import" and then with the name of each pass, and the model as it is then."""


class Pipeline:
    """Passes in order. The graph is verified before the first and after each."""

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
        """Change `model`, whose nodes and values get unique names.

        Raises check.BrokenGraph, naming the pass, where one leaves a graph that is none.
        """
        watch = watch or (lambda name, model: None)
        name_nodes(model.graph)
        name_values(model.graph)
        check(model.graph, "the import", shapes=False)  # the first pass completes and compares them
        watch("import", model)
        done = []
        for each in self.passes:
            before = _size(model)
            for part in [model, *bodies(model)] if each.inside else [model]:
                each.run(part)
            name_nodes(model.graph)
            name_values(model.graph)
            check(model.graph, f"pass {each.name}")
            done.append(PassInfo(each.name, each.doc, before, _size(model)))
            watch(each.name, model)
        return done


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
