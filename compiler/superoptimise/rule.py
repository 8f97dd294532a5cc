"""A rewriting rule: terms before and after, the sizes for which they are equal, and hints for the proof."""

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
    """A condition: the function never swaps two bytes."""

    function: ByteFunction


@dataclass(frozen=True)
class Absorbs:
    """A condition: what `outer` makes of a result of `inner` is that result."""

    outer: ByteFunction
    inner: ByteFunction


@dataclass(frozen=True)
class IsIdentity:
    """A condition: the function gives back what it is given."""

    function: ByteFunction


Condition = SizeOf | Monotone | Absorbs | IsIdentity


@dataclass(frozen=True)
class SumCut:
    """For the proof: sums of one side are cut into several along the counter in place `counter`.

    every: into those with each remainder of a division by this number, of what is `offset` more. runs: (length,
    number), into that many runs.
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
    """`after` may stand where `before` does, one term for each.

    name: for whom the derivation is shown. says: the law, in a sentence. where: what must hold beside. shifts: where
    the counters of a sum may begin on one side, beside 0; cuts: of sums; both for the proof. tidy: it is taken wherever
    it fits, as it leaves less to do; the others are weighed.
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
        """The text that its proof depends on."""
        names = {each.name: each for each in self.leaves}
        given = [f"{each} {_shape(each)}{' constant' * each.constant}" for each in names.values()]
        sizes = [f"{each.name} in {each.among}" for each in self.choices]
        sizes += [f"{each.name} >= {each.least}" for each in self.sizes]
        sides = [f"{a}  ->  {b}" for a, b in zip(self.before, self.after)]
        conditions = [str(each) for each in self.where]
        hints = [*(f"shift {each}" for each in self.shifts), *map(str, self.cuts)]
        return "\n".join([*sides, *given, *sizes, *conditions, *hints])

    @cached_property
    def operators(self) -> frozenset[str]:
        """Operators of `before` that a graph has; `spread` is of constants, which have no operator."""
        every = {each.op for term in self.before for each in walk(term) if isinstance(each, Composed)}
        return frozenset(every - {"spread"})

    @cached_property
    def digest(self) -> str:
        """Digest of `text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:24]

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The tensors that it names, as often as it does."""
        return [each for term in (*self.before, *self.after) for each in walk(term) if isinstance(each, Leaf)]

    @cached_property
    def _dims(self) -> list[Any]:
        terms = [each for term in (*self.before, *self.after) for each in walk(term)]
        found: list[Any] = [each.shape for each in terms if isinstance(each, Leaf)]
        found += [value for each in terms if isinstance(each, Composed) for _, value in each.attributes]
        found += [each for each in self.where if isinstance(each, SizeOf)]
        return list(_flat((*found, *self.shifts, *(each.runs for each in self.cuts))))

    @cached_property
    def choices(self) -> list[OneOf]:
        """The sizes that are one of a few values."""
        return list(dict.fromkeys(each for each in self._dims if isinstance(each, OneOf)))

    @cached_property
    def sizes(self) -> list[OpenSize]:
        """The others that it names."""
        return list(dict.fromkeys(each for each in self._dims if isinstance(each, OpenSize)))

    def cases(self) -> Iterator[dict[str, Any]]:
        """Yield all values of its choices."""
        for values in product(*(each.among for each in self.choices)):
            yield {each.name: value for each, value in zip(self.choices, values)}


def _shape(leaf: Leaf) -> str:
    return f"[{', '.join(map(str, leaf.shape))}]"


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        elif isinstance(value, SizeOf):
            yield from _flat((value.left, value.right))
        elif isinstance(value, SizeArithmetic):
            yield value
