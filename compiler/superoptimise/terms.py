"""Terms of the algebra of bytes: what rules are written in.

Values are tensors of bytes, accumulators (int32, which wrap) and constants. There are no scales: who reads bytes knows
what they mean, and each operator holds the multipliers, zero points and tables that it computes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from celosia.compiler.superoptimise.sizes import Dim


@dataclass(frozen=True)
class Leaf:
    """A tensor that a match binds. constant: it must be known when a model is optimised."""

    name: str
    shape: tuple[Dim, ...]
    constant: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ByteFunction:
    """A function of single bytes that a match binds: a table, or what adds two quantised numbers."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Composed:
    """An operator of terms."""

    op: str
    args: tuple[Term, ...]
    attributes: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.attributes))

    def __hash__(self) -> int:
        return self._hash  # of terms below, which sets and dicts ask for again and again

    def __reduce__(self) -> tuple[Any, ...]:
        return Composed, (self.op, self.args, self.attributes)  # without the hash, which is of one process

    def __getitem__(self, name: str) -> Any:
        return dict(self.attributes)[name]

    def __str__(self) -> str:
        given = [str(arg) for arg in self.args] + [f"{name}={_text(value)}" for name, value in self.attributes]
        return f"{self.op}({', '.join(given)})"


Term: TypeAlias = Leaf | Composed


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    return str(value)


def apply(op: str, *args: Term, **attributes: Any) -> Composed:
    """`op` of `args`."""
    return Composed(op, args, tuple(sorted(attributes.items())))


def walk(term: Term) -> Iterator[Term]:
    """`term` and all below it, each as often as it stands there."""
    yield term
    if isinstance(term, Composed):
        for arg in term.args:
            yield from walk(arg)


def is_constant(term: Term) -> bool:
    """Whether `term` is a constant of a model, or made of constants alone."""
    return all(leaf.constant for leaf in walk(term) if isinstance(leaf, Leaf))


def functions_of(terms: Iterable[Term]) -> Iterator[ByteFunction]:
    """Yield the functions of bytes in `terms`, each as often as it stands there."""
    for each in (each for term in terms for each in walk(term)):
        if isinstance(each, Composed):
            yield from (value for _, value in each.attributes if isinstance(value, ByteFunction))
