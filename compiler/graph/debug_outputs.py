"""Inner tensors that a Program returns beside its outputs, for debugging.

After QDQ patterns have become integer operators, these tensors become outputs of the graph, so that no layer, block or
kernel fuses them away. Tensors inside a QDQ pattern, such as the float sums of a quantised convolution, do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.values import constant, is_op, shape

ALL = "all"
"""Value of `wanted` that stands for all tensors."""


class DebugOutputs:
    """Inner tensors of a model that become outputs of its graph.

    wanted: names of tensors, or "all" for those that the model names and the graph still has. Raises ModelError for a
    name that no operator of `model` makes.

    known: names of all results in the model. outputs: number of the model's own outputs. neighbours: see `_neighbours`.
    """

    def __init__(self, model: ir.Model, wanted: str | Sequence[str]) -> None:
        self.all = wanted == ALL
        self.names = [wanted] if isinstance(wanted, str) else list(wanted)
        self.known = {out.name for node in model.graph for out in node.outputs if out.name}
        self.integers_of = {
            node.outputs[0].name: _first_input_name(node) for node in model.graph if is_op(node, "DequantizeLinear")
        }
        """Name of a dequantised tensor -> name of the integer tensor that it is made of."""
        self.neighbours = _neighbours(model.graph)
        self.outputs = len(model.graph.outputs)
        for name in () if self.all else self.names:
            if name not in self.known:
                close = get_close_matches(name, self.known, 3)
                hint = f"; is it {' or '.join(map(repr, close))}" if close else ""
                raise ModelError(f"no operator of the model makes a tensor {name!r} to keep{hint}")

    def expose(self, model: ir.Model) -> None:
        """Make the tensors outputs of `model`'s graph. Raises ModelError where a pass has removed one."""
        graph = model.graph
        remaining = {out.name: out for node in graph for out in node.outputs if out.name in self.known}
        chosen = [value for value in remaining.values() if _can_be_kept(value)]
        if not self.all:
            for name in self.names:
                if name not in remaining:
                    raise ModelError(
                        f"tensor {name!r} is computed nowhere, {self._explain_missing(name, {*remaining})}"
                    )
            chosen = [remaining[name] for name in self.names if not remaining[name].is_graph_output()]
        graph.outputs.extend(dict.fromkeys(chosen))

    def _explain_missing(self, name: str, remaining: set[str]) -> str:
        """Say why tensor `name` is gone, and which remaining tensor is the nearest to keep instead.

        remaining: names of the tensors that remain.
        """
        if (integers := self.integers_of.get(name)) in remaining:
            return f"for integers stand for it; keep {integers!r}, of which it is the DequantizeLinear"
        waiting, seen = [name], {name}
        while waiting:
            for result in self.neighbours.get(waiting.pop(0), ()):
                if result in remaining:
                    return f"for an integer operator makes its quantised form; keep {result!r}"
                if result not in seen:
                    seen.add(result)
                    waiting.append(result)
        return "for nothing that the model returns needs it"


def _neighbours(graph: ir.Graph) -> dict[str, list[str]]:
    """Return {tensor: tensors that are computed from it}, by name, to suggest one in place of a tensor that is gone."""
    results_of: dict[str, list[str]] = {}
    for node in graph:
        for value in node.inputs:
            if value is not None and value.name:
                results_of.setdefault(value.name, []).extend(out.name for out in node.outputs if out.name)
    return results_of


def _first_input_name(node: ir.Node) -> str | None:
    """Return the name of a node's first input; None if it has none."""
    return node.inputs[0].name if node.inputs and node.inputs[0] is not None else None


def _can_be_kept(value: ir.Value) -> bool:
    """Return whether a tensor can become an output: it has a type and a static shape, and depends on an input."""
    has_type = isinstance(value.type, ir.TensorType) and value.dtype not in (None, ir.DataType.UNDEFINED)
    node = value.producer()
    varies = node is not None and any(constant(operand) is None for operand in node.inputs if operand is not None)
    return has_type and varies and shape(value) is not None and not value.is_graph_output()
