"""Generate rules: equations between enumerated terms become candidates, which are pruned, generalised and proved.

    vocabulary -> terms -> equations -> candidates -> rules

A candidate is a direction of an equation that a graph can match, that differs from earlier candidates by more than
names, and that is not subsumed: no two rules so far have the same effect. A rule is a candidate that the prover accepts
for all sizes, by the same prover as rules written by hand.
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
from celosia.compiler.superoptimise.prover import Prover, demands_of, verdict
from celosia.compiler.superoptimise.rule import Monotone, RewriteRule
from celosia.compiler.superoptimise.search import RuleSearch
from celosia.compiler.superoptimise.sizes import OneOf, OpenSize, SizeOf
from celosia.compiler.superoptimise.state import DerivedGraph
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term, functions_of, is_constant, walk

MAX_MORE = 1
"""Number of operators that `after` may have more than `before`."""
MIN_GAIN = 0.001
"""Share of a network's cycles that a rule must save to win."""
Counts = Counter[str]
"""Counts of terms, equations, candidates and rules by name."""
Side = tuple[Term, ...]
"""The terms of one side of a rule."""


@dataclass
class Generator:
    """Generates rules. known: rules that need not be generated. rules: those generated so far."""

    known: Sequence[RewriteRule]
    rules: list[RewriteRule] = field(default_factory=list)
    _texts: set[str] = field(default_factory=set)

    def run(self, vocabulary: AlgebraVocabulary) -> Counts:
        """Add the rules of `vocabulary` to `rules`. Returns how many terms were looked at, how many equations,
        candidates, subsumed and refused candidates, and rules there were.
        """
        enumeration, counts = Enumeration(vocabulary), Counts()
        slices: dict[Term, list[tuple[Term, Term]]] = {}
        for term, earlier in enumeration.equations():
            counts["equations"] += 1
            if term.op == "slice":
                slices.setdefault(term.args[0], []).append((term, earlier))
            self._add((term,), (earlier,), vocabulary, counts)
            self._add((earlier,), (term,), vocabulary, counts)
        for terms, slices_of_one in _pairs_of_slices(slices):
            self._add(terms, slices_of_one, vocabulary, counts)
        counts["terms"] = enumeration.terms
        return counts

    def _add(self, before: Side, after: Side, vocabulary: AlgebraVocabulary, counts: Counts) -> None:
        """Try the direction from `before` to `after` of an equation: prune it, generalise it, and add it to `rules`
        where it is proved.
        """
        rule = _make_rule(before, after, vocabulary)
        if not is_usable(rule) or (text := anonymous_text(rule)) in self._texts:
            return
        self._texts.add(text)
        counts["candidates"] += 1
        if is_subsumed(rule, (*self.known, *self.rules)):
            counts["subsumed"] += 1
        elif not _is_proved_once(rule) or not verdict(general := generalise(rule)).proved:
            counts["refused"] += 1
        else:
            counts["rules"] += 1
            self.rules.append(replace(general, name=f"{vocabulary.name}, {counts['rules']}", says=describe(general)))


def _make_rule(before: Side, after: Side, vocabulary: AlgebraVocabulary) -> RewriteRule:
    """Make a rule of two sides, which requires monotone functions where their names begin with m, as fingerprints had
    them.
    """
    functions = dict.fromkeys(functions_of((*before, *after)))
    where = [Monotone(function) for function in functions if function.name.startswith("m")]
    rule = RewriteRule("", "", before, after, tuple(where))
    return replace(rule, shifts=tuple(shift for shift in vocabulary.shifts if shift in rule.sizes))


def _pairs_of_slices(
    slices: dict[Term, list[tuple[Term, Term]]],
) -> Iterator[tuple[tuple[Term, Term], tuple[Term, Term]]]:
    """Yield (two terms, the two Slices of one term that equal them): the equations of rules that merge two operators
    into one.
    """
    for whole, equations in slices.items():
        for (cut, one), (other_cut, other) in combinations(equations, 2):
            same_operator = isinstance(one, Composed) and isinstance(other, Composed) and one.op == other.op
            share_inputs = any(not leaf.constant for leaf in _leaves([one]) & _leaves([other]))
            if same_operator and share_inputs and cut != other_cut and one != other and whole not in (one, other):
                yield (one, other), (cut, other_cut)


def _leaves(terms: Iterable[Term]) -> set[Leaf]:
    """Return the tensors in `terms`."""
    return {leaf for term in terms for leaf in walk(term) if isinstance(leaf, Leaf)}


def running_operators(terms: Sequence[Term]) -> list[str]:
    """List the operators that run, once for equal terms. Those of constants do not run, and a product includes its
    rounding.
    """
    running = dict.fromkeys(subterm for term in terms for subterm in walk(term) if not is_constant(subterm))
    return [term.op for term in running if isinstance(term, Composed) and term.op != "requantise"]


def describe(rule: RewriteRule) -> str:
    """Say the law of a rule by the operators of both sides."""
    return " is the same as ".join(
        " of ".join(running_operators(side)) or "the tensor" for side in (rule.before, rule.after)
    )


# Pruning -------------------------------------------------------------------------------------------------------------


def is_usable(rule: RewriteRule) -> bool:
    """Return whether a candidate rule is worth a proof, which is costly.

    A graph must be able to contain `before`, which must determine everything in `after`; `after` may have at most
    MAX_MORE operators more. "spread" of constants is how a model writes equal values for all channels.
    """
    if not all(isinstance(term, Composed) for term in rule.before) or rule.before == rule.after:
        return False
    subterms = [subterm for term in rule.before for subterm in walk(term) if isinstance(subterm, Composed)]
    if any(is_constant(subterm) and subterm.op != "spread" for subterm in subterms):
        return False  # constants are folded, so no model has operators on them
    if len(running_operators(rule.after)) > len(running_operators(rule.before)) + MAX_MORE:
        return False
    before = RewriteRule("", "", rule.before, ())
    is_bound = {*rule.sizes} <= {*before.sizes} and {*rule.choices} <= {*before.choices}
    return is_bound and _leaves(rule.after) <= _leaves(rule.before)


def anonymous_text(rule: RewriteRule) -> str:
    """Return the text of `rule` with numbers instead of names, in order of occurrence. It is equal for rules that
    differ in names only.
    """
    sides = (*rule.before, *rule.after)
    named: list[Any] = [*functions_of(sides), *rule.leaves, *rule.sizes, *rule.choices]
    names = {thing.name for thing in named}
    numbers: dict[str, str] = {}

    def number(word: re.Match[str]) -> str:
        """Return the number of a name."""
        return numbers.setdefault(word[0], f"#{len(numbers)}") if word[0] in names else word[0]

    return re.sub(r"\b\w+\b", number, " -> ".join(map(str, sides)))


# Generalising --------------------------------------------------------------------------------------------------------


def generalise(rule: RewriteRule) -> RewriteRule:
    """Give each tensor of `rule` sizes of its own, as far as the operators of `before` leave them open and the prover
    agrees. Sizes that attributes name stay.
    """
    shapeless = {leaf.name: replace(leaf, shape=()) for leaf in rule.leaves}
    named = {size.name for size in _with_leaves(rule, shapeless).sizes}  # those that attributes name
    fresh = {leaf.name: replace(leaf, shape=tuple(
        OpenSize(f"{size.name}_{leaf.name}{axis}") if isinstance(size, OpenSize) and size.name not in named else size
        for axis, size in enumerate(leaf.shape))) for leaf in rule.leaves if leaf != rule.leaves[0]}  # fmt: skip
    wider = _unify_equal_sizes(_with_leaves(rule, fresh))
    return wider if is_usable(wider) and _is_proved_once(wider) else rule


def _is_proved_once(rule: RewriteRule) -> bool:
    """Return whether `rule` is proved for the first value of each of its choices, as a quick check."""
    first_choices = {choice.name: replace(choice, among=choice.among[:1]) for choice in rule.choices}
    return verdict(_with_sizes(rule, first_choices)).proved


def _with_leaves(rule: RewriteRule, leaves: dict[str, Leaf]) -> RewriteRule:
    """Replace leaves of `rule` by name."""

    def put(term: Term) -> Term:
        """Replace leaves in a term."""
        if isinstance(term, Leaf):
            return leaves.get(term.name, term)
        return replace(term, args=tuple(map(put, term.args)))

    return replace(rule, before=tuple(map(put, rule.before)), after=tuple(map(put, rule.after)))


def _with_sizes(rule: RewriteRule, sizes: dict[str, Any]) -> RewriteRule:
    """Replace open sizes and choices of `rule` by name."""

    def put(value: Any) -> Any:
        """Replace sizes in a term, a tuple or an expression."""
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


def _unify_equal_sizes(rule: RewriteRule) -> RewriteRule:
    """Give one name to sizes of `rule` that the operators of `before` require to be equal."""
    values: dict[str, Any] = {choice.name: choice.among[0] for choice in rule.choices}
    values |= {size.name: z3.Int(size.name) for size in rule.sizes}
    facts = [values[size.name] >= size.least for size in rule.sizes]
    facts += [demand for term in rule.before for demand in demands_of(term, values) if not isinstance(demand, bool)]
    prover, distinct, replaced_by = Prover(), list[OpenSize](), dict[str, OpenSize]()
    for size in rule.sizes:
        equal = (other for other in distinct if other.least == size.least
                 and prover.holds(tuple(facts), values[other.name] == values[size.name]))  # fmt: skip
        if (first := next(equal, None)) is not None:
            replaced_by[size.name] = first
        else:
            distinct.append(size)
    return _with_sizes(rule, replaced_by)


# Selection -----------------------------------------------------------------------------------------------------------


def winning_rules(
    known: Sequence[RewriteRule], generated: Sequence[RewriteRule], model: onnx.ModelProto, pricing: Pricing,
    seconds: float, say: Callable[[str], None],
) -> tuple[float, list[RewriteRule]]:  # fmt: skip
    """Find which of `generated` rules save cycles on a network. Returns (price with `known` rules only over price with
    the needed ones, the needed rules); (1, []) where they save less than MIN_GAIN. seconds: of each search; there are
    three searches, and one for each rule that wins.
    """

    def best(rules: Sequence[RewriteRule]) -> DerivedGraph:
        """Return the cheapest graph that a search with `known` and these rules finds."""
        graph = graph_of(model)
        gain = Neighbourhoods(model, pricing).gain
        search = RuleSearch((*known, *rules), price_function(model, graph, pricing), gain, seconds)
        search.run(graph)
        return search.best_graphs[-1]

    alone, together = best(()), best(generated)
    say(f"{alone.price} by the rules by hand, {together.price} with {len(generated)} generated ones")
    limit = alone.price.total * (1 - MIN_GAIN)
    if together.price.total > limit:
        return 1.0, []
    needed = [rule for rule in generated if any(step.rule == rule.name for step in together.steps)]
    least = best(needed)
    for rule in needed[::-1]:
        others = [other for other in needed if other is not rule]
        without = best(others)
        say(f"{least.price} with {len(needed)} of them, {without.price} without {rule.name!r}: {rule.says}")
        if without.price.total <= min(limit, least.price.total * (1 + MIN_GAIN)):
            needed, least = others, without
    return (alone.price.total / least.price.total if needed else 1.0), needed
