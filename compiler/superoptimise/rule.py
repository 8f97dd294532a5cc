"""A rewriting rule: terms before and after, the conditions under which they are equal, and hints for the proof."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize, SizeArithmetic, SizeOf
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term, walk


@dataclass(frozen=True)
class Monotone:
    """A condition: the function is increasing, so that it never exchanges the order of two bytes."""

    function: ByteFunction


@dataclass(frozen=True)
class Absorbs:
    """A condition: `outer` leaves all results of `inner` unchanged, outer(inner(v)) = inner(v)."""

    outer: ByteFunction
    inner: ByteFunction


@dataclass(frozen=True)
class IsIdentity:
    """A condition: the function returns its operand unchanged."""

    function: ByteFunction


Condition = SizeOf | Monotone | Absorbs | IsIdentity
"""What a rule may require besides its terms: a comparison of sizes, or a property of a function of bytes."""


@dataclass(frozen=True)
class SumCut:
    """A hint for the proof: cut the sums of one side into several sums along one counter.

    side: 0 for `before`, 1 for `after`. counter: which of the counters of a sum. every: if not 0, one sum for each
    remainder of (counter + `offset`) divided by `every`. runs: (length, number) instead, to cut the counter's range
    into `number` runs of `length`.
    """

    side: int
    counter: int
    every: int = 0
    offset: int = 0
    runs: tuple[Dim, int] = (0, 0)

    def __str__(self) -> str:
        return f"cut {self.side} {self.counter} {self.every} {self.offset} ({self.runs[0]}, {self.runs[1]})"


@dataclass(frozen=True)
class RewriteRule:
    """A rule: the terms `before` may be replaced by the terms `after`, one for one.

    name: shown in the derivation of a model, and the key of its proof. says: the law as a sentence for users. where:
    conditions on sizes and functions, beside the demands of the operators. tidy: whether the rule simplifies, so that
    the search applies it wherever it fits; others are applied only where they save cycles.

    Hints for the proof, which the prover checks: shifts: offsets besides 0 by which counters of a sum may differ
    between both sides. cuts: how to cut sums.
    """

    name: str
    says: str
    before: tuple[Term, ...]
    after: tuple[Term, ...]
    where: tuple[Condition, ...] = ()
    shifts: tuple[Dim, ...] = ()
    cuts: tuple[SumCut, ...] = ()
    tidy: bool = False

    @cached_property
    def text(self) -> str:
        """The text of which the proof is a proof: terms, tensors, sizes, conditions and hints."""
        names = {each.name: each for each in self.leaves}
        tensors = [f"{each} {_format_shape(each)}{' constant' * each.constant}" for each in names.values()]
        sizes = [f"{each.name} in {each.among}" for each in self.choices]
        sizes += [f"{each.name} >= {each.least}" for each in self.sizes]
        sides = [f"{a}  ->  {b}" for a, b in zip(self.before, self.after)]
        conditions = [str(each) for each in self.where]
        hints = [*(f"shift {each}" for each in self.shifts), *map(str, self.cuts)]
        return "\n".join([*sides, *tensors, *sizes, *conditions, *hints])

    @cached_property
    def operators(self) -> frozenset[str]:
        """The operators that a graph must have for `before` to fit. `spread` only occurs in constants, which have no
        operators.
        """
        operators = {each.op for term in self.before for each in walk(term) if isinstance(each, Composed)}
        return frozenset(operators - {"spread"})

    @cached_property
    def digest(self) -> str:
        """Digest of `text`, by which the file of proofs knows the rule."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:24]

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The tensors that both sides name; one that occurs twice is listed twice."""
        return [each for term in (*self.before, *self.after) for each in walk(term) if isinstance(each, Leaf)]

    @cached_property
    def _dims(self) -> list[Any]:
        """All open sizes and choices that the rule names, with repetitions."""
        terms = [each for term in (*self.before, *self.after) for each in walk(term)]
        values: list[Any] = [each.shape for each in terms if isinstance(each, Leaf)]
        values += [value for each in terms if isinstance(each, Composed) for _, value in each.attributes]
        values += [each for each in self.where if isinstance(each, SizeOf)]
        return list(_named_sizes_in((*values, *self.shifts, *(each.runs for each in self.cuts))))

    @cached_property
    def choices(self) -> list[OneOf]:
        """The sizes that are one of a few values (OneOf), each once."""
        return list(dict.fromkeys(each for each in self._dims if isinstance(each, OneOf)))

    @cached_property
    def sizes(self) -> list[OpenSize]:
        """The open sizes that the rule names, each once."""
        return list(dict.fromkeys(each for each in self._dims if isinstance(each, OpenSize)))

    def cases(self) -> Iterator[dict[str, Any]]:
        """Yield the values of the choices by name, for each combination; each is a case of the proof."""
        for values in product(*(each.among for each in self.choices)):
            yield {each.name: value for each, value in zip(self.choices, values)}


def _format_shape(leaf: Leaf) -> str:
    """Format the shape of a tensor for `RewriteRule.text`."""
    return f"[{', '.join(map(str, leaf.shape))}]"


def _named_sizes_in(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the open sizes and choices in nested tuples of sizes and expressions."""
    for value in values:
        if isinstance(value, tuple):
            yield from _named_sizes_in(value)
        elif isinstance(value, SizeOf):
            yield from _named_sizes_in((value.left, value.right))
        elif isinstance(value, SizeArithmetic):
            yield value
