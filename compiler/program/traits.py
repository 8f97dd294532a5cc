"""Traits of operators: one row for each with everything but its computation, filled where the operator is defined.

`@op` of cpu/ops and `@host` of program/host/hostops fill it. Other tables of operators are derived from these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
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
    """The elements that an operator without arithmetic copies to its result."""

    ALL = "every element of its operand, once"
    SOME = "elements of its operand, by their places"
    FILL = "elements of its operand or a constant, in some of its modes"
    JOIN = "elements of several operands, or by the lengths of samples"


@dataclass(frozen=True)
class Traits:
    """The row of an operator.

    view: it changes only the shape, so its output may share the memory of its input. shape_inputs: inputs whose
    values determine a kernel's code; where they are not constant, the kernel is compiled at run time. wide: float16
    is computed in float32 and rounded once. heavy: it is never left to the host runtime because of a dynamic shape.

    weights: index of the weights. factors: indices of the inputs of bytes whose products it adds up. scale: index of
    the result's scale; its zero point follows. windows: it has the attributes of sliding windows.

    like: for an operator of onnxruntime, the ONNX operator with the same shape inference, and the inputs of that one.
    takes: for an operator of onnxruntime, a letter for the type of each input: f float32, i int32, T, U, V an 8-bit
    type, Q a quantised one (equal letters are equal types), . any; the last group may repeat (*).

    first: it runs in numpy even though a kernel exists. random: its result differs each time.
    """

    kind: Kind = Kind.OPAQUE
    moves: Moves | None = None
    view: bool = False
    shape_inputs: tuple[int, ...] = ()
    wide: bool = False
    heavy: bool = False
    weights: int | None = None
    factors: tuple[int, ...] = ()
    scale: int | None = None
    windows: bool = False
    like: tuple[str, slice | tuple[int, ...]] | None = None
    takes: str = ""
    first: bool = False
    random: bool = False


F = TypeVar("F")


def filling(table: dict[str, F]) -> Callable[..., Callable[[F], F]]:
    """Return a decorator that enters a function in `table` under the names of the operators it is for."""

    def for_operators(*names: str) -> Callable[[F], F]:
        def register(function: F) -> F:
            table.update(dict.fromkeys(names, function))
            return function

        return register

    return for_operators


_ROWS: dict[str, Traits] = {}
_NOTHING = Traits()


def state(name: str, **facts: Any) -> None:
    """Fill in fields of an operator's row. Raises TypeError where one is filled already."""
    row = traits(name)
    if repeated := [field_name for field_name in facts if getattr(row, field_name) != getattr(_NOTHING, field_name)]:
        raise TypeError(f"{name}: {', '.join(repeated)} stated twice")
    _ROWS[name] = replace(row, **facts)


def traits(name: str) -> Traits:
    """Return the row of an operator; the default row where nothing is known of it."""
    return _ROWS.get(name, _NOTHING)


def operators_with(trait: str, *among: Any) -> frozenset[str]:
    """Return the operators whose `trait` is one of `among`, or, without `among`, is filled at all."""
    values_of = ((name, getattr(row, trait)) for name, row in _ROWS.items())
    empty = getattr(_NOTHING, trait)
    return frozenset(name for name, value in values_of if (value in among if among else value != empty))


def all_operators() -> frozenset[str]:
    """Return the names of all operators."""
    return frozenset(_ROWS)
