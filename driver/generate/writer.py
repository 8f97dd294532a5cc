"""Write nodes and constants into an ONNX graph, for `cached_attention.py` and `driver/quantize/decoders.py`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from celosia.compiler.expr.nodes import unused_name
from celosia.compiler.graph.importing.inlining import inner_graphs, nodes


def _nodes_in_subgraphs(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes in the subgraphs of `node`, nested ones included."""
    for graph in inner_graphs(node):
        yield from nodes(graph)


class GraphWriter:
    """Writes constants to `graph`, and nodes to the list `nodes`, which replaces the graph's nodes when it closes.

    Methods return names of tensors. prefix: of all names that it writes. constants: tensors of the graph's constants by
    name. makers: the original node that computes a tensor.
    """

    def __init__(self, graph: onnx.GraphProto, prefix: str) -> None:
        self.graph, self.prefix, self.nodes = graph, prefix, list[onnx.NodeProto]()
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                self.constants.update(
                    zip(node.output, (attribute.t for attribute in node.attribute if attribute.name == "value"))
                )
        self.makers = {name: node for node in graph.node for name in node.output}
        values = (*graph.input, *graph.initializer)
        self._used_names = {value.name for value in values} | {name for node in graph.node for name in node.output}
        self._shared: dict[Hashable, str] = {}

    def close(self) -> None:
        """Replace the graph's nodes by `nodes`, and drop nodes and constants that the outputs do not depend on."""
        makers = {name: node for node in self.nodes for name in node.output}
        pending, live_names = [value.name for value in self.graph.output], {""}
        while pending:
            name = pending.pop()
            if name not in live_names and name in makers:
                pending += [
                    operand for node in (makers[name], *_nodes_in_subgraphs(makers[name])) for operand in node.input
                ]
            live_names.add(name)
        live_names.remove("")
        live_nodes = [node for node in self.nodes if live_names.intersection(node.output)]
        constants = [tensor for tensor in self.graph.initializer if tensor.name in live_names]
        del self.graph.node[:], self.graph.initializer[:]
        self.graph.node.extend(live_nodes)
        self.graph.initializer.extend(constants)

    def op(self, kind: str, *inputs: str, called: str = "", **attributes: Any) -> str:
        """Write an operator with one output, and return its name. called: the output's name; "" for a new one."""
        y = called or unused_name(f"{self.prefix}/{kind}", self._used_names)
        self.nodes.append(helper.make_node(kind, list(inputs), [y], name=y, **attributes))
        return y

    def once(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Write an operator as `op` does, but return the earlier result for equal arguments: layers share masks."""
        key = (kind, inputs, *sorted(attributes.items()))
        if key not in self._shared:
            self._shared[key] = self.op(kind, *inputs, **attributes)
        return self._shared[key]

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """Write a constant; equal constants share one initializer."""
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, sha256(array.tobytes()).digest())
        if key not in self._shared:
            self._shared[key] = unused_name(f"{self.prefix}/constant", self._used_names)
            self.graph.initializer.append(numpy_helper.from_array(array, self._shared[key]))
        return self._shared[key]

    def ints(self, *values: int) -> str:
        """Write a constant 1D tensor of int64."""
        return self.constant(values)

    def slice_last_axis(self, x: str, sizes: Sequence[int]) -> list[str]:
        """Split the last axis of `x` into parts of these sizes by Slice nodes."""
        ends, last = np.cumsum(sizes).tolist(), self.ints(-1)
        return [self.op("Slice", x, self.ints(end - size), self.ints(end), last) for size, end in zip(sizes, ends)]
