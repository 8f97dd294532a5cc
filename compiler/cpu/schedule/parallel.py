"""Parallel iterations of a kernel's loops: which loops threads share, and which vectorised loops run in lockstep.

Results do not depend on it. Both are decided while llvm/ generates code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from celosia.compiler.expr.affine import flatten, is_in_bounds, stride_along
from celosia.compiler.expr.loops import (
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
    exprs,
    map_accesses,
    statements,
    tensors_read,
    tensors_written,
)
from celosia.compiler.expr.nodes import Axis, Call, Expr, Load, Reduce, Select, Tensor, Var, depends_on, is_float, walk
from celosia.compiler.expr.transform import COSTLY

MIN_PARALLEL_WORK = 1 << 18
"""Least work (operations, see `_work`) of a loop nest that threads share: a barrier and data from another core take a
few microseconds."""
MIN_SHARED_ITERATIONS = 8
"""Least iterations of a loop that threads share, so that they divide evenly; loops with fewer are a second choice."""


@dataclass(frozen=True)
class Phase:
    """Code between two barriers.

    loop: the loop of `body` whose iterations threads share; None where one thread runs all of it. private: temporaries
    that no other phase touches, of which each thread has its own copy.
    """

    body: Stmt
    loop: For | None
    private: tuple[Tensor, ...]


def split_phases(function: Function) -> tuple[list[Tensor], list[Phase]]:
    """Split a function into phases. Returns (tensors that several phases touch, the phases).

    It is a single phase without a loop where nothing is worth several threads.
    """
    body, temporaries = function.body, []
    while isinstance(body, Alloc):
        temporaries.append(body.tensor)
        body = body.body
    nests = body.body if isinstance(body, Block) else (body,)
    users = {tensor: sum(tensor in _touched(nest) for nest in nests) for tensor in temporaries}
    groups: list[tuple[Stmt, For | None]] = []
    for nest in nests:
        loop = _shared_loop(nest, {tensor for tensor, count in users.items() if count == 1})
        if loop is None and groups and groups[-1][1] is None:
            groups[-1] = block(groups[-1][0], nest), None
        else:
            groups.append((nest, loop))
    if all(loop is None for _, loop in groups):
        return [], [Phase(function.body, None, ())]
    touched = [_touched(stmt) for stmt, _ in groups]
    phases_of = {tensor: [k for k, tensors in enumerate(touched) if tensor in tensors] for tensor in temporaries}
    phases = [
        Phase(stmt, loop, tuple(tensor for tensor, users_of in phases_of.items() if users_of == [k]))
        for k, (stmt, loop) in enumerate(groups)
    ]
    return [tensor for tensor, users_of in phases_of.items() if len(users_of) > 1], phases


def _shared_loop(nest: Stmt, private: set[Tensor]) -> For | None:
    """Return the loop of `nest` whose iterations threads share, or None. private: temporaries of this nest alone."""
    chain = list(_outer_loops(nest))
    marked = [loop for loop in chain if loop.kind == "parallel"]
    if not marked and _work(nest) < MIN_PARALLEL_WORK:
        return None
    shareable = [loop for loop in marked or chain if loop.extent > 1 and _is_independent(loop, private)]
    first = shareable[0] if shareable else None
    return next((loop for loop in shareable if loop.extent >= MIN_SHARED_ITERATIONS), first)


def _outer_loops(nest: Stmt) -> Iterator[For]:
    """Yield the outer loops of a nest whose body is nothing but the next loop, and the innermost of them."""
    while isinstance(nest, For) and nest.kind in ("serial", "parallel"):
        yield nest
        nest = nest.body


def _is_independent(loop: For, private: set[Tensor]) -> bool:
    """Return whether iterations write different elements, so that threads can share them.

    Private buffers carry nothing from one iteration to the next: nothing outside the loop initialises them.
    """
    if not isinstance(loop.var, Axis) or loop.var.reduce:
        return False
    inside = list(statements(loop.body))
    private = private | {s.tensor for s in inside if isinstance(s, Alloc)}
    written = [s for s in inside if isinstance(s, Store | Update) and s.tensor not in private]
    return all(any(depends_on(i, loop.var) for i in s.index) for s in written)


def _touched(stmt: Stmt) -> set[Tensor]:
    """Return the tensors that a statement reads or writes."""
    return tensors_written(stmt) | tensors_read(stmt)


def _work(stmt: Stmt) -> int:
    """Count the operations on single elements that a statement executes; functions such as exp count as 16."""
    match stmt:
        case For(extent=extent, body=body):
            return extent * _work(body)
        case Block(body):
            return sum(map(_work, body))
        case Alloc(body=body):
            return _work(body)
        case Store(value=value) | Update(value=value):
            nodes = [node for node in walk(value) if not isinstance(node, Reduce)]
            return 1 + len(nodes) + 15 * sum(isinstance(n, Call) and n.name in COSTLY for n in nodes)
    return sum(map(_work, [s for s in statements(stmt) if s is not stmt and isinstance(s, Store | Update)]))


def legalise_vector_loops(function: Function) -> Function:
    """Legalise vectorised loops: each lane gets its own copy of the buffers that an iteration allocates.

        vectorized j in 4:                    local acc: float32[4]
          local acc: float32[]                vectorized j in 4:
          acc[] = 0.0                    ->     acc[j] = 0.0
          for k in 8:                           for k in 8:
            acc[] sum= a[k] * b[k, j]             acc[j] sum= a[k] * b[k, j]
          c[j] = acc[]                          c[j] = acc[j]

    Loops whose iterations cannot run in lockstep become serial: those that branch, update scattered elements or one
    element in order, or need a mask for reads that are not consecutive.
    """
    return replace(function, body=_legalise(function.body))


def _legalise(s: Stmt) -> Stmt:
    """Legalise the vectorised loops of a statement, or make them serial."""
    match s:
        case For(var, extent, body, "vectorized") if extent > 1:
            allocations = [inner for inner in statements(body) if isinstance(inner, Alloc)]
            wide = {alloc.tensor: replace(alloc.tensor, shape=(*alloc.tensor.shape, extent)) for alloc in allocations}
            wide_body = _add_lane_dimension(body, var, extent, wide)
            if not _is_lockstep(wide_body, var):
                return For(var, extent, _legalise(body))
            code: Stmt = For(var, extent, wide_body, "vectorized")
            for alloc in reversed(allocations):
                code = replace(alloc, tensor=wide[alloc.tensor], body=code)
            return code
        case For(body=body) | Let(body=body) | Alloc(body=body):
            return replace(s, body=_legalise(body))
        case If(cond, body, orelse):
            return If(cond, _legalise(body), None if orelse is None else _legalise(orelse))
        case Block(body):
            return block(*map(_legalise, body))
    return s


def _add_lane_dimension(body: Stmt, var: Var, lanes: int, wide: dict[Tensor, Tensor]) -> Stmt:
    """Rewrite the body of the vectorised loop `var` over the tensors in `wide`, whose last dimension is the lane.

    wide: allocated tensor -> its copy with one more dimension, of `lanes`.
    """
    if not wide:
        return body

    def widen_access(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        if tensor not in wide:
            return tensor, index
        if len(index) == len(tensor.shape):
            return wide[tensor], (*index, var)
        return wide[tensor], (flatten(tensor.shape, index) * lanes + var,)

    def widen_load(e: Expr) -> Expr | None:
        return Load(*widen_access(e.tensor, e.index)) if isinstance(e, Load) and e.tensor in wide else None

    return _drop_allocations(map_accesses(body, widen_load, widen_access))


def _drop_allocations(s: Stmt) -> Stmt:
    """Remove allocations, which move outside of the vectorised loop."""
    match s:
        case Alloc(body=body):
            return _drop_allocations(body)
        case For(body=body) | Let(body=body):
            return replace(s, body=_drop_allocations(body))
        case If(cond, body, orelse):
            return If(cond, _drop_allocations(body), None if orelse is None else _drop_allocations(orelse))
        case Block(body):
            return block(*map(_drop_allocations, body))
    return s


def _is_lockstep(body: Stmt, var: Var) -> bool:
    """Return whether the iterations of the loop over `var` run the same statements, each on elements of its own."""
    return all(
        _is_lockstep_statement(s, var) and all(_has_lockstep_reads(e, var) for e in exprs(s)) for s in statements(body)
    )


def _is_lockstep_statement(s: Stmt, var: Var) -> bool:
    """Return whether no lane branches, and updates are contiguous or of one element in any order."""
    match s:
        case For(kind="vectorized", extent=extent):
            return extent == 1
        case Let(value=value):
            return not depends_on(value, var)
        case If(cond=cond):
            return not depends_on(cond, var)
        case Update(kind, tensor, index):
            step = stride_along(tensor, index, var)
            return step == 1 or (step == 0 and not (kind == "ordered_sum" and is_float(tensor.dtype)))
    return True


def _has_lockstep_reads(e: Expr, var: Var) -> bool:
    """Return whether reads that a per-lane condition masks are in bounds or contiguous."""
    arms = [arm for n in walk(e) if isinstance(n, Select) and depends_on(n.cond, var) for arm in (n.a, n.b)]
    reads = {n for arm in arms for n in walk(arm) if isinstance(n, Load)}
    return all(is_in_bounds(read) or stride_along(read.tensor, read.index, var) == 1 for read in reads)


__all__ = ["legalise_vector_loops"]
