"""Traits of each operator beside its computation: one row each, filled where the operator is defined.

`@op` of ops and `@host` of program/host/hostops fill it. Other tables of operators are derived from these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar


class Kind(Enum):
    """Kind of an operator for fusion: the four classes of TVM (Chen et al., OSDI 2018, section 3)."""

    INJECTIVE = "injective"
    """Computes each element from single elements, and so can be inlined into what reads it."""
    REDUCTION = "reduction"
    """Reads each element once, or few times: what makes its input can be inlined."""
    COMPLEX = "complex-out-fusable"
    """Reads elements many times, or by selections: what reads its output can join it."""
    OPAQUE = "opaque"
    """A kernel of its own."""


class Moves(Enum):
    """What an operator that computes nothing makes its result of."""

    ALL = "every element of its operand, once"
    SOME = "elements of its operand, by their places"
    FILL = "elements of its operand or a constant, in some of its modes"
    JOIN = "elements of several operands, or by the lengths of samples"


@dataclass(frozen=True)
class Traits:
    """The row of an operator.

    view: it changes the shape alone, so its output may share the memory of its input. shape_inputs: whose values a
    kernel's code depends on; where they are not constants, the kernel is made at run time. wide: it takes several steps
    for a result; those of float16 are in float32, and the result is rounded once. heavy: it is never left to the host
    runtime for the sake of an open size. weights: the input that holds them. factors: the inputs,
    of bytes, whose products it adds up. scale: the input that is the scale of its
    result, whose zero point is the next one. windows: its attributes are those of windows. like: for one of
    onnxruntime's, of whose shapes ONNX knows nothing, ONNX's of the same shape and type, and which inputs that has.
    takes: for one of onnxruntime's, the element types of its inputs, a letter each: f float32, i int32, T, U and V one
    of eight bits, Q a quantised one, the same wherever the letter is the same, . any; the last group may repeat (*).
    first: it runs in numpy even though there is a kernel. random: it returns something else each time.
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
    """A decorator that puts a function into `table` under the names of the operators that it is for."""

    def of(*names: str) -> Callable[[F], F]:
        def add(function: F) -> F:
            table.update(dict.fromkeys(names, function))
            return function

        return add

    return of


_ROWS: dict[str, Traits] = {}
_NOTHING = Traits()


def state(name: str, **facts: Any) -> None:
    """Fill in fields of an operator's row. TypeError where one is filled already."""
    row = traits(name)
    if again := [each for each in facts if getattr(row, each) != getattr(_NOTHING, each)]:
        raise TypeError(f"{name}: {', '.join(again)} stated twice")
    _ROWS[name] = replace(row, **facts)


def traits(name: str) -> Traits:
    """The row of an operator; an operator of a kernel of its own, of which nothing else is known, has none."""
    return _ROWS.get(name, _NOTHING)


def named(fact: str, *among: Any) -> frozenset[str]:
    """The operators of whose rows a field is one of `among`, or is filled at all."""
    found = ((name, getattr(row, fact)) for name, row in _ROWS.items())
    empty = getattr(_NOTHING, fact)
    return frozenset(name for name, value in found if (value in among if among else value != empty))


def rows() -> frozenset[str]:
    """All operators."""
    return frozenset(_ROWS)
