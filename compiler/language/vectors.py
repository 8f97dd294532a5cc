"""Innermost loops of a kernel as vectors.

    for i in 100: y[i] = x[i] * 2        for i.o in 1: vectorized i.i in 64: y[i.o * 64 + i.i] = ...
                                   ->    vectorized i in 32: ...   for i in 4: ...

A sum over the loop has as many partial sums as there are lanes. Loops with conditions, or whose lanes lie apart in
memory, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import numpy as np

from celosia.compiler.cpu.target import target
from celosia.compiler.dtypes import itemsize
from celosia.compiler.expr import Alloc, Axis, Expr, For, If, Let, Load, Select, Stmt, Store, Tensor, Update, wrap
from celosia.compiler.expr.affine import coefficient, flatten, in_range, linear
from celosia.compiler.expr.loops import Block, block, map_accesses
from celosia.compiler.expr.nodes import substitute, walk

REGISTERS = 4
"""Vectors that are under way at once: as many additions as it takes until the first of them is done."""


def vectorised(stmt: Stmt) -> Stmt:
    match stmt:
        case For(Axis() as var, extent, Store() | Update() as body, "serial") if extent > 1:
            return _vectors(var, body)
        case For(var, extent, body, kind) if kind not in ("vectorized", "unrolled"):
            return For(var, extent, vectorised(body), kind)
        case Block(body):
            return block(*map(vectorised, body))
        case Alloc() | Let():
            return replace(stmt, body=vectorised(stmt.body))
        case If(cond, body, orelse):
            return If(cond, vectorised(body), None if orelse is None else vectorised(orelse))
    return stmt


def first_of(kind: str, dtype: str) -> float:
    """What a reduction begins with."""
    if kind == "sum":
        return 0
    if dtype.startswith("float"):
        return -inf if kind == "max" else inf
    limits = np.iinfo("int8" if dtype == "bool" else dtype)
    return int(limits.min if kind == "max" else limits.max)


def _vectors(var: Axis, body: Store | Update) -> Stmt:
    step = _apart(var, body.tensor, body.index)
    if not _together(var, body.value) or step not in (0, 1) or (step == 0 and isinstance(body, Store)):
        return For(var, var.extent, body)
    lanes = max(1, target().vector_bytes // max(itemsize(t) for t in _types(body)))
    done: list[Stmt] = []
    at = 0
    for registers in (REGISTERS, 1):
        count = (var.extent - at) // (registers * lanes)
        if count and lanes > 1:
            done.append(_lanes(var, body, at, count, registers, lanes, step == 0))
            at += count * registers * lanes
    if at < var.extent:
        rest = Axis(var.name, extent=var.extent - at)
        done.append(For(rest, rest.extent, _at(body, var, rest + at)))
    return block(*done)


def _types(body: Store | Update) -> set[str]:
    return {body.tensor.dtype} | {node.tensor.dtype for node in walk(body.value) if isinstance(node, Load)}


def _lanes(var: Axis, body: Store | Update, at: int, count: int, registers: int, lanes: int, sums: bool) -> Stmt:
    """`count` times so many vectors of the loop, from `at` on."""
    outer = Axis(f"{var.name}.o", extent=count)

    def each(make: Callable[[Expr], Stmt]) -> Stmt:
        vector, lane = Axis("v", extent=registers), Axis("l", extent=lanes)
        return For(vector, registers, For(lane, lanes, make(vector * lanes + lane), "vectorized"), "unrolled")

    def moved(place: Expr) -> Stmt:
        return _at(body, var, outer * (registers * lanes) + place + at)

    if not sums:
        return For(outer, count, each(moved))
    assert isinstance(body, Update)
    kind, total, index = body.kind, body.tensor, body.index
    part = Tensor("part", (registers * lanes,), total.dtype)
    zero = wrap(first_of(kind, part.dtype), part.dtype)

    def added(place: Expr) -> Stmt:
        one = moved(place)
        assert isinstance(one, Update)
        return Update(kind, part, (place,), one.value)

    start = each(lambda l: Store(part, (l,), zero))
    end = each(lambda l: Update(kind, total, index, Load(part, (l,))))
    return Alloc(part, block(start, For(outer, count, each(added)), end), "local")


def _at(body: Store | Update, var: Axis, place: Expr) -> Stmt:
    return map_accesses(
        body, lambda e: place if e is var else None, lambda t, i: (t, tuple(substitute(x, {var: place}) for x in i))
    )


def _apart(var: Axis, tensor: Tensor, index: tuple[Expr, ...]) -> int | None:
    """How far iterations lie apart in memory; None where that changes."""
    return coefficient(linear(flatten(tensor.shape, index)), var)


def _together(var: Axis, value: Expr) -> bool:
    """Whether all that is read in vectors lies together."""
    for node in walk(value):
        if isinstance(node, Load) and _apart(var, node.tensor, node.index) not in (0, 1):
            return False
        if isinstance(node, Select):
            for arm in (node.a, node.b):
                for load in walk(arm):
                    if isinstance(load, Load) and not in_range(load) and _apart(var, load.tensor, load.index) != 1:
                        return False
    return True


__all__ = ["first_of", "vectorised"]
