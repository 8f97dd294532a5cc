"""The most general rule that an equation is a case of: inner terms become tensors that are given, tensors that stand
twice become two, places of Slices become any, as long as it can still be proved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, product
from typing import Any

import z3

from celosia.compiler.superoptimise.generation.changing import (
    replaced,
    rule_with,
    shape_of,
    with_leaves_in_turn,
    with_sizes,
)
from celosia.compiler.superoptimise.generation.instances import is_constant
from celosia.compiler.superoptimise.prover import demanded, limited_solver, verdict
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.sizes import OneOf, OpenSize, SizeOf, value_of
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term, walk

MOST_WAYS = 32
"""Ways to tell tensors apart that are tried."""


def proved_once(rule: RewriteRule) -> bool:
    """Whether `rule` is proved for the first of each of its choices."""
    first = {each.name: replace(each, among=each.among[:1]) for each in rule.choices}
    return verdict(rule_with(rule, first)).proved


def widened_rule(rule: RewriteRule) -> RewriteRule:
    """`rule`, or a more general one."""
    while True:
        wider = next((each for each in _wider(rule) if proved_once(each)), None)
        if wider is None:
            return rule
        rule = unified(wider)


def _wider(rule: RewriteRule) -> Iterator[RewriteRule]:
    yield from _given(rule)
    yield from _apart(rule)
    yield from _anywhere(rule)
    yield from _sized(rule)


def _sized(rule: RewriteRule) -> Iterator[RewriteRule]:
    """With sizes of its own for a tensor that has some of another's, where nothing asks that."""
    leaves = list(dict.fromkeys(each for each in rule.leaves if not each.constant))
    for leaf in leaves[1:]:
        fresh = replace(_fresh(rule, len(leaf.shape), leaf.name), name=leaf.name)
        made = unified(rule_with(rule, {}, {leaf.name: fresh}))
        if len(made.sizes) > len(rule.sizes):
            yield made


def _fresh(rule: RewriteRule, dimensions: int, of: str = "") -> Leaf:
    names = {each.name for each in rule.leaves}
    name = next(f"{of or 'x'}{number}" for number in count(1) if f"{of or 'x'}{number}" not in names)
    return Leaf(name, tuple(OpenSize(f"{name}_{axis}") for axis in range(dimensions)))


def _given(rule: RewriteRule) -> Iterator[RewriteRule]:
    """With a tensor for an inner term, wherever it stands; large ones first."""
    tops = (*rule.before, *rule.after)
    inner = dict.fromkeys(
        each for term in tops for each in walk(term)
        if isinstance(each, Composed) and not is_constant(each) and each not in rule.before and not _accumulates(each)
    )  # fmt: skip
    for term in sorted(inner, key=lambda each: -len(list(walk(each)))):
        fresh = _fresh(rule, len(shape_of(term)))
        sized = [size if isinstance(size, OpenSize) else new for size, new in zip(shape_of(term), fresh.shape)]
        for leaf in dict.fromkeys((fresh, replace(fresh, shape=tuple(sized)))):
            before, after = (tuple(replaced(top, term, leaf) for top in side) for side in (rule.before, rule.after))
            yield _with_bound(replace(rule, before=before, after=after))


def _accumulates(term: Composed) -> bool:
    """Whether it is what a product adds up, which is one operator with what requantises it."""
    return term.op in ("convolve", "multiply")


def _with_bound(rule: RewriteRule) -> RewriteRule:
    """`rule` without conditions on sizes that it no longer has."""
    names = {each.name for each in replace(rule, where=()).sizes}
    where = [
        each for each in rule.where
        if not isinstance(each, SizeOf) or {size.name for size in replace(rule, where=(each,)).sizes} <= names
    ]  # fmt: skip
    return replace(rule, where=tuple(where))


def _apart(rule: RewriteRule) -> Iterator[RewriteRule]:
    """With tensors of their own where one stands in several places before."""
    before = [each for term in rule.before for each in walk(term) if isinstance(each, Leaf) and not each.constant]
    for leaf in dict.fromkeys(before):
        places = before.count(leaf)
        behind = sum(each == leaf for term in rule.after for each in walk(term))
        if places < 2:
            continue
        other = _fresh(rule, len(leaf.shape))
        ways = product(product((leaf, other), repeat=places - 1), product((leaf, other), repeat=behind))
        for number, (left, right) in enumerate(ways):
            if number < MOST_WAYS and other in left:
                side = with_leaves_in_turn(rule.before, leaf.name, iter((leaf, *left)))
                yield replace(rule, before=side, after=with_leaves_in_turn(rule.after, leaf.name, iter(right)))


def _anywhere(rule: RewriteRule) -> Iterator[RewriteRule]:
    """With Slices from any place to any other, where those of both sides are alike."""
    tops = (*rule.before, *rule.after)
    cuts = dict.fromkeys(
        (each["start"], each["stop"]) for term in tops for each in walk(term)
        if isinstance(each, Composed) and each.op == "slice"
    )  # fmt: skip
    names = {each.name for each in rule.sizes}
    number = next(number for number in count() if f"from{number}" not in names)
    places = OpenSize(f"from{number}", 0), OpenSize(f"to{number}")
    for cut in cuts:
        if not all(isinstance(each, OpenSize) and each.name.startswith(("from", "to")) for each in cut):
            before, after = (tuple(_cut(term, cut, places) for term in side) for side in (rule.before, rule.after))
            moved = {cut[1].name: places[1]} if isinstance(cut[1], OpenSize) else {}
            where = tuple(with_sizes(each, moved) if isinstance(each, SizeOf) else each for each in rule.where)
            yield _with_bound(replace(rule, before=before, after=after, where=where))


def _cut(term: Term, cut: tuple[Any, Any], places: tuple[OpenSize, OpenSize]) -> Term:
    if isinstance(term, Leaf):
        return term
    args = tuple(_cut(arg, cut, places) for arg in term.args)
    given = dict(term.attributes)
    if term.op == "slice" and (given["start"], given["stop"]) == cut:
        given |= {"start": places[0], "stop": places[1]}
    return Composed(term.op, args, tuple(sorted(given.items())))


def unified(rule: RewriteRule) -> RewriteRule:
    """`rule` with one name for sizes that what stands before asks to be equal."""
    values: dict[str, Any] = {each.name: each.among[0] for each in rule.choices if isinstance(each, OneOf)}
    values |= {each.name: z3.Int(each.name) for each in rule.sizes}
    solver = limited_solver()
    solver.add(*(values[each.name] >= each.least for each in rule.sizes))
    solver.add(*(value_of(each, values) for each in rule.where if isinstance(each, SizeOf)))
    solver.add(*(each for term in rule.before for each in demanded(term, values) if not isinstance(each, bool)))
    kept: list[OpenSize] = []
    same: dict[str, OpenSize] = {}
    for size in rule.sizes:
        alike = (each for each in kept if each.least == size.least and _equal(solver, values, each, size))
        if (found := next(alike, None)) is not None:
            same[size.name] = found
        else:
            kept.append(size)
    return rule_with(rule, same) if same else rule


def _equal(solver: z3.Solver, values: dict[str, Any], a: OpenSize, b: OpenSize) -> bool:
    solver.push()
    solver.add(values[a.name] != values[b.name])
    found = bool(solver.check() == z3.unsat)
    solver.pop()
    return found
