"""Innermost loops of a kernel as vectors.

    for i in 100: y[i] = x[i] * 2        for i.o in 1: vectorized i.i in 64: y[i.o * 64 + i.i] = ...
                                   ->    vectorized i in 32: ...   for i in 4: ...

A sum over the loop has as many partial sums as there are lanes. Loops with conditions, or whose lanes lie apart in
memory, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import TypeGuard

import numpy as np

from celosia.compiler.cpu.target import target
from celosia.compiler.dtypes import itemsize
from celosia.compiler.expr import Alloc, Axis, Expr, For, If, Let, Load, Select, Stmt, Store, Tensor, Update, wrap
from celosia.compiler.expr.affine import Linear, coefficient, flatten, in_range, linear
from celosia.compiler.expr.bounds import structure
from celosia.compiler.expr.loops import Block, block, map_accesses, sequence
from celosia.compiler.expr.nodes import Const, Var, substitute, walk

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
        case For() if _fits(stmt):
            return _vectors([stmt])
        case For(var, extent, body, kind) if kind not in ("vectorized", "unrolled"):
            inner = vectorised(body)
            return For(var, extent, inner, kind) if sequence(inner) else inner
        case Block(body):
            runs = groupby(body, key=lambda each: _sums(each) or each)
            return block(*(_vectors(list(run)) if isinstance(key, tuple) else vectorised(key) for key, run in runs))
        case Alloc() | Let():
            return replace(stmt, body=vectorised(stmt.body))
        case If(cond, body, orelse):
            return If(cond, vectorised(body), None if orelse is None else vectorised(orelse))
    return stmt


def _fits(stmt: Stmt) -> TypeGuard[For]:
    """Whether iterations of the loop can be lanes: there is nothing in it but what writes memory, side by side."""
    if not isinstance(stmt, For) or not isinstance(stmt.var, Axis) or stmt.kind != "serial" or stmt.extent == 1:
        return False
    body = _flat(stmt.body)
    return bool(body) and all(_in_lanes(stmt.var, part) for part in body) and _apart_from_each_other(body)


def _sums(stmt: Stmt) -> tuple[Hashable, ...]:
    """The sums of a loop that can be lanes, alike for loops that add to the same."""
    return tuple(filter(None, (_sum(stmt.var, part) for part in _flat(stmt.body)))) if _fits(stmt) else ()


def _sum(var: Var, part: Flat) -> Hashable:
    """What `part` adds to in all iterations; None where each has an element of its own."""
    if isinstance(part, Store) or _apart(var, part.tensor, part.index) != 0:
        return None
    return part.kind, part.tensor, *map(structure, part.index)


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


@dataclass(frozen=True)
class _Sum:
    """What lanes add up, each for itself: to `part`, and at the end this to where `whole` does."""

    whole: Update
    part: Tensor
    lanes: int

    @property
    def zero(self) -> Expr:
        return wrap(first_of(self.whole.kind, self.part.dtype), self.part.dtype)

    def around(self, code: Stmt) -> Stmt:
        kind, (size,) = self.whole.kind, self.part.shape
        start = self._each(size, lambda at: Store(self.part, (at,), self.zero))
        while size > self.lanes:
            size //= 2
            half = self._each(size, lambda at, by=size: Update(kind, self.part, (at,), Load(self.part, (at + by,))))  # type: ignore[misc]
            code = block(code, half)
        lane = Axis("l", extent=size)
        end = For(lane, size, Update(kind, self.whole.tensor, self.whole.index, Load(self.part, (lane,))), "vectorized")
        return Alloc(self.part, block(start, code, end), "local")

    def _each(self, size: int, make: Callable[[Expr], Stmt]) -> Stmt:
        return _written_out(size // self.lanes, self.lanes, make)


def _written_out(registers: int, lanes: int, make: Callable[[Expr], Stmt]) -> Stmt:
    vector, lane = Axis("v", extent=registers), Axis("l", extent=lanes)
    return For(vector, registers, For(lane, lanes, make(vector * lanes + lane), "vectorized"), "unrolled")


def _vectors(loops: Sequence[For]) -> Stmt:
    """Loops that follow each other and have the same sums, if any."""
    cuts = [(loop, list(_cuts(loop))) for loop in loops]
    wide = max((lanes for _, parts in cuts for _, _, _, lanes in parts), default=0)
    most = max((registers for _, parts in cuts for _, _, registers, _ in parts), default=0)
    sums: dict[Hashable, _Sum] = {}
    done: list[Stmt] = []
    for loop, parts in cuts:
        assert isinstance(loop.var, Axis)
        body = [part for part in _flat(loop.body) if not _idle(part)]
        for part in body:
            if (key := _sum(loop.var, part)) is not None and key not in sums and wide:
                assert isinstance(part, Update)
                sums[key] = _Sum(part, Tensor("part", (most * wide,), part.tensor.dtype), wide)
        end = 0
        for at, count, registers, lanes in parts if body else ():
            outer = Axis(f"{loop.var.name}.o", extent=count)

            def moved(
                place: Expr,
                loop: For = loop,
                body: list[Flat] = body,
                first: Expr = outer * (registers * lanes),
                at: int = at,
            ) -> Stmt:
                return block(*(_lane(loop.var, part, sums, place, first + place + at) for part in body))

            done.append(For(outer, count, _written_out(registers, lanes, moved)))
            end = at + count * registers * lanes
        if end < loop.extent and body:
            rest = Axis(loop.var.name, extent=loop.extent - end)
            done.append(For(rest, rest.extent, block(*(_at(part, loop.var, rest + end) for part in body))))
    code = block(*done)
    for each in sums.values():
        code = each.around(code)
    return code


def _lane(var: Var, part: Flat, sums: dict[Hashable, _Sum], place: Expr, at: Expr) -> Stmt:
    """One iteration, at `at`, which is lane `place` of those that are computed together."""
    moved = _at(part, var, at)
    total = sums.get(_sum(var, part))
    if total is None:
        return moved
    assert isinstance(moved, Update)
    return Update(moved.kind, total.part, (place,), moved.value)


def _cuts(loop: For) -> Iterator[tuple[int, int, int, int]]:
    """(first, count, registers, lanes) of the vectors of a loop; the last few elements are not in any."""
    lanes = max(1, target().vector_bytes // max(itemsize(t) for part in _flat(loop.body) for t in _types(part)))
    at = 0
    for registers, width in ((REGISTERS, lanes), (1, lanes), *((1, lanes // part) for part in NARROWER)):
        count = (loop.extent - at) // max(registers * width, 1)
        if count and width > 1:
            yield at, count, registers, width
            at += count * registers * width


def _idle(part: Flat) -> bool:
    """Whether it adds nothing: what a mask leaves of a sum."""
    return (
        isinstance(part, Update) and isinstance(part.value, Const)
        and part.value.value == first_of(part.kind, part.tensor.dtype)
    )  # fmt: skip


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
