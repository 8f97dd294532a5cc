"""Which tensor of a float model a tensor of its quantised one stands for, where their names differ, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.graph.errors import ModelError

Array = NDArray[Any]
WIRES = {"QuantizeLinear", "DequantizeLinear", "Identity", "Dropout"}
"""Operators whose output means what their first input means."""
ABSORBED = {"Relu", "Clip", "BatchNormalization"}
"""Operators that quantisation makes part of the one before them."""
_CONSTANTS = {"Constant", "ConstantOfShape"}


@dataclass(frozen=True, eq=False)
class FlowOperator:
    """kind: of what it computes, in floats. operands: tensors that are no constants. outputs: names, some empty."""

    kind: str
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def fits(self, other: FlowOperator) -> bool:
        """Whether both may be the same operator: of one kind, with no attribute that both have and that differs."""
        return self.kind == other.kind and all(
            other.attributes.get(name, value) == value for name, value in self.attributes.items()
        )


class Flow:
    """The operators of a model, and what flows between them. Quantisation, constants and identities are left out.

    inputs: names of the model's. operators: in its order. maker, users: of a tensor.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        constants = {tensor.name for tensor in proto.graph.initializer}
        self.inputs = [value.name for value in proto.graph.input if value.name not in constants]
        self._source: dict[str, str] = {}
        self.operators: list[FlowOperator] = []
        for node in proto.graph.node:
            if node.op_type in _CONSTANTS or (node.input and all(not each or each in constants for each in node.input)):
                constants |= {*node.output}
            elif node.op_type in WIRES:
                self._source[node.output[0]] = self.source(node.input[0])
            else:
                operands = (self.source(name) for name in node.input if name and name not in constants)
                attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
                self.operators.append(
                    FlowOperator(_kind(node.op_type), tuple(operands), tuple(node.output), attributes)
                )
        self.maker = {name: each for each in self.operators for name in each.outputs if name}
        self.users: dict[str, list[FlowOperator]] = defaultdict(list)
        for each in self.operators:
            for name in each.operands:
                self.users[name].append(each)
        self.outputs = {self.source(value.name) for value in proto.graph.output}

    def source(self, name: str) -> str:
        """The tensor of which `name` is a quantised, dequantised or plain copy."""
        return self._source.get(name, name)


def _kind(op: str) -> str:
    """What an operator, or the integer operator that stands for it, computes.

    >>> _kind("QLinearConv"), _kind("QGemm"), _kind("Conv")
    ('Conv', 'Gemm', 'Conv')
    """
    return op.removeprefix("QLinear") if op.startswith("QLinear") else {"QGemm": "Gemm"}.get(op, op)


def feed_of(quantised: Flow, exact: Flow, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """`inputs` of the quantised model by the float model's names: the same ones, or the same order. ModelError."""
    if set(exact.inputs) <= set(inputs):
        return {name: inputs[name] for name in exact.inputs}
    if len(exact.inputs) != len(quantised.inputs):
        ours, theirs = ", ".join(quantised.inputs), ", ".join(exact.inputs)
        raise ModelError(f"the float model takes {theirs}, the int8 model {ours}; give one with the same inputs")
    return {name: inputs[own] for name, own in zip(exact.inputs, quantised.inputs)}


@dataclass
class Matching:
    """found: the float tensor for each tensor of the quantised model that has one, and how it was found: "name",
    "structure" (the same operator on matched operands; of several the one with the nearest values), "order" (the same
    place among as many operators of its kind and shape). left: float tensors that no operator of the quantised model
    makes, nor has made part of another."""

    found: dict[str, tuple[str, str]]
    left: list[str]


def match(
    quantised: Flow, exact: Flow, values: Mapping[str, Array], floats: Mapping[str, Array],
) -> Matching:  # fmt: skip
    """Match the tensors of two models. values: what the quantised model's mean, as far as they are known; floats: the
    other's. Both are by name, without those names that a `Flow` leaves out. A match has the same shape."""
    matcher = _Matcher(quantised, exact, values, floats)
    matcher.by_name(lambda own, other: own.fits(other))
    matcher.by_structure()
    matcher.by_name(lambda own, other: True)
    matcher.by_order()
    return Matching(matcher.found, matcher.left())


class _Matcher:
    def __init__(
        self, quantised: Flow, exact: Flow, values: Mapping[str, Array], floats: Mapping[str, Array]
    ) -> None:  # fmt: skip
        self.quantised, self.exact, self.values, self.floats = quantised, exact, values, floats
        self.found: dict[str, tuple[str, str]] = {}
        self.used: set[str] = set()
        for own, other in zip(quantised.inputs, exact.inputs):
            named = own in exact.inputs
            self._add(own, own if named else other, "name" if named else "order")

    def _add(self, own: str, other: str, how: str) -> None:
        self.found[own] = other, how
        self.used.add(other)

    def _same_shape(self, own: str, other: str) -> bool:
        if other not in self.floats:
            return False
        return own not in self.values or self.values[own].shape == self.floats[other].shape

    def by_name(self, fits: Callable[[FlowOperator, FlowOperator], bool]) -> None:
        for name, own in self.quantised.maker.items():
            other = self.exact.maker.get(name)
            if name in self.found or name in self.used or other is None or not self._same_shape(name, name):
                continue
            if other.kind in ABSORBED or fits(own, other):
                self._add(name, name, "name")

    def by_structure(self) -> None:
        """Operators in the model's order, each on operands that are matched."""
        for own in self.quantised.operators:
            if not own.operands or any(name in self.found for name in own.outputs):
                continue
            if all(name in self.found for name in own.operands):
                self._same_operator(own)

    def _same_operator(self, own: FlowOperator) -> None:
        operands = tuple(self.found[name][0] for name in own.operands)
        candidates = []
        for other in dict.fromkeys(self.exact.users[operands[0]]):
            if other.operands == operands and own.fits(other) and len(other.outputs) == len(own.outputs):
                ends = [self._absorbing(*pair) for pair in zip(own.outputs, other.outputs)]
                if not self.used & {*ends} and all(map(self._same_shape, own.outputs, ends)):
                    candidates.append(ends)
        if not candidates:
            return
        nearest = min(candidates, key=lambda ends: sum(map(self._distance, own.outputs, ends)))
        for pair in zip(own.outputs, nearest):
            self._add(*pair, "structure")

    def _absorbing(self, own: str, other: str) -> str:
        """The tensor that quantisation makes of `other` in one operator: behind those that `own`'s model has not."""
        kept = {user.kind for user in self.quantised.users[own]}
        while other not in self.exact.outputs and len(self.exact.users[other]) == 1:
            user = self.exact.users[other][0]
            if user.kind not in ABSORBED or user.kind in kept:
                break
            other = user.outputs[0]
        return other

    def _distance(self, own: str, other: str) -> float:
        if own not in self.values or other not in self.floats:
            return 0.0
        return float(np.square(self.values[own].astype(np.float64) - self.floats[other]).sum())

    def by_order(self) -> None:
        theirs = list(_grouped(self.exact.operators, self.floats, self.used))
        ours = list(_grouped(self.quantised.operators, self.values, set(self.found)))
        for key in {key for key, _ in ours}:
            own, other = ([name for each, name in group if each == key] for group in (ours, theirs))
            if len(own) == len(other):
                for pair in zip(own, other):
                    self._add(pair[0], self._absorbing(*pair), "order")

    def left(self) -> list[str]:
        inside = set()
        for name in self.used:
            while (made := self.exact.maker.get(name)) is not None and made.kind in ABSORBED:
                name = made.operands[0]
                inside.add(name)
        return [name for name in self.exact.maker if name not in self.used | inside]


def _grouped(
    operators: Sequence[FlowOperator], known: Mapping[str, Array], matched: set[str]
) -> Iterator[tuple[tuple[str, tuple[int, ...]], str]]:
    """Kind and shape, and name, of what is not matched."""
    for each in operators:
        for name in each.outputs:
            if name in known and name not in matched:
                yield (each.kind, known[name].shape), name
