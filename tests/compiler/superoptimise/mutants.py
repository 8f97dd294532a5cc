"""Derive small changes of a rewrite rule mechanically; most of the changed rules are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from celosia.compiler.superoptimise.rule import Composed, Leaf, OpenSize, RewriteRule, SizeOf, Term

Rebuild = Callable[[Term], Term]


def mutants(rule: RewriteRule) -> Iterator[RewriteRule]:
    """Yield rules with one change in their right side, with one condition less, or with results exchanged."""
    for place, term in enumerate(rule.after):
        for number, changed in enumerate(_changed(term, lambda new: new)):
            after = (*rule.after[:place], changed, *rule.after[place + 1 :])
            yield replace(rule, name=f"{rule.name}, mutant {place}.{number}", after=after)
    for place in range(len(rule.where)):
        yield replace(rule, name=f"{rule.name} without condition {place}", where=_without(rule.where, place))
    if len(rule.after) > 1:
        yield replace(rule, name=f"{rule.name}, results exchanged", after=rule.after[::-1])


def _without(values: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return (*values[:place], *values[place + 1 :])


def _changed(term: Term, rebuild: Rebuild) -> Iterator[Term]:
    """Yield `rebuild` of each change of `term` or of a term inside it."""
    if not isinstance(term, Composed):
        return
    for place, arg in enumerate(term.args):
        yield from _changed(arg, lambda new, p=place: rebuild(_with_arg(term, p, new)))
    for a in range(len(term.args) - 1):
        args = list(term.args)
        args[a], args[a + 1] = args[a + 1], args[a]
        if args[a] != args[a + 1]:
            yield rebuild(replace(term, args=tuple(args)))
            args[a + 1] = args[a]
            yield rebuild(replace(term, args=tuple(args)))
    for place, (name, value) in enumerate(term.attributes):
        for other in _values(name, value):
            attributes = list(term.attributes)
            attributes[place] = (name, other)
            yield rebuild(replace(term, attributes=tuple(attributes)))
    if term.op in ("map", "slice", "transpose", "pad", "largest") and isinstance(term.args[0], (Leaf, Composed)):
        yield rebuild(term.args[0])


def _with_arg(term: Composed, place: int, new: Term) -> Composed:
    return replace(term, args=(*term.args[:place], new, *term.args[place + 1 :]))


def _values(name: str, value: Any) -> Iterator[Any]:
    """Yield other values of an attribute."""
    if isinstance(value, tuple):
        for place in range(len(value) - 1):
            if value[place] != value[place + 1]:
                yield (*value[:place], value[place + 1], value[place], *value[place + 2 :])
        for place, element in enumerate(value):
            for other in _values(name, element):
                yield (*value[:place], other, *value[place + 1 :])
    elif isinstance(value, (OpenSize, SizeOf)):
        yield value + 1
        if isinstance(value, SizeOf) and value.operation in "+-":
            yield value.left
            yield SizeOf("-" if value.operation == "+" else "+", value.left, value.right)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value + 1
        if value > 0:
            yield value - 1
