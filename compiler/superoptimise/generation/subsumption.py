"""Whether a rule follows from others: they are applied to a graph of small tensors, by the matcher of the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import helper

from celosia.compiler.superoptimise.graph import ONNX, Array, BytesGraph, GraphOp, TensorKind, Written
from celosia.compiler.superoptimise.matching import GraphBuilder, Match, NotTaken, matches, rewritten
from celosia.compiler.superoptimise.price import INFEASIBLE
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.search import Searching
from celosia.compiler.superoptimise.sizes import value_of
from celosia.compiler.superoptimise.terms import Leaf, Term, functions_of
from celosia.compiler.superoptimise.trial import NoTrial, sizes_of

MAX_STEPS, MAX_GRAPHS = 2, 200
"""Rules, one after the other, by which a rule may follow from others; graphs that are looked at for that."""
DRAWS = 20
"""Random values of the sizes of a rule, of which those are taken that differ most."""
PRODUCT = GraphOp("requantise", (), ("y",), (), Written("Conv", True, 1.0, (), 1.0, True))
"""Stands for a product of the model, as which products are written."""


@dataclass(frozen=True)
class NamedTable:
    """A function of bytes that only its name tells from others; one whose name begins with m is monotone."""

    name: str

    @property
    def table(self) -> Array:
        """[256], of bytes in rising order."""
        every = np.arange(-128, 128)
        return every // 2 + 30 if self.name[0] == "m" else (every * 77 + sum(map(ord, self.name))) % 256 - 128


def is_subsumed(rule: RewriteRule, rules: Sequence[RewriteRule]) -> bool:
    """Whether `rules`, MAX_STEPS of them and those that tidy up, make `after` of `before`; False where there are no
    small sizes for it."""
    values = _distinct_sizes(rule)
    try:
        start, end = (_graph(rule, terms, values or {}) for terms in (rule.before, rule.after))
    except (NotTaken, KeyError):  # operators that do not take these sizes, and no sizes
        return False
    tidier = Searching(rules, lambda graph: INFEASIBLE, lambda before, after: None, 0)

    def keys(graph: BytesGraph) -> set[str]:
        return {_key(graph), _key(tidier.tidied(graph)[0])}

    goals, seen, edge = keys(end), {_key(start)}, [start]
    if keys(start) & goals:
        return True
    for _ in range(MAX_STEPS):
        following = []
        for other in (other for graph in edge for other in _rewritings(graph, rules)):
            if _key(other) in seen or len(seen) > MAX_GRAPHS:
                continue
            seen.add(_key(other))
            following.append(other)
            if keys(other) & goals:
                return True
        edge = following
    return False


def _graph(rule: RewriteRule, terms: Sequence[Term], values: dict[str, Any]) -> BytesGraph:
    """A graph with random constants that returns `terms`, which are a side of `rule`."""
    leaves = {leaf.name: (leaf, value_of(leaf.shape, values)) for leaf in rule.leaves}
    constants = {name: _random(leaf, shape) for name, (leaf, shape) in leaves.items() if leaf.constant}
    kinds = {name: TensorKind(shape, "int8") for name, (_, shape) in leaves.items()}
    inputs, outputs = tuple(sorted(set(leaves) - set(constants))), tuple(f"y{number}" for number in range(len(terms)))
    graph = BytesGraph((), constants, kinds, inputs, outputs)
    functions: Any = {each.name: NamedTable(each.name) for each in functions_of((*rule.before, *rule.after))}
    match = Match(rule, (PRODUCT,), {name: name for name in leaves}, values, functions, (PRODUCT,), {})
    builder = GraphBuilder(graph, match)
    for output, name in zip(outputs, [builder.name_of(term) for term in terms]):
        proto = helper.make_node("Identity", [name], [output]).SerializeToString()
        builder.made.append(GraphOp(ONNX, (name,), (output,), (("proto", proto),)))
    return replace(graph, constants=builder.constants, kinds=builder.kinds).ordered(builder.made)


def _random(leaf: Leaf, shape: tuple[int, ...]) -> Array:
    rng = np.random.default_rng(list(leaf.name.encode()))
    if leaf.name[0] == "m":  # multipliers
        return rng.uniform(0.001, 0.1, shape).astype(np.float32)
    return np.asarray(rng.integers(-100, 100, shape), np.int32 if leaf.name[0] == "b" else np.int8)


def _key(graph: BytesGraph) -> str:
    """A digest of what `graph` computes, without how it is written."""
    plain = (replace(op, note=None, attributes=() if op.op == ONNX else op.attributes) for op in graph.operations)
    return replace(graph, operations=tuple(plain)).digest


def _rewritings(graph: BytesGraph, rules: Sequence[RewriteRule]) -> Iterator[BytesGraph]:
    for rule in rules:
        if rule.operators <= graph.by_operator.keys():
            for match in matches(rule, graph):
                try:
                    yield rewritten(graph, match)
                except (NotTaken, ValueError):
                    continue


def _distinct_sizes(rule: RewriteRule) -> dict[str, Any] | None:
    """Sizes of which as many as possible differ, so that no rule fits because two of them are equal."""
    drawn: list[dict[str, Any]] = []
    for seed in range(DRAWS):
        try:
            drawn.append(sizes_of(rule, np.random.default_rng(seed)))
        except NoTrial:
            break
    return max(drawn, key=lambda values: len({each for each in values.values() if isinstance(each, int)}), default=None)
