"""The language of rules: symbolic sizes, terms over operators, and rules of two sides.

Sizes: open whole numbers, and sums, products and comparisons of them. A rule is written for tensors of any size. While
it is matched with a graph, the names of its sizes stand for ints; while it is proved, for integer terms of z3.

Terms: tensors, and operators applied to them. Tensors hold bytes, int32 accumulators (which wrap), floats or constants.
They have no scales: each operator holds the multipliers, zero points and tables that it computes with (operators/).

Rules: terms before and after, the conditions under which they are equal, and hints for the proof.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

Values = Mapping[str, Any]
"""The value of each named size: an int, or an integer term of z3."""


def quotient(a: Any, b: Any) -> Any:
    """Divide `a` by `b` > 0 and round down. For ints this is Python's `//`, for terms of z3 it is their `/`."""
    return a // b if isinstance(a, int) and isinstance(b, int) else a / b


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": quotient, "==": operator.eq,
    "!=": operator.ne, "<=": operator.le, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class SizeArithmetic:
    """Base class of sizes: `+`, `-`, `*`, `//`, `<=` and `<` build a SizeOf instead of computing a number.

    `==` compares the expressions themselves; a condition that two sizes are equal is `SizeOf("==", a, b)`."""

    def __add__(self, other: Dim) -> SizeOf:
        return SizeOf("+", self, other)

    def __radd__(self, other: Dim) -> SizeOf:
        return SizeOf("+", other, self)

    def __sub__(self, other: Dim) -> SizeOf:
        return SizeOf("-", self, other)

    def __mul__(self, other: Dim) -> SizeOf:
        return SizeOf("*", self, other)

    def __rmul__(self, other: Dim) -> SizeOf:
        return SizeOf("*", other, self)

    def __floordiv__(self, other: Dim) -> SizeOf:
        return SizeOf("//", self, other)

    def __le__(self, other: Dim) -> SizeOf:
        return SizeOf("<=", self, other)

    def __lt__(self, other: Dim) -> SizeOf:
        return SizeOf("<", self, other)


@dataclass(frozen=True)
class OpenSize(SizeArithmetic):
    """A size that a match binds to an int. least: its least value, which is 1 for dimensions and 0 for padding."""

    name: str
    least: int = 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class OneOf(SizeArithmetic):
    """A choice that a match binds to one of the values `among`, such as strides; the prover tries each of them."""

    name: str
    among: tuple[Any, ...]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SizeOf(SizeArithmetic):
    """An expression: `operation` (a key of _OPERATIONS) of two sizes; with a comparison it is a condition."""

    operation: str
    left: Dim
    right: Dim

    def __str__(self) -> str:
        return f"({self.left} {self.operation} {self.right})"


Dim: TypeAlias = int | SizeArithmetic
"""A size in a rule: an int, an open size, or an expression of sizes."""


def value_of(dim: Any, values: Values) -> Any:
    """Evaluate the size `dim` with the values of its names. KeyError for a name without a value.

    Tuples are evaluated element by element; attributes that are no sizes, such as bools, are returned unchanged.

    >>> value_of(2 * OpenSize("o") + 1, {"o": 4})
    9
    """
    if isinstance(dim, (OpenSize, OneOf)):
        return values[dim.name]
    if isinstance(dim, SizeOf):
        return _OPERATIONS[dim.operation](value_of(dim.left, values), value_of(dim.right, values))
    if isinstance(dim, tuple):
        return tuple(value_of(element, values) for element in dim)
    return dim


def bind(dim: Any, value: Any, values: dict[str, Any]) -> bool:
    """Return whether `dim` can equal `value`, and add the values that its open names then have to `values`.

    Where the result is False, `values` may have gained some names all the same."""
    if isinstance(dim, tuple):
        return (
            isinstance(value, tuple) and len(dim) == len(value) and all(bind(d, v, values) for d, v in zip(dim, value))
        )
    if isinstance(dim, (OpenSize, OneOf)):
        if dim.name in values:
            return bool(values[dim.name] == value)
        if isinstance(dim, OneOf) and value not in dim.among:
            return False
        if isinstance(dim, OpenSize) and not (isinstance(value, int) and value >= dim.least):
            return False
        values[dim.name] = value
        return True
    try:
        return bool(value_of(dim, values) == value)
    except KeyError:  # an expression with a name that has no value yet
        return _solve_for_open_size(dim, value, values)


def _solve_for_open_size(dim: Any, value: Any, values: dict[str, Any]) -> bool:
    """Return whether the expression `dim` equals `value` for some value of its only open size, and bind it to that.

    The expression is taken to be linear: its values at 0 and 1 give the solution, which is then checked. False where
    several sizes are open."""
    open_sizes = _open_sizes_in(dim, values)
    if len(open_sizes) != 1 or not isinstance(value, int):
        return False
    (size,) = open_sizes
    if isinstance(size, OneOf):
        solutions = [choice for choice in size.among if value_of(dim, {**values, size.name: choice}) == value]
        return len(solutions) == 1 and bind(size, solutions[0], values)
    at_zero, at_one = (value_of(dim, {**values, size.name: number}) for number in (0, 1))
    if at_zero == at_one or (value - at_zero) % (at_one - at_zero):
        return False
    solution = (value - at_zero) // (at_one - at_zero)
    if value_of(dim, {**values, size.name: solution}) != value:
        return False
    return bind(size, solution, values)


def _open_sizes_in(dim: Any, values: Values) -> set[OpenSize | OneOf]:
    """Return the sizes in the expression `dim` that have no value yet."""
    if isinstance(dim, SizeOf):
        return _open_sizes_in(dim.left, values) | _open_sizes_in(dim.right, values)
    return {dim} if isinstance(dim, (OpenSize, OneOf)) and dim.name not in values else set()


# Terms ---------------------------------------------------------------------------------------------------------------


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


# Rules ---------------------------------------------------------------------------------------------------------------


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
        names = {leaf.name: leaf for leaf in self.leaves}
        tensors = [
            f"{leaf} [{', '.join(map(str, leaf.shape))}]{' constant' * leaf.constant}" for leaf in names.values()
        ]
        sizes = [f"{choice.name} in {choice.among}" for choice in self.choices]
        sizes += [f"{size.name} >= {size.least}" for size in self.sizes]
        sides = [f"{a}  ->  {b}" for a, b in zip(self.before, self.after)]
        conditions = [str(condition) for condition in self.where]
        hints = [*(f"shift {shift}" for shift in self.shifts), *map(str, self.cuts)]
        return "\n".join([*sides, *tensors, *sizes, *conditions, *hints])

    @cached_property
    def operators(self) -> frozenset[str]:
        """The operators that a graph must have for `before` to fit. `spread` only occurs in constants, which have no
        operators.
        """
        operators = {part.op for term in self.before for part in walk(term) if isinstance(part, Composed)}
        return frozenset(operators - {"spread"})

    @cached_property
    def digest(self) -> str:
        """Digest of `text`, by which the file of proofs knows the rule."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:24]

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The tensors that both sides name; one that occurs twice is listed twice."""
        return [part for term in (*self.before, *self.after) for part in walk(term) if isinstance(part, Leaf)]

    @cached_property
    def _dims(self) -> list[Any]:
        """All open sizes and choices that the rule names, with repetitions."""
        terms = [part for term in (*self.before, *self.after) for part in walk(term)]
        values: list[Any] = [term.shape for term in terms if isinstance(term, Leaf)]
        values += [value for term in terms if isinstance(term, Composed) for _, value in term.attributes]
        values += [condition for condition in self.where if isinstance(condition, SizeOf)]
        return list(_named_sizes_in((*values, *self.shifts, *(cut.runs for cut in self.cuts))))

    @cached_property
    def choices(self) -> list[OneOf]:
        """The sizes that are one of a few values (OneOf), each once."""
        return list(dict.fromkeys(size for size in self._dims if isinstance(size, OneOf)))

    @cached_property
    def sizes(self) -> list[OpenSize]:
        """The open sizes that the rule names, each once."""
        return list(dict.fromkeys(size for size in self._dims if isinstance(size, OpenSize)))

    def cases(self) -> Iterator[dict[str, Any]]:
        """Yield the values of the choices by name, for each combination; each is a case of the proof."""
        for values in product(*(choice.among for choice in self.choices)):
            yield {choice.name: value for choice, value in zip(self.choices, values)}


def _named_sizes_in(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the open sizes and choices in nested tuples of sizes and expressions."""
    for value in values:
        if isinstance(value, tuple):
            yield from _named_sizes_in(value)
        elif isinstance(value, SizeOf):
            yield from _named_sizes_in((value.left, value.right))
        elif isinstance(value, SizeArithmetic):
            yield value
