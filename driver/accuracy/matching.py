"""Match tensors of a quantised model with those of its float model, also where their names differ."""

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
    """An operator in a Flow. kind: of its computation, in floats. operands: tensors that are no constants. outputs:
    names, some empty."""

    kind: str
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def fits(self, other: FlowOperator) -> bool:
        """Whether both may be counterparts: of one kind, without an attribute that both have and that differs."""
        return self.kind == other.kind and all(
            other.attributes.get(name, value) == value for name, value in self.attributes.items()
        )


class Flow:
    """Operators of a model and the data flow between them. Quantisation, constants and identities are left out.

    inputs: names of the model's. operators: in its order. maker, users: of a tensor.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        constants = {tensor.name for tensor in proto.graph.initializer}
        self.inputs = [value.name for value in proto.graph.input if value.name not in constants]
        self._source: dict[str, str] = {}
        self.operators: list[FlowOperator] = []
        for node in proto.graph.node:
            if node.op_type in _CONSTANTS or (node.input and all(not name or name in constants for name in node.input)):
                constants |= {*node.output}
            elif node.op_type in WIRES:
                self._source[node.output[0]] = self.source(node.input[0])
            else:
                operands = (self.source(name) for name in node.input if name and name not in constants)
                attributes = {
                    attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
                }
                self.operators.append(
                    FlowOperator(_float_kind(node.op_type), tuple(operands), tuple(node.output), attributes)
                )
        self.maker = {name: operator for operator in self.operators for name in operator.outputs if name}
        self.users: dict[str, list[FlowOperator]] = defaultdict(list)
        for operator in self.operators:
            for name in operator.operands:
                self.users[name].append(operator)
        self.outputs = {self.source(value.name) for value in proto.graph.output}

    def source(self, name: str) -> str:
        """Tensor of which `name` is a quantised, dequantised or plain copy."""
        return self._source.get(name, name)


def _float_kind(op: str) -> str:
    """Kind of an operator, with integer operators under the name of the float operator that they stand for.

    >>> _float_kind("QLinearConv"), _float_kind("QGemm"), _float_kind("Conv")
    ('Conv', 'Gemm', 'Conv')
    """
    return op.removeprefix("QLinear") if op.startswith("QLinear") else {"QGemm": "Gemm"}.get(op, op)


def rename_inputs(quantised: Flow, exact: Flow, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Rename `inputs` of the quantised model to the float model's: equal names, or equal order. ModelError."""
    if set(exact.inputs) <= set(inputs):
        return {name: inputs[name] for name in exact.inputs}
    if len(exact.inputs) != len(quantised.inputs):
        ours, float_names = ", ".join(quantised.inputs), ", ".join(exact.inputs)
        raise ModelError(f"the float model takes {float_names}, the int8 model {ours}; give one with the same inputs")
    return {name: inputs[quantised_name] for name, quantised_name in zip(exact.inputs, quantised.inputs)}


@dataclass
class Matching:
    """Result of matching two models. found: the float tensor for each tensor of the quantised model that has one, and
    how it was found: "name", "structure" (the same operator on matched operands; of several the one with the nearest
    values), "order" (the same place among as many operators of its kind and shape). left: float tensors that no
    operator of the quantised model makes, nor has made part of another."""

    found: dict[str, tuple[str, str]]
    left: list[str]


def match_tensors(
    quantised: Flow, exact: Flow, values: Mapping[str, Array], floats: Mapping[str, Array],
) -> Matching:  # fmt: skip
    """Match the tensors of two models. values: what the quantised model's mean, as far as they are known; floats: the
    other's. Both are by name, without those names that a `Flow` leaves out. A match has the same shape."""
    matcher = _Matcher(quantised, exact, values, floats)
    matcher.match_by_name(lambda tensor, other: tensor.fits(other))
    matcher.match_by_structure()
    matcher.match_by_name(lambda tensor, other: True)
    matcher.match_by_order()
    return Matching(matcher.found, matcher.unmatched_floats())


class _Matcher:
    def __init__(
        self, quantised: Flow, exact: Flow, values: Mapping[str, Array], floats: Mapping[str, Array]
    ) -> None:  # fmt: skip
        self.quantised, self.exact, self.values, self.floats = quantised, exact, values, floats
        self.found: dict[str, tuple[str, str]] = {}
        self.used: set[str] = set()
        for tensor, other in zip(quantised.inputs, exact.inputs):
            named = tensor in exact.inputs
            self._add(tensor, tensor if named else other, "name" if named else "order")

    def _add(self, tensor: str, other: str, method: str) -> None:
        self.found[tensor] = other, method
        self.used.add(other)

    def _has_same_shape(self, tensor: str, other: str) -> bool:
        if other not in self.floats:
            return False
        return tensor not in self.values or self.values[tensor].shape == self.floats[other].shape

    def match_by_name(self, fits: Callable[[FlowOperator, FlowOperator], bool]) -> None:
        """Match tensors of equal names and shapes where the operators fit or quantisation absorbs the float one."""
        for name, operator in self.quantised.maker.items():
            other = self.exact.maker.get(name)
            if name in self.found or name in self.used or other is None or not self._has_same_shape(name, name):
                continue
            if other.kind in ABSORBED or fits(operator, other):
                self._add(name, name, "name")

    def match_by_structure(self) -> None:
        """Match operators in the model's order, each on operands that are matched."""
        for operator in self.quantised.operators:
            if not operator.operands or any(name in self.found for name in operator.outputs):
                continue
            if all(name in self.found for name in operator.operands):
                self._match_outputs(operator)

    def _match_outputs(self, operator: FlowOperator) -> None:
        """Match the outputs of `operator` with those of the nearest float operator on matched operands."""
        operands = tuple(self.found[name][0] for name in operator.operands)
        candidates = []
        for other in dict.fromkeys(self.exact.users[operands[0]]):
            if other.operands == operands and operator.fits(other) and len(other.outputs) == len(operator.outputs):
                ends = [self._skip_absorbed_operators(*pair) for pair in zip(operator.outputs, other.outputs)]
                if not self.used & {*ends} and all(map(self._has_same_shape, operator.outputs, ends)):
                    candidates.append(ends)
        if not candidates:
            return
        nearest = min(candidates, key=lambda ends: sum(map(self._squared_distance, operator.outputs, ends)))
        for pair in zip(operator.outputs, nearest):
            self._add(*pair, "structure")

    def _skip_absorbed_operators(self, tensor: str, other: str) -> str:
        """Return the float tensor behind the operators that quantisation absorbs into that of `tensor`."""
        kinds = {user.kind for user in self.quantised.users[tensor]}
        while other not in self.exact.outputs and len(self.exact.users[other]) == 1:
            user = self.exact.users[other][0]
            if user.kind not in ABSORBED or user.kind in kinds:
                break
            other = user.outputs[0]
        return other

    def _squared_distance(self, tensor: str, other: str) -> float:
        if tensor not in self.values or other not in self.floats:
            return 0.0
        return float(np.square(self.values[tensor].astype(np.float64) - self.floats[other]).sum())

    def match_by_order(self) -> None:
        """Match tensors of one kind and shape in the models' order, where both have as many."""
        float_groups = list(_unmatched_by_kind_and_shape(self.exact.operators, self.floats, self.used))
        ours = list(_unmatched_by_kind_and_shape(self.quantised.operators, self.values, set(self.found)))
        for key in {key for key, _ in ours}:
            names, other = ([name for group_key, name in group if group_key == key] for group in (ours, float_groups))
            if len(names) == len(other):
                for pair in zip(names, other):
                    self._add(pair[0], self._skip_absorbed_operators(*pair), "order")

    def unmatched_floats(self) -> list[str]:
        """List float tensors without a counterpart, except those inside operators that quantisation absorbs."""
        inside = set()
        for name in self.used:
            while (maker := self.exact.maker.get(name)) is not None and maker.kind in ABSORBED:
                name = maker.operands[0]
                inside.add(name)
        return [name for name in self.exact.maker if name not in self.used | inside]


def _unmatched_by_kind_and_shape(
    operators: Sequence[FlowOperator], known_constants: Mapping[str, Array], matched: set[str]
) -> Iterator[tuple[tuple[str, tuple[int, ...]], str]]:
    """Yield kind and shape, and name, of the tensors that are not matched."""
    for operator in operators:
        for name in operator.outputs:
            if name in known_constants and name not in matched:
                yield (operator.kind, known_constants[name].shape), name
