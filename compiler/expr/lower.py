"""Tensors and their schedule to the loop IR."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from celosia.compiler.expr.affine import flatten
from celosia.compiler.expr.loops import Alloc, For, Function, If, Stmt, Store, Update, block
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    is_float,
    rewrite,
    substitute,
    walk,
    wrap,
)
from celosia.compiler.expr.schedule import Fuse, Schedule, Split, Stage, create_schedule
from celosia.compiler.expr.transform import inline


def lower(
    what: Tensor | Sequence[Tensor] | Schedule, inputs: Sequence[Tensor] | None = None, name: str | None = None
) -> Function:
    """The loops of a schedule, or of tensors under the plain one.

    `inputs` orders the kernel's parameters; left out, they are the placeholders in the order of first use.
    ValueError where a placeholder that is needed is not among them.
    """
    schedule = what if isinstance(what, Schedule) else create_schedule(what)
    needed = [t for t in schedule.tensors if t.body is None and t.value is None]
    inputs = tuple(needed if inputs is None else inputs)
    if missing := [t.name for t in needed if t not in inputs]:
        raise ValueError(f"placeholders {missing} are read but not among the inputs")

    inlined = {t for t, stage in schedule.stages.items() if stage.inlined and t not in schedule.outputs}
    nests: list[Stmt] = []
    temporaries: list[Tensor] = []
    copies: dict[Tensor, Tensor] = {}  # inlined tensors whose own definition was rewritten
    for tensor, stage in schedule.stages.items():
        assert tensor.body is not None
        body = inline(_with_copies(tensor.body, copies), set(copies.values()))
        if tensor in inlined:
            copies[tensor] = Tensor(tensor.name, tensor.shape, tensor.dtype, tensor.axes, body)
            continue
        nests.append(_nest(stage, body))
        if tensor not in schedule.outputs:
            temporaries.append(tensor)
    code = block(*nests)
    for tensor in reversed(temporaries):
        code = Alloc(tensor, code)
    return Function(name or schedule.outputs[0].name, inputs, schedule.outputs, code)


def _with_copies(body: Expr, copies: dict[Tensor, Tensor]) -> Expr:
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


def _nest(stage: Stage, body: Expr) -> Stmt:
    """All loops of one tensor.

    Data loops inside the first reduction loop form a tile that is accumulated in "local" tensors:
    start, update, and only then the element itself, into which everything after the reduction is computed.
    """
    tensor = stage.tensor
    values, guards = stage.index_values()
    at = flatten(tuple(axis.extent for axis in tensor.axes), tuple(tensor.axes)) if tensor.axes else Const(0, INDEX)
    if tuple(axis.extent for axis in tensor.axes) == tensor.shape and tensor.shape:
        index = tuple(substitute(axis, values) for axis in tensor.axes)
    else:
        index = (substitute(at, values),)
    body = substitute(body, values)

    def loops(axes: Sequence[Axis], inner: Stmt) -> Stmt:
        for axis in reversed(axes):
            if axis.extent == 0:
                return block()
            inner = For(axis, axis.extent, inner, stage.kinds.get(axis, "serial"))
        return inner

    reduces = [node for node in walk(body) if isinstance(node, Reduce)]
    if any(isinstance(node, Reduce) for reduce in reduces for node in walk(reduce.value)):
        raise ValueError(f"{tensor.name}: a reduction inside a reduction; make the inner one a tensor")
    if not reduces:
        return loops(stage.order, Store(tensor, index, body))
    first = next((i for i, axis in enumerate(stage.order) if axis.reduce), len(stage.order))
    outer, inner = stage.order[:first], stage.order[first:]
    tile = [axis for axis in inner if not axis.reduce]

    where: tuple[Expr, ...] = tuple(tile)
    accumulators: dict[int, Expr] = {}
    parts: list[Stmt] = []
    locals_: list[Tensor] = []
    for number, reduce in enumerate(reduces):
        name = f"{tensor.name}.acc{number or ''}"
        acc = Tensor(name, tuple(axis.extent for axis in tile), reduce.dtype)
        locals_.append(acc)
        roots = {leaf for root in reduce.axes for leaf in _leaves(stage, root)}
        value = reduce.value
        update: Stmt = Update(reduce.kind, acc, where, value)
        own = [g for g in guards if any(node in roots for node in walk(g))]
        for guard in own:
            update = If(guard, update)
        parts.append(loops(tile, Store(acc, where, start_value(reduce.kind, reduce.dtype))))
        if own_lanes := [axis for axis in stage.lanes if axis in roots]:
            axes = [axis for axis in inner if axis in roots]
            parts.append(_in_lanes(stage, own_lanes[0], axes, acc, reduce.kind, value, locals_))
        else:
            parts.append(loops([axis for axis in inner if not axis.reduce or axis in roots], update))
        accumulators[id(reduce)] = Load(acc, where)
    final = _replace(body, accumulators)
    parts.append(loops(tile, Store(tensor, index, final)))
    code: Stmt = block(*parts)
    for acc in reversed(locals_):
        code = Alloc(acc, code, "local")
    return loops(outer, code)


def _in_lanes(
    stage: Stage, axis: Axis, axes: list[Axis], acc: Tensor, kind: str, value: Expr, locals_: list[Tensor]
) -> Stmt:
    """Update `acc` with `value` over `axes`, the last of which, `axis`, in vectors; see Stage.accumulate_lanes."""
    parts: list[Stmt] = []
    done = 0
    for width in (*stage.lanes[axis], 1):
        count = (axis.extent - done) // width
        if count == 0:
            continue
        step, lane = Axis(f"{axis.name}.o", extent=count), Axis(f"{axis.name}.i", extent=width)
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


def _replace(body: Expr, by_id: dict[int, Expr]) -> Expr:
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


def _leaves(stage: Stage, root: Axis) -> list[Axis]:
    """The loops that `root` became."""
    leaves = [root]
    for relation in stage.relations:
        match relation:
            case Split(parent, outer, inner) if parent in leaves:
                leaves += [outer, inner]
            case Fuse(outer, inner, fused) if outer in leaves or inner in leaves:
                leaves.append(fused)
    return leaves
