"""The registry of operators that have kernels: element types, nodes, the table OPS, and helpers of all builders.

Its parts, in order: the element types of kernels (TYPES); the operators of a CPU function (CpuNode) and the types of
its inputs; the view that a builder has of one operator (Node), which decides what counts as Unsupported; the table OPS
with the decorator `op` that fills it; expressions that many builders use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor
from celosia.compiler.program import dtypes
from celosia.compiler.program.host.shape_rules import broadcast
from celosia.compiler.program.op_spec import Kind, declare_operator, op_spec

Array = NDArray[Any]
Shape = tuple[int, ...]
F32 = "float32"
"""Name of the element type of scales, and of results before they are rounded."""
TYPES = (
    "float16", "float32", "float64", "bool", "bfloat16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)  # fmt: skip
"""Element types that kernels load and store. They compute in all but bfloat16, which ops.build converts to float32."""
ONNX_TYPES = {code: name for code, name in dtypes.ONNX_TYPES.items() if name in TYPES}
"""onnx.TensorProto.DataType -> element type, of the TYPES only."""


def is_mapped(array: Array | None) -> bool:
    """Return whether the elements lie in a memory-mapped file; such arrays are not repacked, which would copy them.

    None, which stands for an input that is not constant, gives False.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(getattr(base, "obj", base), mmap)


@dataclass(frozen=True)
class InputType:
    """Shape and element type of an input of a CPU function, and its value where it is constant."""

    shape: tuple[int, ...]
    dtype: str
    value: Array | None = None

    @classmethod
    def of(cls, array: Array) -> InputType:
        """Create the type of a constant."""
        return cls(array.shape, array.dtype.name, array)


def input_type(value: Array | InputType | tuple[tuple[int, ...], str]) -> InputType:
    """Convert an array (a constant) or a pair (shape, element type) to an InputType."""
    if isinstance(value, np.ndarray):
        return InputType.of(value)
    return value if isinstance(value, InputType) else InputType(tuple(value[0]), value[1])


@dataclass(frozen=True)
class CpuNode:
    """One operator of a CpuFunction.

    op: its name in OPS. inputs, outputs: names of tensors; "" for an optional one that is left out. name: of the node
    in the model, for errors.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


Change = Callable[[Expr], Expr] | None
"""A function of an element that is applied before it is used; None: the element as it is."""
ChangeAt = Callable[[Expr, tuple[Expr, ...]], Expr] | None
"""As Change, but a function of the element and its index."""


class Unsupported(ValueError):
    """An operator, or a use of one, that no kernel can compute; the host runtime then executes it in numpy."""


@dataclass(frozen=True)
class Node:
    """One operator to build: ONNX attributes as Python values, inputs as tensors (None where left out).

    values: the arrays of inputs that are constant, None for the others. Shapes, axes and the like must be constant. The
    numbers that a kernel computes with are read at run time even where they are constant, so that equal layers share
    one kernel. outputs: number of outputs that are read. opset: version of the operator's domain. name: of the node in
    the model, for errors.

    Methods take an operand by its documented name ("x_scale") or by the number of its input.
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
        """Return the number of the input that an operand is. Raises UnknownOperand for a name that is not declared."""
        return operand if isinstance(operand, int) else op_spec(self.op).number(operand)

    def groups(self) -> list[tuple[int, ...]]:
        """Return the numbers of the inputs that repeat (as those of QLinearConcat), one tuple for each group."""
        return op_spec(self.op).groups(len(self.inputs))

    def has(self, operand: str | int) -> bool:
        """Return whether an operand is present, not left out."""
        i = self.number(operand)
        return i < len(self.inputs) and self.inputs[i] is not None

    def input(self, operand: str | int) -> Tensor:
        """Return the tensor of an operand. Raises Unsupported where it is left out."""
        i = self.number(operand)
        tensor = self.inputs[i] if i < len(self.inputs) else None
        if tensor is None:
            raise self.fail(f"{self._describe_operand(operand)} is missing")
        return tensor

    def optional(self, operand: str | int) -> Tensor | None:
        """Return the tensor of an operand, or None where it is left out."""
        return self.input(operand) if self.has(operand) else None

    def value(self, operand: str | int) -> Array | None:
        """Return the array of an operand, or None where it is left out or not constant."""
        return self.values[self.number(operand)] if self.has(operand) else None

    def constant(self, operand: str | int) -> Array:
        """Return the array of an operand. Raises Unsupported where it is not constant, or left out."""
        value = self.value(operand)
        if value is None:
            raise self.fail(f"{self._describe_operand(operand)} is not a constant")
        return value

    def is_fixed(self, operand: str | int) -> bool:
        """Return whether an operand is a constant of which a packed copy may be made when the model is compiled."""
        value = self.value(operand)
        return value is not None and not is_mapped(value)

    def _describe_operand(self, operand: str | int) -> str:
        """Return the name and number of an operand, for errors."""
        return f"{operand} (input {self.number(operand)})" if isinstance(operand, str) else f"input {operand}"

    def ints(self, name: str) -> list[int] | None:
        """Return the integers of `name`, an attribute in old opsets and an operand in new ones; None for neither.

        Raises Unsupported where the operand is not constant.
        """
        if name in self.attrs:
            return [int(v) for v in np.atleast_1d(self.attrs[name])]
        return [int(v) for v in np.atleast_1d(self.constant(name))] if self.has(name) else None

    def axis(self, default: int, rank: int) -> int:
        """Return the attribute `axis`, or `default`, counted from the front of `rank` dimensions.

        Raises Unsupported where there is no such axis.
        """
        axis = int(self.attrs.get("axis", default))
        if not -rank <= axis < max(rank, 1):
            raise self.fail(f"axis {axis} of {rank} dimensions")
        return axis % rank if rank else 0

    def elementwise(self, fn: Callable[..., Any], *tensors: Tensor) -> Tensor:
        """Apply `fn` to corresponding elements of `tensors`, broadcast. Raises Unsupported where shapes do not fit."""
        try:
            shape = broadcast(*(t.shape for t in tensors))
        except ValueError as e:
            raise self.fail(f"shapes {[list(t.shape) for t in tensors]} do not broadcast") from e
        return T.compute(shape, lambda *i: fn(*(at(t, i) for t in tensors)), self.op.lower())

    def scalar(self, operand: str | int, dtype: str, default: float = 0) -> Expr:
        """Return the only element of an operand as `dtype`, or `default` where it is left out.

        Raises Unsupported where the operand has several elements.
        """
        if not self.has(operand):
            return T.wrap(default, dtype)
        tensor = self.input(operand)
        if tensor.size != 1:
            described = self._describe_operand(operand)
            raise self.fail(f"{described} has shape {list(tensor.shape)} where one element is expected")
        return tensor.flat(0).astype(dtype)


Builder = Callable[[Node], Tensor | Sequence[Tensor]]
"""A function that returns the outputs of one operator as tensor expressions."""
OPS: dict[str, Builder] = {}
"""Operator -> its builder; other domains than ONNX's precede the name where it would collide."""


def op(*names: str, kind: Kind, operands: str, **facts: Any) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a builder in OPS, and facts of its operators for other passes.

    kind: for operator fusion. operands: see `op_spec.parse_operands`. facts: further fields of OpSpec. The decorator
    raises TypeError where an operator has a builder already.
    """

    def register(builder: Builder) -> Builder:
        for name in names:
            if name in OPS:
                raise TypeError(f"{name}: defined twice, by {OPS[name].__name__} and {builder.__name__}")
            OPS[name] = builder
            declare_operator(name, operands=operands, kind=kind, **facts)
        return builder

    return register


def at(tensor: Tensor, index: Sequence[Expr]) -> Expr:
    """Return the element of `tensor` that numpy's broadcasting puts at `index` of the result."""
    last_indices = index[len(index) - len(tensor.shape) :]
    return tensor[tuple(0 if n == 1 else i for i, n in zip(last_indices, tensor.shape))]


def reshaped(tensor: Tensor, shape: Shape, name: str = "view") -> Tensor:
    """Return a tensor with the same elements in row-major order and another shape.

    Raises Unsupported where the number of elements differs.
    """
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
    """Convert a float with an integer value to an integer type; values beyond its limits become the nearest limit."""
    return clamp(x, *limits(dtype)).astype(dtype)


def round_even(x: Expr) -> Expr:
    """Round to the nearest integer, ties to even, as a float."""
    return T.call("round_even", x)
