"""A decoder as it is compiled: it returns the new rows of its caches instead of whole caches, in bytes where only bytes
are read of them.

    past -> Concat(past, new) -> present         past -> Concat(past, new)
                              -> products   ->                             -> products
                                                 new  -> present
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Moves
from celosia.driver.generate.roles import CACHE_AXIS, Cache, Roles

VALUES = ("Identity", "QuantizeLinear", "DequantizeLinear")
"""Operators that may stand between a cache and the output that returns it; applied again, they give equal bytes."""


@dataclass(frozen=True)
class Stepping:
    """Decoder that returns rows of its caches. proto: the model. dtypes: element type of each cache, by its input."""

    proto: onnx.ModelProto
    dtypes: dict[str, str]


def rewrite_to_return_new_rows(proto: onnx.ModelProto, roles: Roles) -> Stepping:
    """Rewrite a copy of `proto` to return new rows instead of whole caches. ModelError for one that does not append to
    them."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    editor = _Editor(result.graph)
    dtypes = {cache.past: editor.shorten(cache) for cache in roles.caches}
    del result.graph.node[:]
    result.graph.node.extend(editor.nodes)
    return Stepping(result, dtypes)


class _Editor:
    """Editor of a graph in place; only `nodes` are a new list."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph, self.nodes = graph, list(graph.node)
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant":
                values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
                self.constants.update(zip(node.output, values))
        self.inputs = {value.name: value for value in graph.input}
        self.outputs = {value.name: value for value in graph.output}

    def shorten(self, cache: Cache) -> str:
        """Make `cache.present` the new rows. Returns the element type in which they, and `cache.past`, are then."""
        concat = self._find_append(cache)
        codes = self._quantisation_of_cache(concat.output[0], cache.present)
        self._rename_tensor(cache.present, f"{cache.present}/all")  # for whoever reads it inside the graph
        joined_rows, new = concat.output[0], concat.input[1]
        shape = self.outputs[cache.present].type.tensor_type.shape
        shape.dim[CACHE_AXIS].Clear()
        place = next(number for number, node in enumerate(self.nodes) if node is concat)
        if codes is None:
            self.nodes.insert(place, helper.make_node("Identity", [new], [cache.present]))
            return cache.dtype
        meaning, joined = [f"{cache.present}/scale", f"{cache.present}/zero"], f"{cache.present}/bytes"
        for name, array in zip(meaning, (codes.scale, codes.zero)):
            self.graph.initializer.append(numpy_helper.from_array(array, name))
        self.nodes[place : place + 1] = [
            helper.make_node("QuantizeLinear", [new, *meaning], [cache.present]),
            helper.make_node("Concat", [cache.past, cache.present], [joined], axis=CACHE_AXIS),
            helper.make_node("DequantizeLinear", [joined, *meaning], [joined_rows]),
        ]
        for value in (self.outputs[cache.present], self.inputs[cache.past]):
            value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(codes.zero.dtype)
        return codes.zero.dtype.name

    def _rename_tensor(self, name: str, other: str) -> None:
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [other if name_in == name else name_in for name_in in names]

    def _find_append(self, cache: Cache) -> onnx.NodeProto:
        """Concat that puts new rows behind `cache.past`, and whose output is, or becomes, `cache.present`."""
        readers = self.readers.get(cache.past, [])
        if len(readers) == 1 and readers[0].op_type == "Concat" and len(readers[0].input) == 2:
            (concat,) = readers
            axes = [helper.get_attribute_value(attribute) for attribute in concat.attribute if attribute.name == "axis"]
            source = cache.present
            while (maker := self.makers.get(source)) is not None and maker.op_type in VALUES:
                source = maker.input[0]
            appends = concat.input[0] == cache.past and axes[0] in (CACHE_AXIS, CACHE_AXIS - 4)
            if appends and source == concat.output[0]:
                return concat
        raise ModelError(
            f"cache {cache.past!r} does not become {cache.present!r} by a Concat of it and the rows of new tokens, "
            "which is what can be run step by step; export the model in plain operators"
        )

    def _quantisation_of_cache(self, joined: str, present: str) -> _Codes | None:
        """QuantizeLinear nodes that alone read the values of `joined`, except for `present`, merged into one. None
        where something else reads them, or the nodes differ."""
        first, *later_ends = [*self._quantisations_of_readers(joined, present)] or [None]
        return (
            first
            if first is not None and all(other is not None and other.same(first) for other in later_ends)
            else None
        )

    def _quantisations_of_readers(self, name: str, present: str) -> Iterator[_Codes | None]:
        """Yield the quantisation at each reader of `name`, through moves; None for any other reader."""
        for node in self.readers.get(name, []):
            if node.op_type == "QuantizeLinear" and len(node.input) == 3 and node.input[0] == name:
                scale, zero = (self.constants.get(name) for name in node.input[1:])
                one = scale is not None and zero is not None and not scale.dims and not zero.dims
                yield _Codes(numpy_helper.to_array(scale), numpy_helper.to_array(zero)) if one else None
            elif (
                op_spec(node.op_type).moves in (Moves.ALL, Moves.SOME)
                and node.input[0] == name
                and node.output[0] not in self.outputs
            ):
                yield from self._quantisations_of_readers(node.output[0], present)
            elif list(node.output) != [present]:
                yield None


@dataclass(frozen=True)
class _Codes:
    """Scale and zero point of a QuantizeLinear."""

    scale: NDArray[Any]
    zero: NDArray[Any]

    def same(self, other: _Codes) -> bool:
        """Whether both give equal bytes for equal values."""
        pairs = (self.scale, other.scale), (self.zero, other.zero)
        return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
