"""Enumerate the terms of a vocabulary, and find equal ones by the fingerprint of their values on random tensors.

All numbers are random integers modulo 2^32, also those that stand for bytes, so that no two terms are equal because
their numbers are small. Rounding and functions of bytes are hash functions of their arguments, so that nothing passes
through them by accident. Larger terms are made of one term of each class of equal terms only: those of the others
follow from the equations between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.superoptimise.generation.vocabularies import AlgebraVocabulary
from celosia.compiler.superoptimise.operators import OPERATORS
from celosia.compiler.superoptimise.shape_demands import demands
from celosia.compiler.superoptimise.sizes import value_of
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term, walk

Ints = NDArray[np.int32]
DRAWS = 3
"""Number of random choices of all sizes for which terms are compared."""


class IllegalTerm(Exception):
    """Raised for a term whose operators do not accept operands of the drawn sizes."""


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


@dataclass
class Draw:
    """One choice of the sizes of a vocabulary, with random tensors. values: of the sizes. known: values of terms that
    larger ones are made of.
    """

    values: Mapping[str, Any]
    seed: int
    known: dict[Term, Ints] = field(default_factory=dict)

    def evaluate(self, term: Term) -> Ints:
        """Compute a term; a leaf is random numbers that depend on its name and the seed only. Raises IllegalTerm."""
        if term in self.known:
            return self.known[term]
        if isinstance(term, Leaf):
            rng = np.random.default_rng([self.seed, *term.name.encode()])
            numbers = rng.integers(-(1 << 31), 1 << 31, value_of(term.shape, self.values)).astype(np.int32)
            return self.known.setdefault(term, numbers)
        operands = [self.evaluate(arg) for arg in term.args]
        attributes: dict[str, Any] = {name: value_of(value, self.values) for name, value in term.attributes}
        if not all(demands(term.op, [operand.shape for operand in operands], attributes)):
            raise IllegalTerm
        if term.op == "requantise":
            acc, multipliers, zero = operands
            return hash_arrays(acc, np.expand_dims(multipliers, tuple(range(1, acc.ndim - attributes["axis"]))), zero)
        if term.op == "map":
            return stand_in(attributes["f"], *operands)
        return np.asarray(OPERATORS[term.op].evaluate(operands, attributes))


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
        self.draws = [Draw(vocabulary.draw(rng), seed) for seed in range(DRAWS)]
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
        except IllegalTerm:
            return None
        digest = hashlib.blake2b(digest_size=16)
        for tensor in tensors:
            digest.update(f"{tensor.shape}".encode() + np.ascontiguousarray(tensor).tobytes())
        first = self.classes.setdefault(digest.digest(), term)
        if first is term and remember:
            for draw, tensor in zip(self.draws, tensors):
                draw.known[term] = tensor
        return first
