"""How loops are arranged for a CPU with vectors: chosen from the accesses, not from the operator."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from celosia.compiler.expr import Axis, Load, Reduce, Schedule, Select, Stage, Tensor, collapse, fuse_injective
from celosia.compiler.expr.affine import coefficient, flatten, in_range, linear
from celosia.compiler.expr.nodes import Expr, itemsize, walk

VECTOR_BYTES = 64
ROWS = 6  # rows of an output tile that share a vector operand


def schedule(outputs: Sequence[Tensor]) -> Schedule:
    """Chains of element-wise operators become one loop, neighbouring axes are merged, and reductions get a tile."""
    result = Schedule(collapse(fuse_injective(outputs)))
    for stage in result.stages.values():
        arrange(stage)
    return result


def arrange(stage: Stage) -> None:
    """Accumulate a tile of vectors in registers where the innermost axis is read in steps of 0 or 1.

    Other reductions, and element-wise loops, stay as they are: LLVM vectorises those itself.
    """
    tensor = stage.tensor
    assert tensor.body is not None
    reduces = [node for node in walk(tensor.body) if isinstance(node, Reduce)]
    data = [axis for axis in stage.order if not axis.reduce]
    if len(reduces) != 1 or not data or data[-1].extent < 4:
        return
    reads = [node for node in walk(reduces[0].value) if isinstance(node, Load)]
    column = data[-1]
    steps = [_step(read, column) for read in reads]
    if any(step not in (0, 1, 2) for step in steps) or not any(steps) or _guarded(tensor.body):
        return
    if any(_step(node, column) is None for node in walk(tensor.body) if isinstance(node, Load)):
        return
    lanes = VECTOR_BYTES // itemsize(reduces[0].dtype)
    row = _shared(reads, [s for s in steps if s is not None], data[:-1])
    wide = column.extent >= 2 * lanes and all(step != 2 for step in steps)
    width = min(column.extent, (2 if wide else 1) * lanes)
    outer, inner = stage.split(column, width)
    around = [axis for axis in data[:-1] if axis is not row]
    tile: list[Axis] = []
    if row is not None:
        rows = next((r for r in (ROWS, 4, 8, 3, 2) if row.extent % r == 0), min(ROWS, row.extent))
        row_outer, row_inner = stage.split(row, rows)
        around.append(row_outer)
        stage.unroll(row_inner)
        tile.append(row_inner)
    steps_in = [axis for axis in stage.order if axis.reduce]
    stage.reorder(*around, outer, *steps_in, *tile, inner)
    if prod(axis.extent for axis in steps_in) * len(reads) * max(1, *(a.extent for a in tile), 1) <= 64:
        for axis in steps_in:
            stage.unroll(axis)
    stage.vectorize(inner)


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


def _guarded(body: Expr) -> bool:
    """Whether a load outside its tensor is kept back by a condition, which vectors cannot do."""
    selects = [node for node in walk(body) if isinstance(node, Select)]
    return any(isinstance(m, Load) and not in_range(m) for s in selects for arm in (s.a, s.b) for m in walk(arm))
