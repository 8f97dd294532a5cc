"""Loop partitioning: split loops where conditions inside them change, so that most iterations test nothing.

    for i in 10:                                   y[0] = 0
      y[i] = 1 <= i and i < 9 ? x[i - 1] : 0   ->  for i in 8: y[i + 1] = x[i]
                                                   y[9] = 0

Padding, concatenation and the guards of uneven tiles become copies without tests. (TVM's LoopPartition.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from celosia.compiler.expr.affine import depends_on, from_linear, interval, linear
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Let, Stmt, block, exprs, map_accesses
from celosia.compiler.expr.nodes import INDEX, Axis, Binary, Const, Expr, Load, Select, Var, select
from celosia.compiler.expr.regions import statements
from celosia.compiler.expr.walk import walk

MAX_PARTS = 5
"""Limit of the loops that one loop becomes; beyond it the code would grow more than the tests cost."""


def partition(function: Function) -> Function:
    """Split the serial and unrolled loops of a function where a condition on their variable changes."""
    return replace(function, body=_partition(function.body))


def _partition(stmt: Stmt) -> Stmt:
    """Split a statement, if it is a loop, and the loops inside it."""
    match stmt:
        case For(Axis() as var, extent, body, "serial" | "unrolled" as kind):
            points = _split_points(var, body)
            if not 0 < len(points) < MAX_PARTS:
                return For(var, extent, _partition(body), kind)
            return block(*(_loop_part(var, body, kind, low, high) for low, high in pairwise((0, *points, extent))))
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


def _loop_part(var: Axis, body: Stmt, kind: str, low: int, high: int) -> Stmt:
    """Return the iterations from `low` to `high` (exclusive), with the conditions that they decide folded."""
    if high - low == 1:
        return _partition(_fold_conditions(copy_with_values(body, {var: Const(low, INDEX)})))
    part = Axis(var.name, extent=high - low, reduce=var.reduce)
    return For(part, high - low, _partition(_fold_conditions(copy_with_values(body, {var: part + low}))), kind)


def copy_with_values(stmt: Stmt, values: dict[Var, Expr]) -> Stmt:
    """Copy `stmt` with variables replaced by `values`, and with buffers of its own for what it allocates."""
    fresh = {s.tensor: replace(s.tensor) for s in statements(stmt) if isinstance(s, Alloc)}

    def replace_node(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.tensor in fresh:
            return Load(fresh[e.tensor], e.index)
        return values.get(e) if isinstance(e, Var) else None

    copy = map_accesses(stmt, replace_node, lambda tensor, index: (fresh.get(tensor, tensor), index))
    return _rewrite_statements(copy, lambda s: replace(s, tensor=fresh[s.tensor]) if isinstance(s, Alloc) else s)


def _fold_conditions(stmt: Stmt) -> Stmt:
    """Remove the conditions of `stmt` whose outcome follows from the extents of loops."""
    return _rewrite_statements(map_accesses(stmt, fold_condition), _take_branch)


def fold_condition(e: Expr) -> Expr | None:
    """Return the value of `e` where it follows from the extents of loops, else None. A callback of walk.rewrite."""
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


def _take_branch(stmt: Stmt) -> Stmt:
    """Return the branch of an If that runs, where its condition is constant; other statements are unchanged."""
    match stmt:
        case If(Const(value), body, orelse):
            return body if value else block() if orelse is None else orelse
    return stmt


def _rewrite_statements(stmt: Stmt, change: Callable[[Stmt], Stmt]) -> Stmt:
    """Apply `change` to each statement, inner ones first."""

    def rewrite_inner(s: Stmt) -> Stmt:
        return _rewrite_statements(s, change)

    match stmt:
        case For(var, extent, body, kind):
            return change(For(var, extent, rewrite_inner(body), kind))
        case Block(body):
            return change(block(*map(rewrite_inner, body)))
        case Alloc(body=body):
            return change(replace(stmt, body=rewrite_inner(body)))
        case Let(var, value, body):
            return change(Let(var, value, rewrite_inner(body)))
        case If(cond, body, orelse):
            return change(If(cond, rewrite_inner(body), None if orelse is None else rewrite_inner(orelse)))
    return change(stmt)


def _split_points(var: Axis, body: Stmt) -> list[int]:
    """Return the iterations of `var` at which comparisons begin or cease to hold for all inner loops."""
    points: set[int] = set()
    for comparison in _comparisons(body):
        terms = linear(comparison.a - comparison.b)
        factor = terms.pop(var, 0)
        rest = from_linear(terms)
        span = interval(rest)
        if not factor or span is None or depends_on(rest, var):
            continue
        # The comparison holds where factor * var + rest < 0, or <= 0, which is < 1.
        for end in (bound if comparison.op == "lt" else bound - 1 for bound in span):
            points.add(-(end // factor) if factor > 0 else end // -factor + 1)
    return sorted(point for point in points if 0 < point < var.extent)


def _comparisons(stmt: Stmt) -> Iterator[Binary]:
    """Yield the index comparisons that select values or guard statements inside `stmt`."""
    conditions = [s.cond for s in statements(stmt) if isinstance(s, If)]
    values = (node for s in statements(stmt) for e in exprs(s) for node in walk(e))
    conditions += [node.cond for node in values if isinstance(node, Select)]
    for condition in conditions:
        for node in walk(condition):
            if isinstance(node, Binary) and node.op in ("lt", "le") and node.a.dtype == INDEX:
                yield node
