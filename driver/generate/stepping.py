"""Rewrite a decoder for compilation: it returns only the new rows of its caches, not the caches.

So no run copies complete caches: `decoder.py` appends the new rows. A cache whose readers all quantise it equally
becomes a cache of 8-bit integers.

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

REPEATABLE_OPERATORS = ("Identity", "QuantizeLinear", "DequantizeLinear")
"""Operators that may lie between a cache and the output that returns it: applying them again changes no byte."""


@dataclass(frozen=True)
class Stepping:
    """A decoder that returns new rows of its caches. proto: the model. dtypes: element type of each cache, by its
    input."""

    proto: onnx.ModelProto
    dtypes: dict[str, str]


def rewrite_to_return_new_rows(proto: onnx.ModelProto, roles: Roles) -> Stepping:
    """Rewrite a copy of `proto` to return new rows instead of whole caches.

    ModelError where a cache is not extended by a Concat.
    """
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    editor = _CacheEditor(result.graph)
    dtypes = {cache.past: editor.return_new_rows(cache) for cache in roles.caches}
    del result.graph.node[:]
    result.graph.node.extend(editor.nodes)
    return Stepping(result, dtypes)


class _CacheEditor:
    """Edits a decoder's graph in place, except for its nodes, which are in the new list `nodes`.

    makers: the node that computes a tensor. readers: nodes that read it. constants: initializers and constant nodes.
    """

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

    def return_new_rows(self, cache: Cache) -> str:
        """Make the output `cache.present` the new rows. Return the element type that it and `cache.past` then have."""
        concat = self._find_append(cache)
        quantisation = self._quantisation_of_cache(concat.output[0], cache.present)
        self._rename_tensor(cache.present, f"{cache.present}/all")  # for readers inside the graph
        joined_rows, new = concat.output[0], concat.input[1]
        shape = self.outputs[cache.present].type.tensor_type.shape
        shape.dim[CACHE_AXIS].Clear()
        concat_index = next(number for number, node in enumerate(self.nodes) if node is concat)
        if quantisation is None:
            self.nodes.insert(concat_index, helper.make_node("Identity", [new], [cache.present]))
            return cache.dtype
        scale_and_zero, joined = [f"{cache.present}/scale", f"{cache.present}/zero"], f"{cache.present}/bytes"
        for name, array in zip(scale_and_zero, (quantisation.scale, quantisation.zero)):
            self.graph.initializer.append(numpy_helper.from_array(array, name))
        self.nodes[concat_index : concat_index + 1] = [
            helper.make_node("QuantizeLinear", [new, *scale_and_zero], [cache.present]),
            helper.make_node("Concat", [cache.past, cache.present], [joined], axis=CACHE_AXIS),
            helper.make_node("DequantizeLinear", [joined, *scale_and_zero], [joined_rows]),
        ]
        for value in (self.outputs[cache.present], self.inputs[cache.past]):
            value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(quantisation.zero.dtype)
        return quantisation.zero.dtype.name

    def _rename_tensor(self, name: str, other: str) -> None:
        """Rename a tensor wherever nodes read or write it."""
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [other if label == name else label for label in names]

    def _find_append(self, cache: Cache) -> onnx.NodeProto:
        """Return the Concat that appends new rows to `cache.past`, and whose output is, or becomes, `cache.present`.

        ModelError where there is none.
        """
        readers = self.readers.get(cache.past, [])
        if len(readers) == 1 and readers[0].op_type == "Concat" and len(readers[0].input) == 2:
            (concat,) = readers
            axes = [helper.get_attribute_value(attribute) for attribute in concat.attribute if attribute.name == "axis"]
            source = cache.present
            while (maker := self.makers.get(source)) is not None and maker.op_type in REPEATABLE_OPERATORS:
                source = maker.input[0]
            appends = concat.input[0] == cache.past and axes[0] in (CACHE_AXIS, CACHE_AXIS - 4)
            if appends and source == concat.output[0]:
                return concat
        raise ModelError(
            f"cache {cache.past!r} does not become {cache.present!r} by a Concat of it and the rows of new tokens, "
            "which is what can be run step by step; export the model in plain operators"
        )

    def _quantisation_of_cache(self, joined: str, present: str) -> _Quantisation | None:
        """Return the quantisation that all readers of `joined`, except the one that computes `present`, apply.

        None where a reader needs the values themselves, or readers quantise differently.
        """
        quantisations = [*self._quantisations_of_readers(joined, present)]
        first = quantisations[0] if quantisations else None
        if first is None or any(other is None or not other.same(first) for other in quantisations[1:]):
            return None
        return first

    def _quantisations_of_readers(self, name: str, present: str) -> Iterator[_Quantisation | None]:
        """Yield the quantisation at each reader of `name`, also behind operators that only move data; None for
        others."""
        for node in self.readers.get(name, []):
            if node.op_type == "QuantizeLinear" and len(node.input) == 3 and node.input[0] == name:
                scale, zero = (self.constants.get(name) for name in node.input[1:])
                is_scalar = scale is not None and zero is not None and not scale.dims and not zero.dims
                yield _Quantisation(numpy_helper.to_array(scale), numpy_helper.to_array(zero)) if is_scalar else None
            elif (
                op_spec(node.op_type).moves in (Moves.ALL, Moves.SOME)
                and node.input[0] == name
                and node.output[0] not in self.outputs
            ):
                yield from self._quantisations_of_readers(node.output[0], present)
            elif list(node.output) != [present]:
                yield None


@dataclass(frozen=True)
class _Quantisation:
    """Scale and zero point of a QuantizeLinear, scalars."""

    scale: NDArray[Any]
    zero: NDArray[Any]

    def same(self, other: _Quantisation) -> bool:
        """Whether both give equal bytes for equal values."""
        pairs = (self.scale, other.scale), (self.zero, other.zero)
        return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
