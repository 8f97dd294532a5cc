"""Terms of the algebra of bytes, in which rules are written: tensors, and operators applied to them.

Tensors hold bytes, int32 accumulators (which wrap) or constants. They have no scales: each operator holds the
multipliers, zero points and tables that it computes with (operators.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from celosia.compiler.superoptimise.sizes import Dim


@dataclass(frozen=True)
class Leaf:
    """A tensor that a match binds to one of the graph. constant: only a constant of the model can be bound to it."""

    name: str
    shape: tuple[Dim, ...]
    constant: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ByteFunction:
    """A function of single bytes that a match binds: a table of one byte, or a quantised Add or Mul of two."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Composed:
    """The operator `op` (a key of OPERATORS) applied to terms. attributes: (name, value), sorted by name."""

    op: str
    args: tuple[Term, ...]
    attributes: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.attributes))

    def __hash__(self) -> int:
        return self._hash  # computed once, as it visits all terms below

    def __reduce__(self) -> tuple[Any, ...]:
        return Composed, (self.op, self.args, self.attributes)  # without the hash, which differs in each process

    def __getitem__(self, name: str) -> Any:
        return dict(self.attributes)[name]

    def __str__(self) -> str:
        texts = [str(arg) for arg in self.args] + [
            f"{name}={_format_attribute(value)}" for name, value in self.attributes
        ]
        return f"{self.op}({', '.join(texts)})"


Term: TypeAlias = Leaf | Composed


def _format_attribute(value: Any) -> str:
    """Format the value of an attribute as in Python; proofs depend on this text (RewriteRule.text)."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_format_attribute, value))}{',' * (len(value) == 1)})"
    return str(value)


def apply(op: str, *args: Term, **attributes: Any) -> Composed:
    """Return the term that applies `op` to `args`."""
    return Composed(op, args, tuple(sorted(attributes.items())))


def walk(term: Term) -> Iterator[Term]:
    """Yield `term` and all terms below it, outermost first; a term that occurs twice is yielded twice."""
    yield term
    if isinstance(term, Composed):
        for arg in term.args:
            yield from walk(arg)


def is_constant(term: Term) -> bool:
    """Return whether `term` is a constant of a model, or computed from constants alone."""
    return all(leaf.constant for leaf in walk(term) if isinstance(leaf, Leaf))


def functions_of(terms: Iterable[Term]) -> Iterator[ByteFunction]:
    """Yield the functions of bytes that operators in `terms` name; one that occurs twice is yielded twice."""
    for subterm in (subterm for term in terms for subterm in walk(term)):
        if isinstance(subterm, Composed):
            yield from (value for _, value in subterm.attributes if isinstance(value, ByteFunction))
