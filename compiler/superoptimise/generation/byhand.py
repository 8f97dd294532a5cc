"""Whether the rules that are written by hand make what a generated one makes: on a graph of small tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import helper

from celosia.compiler.superoptimise.generation.instances import is_constant
from celosia.compiler.superoptimise.graph import ONNX, Array, BytesGraph, GraphOp, Note, TensorKind, Written
from celosia.compiler.superoptimise.matching import NotTaken, matches, rewritten
from celosia.compiler.superoptimise.operators import OPERATORS
from celosia.compiler.superoptimise.price import INFEASIBLE
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.search import Searching
from celosia.compiler.superoptimise.sizes import value_of
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term
from celosia.compiler.superoptimise.trial import NoTrial, sizes_of

STEPS, MOST, DRAWS = 2, 200, 20


@dataclass(frozen=True)
class NamedTable:
    """A function of bytes that only its name tells from others; like those of Enumeration by its first letter."""

    name: str

    @property
    def table(self) -> Array:
        """[256], of bytes in rising order."""
        every = np.arange(-128, 128)
        kinds = {"m": every // 2 + 30, "k": np.clip(every, -50, 50)}
        return kinds.get(self.name[0], (every * 77 + sum(map(ord, self.name))) % 256 - 128)


@dataclass
class _Making:
    values: dict[str, Any]
    constants: dict[str, Array] = field(default_factory=dict)
    kinds: dict[str, TensorKind] = field(default_factory=dict)
    made: dict[Term, str] = field(default_factory=dict)
    operations: list[GraphOp] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)

    def name_of(self, term: Term) -> str:
        if term in self.made:
            return self.made[term]
        name = self.made[term] = term.name if isinstance(term, Leaf) else f"t{len(self.made)}"
        if isinstance(term, Leaf):
            shape = value_of(term.shape, self.values)
            self.kinds[name] = TensorKind(shape, "int8")
            if term.constant:
                self.constants[name] = _numbers(term.name, shape)
            else:
                self.inputs.append(name)
            return name
        inputs = tuple(map(self.name_of, term.args))
        given = {of: NamedTable(v.name) if isinstance(v, ByteFunction) else value_of(v, self.values)
                 for of, v in term.attributes}  # fmt: skip
        if is_constant(term):
            self.constants[name] = OPERATORS[term.op].evaluate([self.constants[each] for each in inputs], given)
            return name
        shapes = [self._shape(each) for each in inputs]
        self.kinds[name] = TensorKind(tuple(OPERATORS[term.op].shape(shapes, given)), "int8")
        self.operations.append(
            GraphOp(term.op, inputs, (name,), tuple(sorted(given.items())), self._note(term, inputs))
        )
        return name

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.constants[name].shape if name in self.constants else self.kinds[name].shape or ()

    def _note(self, term: Composed, inputs: Sequence[str]) -> Note:
        if term.op != "requantise":
            return None
        product = next(each for each in self.operations if each.outputs[0] == inputs[0]).op
        scales = tuple(float(each) for each in self.constants[inputs[1]])
        return Written("Conv" if product == "convolve" else "MatMul", True, 1.0, scales, 1.0, True)

    def graph(self, terms: Sequence[Term]) -> BytesGraph:
        """That returns `terms`."""
        outputs = []
        for number, name in enumerate(map(self.name_of, terms)):
            outputs.append(f"y{number}")
            proto = helper.make_node("Identity", [name], [outputs[-1]]).SerializeToString()
            self.operations.append(GraphOp(ONNX, (name,), (outputs[-1],), (("proto", proto),)))
        graph = BytesGraph((), self.constants, self.kinds, tuple(self.inputs), tuple(outputs))
        return graph.ordered(self.operations)


def _numbers(name: str, shape: tuple[int, ...]) -> Array:
    rng = np.random.default_rng(list(name.encode()))
    if name[0] == "m":
        return rng.uniform(0.001, 0.1, shape).astype(np.float32)
    return rng.integers(-100, 100, shape).astype(np.int32 if name[0] in "bc" else np.int8)


def _key(graph: BytesGraph) -> str:
    """What is computed, however it was written."""
    plain = [
        replace(each, note=None, attributes=() if each.op == ONNX else each.attributes) for each in graph.operations
    ]
    return replace(graph, operations=tuple(plain)).digest


def _next(graph: BytesGraph, rules: Sequence[RewriteRule]) -> Iterator[BytesGraph]:
    operators = {each.op for each in graph.operations}
    for rule in rules:
        if rule.operators <= operators:
            for match in matches(rule, graph):
                try:
                    yield rewritten(graph, match)
                except (NotTaken, ValueError):
                    continue


def makes(rules: Sequence[RewriteRule], rule: RewriteRule) -> bool:
    """Whether `rules` make in STEPS steps, and what tidies up, of what stands before in `rule` what stands after."""
    values = _distinct(rule)
    if values is None:
        return False
    start, end = _Making(values).graph(rule.before), _Making(values).graph(rule.after)
    tidier = Searching(rules, lambda each: INFEASIBLE, lambda a, b: None, 0)
    goals = {_key(end), _key(tidier.tidied(end)[0])}
    seen, edge = {_key(start)}, [start]
    for _ in range(STEPS):
        following = []
        for graph in edge:
            for made in _next(graph, rules):
                if _key(made) in seen or len(seen) > MOST:
                    continue
                seen.add(_key(made))
                following.append(made)
                if {_key(made), _key(tidier.tidied(made)[0])} & goals:
                    return True
        edge = following
    return _key(tidier.tidied(start)[0]) in goals


def _distinct(rule: RewriteRule) -> dict[str, Any] | None:
    """Sizes of which as many as possible differ, so that nothing fits because two are the same."""
    found: list[dict[str, Any]] = []
    for seed in range(DRAWS):
        try:
            found.append(sizes_of(rule, np.random.default_rng(seed)))
        except NoTrial:
            return None if not found else max(found, key=_different)
    return max(found, key=_different)


def _different(values: dict[str, Any]) -> int:
    return len({each for each in values.values() if isinstance(each, int)})
