"""Trial of a rule: evaluate both sides on small random tensors, in onnxruntime's arithmetic.

It proves nothing, but every proof must agree with it, which tests check. The generator draws sizes here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    functions_of,
    value_of,
    walk,
)

Array = NDArray[Any]
SIZE_RANGE, WIDE_RANGE = 5, 80
"""Number of values, from the least on, that each size is drawn from; and for a single size, where the former gives no
legal sizes.
"""
TRIES = 3000
"""Number of draws after which no legal sizes are assumed to exist."""


class NoTrial(Exception):
    """Raised where no legal sizes are found, or a term is not legal for the sizes."""


@dataclass
class TermValues:
    """Values of terms for one choice of sizes: of random tensors, and of what operators make of them.

    values: of the sizes. draw: makes the tensor of a leaf from its name, shape and role (as in TermOperator).
    functions: functions of bytes by name. known: values of leaves, and of terms that larger ones are made of.
    """

    values: Mapping[str, Any]
    draw: Callable[[str, tuple[int, ...], str], Array]
    functions: Mapping[str, Callable[..., Array]] = field(default_factory=dict)
    known: dict[Term, Array] = field(default_factory=dict)

    def evaluate(self, term: Term, role: str = "bytes") -> Array:
        """Compute a term. role: what its leaf is, if it is one. Raises NoTrial."""
        if isinstance(term, Leaf) and term not in self.known:
            self.known[term] = self.draw(term.name, value_of(term.shape, self.values), role)
        if term in self.known:
            return self.known[term]
        assert isinstance(term, Composed)
        roles = OPERATORS[term.op].roles or (role,) * len(term.args)
        operands = [self.evaluate(arg, arg_role) for arg, arg_role in zip(term.args, roles)]
        attributes = {
            name: self.functions.get(value.name, value)
            if isinstance(value, ByteFunction)
            else value_of(value, self.values)
            for name, value in term.attributes
        }
        if not all(demands(term.op, [operand.shape for operand in operands], attributes)):
            raise NoTrial
        return self.apply(term.op, operands, attributes)

    def apply(self, op: str, operands: list[Array], attributes: dict[str, Any]) -> Array:
        """Apply an operator to operands that it accepts."""
        return OPERATORS[op].evaluate(operands, attributes)


def _random_array(rng: np.random.Generator, shape: tuple[int, ...], role: str) -> Array:
    """Draw a tensor: small positive scales, bytes of the complete range, or accumulators, one in ten of the complete
    range.
    """
    if role == "scale":
        return rng.uniform(0.0005, 0.02, shape).astype(np.float32)
    if role == "int32":
        low, high = (-(1 << 31), 1 << 31) if rng.random() < 0.1 else (-3000, 3000)
        return rng.integers(low, high, shape).astype(np.int32)
    return rng.integers(-128, 128, shape).astype(np.int8)


def difference(rule: RewriteRule, seed: int) -> str:
    """Say how the sides of a rule differ on random tensors of random small sizes; "" where they do not. Raises
    NoTrial.
    """
    rng = np.random.default_rng(seed)
    values, functions = sizes_of(rule, rng), _random_functions(rule, rng)
    operands = TermValues(values, lambda name, shape, role: _random_array(rng, shape, role), functions)
    before = [operands.evaluate(term) for term in rule.before]
    try:
        after = [operands.evaluate(term) for term in rule.after]
    except (NoTrial, IndexError):
        return "an operator is asked for what there is not"
    for number, (a, b) in enumerate(zip(before, after)):
        if a.shape != b.shape:
            return f"shapes of term {number}: {a.shape} and {b.shape}"
        if a.dtype != b.dtype or not _are_equal(a, b):
            return f"{int(np.count_nonzero(a != b))} elements of term {number}"
    return ""


def _are_equal(a: Array, b: Array) -> bool:
    """Return whether all numbers are equal; those of rules in real numbers, which are float64 here, up to 1e-9."""
    return bool(np.allclose(a, b, 1e-9, 1e-9) if a.dtype == np.float64 else np.array_equal(a, b))


def sizes_of(rule: RewriteRule, rng: np.random.Generator) -> dict[str, Any]:
    """Draw values for the sizes and choices of a rule for which `before` is legal and the conditions hold. Raises
    NoTrial.
    """
    for number in range(TRIES):
        values: dict[str, Any] = {choice.name: choice.among[rng.integers(len(choice.among))] for choice in rule.choices}
        values |= {size.name: int(size.least + rng.integers(SIZE_RANGE)) for size in rule.sizes}
        if 2 * number > TRIES and rule.sizes:
            wide = rule.sizes[rng.integers(len(rule.sizes))]
            values[wide.name] = int(wide.least + rng.integers(WIDE_RANGE))
        conditions = (condition for condition in rule.where if isinstance(condition, SizeOf))
        if all(value_of(condition, values) for condition in conditions) and _is_legal(rule, values):
            return values
    raise NoTrial


def _is_legal(rule: RewriteRule, values: dict[str, Any]) -> bool:
    """Return whether the tensors and operators of `before` are legal for these sizes."""
    leaves = [leaf for term in rule.before for leaf in walk(term) if isinstance(leaf, Leaf)]
    if any(size < 1 for leaf in leaves for size in value_of(leaf.shape, values)):
        return False
    try:
        return all(_shape_of(term, values) is not None for term in rule.before)
    except NoTrial:
        return False


def _shape_of(term: Term, values: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a term. Raises NoTrial where an operator does not accept its operands."""
    if isinstance(term, Leaf):
        return tuple(value_of(term.shape, values))
    assert isinstance(term, Composed)
    shapes = [_shape_of(arg, values) for arg in term.args]
    attributes = {name: value_of(value, values) for name, value in term.attributes}
    if not all(demands(term.op, shapes, attributes)):
        raise NoTrial
    return tuple(OPERATORS[term.op].shape(shapes, attributes))


def _random_functions(rule: RewriteRule, rng: np.random.Generator) -> dict[str, Callable[..., Array]]:
    """Draw functions of one or two bytes with the properties that the rule requires."""
    names = {function.name for function in functions_of((*rule.before, *rule.after))}
    tables = {name: rng.integers(-128, 128, (256, 256)).astype(np.int8) for name in sorted(names)}
    for condition in rule.where:
        match condition:
            case Monotone(f):
                tables[f.name] = np.sort(tables[f.name], axis=0)
            case IsIdentity(f):
                tables[f.name] = np.repeat(np.arange(-128, 128).astype(np.int8)[:, None], 256, 1)
            case Absorbs(f, g):
                results = tables[g.name][:, 128].astype(np.int64)
                tables[f.name][results + 128, 128] = results
    return {name: _function_of_table(table) for name, table in tables.items()}


def _function_of_table(table: Array) -> Callable[..., Array]:
    """Return the function of one or two bytes that looks up table[a + 128, b + 128]; b is 0 where it is missing."""

    def look_up(a: Array, b: Array | None = None) -> Array:
        """Look up the result for each byte, or pair of bytes."""
        other = np.zeros_like(a) if b is None else b
        return np.asarray(table[(a.astype(np.int64) + 128) % 256, (other.astype(np.int64) + 128) % 256])

    return look_up
