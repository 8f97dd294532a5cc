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
from celosia.compiler.expr.affine import Linear, coefficient, flatten, in_range, linear
from celosia.compiler.expr.loops import Block, block, map_accesses, sequence
from celosia.compiler.expr.nodes import substitute, walk

REGISTERS = 4
"""Vectors that are under way at once: as many additions as it takes until the first of them is done."""

NARROWER = (2, 4)
"""Parts of a vector in which what is left of a loop is done; the last few elements are done one by one."""
Flat = Store | Update


def vectorised(stmt: Stmt) -> Stmt:
    match stmt:
        case For(Axis() as rows, body=For(Axis() as var, body=Store(value=Load()) as body), kind="serial") if _turns(
            rows, var, body
        ):
            return _turned(rows, var, body)
        case For(Axis() as var, extent, body, "serial") if extent > 1 and _flat(body):
            return _vectors(var, _flat(body))
        case For(var, extent, body, kind) if kind not in ("vectorized", "unrolled"):
            return For(var, extent, vectorised(body), kind)
        case Block(body):
            return block(*map(vectorised, body))
        case Alloc() | Let():
            return replace(stmt, body=vectorised(stmt.body))
        case If(cond, body, orelse):
            return If(cond, vectorised(body), None if orelse is None else vectorised(orelse))
    return stmt


def _flat(body: Stmt) -> tuple[Flat, ...]:
    """The statements of a loop in which there is nothing but what writes memory; else none."""
    found = tuple(part for part in sequence(body) if isinstance(part, Store | Update))
    return found if len(found) == len(sequence(body)) else ()


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


def _vectors(var: Axis, body: tuple[Flat, ...]) -> Stmt:
    if not all(_in_lanes(var, part) for part in body) or not _apart_from_each_other(body):
        return For(var, var.extent, block(*body))
    lanes = max(1, target().vector_bytes // max(itemsize(t) for part in body for t in _types(part)))
    done: list[Stmt] = []
    at = 0
    for registers, width in ((REGISTERS, lanes), (1, lanes), *((1, lanes // part) for part in NARROWER)):
        count = (var.extent - at) // max(registers * width, 1)
        if count and width > 1:
            done.append(_lanes(var, body, at, count, registers, width))
            at += count * registers * width
    if at < var.extent:
        rest = Axis(var.name, extent=var.extent - at)
        done.append(For(rest, rest.extent, block(*(_at(part, var, rest + at) for part in body))))
    return block(*done)


def _in_lanes(var: Axis, part: Flat) -> bool:
    """Whether iterations can be lanes: each has an element of its own, beside its neighbours', or all add to one."""
    step = _apart(var, part.tensor, part.index)
    return _together(var, part.value) and (step == 1 or (step == 0 and isinstance(part, Update)))


def _apart_from_each_other(body: tuple[Flat, ...]) -> bool:
    """Whether iterations share no element of what several statements touch, so that each can be done for all lanes."""
    if len(body) == 1:
        return True
    touched: dict[Tensor, list[Linear]] = {}
    for part in body:
        touched.setdefault(part.tensor, []).append(linear(flatten(part.tensor.shape, part.index)))
    reads = (node for part in body for node in walk(part.value) if isinstance(node, Load))
    for node in reads:
        if node.tensor in touched:
            touched[node.tensor].append(linear(flatten(node.tensor.shape, node.index)))
    return all(each == places[0] for places in touched.values() for each in places)


def _types(body: Flat) -> set[str]:
    return {body.tensor.dtype} | {node.tensor.dtype for node in walk(body.value) if isinstance(node, Load)}


def _lanes(var: Axis, body: tuple[Flat, ...], at: int, count: int, registers: int, lanes: int) -> Stmt:
    """`count` times so many vectors of the loop, from `at` on."""
    outer = Axis(f"{var.name}.o", extent=count)
    sums = {
        n: Tensor("part", (registers * lanes,), part.tensor.dtype) for n, part in enumerate(body)
        if isinstance(part, Update) and _apart(var, part.tensor, part.index) == 0
    }  # fmt: skip

    def each(make: Callable[[Expr], Stmt]) -> Stmt:
        vector, lane = Axis("v", extent=registers), Axis("l", extent=lanes)
        return For(vector, registers, For(lane, lanes, make(vector * lanes + lane), "vectorized"), "unrolled")

    def moved(place: Expr) -> Stmt:
        done = [_at(part, var, outer * (registers * lanes) + place + at) for part in body]
        for n, partial in sums.items():
            one = done[n]
            assert isinstance(one, Update)
            done[n] = Update(one.kind, partial, (place,), one.value)
        return block(*done)

    code: Stmt = For(outer, count, each(moved))
    for n, partial in sums.items():
        code = _summed(body[n], partial, code, each, registers, lanes)
    return code


def _summed(
    whole: Flat, partial: Tensor, code: Stmt, each: Callable[[Callable[[Expr], Stmt]], Stmt], registers: int, lanes: int
) -> Stmt:
    """`code`, which adds to the sums of lanes `partial`, and what adds these to the whole."""
    assert isinstance(whole, Update)
    kind, zero = whole.kind, wrap(first_of(whole.kind, partial.dtype), partial.dtype)
    joined: list[Stmt] = []
    for register in range(1, registers):
        lane = Axis("l", extent=lanes)
        one = Update(kind, partial, (lane,), Load(partial, (lane + register * lanes,)))
        joined.append(For(lane, lanes, one, "vectorized"))
    lane = Axis("l", extent=lanes)
    end = For(lane, lanes, Update(kind, whole.tensor, whole.index, Load(partial, (lane,))), "vectorized")
    start = each(lambda place: Store(partial, (place,), zero))
    return Alloc(partial, block(start, code, *joined, end), "local")


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
