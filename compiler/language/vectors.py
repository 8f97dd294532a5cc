"""Innermost loops of a kernel as vectors.

    for i in 100: y[i] = x[i] * 2        for i.o in 1: vectorized i.i in 64: y[i.o * 64 + i.i] = ...
                                   ->    vectorized i in 32: ...   for i in 4: ...

A sum over the loop has as many partial sums as there are lanes. Loops with conditions, or whose lanes lie apart in
memory, stay as they are.

`cpu.schedule` arranges one tensor at a time, and here a loop has several statements and is cut where masks begin. With
each statement arranged by itself, and loops merged afterwards, softmax took 7% longer (of rows of 100 43%), layer
normalisation 9% (31%), and the maximum of blocks of 1,000 bytes 2.8 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from celosia.compiler.cpu.schedule.vectorize import Knobs, schedule_stage
from celosia.compiler.cpu.target import target
from celosia.compiler.expr import Alloc, Axis, Expr, For, If, Let, Load, Select, Stmt, Store, Tensor, Update
from celosia.compiler.expr.affine import Linear, flatten, is_in_bounds, linear, stride_along
from celosia.compiler.expr.loops import Block, block, map_accesses, sequence
from celosia.compiler.expr.lower import lower
from celosia.compiler.expr.nest_parts import reduction_identity
from celosia.compiler.expr.nodes import Const, Var
from celosia.compiler.expr.regions import structure
from celosia.compiler.expr.schedule import create_schedule
from celosia.compiler.expr.walk import substitute, walk
from celosia.compiler.program.dtypes import itemsize

REGISTERS = 4
"""Vectors that are under way at once: as many additions as it takes until the first of them is done."""

NARROWER = (2, 4)
"""Parts of a vector in which what is left of a loop is done; the last few elements are done one by one."""
Flat = Store | Update


def vectorised(stmt: Stmt) -> Stmt:
    """`stmt` with its innermost loops as vectors, where that means the same."""
    match stmt:
        case For(Axis() as i, _, For(Axis() as j, _, Store() as body, "serial"), "serial") if _turns(j, body):
            return _turned((i, j), body)
        case For() if _fits(stmt):
            return _vectors([stmt])
        case For(var, extent, body, kind) if kind not in ("vectorized", "unrolled"):
            inner = vectorised(body)
            return For(var, extent, inner, kind) if sequence(inner) else inner
        case Block(body):
            done: list[Stmt] = []
            for _, run in groupby(body, key=lambda each: tuple(_sums(each)) or each):
                first, *more = run
                done.append(_vectors([first, *more]) if more else vectorised(first))
            return block(*done)
        case Alloc() | Let():
            return replace(stmt, body=vectorised(stmt.body))
        case If(cond, body, orelse):
            return If(cond, vectorised(body), None if orelse is None else vectorised(orelse))
        case Update() if _idle(stmt):
            return block()
    return stmt


def _fits(stmt: Stmt) -> bool:
    """Whether iterations of the loop can be lanes."""
    if not isinstance(stmt, For) or not isinstance(stmt.var, Axis) or stmt.kind != "serial" or stmt.extent == 1:
        return False
    body = _flat(stmt)
    return bool(body) and all(_in_lanes(stmt.var, part) for part in body) and _apart_from_each_other(body)


def _flat(loop: Stmt) -> tuple[Flat, ...]:
    """The statements of a loop in which there is nothing but what writes memory; else none."""
    parts = sequence(loop.body) if isinstance(loop, For) else ()
    found = tuple(part for part in parts if isinstance(part, Store | Update))
    return tuple(part for part in found if not _idle(part)) if len(found) == len(parts) else ()


def _idle(part: Flat) -> bool:
    """Whether it adds nothing: what a mask leaves of a sum."""
    if isinstance(part, Store) or not isinstance(part.value, Const):
        return False
    return part.value.value == reduction_identity(part.kind, part.tensor.dtype).value


def _turns(var: Axis, body: Store) -> bool:
    """Whether what is written in lines is read in columns, by loops that are not the compiler's own."""
    steps = [stride_along(each.tensor, each.index, var) for each in walk(body.value) if isinstance(each, Load)]
    if body.tensor.body is not None or None in steps or {*steps} <= {0, 1}:
        return False
    return stride_along(body.tensor, body.index, var) == 1


def _turned(axes: tuple[Axis, Axis], body: Store) -> Stmt:
    """Arrange the loop as `cpu.schedule` does: in squares, which are turned round in registers."""
    turned = Tensor("turned", tuple(axis.extent for axis in axes), body.tensor.dtype, axes, body.value)
    made = create_schedule(turned)
    schedule_stage(made[turned], Knobs(tail="peel"))

    def place(_: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        moved: dict[Var, Expr] = dict(zip(axes, index))
        return body.tensor, tuple(substitute(each, moved) for each in body.index)

    return map_accesses(lower(made).body, lambda _: None, place)


def _sums(stmt: Stmt) -> dict[Hashable, Update]:
    """What all iterations of a loop that can be lanes add to; equal keys where others add to the same."""
    found = [part for part in _flat(stmt) if isinstance(part, Update)] if _fits(stmt) else []
    return {_place(part): part for part in found if stride_along(part.tensor, part.index, stmt.var) == 0}  # type: ignore[attr-defined]


def _place(part: Flat) -> Hashable:
    return part.tensor, *map(structure, part.index)


class VectorSpan(NamedTuple):
    """`times` times so many vectors of a loop, from `first` on; of one lane, what is left."""

    first: int
    times: int
    registers: int
    lanes: int


def _cuts(loop: For) -> Iterator[VectorSpan]:
    lanes = target().vector_bytes // max(itemsize(dtype) for part in _flat(loop) for dtype in _types(part))
    widths = (REGISTERS, lanes), (1, lanes), *((1, lanes // part) for part in NARROWER)
    at = 0
    for registers, width in (*((r, w) for r, w in widths if w > 1), (1, 1)):
        count = (loop.extent - at) // (registers * width)
        if count:
            yield VectorSpan(at, count, registers, width)
            at += count * registers * width


def _vectors(loops: Sequence[Stmt]) -> Stmt:
    """Loops that follow each other and have the same sums, if any."""
    cuts = [(loop, cut) for loop in loops if isinstance(loop, For) for cut in _cuts(loop)]
    lanes = max(cut.lanes for _, cut in cuts)
    size = lanes * max(cut.registers for _, cut in cuts)
    sums = _sums(loops[0]) if lanes > 1 else {}
    parts = {place: Tensor("part", (size,), whole.tensor.dtype) for place, whole in sums.items()}
    code = block(*(_lanes(loop, cut, parts) for loop, cut in cuts))
    for place, whole in sums.items():
        code = _summed(whole, parts[place], code, lanes)
    return code


def _lanes(loop: For, cut: VectorSpan, parts: dict[Hashable, Tensor]) -> Stmt:
    """The iterations `cut` of the loop, whose lanes add to `parts`, each for itself."""
    body, step = _flat(loop), cut.registers * cut.lanes
    assert isinstance(loop.var, Axis)
    if step == 1:
        rest = Axis(loop.var.name, extent=cut.times)
        return For(rest, cut.times, block(*(_at(part, loop.var, rest + cut.first) for part in body)))
    outer = Axis(f"{loop.var.name}.o", extent=cut.times)

    def one(place: Expr, part: Flat) -> Stmt:
        moved, whole = _at(part, loop.var, outer * step + place + cut.first), parts.get(_place(part))
        if whole is None:
            return moved
        assert isinstance(moved, Update)
        return Update(moved.kind, whole, (place,), moved.value)

    return For(outer, cut.times, _each(step, cut.lanes, lambda place: block(*(one(place, part) for part in body))))


def _each(size: int, lanes: int, make: Callable[[Expr], Stmt]) -> Stmt:
    """`make` of each of `size` places, in vectors that are written out."""
    vector, lane = Axis("v", extent=size // lanes), Axis("l", extent=lanes)
    return For(vector, size // lanes, For(lane, lanes, make(vector * lanes + lane), "vectorized"), "unrolled")


def _summed(whole: Update, part: Tensor, code: Stmt, lanes: int) -> Stmt:
    """`code`, which adds to the sums of lanes `part`, and what adds these to the whole."""
    kind, zero = whole.kind, reduction_identity(whole.kind, part.dtype)
    (size,) = part.shape
    done = [_each(size, lanes, lambda at: Store(part, (at,), zero)), code]
    for half in (size >> n for n in range(1, (size // lanes).bit_length())):
        done.append(_each(half, lanes, lambda at, half=half: Update(kind, part, (at,), Load(part, (at + half,)))))  # type: ignore[misc]
    lane = Axis("l", extent=lanes)
    done.append(For(lane, lanes, Update(kind, whole.tensor, whole.index, Load(part, (lane,))), "vectorized"))
    return Alloc(part, block(*done), "local")


def _in_lanes(var: Axis, part: Flat) -> bool:
    """Whether iterations can be lanes: each has an element of its own, beside its neighbours', or all add to one."""
    step = stride_along(part.tensor, part.index, var)
    sums = isinstance(part, Update) and part.kind != "ordered_sum"
    return _together(var, part.value) and (step == 1 or (step == 0 and sums))


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


def _at(body: Stmt, var: Var, place: Expr) -> Stmt:
    return map_accesses(
        body, lambda e: place if e is var else None, lambda t, i: (t, tuple(substitute(x, {var: place}) for x in i))
    )


def _together(var: Axis, value: Expr) -> bool:
    """Whether all that is read in vectors lies together."""
    for node in walk(value):
        if isinstance(node, Load) and stride_along(node.tensor, node.index, var) not in (0, 1):
            return False
        if isinstance(node, Select):
            for arm in (node.a, node.b):
                for load in walk(arm):
                    if (
                        isinstance(load, Load)
                        and not is_in_bounds(load)
                        and stride_along(load.tensor, load.index, var) != 1
                    ):
                        return False
    return True
