"""Estimate what a step saves by itself: the operations that it changes, with those next to them, as two small models.

Cycles hang on shapes, not on weights: a block that stands in a network ten times is priced once. It is an estimate, as
all of a step's price is until the whole model's turn comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import onnx
from onnx import helper

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.superoptimise.graph import ONNX, ByteMap, BytesGraph, GraphOp, Written
from celosia.compiler.superoptimise.price import INFEASIBLE, UNMEASURED, Awaited, Price, Pricing
from celosia.compiler.superoptimise.windows import Averaging
from celosia.compiler.superoptimise.writing import OnnxWriter, Unwritable

NOISE = 0.03
"""Share of a time that is measured by which it may differ for no reason."""
POOLINGS = ("largest", "average")


@dataclass
class Neighbourhoods:
    """model: whose opsets the small ones have. known: prices of those that were asked for, by likeness; measured: what
    is saved from one to another, where that was measured anew; under_way: those that are priced elsewhere."""

    model: onnx.ModelProto
    pricing: Pricing
    known: dict[str, Price] = field(default_factory=dict)
    measured: dict[tuple[str, str], float] = field(default_factory=dict)
    under_way: dict[str, Awaited] = field(default_factory=dict)

    def begin(self, before: BytesGraph, after: BytesGraph) -> Callable[[], bool]:
        """Have what `gain` needs priced elsewhere; tells whether it need not wait for that any more."""
        if self.pricing.elsewhere is None:
            return lambda: True
        names = []
        for part in self._parts(before, after) or ():
            names.append(alike := likeness(part))
            if alike not in self.known and alike not in self.under_way:
                try:
                    self.under_way[alike] = self.pricing.elsewhere(self._model(part))
                except Unwritable:
                    self.known[alike] = INFEASIBLE
        return lambda: all(name not in self.under_way or self.under_way[name].ready() for name in names)

    def gain(self, before: BytesGraph, after: BytesGraph) -> float | None:
        """Cycles that `after` saves where it differs; negative where it loses some, None where that cannot be told."""
        parts = self._parts(before, after)
        if parts is None:
            return None
        old, new = map(self._priced, parts)
        if old is UNMEASURED or new is UNMEASURED:
            return -inf
        if old is INFEASIBLE:
            return None
        saved = old.total - new.total
        return self._anew(parts[0], parts[1]) if old.measured and saved > NOISE * old.total else saved

    def _parts(self, before: BytesGraph, after: BytesGraph) -> list[BytesGraph] | None:
        """Cut out where two graphs differ, each part as a graph of its own."""
        kept = set(before.operations) & set(after.operations)
        changed = [[each for each in graph.operations if each not in kept] for graph in (before, after)]
        near = {
            each for graph, ops in zip((before, after), changed) for each in _next_to(graph, ops) if each in kept
        }  # fmt: skip
        parts = []
        for graph, ops in zip((before, after), changed):
            inside = near.union(ops)
            part = _part(graph, [each for each in graph.operations if each in inside])
            if part is None:
                return None
            parts.append(part)
        return parts

    def _anew(self, before: BytesGraph, after: BytesGraph) -> float:
        """Measure both sides of a step again, by turns: until now each was measured at another time."""
        alike = likeness(before), likeness(after)
        if alike not in self.measured and self.pricing.anew is not None:
            saved = self.pricing.anew(self._model(before), self._model(after))
            self.measured[alike] = saved if saved > NOISE * self.known[alike[0]].total else 0
        return self.measured.get(alike, 0)

    def _priced(self, part: BytesGraph) -> Price:
        alike = likeness(part)
        if alike in self.under_way and self.under_way[alike].ready():
            told = self.under_way.pop(alike).price()
            if told is UNMEASURED:
                return told
            if told is not None:
                self.known[alike] = told
        if alike not in self.known:
            try:
                self.known[alike] = self.pricing.part(self._model(part))
            except (Unwritable, ModelError):
                self.known[alike] = INFEASIBLE
        return self.known[alike]

    def _model(self, part: BytesGraph) -> onnx.ModelProto:
        return OnnxWriter(part, self._skeleton(part)).write()

    def _skeleton(self, part: BytesGraph) -> onnx.ModelProto:
        def info(name: str) -> onnx.ValueInfoProto:
            kind = part.kinds[name]
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(_numpy(kind.dtype)), kind.shape)

        graph = helper.make_graph([], "part", list(map(info, part.inputs)), list(map(info, part.outputs)))
        made: onnx.ModelProto = helper.make_model(graph, opset_imports=self.model.opset_import)
        made.ir_version = self.model.ir_version
        made.functions.extend(self.model.functions)
        return made


def likeness(part: BytesGraph) -> str:
    """A digest that is equal for graphs of the same operators on tensors of the same shapes, whatever their weights and
    scales."""
    known = {name: f"input {number} {part.kinds[name]}" for number, name in enumerate(part.inputs)}
    lines = []
    for each in part.operations:
        read = [known.get(name) or _constant(part, name) for name in each.inputs]
        lines.append(f"{each.op} {read} {[(name, _plain(each, value)) for name, value in each.attributes]}")
        if isinstance(each.note, Written):
            lines[-1] += f" {each.note.operator} {each.note.qdq} {each.note.biased}"
        mine = hashlib.sha256(lines[-1].encode()).hexdigest()[:24]
        known |= {name: f"{mine}.{place}" for place, name in enumerate(each.outputs)}
    lines = sorted(lines) + sorted(f"output {known.get(name)}" for name in part.outputs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _constant(part: BytesGraph, name: str) -> str:
    array = part.constants.get(name)
    return "none" if array is None else f"{array.dtype} {array.shape}"


def _plain(each: GraphOp, value: Any) -> Any:
    """An attribute without scales, and without names of tensors."""
    if isinstance(value, ByteMap):
        return (
            value.operator,
            value.attributes,
            value.dtype,
            value.qdq,
            [each == value.result for each in value.operands],
        )
    if isinstance(value, Averaging):
        return value.dtype, value.qdq
    if each.op == ONNX:
        node = onnx.NodeProto.FromString(value)
        return node.domain, node.op_type, [attribute.SerializeToString() for attribute in node.attribute]
    return value


def _numpy(name: str) -> object:
    import numpy as np

    return np.dtype(name)


def _next_to(graph: BytesGraph, operations: Iterable[GraphOp]) -> set[GraphOp]:
    """Operations that read what `operations` make, or make what they read; products with what requantises them. Of a
    pooling also the branches beside it: convolutions there hide what it takes."""
    found: set[GraphOp] = set()
    for each in operations:
        found.update(reader for name in each.outputs for reader in graph.readers.get(name, []))
        if each.op in POOLINGS:
            found |= _branches(graph, each)
        found.update(graph.makers[name] for name in each.inputs if name in graph.makers)
    for each in [*found, *operations]:
        if each.op == "requantise" and each.inputs[0] in graph.makers:
            found.add(graph.makers[each.inputs[0]])
        elif each.op in ("convolve", "multiply"):
            found.update(graph.readers.get(each.outputs[0], []))
    return found


def _branches(graph: BytesGraph, operation: GraphOp) -> set[GraphOp]:
    """Operations on the input of `operation`, up to those that also depend on its output."""
    below = _below(graph, [operation], set())
    return _below(graph, graph.readers.get(operation.inputs[0], []), below)


def _below(graph: BytesGraph, operations: Iterable[GraphOp], but: set[GraphOp]) -> set[GraphOp]:
    """`operations` and all that reads what they make, directly or not, as far as it is not in `but`."""
    found, waiting = set[GraphOp](), list(operations)
    while waiting:
        each = waiting.pop()
        if each not in found and each not in but:
            found.add(each)
            waiting += (reader for name in each.outputs for reader in graph.readers.get(name, []))
    return found


def _part(graph: BytesGraph, operations: list[GraphOp]) -> BytesGraph | None:
    """These operations as a graph of their own; None where a tensor at its edge has no shape."""
    made = {name for each in operations for name in each.outputs if name}
    read = dict.fromkeys(name for each in operations for name in each.inputs if name and name not in graph.constants)
    inside = set(map(id, operations))
    inputs = [name for name in read if name not in made]
    outputs = [
        name for name in made
        if name in graph.outputs or any(id(each) not in inside for each in graph.readers.get(name, []))
    ]  # fmt: skip
    if not outputs or any(graph.kinds.get(name) is None or not graph.kinds[name].shape for name in (*inputs, *outputs)):
        return None
    return replace(graph, operations=tuple(operations), inputs=tuple(inputs), outputs=tuple(sorted(outputs)))
