"""Operands of nodes by the names that their operators declare, and questions about operators by their OpSpec."""

from __future__ import annotations

from typing import Protocol

import onnx_ir as ir
from onnx import NodeProto

from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.op import DOMAINS
from celosia.compiler.program.op_spec import Moves, OpSpec, Role, find_operand


def operand(node: ir.Node, name: str) -> ir.Value | None:
    """The operand `name` of `node`, None where it is left out. UnknownOperand where its operator has none."""
    return find_operand(node.op_type, node.inputs, name)


def set_operand(node: ir.Node, name: str, value: ir.Value) -> None:
    """Make `value` the operand `name` of `node`. UnknownOperand where its operator has none."""
    number = op_spec(node.op_type).number(name)
    if number >= len(node.inputs):
        node.resize_inputs(number + 1)
    node.replace_input_with(number, value)


def is_operand(node: ir.Node, number: int, name: str) -> bool:
    """Whether input `number` of `node` is its operand `name`. UnknownOperand where its operator has none."""
    return number == op_spec(node.op_type).number(name)


def operand_groups(node: ir.Node) -> list[tuple[ir.Value | None, ...]]:
    """The operands that repeat, group by group."""
    groups = op_spec(node.op_type).groups(len(node.inputs))
    return [tuple(node.inputs[number] for number in group) for group in groups]


def quantisation(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """The scale and the zero point of a QuantizeLinear or DequantizeLinear."""
    scale, zero = quantisation_names(node.op_type)
    return operand(node, scale), operand(node, zero)


def quantisation_names(op: str) -> tuple[str, str]:
    """The names of the first operand that is a scale and of the first that is a zero point."""
    spec = op_spec(op)
    scale, zero = (spec.operands[spec.having(role)[0]].name for role in (Role.SCALE, Role.ZERO_POINT))
    return scale, zero


def product_names(op: str) -> tuple[str, str, str]:
    """The names of the two operands that `op` multiplies, and of its bias, "" where it has none."""
    spec = op_spec(op)
    first, second = (spec.operands[number].name for number in spec.data[:2])
    return first, second, next((spec.operands[number].name for number in spec.having(Role.BIAS)), "")


def product_operands(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """The two operands that `node` multiplies, and its bias."""
    first, second, bias = product_names(node.op_type)
    return operand(node, first), operand(node, second), operand(node, bias) if bias else None


class AnyNode(Protocol):
    """A node of a graph, or of a model as ONNX writes it."""

    @property
    def op_type(self) -> str:
        """The name of its operator."""

    @property
    def domain(self) -> str:
        """The domain of its operator."""


def spec_of(node: AnyNode) -> OpSpec:
    """The OpSpec of a node's operator, an empty one where its domain is a user's."""
    return op_spec(node.op_type) if node.domain in DOMAINS else OpSpec()


def joins_parts(node: AnyNode) -> bool:
    """Whether `node` puts its operands, any number of them, one behind another."""
    return spec_of(node).moves is Moves.JOIN and spec_of(node).repeated > 0


def takes_largest(node: AnyNode) -> bool:
    """Whether `node` makes each element of its result the largest in a window."""
    return spec_of(node).windows and spec_of(node).moves is not None


def convolves_bytes(node: AnyNode) -> bool:
    """Whether `node` is the quantised form of a convolution."""
    spec = spec_of(node)
    return spec.multiplies_bytes and spec.windows and spec.scale is not None


def multiplies_matrices(node: AnyNode) -> bool:
    """Whether `node` is the quantised form of a product of matrices."""
    spec = spec_of(node)
    return spec.multiplies_bytes and not spec.windows and spec.scale is not None


def named_input(node: NodeProto, name: str) -> str:
    """The input of `node` that is its operand `name`, "" where it is left out. UnknownOperand."""
    return find_operand(node.op_type, node.input, name) or ""


def data_operands(node: ir.Node) -> list[ir.Value | None]:
    """The inputs that `node` computes with: neither biases nor scales, zero points and shapes."""
    return [node.inputs[number] for number in op_spec(node.op_type).data_among(len(node.inputs))]
