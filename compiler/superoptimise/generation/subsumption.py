"""Decide whether a rule follows from others, by applying these to a graph of small tensors with the search's own
matcher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import helper

from celosia.compiler.superoptimise.graph import ONNX, Array, BytesGraph, GraphOp, OriginalForm, TensorKind
from celosia.compiler.superoptimise.matching import GraphBuilder, Match, NotTaken, matches, rewrite
from celosia.compiler.superoptimise.price import INFEASIBLE
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.search import RuleSearch
from celosia.compiler.superoptimise.sizes import value_of
from celosia.compiler.superoptimise.terms import Leaf, Term, functions_of
from celosia.compiler.superoptimise.trial import NoTrial, sizes_of

MAX_STEPS, MAX_GRAPHS = 2, 200
"""Limit of the rules that are applied one after the other, and of the graphs that are looked at."""
DRAWS = 20
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
    for seed in range(DRAWS):
        try:
            drawn.append(sizes_of(rule, np.random.default_rng(seed)))
        except NoTrial:
            break
    return max(
        drawn, key=lambda values: len({value for value in values.values() if isinstance(value, int)}), default=None
    )
