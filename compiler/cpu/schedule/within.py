"""Temporaries that lie in the output which is made of them, so that lines of the cache are written but once.

for i in 16:                                       for i in 16:
  for j in 8192: e[j] = exp(x[i, j])         ->      for j in 8192: y[i, j] = exp(x[i, j])
  for j in 8192: s sum= e[j]                         for j in 8192: s sum= y[i, j]
  for j in 8192: y[i, j] = e[j] / s                  for j in 8192: y[i, j] = y[i, j] / s
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from celosia.compiler.cpu.schedule.streamed import MIN_STREAMED_BYTES
from celosia.compiler.expr.affine import Linear, flatten, from_linear, linear
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import (
    Alloc,
    For,
    Function,
    If,
    Let,
    Stmt,
    Store,
    Update,
    children,
    exprs,
    map_accesses,
    sequence,
)
from celosia.compiler.expr.nodes import Expr, Load, Tensor
from celosia.compiler.expr.walk import walk


def within_outputs(function: Function) -> Function:
    """Temporaries of the workspace lie in an output of their type where each of its elements is written once, last,
    from the one of the temporary that lies there."""
    body, kept, free = function.body, [], set(function.outputs)
    while isinstance(body, Alloc):
        kept.append(body)
        body = body.body
    for alloc in [each for each in kept if each.scope == "workspace"]:
        for out in (each for each in function.outputs if each in free):
            if (start := _start(body, alloc.tensor, out)) is not None:
                body = _moved(body, alloc.tensor, out, start)
                kept.remove(alloc)
                free.remove(out)
                break
    for alloc in reversed(kept):
        body = replace(alloc, body=body)
    return replace(function, body=body)


def _start(body: Stmt, temporary: Tensor, out: Tensor) -> Linear | None:
    """The number of the element of `out` at which the temporary of an iteration begins; None where it may not lie
    there."""
    if temporary.dtype != out.dtype or out.nbytes >= MIN_STREAMED_BYTES:  # those pass by the caches
        return None
    loops: list[For] = []
    parts = _users(body, temporary)
    while len(parts) == 1 and isinstance(parts[0], For) and _users(body, out) == parts:
        if parts[0].kind not in ("serial", "parallel"):
            return None
        loops.append(parts[0])
        body = parts[0].body
        parts = _users(body, temporary)
    size = temporary.size
    if len(parts) < 2 or _users(body, out) != parts[-1:] or size * prod(s.extent for s in loops) != out.size:
        return None
    start: Linear = {s.var: size * prod(each.extent for each in loops[at + 1 :]) for at, s in enumerate(loops)}
    return start if _only_scaled(parts[-1], temporary, out, start) else None


def _only_scaled(last: Stmt, temporary: Tensor, out: Tensor, start: Linear) -> bool:
    """Whether `last` writes elements of `out` once, each from that of the temporary, and does nothing else with
    either."""
    written = 0
    for stmt, times in _runs(last):
        reads = [node for e in exprs(stmt) for node in walk(e) if isinstance(node, Load)]
        if any(read.tensor is out for read in reads):
            return False
        own = [linear(flatten(temporary.shape, read.index)) for read in reads if read.tensor is temporary]
        if isinstance(stmt, Store) and stmt.tensor is out:
            here = linear(flatten(out.shape, stmt.index))
            if any(_sum(start, place) != here for place in own):
                return False
            written += times
        elif own or (isinstance(stmt, Store | Update) and stmt.tensor in (temporary, out)):
            return False
    return written == temporary.size


def _runs(stmt: Stmt, times: int = 1) -> Iterator[tuple[Stmt, int]]:
    """Every statement, with how often it runs; 0 where that is not known."""
    yield stmt, times
    inside = times * stmt.extent if isinstance(stmt, For) else 0 if isinstance(stmt, If | Let) else times
    for child in children(stmt):
        yield from _runs(child, inside)


def _users(body: Stmt, tensor: Tensor) -> list[Stmt]:
    """Those of the statements of `body`, in their order, that touch the tensor."""
    while isinstance(body, Alloc):
        body = body.body
    return [part for part in sequence(body) if any(tensor in _touched(s) for s in statements(part))]


def _touched(stmt: Stmt) -> set[Tensor]:
    found = {node.tensor for e in exprs(stmt) for node in walk(e) if isinstance(node, Load)}
    return found | {stmt.tensor} if isinstance(stmt, Store | Update) else found


def _sum(a: Linear, b: Linear) -> Linear:
    total = {atom: a.get(atom, 0) + b.get(atom, 0) for atom in (*a, *b)}
    return {atom: k for atom, k in total.items() if k}


def _moved(body: Stmt, temporary: Tensor, out: Tensor, start: Linear) -> Stmt:
    def place(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return (from_linear(_sum(start, linear(flatten(temporary.shape, index)))),)

    def change(e: Expr) -> Expr | None:
        return Load(out, place(e.index)) if isinstance(e, Load) and e.tensor is temporary else None

    return map_accesses(
        body, change, lambda tensor, index: (out, place(index)) if tensor is temporary else (tensor, index)
    )
