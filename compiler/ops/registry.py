"""The table of operators, and helpers of all builders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor
from celosia.compiler.ops.node import is_mapped
from celosia.compiler.program.host.shape_rules import broadcast
from celosia.compiler.program.op_spec import Kind, op_spec, state

Array = NDArray[Any]
Shape = tuple[int, ...]
Change = Callable[[Expr], Expr] | None
ChangeAt = Callable[[Expr, tuple[Expr, ...]], Expr] | None  # an element and its index


class Unsupported(ValueError):
    """An operator, or a use of one, that the CPU cannot compile; the importer falls back to the host."""


@dataclass(frozen=True)
class Node:
    """One operator to build: ONNX attributes as Python values, inputs as tensors (None where left out).

    `values` holds the arrays of inputs that are constant. Shapes, axes and the like must be; the numbers that a kernel
    computes with are read at run time even where they are constant, so that equal layers share one kernel.
    """

    op: str
    attrs: dict[str, Any]
    inputs: tuple[Tensor | None, ...]
    values: tuple[Array | None, ...]
    outputs: int = 1
    opset: int = 21
    name: str = ""

    def fail(self, why: str) -> Unsupported:
        """Return an Unsupported that names the operator and the node."""
        return Unsupported(f"{self.op}{f' {self.name!r}' if self.name else ''}: {why}")

    def number(self, operand: str | int) -> int:
        """The number of an operand. UnknownOperand where the operator declares none of this name."""
        return operand if isinstance(operand, int) else op_spec(self.op).number(operand)

    def groups(self) -> list[tuple[int, ...]]:
        """The numbers of the operands that repeat, group by group."""
        return op_spec(self.op).groups(len(self.inputs))

    def has(self, operand: str | int) -> bool:
        """Return whether input `i` is given."""
        i = self.number(operand)
        return i < len(self.inputs) and self.inputs[i] is not None

    def input(self, operand: str | int) -> Tensor:
        """Return input `i`. Raises Unsupported where it is left out."""
        i = self.number(operand)
        tensor = self.inputs[i] if i < len(self.inputs) else None
        if tensor is None:
            raise self.fail(f"{self._named(operand)} is missing")
        return tensor

    def optional(self, operand: str | int) -> Tensor | None:
        """An operand, None where it is left out."""
        return self.input(operand) if self.has(operand) else None

    def value(self, operand: str | int) -> Array | None:
        """The array of an operand, None where it is left out or no constant."""
        return self.values[self.number(operand)] if self.has(operand) else None

    def constant(self, operand: str | int) -> Array:
        """Return the array of input `i`. Raises Unsupported, naming it `what`, where it is no constant."""
        value = self.value(operand)
        if value is None:
            raise self.fail(f"{self._named(operand)} is not a constant")
        return value

    def is_fixed(self, operand: str | int) -> bool:
        """Return whether input `i` is a constant of which a reordered copy may be kept."""
        value = self.value(operand)
        return value is not None and not is_mapped(value)

    def _named(self, operand: str | int) -> str:
        return f"{operand} (input {self.number(operand)})" if isinstance(operand, str) else f"input {operand}"

    def ints(self, name: str) -> list[int] | None:
        """Return a list that is an attribute in old versions of an operator and input `i` in new ones; None for
        neither.
        """
        if name in self.attrs:
            return [int(v) for v in np.atleast_1d(self.attrs[name])]
        return [int(v) for v in np.atleast_1d(self.constant(name))] if self.has(name) else None

    def axis(self, default: int, rank: int) -> int:
        """Return the attribute `axis`, counted from the front. Raises Unsupported where there is no such axis."""
        axis = int(self.attrs.get("axis", default))
        if not -rank <= axis < max(rank, 1):
            raise self.fail(f"axis {axis} of {rank} dimensions")
        return axis % rank if rank else 0

    def elementwise(self, fn: Callable[..., Any], *tensors: Tensor) -> Tensor:
        """Return fn of corresponding elements, broadcast. Raises Unsupported where shapes do not fit."""
        try:
            shape = broadcast(*(t.shape for t in tensors))
        except ValueError as e:
            raise self.fail(f"shapes {[list(t.shape) for t in tensors]} do not broadcast") from e
        return T.compute(shape, lambda *i: fn(*(at(t, i) for t in tensors)), self.op.lower())

    def scalar(self, operand: str | int, dtype: str, default: float = 0) -> Expr:
        """Return the only element of input `i`, as `dtype`; `default` where it is left out."""
        if not self.has(operand):
            return T.wrap(default, dtype)
        tensor = self.input(operand)
        if tensor.size != 1:
            raise self.fail(f"{self._named(operand)} has shape {list(tensor.shape)} where one element is expected")
        return tensor.flat(0).astype(dtype)


Builder = Callable[[Node], Tensor | Sequence[Tensor]]
OPS: dict[str, Builder] = {}


def op(*names: str, kind: Kind, operands: str, **facts: Any) -> Callable[[Builder], Builder]:
    """Register a builder in OPS, and the facts of these operators for the other passes.

    operands: see `op_spec.parse_operands`. TypeError where an operator has a builder already.
    """

    def add(builder: Builder) -> Builder:
        for name in names:
            if name in OPS:
                raise TypeError(f"{name}: defined twice, by {OPS[name].__name__} and {builder.__name__}")
            OPS[name] = builder
            state(name, operands=operands, kind=kind, **facts)
        return builder

    return add


def at(tensor: Tensor, index: Sequence[Expr]) -> Expr:
    """Return the element of `tensor` that numpy's broadcasting puts at `index`."""
    own = index[len(index) - len(tensor.shape) :]
    return tensor[tuple(0 if n == 1 else i for i, n in zip(own, tensor.shape))]


def reshaped(tensor: Tensor, shape: Shape, name: str = "view") -> Tensor:
    """Return a tensor with its elements in row-major order under another shape."""
    if prod(shape) != tensor.size:
        raise Unsupported(f"{tensor.name}: {list(tensor.shape)} cannot be reshaped to {list(shape)}")

    def body(*index: Expr) -> Expr:
        total: Expr = T.wrap(0, T.INDEX)
        for d, i in enumerate(index):
            total = total + i * prod(shape[d + 1 :])
        return tensor.flat(total) if tensor.shape else tensor[()]

    return T.compute(shape, body, name)


def clamp(x: Expr, lo: float, hi: float) -> Expr:
    """Return x within [lo, hi]; NaN becomes lo."""
    return T.call("clamp", x, T.wrap(lo, x.dtype), T.wrap(hi, x.dtype))


def limits(dtype: str) -> tuple[int, int]:
    """Return the least and the greatest value of an integer type."""
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def saturate(x: Expr, dtype: str) -> Expr:
    """Convert a float with an integer value to an integer type, saturating."""
    return clamp(x, *limits(dtype)).astype(dtype)


def round_even(x: Expr) -> Expr:
    """Round to the nearest integer, ties to even, as a float."""
    return T.call("round_even", x)
