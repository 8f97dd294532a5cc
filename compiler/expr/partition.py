"""Loops cut where conditions inside them change, so that no condition is left in most iterations.

    for i in 10:                                   y[0] = 0
      y[i] = 1 <= i and i < 9 ? x[i - 1] : 0   ->  for i in 8: y[i + 1] = x[i]
                                                   y[9] = 0

Padding, concatenation and the guards of uneven tiles come to copies without tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from celosia.compiler.expr.affine import depends, from_linear, interval, linear
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Let, Stmt, block, exprs, map_accesses
from celosia.compiler.expr.nodes import INDEX, Axis, Binary, Const, Expr, Load, Select, Var, select
from celosia.compiler.expr.walk import walk

PARTS = 5
"""Into how many one loop is cut at most."""


def partition(function: Function) -> Function:
    """Cut serial and unrolled loops."""
    return replace(function, body=_partition(function.body))


def _partition(stmt: Stmt) -> Stmt:
    match stmt:
        case For(Axis() as var, extent, body, "serial" | "unrolled" as kind):
            points = _points(var, body)
            if not 0 < len(points) < PARTS:
                return For(var, extent, _partition(body), kind)
            return block(*(_part(var, body, kind, low, high) for low, high in pairwise((0, *points, extent))))
        case For(var, extent, body, kind):
            return For(var, extent, _partition(body), kind)
        case Block(body):
            return block(*map(_partition, body))
        case Alloc(tensor, body, scope):
            return Alloc(tensor, _partition(body), scope)
        case Let(var, value, body):
            return Let(var, value, _partition(body))
        case If(cond, body, orelse):
            return If(cond, _partition(body), None if orelse is None else _partition(orelse))
    return stmt


def _part(var: Axis, body: Stmt, kind: str, low: int, high: int) -> Stmt:
    """The iterations from `low` to `high` of the loop."""
    if high - low == 1:
        return _partition(_decided(renamed(body, {var: Const(low, INDEX)})))
    part = Axis(var.name, extent=high - low, reduce=var.reduce)
    return For(part, high - low, _partition(_decided(renamed(body, {var: part + low}))), kind)


def renamed(stmt: Stmt, values: dict[Var, Expr]) -> Stmt:
    """A copy of `stmt` with these values of variables, and memory of its own for what it allocates."""
    fresh = {s.tensor: replace(s.tensor) for s in statements(stmt) if isinstance(s, Alloc)}

    def change(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.tensor in fresh:
            return Load(fresh[e.tensor], e.index)
        return values.get(e) if isinstance(e, Var) else None

    copy = map_accesses(stmt, change, lambda tensor, index: (fresh.get(tensor, tensor), index))
    return _rebuilt(copy, lambda s: replace(s, tensor=fresh[s.tensor]) if isinstance(s, Alloc) else s)


def _decided(stmt: Stmt) -> Stmt:
    """`stmt` without the conditions whose outcome follows from the extents of loops."""
    return _rebuilt(map_accesses(stmt, outcome), _taken)


def outcome(e: Expr) -> Expr | None:
    """What `e` itself comes to, where that follows from the extents of loops; else None."""
    match e:
        case Binary("lt" | "le" as op, a, b) if a.dtype == INDEX:
            span = interval(from_linear(linear(a - b)))
            limit = 0 if op == "lt" else 1
            if span is not None and (span[1] < limit or span[0] >= limit):
                return Const(span[1] < limit, "bool")
        case Binary("mod", a, Const(size)) if e.dtype == INDEX:
            span = interval(from_linear(linear(a)))
            return a if span is not None and span[0] >= 0 and span[1] < size else None
        case Binary("and", Const(value), other) | Binary("and", other, Const(value)) if e.dtype == "bool":
            return other if value else Const(False, "bool")
        case Binary("or", Const(value), other) | Binary("or", other, Const(value)) if e.dtype == "bool":
            return Const(True, "bool") if value else other
        case Select(Const() as cond, a, b):
            return select(cond, a, b)
    return None


def _taken(stmt: Stmt) -> Stmt:
    match stmt:
        case If(Const(value), body, orelse):
            return body if value else block() if orelse is None else orelse
    return stmt


def _rebuilt(stmt: Stmt, change: Callable[[Stmt], Stmt]) -> Stmt:
    """`stmt` with each statement inside it, and then itself, changed."""

    def go(s: Stmt) -> Stmt:
        return _rebuilt(s, change)

    match stmt:
        case For(var, extent, body, kind):
            return change(For(var, extent, go(body), kind))
        case Block(body):
            return change(block(*map(go, body)))
        case Alloc(body=body):
            return change(replace(stmt, body=go(body)))
        case Let(var, value, body):
            return change(Let(var, value, go(body)))
        case If(cond, body, orelse):
            return change(If(cond, go(body), None if orelse is None else go(orelse)))
    return change(stmt)


def _points(var: Axis, body: Stmt) -> list[int]:
    """Where comparisons inside the loop over `var` begin or cease to hold whatever the loops inside it do."""
    found: set[int] = set()
    for comparison in _comparisons(body):
        terms = linear(comparison.a - comparison.b)
        factor = terms.pop(var, 0)
        rest = from_linear(terms)
        span = interval(rest)
        if not factor or span is None or depends(rest, var):
            continue
        low, high = (s if comparison.op == "lt" else s - 1 for s in span)  # it holds where factor * var + rest < 0
        for end in (low, high):
            found.add(-(end // factor) if factor > 0 else end // -factor + 1)
    return sorted(point for point in found if 0 < point < var.extent)


def _comparisons(stmt: Stmt) -> Iterator[Binary]:
    """Comparisons of positions that select or guard something inside `stmt`."""
    conditions = [s.cond for s in statements(stmt) if isinstance(s, If)]
    values = (node for s in statements(stmt) for e in exprs(s) for node in walk(e))
    conditions += [node.cond for node in values if isinstance(node, Select)]
    for condition in conditions:
        for node in walk(condition):
            if isinstance(node, Binary) and node.op in ("lt", "le") and node.a.dtype == INDEX:
                yield node
