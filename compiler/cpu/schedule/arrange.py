"""Schedule loops for a CPU with vectors: chosen from the accesses, not from the operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from celosia.compiler.cpu.schedule.registers import RegisterTile, register_tile, step
from celosia.compiler.expr import (
    INDEX,
    Axis,
    Load,
    Reduce,
    Schedule,
    Select,
    Stage,
    Tensor,
    collapse,
    fuse_epilogues,
    fuse_injective,
)
from celosia.compiler.expr.affine import depends, flatten, in_range
from celosia.compiler.expr.names import unused_name
from celosia.compiler.expr.nodes import Expr, Scan
from celosia.compiler.expr.transform import topological
from celosia.compiler.expr.walk import rewrite, walk
from celosia.compiler.target import target


@dataclass(frozen=True)
class Knobs:
    """Choices for the schedule of one tensor, in the place of what the compiler takes.

    tile: takes one of the tiles of registers that there are. vectors: so many side by side, where there is no tile.
    tail: see Stage.set_tail; "peel" where no element may be computed twice.
    """

    tile: Callable[[list[RegisterTile]], RegisterTile] | None = None
    vectors: int = 1
    tail: str = "shift"


def schedule(outputs: Sequence[Tensor], knobs: Mapping[str, Knobs] | None = None) -> Schedule:
    """The compiler's own choice: vectors, and tiles for reductions. knobs: by the name of a tensor."""
    result = plain(outputs)
    for tensor, stage in result.stages.items():
        if not isinstance(stage.body, Scan):
            arrange(stage, (knobs or {}).get(tensor.name, Knobs()))
    return result


def plain(outputs: Sequence[Tensor]) -> Schedule:
    """What every schedule begins with: chains of element-wise operators are one loop, neighbouring axes are merged.

    Each tensor that is computed has a name of its own. Steps of scans are arranged: a trace does not reach into them.
    """
    result = Schedule(_named_apart(collapse(fuse_epilogues(fuse_injective(outputs)))))
    for stage in result.stages.values():
        if isinstance(stage.body, Scan):
            stage.step = schedule(stage.body.updates)
    return result


def _named_apart(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors with a number behind names that others have."""
    order = topological(outputs)
    taken = {tensor.name for tensor in order if tensor.body is None}
    names = {tensor: unused_name(tensor.name, taken) for tensor in order if tensor.body is not None}
    if all(name == tensor.name for tensor, name in names.items()):
        return tuple(outputs)
    new: dict[Tensor, Tensor] = {}

    def change(node: Expr) -> Expr | None:
        return Load(new[node.tensor], node.index) if isinstance(node, Load) else None

    for tensor in order:
        if tensor.body is None:
            new[tensor] = tensor
        else:
            new[tensor] = replace(tensor, name=names[tensor], body=rewrite(tensor.body, change))
    return tuple(new[tensor] for tensor in outputs)


def arrange(stage: Stage, knobs: Knobs = Knobs()) -> None:
    """Compute vectors along the innermost axis where it is read in steps of 0 or 1, in registers for reductions.

    Reductions along contiguous elements are accumulated in lanes. What fits neither is left to LLVM.
    """
    tensor = stage.tensor
    assert tensor.body is not None
    if knobs.tail != stage.tail:
        stage.set_tail(knobs.tail)
    reduces = [node for node in walk(tensor.body) if isinstance(node, Reduce)]
    data = [axis for axis in stage.order if not axis.reduce]
    if len(reduces) > 1 or (reduces and _guarded(tensor.body, data[-1:])):
        return
    reads = [node for node in walk(tensor.body) if isinstance(node, Load)]
    if not reduces:
        _elementwise(stage, data, reads, knobs.vectors)
    elif not register_tile(stage, reduces[0], data, reads, knobs.tile):
        _lanes(stage, reduces[0], reads, knobs.vectors)


def _elementwise(stage: Stage, data: list[Axis], reads: list[Load], vectors: int) -> None:
    assert stage.tensor.body is not None
    if not data or _by_turns(stage, data, reads) or data[-1].extent < 4:
        return
    if any(step(read, data[-1]) is None for read in reads) and _gathered(stage, data, reads):
        return
    if any(step(read, data[-1]) not in (0, 1, 2) for read in reads):
        return _turned(stage, data, reads)
    if any(step(read, data[-1]) != 1 for read in _guarded(stage.tensor.body, data[-1:])):
        return
    values = [node.dtype for node in walk(stage.tensor.body) if node.dtype != INDEX]  # positions take no vectors
    lanes = vectors * min(target().lanes(dtype) for dtype in (stage.tensor.dtype, *values))
    outer, inner = stage.split(data[-1], _abreast(lanes, data[-1].extent))
    most = MASKED if _guarded(stage.tensor.body, data[-1:]) else FEW
    if target().abreast > 1 and outer.extent <= most:
        stage.unroll(outer)
    stage.vectorize(inner)


MASKED, FEW = 16, 4
"""Vectors that are written out for a processor that takes them abreast, MASKED where some of their lanes are not read:
then it is known which, see llvm/masks.py."""


def _abreast(lanes: int, extent: int) -> int:
    """Elements that an element-wise loop over so many computes at once, `lanes` being those of a vector."""
    if target().abreast == 1:
        return min(lanes, extent)
    return min(lanes * target().abreast, 1 << extent.bit_length() - 1)


NARROW = range(2, 9)
"""Extents of an axis whose elements are read or written by turns: shuffles grow with their square."""


def _by_turns(stage: Stage, data: list[Axis], reads: list[Load]) -> bool:
    """Vectors along the longer of two axes that lie in one piece, the narrow one inside: `x[p, c]` with few c.

    The loop over the narrow axis is written out inside, so that all of a piece is read or written at once and lanes
    are shuffled. False where nothing lies so.
    """
    assert stage.tensor.body is not None
    written = flatten(tuple(axis.extent for axis in data), tuple(data))
    accesses = [*reads, Load(stage.tensor, (written,))]
    for row in (axis for axis in data if axis.extent in NARROW):
        columns = [axis for axis in data if axis is not row]
        if not columns or (column := columns[-1]).extent < 4 or _guarded(stage.tensor.body, [row, column]):
            continue
        steps = [(step(access, column), step(access, row)) for access in accesses]
        turns = [pair == (row.extent, 1) for pair in steps]
        if not any(turns) or not all(turn or pair[0] in (0, 1) for turn, pair in zip(turns, steps)):
            continue
        outer, inner = stage.split(column, _abreast(target().lanes(stage.tensor.dtype), column.extent))
        if target().abreast > 1 and outer.extent <= FEW:
            stage.unroll(outer)
        stage.reorder(*columns[:-1], outer, row, inner)
        stage.unroll(row)
        stage.vectorize(inner)
        return True
    return False


SHARED = 16
"""Rows that share the places of what they gather."""


def _gathered(stage: Stage, data: list[Axis], reads: list[Load]) -> bool:
    """Vectors that gather, for several rows at once where the places do not depend on the row: they are found once.

    (Found by tuning a bilinear resize, which it makes five times as fast.) False where there are no such rows.
    """
    assert stage.tensor.body is not None
    column = data[-1]
    rows = [axis for axis in data[:-1] if axis.extent >= 4 and all(step(read, axis) is not None for read in reads)]
    if not rows or _guarded(stage.tensor.body, [*rows, column]):
        return False
    row = max(rows, key=lambda axis: axis.extent)
    row_outer, row_inner = stage.split(row, min(SHARED, row.extent))
    outer, inner = stage.split(column, min(4 * target().lanes(stage.tensor.dtype), column.extent))
    stage.reorder(row_outer, *(axis for axis in data[:-1] if axis is not row), outer, row_inner, inner)
    stage.unroll(row_inner)
    stage.vectorize(inner)
    return True


def _turned(stage: Stage, data: list[Axis], reads: list[Load]) -> None:
    """Square tiles where what is written along one axis is read along another, so that both go in vectors."""
    assert stage.tensor.body is not None
    column = data[-1]
    across = [read for read in reads if step(read, column) not in (0, 1)]
    rows = [axis for axis in data[:-1] if axis.extent >= 4 and all(step(read, axis) == 1 for read in across)]
    if not rows or any(step(read, column) is None for read in reads) or _guarded(stage.tensor.body, [*rows, column]):
        return
    row = max(rows, key=lambda axis: axis.extent)
    lanes = min(16, target().lanes(stage.tensor.dtype), row.extent, column.extent)
    lanes = 1 << lanes.bit_length() - 1
    row_outer, row_inner = stage.split(row, lanes)
    outer, inner = stage.split(column, lanes)
    others = [axis for axis in data[:-1] if axis is not row]
    stage.reorder(*others, row_outer, outer, row_inner, inner)
    stage.unroll(row_inner)
    stage.vectorize(inner)


def _lanes(stage: Stage, reduce: Reduce, reads: list[Load], vectors: int) -> None:
    axis = stage.order[-1]
    if not axis.reduce or reduce.kind == "ordered_sum" or axis.extent < 4:
        return
    inside = [node for node in walk(reduce.value) if isinstance(node, Load)]
    if any(step(read, axis) not in (0, 1) for read in inside):
        return
    lanes = target().lanes(reduce.dtype)
    stage.accumulate_lanes(axis, tuple(w for w in (4 * vectors * lanes, lanes, 4) if w <= axis.extent))


def _guarded(body: Expr, along: list[Axis]) -> list[Load]:
    """Loads outside their tensors that a condition keeps back, one that may differ between neighbours along these axes.
    Vectors can do so with consecutive elements only.
    """
    selects = [node for node in walk(body) if isinstance(node, Select)]
    arms = [arm for node in selects if any(depends(node.cond, axis) for axis in along) for arm in (node.a, node.b)]
    return [node for arm in arms for node in walk(arm) if isinstance(node, Load) and not in_range(node)]
