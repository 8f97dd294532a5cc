"""Parts of lowering: guards, accumulation in lanes, reduction identities, and rewrites of loop nests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

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
from celosia.compiler.expr.regions import Region, statements
from celosia.compiler.expr.schedule import Fuse, Split, Stage
from celosia.compiler.expr.walk import rewrite, substitute


def with_whole_tiles(stage: Stage, part: Region) -> Region:
    """Widen a region that is smaller than a tile of the stage's intrinsic to complete dimensions of that tile.

    An intrinsic always computes a complete tile. Other regions are returned unchanged.
    """
    if stage.intrinsic is None:
        return part
    tile, intrinsic = stage.intrinsic_loops(), stage.intrinsic[1]
    if prod(count for axis, (_, count) in zip(stage.tensor.axes, part) if axis in tile) >= intrinsic.size:
        return part
    full: tuple[Expr, int]
    widened = []
    for axis, size, interval in zip(stage.tensor.axes, stage.tensor.shape, part):
        full = Const(0, INDEX), size
        widened.append(full if axis in tile else interval)
    return tuple(widened)


def drop_unit_loops(code: Stmt) -> Stmt:
    """Remove loops of one iteration, of which regions of tensors have many."""
    zero: Expr = Const(0, INDEX)
    unit_variables = {s.var for s in statements(code) if isinstance(s, For) and s.extent == 1 and s.kind != "pipelined"}

    def without_unit_loops(s: Stmt) -> Stmt:
        """Rebuild a statement without its unit loops."""
        match s:
            case For(var, extent, body, kind):
                return (
                    without_unit_loops(body)
                    if var in unit_variables
                    else For(var, extent, without_unit_loops(body), kind)
                )
            case If(cond, body, orelse):
                return If(cond, without_unit_loops(body), None if orelse is None else without_unit_loops(orelse))
            case Alloc(body=body):
                return replace(s, body=without_unit_loops(body))
            case Block(body):
                return block(*(without_unit_loops(inner) for inner in body))
        return s

    return without_unit_loops(
        map_accesses(code, lambda e: zero if isinstance(e, Var) and e in unit_variables else None)
    )


def redirect_to_copies(body: Expr, copies: dict[Tensor, Tensor]) -> Expr:
    """Redirect reads of the tensors in `copies` to their copies."""

    def redirect_load(e: Expr) -> Expr | None:
        return Load(copies[e.tensor], e.index) if isinstance(e, Load) and e.tensor in copies else None

    return rewrite(body, redirect_load)


def reduction_identity(kind: str, dtype: str) -> Const:
    """Return the identity element of a reduction, with which accumulation starts."""
    if kind in ("sum", "ordered_sum", "prod"):
        return wrap(kind == "prod", dtype)  # type: ignore[return-value]
    if is_float(dtype):
        return Const(float("-inf") if kind == "max" else float("inf"), dtype)
    if dtype == "bool":
        return Const(kind == "min", dtype)
    info = np.iinfo(dtype)
    return Const(int(info.min if kind == "max" else info.max), dtype)


def if_all(tests: Sequence[Expr], code: Stmt) -> Stmt:
    """Run `code` only where all of `tests` hold."""
    return If(reduce_and(tests), code) if tests else code


def reduce_and(tests: Sequence[Expr]) -> Expr:
    """Build the conjunction of `tests`; True for none."""
    if not tests:
        return Const(True, "bool")
    conjunction, *rest = tests
    for test in rest:
        conjunction = conjunction & test
    return conjunction


def accumulate_in_lanes(
    stage: Stage, axis: Axis, axes: list[Axis], acc: Tensor, kind: str, value: Expr, locals_: list[Tensor]
) -> Stmt:
    """Return loops that update `acc` with `value` over `axes`, whose innermost loop `axis` runs in vectors.

    The vectors have the stage's widths, wide ones first (Stage.accumulate_lanes). Each accumulates partial results in
    its lanes, which are combined at the end. The tensors of the vectors are appended to `locals_`.
    """
    if any(a.extent == 0 for a in axes):
        return block()
    parts: list[Stmt] = []
    done = 0
    for width in (*stage.lanes[axis], 1):
        count = (axis.extent - done) // width
        if count == 0:
            continue
        step, lane = Axis(f"{axis.name}.o", extent=count, reduce=True), Axis(f"{axis.name}.i", extent=width)
        lane_value = substitute(value, {axis: step * width + lane + done})
        done += count * width
        vector = acc if width == 1 else Tensor(f"{acc.name}.x{width}", (width,), acc.dtype)
        lane_index: tuple[Expr, ...] = () if width == 1 else (lane,)
        code: Stmt = For(lane, width, Update(kind, vector, lane_index, lane_value), "vectorized")
        code = For(step, count, code)
        for a in reversed([a for a in axes if a is not axis]):
            code = For(a, a.extent, code, stage.kinds.get(a, "serial"))
        if width > 1:
            locals_.append(vector)
            start = Store(vector, lane_index, reduction_identity(kind, acc.dtype))
            last = Update(kind, acc, (), Load(vector, lane_index))
            code = block(For(lane, width, start, "vectorized"), code, For(lane, width, last, "vectorized"))
        parts.append(code)
    return block(*parts)


def replace_nodes(body: Expr, by_id: dict[int, Expr]) -> Expr:
    """Replace the nodes of `body` whose ids are keys of `by_id`.

    It goes top-down, so that nodes are recognised before their operands are rebuilt, which walk.rewrite would do first.
    """
    done: dict[int, Expr] = {}

    def rebuild(node: Expr) -> Expr:
        if id(node) in by_id:
            return by_id[id(node)]
        if id(node) not in done:
            before = node.children()
            after = tuple(rebuild(child) for child in before)
            done[id(node)] = node if all(x is y for x, y in zip(before, after)) else node.rebuild(after)
        return done[id(node)]

    return rebuild(body)


def derived_loops(stage: Stage, root: Axis) -> list[Axis]:
    """Return the loops that `root` became by splits and fusions, `root` included."""
    loops = [root]
    for relation in stage.relations:
        match relation:
            case Split(parent, outer, inner) if parent in loops:
                loops += [outer, inner]
            case Fuse(outer, inner, fused) if outer in loops or inner in loops:
                loops.append(fused)
    return loops
