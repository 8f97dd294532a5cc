"""Expressions for proofs: one element of a tensor, in terms of elements of the tensors that it is computed from.

TermOperator.element returns these expressions, and prover.py compares them. Indices and conditions are terms of z3,
which is imported where a proof first needs it. Numbers are integers modulo 2^32, as in accumulators, or real numbers.
Functions that round are uninterpreted: equal arguments give equal results, and some functions are monotone; the proof
may use nothing else about them.

The parts: expressions; indices and conditions; polynomials, which are sums of monomials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
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


def substitute(element: Element, pairs: Sequence[tuple[Any, Any]]) -> Element:
    """Replace variables of z3 by terms in `element`; pairs: (variable, term)."""
    import z3

    def in_term(term: Any) -> Any:
        return z3.substitute(term, *pairs) if isinstance(term, z3.ExprRef) else term

    match element:
        case Read(name, index):
            return Read(name, tuple(map(in_term, index)))
        case Plus(parts):
            return Plus(tuple(substitute(part, pairs) for part in parts))
        case Times(parts):
            return Times(tuple(substitute(part, pairs) for part in parts))
        case Uninterpreted(name, parts):
            return Uninterpreted(name, tuple(substitute(part, pairs) for part in parts))
        case Ite(condition, yes, no):
            return Ite(in_term(condition), substitute(yes, pairs), substitute(no, pairs))
        case SumOver(variables, guard, body):
            return SumOver(variables, in_term(guard), substitute(body, pairs))
        case MaxOver(variables, guard, body):
            return MaxOver(variables, in_term(guard), substitute(body, pairs))
    return element


# Indices and conditions ----------------------------------------------------------------------------------------------

_FRESH = count()
"""Numbers the variables that `fresh` returns."""


class Unprovable(Exception):
    """Raised for a term whose elements the prover does not know. The message is one sentence."""


def fresh(name: str) -> Any:
    """Return a new integer variable of z3, such as the counter of a sum."""
    import z3

    return z3.Int(f"{name}!{next(_FRESH)}")


def all_of(*conditions: Any) -> Any:
    """Return the condition that all `conditions` hold."""
    import z3

    return z3.And(*conditions)


def all_within(*bounds: tuple[Any, Any]) -> Any:
    """Return the condition that 0 <= index < size for all pairs (index, size)."""
    return all_of(*(all_of(position >= 0, position < size) for position, size in bounds))


def choose_case(cases: Sequence[tuple[Any, Element]], otherwise: Element) -> Element:
    """Return the element of the first of `cases`, (condition, element), whose condition holds."""
    for condition, element in reversed(cases):
        otherwise = Ite(condition, element, otherwise)
    return otherwise


# Polynomials ---------------------------------------------------------------------------------------------------------

Monomial = tuple[int, tuple[Element, ...]]
"""A factor and the elements that it is multiplied by; these are no sums and no products."""


def monomials(element: Element) -> list[Monomial]:
    """Expand `element`, which must have no conditions, to a sum of monomials."""
    match element:
        case Number(value):
            return [(value, ())]
        case Plus(parts):
            return [monomial for part in parts for monomial in monomials(part)]
        case Times(parts):
            expanded: list[Monomial] = [(1, ())]
            for part in parts:
                expanded = [(k * j, (*a, *b)) for k, a in expanded for j, b in monomials(part)]
            return expanded
    return [(1, (element,))]


def product(*factors: Element) -> Element:
    """Return a product expanded to a sum of monomials, each with at most one sum over counters."""
    return Plus(tuple(_monomial_element(k, atoms) for k, atoms in monomials(Times(factors)) if k))


def sum_over(variables: Index, guard: Any, *factors: Element) -> Element:
    """Return the sum of the product of `factors` over `variables`, expanded to one sum for each monomial."""
    return Plus(tuple(_sum_of_monomial(variables, guard, k, atoms) for k, atoms in monomials(Times(factors)) if k))


def _monomial_element(k: int, atoms: Sequence[Element]) -> Element:
    """Return k times `atoms`; where some atoms are sums, as one sum over the counters of all."""
    import z3

    if any(isinstance(atom, SumOver) for atom in atoms):
        return _sum_of_monomial((), z3.BoolVal(True), k, atoms)
    return Times((Number(k), *atoms))


def _sum_of_monomial(variables: Index, guard: Any, k: int, atoms: Sequence[Element]) -> Element:
    """Return the sum of k times `atoms` over `variables`. Atoms that are sums add their counters and guards; atoms that
    are 0 outside of a condition add the condition to the guard.
    """
    factors: list[Element] = [Number(k)]
    for atom in atoms:
        match atom:
            case SumOver(more_variables, condition, body):
                variables, guard = (*variables, *more_variables), all_of(guard, condition)
                factors.append(body)
            case Ite(condition, yes, Number(0)):
                guard = all_of(guard, condition)
                factors.append(yes)
            case _:
                factors.append(atom)
    return _without_fixed_counters(SumOver(variables, guard, Times(tuple(factors))))


def _without_fixed_counters(total: SumOver) -> Element:
    """Drop the counters of a sum that its guard sets equal to a term without counters, and put that term in their
    place.
    """
    import z3

    variables, guard, body = total.variables, total.guard, total.body
    for condition in _conjuncts(guard):
        if z3.is_eq(condition):
            counter, value = condition.children()
            if any(z3.eq(counter, other) for other in variables) and not _contains_any(value, total.variables):
                variables = tuple(other for other in variables if not z3.eq(other, counter))
                guard, body = z3.substitute(guard, (counter, value)), substitute(body, [(counter, value)])
    return SumOver(variables, guard, body) if variables else Ite(guard, body, Number(0))


def _conjuncts(guard: Any) -> list[Any]:
    """Split a conjunction of z3 into its conditions."""
    import z3

    return [condition for part in guard.children() for condition in _conjuncts(part)] if z3.is_and(guard) else [guard]


def _contains_any(term: Any, variables: Index) -> bool:
    """Return whether one of `variables` occurs in the z3 term `term`."""
    return any(term.eq(variable) for variable in variables) or any(
        _contains_any(part, variables) for part in term.children()
    )
