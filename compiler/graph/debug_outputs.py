"""Tensors inside a graph that a Program returns beside its outputs, so that they can be looked at.

After QDQ patterns have become integer operators, these tensors become outputs of the graph: no layer, block or kernel
then swallows them. What the patterns swallow (the sums of a quantised convolution in float) is computed nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.values import constant, is_op, shape

ALL = "all"


class DebugOutputs:
    """Tensors inside a model that become outputs of its graph.

    wanted: names of tensors, or "all" of those that the model names and the graph still has.
    """

    def __init__(self, model: ir.Model, wanted: str | Sequence[str]) -> None:
        self.all = wanted == ALL
        self.names = [wanted] if isinstance(wanted, str) else list(wanted)
        self.known = {out.name for node in model.graph for out in node.outputs if out.name}
        self.means = {node.outputs[0].name: _first(node) for node in model.graph if is_op(node, "DequantizeLinear")}
        """For each dequantised tensor, the integers that stand for it."""
        self.neighbours = _neighbours(model.graph)
        self.outputs = len(model.graph.outputs)
        for name in () if self.all else self.names:
            if name not in self.known:
                close = get_close_matches(name, self.known, 3)
                hint = f"; is it {' or '.join(map(repr, close))}" if close else ""
                raise ModelError(f"no operator of the model makes a tensor {name!r} to keep{hint}")

    def expose(self, model: ir.Model) -> None:
        """Make the tensors outputs of the graph. Raises ModelError where one is not there any more."""
        graph = model.graph
        there = {out.name: out for node in graph for out in node.outputs if out.name in self.known}
        chosen = [value for value in there.values() if _can_be_kept(value)]
        if not self.all:
            for each in self.names:
                if each not in there:
                    raise ModelError(f"tensor {each!r} is computed nowhere, {self._instead(each, {*there})}")
            chosen = [there[each] for each in self.names if not there[each].is_graph_output()]
        graph.outputs.extend(dict.fromkeys(chosen))

    def _instead(self, name: str, there: set[str]) -> str:
        """The nearest tensor that exists."""
        if (integers := self.means.get(name)) in there:
            return f"for integers stand for it; keep {integers!r}, of which it is the DequantizeLinear"
        waiting, seen = [name], {name}
        while waiting:
            for following in self.neighbours.get(waiting.pop(0), ()):
                if following in there:
                    return f"for an integer operator makes its quantised form; keep {following!r}"
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return "for nothing that the model returns needs it"


def _neighbours(graph: ir.Graph) -> dict[str, list[str]]:
    """For each tensor, those that are computed from it."""
    found: dict[str, list[str]] = {}
    for node in graph:
        for value in node.inputs:
            if value is not None and value.name:
                found.setdefault(value.name, []).extend(out.name for out in node.outputs if out.name)
    return found


def _first(node: ir.Node) -> str | None:
    return node.inputs[0].name if node.inputs and node.inputs[0] is not None else None


def _can_be_kept(value: ir.Value) -> bool:
    known = isinstance(value.type, ir.TensorType) and value.dtype not in (None, ir.DataType.UNDEFINED)
    node = value.producer()
    varies = node is not None and any(constant(each) is None for each in node.inputs if each is not None)
    return known and varies and shape(value) is not None and not value.is_graph_output()
