"""One element of a tensor, as an expression of elements of those that it is computed from.

Indices and conditions are terms of z3. Numbers are those of the integers modulo 2^32, which accumulators are; what
rounds is a function of which nothing is known but that equal arguments give equal results, and for some that it is
monotone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Index = tuple[Any, ...]
"""Indices along each axis: terms of z3, or ints."""


@dataclass(frozen=True, eq=False)
class Number:
    value: int


@dataclass(frozen=True, eq=False)
class Read:
    """An element of the tensor `name`."""

    name: str
    index: Index


@dataclass(frozen=True, eq=False)
class Plus:
    parts: tuple[Element, ...]


@dataclass(frozen=True, eq=False)
class Times:
    parts: tuple[Element, ...]


@dataclass(frozen=True, eq=False)
class Ite:
    """`yes` where `condition` holds, else `no`."""

    condition: Any
    yes: Element
    no: Element


@dataclass(frozen=True, eq=False)
class SumOver:
    """The sum of `body` over all whole `variables` for which `guard` holds."""

    variables: Index
    guard: Any
    body: Element


@dataclass(frozen=True, eq=False)
class MaxOver:
    """The largest `body` over all whole `variables` for which `guard` holds; there is one."""

    variables: Index
    guard: Any
    body: Element


@dataclass(frozen=True, eq=False)
class Uninterpreted:
    """The function `name` of `parts`."""

    name: str
    parts: tuple[Element, ...]


Element: TypeAlias = Number | Read | Plus | Times | Ite | SumOver | MaxOver | Uninterpreted
ElementAt = Callable[[Index], Element]
"""A tensor: its element at each place."""


def minus(a: Element, b: Element) -> Plus:
    """a - b."""
    return Plus((a, Times((Number(-1), b))))
