"""Legalise vectorised loops for the CPU: each lane gets its own copy of the buffers that an iteration allocates.

    vectorized j in 4:                    local acc: float32[4]
      local acc: float32[]                vectorized j in 4:
      acc[] = 0.0                    ->     acc[j] = 0.0
      for k in 8:                           for k in 8:
        acc[] sum= a[k] * b[k, j]             acc[j] sum= a[k] * b[k, j]
      c[j] = acc[]                          c[j] = acc[j]

Loops whose iterations cannot run in lockstep become serial: those that branch, update scattered elements or one
element in order, or need a mask for reads that are not consecutive.
"""

from __future__ import annotations

from dataclasses import replace

from celosia.compiler.expr.affine import depends_on, flatten, is_in_bounds, stride_along
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Let, Stmt, Update, block, exprs, map_accesses
from celosia.compiler.expr.nodes import Expr, Load, Select, Tensor, Var, is_float
from celosia.compiler.expr.regions import statements
from celosia.compiler.expr.walk import walk


def legalise_vector_loops(function: Function) -> Function:
    """Return `function` with vectorised loops that allocate nothing and run in lockstep; other loops become serial."""
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
