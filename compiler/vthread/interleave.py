"""Virtual threads: alternate the statements of a loop's iterations, each with a slot of its own in scratchpads.

    vthread t in 2:                  inp a: int8[2, 16]
      inp a: int8[16]                for k in 4:
      for k in 4:                ->    load(a[0, 0], x[0, k, 0])
        load(a[0], x[t, k, 0])         load(a[1, 0], x[1, k, 0])
        gemm(c[t, 0], a[0], ...)       gemm(c[0, 0], a[0, 0], ...)
                                       gemm(c[1, 0], a[1, 0], ...)

So one thread loads while another computes: units wait only for accesses to the same place, and threads have different
ones. User schedules ask for it with `vthread`; layers use the software pipelining of pipeline.py instead.
"""

from __future__ import annotations

from dataclasses import replace

from celosia.compiler.expr.affine import flatten
from celosia.compiler.expr.loop_passes import copy_with_values
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Let, Stmt, block, children, map_accesses
from celosia.compiler.expr.nodes import INDEX, Const, Expr, Load, Tensor, Var


def interleave(function: Function) -> Function:
    """Replace vthread loops by alternating statements of their iterations, which must not depend on each other."""
    return replace(function, body=_replace_vthreads(function.body))


def _replace_vthreads(s: Stmt) -> Stmt:
    """Return `s` with the vthread loops inside it replaced."""
    match s:
        case For(var, extent, body, "vthread"):
            return _interleave_threads(_replace_vthreads(body), var, extent)
        case For(var, extent, body, kind):
            return For(var, extent, _replace_vthreads(body), kind)
        case Let(var, value, body):
            return Let(var, value, _replace_vthreads(body))
        case If(cond, body, orelse):
            return If(cond, _replace_vthreads(body), None if orelse is None else _replace_vthreads(orelse))
        case Alloc(body=body):
            return replace(s, body=_replace_vthreads(body))
        case Block(body):
            return block(*(_replace_vthreads(statement) for statement in body))
    return s


def _is_single_statement(s: Stmt) -> bool:
    """Whether `s` is a single statement inside loops, which a thread runs without interruption."""
    return not isinstance(s, Block | Alloc) and all(_is_single_statement(child) for child in children(s))


def _interleave_threads(s: Stmt, var: Var, threads: int) -> Stmt:
    """Replace each statement of `s` by the statements of all threads. var: the loop variable of the threads."""
    match s:
        case Alloc(tensor, body, scope):
            slots = Tensor(tensor.name, (threads, *tensor.shape), tensor.dtype)
            return Alloc(slots, _interleave_threads(_redirect_to_slot(body, tensor, slots, var), var, threads), scope)
        case Block(body):
            return block(*(_interleave_threads(statement, var, threads) for statement in body))
        case For(other, extent, body, "serial") if not _is_single_statement(body):
            return For(other, extent, _interleave_threads(body, var, threads))
    return block(*(copy_with_values(s, {var: Const(t, INDEX)}) for t in range(threads)))


def _redirect_to_slot(s: Stmt, tensor: Tensor, slots: Tensor, var: Var) -> Stmt:
    """Redirect accesses to `tensor` in `s` to the slot of thread `var` in `slots`."""

    def slot_index(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        if len(index) == len(tensor.shape):
            return (var, *index)
        return (var * tensor.size + flatten(tensor.shape, index),)

    return map_accesses(
        s,
        lambda e: Load(slots, slot_index(e.index)) if isinstance(e, Load) and e.tensor is tensor else None,
        lambda t, i: (slots, slot_index(i)) if t is tensor else (t, i),
    )
