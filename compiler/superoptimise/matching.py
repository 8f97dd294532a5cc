"""Match a rule against a graph, and rewrite the graph where it matches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from celosia.compiler.superoptimise.graph import Array, ByteMap, BytesGraph, GraphOp, Meant, Note, TensorKind, Written
from celosia.compiler.superoptimise.legal import demands
from celosia.compiler.superoptimise.operators import OPERATORS
from celosia.compiler.superoptimise.rule import Absorbs, IsIdentity, Monotone, RewriteRule
from celosia.compiler.superoptimise.scales import realised
from celosia.compiler.superoptimise.sizes import SizeOf, bind, value_of
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term, walk

LARGEST_CONSTANT = 1 << 24
"""Bytes of a constant that a rule makes."""


class NotTaken(Exception):
    """A place where a rule fits and may not be taken; one sentence."""


@dataclass(frozen=True)
class Match:
    """roots: the operations whose results `rule.before` are. names: of tensors. values: of sizes. functions: by name.
    matched: all operations that the terms lie over. numbers:
    what constants are everywhere."""

    rule: RewriteRule
    roots: tuple[GraphOp, ...]
    names: dict[str, str]
    values: dict[str, Any]
    functions: dict[str, ByteMap]
    matched: tuple[GraphOp, ...]
    numbers: dict[str, Array]


@dataclass
class _Binding:
    graph: BytesGraph
    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, ByteMap] = field(default_factory=dict)
    open: list[tuple[Any, Any]] = field(default_factory=list)
    matched: list[GraphOp] = field(default_factory=list)
    numbers: dict[str, Array] = field(default_factory=dict)

    def copy(self) -> _Binding:
        return _Binding(
            self.graph,
            dict(self.names),
            dict(self.values),
            dict(self.functions),
            list(self.open),
            list(self.matched),
            dict(self.numbers),
        )

    def fits(self, term: Term, name: str) -> bool:
        """Whether the tensor `name` may be `term`; binds what it must be then."""
        if isinstance(term, Leaf):
            return self._is_given(term, name)
        if term.op == "spread" and name in self.graph.constants:
            return self._is_spread(term, name)
        operation = self.graph.makers.get(name)
        if operation is None or operation.op != term.op or len(operation.inputs) != len(term.args):
            return False
        if not all(self.fits(arg, each) for arg, each in zip(term.args, operation.inputs)):
            return False
        self.matched.append(operation)
        given = operation.given
        return all(each in given and self._is_value(value, given[each]) for each, value in term.attributes)

    def _is_spread(self, term: Composed, name: str) -> bool:
        """Whether a constant is one number everywhere."""
        array, (value,) = self.graph.constants[name], term.args
        if not isinstance(value, Leaf) or not array.size or np.any(array != array.flat[0]):
            return False
        number = f"{name} everywhere"
        self.numbers[number] = array.reshape(-1)[0].reshape(())
        if value.name in self.names:
            known = self._array(self.names[value.name])
            if known is None or known.dtype != array.dtype or known != array.flat[0]:
                return False
        self.names.setdefault(value.name, number)
        return self._is_value(term["shape"], tuple(array.shape))

    def _is_same(self, a: str, b: str) -> bool:
        first, second = self._array(a), self._array(b)
        if a == b or first is None or second is None:
            return a == b
        alike = first.dtype == second.dtype and first.shape == second.shape
        return alike and bool(np.array_equal(first, second))

    def _array(self, name: str) -> Array | None:
        return self.numbers.get(name, self.graph.constants.get(name))

    def _is_given(self, term: Leaf, name: str) -> bool:
        constant = self.graph.constants.get(name)
        if term.constant and constant is None:
            return False
        if term.name in self.names:
            return self._is_same(self.names[term.name], name)
        shape = constant.shape if constant is not None else self.graph.kinds[name].shape
        if shape is None or any(size <= 0 for size in shape):
            return False
        self.names[term.name] = name
        return self._is_value(term.shape, tuple(shape))

    def _is_value(self, wanted: Any, found: Any) -> bool:
        if isinstance(wanted, ByteFunction):
            return bool(self.functions.setdefault(wanted.name, found) == found)
        if isinstance(wanted, tuple):
            alike = isinstance(found, tuple) and len(wanted) == len(found)
            return alike and all(map(self._is_value, wanted, found))
        if isinstance(wanted, SizeOf) and not bind(wanted, found, self.values):
            self.open.append((wanted, found))
            return True
        return bind(wanted, found, self.values)

    def holds(self, rule: RewriteRule) -> bool:
        """Whether what was left open, and the conditions of the rule, are so."""
        for _ in self.open:
            self.open = [(wanted, found) for wanted, found in self.open if not bind(wanted, found, self.values)]
        try:
            if any(value_of(wanted, self.values) != found for wanted, found in self.open):
                return False
            return all(self._holds(each) for each in rule.where)
        except KeyError:
            return False

    def _holds(self, condition: Any) -> bool:
        match condition:
            case Monotone(function):
                steps = np.diff(self.functions[function.name].table.astype(np.int64))
                return bool(np.all(steps >= 0))
            case IsIdentity(function):
                return bool(np.array_equal(self.functions[function.name].table, np.arange(-128, 128)))
            case Absorbs(outer, inner):
                f, g = (self.functions[each.name].table.astype(np.int64) for each in (outer, inner))
                return bool(np.array_equal(f[g + 128], g))
        return bool(value_of(condition, self.values))


def matches(rule: RewriteRule, graph: BytesGraph) -> Iterator[Match]:
    """Every place where `rule` fits; terms of one operator in the graph's order."""
    first = rule.before[0]
    for operation in graph.by_operator.get(first.op, ()) if isinstance(first, Composed) else ():
        binding = _Binding(graph)
        if binding.fits(first, operation.outputs[0]):
            yield from _others(rule, graph, binding, (operation,))


def _others(rule: RewriteRule, graph: BytesGraph, binding: _Binding, roots: tuple[GraphOp, ...]) -> Iterator[Match]:
    if len(roots) == len(rule.before):
        if binding.holds(rule):
            yield Match(
                rule, roots, binding.names, binding.values, binding.functions, tuple(binding.matched), binding.numbers
            )
        return
    term = rule.before[len(roots)]
    for operation in _near(graph, binding, term):
        other = binding.copy()
        if operation in roots or (operation.op == roots[-1].op and not _is_behind(graph, operation, roots[-1])):
            continue
        if isinstance(term, Composed) and operation.op == term.op and other.fits(term, operation.outputs[0]):
            yield from _others(rule, graph, other, (*roots, operation))


def _is_behind(graph: BytesGraph, a: GraphOp, b: GraphOp) -> bool:
    return graph.places[a.outputs[0]] > graph.places[b.outputs[0]]


def _near(graph: BytesGraph, binding: _Binding, term: Term) -> list[GraphOp]:
    """The operations that are made of what is bound, in as many steps as `term` has."""
    given = {each.name for each in walk(term) if isinstance(each, Leaf) and not each.constant}
    edge = [binding.names[name] for name in given if name in binding.names]
    found: dict[str, GraphOp] = {}
    for _ in range(_depth(term)):
        reached = [each for name in edge for each in graph.readers.get(name, [])]
        found |= {each.outputs[0]: each for each in reached}
        edge = [name for each in reached for name in each.outputs]
    return sorted(found.values(), key=lambda each: graph.places[each.outputs[0]])


def _depth(term: Term) -> int:
    return 0 if isinstance(term, Leaf) else 1 + max(map(_depth, term.args))


# What a rule makes ---------------------------------------------------------------------------------------------------


class GraphBuilder:
    """Adds the operations of terms to a graph in which a rule matches. made: these operations."""

    def __init__(self, graph: BytesGraph, match: Match) -> None:
        self.graph, self.match = graph, match
        self.constants, self.kinds = {**graph.constants, **match.numbers}, dict(graph.kinds)
        self.made: list[GraphOp] = []
        self.known: dict[Term, str] = {}
        self.notes = [each.note for each in match.matched if isinstance(each.note, Written)]

    def name_of(self, term: Term, wanted: str = "") -> str:
        """The tensor that is `term`, of that name where it must be made. NotTaken."""
        if term in self.known:
            return self.known[term]
        if isinstance(term, Leaf):
            return self.match.names[term.name]
        inputs = tuple(self.name_of(arg) for arg in term.args)
        given = {name: self._value(value) for name, value in term.attributes}
        arrays = [self.constants.get(name) for name in inputs]
        shapes = [self._shape(name) for name in inputs]
        if not all(demands(term.op, shapes, given)):
            raise NotTaken(f"{term.op} does not take operands of these shapes")
        if term.op == "concat" and len(set(map(self._dtype, inputs))) != 1:
            raise NotTaken("numbers of two types are not put together")
        if all(array is not None for array in arrays):
            self.known[term] = self._constant(OPERATORS[term.op].evaluate(arrays, given), inputs[0])  # type: ignore[arg-type]
        else:
            near = self.match.roots[0].outputs[0]
            self.known[term] = self._operation(term.op, inputs, given, wanted or self.graph.fresh(near))
        return self.known[term]

    def _value(self, value: Any) -> Any:
        return (
            self.match.functions[value.name] if isinstance(value, ByteFunction) else value_of(value, self.match.values)
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.constants[name].shape if name in self.constants else self.kinds[name].shape or ()

    def _dtype(self, name: str) -> str:
        return self.constants[name].dtype.name if name in self.constants else self.kinds[name].dtype

    def _constant(self, array: Array, near: str) -> str:
        if array.nbytes > LARGEST_CONSTANT:
            raise NotTaken("a constant would be too large")
        name = self.graph.fresh(near)
        self.constants[name] = np.asarray(array, order="C")
        return name

    def _operation(self, op: str, inputs: tuple[str, ...], given: dict[str, Any], name: str) -> str:
        shape = OPERATORS[op].shape([self._shape(each) for each in inputs], given)
        dtype = "int32" if op in ("convolve", "multiply") else self._dtype(inputs[2 if op == "requantise" else 0])
        self.made.append(GraphOp(op, inputs, (name,), tuple(sorted(given.items())), self._note(op, inputs)))
        self.kinds[name] = TensorKind(tuple(shape), dtype)
        return name

    def _read_as(self, x: str) -> Meant | None:
        """Scale and zero point of `x` for the product that reads it."""
        for each in self.match.matched:
            if each.op == "convolve" and each.inputs[0] == x:
                return Meant(self.notes[0].x, int(self.constants[each.inputs[1]]))
        return None

    def _made_as(self, x: str) -> Meant | None:
        """Scale and zero point of `x` for the product that makes it, of those that are made here."""
        for each in self.made:
            if each.outputs[0] == x and isinstance(each.note, Written):
                return Meant(each.note.y, int(self.constants[each.inputs[-1]]))
        return None

    def _note(self, op: str, inputs: tuple[str, ...]) -> Note:
        if op == "phases" and self.notes:
            return self._read_as(inputs[0])
        if op == "interleave":
            return self._made_as(inputs[0])
        if op != "requantise":
            found = (each.note for each in self.match.matched if each.op == op)
            return next(found, None)
        note = realised(self.constants[inputs[1]], self.notes)
        if note is None:
            raise NotTaken("no scales of ONNX have these multipliers")
        return note


def rewritten(graph: BytesGraph, match: Match) -> BytesGraph:
    """`graph` with what the rule makes where it fits. NotTaken."""
    builder = GraphBuilder(graph, match)
    same: dict[str, str] = {}
    for root, term in zip(match.roots, match.rule.after):
        wanted = root.outputs[0]
        found = builder.name_of(term, wanted)
        if found != wanted:
            same[wanted] = found
    gone = {root.outputs[0] for root in match.roots}
    left = [each for each in graph.operations if each.outputs[0] not in gone]
    places = {each.outputs[0]: place for place, each in enumerate(graph.operations)}
    first = min(places[name] for name in gone)
    before = [each for each in left if places[each.outputs[0]] < first]
    operations = [*before, *builder.made, *left[len(before) :]]
    made = replace(graph, constants=builder.constants, kinds=builder.kinds)
    return made.ordered(_renamed(made, operations, same))


def _renamed(graph: BytesGraph, operations: Sequence[GraphOp], same: dict[str, str]) -> list[GraphOp]:
    """`operations`, where each tensor of `same` is the other one. NotTaken."""
    pairs: dict[str, str] = {}
    for gone, kept in same.items():
        if gone in graph.outputs:
            if kept in graph.outputs or kept in graph.inputs or kept in graph.constants:
                raise NotTaken("an output of the model would be another tensor")
            pairs[kept] = gone
        else:
            pairs[gone] = kept
    for each in operations:
        if each.op == "onnx" and any(name in pairs for name in each.inputs[_own_inputs(each) :]):
            raise NotTaken("a tensor is read inside of an operator")
    return [
        replace(
            each, inputs=tuple(pairs.get(name, name) for name in each.inputs),
            outputs=tuple(pairs.get(name, name) for name in each.outputs),
        ) for each in operations
    ]  # fmt: skip


def _own_inputs(each: GraphOp) -> int:
    import onnx

    return len(onnx.NodeProto.FromString(each["proto"]).input)


__all__ = ["GraphBuilder", "Match", "Meant", "NotTaken", "matches", "rewritten"]
