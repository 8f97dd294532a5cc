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
        case For(Axis() as rows, body=For(Axis() as var, body=Store(value=Load()) as body), kind="serial") if _turns(
            rows, var, body
        ):
            return _turned(rows, var, body)
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


def _turns(rows: Axis, var: Axis, body: Store) -> bool:
    """Whether what is written in lines is read in columns."""
    assert isinstance(body.value, Load)
    read = body.value.tensor, body.value.index
    lanes = target().vector_bytes // itemsize(body.tensor.dtype)
    steps = _apart(var, *read), _apart(rows, *read), _apart(var, body.tensor, body.index)
    return min(rows.extent, var.extent) >= lanes > 1 and steps[0] not in (None, 0, 1) and steps[1:] == (1, 1)


def _turned(rows: Axis, var: Axis, body: Store) -> Stmt:
    """Squares that are turned round in registers, and the rest."""
    lanes = target().vector_bytes // itemsize(body.tensor.dtype)
    down, across = rows.extent // lanes, var.extent // lanes
    i, j = Axis(f"{rows.name}.o", extent=down), Axis(f"{var.name}.o", extent=across)
    u, l = Axis("u", extent=lanes), Axis("l", extent=lanes)
    square = _at(_at(body, rows, i * lanes + u), var, j * lanes + l)
    inner = For(u, lanes, For(l, lanes, square, "vectorized"), "unrolled")
    done: list[Stmt] = [For(i, down, For(j, across, inner))]
    for first, count, width in ((down * lanes, rows.extent, 0), (0, down * lanes, across * lanes)):
        y, x = Axis(rows.name, extent=count - first), Axis(var.name, extent=var.extent - width)
        if y.extent and x.extent:
            done.append(For(y, y.extent, For(x, x.extent, _at(_at(body, rows, y + first), var, x + width))))
    return block(*done)


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
    joined: list[Stmt] = []
    for register in range(1, registers):
        lane = Axis("l", extent=lanes)
        one = Update(kind, part, (lane,), Load(part, (lane + register * lanes,)))
        joined.append(For(lane, lanes, one, "vectorized"))
    lane = Axis("l", extent=lanes)
    end = For(lane, lanes, Update(kind, total, index, Load(part, (lane,))), "vectorized")
    return Alloc(part, block(start, For(outer, count, each(added)), *joined, end), "local")


def _at(body: Stmt, var: Axis, place: Expr) -> Stmt:
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
