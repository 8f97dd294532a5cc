"""Estimate what a step saves: price the changed operations and those next to them, before and after, as small models.

Cycles depend on shapes and not on weights, so that a block which a network has ten times is priced once. The search
prices the whole model later, when its turn comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np
import onnx
from onnx import helper

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.superoptimise.graph import ONNX, ByteMap, BytesGraph, GraphOp, OriginalForm
from celosia.compiler.superoptimise.price import INFEASIBLE, UNMEASURED, Awaited, Price, Pricing
from celosia.compiler.superoptimise.windows import Averaging
from celosia.compiler.superoptimise.writing import OnnxWriter, Unwritable

NOISE = 0.03
"""Relative difference of two measured times that is taken for noise."""
POOLINGS = ("largest", "average")
"""Operators that convolutions of parallel branches overlap with."""


@dataclass
class Neighbourhoods:
    """Estimates savings of steps, and remembers the prices of parts of models.

    model: the original, whose opsets the parts get. pricing: how parts are priced. prices: of parts by `likeness`.
    measured: savings between two parts, where times were measured again. under_way: parts that helpers are pricing.
    """

    model: onnx.ModelProto
    pricing: Pricing
    prices: dict[str, Price] = field(default_factory=dict)
    measured: dict[tuple[str, str], float] = field(default_factory=dict)
    under_way: dict[str, Awaited] = field(default_factory=dict)

    def begin_weighing(self, before: BytesGraph, after: BytesGraph) -> Callable[[], bool]:
        """Let helpers price what `gain` will need. Returns a function that tells whether `gain` need not wait for
        them.
        """
        if self.pricing.elsewhere is None:
            return lambda: True
        keys = []
        for part in self._parts(before, after) or ():
            keys.append(key := likeness(part))
            if key not in self.prices and key not in self.under_way:
                try:
                    self.under_way[key] = self.pricing.elsewhere(self._model(part))
                except Unwritable:
                    self.prices[key] = INFEASIBLE
        return lambda: all(key not in self.under_way or self.under_way[key].ready() for key in keys)

    def gain(self, before: BytesGraph, after: BytesGraph) -> float | None:
        """Estimate the cycles or nanoseconds that the step from `before` to `after` saves; negative for a loss. None
        where it cannot be told; minus infinity where helpers could not price a part.
        """
        parts = self._parts(before, after)
        if parts is None:
            return None
        old, new = map(self._price_part, parts)
        if old is UNMEASURED or new is UNMEASURED:
            return -inf
        if old is INFEASIBLE:
            return None
        saved = old.total - new.total
        return self._measure_again(parts[0], parts[1]) if old.measured and saved > NOISE * old.total else saved

    def _parts(self, before: BytesGraph, after: BytesGraph) -> list[BytesGraph] | None:
        """Cut the neighbourhood of the difference out of both graphs. None where a tensor at its edge has no shape."""
        common = set(before.operations) & set(after.operations)
        changed = [
            [operation for operation in graph.operations if operation not in common] for graph in (before, after)
        ]
        adjacent = {
            operation for graph, operations in zip((before, after), changed)
            for operation in _adjacent_operations(graph, operations) if operation in common
        }  # fmt: skip
        parts = []
        for graph, operations in zip((before, after), changed):
            inside = adjacent.union(operations)
            part = _cut_out(graph, [operation for operation in graph.operations if operation in inside])
            if part is None:
                return None
            parts.append(part)
        return parts

    def _measure_again(self, before: BytesGraph, after: BytesGraph) -> float:
        """Measure both sides of a step in alternation, as the known times may be from different moments. A saving
        within NOISE counts as 0.
        """
        keys = likeness(before), likeness(after)
        if keys not in self.measured and self.pricing.measured_gain is not None:
            saved = self.pricing.measured_gain(self._model(before), self._model(after))
            self.measured[keys] = saved if saved > NOISE * self.prices[keys[0]].total else 0
        return self.measured.get(keys, 0)

    def _price_part(self, part: BytesGraph) -> Price:
        """Return the price of a part: the remembered one, the one from a helper, or a new one."""
        key = likeness(part)
        if key in self.under_way and self.under_way[key].ready():
            price = self.under_way.pop(key).price()
            if price is UNMEASURED:
                return price
            if price is not None:
                self.prices[key] = price
        if key not in self.prices:
            try:
                self.prices[key] = self.pricing.part(self._model(part))
            except (Unwritable, ModelError):
                self.prices[key] = INFEASIBLE
        return self.prices[key]

    def _model(self, part: BytesGraph) -> onnx.ModelProto:
        """Write a part as an ONNX model."""
        return OnnxWriter(part, self._empty_model(part)).write()

    def _empty_model(self, part: BytesGraph) -> onnx.ModelProto:
        """Make a model without nodes that has the inputs and outputs of `part`, and the opsets and functions of the
        original.
        """

        def info(name: str) -> onnx.ValueInfoProto:
            """Return name, type and shape of a tensor as ONNX has them."""
            kind = part.kinds[name]
            return helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype)), kind.shape
            )

        graph = helper.make_graph([], "part", list(map(info, part.inputs)), list(map(info, part.outputs)))
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=self.model.opset_import)
        model.ir_version = self.model.ir_version
        model.functions.extend(self.model.functions)
        return model


def likeness(part: BytesGraph) -> str:
    """Return a digest that is equal for graphs with the same operators on tensors of the same shapes, whatever their
    weights, scales and names.
    """
    numbers = {name: f"input {number} {part.kinds[name]}" for number, name in enumerate(part.inputs)}
    lines = []
    for operation in part.operations:
        inputs = [numbers.get(name) or _describe_constant(part, name) for name in operation.inputs]
        attributes = [(name, _without_scales(operation, value)) for name, value in operation.attributes]
        lines.append(f"{operation.op} {inputs} {attributes}")
        if isinstance(operation.note, OriginalForm):
            lines[-1] += f" {operation.note.operator} {operation.note.qdq} {operation.note.biased}"
        digest = hashlib.sha256(lines[-1].encode()).hexdigest()[:24]
        numbers |= {name: f"{digest}.{place}" for place, name in enumerate(operation.outputs)}
    lines = sorted(lines) + sorted(f"output {numbers.get(name)}" for name in part.outputs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _describe_constant(part: BytesGraph, name: str) -> str:
    """Describe a constant by type and shape."""
    array = part.constants.get(name)
    return "none" if array is None else f"{array.dtype} {array.shape}"


def _without_scales(operation: GraphOp, value: Any) -> Any:
    """Return the value of an attribute without scales and names of tensors, on which no price depends."""
    if isinstance(value, ByteMap):
        return (
            value.operator,
            value.attributes,
            value.dtype,
            value.qdq,
            [quantisation == value.result for quantisation in value.operands],
        )
    if isinstance(value, Averaging):
        return value.dtype, value.qdq
    if operation.op == ONNX:
        node = onnx.NodeProto.FromString(value)
        return node.domain, node.op_type, [attribute.SerializeToString() for attribute in node.attribute]
    return value


def _adjacent_operations(graph: BytesGraph, operations: Iterable[GraphOp]) -> set[GraphOp]:
    """Return the operations that read results of `operations` or make their operands. A product comes with its
    requantisation. A pooling comes with the branches parallel to it, whose convolutions overlap with it.
    """
    adjacent: set[GraphOp] = set()
    for operation in operations:
        adjacent.update(reader for name in operation.outputs for reader in graph.readers.get(name, []))
        if operation.op in POOLINGS:
            adjacent |= _parallel_branches(graph, operation)
        adjacent.update(graph.makers[name] for name in operation.inputs if name in graph.makers)
    for operation in [*adjacent, *operations]:
        if operation.op == "requantise" and operation.inputs[0] in graph.makers:
            adjacent.add(graph.makers[operation.inputs[0]])
        elif operation.op in ("convolve", "multiply"):
            adjacent.update(graph.readers.get(operation.outputs[0], []))
    return adjacent


def _parallel_branches(graph: BytesGraph, operation: GraphOp) -> set[GraphOp]:
    """Return the operations that depend on the first operand of `operation`, but not on its result."""
    behind = _dependent_operations(graph, [operation], set())
    return _dependent_operations(graph, graph.readers.get(operation.inputs[0], []), behind)


def _dependent_operations(graph: BytesGraph, operations: Iterable[GraphOp], excluded: set[GraphOp]) -> set[GraphOp]:
    """Return `operations` and all that depend on their results, stopping at those in `excluded`."""
    dependent, waiting = set[GraphOp](), list(operations)
    while waiting:
        operation = waiting.pop()
        if operation not in dependent and operation not in excluded:
            dependent.add(operation)
            waiting += (reader for name in operation.outputs for reader in graph.readers.get(name, []))
    return dependent


def _cut_out(graph: BytesGraph, operations: list[GraphOp]) -> BytesGraph | None:
    """Return these operations as a graph of their own; None where a tensor at its edge has no shape."""
    written = {name for operation in operations for name in operation.outputs if name}
    read = dict.fromkeys(
        name for operation in operations for name in operation.inputs if name and name not in graph.constants
    )
    inside = set(map(id, operations))
    inputs = [name for name in read if name not in written]
    outputs = [
        name for name in written
        if name in graph.outputs or any(id(reader) not in inside for reader in graph.readers.get(name, []))
    ]  # fmt: skip
    if not outputs or any(graph.kinds.get(name) is None or not graph.kinds[name].shape for name in (*inputs, *outputs)):
        return None
    return replace(graph, operations=tuple(operations), inputs=tuple(inputs), outputs=tuple(sorted(outputs)))
