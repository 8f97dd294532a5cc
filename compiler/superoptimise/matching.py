"""Find where a rule fits a graph (`matches`), and apply it there (`rewrite`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from celosia.compiler.superoptimise.graph import (
    ONNX,
    Array,
    ByteMap,
    BytesGraph,
    GraphOp,
    Note,
    OriginalForm,
    Quantisation,
    TensorKind,
    realised,
)
from celosia.compiler.superoptimise.operators import OPERATORS, demands
from celosia.compiler.superoptimise.rule import (
    Absorbs,
    ByteFunction,
    Composed,
    IsIdentity,
    Leaf,
    Monotone,
    RewriteRule,
    SizeOf,
    Term,
    bind,
    value_of,
    walk,
)

MAX_CONSTANT_BYTES = 1 << 24
"""Limit of the bytes of a constant that a rule makes, such as weights with zeros around them."""


class NotTaken(Exception):
    """A rule fits at a place but may not be applied there. The message is one sentence."""


@dataclass(frozen=True)
class Match:
    """A place in a graph where a rule fits.

    roots: the operations whose results are the terms of `rule.before`. names: the graph's tensor for each leaf of the
    rule. values: of its sizes and choices. functions: the function of bytes for each name. matched: all operations that
    the terms cover. numbers: values, as arrays, of constants that are one number everywhere (`spread`), by a made-up
    name.
    """

    rule: RewriteRule
    roots: tuple[GraphOp, ...]
    names: dict[str, str]
    values: dict[str, Any]
    functions: dict[str, ByteMap]
    matched: tuple[GraphOp, ...]
    numbers: dict[str, Array]


@dataclass
class _PartialMatch:
    """Bindings found so far, while the terms of a rule are matched one after the other.

    names, values, functions, matched, numbers: as in Match. open: (expression, value) pairs of sizes that could not be
    solved yet.
    """

    graph: BytesGraph
    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, ByteMap] = field(default_factory=dict)
    open: list[tuple[Any, Any]] = field(default_factory=list)
    matched: list[GraphOp] = field(default_factory=list)
    numbers: dict[str, Array] = field(default_factory=dict)

    def copy(self) -> _PartialMatch:
        """Return an independent copy, from which another way to match goes on."""
        return _PartialMatch(
            self.graph, dict(self.names), dict(self.values), dict(self.functions), list(self.open), list(self.matched),
            dict(self.numbers),
        )  # fmt: skip

    def match_term(self, term: Term, name: str) -> bool:
        """Return whether the tensor `name` can be `term`, and note what leaves, sizes and functions of the term then
        are.
        """
        if isinstance(term, Leaf):
            return self._match_leaf(term, name)
        if term.op == "spread" and name in self.graph.constants:
            return self._match_spread(term, name)
        operation = self.graph.makers.get(name)
        if operation is None or operation.op != term.op or len(operation.inputs) != len(term.args):
            return False
        if not all(self.match_term(arg, operand) for arg, operand in zip(term.args, operation.inputs)):
            return False
        self.matched.append(operation)
        attributes = operation.attributes_by_name
        return all(name in attributes and self._match_value(value, attributes[name]) for name, value in term.attributes)

    def _match_spread(self, term: Composed, name: str) -> bool:
        """Match a `spread` term with a constant: whether it is one number everywhere, which becomes the term's leaf."""
        array, (value,) = self.graph.constants[name], term.args
        if not isinstance(value, Leaf) or not array.size or np.any(array != array.flat[0]):
            return False
        number = f"{name} everywhere"
        self.numbers[number] = array.reshape(-1)[0].reshape(())
        if value.name in self.names:
            known = self._constant_array(self.names[value.name])
            if known is None or known.dtype != array.dtype or known != array.flat[0]:
                return False
        self.names.setdefault(value.name, number)
        return self._match_value(term["shape"], tuple(array.shape))

    def _are_equal_tensors(self, a: str, b: str) -> bool:
        """Return whether two names stand for one tensor, or for constants of equal content."""
        first, second = self._constant_array(a), self._constant_array(b)
        if a == b or first is None or second is None:
            return a == b
        has_same_type = first.dtype == second.dtype and first.shape == second.shape
        return has_same_type and bool(np.array_equal(first, second))

    def _constant_array(self, name: str) -> Array | None:
        """Return the content of a constant or of a number; None for another tensor."""
        return self.numbers.get(name, self.graph.constants.get(name))

    def _match_leaf(self, term: Leaf, name: str) -> bool:
        """Match a leaf with the tensor `name`: the leaf's earlier tensor, or a new one whose shape fits."""
        constant = self.graph.constants.get(name)
        if term.constant and constant is None:
            return False
        if term.name in self.names:
            return self._are_equal_tensors(self.names[term.name], name)
        shape = constant.shape if constant is not None else self.graph.kinds[name].shape
        if shape is None or any(size <= 0 for size in shape):
            return False
        self.names[term.name] = name
        return self._match_value(term.shape, tuple(shape))

    def _match_value(self, expected: Any, actual: Any) -> bool:
        """Match an attribute or a shape of the rule with that of the graph. An expression with several open sizes is
        left for `solve_and_check`.
        """
        if isinstance(expected, ByteFunction):
            return bool(self.functions.setdefault(expected.name, actual) == actual)
        if isinstance(expected, tuple):
            has_same_length = isinstance(actual, tuple) and len(expected) == len(actual)
            return has_same_length and all(map(self._match_value, expected, actual))
        if isinstance(expected, SizeOf) and not bind(expected, actual, self.values):
            self.open.append((expected, actual))
            return True
        return bind(expected, actual, self.values)

    def solve_and_check(self, rule: RewriteRule) -> bool:
        """Solve the expressions that were left open, and return whether they and the conditions of the rule hold."""
        for _ in self.open:
            self.open = [pair for pair in self.open if not bind(*pair, self.values)]
        try:
            if any(value_of(expected, self.values) != actual for expected, actual in self.open):
                return False
            return all(self._is_fulfilled(condition) for condition in rule.where)
        except KeyError:
            return False

    def _is_fulfilled(self, condition: Any) -> bool:
        """Return whether one condition of the rule holds. KeyError for a function without a table, and for an open
        size.
        """
        match condition:
            case Monotone(function):
                steps = np.diff(self.functions[function.name].table.astype(np.int64))
                return bool(np.all(steps >= 0))
            case IsIdentity(function):
                return bool(np.array_equal(self.functions[function.name].table, np.arange(-128, 128)))
            case Absorbs(outer, inner):
                f, g = (self.functions[function.name].table.astype(np.int64) for function in (outer, inner))
                return bool(np.array_equal(f[g + 128], g))
        return bool(value_of(condition, self.values))


def matches(rule: RewriteRule, graph: BytesGraph) -> Iterator[Match]:
    """Yield every place where `rule` fits. Where several terms have the same operator, their operations are in the
    graph's order.
    """
    first_term = rule.before[0]
    for operation in graph.by_operator.get(first_term.op, ()) if isinstance(first_term, Composed) else ():
        partial = _PartialMatch(graph)
        if partial.match_term(first_term, operation.outputs[0]):
            yield from _match_remaining(rule, graph, partial, (operation,))


def _match_remaining(
    rule: RewriteRule, graph: BytesGraph, partial: _PartialMatch, roots: tuple[GraphOp, ...]
) -> Iterator[Match]:
    """Match the terms of `rule.before` after those that `roots` stand for, and yield complete matches."""
    if len(roots) == len(rule.before):
        if partial.solve_and_check(rule):
            yield Match(
                rule, roots, partial.names, partial.values, partial.functions, tuple(partial.matched), partial.numbers
            )
        return
    term = rule.before[len(roots)]
    for operation in _candidates_for(graph, partial, term):
        extended = partial.copy()
        if operation in roots or (
            operation.op == roots[-1].op and graph.places[operation.outputs[0]] <= graph.places[roots[-1].outputs[0]]
        ):
            continue
        if isinstance(term, Composed) and operation.op == term.op and extended.match_term(term, operation.outputs[0]):
            yield from _match_remaining(rule, graph, extended, (*roots, operation))


def _candidates_for(graph: BytesGraph, partial: _PartialMatch, term: Term) -> list[GraphOp]:
    """List the operations that may be `term`: those that depend on tensors already matched, in as many steps as the
    term has operators.
    """
    leaf_names = {leaf.name for leaf in walk(term) if isinstance(leaf, Leaf) and not leaf.constant}
    frontier = [partial.names[name] for name in leaf_names if name in partial.names]
    candidates: dict[str, GraphOp] = {}
    for _ in range(_operator_depth(term)):
        reached = [operation for name in frontier for operation in graph.readers.get(name, [])]
        candidates |= {operation.outputs[0]: operation for operation in reached}
        frontier = [name for operation in reached for name in operation.outputs]
    return sorted(candidates.values(), key=lambda operation: graph.places[operation.outputs[0]])


def _operator_depth(term: Term) -> int:
    """Return the greatest number of operators on a way through `term`."""
    return 0 if isinstance(term, Leaf) else 1 + max(map(_operator_depth, term.args))


# Rewriting -----------------------------------------------------------------------------------------------------------


class GraphBuilder:
    """Adds operations for the terms `after` to a graph in which a rule matches. operations: those that were added.
    built: the tensor of each term that was built.
    """

    def __init__(self, graph: BytesGraph, match: Match) -> None:
        self.graph, self.match = graph, match
        self.constants, self.kinds = {**graph.constants, **match.numbers}, dict(graph.kinds)
        self.operations: list[GraphOp] = []
        self.built: dict[Term, str] = {}
        self.notes = [operation.note for operation in match.matched if isinstance(operation.note, OriginalForm)]

    def build(self, term: Term, wanted: str = "") -> str:
        """Return the tensor that is `term`, computing constants and adding operations for it. Raises NotTaken. wanted:
        name for the tensor, where it must be made.
        """
        if term in self.built:
            return self.built[term]
        if isinstance(term, Leaf):
            return self.match.names[term.name]
        inputs = tuple(self.build(arg) for arg in term.args)
        functions, values = self.match.functions, self.match.values
        attributes = {
            name: functions[value.name] if isinstance(value, ByteFunction) else value_of(value, values)
            for name, value in term.attributes
        }
        arrays = [self.constants.get(name) for name in inputs]
        shapes = [self._shape(name) for name in inputs]
        if not all(demands(term.op, shapes, attributes)):
            raise NotTaken(f"{term.op} does not take operands of these shapes")
        if term.op == "concat" and len(set(map(self._dtype, inputs))) != 1:
            raise NotTaken("numbers of two types are not put together")
        if all(array is not None for array in arrays):
            self.built[term] = self._add_constant(OPERATORS[term.op].evaluate(arrays, attributes), inputs[0])  # type: ignore[arg-type]
        else:
            near = self.match.roots[0].outputs[0]
            self.built[term] = self._add_operation(term.op, inputs, attributes, wanted or self.graph.fresh(near))
        return self.built[term]

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a constant or tensor."""
        return self.constants[name].shape if name in self.constants else self.kinds[name].shape or ()

    def _dtype(self, name: str) -> str:
        """Return the element type of a constant or tensor."""
        return self.constants[name].dtype.name if name in self.constants else self.kinds[name].dtype

    def _add_constant(self, array: Array, near: str) -> str:
        """Add a constant and return its name. Raises NotTaken for one that is too large."""
        if array.nbytes > MAX_CONSTANT_BYTES:
            raise NotTaken("a constant would be too large")
        name = self.graph.fresh(near)
        self.constants[name] = np.asarray(array, order="C")
        return name

    def _add_operation(self, op: str, inputs: tuple[str, ...], attributes: dict[str, Any], name: str) -> str:
        """Add an operation that makes the tensor `name`, and return that name."""
        shape = OPERATORS[op].shape([self._shape(operand) for operand in inputs], attributes)
        dtype = OPERATORS[op].dtype(list(map(self._dtype, inputs)))
        self.operations.append(
            GraphOp(op, inputs, (name,), tuple(sorted(attributes.items())), self._note_for(op, inputs))
        )
        self.kinds[name] = TensorKind(tuple(shape), dtype)
        return name

    def _note_for(self, op: str, inputs: tuple[str, ...]) -> Note:
        """Return what the writer must know of a new operation: scales for a product, the quantisation around an
        operator that moves bytes. Raises NotTaken where no scales give the multipliers.
        """
        if op == "phases" and self.notes:  # the quantisation with which the matched convolution reads the operand
            zeros = (operation.inputs[1] for operation in self.match.matched
                     if operation.op == "convolve" and operation.inputs[0] == inputs[0])  # fmt: skip
            return next((Quantisation(self.notes[0].x, int(self.constants[zero])) for zero in zeros), None)
        if op == "interleave":  # the quantisation with which a new product makes the operand
            for operation in self.operations:
                if operation.outputs[0] == inputs[0] and isinstance(operation.note, OriginalForm):
                    return Quantisation(operation.note.y, int(self.constants[operation.inputs[-1]]))
            return None
        if op != "requantise":
            return next((operation.note for operation in self.match.matched if operation.op == op), None)
        note = realised(self.constants[inputs[1]], self.notes)
        if note is None:
            raise NotTaken("no scales of ONNX have these multipliers")
        return note


def rewrite(graph: BytesGraph, match: Match) -> BytesGraph:
    """Apply the rule of `match` to `graph` where it fits, and return the new graph. Raises NotTaken."""
    builder = GraphBuilder(graph, match)
    replaced_by: dict[str, str] = {}
    for root, term in zip(match.roots, match.rule.after):
        name = root.outputs[0]
        result = builder.build(term, name)
        if result != name:
            replaced_by[name] = result
    removed = {root.outputs[0] for root in match.roots}
    remaining = [operation for operation in graph.operations if operation.outputs[0] not in removed]
    places = {operation.outputs[0]: place for place, operation in enumerate(graph.operations)}
    first = min(places[name] for name in removed)
    before = [operation for operation in remaining if places[operation.outputs[0]] < first]
    operations = [*before, *builder.operations, *remaining[len(before) :]]
    new_graph = replace(graph, constants=builder.constants, kinds=builder.kinds)
    return new_graph.ordered(_rename_tensors(new_graph, operations, replaced_by))


def _rename_tensors(graph: BytesGraph, operations: Sequence[GraphOp], replaced_by: dict[str, str]) -> list[GraphOp]:
    """Let readers of each removed tensor read the one that replaces it. An output of the model keeps its name: there
    the replacement is renamed. Raises NotTaken.
    """
    new_names: dict[str, str] = {}
    for removed, replacement in replaced_by.items():
        if removed in graph.outputs:
            if replacement in graph.outputs or replacement in graph.inputs or replacement in graph.constants:
                raise NotTaken("an output of the model would be another tensor")
            new_names[replacement] = removed
        else:
            new_names[removed] = replacement
    for operation in operations:
        if operation.op == ONNX:
            own_inputs = len(onnx.NodeProto.FromString(operation["proto"]).input)  # further ones: of its subgraphs
            if any(name in new_names for name in operation.inputs[own_inputs:]):
                raise NotTaken("a tensor is read inside of an operator")
    return [
        replace(
            operation, inputs=tuple(new_names.get(name, name) for name in operation.inputs),
            outputs=tuple(new_names.get(name, name) for name in operation.outputs),
        ) for operation in operations
    ]  # fmt: skip
