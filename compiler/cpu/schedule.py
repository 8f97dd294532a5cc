"""How loops are arranged for a CPU with vectors: chosen from the accesses, not from the operator."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from celosia.compiler.expr import INDEX, Axis, Load, Reduce, Schedule, Select, Stage, Tensor, collapse, fuse_injective
from celosia.compiler.expr.affine import coefficient, flatten, in_range, linear
from celosia.compiler.expr.nodes import Expr, itemsize, walk

VECTOR_BYTES = 64
ROWS = (8, 6, 4, 7, 5, 3, 2)  # rows of an output tile that share a vector operand, best first


def schedule(outputs: Sequence[Tensor]) -> Schedule:
    """Chains of element-wise operators become one loop, neighbouring axes are merged, and reductions get a tile."""
    result = Schedule(collapse(fuse_injective(outputs)))
    for stage in result.stages.values():
        arrange(stage)
    return result


def arrange(stage: Stage) -> None:
    """Compute vectors along the innermost axis where it is read in steps of 0 or 1, in registers for reductions.

    Reductions along contiguous elements are accumulated in lanes. What fits neither is left to LLVM.
    """
    tensor = stage.tensor
    assert tensor.body is not None
    reduces = [node for node in walk(tensor.body) if isinstance(node, Reduce)]
    if len(reduces) > 1 or (reduces and _guarded(tensor.body)):
        return
    data = [axis for axis in stage.order if not axis.reduce]
    reads = [node for node in walk(tensor.body) if isinstance(node, Load)]
    if not reduces:
        _elementwise(stage, data, reads)
    elif not _tiled(stage, reduces[0], data, reads):
        _lanes(stage, reduces[0], reads)


def _elementwise(stage: Stage, data: list[Axis], reads: list[Load]) -> None:
    assert stage.tensor.body is not None
    if not data or data[-1].extent < 4 or any(_step(read, data[-1]) not in (0, 1, 2) for read in reads):
        return
    if any(_step(read, data[-1]) != 1 for read in _guarded(stage.tensor.body)):
        return
    values = [node.dtype for node in walk(stage.tensor.body) if node.dtype != INDEX]  # positions take no vectors
    lanes = VECTOR_BYTES // max(itemsize(dtype) for dtype in (stage.tensor.dtype, *values))
    _, inner = stage.split(data[-1], min(lanes, data[-1].extent))
    stage.vectorize(inner)


def _lanes(stage: Stage, reduce: Reduce, reads: list[Load]) -> None:
    axis = stage.order[-1]
    if not axis.reduce or reduce.kind == "ordered_sum" or axis.extent < 4:
        return
    inside = [node for node in walk(reduce.value) if isinstance(node, Load)]
    if any(_step(read, axis) not in (0, 1) for read in inside):
        return
    lanes = VECTOR_BYTES // itemsize(reduce.dtype)
    stage.accumulate_lanes(axis, tuple(w for w in (4 * lanes, lanes, 4) if w <= axis.extent))


def _tiled(stage: Stage, reduce: Reduce, data: list[Axis], reads: list[Load]) -> bool:
    if not data or data[-1].extent < 4:
        return False
    column = data[-1]
    inside = [node for node in walk(reduce.value) if isinstance(node, Load)]
    steps = [_step(read, column) for read in inside]
    if any(step not in (0, 1, 2) for step in steps) or not any(steps):
        return False
    if any(_step(read, column) is None for read in reads):
        return False
    lanes = VECTOR_BYTES // itemsize(reduce.dtype)
    row = _shared(inside, [s for s in steps if s is not None], data[:-1])
    wide = column.extent >= 2 * lanes and all(step != 2 for step in steps)
    outer, inner = stage.split(column, min(column.extent, (2 if wide else 1) * lanes))
    around = data[:-1]
    tile: list[Axis] = []
    if row is not None:
        rows = next((r for r in ROWS if row.extent % r == 0), min(ROWS[0], row.extent))
        row_outer, row_inner = stage.split(row, rows)
        stage.unroll(row_inner)
        tile.append(row_inner)
        around = _around([axis for axis in around if axis is not row], row_outer, outer, inside, steps)
    else:
        around.append(outer)
    steps_in = [axis for axis in stage.order if axis.reduce]
    stage.reorder(*around, *steps_in, *tile, inner)
    if prod(axis.extent for axis in (*steps_in, *tile)) * len(inside) <= 64:
        for axis in steps_in:
            stage.unroll(axis)
    stage.vectorize(inner)
    return True


def _around(others: list[Axis], rows: Axis, columns: Axis, reads: list[Load], steps: list[int | None]) -> list[Axis]:
    """The loops around a tile: those over rows outside or inside those over columns, by which brings less traffic.

    Vector operands are read again for each row tile that is outside, the others for each column tile.
    """
    both = [axis for axis in others if any(_step(read, axis) != 0 for read, step in zip(reads, steps) if not step)]
    along = [axis for axis in others if axis not in both]
    vectors = sum(read.tensor.nbytes for read, step in zip(reads, steps) if step)
    scalars = sum(read.tensor.nbytes for read, step in zip(reads, steps) if not step)
    column_tiles = prod(axis.extent for axis in along) * columns.extent
    if vectors * rows.extent + scalars <= scalars * column_tiles + vectors:
        return [*both, rows, *along, columns]
    return [*both, *along, columns, rows]


def _step(read: Load, axis: Axis) -> int | None:
    return coefficient(linear(flatten(read.tensor.shape, read.index)), axis)


def _shared(reads: list[Load], steps: list[int], axes: list[Axis]) -> Axis | None:
    """An axis along which the vector operands stay the same while others change; the longest such."""
    found = [
        axis
        for axis in axes
        if axis.extent > 1
        and all(_step(read, axis) == 0 for read, step in zip(reads, steps) if step)
        and any(_step(read, axis) for read, step in zip(reads, steps) if not step)
    ]
    return max(found, key=lambda axis: axis.extent, default=None)


def _guarded(body: Expr) -> list[Load]:
    """Loads outside their tensors that a condition keeps back. Vectors can do so with consecutive elements only."""
    arms = [arm for node in walk(body) if isinstance(node, Select) for arm in (node.a, node.b)]
    return [node for arm in arms for node in walk(arm) if isinstance(node, Load) and not in_range(node)]
