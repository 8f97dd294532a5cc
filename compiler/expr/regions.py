"""Regions of tensors that loops read, and simplification of indices.

compute_at needs the region: it computes a producer, in each iteration of the consumer's loop, no larger than that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import gcd

from celosia.compiler.expr.affine import Linear, from_linear, interval, linear
from celosia.compiler.expr.loops import For, Stmt, children, exprs
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Tensor,
    Var,
    maximum,
    minimum,
)
from celosia.compiler.expr.walk import loaded, rewrite, walk

Region = tuple[tuple[Expr, int], ...]
"""For each dimension of a tensor (first index, number of indices); the first is an expression of the loops around."""


def statements(stmt: Stmt) -> Iterator[Stmt]:
    """Yield `stmt` and every statement inside it, in program order."""
    stack = [stmt]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(children(current)))


def structure(e: Expr) -> Hashable:
    """Return a hashable key that is equal for expressions of equal structure over the same variables.

    Nodes compare by identity, so two equal indices that were built separately need it to be recognised.
    """
    operands = tuple(structure(child) for child in e.children())
    match e:
        case Var():
            return id(e)
        case Const(value, dtype):
            return value, dtype
        case Binary(op):
            return op, *operands
        case Load(tensor):
            return id(tensor), *operands
        case Call(name, _, dtype):
            return name, dtype, *operands
        case Cast(_, dtype):
            return "cast", dtype, *operands
        case Select():
            return "select", *operands
    return id(e)


class SharedAtoms:
    """Converts index expressions to linear forms whose structurally equal atoms are one object, so that they cancel."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Expr] = {}

    def __call__(self, e: Expr) -> Linear:
        """Return the linear form of `e` over shared atoms."""
        terms: Linear = {}
        for atom, k in linear(e).items():
            shared = None if atom is None else self._known.setdefault(structure(atom), atom)
            terms[shared] = terms.get(shared, 0) + k
        return {atom: k for atom, k in terms.items() if k}

    def difference(self, a: Expr, b: Expr) -> Expr:
        """Return a - b after equal atoms have cancelled."""
        total = self(a)
        for atom, k in self(b).items():
            total[atom] = total.get(atom, 0) - k
        return from_linear({atom: k for atom, k in total.items() if k})


def region(tensor: Tensor, stmt: Stmt) -> Region | None:
    """Return the smallest box that holds all elements of `tensor` that `stmt` reads, or None where it reads none.

    An index that a condition keeps from being read may lie outside the tensor; the box never does.
    """
    nodes = [n for s in statements(stmt) for e in exprs(s) if tensor in loaded(e) for n in walk(e)]
    reads = [n for n in nodes if isinstance(n, Load) and n.tensor is tensor]
    if not reads:
        return None
    inside: set[Expr] = {s.var for s in statements(stmt) if isinstance(s, For)}
    inside |= {axis for n in nodes if isinstance(n, Reduce) for axis in n.axes}
    sums = SharedAtoms()
    return tuple(
        _dimension_range(
            [sums(read.index[d]) if len(read.index) == len(tensor.shape) else None for read in reads], size, inside
        )
        for d, size in enumerate(tensor.shape)
    )


def _dimension_range(indices: list[Linear | None], size: int, inside: set[Expr]) -> tuple[Expr, int]:
    """Return (first index, count) of the part of one dimension that `indices` reach over all loops in `inside`.

    size: of the dimension. An index is None where it is an element number. Returns the complete dimension where bounds
    are not known.
    """
    complete: tuple[Expr, int] = Const(0, INDEX), size
    bases: list[Linear] = []
    low, high = [], []
    for terms in indices:
        if terms is None:
            return complete
        base: Linear = {a: k for a, k in terms.items() if a is not None and not any(n in inside for n in walk(a))}
        span = interval(from_linear({a: k for a, k in terms.items() if a not in base}))
        if span is None:
            return complete
        bases.append(base)
        low.append(span[0])
        high.append(span[1])
    if any(base != bases[0] for base in bases):
        spans = [interval(from_linear(base)) for base in bases]
        if any(span is None for span in spans):
            return complete
        low = [a + s[0] for a, s in zip(low, spans) if s is not None]
        high = [b + s[1] for b, s in zip(high, spans) if s is not None]
        bases = [{}]
    first, count = from_linear({**bases[0], None: min(low)}), max(high) - min(low) + 1
    if count >= size:
        return complete
    first_span = interval(first)
    if first_span is None or first_span[0] < 0:
        first = maximum(first, 0)
    if first_span is None or first_span[1] > size - count:
        first = minimum(first, size - count)
    return first, count


def simplify_index(e: Expr) -> Expr:
    """Remove needless divisions from an index: (i * 8 + j) // 8 is i where j < 8."""
    return rewrite(e, _without_division)


def _without_division(node: Expr) -> Expr | None:
    """Return the quotient or remainder that a division of indices provably equals, or None."""
    if not isinstance(node, Binary) or node.op not in ("floordiv", "mod") or node.dtype != INDEX:
        return None
    if not isinstance(node.b, Const) or node.b.value <= 0:
        return None
    by = int(node.b.value)
    quotient: Linear = {}
    remainder: Linear = {}
    for atom, k in linear(node.a).items():
        q = k // by if k % by == 0 or atom is None else 0
        if q:
            quotient[atom] = q
        if k - q * by:
            remainder[atom] = k - q * by
    span = interval(from_linear(remainder))
    if span is None or span[0] < 0 or span[1] >= by:
        return None
    return from_linear(quotient if node.op == "floordiv" else remainder)


def divisor(e: Expr) -> int:
    """Return a number that certainly divides the index `e`, 0 where it is always 0, for the alignment of vectors.

    >>> from celosia.compiler.expr import Axis
    >>> divisor(Axis("i", extent=3) * 8 + 12)
    4
    """
    match e:
        case Const(value):
            return abs(int(value))
        case Axis(extent=1):
            return 0
        case Binary("add" | "sub" | "min" | "max", a, b) | Select(_, a, b):
            return gcd(divisor(a), divisor(b))
        case Binary("mul", a, b):
            return divisor(a) * divisor(b)
    return 1
