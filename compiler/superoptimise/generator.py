"""Generate rules that nobody wrote: enumerate terms, group equal ones, prune, prove, and keep what wins on a network.

    vocabulary -> terms -> equations -> candidates -> rules

Enumeration groups all terms of a vocabulary (vocabularies.py), up to a number of operators, by fingerprints of their
values on random tensors: equal terms are equations. A candidate is a direction of an equation that a graph can match,
that differs from earlier candidates by more than names, and that is not subsumed: no two rules so far have the same
effect. A rule is a candidate that the prover accepts for all sizes, by the same prover as rules written by hand.

The parts: generator, pruning, generalising; enumeration; subsumption; selection of rules that win.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import onnx
import z3
from numpy.typing import NDArray
from onnx import helper

from celosia.compiler.superoptimise.graph import ONNX, Array, BytesGraph, GraphOp, OriginalForm, TensorKind
from celosia.compiler.superoptimise.matching import GraphBuilder, Match, NotTaken, matches, rewrite
from celosia.compiler.superoptimise.optimise import graph_of, price_function
from celosia.compiler.superoptimise.price import INFEASIBLE, Neighbourhoods, Pricing
from celosia.compiler.superoptimise.prover import Prover, demands_of, verdict
from celosia.compiler.superoptimise.rule import (
    ByteFunction,
    Composed,
    Leaf,
    Monotone,
    OneOf,
    OpenSize,
    RewriteRule,
    SizeOf,
    Term,
    functions_of,
    is_constant,
    value_of,
    walk,
)
from celosia.compiler.superoptimise.search import DerivedGraph, RuleSearch
from celosia.compiler.superoptimise.trial import NoTrial, TermValues, sizes_of
from celosia.compiler.superoptimise.vocabularies import AlgebraVocabulary

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
    named = {size.name for size in _replace_names(rule, shapeless, {}).sizes}  # those that attributes name
    fresh = {leaf.name: replace(leaf, shape=tuple(
        OpenSize(f"{size.name}_{leaf.name}{axis}") if isinstance(size, OpenSize) and size.name not in named else size
        for axis, size in enumerate(leaf.shape))) for leaf in rule.leaves if leaf != rule.leaves[0]}  # fmt: skip
    wider = _unify_equal_sizes(_replace_names(rule, fresh, {}))
    return wider if is_usable(wider) and _is_proved_once(wider) else rule


def _is_proved_once(rule: RewriteRule) -> bool:
    """Return whether `rule` is proved for the first value of each of its choices, as a quick check."""
    first_choices = {choice.name: replace(choice, among=choice.among[:1]) for choice in rule.choices}
    return verdict(_replace_names(rule, {}, first_choices)).proved


def _replace_names(rule: RewriteRule, leaves: Mapping[str, Leaf], sizes: Mapping[str, Any]) -> RewriteRule:
    """Replace leaves of `rule`, and open sizes and choices, by name."""

    def put(value: Any) -> Any:
        """Replace names in a term, a tuple or an expression."""
        match value:
            case tuple():
                return tuple(map(put, value))
            case SizeOf():
                return SizeOf(value.operation, put(value.left), put(value.right))
            case OpenSize() | OneOf():
                return sizes.get(value.name, value)
            case Leaf():
                return leaves[value.name] if value.name in leaves else replace(value, shape=put(value.shape))
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
    return _replace_names(rule, {}, replaced_by)


# Enumeration ---------------------------------------------------------------------------------------------------------

# All numbers are random integers modulo 2^32, also those that stand for bytes, so that no two terms are equal because
# their numbers are small. Rounding and functions of bytes are hash functions of their arguments, so that nothing passes
# through them by accident. Larger terms are made of one term of each class of equal terms only: those of the others
# follow from the equations between them.

Ints = NDArray[np.int32]
DRAWS = 3
"""Number of random choices of all sizes for which terms are compared."""


def hash_arrays(*values: Any) -> Ints:
    """Hash the numbers at each index of all `values` into one number, element by element."""
    state: Any = np.uint32(0x9E3779B9)
    with np.errstate(over="ignore"):
        for value in values:
            state = (np.asarray(value).astype(np.uint32) ^ state) * np.uint32(0x85EBCA6B)
            state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
            state = state ^ (state >> np.uint32(16))
    return np.asarray(state).view(np.int32)


def stand_in(function: ByteFunction, *values: Ints) -> Ints:
    """Compute a pseudo-random function in place of a function of bytes; one whose name begins with m is monotone."""
    if function.name.startswith("m"):
        return np.asarray((values[0] >> 1) + (values[0] > 12345) * np.int32(1000003))
    return hash_arrays(np.int32(sum(map(ord, function.name))), *values)


def numbers_of_name(seed: int, name: str, shape: tuple[int, ...], role: str) -> Ints:
    """Draw a tensor of integers of the complete range that depend on the name and the seed only."""
    rng = np.random.default_rng([seed, *name.encode()])
    return rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)


class Fingerprint(TermValues):
    """Values of terms in which functions that round, and functions of bytes, are hash functions."""

    def apply(self, op: str, operands: list[Ints], attributes: dict[str, Any]) -> Ints:
        """Apply an operator, or a hash function in its place."""
        if op == "requantise":
            acc, multipliers, zero = operands
            return hash_arrays(acc, np.expand_dims(multipliers, tuple(range(1, acc.ndim - attributes["axis"]))), zero)
        if op == "map":
            return stand_in(attributes["f"], *operands)
        return np.asarray(super().apply(op, operands, attributes))


def count_repeats(term: Term) -> int:
    """Count how often tensors occur in `term` beyond their first time; constants do not count."""
    leaves = [leaf for leaf in walk(term) if isinstance(leaf, Leaf) and not leaf.constant]
    return len(leaves) - len(set(leaves))


class Enumeration:
    """The terms of a vocabulary. classes: the first term of each class of equal terms, by fingerprint. terms: number of
    terms so far.
    """

    def __init__(self, vocabulary: AlgebraVocabulary) -> None:
        rng = np.random.default_rng(27)
        self.vocabulary = vocabulary
        self.draws = [Fingerprint(vocabulary.draw(rng), partial(numbers_of_name, seed)) for seed in range(DRAWS)]
        self.classes: dict[bytes, Term] = {}
        self.terms = 0

    def equations(self) -> Iterator[tuple[Composed, Term]]:
        """Yield (term, earlier term with the same fingerprint), terms with few operators first."""
        levels: list[list[Term]] = [[]]
        for leaf in self.vocabulary.leaves:
            self._first_equal(leaf)
            levels[0].append(leaf)
        for operators in range(1, self.vocabulary.max_operators + 1):
            levels.append([])
            for term in self._terms_of_size(levels, operators):
                first = self._first_equal(term, remember=operators < self.vocabulary.max_operators)
                if first is term:
                    levels[-1].append(term)
                elif first is not None:
                    yield term, first

    def _terms_of_size(self, levels: Sequence[Sequence[Term]], operators: int) -> list[Composed]:
        """List the terms with so many operators. Terms in which no tensor repeats come first, as they are more
        general.
        """
        terms: list[Any] = [op(term) for op in self.vocabulary.unary for term in levels[operators - 1]]
        for op in self.vocabulary.binary:
            for left in range(operators):
                terms += [op(a, b) for a in levels[left] for b in levels[operators - 1 - left]]
        return sorted(terms, key=count_repeats)

    def _first_equal(self, term: Term, remember: bool = True) -> Term | None:
        """Return the first term with the fingerprint of `term`, which may be itself; None where it is not legal.
        remember: keep its values, for larger terms.
        """
        self.terms += 1
        try:
            tensors = [draw.evaluate(term) for draw in self.draws]
        except NoTrial:
            return None
        digest = hashlib.blake2b(digest_size=16)
        for tensor in tensors:
            digest.update(f"{tensor.shape}".encode() + np.ascontiguousarray(tensor).tobytes())
        first = self.classes.setdefault(digest.digest(), term)
        if first is term and remember:
            for draw, tensor in zip(self.draws, tensors):
                draw.known[term] = tensor
        return first


# Subsumption ---------------------------------------------------------------------------------------------------------

# A rule follows from others if the search's own matcher, with these, turns one side into the other on small tensors.

MAX_STEPS, MAX_GRAPHS = 2, 200
"""Limit of the rules that are applied one after the other, and of the graphs that are looked at."""
SIZE_DRAWS = 20
"""Number of draws of a rule's sizes, of which the one with most different values is taken."""
PRODUCT = GraphOp("requantise", (), ("y",), (), OriginalForm("Conv", True, 1.0, (), 1.0, True))
"""An operation that every match here claims to contain, so that new products are written like it."""


@dataclass(frozen=True)
class NamedTable:
    """A function of bytes that is recognised by its name; one whose name begins with m is monotone."""

    name: str

    @property
    def table(self) -> Array:
        """The function as a table: [256] results for the bytes in rising order."""
        values = np.arange(-128, 128)
        return values // 2 + 30 if self.name[0] == "m" else (values * 77 + sum(map(ord, self.name))) % 256 - 128


def is_subsumed(rule: RewriteRule, rules: Sequence[RewriteRule]) -> bool:
    """Return whether at most MAX_STEPS of `rules`, with tidying rules in between, turn `before` into `after`. False
    where there are no small sizes for the rule.
    """
    values = _distinct_sizes(rule)
    try:
        start, end = (_graph_of_terms(rule, terms, values or {}) for terms in (rule.before, rule.after))
    except (NotTaken, KeyError):  # operators refuse these sizes, or there are none
        return False
    tidier = RuleSearch(rules, lambda graph: INFEASIBLE, lambda before, after: None, 0)

    def digests(graph: BytesGraph) -> set[str]:
        """Return the digests of `graph`, and of what tidying makes of it."""
        return {_meaning_digest(graph), _meaning_digest(tidier.tidy(graph)[0])}

    goals, seen, frontier = digests(end), {_meaning_digest(start)}, [start]
    if digests(start) & goals:
        return True
    for _ in range(MAX_STEPS):
        following = []
        for other in (other for graph in frontier for other in _rewrite_everywhere(graph, rules)):
            if _meaning_digest(other) in seen or len(seen) > MAX_GRAPHS:
                continue
            seen.add(_meaning_digest(other))
            following.append(other)
            if digests(other) & goals:
                return True
        frontier = following
    return False


def _graph_of_terms(rule: RewriteRule, terms: Sequence[Term], values: dict[str, Any]) -> BytesGraph:
    """Make a small graph that computes `terms`, one side of `rule`, so that other rules can be applied to it.

    Its constants are random. An Identity behind each term gives both sides the same output names. values: numbers for
    the rule's size variables. Raises NotTaken, and KeyError for a size variable without a number.
    """
    leaves = {leaf.name: (leaf, value_of(leaf.shape, values)) for leaf in rule.leaves}
    constants = {name: _random_constant(leaf, shape) for name, (leaf, shape) in leaves.items() if leaf.constant}
    kinds = {name: TensorKind(shape, "int8") for name, (_, shape) in leaves.items()}
    inputs, outputs = tuple(sorted(set(leaves) - set(constants))), tuple(f"y{number}" for number in range(len(terms)))
    graph = BytesGraph((), constants, kinds, inputs, outputs)
    functions: Any = {
        function.name: NamedTable(function.name) for function in functions_of((*rule.before, *rule.after))
    }
    match = Match(rule, (PRODUCT,), {name: name for name in leaves}, values, functions, (PRODUCT,), {})
    builder = GraphBuilder(graph, match)
    for output, name in zip(outputs, [builder.build(term) for term in terms]):
        proto = helper.make_node("Identity", [name], [output]).SerializeToString()
        builder.operations.append(GraphOp(ONNX, (name,), (output,), (("proto", proto),)))
    return replace(graph, constants=builder.constants, kinds=builder.kinds).ordered(builder.operations)


def _random_constant(leaf: Leaf, shape: tuple[int, ...]) -> Array:
    """Draw a constant that depends on the leaf's name only; by its first letter multipliers, biases or bytes."""
    rng = np.random.default_rng(list(leaf.name.encode()))
    if leaf.name[0] == "m":  # multipliers
        return rng.uniform(0.001, 0.1, shape).astype(np.float32)
    return np.asarray(rng.integers(-100, 100, shape), np.int32 if leaf.name[0] == "b" else np.int8)


def _meaning_digest(graph: BytesGraph) -> str:
    """Return a digest of what `graph` computes, whatever form its operations are written in."""
    plain = (replace(op, note=None, attributes=() if op.op == ONNX else op.attributes) for op in graph.operations)
    return replace(graph, operations=tuple(plain)).digest


def _rewrite_everywhere(graph: BytesGraph, rules: Sequence[RewriteRule]) -> Iterator[BytesGraph]:
    """Yield the graphs that one rule makes of `graph` at one place."""
    for rule in rules:
        if rule.operators <= graph.by_operator.keys():
            for match in matches(rule, graph):
                try:
                    yield rewrite(graph, match)
                except (NotTaken, ValueError):
                    continue


def _distinct_sizes(rule: RewriteRule) -> dict[str, Any] | None:
    """Draw sizes of which as many as possible differ, so that no rule fits only because two are equal. None where no
    sizes are legal.
    """
    drawn: list[dict[str, Any]] = []
    for seed in range(SIZE_DRAWS):
        try:
            drawn.append(sizes_of(rule, np.random.default_rng(seed)))
        except NoTrial:
            break
    return max(
        drawn, key=lambda values: len({value for value in values.values() if isinstance(value, int)}), default=None
    )


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
