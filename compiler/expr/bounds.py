"""Find the part of a tensor that a piece of code reads: what compute_at needs to compute no more than that."""

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
"""For each dimension the first index, in terms of the loops around, and how many."""


def statements(stmt: Stmt) -> Iterator[Stmt]:
    """`stmt` and every statement inside it."""
    stack = [stmt]
    while stack:
        here = stack.pop()
        yield here
        stack.extend(reversed(children(here)))


def structure(e: Expr) -> Hashable:
    """Equal for expressions that are written alike over the same variables."""
    below = tuple(structure(c) for c in e.children())
    match e:
        case Var():
            return id(e)
        case Const(value, dtype):
            return value, dtype
        case Binary(op):
            return op, *below
        case Load(tensor):
            return id(tensor), *below
        case Call(name, _, dtype):
            return name, dtype, *below
        case Cast(_, dtype):
            return "cast", dtype, *below
        case Select():
            return "select", *below
    return id(e)


class Sums:
    """Index expressions as sums whose equal atoms are one object, so that they cancel."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Expr] = {}

    def __call__(self, e: Expr) -> Linear:
        out: Linear = {}
        for atom, k in linear(e).items():
            one = None if atom is None else self._known.setdefault(structure(atom), atom)
            out[one] = out.get(one, 0) + k
        return {atom: k for atom, k in out.items() if k}

    def difference(self, a: Expr, b: Expr) -> Expr:
        """a - b, with what cancels gone."""
        total = self(a)
        for atom, k in self(b).items():
            total[atom] = total.get(atom, 0) - k
        return from_linear({atom: k for atom, k in total.items() if k})


def region(tensor: Tensor, stmt: Stmt) -> Region | None:
    """The smallest box that holds all elements of `tensor` that `stmt` reads; None where it reads none.

    Indices that a condition keeps from being read may lie outside the tensor; the box does not.
    """
    nodes = [n for s in statements(stmt) for e in exprs(s) if tensor in loaded(e) for n in walk(e)]
    reads = [n for n in nodes if isinstance(n, Load) and n.tensor is tensor]
    if not reads:
        return None
    inside: set[Expr] = {s.var for s in statements(stmt) if isinstance(s, For)}
    inside |= {axis for n in nodes if isinstance(n, Reduce) for axis in n.axes}
    sums = Sums()
    return tuple(
        _span([sums(read.index[d]) if len(read.index) == len(tensor.shape) else None for read in reads], size, inside)
        for d, size in enumerate(tensor.shape)
    )


def _span(indices: list[Linear | None], size: int, inside: set[Expr]) -> tuple[Expr, int]:
    """(first, count) of what these indices of one dimension of `size` reach over all loops in `inside`."""
    whole: tuple[Expr, int] = Const(0, INDEX), size
    bases: list[Linear] = []
    low, high = [], []
    for terms in indices:
        if terms is None:
            return whole
        base: Linear = {a: k for a, k in terms.items() if a is not None and not any(n in inside for n in walk(a))}
        span = interval(from_linear({a: k for a, k in terms.items() if a not in base}))
        if span is None:
            return whole
        bases.append(base)
        low.append(span[0])
        high.append(span[1])
    if any(base != bases[0] for base in bases):
        spans = [interval(from_linear(base)) for base in bases]
        if any(span is None for span in spans):
            return whole
        low = [a + s[0] for a, s in zip(low, spans) if s is not None]
        high = [b + s[1] for b, s in zip(high, spans) if s is not None]
        bases = [{}]
    first, count = from_linear({**bases[0], None: min(low)}), max(high) - min(low) + 1
    if count >= size:
        return whole
    reach = interval(first)
    if reach is None or reach[0] < 0:
        first = maximum(first, 0)
    if reach is None or reach[1] > size - count:
        first = minimum(first, size - count)
    return first, count


def simplified(e: Expr) -> Expr:
    """An index without needless divisions: (i * 8 + j) // 8 is i where j < 8."""
    return rewrite(e, _undivided)


def _undivided(node: Expr) -> Expr | None:
    """What a division of indices is without it, or None."""
    if not isinstance(node, Binary) or node.op not in ("floordiv", "mod") or node.dtype != INDEX:
        return None
    if not isinstance(node.b, Const) or node.b.value <= 0:
        return None
    by = int(node.b.value)
    whole: Linear = {}
    rest: Linear = {}
    for atom, k in linear(node.a).items():
        q = k // by if k % by == 0 or atom is None else 0
        if q:
            whole[atom] = q
        if k - q * by:
            rest[atom] = k - q * by
    span = interval(from_linear(rest))
    if span is None or span[0] < 0 or span[1] >= by:
        return None
    return from_linear(whole if node.op == "floordiv" else rest)


def divisor(e: Expr) -> int:
    """A number that certainly divides the index `e`; 0 where it is 0.

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
