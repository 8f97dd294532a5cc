"""Rules that nobody wrote: equations between enumerated terms, pruned, generalised and proved.

    vocabulary -> terms -> equations -> candidates -> rules

A candidate is a direction of an equation that a graph can match, is no renaming of an earlier one, and is not subsumed:
rules so far do not make the same in two steps. A rule is a candidate that the prover accepts for all sizes, as it
accepts one written by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import onnx
import z3

from celosia.compiler.superoptimise.generation.enumeration import Enumeration
from celosia.compiler.superoptimise.generation.subsumption import is_subsumed
from celosia.compiler.superoptimise.generation.vocabularies import AlgebraVocabulary
from celosia.compiler.superoptimise.neighbourhood import Neighbourhoods
from celosia.compiler.superoptimise.optimise import graph_of, price_function
from celosia.compiler.superoptimise.price import Pricing
from celosia.compiler.superoptimise.prover import Prover, demanded, verdict
from celosia.compiler.superoptimise.rule import Monotone, RewriteRule
from celosia.compiler.superoptimise.search import Searching
from celosia.compiler.superoptimise.sizes import OneOf, OpenSize, SizeOf
from celosia.compiler.superoptimise.state import Found
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term, functions_of, is_constant, walk

MAX_MORE = 1
"""Operators that `after` may have more than `before`."""
MIN_GAIN = 0.001
"""Share of a network's cycles that a rule must save to win."""
Counts = Counter[str]
Side = tuple[Term, ...]


@dataclass
class Generator:
    """known: rules that need not be found. rules: those that were, beside them."""

    known: Sequence[RewriteRule]
    rules: list[RewriteRule] = field(default_factory=list)
    _texts: set[str] = field(default_factory=set)

    def run(self, vocabulary: AlgebraVocabulary) -> Counts:
        """Add the rules of `vocabulary` to `rules`. Returns how many terms were looked at, equations by fingerprint,
        candidates, those that are subsumed and those that the prover refused, and rules."""
        enumeration, counts = Enumeration(vocabulary), Counts()
        slices: dict[Term, list[tuple[Term, Term]]] = {}
        for term, earlier in enumeration.equations():
            counts["equations"] += 1
            if term.op == "slice":
                slices.setdefault(term.args[0], []).append((term, earlier))
            self._add((term,), (earlier,), vocabulary, counts)
            self._add((earlier,), (term,), vocabulary, counts)
        for both, slices_of_one in _pairs(slices):
            self._add(both, slices_of_one, vocabulary, counts)
        counts["terms"] = enumeration.terms
        return counts

    def _add(self, before: Side, after: Side, vocabulary: AlgebraVocabulary, counts: Counts) -> None:
        rule = _rule(before, after, vocabulary)
        if not is_usable(rule) or (text := renamed(rule)) in self._texts:
            return
        self._texts.add(text)
        counts["candidates"] += 1
        if is_subsumed(rule, (*self.known, *self.rules)):
            counts["subsumed"] += 1
        elif not _is_proved_once(rule) or not verdict(general := generalised(rule)).proved:
            counts["refused"] += 1
        else:
            counts["rules"] += 1
            self.rules.append(replace(general, name=f"{vocabulary.name}, {counts['rules']}", says=sentence(general)))


def _rule(before: Side, after: Side, vocabulary: AlgebraVocabulary) -> RewriteRule:
    """The sides as a rule that asks of functions what the vocabulary's fingerprints have."""
    functions = dict.fromkeys(functions_of((*before, *after)))
    where = [Monotone(each) for each in functions if each.name.startswith("m")]
    rule = RewriteRule("", "", before, after, tuple(where))
    return replace(rule, shifts=tuple(each for each in vocabulary.shifts if each in rule.sizes))


def _pairs(slices: dict[Term, list[tuple[Term, Term]]]) -> Iterator[tuple[tuple[Term, Term], tuple[Term, Term]]]:
    """(two terms of one input, the two slices of one term that they are): what merges them."""
    for whole, equations in slices.items():
        for (cut, one), (other_cut, other) in combinations(equations, 2):
            alike = isinstance(one, Composed) and isinstance(other, Composed) and one.op == other.op
            share_inputs = any(not leaf.constant for leaf in _leaves([one]) & _leaves([other]))
            if alike and share_inputs and cut != other_cut and one != other and whole not in (one, other):
                yield (one, other), (cut, other_cut)


def _leaves(terms: Iterable[Term]) -> set[Leaf]:
    return {leaf for term in terms for leaf in walk(term) if isinstance(leaf, Leaf)}


def operators(terms: Sequence[Term]) -> list[str]:
    """The operators that run, once for equal terms, those of constants left out; a product includes its rounding."""
    running = dict.fromkeys(each for term in terms for each in walk(term) if not is_constant(each))
    return [each.op for each in running if isinstance(each, Composed) and each.op != "requantise"]


def sentence(rule: RewriteRule) -> str:
    """Say the law by the operators of both sides."""
    return " is the same as ".join(" of ".join(operators(side)) or "the tensor" for side in (rule.before, rule.after))


# Pruning -------------------------------------------------------------------------------------------------------------


def is_usable(rule: RewriteRule) -> bool:
    """Whether a graph can have what stands before, that binds all that stands after, and little is added."""
    if not all(isinstance(term, Composed) for term in rule.before) or rule.before == rule.after:
        return False
    computed = [each for term in rule.before for each in walk(term) if isinstance(each, Composed) and is_constant(each)]
    if any(each.op != "spread" for each in computed):
        return False  # a model has the result
    if len(operators(rule.after)) > len(operators(rule.before)) + MAX_MORE:
        return False
    before = RewriteRule("", "", rule.before, ())
    is_bound = {*rule.sizes} <= {*before.sizes} and {*rule.choices} <= {*before.choices}
    return is_bound and _leaves(rule.after) <= _leaves(rule.before)


def renamed(rule: RewriteRule) -> str:
    """The text of `rule` with numbers for names, in their order: the same for rules that differ in names alone."""
    sides = (*rule.before, *rule.after)
    named: list[Any] = [*functions_of(sides), *rule.leaves, *rule.sizes, *rule.choices]
    names = {each.name for each in named}
    numbers: dict[str, str] = {}

    def number(word: re.Match[str]) -> str:
        return numbers.setdefault(word[0], f"#{len(numbers)}") if word[0] in names else word[0]

    return re.sub(r"\b\w+\b", number, " -> ".join(map(str, sides)))


# Generalising --------------------------------------------------------------------------------------------------------


def generalised(rule: RewriteRule) -> RewriteRule:
    """`rule` with sizes of its own for each tensor, as far as the operators of `before` leave them open and the prover
    agrees; sizes that attributes name stay."""
    attributes = [replace(leaf, shape=()) for leaf in rule.leaves]
    named = {each.name for each in _with_leaves(rule, {leaf.name: leaf for leaf in attributes}).sizes}
    fresh = {leaf.name: replace(leaf, shape=tuple(
        OpenSize(f"{size.name}_{leaf.name}{axis}") if isinstance(size, OpenSize) and size.name not in named else size
        for axis, size in enumerate(leaf.shape))) for leaf in rule.leaves if leaf != rule.leaves[0]}  # fmt: skip
    wider = _unified(_with_leaves(rule, fresh))
    return wider if is_usable(wider) and _is_proved_once(wider) else rule


def _is_proved_once(rule: RewriteRule) -> bool:
    """Whether `rule` is proved for the first value of each of its choices."""
    return verdict(_with_sizes(rule, {each.name: replace(each, among=each.among[:1]) for each in rule.choices})).proved


def _with_leaves(rule: RewriteRule, leaves: dict[str, Leaf]) -> RewriteRule:
    def put(term: Term) -> Term:
        if isinstance(term, Leaf):
            return leaves.get(term.name, term)
        return replace(term, args=tuple(map(put, term.args)))

    return replace(rule, before=tuple(map(put, rule.before)), after=tuple(map(put, rule.after)))


def _with_sizes(rule: RewriteRule, sizes: dict[str, Any]) -> RewriteRule:
    def put(value: Any) -> Any:
        match value:
            case tuple():
                return tuple(map(put, value))
            case SizeOf():
                return SizeOf(value.operation, put(value.left), put(value.right))
            case OpenSize() | OneOf():
                return sizes.get(value.name, value)
            case Leaf():
                return replace(value, shape=put(value.shape))
            case Composed():
                return Composed(value.op, put(value.args), put(value.attributes))
        return value

    return replace(rule, before=put(rule.before), after=put(rule.after), shifts=put(rule.shifts))


def _unified(rule: RewriteRule) -> RewriteRule:
    """`rule` with one name for sizes that the operators of `before` ask to be equal."""
    values: dict[str, Any] = {each.name: each.among[0] for each in rule.choices}
    values |= {each.name: z3.Int(each.name) for each in rule.sizes}
    facts = [values[each.name] >= each.least for each in rule.sizes]
    facts += [each for term in rule.before for each in demanded(term, values) if not isinstance(each, bool)]
    prover, kept, same = Prover(), list[OpenSize](), dict[str, OpenSize]()
    for size in rule.sizes:
        equal = (each for each in kept if each.least == size.least
                 and prover.holds(tuple(facts), values[each.name] == values[size.name]))  # fmt: skip
        if (first := next(equal, None)) is not None:
            same[size.name] = first
        else:
            kept.append(size)
    return _with_sizes(rule, same)


# Selection -----------------------------------------------------------------------------------------------------------


def winning_rules(
    known: Sequence[RewriteRule], generated: Sequence[RewriteRule], model: onnx.ModelProto, pricing: Pricing,
    seconds: float, say: Callable[[str], None],
) -> tuple[float, list[RewriteRule]]:  # fmt: skip
    """(cycles by `known` alone over cycles with those of `generated` that are needed, these rules): 1 and none where
    they save nothing. seconds: of each search, one for each rule that is taken and three more."""

    def best(rules: Sequence[RewriteRule]) -> Found:
        graph = graph_of(model)
        gain = Neighbourhoods(model, pricing).gain
        searching = Searching((*known, *rules), price_function(model, graph, pricing), gain, seconds)
        searching.run(graph)
        return searching.found[-1]

    alone, together = best(()), best(generated)
    say(f"{alone.price} by the rules by hand, {together.price} with {len(generated)} generated ones")
    limit = alone.price.total * (1 - MIN_GAIN)
    if together.price.total > limit:
        return 1.0, []
    needed = [rule for rule in generated if any(step.rule == rule.name for step in together.steps)]
    least = best(needed)
    for rule in needed[::-1]:
        others = [each for each in needed if each is not rule]
        without = best(others)
        say(f"{least.price} with {len(needed)} of them, {without.price} without {rule.name!r}: {rule.says}")
        if without.price.total <= min(limit, least.price.total * (1 + MIN_GAIN)):
            needed, least = others, without
    return (alone.price.total / least.price.total if needed else 1.0), needed
