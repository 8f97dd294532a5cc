"""Reuse of memory: which temporaries lie in an output, and which outputs overwrite an input (in place).

A temporary lies in the output that is computed from it, so that each cache line is written once:

for i in 16:                                       for i in 16:
  for j in 8192: e[j] = exp(x[i, j])         ->      for j in 8192: y[i, j] = exp(x[i, j])
  for j in 8192: s sum= e[j]                         for j in 8192: s sum= y[i, j]
  for j in 8192: y[i, j] = e[j] / s                  for j in 8192: y[i, j] = y[i, j] / s
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from celosia.compiler.cpu.schedule.caches import MIN_STREAMED_BYTES
from celosia.compiler.expr.affine import Linear, flatten, from_linear, linear
from celosia.compiler.expr.loops import (
    Alloc,
    For,
    Function,
    If,
    Intrinsic,
    Let,
    Stmt,
    Store,
    Update,
    children,
    exprs,
    map_accesses,
    sequence,
    tensors_read,
    tensors_written,
)
from celosia.compiler.expr.nodes import Expr, Load, Tensor, walk
from celosia.compiler.program.dtypes import itemsize


def place_in_outputs(function: Function) -> Function:
    """Place temporaries of the workspace in an output of their type, where that is legal.

    The last statement that uses the temporary must write each element of the output once, from the element of the
    temporary in the same place. An output holds at most one temporary.
    """
    body, allocations, free_outputs = function.body, [], set(function.outputs)
    while isinstance(body, Alloc):
        allocations.append(body)
        body = body.body
    for alloc in [candidate for candidate in allocations if candidate.scope == "workspace"]:
        for out in (candidate for candidate in function.outputs if candidate in free_outputs):
            if (start := _start_in_output(body, alloc.tensor, out)) is not None:
                body = _redirect(body, alloc.tensor, out, start)
                allocations.remove(alloc)
                free_outputs.remove(out)
                break
    for alloc in reversed(allocations):
        body = replace(alloc, body=body)
    return replace(function, body=body)


def _start_in_output(body: Stmt, temporary: Tensor, out: Tensor) -> Linear | None:
    """Return the element of `out` at which the temporary may begin, in terms of the loops around its users.

    None means that it must not lie there.
    """
    if temporary.dtype != out.dtype or out.nbytes >= MIN_STREAMED_BYTES:  # streaming stores bypass the caches
        return None
    loops: list[For] = []
    users = _users(body, temporary)
    while len(users) == 1 and isinstance(users[0], For) and _users(body, out) == users:
        if users[0].kind not in ("serial", "parallel"):
            return None
        loops.append(users[0])
        body = users[0].body
        users = _users(body, temporary)
    size = temporary.size
    if len(users) < 2 or _users(body, out) != users[-1:] or size * prod(s.extent for s in loops) != out.size:
        return None
    start: Linear = {s.var: size * prod(loop.extent for loop in loops[depth + 1 :]) for depth, s in enumerate(loops)}
    return start if _is_elementwise_last(users[-1], temporary, out, start) else None


def _is_elementwise_last(last: Stmt, temporary: Tensor, out: Tensor, start: Linear) -> bool:
    """Return whether `last` writes each element of `out` once, from the same element of the temporary.

    It must do nothing else with either.
    """
    written = 0
    for stmt, runs in _statements_with_runs(last, uncountable=(If, Let)):
        reads = [node for e in exprs(stmt) for node in walk(e) if isinstance(node, Load)]
        if any(read.tensor is out for read in reads):
            return False
        reads_of_temporary = [
            linear(flatten(temporary.shape, read.index)) for read in reads if read.tensor is temporary
        ]
        if isinstance(stmt, Store) and stmt.tensor is out:
            element = linear(flatten(out.shape, stmt.index))
            if any(_add(start, index) != element for index in reads_of_temporary):
                return False
            written += runs or 0
        elif reads_of_temporary or (isinstance(stmt, Store | Update) and stmt.tensor in (temporary, out)):
            return False
    return written == temporary.size


def _users(body: Stmt, tensor: Tensor) -> list[Stmt]:
    """Return the statements of `body`, in order, that touch the tensor."""
    while isinstance(body, Alloc):
        body = body.body
    return [part for part in sequence(body) if tensor in tensors_read(part) | tensors_written(part)]


def _add(a: Linear, b: Linear) -> Linear:
    """Add two linear forms."""
    total = {atom: a.get(atom, 0) + b.get(atom, 0) for atom in (*a, *b)}
    return {atom: k for atom, k in total.items() if k}


def _redirect(body: Stmt, temporary: Tensor, out: Tensor, start: Linear) -> Stmt:
    """Redirect the accesses of the temporary to `out`, from element `start` on."""

    def rebase(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return (from_linear(_add(start, linear(flatten(temporary.shape, index)))),)

    def redirect_load(e: Expr) -> Expr | None:
        return Load(out, rebase(e.index)) if isinstance(e, Load) and e.tensor is temporary else None

    return map_accesses(
        body, redirect_load, lambda tensor, index: (out, rebase(index)) if tensor is temporary else (tensor, index)
    )


def in_place_pairs(function: Function, candidates: frozenset[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return pairs of positions (output, input) that may share memory.

    candidates: inputs that nothing reads afterwards. Both tensors must have the same size and element size. Each
    element of the output must be written once, by a statement that reads no other element of the input. No other
    statement may read either tensor.
    """
    pairs: list[tuple[int, int]] = []
    for output, y in enumerate(function.outputs):
        for position, x in enumerate(function.inputs):
            if x in candidates and all(position != used for _, used in pairs) and _can_overwrite(function, x, y):
                pairs.append((output, position))
                break
    return tuple(pairs)


def _can_overwrite(function: Function, x: Tensor, y: Tensor) -> bool:
    """Return whether every store to `y` reads only the same element of `x`, and nothing else reads either."""
    if (x.size, itemsize(x.dtype)) != (y.size, itemsize(y.dtype)):
        return False
    written = 0
    for stmt, runs in _statements_with_runs(function.body, uncountable=(If,)):
        if isinstance(stmt, Intrinsic) or (isinstance(stmt, Update) and stmt.tensor is y):
            return False
        reads = list(_reads(exprs(stmt), x))
        if list(_reads(exprs(stmt), y)):
            return False
        if isinstance(stmt, Store) and stmt.tensor is y:
            if runs is None:
                return False
            written += runs
            element = linear(flatten(y.shape, stmt.index))
            if any(linear(flatten(x.shape, read.index)) != element for read in reads):
                return False
        elif reads:
            return False
    return written == y.size


def _statements_with_runs(
    stmt: Stmt, uncountable: tuple[type[Stmt], ...], runs: int | None = 1
) -> Iterator[tuple[Stmt, int | None]]:
    """Yield every statement with the number of times that it runs.

    uncountable: kinds of statements inside which the number counts as unknown, None.
    """
    yield stmt, runs
    if isinstance(stmt, uncountable):
        runs = None
    elif isinstance(stmt, For) and runs is not None:
        runs *= stmt.extent
    for child in children(stmt):
        yield from _statements_with_runs(child, uncountable, runs)


def _reads(values: tuple[Expr, ...], tensor: Tensor) -> Iterator[Load]:
    """Yield the loads of `tensor` in the expressions `values`."""
    for value in values:
        yield from (node for node in walk(value) if isinstance(node, Load) and node.tensor is tensor)
