"""Whole numbers that a rule leaves open, and sums, products and comparisons of them.

A size has a value where its names have one: ints while a rule is matched, terms of z3 while it is proved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Values = Mapping[str, Any]
"""Values by name: ints, or terms of z3."""


def quotient(a: Any, b: Any) -> Any:
    """a / b, rounded down; b is positive. Terms of z3 have it as /."""
    return a // b if isinstance(a, int) and isinstance(b, int) else a / b


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": quotient, "==": operator.eq,
    "!=": operator.ne, "<=": operator.le, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class SizeArithmetic:
    """Arithmetic and comparison of sizes, which give expressions."""

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
    """One that a match binds. least: that it has at least; dimensions have 1, padding has 0."""

    name: str
    least: int = 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class OneOf(SizeArithmetic):
    """One that a match binds to one of a few values, each of which is proved by itself."""

    name: str
    among: tuple[Any, ...]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SizeOf(SizeArithmetic):
    """`operation` of two sizes."""

    operation: str
    left: Dim
    right: Dim

    def __str__(self) -> str:
        return f"({self.left} {self.operation} {self.right})"


Dim: TypeAlias = int | SizeArithmetic
"""A number, or what stands for one."""


def value_of(dim: Any, values: Values) -> Any:
    """Evaluate `dim` under `values`; tuples element by element, and what is no size as it is. KeyError for an open one.

    >>> value_of(2 * OpenSize("o") + 1, {"o": 4})
    9
    """
    if isinstance(dim, (OpenSize, OneOf)):
        return values[dim.name]
    if isinstance(dim, SizeOf):
        return _OPERATIONS[dim.operation](value_of(dim.left, values), value_of(dim.right, values))
    if isinstance(dim, tuple):
        return tuple(value_of(each, values) for each in dim)
    return dim


def bind(dim: Any, value: Any, values: dict[str, Any]) -> bool:
    """Whether `dim` may be `value`; names that are still open are bound to what they must be then."""
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
    except KeyError:  # an expression of what is still open
        return _solved(dim, value, values)


def _solved(dim: Any, value: Any, values: dict[str, Any]) -> bool:
    """Whether `dim`, of one open size, is `value` for some size, which it is bound to then."""
    names = _open_in(dim, values)
    if len(names) != 1 or not isinstance(value, int):
        return False
    (size,) = names
    if isinstance(size, OneOf):
        right = [each for each in size.among if value_of(dim, {**values, size.name: each}) == value]
        return len(right) == 1 and bind(size, right[0], values)
    at_zero, at_one = (value_of(dim, {**values, size.name: each}) for each in (0, 1))
    if at_zero == at_one or (value - at_zero) % (at_one - at_zero):
        return False
    found = (value - at_zero) // (at_one - at_zero)
    if value_of(dim, {**values, size.name: found}) != value:
        return False
    return bind(size, found, values)


def _open_in(dim: Any, values: Values) -> set[OpenSize | OneOf]:
    """The sizes without a value in it."""
    if isinstance(dim, SizeOf):
        return _open_in(dim.left, values) | _open_in(dim.right, values)
    return {dim} if isinstance(dim, (OpenSize, OneOf)) and dim.name not in values else set()
