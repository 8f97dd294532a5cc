"""Virtual threads: the iterations of a loop, run in alternation, each with its own slot of what is allocated inside.

    vthread t in 2:                  inp a: int8[2, 16]
      inp a: int8[16]                for k in 4:
      for k in 4:                ->    load(a[0, 0], x[0, k, 0])
        load(a[0], x[t, k, 0])         load(a[1, 0], x[1, k, 0])
        gemm(c[t, 0], a[0], ...)       gemm(c[0, 0], a[0, 0], ...)
                                       gemm(c[1, 0], a[1, 0], ...)

So a thread loads while another computes: units wait for what touches the same place, and threads do not.
"""

from __future__ import annotations

from dataclasses import replace

from celosia.compiler.expr.affine import flatten
from celosia.compiler.expr.loop_partition import copy_with_values
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Let, Stmt, block, children, map_accesses
from celosia.compiler.expr.nodes import INDEX, Const, Expr, Load, Tensor, Var


def interleave(function: Function) -> Function:
    """Replace vthread loops by alternating statements of their iterations, which must not depend on each other."""
    return replace(function, body=_without(function.body))


def _without(s: Stmt) -> Stmt:
    """Replace the vthread loops inside a statement."""
    match s:
        case For(var, extent, body, "vthread"):
            return _spread(_without(body), var, extent)
        case For(var, extent, body, kind):
            return For(var, extent, _without(body), kind)
        case Let(var, value, body):
            return Let(var, value, _without(body))
        case If(cond, body, orelse):
            return If(cond, _without(body), None if orelse is None else _without(orelse))
        case Alloc(body=body):
            return replace(s, body=_without(body))
        case Block(body):
            return block(*(_without(inner) for inner in body))
    return s


def _single(s: Stmt) -> bool:
    """Whether `s` is one statement in loops, which a thread runs as a whole."""
    return not isinstance(s, Block | Alloc) and all(_single(inner) for inner in children(s))


def _spread(s: Stmt, var: Var, threads: int) -> Stmt:
    """Replace each statement of `s` by those of all threads."""
    match s:
        case Alloc(tensor, body, scope):
            slots = Tensor(tensor.name, (threads, *tensor.shape), tensor.dtype)
            return Alloc(slots, _spread(_in_slot(body, tensor, slots, var), var, threads), scope)
        case Block(body):
            return block(*(_spread(inner, var, threads) for inner in body))
        case For(other, extent, body, "serial") if not _single(body):
            return For(other, extent, _spread(body, var, threads))
    return block(*(copy_with_values(s, {var: Const(t, INDEX)}) for t in range(threads)))


def _in_slot(s: Stmt, tensor: Tensor, slots: Tensor, var: Var) -> Stmt:
    """Redirect accesses to `tensor` to the slot of thread `var`."""

    def in_slot(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        if len(index) == len(tensor.shape):
            return (var, *index)
        return (var * tensor.size + flatten(tensor.shape, index),)

    return map_accesses(
        s,
        lambda e: Load(slots, in_slot(e.index)) if isinstance(e, Load) and e.tensor is tensor else None,
        lambda t, i: (slots, in_slot(i)) if t is tensor else (t, i),
    )
