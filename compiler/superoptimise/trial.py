"""A rule on random small tensors, in onnxruntime's arithmetic: not a proof, but what a proof must agree with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.superoptimise.legal import demands
from celosia.compiler.superoptimise.operators import OPERATORS
from celosia.compiler.superoptimise.rule import Absorbs, IsIdentity, Monotone, RewriteRule
from celosia.compiler.superoptimise.sizes import SizeOf, value_of
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term, walk

Array = NDArray[Any]
SPREAD, WIDE = 5, 80
"""By how much a size may be more than the least one; and one of them, where that gives none that are legal."""
TRIES = 3000
"""Random sizes that are looked at for legal ones."""


class NoTrial(Exception):
    """A rule for which no legal sizes were found."""


@dataclass
class _Drawn:
    rng: np.random.Generator
    values: dict[str, Any]
    arrays: dict[str, Array] = field(default_factory=dict)
    functions: dict[str, Callable[..., Array]] = field(default_factory=dict)

    def array(self, leaf: Leaf, role: str) -> Array:
        if leaf.name not in self.arrays:
            shape = value_of(leaf.shape, self.values)
            self.arrays[leaf.name] = _random(self.rng, shape, role)
        return self.arrays[leaf.name]

    def evaluate(self, term: Term, role: str = "bytes") -> Array:
        if isinstance(term, Leaf):
            return self.array(term, role)
        roles = _ROLES.get(term.op, (role,) * len(term.args))
        args = [self.evaluate(arg, each) for arg, each in zip(term.args, roles)]
        given = {name: self._attribute(value) for name, value in term.attributes}
        if not all(demands(term.op, [arg.shape for arg in args], given)):
            raise NoTrial
        return OPERATORS[term.op].evaluate(args, given)

    def _attribute(self, value: Any) -> Any:
        return self.functions[value.name] if isinstance(value, ByteFunction) else value_of(value, self.values)


_PRODUCT = ("bytes", "bytes", "bytes", "bytes", "int32")
_ROLES = {
    "convolve": _PRODUCT, "multiply": _PRODUCT, "requantise": ("int32", "scale", "bytes"), "plus": ("int32", "int32"),
    "real_deviation": ("bytes", "scale", "scale"), "real_normalised": (*("bytes",) * 4, "scale", "scale"),
}  # fmt: skip


def _random(rng: np.random.Generator, shape: tuple[int, ...], role: str) -> Array:
    if role == "scale":
        return rng.uniform(0.0005, 0.02, shape).astype(np.float32)
    if role == "int32":
        return (
            rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)
            if rng.random() < 0.1
            else rng.integers(-3000, 3000, shape).astype(np.int32)
        )
    return rng.integers(-128, 128, shape).astype(np.int8)


def difference(rule: RewriteRule, seed: int) -> str:
    """Say how the sides of a rule differ on random tensors of random small sizes; "" where they do not. NoTrial."""
    rng = np.random.default_rng(seed)
    drawn = _Drawn(rng, sizes_of(rule, rng))
    drawn.functions = _functions(rule, rng)
    before = [drawn.evaluate(term) for term in rule.before]
    try:
        after = [drawn.evaluate(term) for term in rule.after]
    except (NoTrial, IndexError):
        return "an operator is asked for what there is not"
    for number, (a, b) in enumerate(zip(before, after)):
        if a.shape != b.shape:
            return f"shapes of term {number}: {a.shape} and {b.shape}"
        if a.dtype != b.dtype or not _equal(a, b):
            return f"{int(np.count_nonzero(a != b))} elements of term {number}"
    return ""


def _equal(a: Array, b: Array) -> bool:
    """Whether all numbers are the same; of real ones, which are float64 here, to a billionth."""
    return bool(np.allclose(a, b, 1e-9, 1e-9) if a.dtype == np.float64 else np.array_equal(a, b))


def sizes_of(rule: RewriteRule, rng: np.random.Generator) -> dict[str, Any]:
    """Values of its sizes for which the side before is legal and its conditions hold. NoTrial."""
    for number in range(TRIES):
        values: dict[str, Any] = {each.name: each.among[rng.integers(len(each.among))] for each in rule.choices}
        values |= {each.name: int(each.least + rng.integers(SPREAD)) for each in rule.sizes}
        if 2 * number > TRIES and rule.sizes:
            wide = rule.sizes[rng.integers(len(rule.sizes))]
            values[wide.name] = int(wide.least + rng.integers(WIDE))
        if all(value_of(each, values) for each in rule.where if isinstance(each, SizeOf)) and _legal(rule, values):
            return values
    raise NoTrial


def _legal(rule: RewriteRule, values: dict[str, Any]) -> bool:
    leaves = [value_of(each.shape, values) for term in rule.before for each in walk(term) if isinstance(each, Leaf)]
    if any(size < 1 for shape in leaves for size in shape):
        return False
    try:
        return all(_shape(term, values) is not None for term in rule.before)
    except NoTrial:
        return False


def _shape(term: Term, values: dict[str, Any]) -> tuple[int, ...]:
    if isinstance(term, Leaf):
        return tuple(value_of(term.shape, values))
    assert isinstance(term, Composed)
    shapes = [_shape(arg, values) for arg in term.args]
    given = {name: value_of(value, values) for name, value in term.attributes}
    if not all(demands(term.op, shapes, given)):
        raise NoTrial
    return tuple(OPERATORS[term.op].shape(shapes, given))


def _functions(rule: RewriteRule, rng: np.random.Generator) -> dict[str, Callable[..., Array]]:
    """Random ones with the properties that the rule asks for."""
    terms = [each for term in (*rule.before, *rule.after) for each in walk(term)]
    names = {
        v.name
        for each in terms
        if isinstance(each, Composed)
        for _, v in each.attributes
        if isinstance(v, ByteFunction)
    }
    tables = {name: rng.integers(-128, 128, (256, 256)).astype(np.int8) for name in sorted(names)}
    for condition in rule.where:
        match condition:
            case Monotone(f):
                tables[f.name] = np.sort(tables[f.name], axis=0)
            case IsIdentity(f):
                tables[f.name] = np.repeat(np.arange(-128, 128).astype(np.int8)[:, None], 256, 1)
            case Absorbs(f, g):
                made = tables[g.name][:, 128].astype(np.int64)
                tables[f.name][made + 128, 128] = made
    return {name: _looked_up(table) for name, table in tables.items()}


def _looked_up(table: Array) -> Callable[..., Array]:
    def function(a: Array, b: Array | None = None) -> Array:
        other = np.zeros_like(a) if b is None else b
        return np.asarray(table[(a.astype(np.int64) + 128) % 256, (other.astype(np.int64) + 128) % 256])

    return function
