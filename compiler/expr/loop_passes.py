"""Rewrites of lowered loops: loop fusion and loop partitioning.

Fusion (`fuse_loops`) merges loops that follow each other, so that values are still in cache when the next loop reads
them. Partitioning (`partition`) splits loops where conditions inside them change, so that most iterations test nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from celosia.compiler.expr.affine import Linear, flatten, from_linear, interval, linear, offset
from celosia.compiler.expr.loops import (
    MAX_LOCAL_BYTES,
    Alloc,
    Block,
    For,
    Function,
    If,
    Let,
    Stmt,
    Store,
    Update,
    block,
    children,
    exprs,
    map_accesses,
    sequence,
    statements,
    tensors_read,
    tensors_written,
)
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Binary,
    Const,
    Expr,
    Load,
    Select,
    Tensor,
    Var,
    depends_on,
    is_float,
    maximum,
    minimum,
    select,
    walk,
)


def fuse_loops(function: Function) -> Function:
    """Fuse neighbouring outer loops where each iteration reads only elements that the same iteration wrote.

        for i in 8:                          for i in 8:
          for j in 4: t[i*4 + j] = ...   ->    for j in 4: t[j] = ...
        for i in 8:                            for j in 4: y[i*4 + j] = t[j] ...
          for j in 4: y[i*4 + j] = t[i*4 + j] ...

    Temporaries of such loops shrink to what one iteration needs.
    """
    body, temporaries = function.body, []
    while isinstance(body, Alloc) and body.scope == "workspace":
        temporaries.append(body.tensor)
        body = body.body
    nests = merge(sequence(body))
    buffers = []
    for tensor in temporaries:
        users = [k for k, nest in enumerate(nests) if _touches(nest, tensor)]
        if len(users) == 1:
            nests[users[0]], tensor = _shrink(nests[users[0]], tensor)
        buffers.append(tensor)
    code = block(*nests)
    for tensor in reversed(buffers):
        code = Alloc(tensor, code, "workspace" if tensor in temporaries or tensor.nbytes > MAX_LOCAL_BYTES else "local")
    return replace(function, body=code)


Access = tuple[Tensor, Linear]
"""A read or written tensor, and the linear form of the element number."""


def _accesses(stmt: Stmt) -> tuple[list[Access], list[Access]]:
    """Return (reads, writes) of a statement and of those inside it."""
    reads: list[Access] = []
    writes: list[Access] = []
    stack = [stmt]
    while stack:
        current = stack.pop()
        stack.extend(children(current))
        if isinstance(current, Store | Update):
            writes.append((current.tensor, linear(flatten(current.tensor.shape, current.index))))
        for e in exprs(current):
            reads += _reads(e)
    return reads, writes


Guards = dict[frozenset[tuple[Expr | None, int]], Expr]
"""Linear form of an index (as a set of terms) -> that index clamped by the conditions that guard the read."""


def _reads(e: Expr) -> Iterator[Access]:
    """Yield the reads of an expression.

    The first arm of a selection reads only where its condition holds, so its indices are clamped to that.
    """
    seen: set[tuple[Hashable, ...]] = set()
    stack: list[tuple[Expr, Guards]] = [(e, {})]
    while stack:
        node, guards = stack.pop()
        if (key := (id(node), *guards.items())) in seen:
            continue
        seen.add(key)
        if isinstance(node, Select):
            stack += (node.b, guards), (node.a, _guards_where(node.cond, guards)), (node.cond, guards)
            continue
        stack += ((child, guards) for child in node.children())
        if isinstance(node, Load):
            yield node.tensor, _apply_guards(linear(offset(node)), guards)


def _apply_guards(terms: Linear, guards: Guards) -> Linear:
    """Replace the part of an index that `guards` clamp, so that its interval stays inside the tensor."""
    for guarded_terms, clamped in guards.items():
        if all(terms.get(atom) == k for atom, k in guarded_terms if atom is not None):
            rest = {atom: terms.get(atom, 0) - dict(guarded_terms).get(atom, 0) for atom in (*terms, None)}
            terms = {atom: k for atom, k in rest.items() if k} | {clamped: 1}
    return terms


def _guards_where(cond: Expr, guards: Guards) -> Guards:
    """Return `guards` with the bounds on indices that hold wherever `cond` is true."""
    match cond:
        case Binary("and", a, b):
            return _guards_where(b, _guards_where(a, guards))
        case Binary("le", Const() as least, index) if terms := frozenset(linear(index).items()):
            return guards | {terms: maximum(guards.get(terms, index), least)}
        case Binary("lt", index, Const(end)) if index.dtype == INDEX and (terms := frozenset(linear(index).items())):
            return guards | {terms: minimum(guards.get(terms, index), Const(end - 1, INDEX))}
    return guards


def _touches(stmt: Stmt, tensor: Tensor) -> bool:
    """Return whether a statement reads or writes `tensor`."""
    return tensor in tensors_read(stmt) | tensors_written(stmt)


def _common_stride(accesses: Sequence[Linear], var: Var) -> int | None:
    """Return S such that every access of iteration `var` lies in [var * S, var * S + S), or None where there is none.

    Then each iteration has S elements of its own, and shares none with another.
    """
    strides = {terms.get(var, 0) for terms in accesses}
    if len(strides) != 1:
        return None
    (stride,) = strides
    for terms in accesses:
        rest = from_linear({atom: k for atom, k in terms.items() if atom is not var})
        span = interval(rest)
        if span is None or span[0] < 0 or span[1] >= stride or any(n is var for n in walk(rest)):
            return None
    return stride


def merge(stmts: Sequence[Stmt], same_depth: bool = False) -> list[Stmt]:
    """Fuse loops among consecutive statements, where that is legal and they share a tensor.

    Iteration i of the second loop may read only elements that iteration i of the first wrote. A loop may move past
    statements with which it shares no tensor. same_depth: merge only bodies that both contain loops, or neither.
    """
    done: list[Stmt] = []
    for stmt in stmts:
        for position in reversed(range(len(done))):
            merged = _merge_pair(done[position], stmt, same_depth) or (
                None if same_depth else _merge_into(done[position], stmt)
            )
            if merged is not None and not any(_conflict(later, done[position]) for later in done[position + 1 :]):
                del done[position]
                stmt = merged
        done.append(stmt)
    return done


def _merge_into(first: Stmt, second: Stmt) -> Stmt | None:
    """Merge `first` with a loop inside `second`, which itself runs once; None where there is no such loop.

    for k in 8: t[k] = ...               s = 0
    s = 0                          ->    for k in 8: t[k] = ...; s sum= t[k]
    unrolled k in 8: s sum= t[k]
    """
    if isinstance(second, Alloc) or (isinstance(second, For) and second.extent == 1 and second.kind == "serial"):
        inner = _merge_into(first, second.body)
        return None if inner is None else replace(second, body=inner)
    if not isinstance(second, Block):
        return None
    for position, stmt in enumerate(second.body):
        loop = replace(stmt, kind="serial") if isinstance(stmt, For) and stmt.kind == "unrolled" else stmt
        merged = _merge_pair(first, loop, same_depth=False) or _merge_into(first, stmt)
        if merged is not None:
            return Block((*second.body[:position], merged, *second.body[position + 1 :]))
        if _conflict(first, stmt):
            return None
    return None


def _conflict(a: Stmt, b: Stmt) -> bool:
    """Return whether one statement writes a tensor that the other reads or writes."""
    written_by_a, written_by_b = tensors_written(a), tensors_written(b)
    return bool((tensors_read(a) | written_by_a) & written_by_b or tensors_read(b) & written_by_a)


def _merge_pair(first: Stmt, second: Stmt, same_depth: bool) -> Stmt | None:
    """Fuse two loops of one extent, or return None where that would be illegal or there is no shared tensor."""
    if not (isinstance(first, For) and isinstance(second, For)):
        return None
    if not same_depth and first.extent != second.extent and 1 not in (first.extent, second.extent):
        if not any(is_float(tensor.dtype) for tensor in tensors_written(first) & tensors_read(second)):
            return None  # split loops would pack bytes in parts of images: 7 x 7 takes twice the cycles with NEON
        first, second = _split_loop(first, second.extent), _split_loop(second, first.extent)
    if first.extent != second.extent or first.extent == 1 or first.kind != "serial" or second.kind != "serial":
        return None
    renamed = map_accesses(second.body, lambda e: first.var if e is second.var else None)
    reads, writes = _accesses(first.body)
    more_reads, more_writes = _accesses(renamed)
    written = {t for t, _ in writes}
    shared = {t for t, _ in more_reads if t in written}
    touched = written | {t for t, _ in reads}
    if not shared or any(t in touched for t, _ in more_writes):
        return None
    inside = {s.var for part in (first.body, renamed) for s in statements(part) if isinstance(s, For | Let)}
    for tensor in shared:
        shared_accesses = [terms for t, terms in (*reads, *writes, *more_reads) if t is tensor]
        if _common_stride(_without_common_terms(shared_accesses, inside | {first.var}), first.var) is None:
            return None
    bodies = sequence(first.body), sequence(renamed)
    if same_depth and len({any(isinstance(stmt, For) for stmt in part) for part in bodies}) > 1:
        return None
    return For(first.var, first.extent, block(*merge([*bodies[0], *bodies[1]], same_depth)))


def _split_loop(loop: For, extent: int) -> For:
    """Split `loop` so that its outer loop has `extent` iterations; unchanged where `extent` does not divide its own."""
    if loop.extent % extent or loop.extent == extent or loop.kind != "serial":
        return loop
    outer, inner = Axis(f"{loop.var.name}.o", extent=extent), Axis(f"{loop.var.name}.i", extent=loop.extent // extent)
    body = map_accesses(loop.body, lambda e: outer * inner.extent + inner if e is loop.var else None)
    return For(outer, extent, For(inner, inner.extent, body))


def _without_common_terms(accesses: list[Linear], inside: set[Var]) -> list[Linear]:
    """Drop the terms that all accesses have in common and that depend only on loops outside; inside: other loops."""
    common = {
        atom for atom, k in accesses[0].items()
        if all(terms.get(atom) == k for terms in accesses)
        and not (atom is not None and any(n in inside or isinstance(n, Load) for n in walk(atom)))
    }  # fmt: skip
    return [{atom: k for atom, k in terms.items() if atom not in common} for terms in accesses]


def _shrink(nest: Stmt, tensor: Tensor) -> tuple[Stmt, Tensor]:
    """Shrink the buffer `tensor` to the elements that one iteration of the outermost loops of `nest` uses.

    Returns (nest over the smaller buffer, the smaller buffer); both unchanged where iterations share elements.
    """
    if not isinstance(nest, For):
        return nest, tensor
    reads, writes = _accesses(nest.body)
    stride = _common_stride([terms for t, terms in (*reads, *writes) if t is tensor], nest.var)
    if stride is None:
        return nest, tensor
    small = Tensor(tensor.name, (stride,), tensor.dtype)

    def rebase(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        terms = linear(flatten(tensor.shape, index))
        return (from_linear({atom: k for atom, k in terms.items() if atom is not nest.var}),)

    def rebase_load(e: Expr) -> Expr | None:
        return Load(small, rebase(e.index)) if isinstance(e, Load) and e.tensor is tensor else None

    def rebase_write(t: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        return (small, rebase(index)) if t is tensor else (t, index)

    parts = [map_accesses(part, rebase_load, rebase_write) for part in sequence(nest.body)]
    inside = [k for k, part in enumerate(parts) if _touches(part, small)]
    if len(inside) == 1:
        parts[inside[0]], small = _shrink(parts[inside[0]], small)
    return For(nest.var, nest.extent, block(*parts), nest.kind), small


MAX_PARTS = 5
"""Limit of the loops that one loop becomes; beyond it the code would grow more than the tests cost."""


def partition(function: Function) -> Function:
    """Split the serial and unrolled loops of a function where a condition on their variable changes.

        for i in 10:                                   y[0] = 0
          y[i] = 1 <= i and i < 9 ? x[i - 1] : 0   ->  for i in 8: y[i + 1] = x[i]
                                                       y[9] = 0

    Padding, concatenation and the guards of uneven tiles become copies without tests. (TVM's LoopPartition.)
    """
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
    """Return the value of `e` where it follows from the extents of loops, else None. A callback of nodes.rewrite."""
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
