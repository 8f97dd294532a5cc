"""Pieces of loop nests, and changes of them, of which lowering is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from celosia.compiler.expr.bounds import Region, statements
from celosia.compiler.expr.loops import (
    Alloc,
    Block,
    For,
    If,
    Stmt,
    Store,
    Update,
    block,
    map_accesses,
)
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Const,
    Expr,
    Load,
    Tensor,
    Var,
    is_float,
    wrap,
)
from celosia.compiler.expr.schedule import Fuse, Split, Stage
from celosia.compiler.expr.walk import rewrite, substitute


def with_whole_tiles(stage: Stage, part: Region) -> Region:
    """`part`; where it has not all that an intrinsic computes at once, the dimensions of that are whole."""
    if stage.intrinsic is None:
        return part
    tile, intrinsic = stage.intrinsic_loops(), stage.intrinsic[1]
    if prod(count for axis, (_, count) in zip(stage.tensor.axes, part) if axis in tile) >= intrinsic.size:
        return part
    whole: tuple[Expr, int]
    found = []
    for axis, size, given in zip(stage.tensor.axes, stage.tensor.shape, part):
        whole = Const(0, INDEX), size
        found.append(whole if axis in tile else given)
    return tuple(found)


def without_single(code: Stmt) -> Stmt:
    """`code` without loops of one iteration, as parts of tensors have many."""
    zero: Expr = Const(0, INDEX)
    single = {s.var for s in statements(code) if isinstance(s, For) and s.extent == 1 and s.kind != "pipelined"}

    def go(s: Stmt) -> Stmt:
        match s:
            case For(var, extent, body, kind):
                return go(body) if var in single else For(var, extent, go(body), kind)
            case If(cond, body, orelse):
                return If(cond, go(body), None if orelse is None else go(orelse))
            case Alloc(body=body):
                return replace(s, body=go(body))
            case Block(body):
                return block(*(go(inner) for inner in body))
        return s

    return go(map_accesses(code, lambda e: zero if isinstance(e, Var) and e in single else None))


def with_copies(body: Expr, copies: dict[Tensor, Tensor]) -> Expr:
    """`body` with reads of tensors from their copies."""

    def change(e: Expr) -> Expr | None:
        return Load(copies[e.tensor], e.index) if isinstance(e, Load) and e.tensor in copies else None

    return rewrite(body, change)


def start_value(kind: str, dtype: str) -> Const:
    """What a reduction begins with."""
    if kind in ("sum", "ordered_sum", "prod"):
        return wrap(kind == "prod", dtype)  # type: ignore[return-value]
    if is_float(dtype):
        return Const(float("-inf") if kind == "max" else float("inf"), dtype)
    if dtype == "bool":
        return Const(kind == "min", dtype)
    info = np.iinfo(dtype)
    return Const(int(info.min if kind == "max" else info.max), dtype)


def guarded(tests: Sequence[Expr], code: Stmt) -> Stmt:
    """`code`, where all of `tests` hold."""
    return If(reduce_and(tests), code) if tests else code


def reduce_and(tests: Sequence[Expr]) -> Expr:
    """Whether all of `tests` hold."""
    if not tests:
        return Const(True, "bool")
    whole, *rest = tests
    for test in rest:
        whole = whole & test
    return whole


def in_lanes(
    stage: Stage, axis: Axis, axes: list[Axis], acc: Tensor, kind: str, value: Expr, locals_: list[Tensor]
) -> Stmt:
    """Update `acc` with `value` over `axes`, the last of which, `axis`, in vectors; see Stage.accumulate_lanes."""
    if any(a.extent == 0 for a in axes):
        return block()
    parts: list[Stmt] = []
    done = 0
    for width in (*stage.lanes[axis], 1):
        count = (axis.extent - done) // width
        if count == 0:
            continue
        step, lane = Axis(f"{axis.name}.o", extent=count, reduce=True), Axis(f"{axis.name}.i", extent=width)
        here = substitute(value, {axis: step * width + lane + done})
        done += count * width
        vector = acc if width == 1 else Tensor(f"{acc.name}.x{width}", (width,), acc.dtype)
        at: tuple[Expr, ...] = () if width == 1 else (lane,)
        code: Stmt = For(lane, width, Update(kind, vector, at, here), "vectorized")
        code = For(step, count, code)
        for a in reversed([a for a in axes if a is not axis]):
            code = For(a, a.extent, code, stage.kinds.get(a, "serial"))
        if width > 1:
            locals_.append(vector)
            start = Store(vector, at, start_value(kind, acc.dtype))
            last = Update(kind, acc, (), Load(vector, at))
            code = block(For(lane, width, start, "vectorized"), code, For(lane, width, last, "vectorized"))
        parts.append(code)
    return block(*parts)


def replaced(body: Expr, by_id: dict[int, Expr]) -> Expr:
    """Top-down, so that the nodes in `by_id` are found before their children are rebuilt."""
    done: dict[int, Expr] = {}

    def go(node: Expr) -> Expr:
        if id(node) in by_id:
            return by_id[id(node)]
        if id(node) not in done:
            before = node.children()
            after = tuple(go(c) for c in before)
            done[id(node)] = node if all(x is y for x, y in zip(before, after)) else node.rebuild(after)
        return done[id(node)]

    return go(body)


def leaves(stage: Stage, root: Axis) -> list[Axis]:
    """The loops that `root` became."""
    leaves = [root]
    for relation in stage.relations:
        match relation:
            case Split(parent, outer, inner) if parent in leaves:
                leaves += [outer, inner]
            case Fuse(outer, inner, fused) if outer in leaves or inner in leaves:
                leaves.append(fused)
    return leaves
