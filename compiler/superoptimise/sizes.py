"""Symbolic sizes of rules: open whole numbers, and sums, products and comparisons of them.

A rule is written for tensors of any size. While it is matched with a graph, the names of its sizes stand for ints;
while it is proved, they stand for integer terms of z3.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Values = Mapping[str, Any]
"""The value of each named size: an int, or an integer term of z3."""


def quotient(a: Any, b: Any) -> Any:
    """Divide `a` by `b` > 0 and round down. For ints this is Python's `//`, for terms of z3 it is their `/`."""
    return a // b if isinstance(a, int) and isinstance(b, int) else a / b


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": quotient, "==": operator.eq,
    "!=": operator.ne, "<=": operator.le, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class SizeArithmetic:
    """Base class of sizes: `+`, `-`, `*`, `//`, `<=` and `<` build a SizeOf instead of computing a number.

    `==` compares the expressions themselves; a condition that two sizes are equal is `SizeOf("==", a, b)`."""

    def __add__(self, other: Dim) -> SizeOf:
        return SizeOf("+", self, other)

    def __radd__(self, other: Dim) -> SizeOf:
        return SizeOf("+", other, self)

    def __sub__(self, other: Dim) -> SizeOf:
        return SizeOf("-", self, other)

    def __mul__(self, other: Dim) -> SizeOf:
        return SizeOf("*", self, other)

    def __rmul__(self, other: Dim) -> SizeOf:
        return SizeOf("*", other, self)

    def __floordiv__(self, other: Dim) -> SizeOf:
        return SizeOf("//", self, other)

    def __le__(self, other: Dim) -> SizeOf:
        return SizeOf("<=", self, other)

    def __lt__(self, other: Dim) -> SizeOf:
        return SizeOf("<", self, other)


@dataclass(frozen=True)
class OpenSize(SizeArithmetic):
    """A size that a match binds to an int. least: its least value, which is 1 for dimensions and 0 for padding."""

    name: str
    least: int = 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class OneOf(SizeArithmetic):
    """A choice that a match binds to one of the values `among`, such as strides; the prover tries each of them."""

    name: str
    among: tuple[Any, ...]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SizeOf(SizeArithmetic):
    """An expression: `operation` (a key of _OPERATIONS) of two sizes; with a comparison it is a condition."""

    operation: str
    left: Dim
    right: Dim

    def __str__(self) -> str:
        return f"({self.left} {self.operation} {self.right})"


Dim: TypeAlias = int | SizeArithmetic
"""A size in a rule: an int, an open size, or an expression of sizes."""


def value_of(dim: Any, values: Values) -> Any:
    """Evaluate the size `dim` with the values of its names. KeyError for a name without a value.

    Tuples are evaluated element by element; attributes that are no sizes, such as bools, are returned unchanged.

    >>> value_of(2 * OpenSize("o") + 1, {"o": 4})
    9
    """
    if isinstance(dim, (OpenSize, OneOf)):
        return values[dim.name]
    if isinstance(dim, SizeOf):
        return _OPERATIONS[dim.operation](value_of(dim.left, values), value_of(dim.right, values))
    if isinstance(dim, tuple):
        return tuple(value_of(element, values) for element in dim)
    return dim


def bind(dim: Any, value: Any, values: dict[str, Any]) -> bool:
    """Return whether `dim` can equal `value`, and add the values that its open names then have to `values`.

    Where the result is False, `values` may have gained some names all the same."""
    if isinstance(dim, tuple):
        return (
            isinstance(value, tuple) and len(dim) == len(value) and all(bind(d, v, values) for d, v in zip(dim, value))
        )
    if isinstance(dim, (OpenSize, OneOf)):
        if dim.name in values:
            return bool(values[dim.name] == value)
        if isinstance(dim, OneOf) and value not in dim.among:
            return False
        if isinstance(dim, OpenSize) and not (isinstance(value, int) and value >= dim.least):
            return False
        values[dim.name] = value
        return True
    try:
        return bool(value_of(dim, values) == value)
    except KeyError:  # an expression with a name that has no value yet
        return _solve_for_open_size(dim, value, values)


def _solve_for_open_size(dim: Any, value: Any, values: dict[str, Any]) -> bool:
    """Return whether the expression `dim` equals `value` for some value of its only open size, and bind it to that.

    The expression is taken to be linear: its values at 0 and 1 give the solution, which is then checked. False where
    several sizes are open."""
    open_sizes = _open_sizes_in(dim, values)
    if len(open_sizes) != 1 or not isinstance(value, int):
        return False
    (size,) = open_sizes
    if isinstance(size, OneOf):
        solutions = [choice for choice in size.among if value_of(dim, {**values, size.name: choice}) == value]
        return len(solutions) == 1 and bind(size, solutions[0], values)
    at_zero, at_one = (value_of(dim, {**values, size.name: number}) for number in (0, 1))
    if at_zero == at_one or (value - at_zero) % (at_one - at_zero):
        return False
    solution = (value - at_zero) // (at_one - at_zero)
    if value_of(dim, {**values, size.name: solution}) != value:
        return False
    return bind(size, solution, values)


def _open_sizes_in(dim: Any, values: Values) -> set[OpenSize | OneOf]:
    """Return the sizes in the expression `dim` that have no value yet."""
    if isinstance(dim, SizeOf):
        return _open_sizes_in(dim.left, values) | _open_sizes_in(dim.right, values)
    return {dim} if isinstance(dim, (OpenSize, OneOf)) and dim.name not in values else set()
