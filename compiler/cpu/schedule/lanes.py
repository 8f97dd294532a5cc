"""Vectorized loops in the form that the CPU runs: each lane has memory of its own for what its iteration allocates.

    vectorized j in 4:                    local acc: float32[4]
      local acc: float32[]                vectorized j in 4:
      acc[] = 0.0                    ->     acc[j] = 0.0
      for k in 8:                           for k in 8:
        acc[] sum= a[k] * b[k, j]             acc[j] sum= a[k] * b[k, j]
      c[j] = acc[]                          c[j] = acc[j]

Iterations that cannot run in step become a serial loop: those that branch, that update scattered elements or one
element in order, and that would read outside of a tensor but for a condition.
"""

from __future__ import annotations

from dataclasses import replace

from celosia.compiler.expr.affine import depends, flatten, in_range, stride_along
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Let, Stmt, Update, block, exprs, map_accesses
from celosia.compiler.expr.nodes import Expr, Load, Select, Tensor, Var, is_float
from celosia.compiler.expr.walk import walk


def with_lanes(function: Function) -> Function:
    """`function` with vectorized loops that allocate nothing, all of whose iterations run in step."""
    return replace(function, body=_with_lanes(function.body))


def _with_lanes(s: Stmt) -> Stmt:
    match s:
        case For(var, extent, body, "vectorized") if extent > 1:
            own = [inner for inner in statements(body) if isinstance(inner, Alloc)]
            wide = {alloc.tensor: replace(alloc.tensor, shape=(*alloc.tensor.shape, extent)) for alloc in own}
            spread = _spread(body, var, extent, wide)
            if not _in_step(spread, var):
                return For(var, extent, _with_lanes(body))
            code: Stmt = For(var, extent, spread, "vectorized")
            for alloc in reversed(own):
                code = replace(alloc, tensor=wide[alloc.tensor], body=code)
            return code
        case For(body=body) | Let(body=body) | Alloc(body=body):
            return replace(s, body=_with_lanes(body))
        case If(cond, body, orelse):
            return If(cond, _with_lanes(body), None if orelse is None else _with_lanes(orelse))
        case Block(body):
            return block(*map(_with_lanes, body))
    return s


def _spread(body: Stmt, var: Var, lanes: int, wide: dict[Tensor, Tensor]) -> Stmt:
    """`body` over the tensors that `wide` has in the place of its own, whose last dimension is that of the lanes."""
    if not wide:
        return body

    def target(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        if tensor not in wide:
            return tensor, index
        if len(index) == len(tensor.shape):
            return wide[tensor], (*index, var)
        return wide[tensor], (flatten(tensor.shape, index) * lanes + var,)

    def change(e: Expr) -> Expr | None:
        return Load(*target(e.tensor, e.index)) if isinstance(e, Load) and e.tensor in wide else None

    return _unallocated(map_accesses(body, change, target))


def _unallocated(s: Stmt) -> Stmt:
    match s:
        case Alloc(body=body):
            return _unallocated(body)
        case For(body=body) | Let(body=body):
            return replace(s, body=_unallocated(body))
        case If(cond, body, orelse):
            return If(cond, _unallocated(body), None if orelse is None else _unallocated(orelse))
        case Block(body):
            return block(*map(_unallocated, body))
    return s


def _in_step(body: Stmt, var: Var) -> bool:
    """Whether the iterations of the loop over `var` do the same, each for elements of its own."""
    return all(_statement_in_step(s, var) and all(_reads_in_step(e, var) for e in exprs(s)) for s in statements(body))


def _statement_in_step(s: Stmt, var: Var) -> bool:
    match s:
        case For(kind="vectorized", extent=extent):
            return extent == 1
        case Let(value=value):
            return not depends(value, var)
        case If(cond=cond):
            return not depends(cond, var)
        case Update(kind, tensor, index):
            step = stride_along(tensor, index, var)
            return step == 1 or (step == 0 and not (kind == "ordered_sum" and is_float(tensor.dtype)))
    return True


def _reads_in_step(e: Expr, var: Var) -> bool:
    """Whether what a condition of each lane keeps from being read outside of a tensor lies side by side."""
    arms = [arm for n in walk(e) if isinstance(n, Select) and depends(n.cond, var) for arm in (n.a, n.b)]
    reads = {n for arm in arms for n in walk(arm) if isinstance(n, Load)}
    return all(in_range(read) or stride_along(read.tensor, read.index, var) == 1 for read in reads)


__all__ = ["with_lanes"]
