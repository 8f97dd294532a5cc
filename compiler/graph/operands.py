"""Access operands of nodes by their declared names, and ask about operators by their OpSpec.

An operator in a domain of a user's own has no OpSpec; `custom` returns its CustomOp, which the tile language defines
(language/custom_operators.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir
from numpy.typing import NDArray
from onnx import NodeProto

from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.op import DOMAINS
from celosia.compiler.program.op_spec import Moves, OpSpec, Role, find_operand

MODEL_WEIGHTS = "celosia.model_weights"
"""Key in `meta` of a QLinearConv: how many of its weights count as MACs of the model. Others are zeros at channels that
it does not need, or the slopes of a PRelu."""

MODEL_COLUMNS = "celosia.model_columns"
"""Key in the `meta` of a product of two activations: the columns of a, and those of the result, without padding."""


def operand(node: ir.Node, name: str) -> ir.Value | None:
    """Return the operand `name` of `node`; None where it is left out. Raises UnknownOperand if it declares none."""
    return find_operand(node.op_type, node.inputs, name)


def named_input(node: NodeProto, name: str) -> str:
    """Return the name of the input that is the operand `name`; "" if it is left out. Raises UnknownOperand."""
    return find_operand(node.op_type, node.input, name) or ""


def set_operand(node: ir.Node, name: str, value: ir.Value) -> None:
    """Make `value` the operand `name` of `node`. Raises UnknownOperand if it declares none."""
    number = op_spec(node.op_type).number(name)
    if number >= len(node.inputs):
        node.resize_inputs(number + 1)
    node.replace_input_with(number, value)


def is_operand(node: ir.Node, number: int, name: str) -> bool:
    """Return whether input `number` of `node` is its operand `name`. Raises UnknownOperand if it declares none."""
    return number == op_spec(node.op_type).number(name)


def operand_groups(node: ir.Node) -> list[tuple[ir.Value | None, ...]]:
    """Return the operands that repeat, as groups: (tensor, scale, zero point) of each part of a QLinearConcat."""
    groups = op_spec(node.op_type).groups(len(node.inputs))
    return [tuple(node.inputs[number] for number in group) for group in groups]


def quantisation(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """Return the scale and the zero point of a QuantizeLinear or DequantizeLinear."""
    scale, zero = quantisation_names(node.op_type)
    return operand(node, scale), operand(node, zero)


def quantisation_names(op: str) -> tuple[str, str]:
    """Return the names of an operator's first scale and first zero point."""
    spec = op_spec(op)
    scale, zero = (spec.operands[spec.inputs_with_role(role)[0]].name for role in (Role.SCALE, Role.ZERO_POINT))
    return scale, zero


def product_names(op: str) -> tuple[str, str, str]:
    """Return the names of the two operands that `op` multiplies, and of its bias; "" for no bias."""
    spec = op_spec(op)
    first, second = (spec.operands[number].name for number in spec.data_inputs[:2])
    return first, second, next((spec.operands[number].name for number in spec.inputs_with_role(Role.BIAS)), "")


def product_operands(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """Return the two operands that `node` multiplies, and its bias; None for an operand that is left out."""
    first, second, bias = product_names(node.op_type)
    return operand(node, first), operand(node, second), operand(node, bias) if bias else None


class AnyNode(Protocol):
    """A node of onnx-ir, or a NodeProto of ONNX."""

    @property
    def op_type(self) -> str:
        """The name of its operator."""

    @property
    def domain(self) -> str:
        """The domain of its operator."""


def spec_of(node: AnyNode) -> OpSpec:
    """Return the OpSpec of a node's operator; an empty one for domains of a user's own."""
    return op_spec(node.op_type) if node.domain in DOMAINS else OpSpec()


def joins_parts(node: AnyNode) -> bool:
    """Return whether `node` concatenates any number of operands."""
    return spec_of(node).moves is Moves.JOIN and spec_of(node).repeated > 0


def takes_largest(node: AnyNode) -> bool:
    """Return whether each element of the result of `node` is the largest in a window (max pooling)."""
    return spec_of(node).windows and spec_of(node).moves is not None


def convolves_bytes(node: AnyNode) -> bool:
    """Return whether `node` is the quantised form of a convolution."""
    spec = spec_of(node)
    return spec.multiplies_bytes and spec.windows and spec.scale_input is not None


def multiplies_matrices(node: AnyNode) -> bool:
    """Return whether `node` is the quantised form of a matrix product."""
    spec = spec_of(node)
    return spec.multiplies_bytes and not spec.windows and spec.scale_input is not None


def data_operands(node: ir.Node) -> list[ir.Value | None]:
    """Return the inputs that `node` computes with: no biases, scales, zero points or shapes."""
    return [node.inputs[number] for number in op_spec(node.op_type).data_among(len(node.inputs))]


Array = NDArray[Any]
"""A numpy array of any element type."""


@dataclass(frozen=True)
class CustomOp:
    """How the compiler treats an operator that a user defines.

    shapes: (inputs as arrays, empty if not constant; attributes) -> shape and element type of each output. compute:
    arrays to arrays. place: makes a layer of (select.Placement, node), or raises NotOffloadable with the reason.
    """

    shapes: Callable[[Sequence[Array], Mapping[str, Any]], list[tuple[tuple[int, ...], str]]]
    compute: Callable[[Sequence[Array], Mapping[str, Any]], list[Array]]
    place: Callable[[Any, ir.Node], None]


CUSTOM: dict[tuple[str, str], CustomOp] = {}
"""(domain, name) -> operator."""


def custom(node: ir.Node) -> CustomOp | None:
    """Return the operator that a user has defined for `node`; None for an operator of ONNX."""
    return CUSTOM.get((node.domain, node.op_type))
