"""Facts of each operator besides its computation: one OpSpec, filled where the operator is defined.

The decorators `@op` of compiler/ops and `@host` of program/host/hostops fill it. Other tables of operators are derived
from it (`operators_with`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar


class Kind(Enum):
    """The class of an operator for fusion: the four classes of TVM (Chen et al., OSDI 2018, section 3)."""

    INJECTIVE = "injective"
    """Computes each element from single elements, so it can be inlined into its readers."""
    REDUCTION = "reduction"
    """Reads each element once, or few times, so its injective producers can be inlined."""
    COMPLEX = "complex-out-fusable"
    """Reads elements many times or selectively; only its injective readers can be fused with it."""
    OPAQUE = "opaque"
    """Is never fused."""


class Moves(Enum):
    """Where the elements of a result come from, for operators that move elements and compute none."""

    ALL = "every element of its operand, once"
    SOME = "elements of its operand, by their places"
    FILL = "elements of its operand; in some of its modes also a constant, such as the padding of Pad"
    JOIN = "elements of several operands, or of one operand in an order that depends on the lengths of samples"


class Role(Enum):
    """Role of an operand in its operator: data, weights, scale, ..."""

    DATA = "data"
    WEIGHTS = "weights"
    BIAS = "bias"
    SCALE = "scale"
    ZERO_POINT = "zero point"
    SHAPE = "shape"
    """Sizes, axes and the like: a kernel's code depends on its values."""


PARAMETERS = {"scale": Role.SCALE, "zero_point": Role.ZERO_POINT}
"""Ending of an operand's name -> role, for operands that say how another one, or the result, is quantised."""


class UnknownOperand(Exception):
    """A name that an operator does not declare for any of its operands."""


@dataclass(frozen=True)
class OperandSpec:
    """One operand of an operator.

    name: that of the documentation of ONNX or onnxruntime, in lower case. quantised_operand: for a scale or zero point,
    the operand that it quantises, "" for the result. optional: whether it may be left out. type: for an operator of
    onnxruntime, a letter for its element type: f float32, i int32, T, U, V int8 or uint8, Q any quantised type, "." any
    type; operands with the same letter have the same type. "" where it is not declared.
    """

    name: str
    role: Role = Role.DATA
    quantised_operand: str = ""
    optional: bool = False
    type: str = ""

    @property
    def quantises(self) -> bool:
        """Whether it is a scale or a zero point."""
        return self.role in (Role.SCALE, Role.ZERO_POINT)


_OPERAND = re.compile(r"(?P<name>\w+)(?:<(?P<type>.)>)?(?::(?P<role>\w+))?(?P<optional>\??)")
"""One operand in a declaration: name<type>:role?"""


def parse_operands(text: str) -> tuple[tuple[OperandSpec, ...], int]:
    """Parse a declaration of operands; return them in order, and how many of the last ones may repeat as a group.

    An operand is written as its name, then perhaps its type in angle brackets, its role after a colon, and "?" where it
    may be left out: "x<T>:weights?". X_scale and X_zero_point quantise X. The last operands may be a group that
    repeats, "(...)*". Raises ValueError for another syntax.

    >>> operands, repeated = parse_operands("y_scale y_zero_point (inputs inputs_scale inputs_zero_point)*")
    >>> repeated, operands[3].role.value, operands[3].quantised_operand, operands[0].quantised_operand
    (3, 'scale', 'inputs', '')
    """
    once, bracket, group = text.partition("(")
    if bracket and not group.endswith(")*"):
        raise ValueError(f"operands {text!r}: a group is written (...)*")
    words = [*once.split(), *group.removesuffix(")*").split()]
    fields = [_OPERAND.fullmatch(word) for word in words]
    if wrong := [word for word, match in zip(words, fields) if match is None]:
        raise ValueError(f"operands {text!r}: {wrong[0]!r} is not written as name<type>:role?")
    operands = [
        OperandSpec(match["name"], _role(match), "", bool(match["optional"]), match["type"] or "")
        for match in fields if match is not None
    ]  # fmt: skip
    return tuple(_with_owner(operand, operands) for operand in operands), len(group.split())


def _with_owner(operand: OperandSpec, operands: list[OperandSpec]) -> OperandSpec:
    """Fill in which of `operands` a scale or zero point quantises, and its type where others declare theirs."""
    if not operand.quantises:
        return operand
    prefix = operand.name.removesuffix(f"_{operand.role.name.lower()}")
    owners = [other for other in operands if not other.quantises]
    owner = next(
        (other for other in owners if other.name == prefix or other.name.startswith(f"{prefix}_")), OperandSpec("")
    )
    kind = operand.type or ("f" if operand.role is Role.SCALE else owner.type)
    return replace(operand, quantised_operand=owner.name, type=kind if any(other.type for other in operands) else "")


def _role(match: re.Match[str]) -> Role:
    """Return the role that a match of _OPERAND declares, else the one that the end of its name implies."""
    if match["role"]:
        return Role(match["role"])
    return next((role for end, role in PARAMETERS.items() if match["name"].endswith(f"_{end}")), Role.DATA)


@dataclass(frozen=True)
class OpSpec:
    """All that passes know of one operator.

    name: as in models; a domain may precede it where it would collide with an operator of ONNX.
    kind: its class for operator fusion.
    operands, repeated: see `parse_operands`.
    domain: "" for ONNX's own.
    variant_of: the float operator of ONNX that it computes in quantised operands, or with further operators fused. Its
    data, weights and bias are those of that operator, in the same order.
    moves: where its elements come from, None where it computes them.
    view: it changes only the shape, so its output may share the memory of its input.
    rounded_once: it needs several operations for a result; for float16 these are in float32, and the result is rounded
    once.
    needs_kernel: it is slow without a kernel of its own, so a model whose open sizes reach it is compiled for given
    sizes (graph/importer.py).
    multiplies_bytes: it adds up products of its first two data operands, which are bytes.
    windows: its attributes are those of sliding windows (host/shape_rules.py).
    shaped_as: for an operator whose shapes ONNX does not infer, an operator of ONNX with the same shape and type;
    "Cast" where the type is float32; "" where it is `variant_of`, or unknown.
    prefers_numpy: it runs in numpy even though there is a kernel.
    random: its results differ each time.
    """

    name: str = ""
    kind: Kind = Kind.OPAQUE
    operands: tuple[OperandSpec, ...] = ()
    repeated: int = 0
    domain: str = ""
    variant_of: str = ""
    moves: Moves | None = None
    view: bool = False
    rounded_once: bool = False
    needs_kernel: bool = False
    multiplies_bytes: bool = False
    windows: bool = False
    shaped_as: str = ""
    prefers_numpy: bool = False
    random: bool = False

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {operand.name: number for number, operand in enumerate(self.operands)}

    def number(self, name: str) -> int:
        """Return the number of the operand `name`. Raises UnknownOperand."""
        if name not in self._numbers:
            declared = ", ".join(self._numbers) or "none"
            raise UnknownOperand(f"{self.name} has no operand {name!r}; it has {declared}")
        return self._numbers[name]

    def inputs_with_role(self, *roles: Role) -> tuple[int, ...]:
        """Return the numbers of the operands with one of these roles."""
        return tuple(number for number, operand in enumerate(self.operands) if operand.role in roles)

    def operand_at(self, number: int) -> OperandSpec | None:
        """Return the operand that input `number` is; None where none is declared. The last operands may repeat."""
        count = len(self.operands)
        if self.repeated and number >= count:
            number = count - self.repeated + (number - count) % self.repeated
        return self.operands[number] if number < count else None

    @cached_property
    def shape_inputs(self) -> tuple[int, ...]:
        """The numbers of the inputs whose values the code of a kernel depends on, such as axes and sizes.

        Where they are not constant, the kernel is compiled at run time.
        """
        return self.inputs_with_role(Role.SHAPE)

    @cached_property
    def weights_input(self) -> int | None:
        """The number of the input that holds weights, None where there is none."""
        return next(iter(self.inputs_with_role(Role.WEIGHTS)), None)

    @cached_property
    def data_inputs(self) -> tuple[int, ...]:
        """The numbers of the inputs that are data or weights, not biases, parameters or shapes."""
        return self.inputs_with_role(Role.DATA, Role.WEIGHTS)

    def data_among(self, count: int) -> list[int]:
        """Return the numbers of data and weights among `count` inputs, of which the last operands may repeat."""
        operands = [self.operand_at(number) for number in range(count)]
        return [n for n, operand in enumerate(operands) if operand and operand.role in (Role.DATA, Role.WEIGHTS)]

    def groups(self, count: int) -> list[tuple[int, ...]]:
        """Return the numbers of the inputs that repeat, one tuple for each group, where a node has `count` inputs."""
        starts = range(len(self.operands) - self.repeated, count, self.repeated) if self.repeated else ()
        return [tuple(range(start, start + self.repeated)) for start in starts]

    def quantisation_of(self, number: int, count: int) -> tuple[int, int]:
        """Return the numbers of the scale and the zero point of input `number`, where a node has `count` inputs.

        Raises LookupError where the operator declares none.
        """
        group = next((group for group in self.groups(count) if number in group), tuple(range(count)))
        operand = self.operand_at(number)
        parameters = {
            parameter.role: place for place in group
            if operand and (parameter := self.operand_at(place)) and parameter.quantises
            and parameter.quantised_operand == operand.name
        }  # fmt: skip
        return parameters[Role.SCALE], parameters[Role.ZERO_POINT]

    @property
    def shape_like(self) -> str:
        """Name of the operator of ONNX whose result has the same shape and type for the same data; "" for none."""
        is_quantised_form = self.scale_input is not None and self.domain == "com.microsoft"
        return self.shaped_as or (self.variant_of if is_quantised_form else "")

    @cached_property
    def factors(self) -> tuple[int, ...]:
        """The numbers of the two inputs, of bytes, whose products it adds up; () for other operators."""
        return self.data_inputs if self.multiplies_bytes else ()

    @cached_property
    def scale_input(self) -> int | None:
        """The number of the input that is the scale of the result, None where there is none."""
        return self._input_for_result(Role.SCALE)

    @cached_property
    def zero_point_input(self) -> int | None:
        """The number of the input that is the zero point of the result, None where there is none."""
        return self._input_for_result(Role.ZERO_POINT)

    def _input_for_result(self, role: Role) -> int | None:
        """Return the number of the input with this role that quantises the result, None where there is none."""
        numbers = self.inputs_with_role(role)
        return next((number for number in numbers if not self.operands[number].quantised_operand), None)


F = TypeVar("F")
"""Type of a function."""
Input = TypeVar("Input")
"""Type of an input of a node: a name, a value, an array."""


def registering_in(table: dict[str, F]) -> Callable[..., Callable[[F], F]]:
    """Return a decorator factory: `@registering_in(table)(*names)` enters a function in `table` under these names."""

    def for_operators(*names: str) -> Callable[[F], F]:
        def register(function: F) -> F:
            table.update(dict.fromkeys(names, function))
            return function

        return register

    return for_operators


_ROWS: dict[str, OpSpec] = {}
"""Operator -> all that is known of it."""
_NOTHING = OpSpec()
"""A row with nothing filled in, for comparison."""


def declare_operator(name: str, operands: str = "", **facts: Any) -> None:
    """Fill in fields of an operator's row, in several calls if need be.

    operands: see `parse_operands`. facts: fields of OpSpec. Raises TypeError where a field is filled already.
    """
    row = op_spec(name)
    if operands:
        facts["operands"], facts["repeated"] = parse_operands(operands)
    if again := [fact for fact in facts if getattr(row, fact) != getattr(_NOTHING, fact)]:
        raise TypeError(f"{name}: {', '.join(again)} stated twice")
    _ROWS[name] = replace(row, name=name, **facts)


def op_spec(name: str) -> OpSpec:
    """Return the OpSpec of an operator; an empty one for a name that is not known, such as a user's own kernel."""
    return _ROWS.get(name) or OpSpec(name)


def find_operand(operator: str, inputs: Sequence[Input], name: str) -> Input | None:
    """Return the one of a node's `inputs` that is the operand `name`; None where it is left out.

    Raises UnknownOperand.
    """
    number = op_spec(operator).number(name)
    return inputs[number] if number < len(inputs) else None


def arrange_operands(
    form: str, operands: Sequence[Sequence[Input]], result: Sequence[Input] = (), bias: Input | None = None
) -> list[Input | None]:
    """Return the inputs of `form`, an operator on quantised operands, in the order that it declares.

    operands: for each data operand its integers, scale and zero point. result: scale and zero point of the result.
    Inputs that are left out are None; those at the end are not listed.
    """
    spec = op_spec(form)
    parts = {Role.DATA: 0, Role.WEIGHTS: 0, Role.SCALE: 1, Role.ZERO_POINT: 2}
    count = len(spec.operands) - spec.repeated
    once, group = spec.operands[:count], spec.operands[count:]
    names = [operand.name for operand in once if operand.role in (Role.DATA, Role.WEIGHTS)]
    inputs: list[Input | None] = []
    for operand in once:
        if operand.role is Role.BIAS:
            inputs.append(bias)
        elif operand.quantises and not operand.quantised_operand:
            inputs.append(result[parts[operand.role] - 1] if result else None)
        else:
            inputs.append(operands[names.index(operand.quantised_operand or operand.name)][parts[operand.role]])
    if spec.repeated:
        inputs += [quantised[parts[operand.role]] for quantised in operands for operand in group]
    while inputs and inputs[-1] is None:
        inputs.pop()
    return inputs


def operators_with(fact: str, *among: Any) -> frozenset[str]:
    """Return the operators whose row has one of the values `among` in the field `fact`; without `among`, any value."""
    values = ((name, getattr(row, fact)) for name, row in _ROWS.items())
    empty = getattr(_NOTHING, fact)
    return frozenset(name for name, value in values if (value in among if among else value != empty))


def all_operators() -> frozenset[str]:
    """Return the names of all operators that have a row."""
    return frozenset(_ROWS)


def quantised_forms(*names: str) -> list[str]:
    """Return the operators that compute one of the float operators `names` in quantised operands and results."""
    return [form for form, row in _ROWS.items() if row.variant_of in names and row.scale_input is not None]


def quantised_form(name: str) -> str:
    """Return the operator that computes the float operator `name` in quantised operands and results.

    Raises LookupError where there is none.
    """
    if not (forms := quantised_forms(name)):
        raise LookupError(f"{name} has no quantised form")
    return forms[0]
