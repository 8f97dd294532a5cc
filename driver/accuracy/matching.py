"""Match tensors of a quantised model with those of its float model, also where their names differ.

compare.py then tells how much of the float tensor's signal each quantised tensor has lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.graph.errors import ModelError

Array = NDArray[Any]
PASS_THROUGH = {"QuantizeLinear", "DequantizeLinear", "Identity", "Dropout"}
"""Operators whose output has the same real values as their first input, but for rounding."""
ABSORBED = {"Relu", "Clip", "BatchNormalization"}
"""Operators that quantisation fuses into the one before them, so that the quantised model does not have them."""
_CONSTANT_OPERATORS = {"Constant", "ConstantOfShape"}
"""Operators whose results are constants."""


@dataclass(frozen=True, eq=False)
class FlowOperator:
    """An operator in a Flow.

    kind: its float operator (`Conv` for QLinearConv). operands: tensors that are no constants. outputs: names of
    tensors, empty where left out. attributes: ONNX attributes by name.
    """

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
    """Operators of a model and the data flow between them, so that a quantised and a float model look alike.

    Operators in PASS_THROUGH and constants are left out. inputs: names of the model's inputs. outputs: names of its
    outputs. operators: in the model's order. maker: the operator that computes a tensor, by name. users: the operators
    that read it.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        constants = {tensor.name for tensor in proto.graph.initializer}
        self.inputs = [value.name for value in proto.graph.input if value.name not in constants]
        self._source: dict[str, str] = {}
        self.operators: list[FlowOperator] = []
        for node in proto.graph.node:
            if node.op_type in _CONSTANT_OPERATORS or (
                node.input and all(not name or name in constants for name in node.input)
            ):
                constants |= {*node.output}
            elif node.op_type in PASS_THROUGH:
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
        """Return the tensor of which `name` is a quantised, dequantised or plain copy; itself if it is none."""
        return self._source.get(name, name)


def _float_kind(op: str) -> str:
    """Return the name of the float operator that an integer operator stands for; a float operator's own name.

    >>> _float_kind("QLinearConv"), _float_kind("QGemm"), _float_kind("Conv")
    ('Conv', 'Gemm', 'Conv')
    """
    return op.removeprefix("QLinear") if op.startswith("QLinear") else {"QGemm": "Gemm"}.get(op, op)


def rename_inputs(quantised: Flow, exact: Flow, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Rename `inputs` of the quantised model to the float model's names: equal names, or else equal order.

    ModelError where the models have different numbers of inputs.
    """
    if set(exact.inputs) <= set(inputs):
        return {name: inputs[name] for name in exact.inputs}
    if len(exact.inputs) != len(quantised.inputs):
        ours, float_names = ", ".join(quantised.inputs), ", ".join(exact.inputs)
        raise ModelError(f"the float model takes {float_names}, the int8 model {ours}; give one with the same inputs")
    return {name: inputs[quantised_name] for name, quantised_name in zip(exact.inputs, quantised.inputs)}


@dataclass
class Matching:
    """Result of matching two models.

    counterparts: by tensor of the quantised model, the float tensor and how it was matched: "name", "structure" (the
    same operator on matched operands; of several the one with the nearest values), or "order" (the same position
    among equally many operators of its kind and shape). unmatched: float tensors that no operator of the quantised
    model computes, on its own or fused.
    """

    counterparts: dict[str, tuple[str, str]]
    unmatched: list[str]


def match_tensors(
    quantised: Flow, exact: Flow, values: Mapping[str, Array], floats: Mapping[str, Array],
) -> Matching:  # fmt: skip
    """Match the tensors of a quantised model with those of its float model.

    values: real values of the quantised model's tensors by name, as far as they are known; floats: the float model's
    tensors by name. Neither has names that a `Flow` leaves out. Counterparts have equal shapes. The methods run from
    the surest to the least sure: names of fitting operators, structure, any equal names, order.
    """
    matcher = _Matcher(quantised, exact, values, floats)
    matcher.match_by_name(lambda tensor, other: tensor.fits(other))
    matcher.match_by_structure()
    matcher.match_by_name(lambda tensor, other: True)
    matcher.match_by_order()
    return Matching(matcher.counterparts, matcher.unmatched_floats())


class _Matcher:
    """Matching in progress. counterparts: as in Matching. used: float tensors that are counterparts already."""

    def __init__(
        self, quantised: Flow, exact: Flow, values: Mapping[str, Array], floats: Mapping[str, Array]
    ) -> None:  # fmt: skip
        self.quantised, self.exact, self.values, self.floats = quantised, exact, values, floats
        self.counterparts: dict[str, tuple[str, str]] = {}
        self.used: set[str] = set()
        for tensor, other in zip(quantised.inputs, exact.inputs):
            named = tensor in exact.inputs
            self._add(tensor, tensor if named else other, "name" if named else "order")

    def _add(self, tensor: str, other: str, method: str) -> None:
        """Record the float tensor `other` as counterpart of `tensor`."""
        self.counterparts[tensor] = other, method
        self.used.add(other)

    def _has_same_shape(self, tensor: str, other: str) -> bool:
        """Whether the float tensor `other` is known and has the shape of `tensor`, if that is known."""
        if other not in self.floats:
            return False
        return tensor not in self.values or self.values[tensor].shape == self.floats[other].shape

    def match_by_name(self, fits: Callable[[FlowOperator, FlowOperator], bool]) -> None:
        """Match tensors of equal names and shapes where the operators fit or quantisation absorbs the float one."""
        for name, operator in self.quantised.maker.items():
            other = self.exact.maker.get(name)
            if name in self.counterparts or name in self.used or other is None or not self._has_same_shape(name, name):
                continue
            if other.kind in ABSORBED or fits(operator, other):
                self._add(name, name, "name")

    def match_by_structure(self) -> None:
        """Match the outputs of each operator, in the model's order, whose operands have counterparts."""
        for operator in self.quantised.operators:
            if not operator.operands or any(name in self.counterparts for name in operator.outputs):
                continue
            if all(name in self.counterparts for name in operator.operands):
                self._match_outputs(operator)

    def _match_outputs(self, operator: FlowOperator) -> None:
        """Match the outputs of `operator` with those of a float operator on the counterparts of its operands.

        Of several such operators, the one whose outputs have the nearest values.
        """
        operands = tuple(self.counterparts[name][0] for name in operator.operands)
        candidates = []
        for other in dict.fromkeys(self.exact.users[operands[0]]):
            if other.operands == operands and operator.fits(other) and len(other.outputs) == len(operator.outputs):
                outputs = [self._skip_absorbed_operators(*pair) for pair in zip(operator.outputs, other.outputs)]
                if not self.used & {*outputs} and all(map(self._has_same_shape, operator.outputs, outputs)):
                    candidates.append(outputs)
        if not candidates:
            return
        nearest = min(candidates, key=lambda outputs: sum(map(self._squared_distance, operator.outputs, outputs)))
        for pair in zip(operator.outputs, nearest):
            self._add(*pair, "structure")

    def _skip_absorbed_operators(self, tensor: str, other: str) -> str:
        """Follow the float tensor `other` through operators that quantisation fuses; return the last result.

        An operator that the quantised model still has behind `tensor` is not skipped.
        """
        kinds = {user.kind for user in self.quantised.users[tensor]}
        while other not in self.exact.outputs and len(self.exact.users[other]) == 1:
            user = self.exact.users[other][0]
            if user.kind not in ABSORBED or user.kind in kinds:
                break
            other = user.outputs[0]
        return other

    def _squared_distance(self, tensor: str, other: str) -> float:
        """Return the sum of squared differences of two tensors; 0 where one of them is not known."""
        if tensor not in self.values or other not in self.floats:
            return 0.0
        return float(np.square(self.values[tensor].astype(np.float64) - self.floats[other]).sum())

    def match_by_order(self) -> None:
        """Match unmatched tensors of one kind and shape in the models' order, where both models have equally many."""
        float_names = _group_unmatched(self.exact.operators, self.floats, self.used)
        quantised_names = _group_unmatched(self.quantised.operators, self.values, set(self.counterparts))
        for key, names in quantised_names.items():
            others = float_names.get(key, [])
            if len(names) == len(others):
                for name, other in zip(names, others):
                    self._add(name, self._skip_absorbed_operators(name, other), "order")

    def unmatched_floats(self) -> list[str]:
        """List float tensors without a counterpart, except those inside operators that quantisation fuses."""
        fused = set()
        for name in self.used:
            while (maker := self.exact.maker.get(name)) is not None and maker.kind in ABSORBED:
                name = maker.operands[0]
                fused.add(name)
        return [name for name in self.exact.maker if name not in self.used | fused]


def _group_unmatched(
    operators: Sequence[FlowOperator], arrays: Mapping[str, Array], matched: set[str]
) -> dict[tuple[str, tuple[int, ...]], list[str]]:
    """Group the names of tensors in `arrays` that are not in `matched` by their operator's kind and their shape."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for operator in operators:
        for name in operator.outputs:
            if name in arrays and name not in matched:
                groups[operator.kind, arrays[name].shape].append(name)
    return dict(groups)
