"""Expressions for proofs: one element of a tensor, in terms of elements of the tensors that it is computed from.

meaning.py writes these expressions, and prover.py compares them. Indices and conditions are terms of z3. Numbers are
integers modulo 2^32, as in accumulators. Functions that round are uninterpreted: equal arguments give equal results,
and some functions are monotone; the proof may use nothing else about them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Index = tuple[Any, ...]
"""The index along each axis of a tensor: terms of z3, or ints."""


@dataclass(frozen=True, eq=False)
class Number:
    """A known whole number."""

    value: int


@dataclass(frozen=True, eq=False)
class Read:
    """The element at `index` of the rule's tensor `name`."""

    name: str
    index: Index


@dataclass(frozen=True, eq=False)
class Plus:
    """The sum of `parts`."""

    parts: tuple[Element, ...]


@dataclass(frozen=True, eq=False)
class Times:
    """The product of `parts`."""

    parts: tuple[Element, ...]


@dataclass(frozen=True, eq=False)
class Ite:
    """If-then-else: `yes` where `condition` holds, else `no`."""

    condition: Any
    yes: Element
    no: Element


@dataclass(frozen=True, eq=False)
class SumOver:
    """The sum of `body` over all integer values of `variables`, the counters, for which `guard` holds."""

    variables: Index
    guard: Any
    body: Element


@dataclass(frozen=True, eq=False)
class MaxOver:
    """The maximum of `body` over all integer values of `variables` for which `guard` holds; at least one does."""

    variables: Index
    guard: Any
    body: Element


@dataclass(frozen=True, eq=False)
class Uninterpreted:
    """The uninterpreted function `name` applied to `parts`."""

    name: str
    parts: tuple[Element, ...]


Element: TypeAlias = Number | Read | Plus | Times | Ite | SumOver | MaxOver | Uninterpreted
ElementAt = Callable[[Index], Element]
"""A tensor in a proof: the function that returns its element at an index."""


def minus(a: Element, b: Element) -> Plus:
    """Return the expression a - b."""
    return Plus((a, Times((Number(-1), b))))
