"""All terms of a vocabulary up to a number of operators, and which of them are equal on random tensors.

Fingerprints are of whole numbers modulo 2^32, which bytes are here, too, so that nothing is equal because it is small;
what rounds scatters them. Terms of more operators are made of one for each class of equal ones: what the others would
make follows from the equation that they are in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.superoptimise.legal import demands
from celosia.compiler.superoptimise.operators import OPERATORS
from celosia.compiler.superoptimise.sizes import Dim, value_of
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term

Ints = NDArray[np.int32]
SIZES = 3
"""Choices of all sizes under which terms are compared."""
Drawn = Callable[[np.random.Generator], dict[str, Any]]
"""Values of all sizes of a vocabulary."""


class NotLegal(Exception):
    """Of a term whose operators do not take these sizes."""


def scattered(*values: Any) -> Ints:
    """Another number for each, of all bits of all of them.

    >>> bool(scattered(np.int32(1)) == scattered(np.int32(2)))
    False
    """
    found: Any = np.uint32(0x9E3779B9)
    with np.errstate(over="ignore"):
        for value in values:
            found = (np.asarray(value).astype(np.uint32) ^ found) * np.uint32(0x85EBCA6B)
            found = (found ^ (found >> np.uint32(13))) * np.uint32(0xC2B2AE35)
            found = found ^ (found >> np.uint32(16))
    return np.asarray(found).view(np.int32)


def _salted(name: str) -> Callable[..., Ints]:
    salt = np.int32(sum(map(ord, name)))
    return lambda *values: scattered(salt, *values)


def function_of(name: str) -> Callable[..., Ints]:
    """What stands for a function of bytes: one whose name begins with m never swaps two numbers; one with k does
    not either, and leaves alone what it has made."""
    if name.startswith("m"):
        return lambda values: np.asarray((values >> 1) + (values > 12345) * np.int32(1000003))
    if name.startswith("k"):
        return lambda values: np.clip(values, -(1 << 29), 1 << 29)
    return _salted(name)


@dataclass
class Chosen:
    """Sizes, and the tensors that leaves are then."""

    values: Mapping[str, Any]
    seed: int
    leaves: dict[str, Ints] = field(default_factory=dict)

    def leaf(self, leaf: Leaf) -> Ints:
        """Random numbers, the same ones whenever asked."""
        if leaf.name not in self.leaves:
            rng = np.random.default_rng([self.seed, *leaf.name.encode()])
            shape = value_of(leaf.shape, self.values)
            self.leaves[leaf.name] = rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)
        return self.leaves[leaf.name]

    def computed(self, op: str, args: Sequence[Ints], attributes: tuple[tuple[str, Any], ...]) -> Ints:
        """What `op` makes. NotLegal."""
        given = {name: self._attribute(value) for name, value in attributes}
        if not all(demands(op, [arg.shape for arg in args], given)):
            raise NotLegal
        if op == "requantise":
            along = [1] * args[0].ndim
            along[given["axis"]] = -1
            return scattered(args[0], args[1].reshape(along), args[2])
        return np.asarray(OPERATORS[op].evaluate(args, given))

    def _attribute(self, value: Any) -> Any:
        return function_of(value.name) if isinstance(value, ByteFunction) else value_of(value, self.values)


@dataclass(eq=False)
class Candidate:
    """A term. shape: its sizes. size: operators that run. args: those that its last operator takes, without constants.
    known: its tensors, by the place of the choice of sizes."""

    term: Term
    shape: tuple[Dim, ...]
    size: int
    args: tuple[Candidate, ...] = ()
    known: dict[int, Ints] = field(default_factory=dict)

    @cached_property
    def given(self) -> tuple[Leaf, ...]:
        """The tensors that it is made of, as often as they stand there."""
        if isinstance(self.term, Leaf):
            return (self.term,)
        return tuple(leaf for arg in self.args for leaf in arg.given)

    @property
    def constant(self) -> bool:
        """Whether it is one of a model."""
        return isinstance(self.term, Leaf) and self.term.constant


def _special(each: Candidate) -> tuple[int, int]:
    """How many of its tensors stand there before, and, less, how many shapes they have."""
    return len(each.given) - len(set(each.given)), -len({leaf.shape for leaf in each.given})


Maker = Callable[..., Iterator[Candidate]]
"""What operators make of one candidate or of two."""


@dataclass(frozen=True)
class AlgebraVocabulary:
    """leaves: tensors that are given. one, two: what makes terms of one and of two others. draw: its sizes. most:
    operators of a term."""

    name: str
    leaves: tuple[Leaf, ...]
    one: tuple[Maker, ...]
    two: tuple[Maker, ...]
    draw: Drawn
    most: int = 3


@dataclass
class Enumeration:
    """classes: the first term of each class, by fingerprint. first: of each term that was looked at, that first one.
    members: of a class, by its first one."""

    vocabulary: AlgebraVocabulary
    tick: Callable[[], None] = lambda: None
    chosen: list[Chosen] = field(default_factory=list)
    classes: dict[bytes, Candidate] = field(default_factory=dict)
    first: dict[Term, Candidate] = field(default_factory=dict)
    members: dict[Term, list[Term]] = field(default_factory=dict)
    looked_at: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(27)
        self.chosen = [Chosen(self.vocabulary.draw(rng), seed) for seed in range(SIZES)]

    def equations(self) -> Iterator[tuple[Candidate, Candidate]]:
        """(a term, an earlier one that it seems to be), those of few operators first."""
        sized: list[list[Candidate]] = [[]]
        for leaf in self.vocabulary.leaves:
            candidate = Candidate(leaf, leaf.shape, 0)
            self._new(candidate)
            sized[0].append(candidate)
        for size in range(1, self.vocabulary.most + 1):
            sized.append([])
            for candidate in self._made(sized, size):
                self.looked_at += 1
                self.tick()
                try:
                    earlier = self._new(candidate)
                except NotLegal:
                    continue
                if earlier is candidate:
                    sized[-1].append(candidate)
                elif earlier is not None:
                    yield candidate, earlier
                if size == self.vocabulary.most:
                    candidate.known.clear()

    def _made(self, sized: list[list[Candidate]], size: int) -> list[Candidate]:
        """Those of `size` operators; first those of many tensors, of whose equations others are cases."""
        found: list[Candidate] = []
        for maker in self.vocabulary.one:
            for each in sized[size - 1]:
                found += maker(each)
        for maker in self.vocabulary.two:
            for left in range(size):
                for a in sized[left]:
                    for b in sized[size - 1 - left]:
                        found += maker(a, b)
        return sorted(found, key=_special)

    def _new(self, candidate: Candidate) -> Candidate | None:
        """The first one of its class, itself where there is none; None where it only seemed so. NotLegal."""
        if candidate.term in self.first:
            return None
        key = self._print(candidate, 0)
        earlier = self.classes.setdefault(key, candidate)
        if earlier is not candidate:
            try:
                if any(self._print(candidate, k) != self._print(earlier, k) for k in range(1, SIZES)):
                    return None
            except NotLegal:
                return None
        self.first[candidate.term] = earlier
        self.members.setdefault(earlier.term, []).append(candidate.term)
        return earlier

    def _print(self, candidate: Candidate, k: int) -> bytes:
        values = self.values(candidate, k)
        return hashlib.blake2b(f"{values.shape}".encode() + values.tobytes(), digest_size=12).digest()

    def values(self, candidate: Candidate, k: int) -> Ints:
        """The tensor under the sizes in place k. NotLegal."""
        if k not in candidate.known:
            known = {id(arg.term): self.values(arg, k) for arg in candidate.args}
            candidate.known[k] = self._evaluated(candidate.term, k, known)
        return candidate.known[k]

    def _evaluated(self, term: Term, k: int, known: Mapping[int, Ints]) -> Ints:
        if id(term) in known:
            return known[id(term)]
        if isinstance(term, Leaf):
            return self.chosen[k].leaf(term)
        args = [self._evaluated(arg, k, known) for arg in term.args]
        return self.chosen[k].computed(term.op, args, term.attributes)

    def representative(self, term: Term) -> Candidate | None:
        """The first one of its class; None for a term of which nothing is known. Inner terms need not be first ones."""
        return self.first.get(self.settled(term))

    def settled(self, term: Term) -> Term:
        """`term`, the terms below it being the first of their classes."""
        if term in self.first or not isinstance(term, Composed):
            return term
        args = tuple(self._settled_below(arg) for arg in term.args)
        return Composed(term.op, args, term.attributes)

    def _settled_below(self, term: Term) -> Term:
        settled = self.settled(term)
        found = self.first.get(settled)
        return settled if found is None else found.term
