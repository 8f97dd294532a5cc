"""Apply a rule to a term, as terms with open sizes: how one equation follows from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from celosia.compiler.superoptimise.generation.linear import plain
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize, SizeOf, value_of
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term, walk

Shapes = Mapping[Term, tuple[Dim, ...]]
KINDS = {"m": "mk", "k": "k"}
"""Of functions of which a rule asks something, those that have it, by how their names begin."""


@dataclass
class _Bound:
    shapes: Shapes
    terms: dict[str, Term] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, ByteFunction] = field(default_factory=dict)
    later: list[tuple[Any, Any]] = field(default_factory=list)

    def fits(self, pattern: Term, term: Term) -> bool:
        """Whether `term` may be `pattern`; binds what it must be then."""
        if isinstance(pattern, Leaf):
            return self._given(pattern, term)
        if not isinstance(term, Composed) or term.op != pattern.op or len(term.args) != len(pattern.args):
            return False
        if not all(self.fits(a, b) for a, b in zip(pattern.args, term.args)):
            return False
        given = dict(term.attributes)
        return all(self._value(value, given[name]) for name, value in pattern.attributes)

    def _given(self, leaf: Leaf, term: Term) -> bool:
        if leaf.constant and not is_constant(term):
            return False
        if leaf.name in self.terms:
            return self.terms[leaf.name] == term
        self.terms[leaf.name] = term
        shape = term.shape if isinstance(term, Leaf) else self.shapes.get(term)
        return shape is None or self._value(leaf.shape, shape)

    def _value(self, wanted: Any, found: Any) -> bool:
        if isinstance(wanted, tuple):
            return isinstance(found, tuple) and len(wanted) == len(found) and all(map(self._value, wanted, found))
        if isinstance(wanted, ByteFunction):
            if found.name[0] not in KINDS.get(wanted.name[0], found.name[0]):
                return False
            return bool(self.functions.setdefault(wanted.name, found) == found)
        if isinstance(wanted, OpenSize):
            if isinstance(found, int) and found < wanted.least:
                return False
            return bool(self.sizes.setdefault(wanted.name, found) == found)
        if isinstance(wanted, OneOf):
            if (
                found != wanted
                and found not in wanted.among
                and not set(getattr(found, "among", "?")) <= set(wanted.among)
            ):
                return False
            return bool(self.sizes.setdefault(wanted.name, found) == found)
        if isinstance(wanted, SizeOf):
            self.later.append((wanted, found))
            return True
        return bool(wanted == found)

    def settled(self) -> bool:
        """Whether sums are what they must be; a part of one that nothing else says is what is left."""
        for wanted, found in self.later:
            try:
                if plain(value_of(wanted, self.sizes)) != plain(found):
                    return False
            except KeyError:
                if not self._left(wanted, found):
                    return False
        return True

    def _left(self, wanted: SizeOf, found: Any) -> bool:
        left, right = wanted.left, wanted.right
        if wanted.operation == "+" and isinstance(found, SizeOf) and found.operation == "+":
            return all(self._value(a, b) for a, b in ((left, found.left), (right, found.right)))
        return False

    def made(self, term: Term) -> Term:
        """What stands for `term`. KeyError where something in it is not bound."""
        if isinstance(term, Leaf):
            return self.terms[term.name]
        attributes = tuple((name, self._attribute(value)) for name, value in term.attributes)
        return Composed(term.op, tuple(map(self.made, term.args)), attributes)

    def _attribute(self, value: Any) -> Any:
        return self.functions[value.name] if isinstance(value, ByteFunction) else plain(value_of(value, self.sizes))


def is_constant(term: Term) -> bool:
    """Whether a model has it, or it is made of such alone."""
    return all(leaf.constant for leaf in walk(term) if isinstance(leaf, Leaf))


def rewritten_once(before: Term, after: Term, term: Term, shapes: Shapes) -> Term | None:
    """`term`, which `before` fits, as `after`; None where it does not fit, or where something in `after` is open."""
    bound = _Bound(shapes)
    if bound.fits(before, term) and bound.settled():
        try:
            return bound.made(after)
        except KeyError:
            pass
    return None


Tops = tuple[str, tuple[str, ...]]
"""An operator and those of its operands; "" is one that may be any."""


@dataclass
class Equalities:
    """Equal terms that rewrite others at their top, both ways, by the operators that a term must have for that."""

    _sides: dict[Tops, list[tuple[Term, Term]]] = field(default_factory=dict)

    def add(self, one: Term, other: Term) -> None:
        """Either may stand for the other; what would make more of any tensor does so with those of its own kind."""
        for before, after in ((one, other), (other, one)):
            if isinstance(before, Composed):
                tops = before.op, tuple(_operator(arg) for arg in before.args)
            else:
                tops = _operator(after), ()
            self._sides.setdefault(tops, []).append((before, after))

    def rewritings(self, term: Composed, shapes: Shapes) -> Iterator[Term]:
        """What `term` is, too."""
        below = product(*(dict.fromkeys(("", _operator(arg))) for arg in term.args))
        for tops in ((term.op, ()), *((term.op, each) for each in below)):
            for before, after in self._sides.get(tops, ()):
                made = rewritten_once(before, after, term, shapes)
                if made is not None:
                    yield made


def _operator(term: Term) -> str:
    return term.op if isinstance(term, Composed) else ""
