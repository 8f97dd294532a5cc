"""Register tiles: compute a reduction for several rows and columns at once, so that operands are reused.

For each step of the reduction a tile of `rows` by `columns` vectors reads one scalar for each row and one vector for
each column, and adds all their products to accumulators that stay in registers. This is the inner kernel of K. Goto,
R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008); here rows and columns are whatever axes
have suitable strides: rows and columns of a matrix product, or pixels and blocks of output channels of a convolution.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

from celosia.compiler.cpu.schedule.caches import CACHE_LINE_BYTES, L1_BYTES
from celosia.compiler.expr import Axis, Load, Reduce, Stage
from celosia.compiler.expr.affine import linear, offset, stride_along
from celosia.compiler.expr.math_functions import OF_PAIRS
from celosia.compiler.expr.nodes import Binary, Call, Cast, Expr, Var, substitute, walk
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import MAX_STREAMS, TILE_COLUMNS, TILE_ROWS, TILE_STEPS, target

MAX_UNROLLED_READS = 64
"""Limit of the reads in the body of a reduction after its steps are unrolled."""
MAX_UNROLLED_SLIDING_READS = 128
"""Limit of the unrolled reads if most of them reuse elements that other steps have read."""
MAX_UNROLLED_INT16_READS = 256
"""Limit of the unrolled reads if an instruction multiplies int16 values, which leaves time to read."""
MAX_EVEN_WORK = 1.05
"""Limit of the work of a tile without edge tiles, relative to the best tile, where edge tiles would be loop nests."""


def stride_of(read: Load, axis: Axis) -> int | None:
    """Return the distance in elements between what `read` takes for neighbours along `axis`; None where it varies."""
    return stride_along(read.tensor, read.index, axis)


@dataclass(frozen=True)
class RegisterTile:
    """A tile of accumulators in registers, as a choice of the kernel tuner.

    rows, columns: names of the loops that it spans, "" for none. height: number of rows. width: number of columns, in
    vectors. rows_outside: whether the loop over tiles of rows lies around that over tiles of columns; None for the
    order with less memory traffic.
    """

    rows: str
    columns: str
    height: int
    width: int
    rows_outside: bool | None = None


def apply_register_tile(
    stage: Stage,
    reduce: Reduce,
    data: list[Axis],
    reads: list[Load],
    choose: Callable[[list[RegisterTile]], RegisterTile] | None = None,
) -> bool:
    """Schedule the reduction of `stage` in register tiles along the last of the `data` axes.

    data: axes of the output. reads: all loads of the stage. choose: selects one of all tiles that fit into registers,
    instead of the one with the least work. Returns False, with the stage unchanged, where the strides of `reads` do not
    allow it.
    """
    if not data or data[-1].extent < 4:
        return False
    column = data[-1]
    inside = [node for node in walk(reduce.value) if isinstance(node, Load)]
    lane_strides = [stride_of(read, column) for read in inside]
    if (
        any(s not in (0, 1, 2) for s in lane_strides)
        or not any(lane_strides)
        or any(stride_of(read, column) is None for read in reads)
    ):
        return False
    outer, lane = stage.split(column, min(column.extent, _vector_lanes(reduce)))
    first: dict[Var, Expr] = {column: outer * lane.extent}
    # The index of a load now counts vectors along the column: it is that of the first lane.
    inside = [Load(read.tensor, tuple(substitute(i, first) for i in read.index)) for read in inside]
    vectors = [read for read, s in zip(inside, lane_strides) if s]
    scalars = [read for read, s in zip(inside, lane_strides) if not s]
    others = [*(axis for axis in data[:-1] if axis.extent > 1), *([outer] if outer.extent > 1 else [])]
    if outer.extent == 1 and not scalars and all(read.tensor.body is not None for read in vectors):
        others = []  # rows share nothing, and one by one they can be fused with the loops that compute their operands
    elif not scalars:
        others = [axis for axis in others if _reduction_loops(stage, vectors, [axis])[1]] or others
    candidates = _tile_axes(others, vectors, scalars, 2 in lane_strides, lane.extent)
    rows_outside, budget = None, _register_budget(reduce)
    if choose is not None:
        chosen = choose(_candidate_tiles(candidates, budget))
        by_name = {axis.name: axis for axis in others}
        row, block = by_name.get(chosen.rows), by_name.get(chosen.columns)
        height, width = chosen.height, chosen.width
        rows_outside = chosen.rows_outside
    else:
        row, block, (height, width) = _choose_tile(
            candidates, budget, stage.tail == "peel", partial(_are_rows_near, scalars)
        )
        if row is not None and lane.extent == 16 and _fits_amx(stage, reduce, vectors, scalars):
            height, width = _amx_tile(row.extent, _extent(block))
    around = [axis for axis in (*data[:-1], outer) if axis not in (row, block)]
    rows, columns, tile = None, None, []
    if row is not None:
        rows, inner_axis = stage.split(row, height)
        tile.append(inner_axis)
    if block is not None:
        columns, inner_axis = stage.split(block, width)
        tile.append(inner_axis)
    for axis in tile:
        stage.unroll(axis)
    across = [
        tile_axis
        for tile_axis in (row, block)
        if tile_axis is not None and not candidates.vector_cost and reduce.kind != "ordered_sum"
    ]
    sums, sliding = _reduction_loops(stage, vectors, across)
    stage.reorder(*_outer_loops(around, rows, columns, vectors, scalars, rows_outside), *sums, *tile, lane)
    for loops, limit in ((sums, _max_unrolled(reduce)), (sliding, MAX_UNROLLED_SLIDING_READS)):
        if loops and prod(axis.extent for axis in (*loops, *tile)) * len(inside) <= limit:
            for axis in loops:
                stage.unroll(axis)
            break
    stage.vectorize(lane)
    return True


def _reduction_loops(stage: Stage, vectors: list[Load], across: list[Axis]) -> tuple[list[Axis], list[Axis]]:
    """Return (the loops of a reduction with the sliding ones last, those that slide over a tile axis in `across`)."""
    sums = [axis for axis in stage.order if axis.reduce]
    sliding = [axis for axis in sums if any(_slides_over(vectors, axis, tile_axis) for tile_axis in across)]
    return [*(axis for axis in sums if axis not in sliding), *sliding], sliding


def _slides_over(vectors: list[Load], axis: Axis, row: Axis) -> bool:
    """Return whether steps along `axis` mostly read elements that earlier steps read for other rows (convolutions).

    Unrolled, such elements are read only once.
    """
    strides = [(stride_of(read, axis), stride_of(read, row)) for read in vectors]
    return all(
        a and r and (a % r == 0 or r % a == 0) and r < a * axis.extent and a < r * row.extent for a, r in strides
    )


class TileAxes(NamedTuple):
    """Candidate axes for the rows and the columns of a tile.

    rows, columns: axes, or None for a tile of one row or column. vector_cost: cost of a vector read, where a scalar
    read costs 1; 0 where the rows do not share the vectors of columns.
    """

    rows: list[Axis | None]
    columns: list[Axis | None]
    vector_cost: float


def _tile_axes(
    axes: list[Axis], vectors: list[Load], scalars: list[Load], has_stride_2: bool, lanes: int
) -> TileAxes:  # fmt: skip
    """Find the axes for rows, along which vectors are invariant, and for columns, along which scalars are.

    Where no axis suits rows, as in a depthwise convolution, rows share at least some vectors. vectors, scalars: loads
    that differ between lanes, or are equal in all. has_stride_2: whether vectors take every other element.
    """
    rows = [axis for axis in axes if _is_invariant(vectors, axis) and not _is_invariant(scalars, axis)]
    columns = [axis for axis in axes if _is_invariant(scalars, axis) and not _is_invariant(vectors, axis)]
    shared = bool(rows)
    if not rows:
        rows = [axis for axis in axes if any(_is_invariant([read], axis) for read in vectors)]
    if has_stride_2 or (rows and not shared):
        columns = []
    cost = 1 + (0 if _is_aligned(vectors, lanes) else target().vector_bytes / CACHE_LINE_BYTES)
    return TileAxes([*rows[::-1]] or [None], [*columns[::-1]] or [None], cost if shared else 0)


def _is_aligned(vectors: list[Load], lanes: int) -> bool:
    """Return whether all vectors begin at multiples of `lanes` elements, so that none spans two cache lines."""
    terms = [linear(offset(read)) for read in vectors]
    return all(coefficient % lanes == 0 for form in terms for coefficient in form.values())


def _choose_tile(
    candidates: TileAxes, budget: RegisterBudget, avoid_edges: bool, are_rows_near: Callable[[Axis | None], bool]
) -> tuple[Axis | None, Axis | None, tuple[int, int]]:
    """Return (axis of the rows, axis of the columns, (height, width)) of the tile with the least work.

    Rows that lie close together in memory are preferred to others. On ties it has the innermost axes. avoid_edges,
    are_rows_near: see `_best_size`.
    """
    best: tuple[float, Axis | None, Axis | None, tuple[int, int]] = float("inf"), None, None, (1, 1)
    for row, column in itertools.product(candidates.rows, candidates.columns):
        if row is not None and row is column:
            continue
        extents, is_near = (_extent(row), _extent(column)), are_rows_near(row)
        work, size = _best_size(*extents, candidates.vector_cost, budget, avoid_edges, is_near)
        if (cost := work / prod(extents) * (1 if is_near else FAR_ROWS_COST)) < best[0]:
            best = cost, row, column, size
    return best[1:]


def _multiplies_int16(reduce: Reduce) -> bool:
    """Return whether the reduction adds products of int16, which NEON widens as it multiplies."""
    match reduce.value:
        case Binary("mul", Cast(Load() as a), Cast(Load() as b)):
            return reduce.dtype == "int32" and {a.dtype, b.dtype} == {"int16"} and "neon" in target().features
    return False


def _vector_lanes(reduce: Reduce) -> int:
    """Return the number of elements in one column of a tile: those of a vector, or of several where int16 widens."""
    return target().lanes(reduce.dtype) * (target().interleave if _multiplies_int16(reduce) else 1)


def _max_unrolled(reduce: Reduce) -> int:
    """Return the limit of the reads in the body of a reduction after its steps are unrolled."""
    return MAX_UNROLLED_INT16_READS if _multiplies_int16(reduce) else MAX_UNROLLED_READS


class RegisterBudget(NamedTuple):
    """Vector registers for a tile: `total` for accumulators and operands.

    per_row, per_column: registers that operands take for each row and each column of the tile.
    """

    total: int
    per_row: int
    per_column: int


def _register_budget(reduce: Reduce) -> RegisterBudget:
    """Return the registers of the target that a tile of this reduction may use."""
    if isinstance(reduce.value, Call) and reduce.value.name in OF_PAIRS:  # sums of two products need more registers
        loaded = 2 // target().half_vectors
        return RegisterBudget(target().registers * 13 // 16, loaded, loaded)
    if _multiplies_int16(reduce):
        return RegisterBudget(target().registers * 3 // 8 // target().interleave, 0, 1)
    return RegisterBudget(target().registers - 1, 0, 1)


def _candidate_tiles(candidates: TileAxes, budget: RegisterBudget) -> list[RegisterTile]:
    """Return all tiles that fit into registers, those with the least work first."""
    work_of: dict[RegisterTile, float] = {}
    vector_cost = candidates.vector_cost
    for row, column in itertools.product(candidates.rows, candidates.columns):
        if row is not None and row is column:
            continue
        extents = _extent(row), _extent(column)
        names = ("" if row is None else row.name), ("" if column is None else column.name)
        for height, width in _tile_sizes(*extents, vector_cost > 0, budget):
            for outside in (True, False):
                tile = RegisterTile(*names, height, width, outside)
                work_of[tile] = _work(*extents, height, width, vector_cost) / prod(extents)
    return sorted(work_of, key=work_of.__getitem__)


def _fits_amx(stage: Stage, reduce: Reduce, vectors: list[Load], scalars: list[Load]) -> bool:
    """Return whether AMX tiles of the target can run the last loop of the reduction."""
    product = isinstance(reduce.value, Call) and reduce.value.name == "dot4"
    if not product or not target().has_amx or len(vectors) != 1 or len(scalars) != 1:
        return False
    k = [axis for axis in stage.order if axis.reduce][-1]
    return k.extent >= TILE_STEPS and stride_of(scalars[0], k) == 1 and bool(stride_of(vectors[0], k))


def _amx_tile(rows: int, columns: int) -> tuple[int, int]:
    """Return (height, width) of a tile for AMX, or of a plain register tile where there are too few rows."""
    if rows < TILE_ROWS[0]:
        return _best_size(rows, columns, 1, RegisterBudget(target().registers - 1, 0, 1))[1]
    limit = min(columns, TILE_COLUMNS - 2)
    return min(rows, TILE_ROWS[-1]), -(-columns // -(-columns // limit))


MAX_STRIDE_BYTES = 256
"""Limit of the distance of neighbouring rows in bytes; further apart, they may compete for the same few sets of the
first-level cache."""


FAR_ROWS_COST = 1.1
"""Cost of a tile whose rows are further apart than that: its reads touch as many memory pages as it has rows, and come
back to their neighbours after all rows of the output."""


def _are_rows_near(scalars: list[Load], row: Axis | None) -> bool:
    """Return whether the scalars of neighbouring rows lie close together in memory; True without rows."""
    distances = [(stride_of(read, row), itemsize(read.tensor.dtype)) for read in scalars] if row is not None else []
    return all(distance is not None and distance * size <= MAX_STRIDE_BYTES for distance, size in distances)


def _extent(axis: Axis | None) -> int:
    """Return the extent of an axis of a tile, 1 without one."""
    return 1 if axis is None else axis.extent


def _is_invariant(reads: list[Load], axis: Axis) -> bool:
    """Return whether all `reads` take the same elements all along `axis`."""
    return all(stride_of(read, axis) == 0 for read in reads)


def _tile_sizes(rows: int, columns: int, shared: bool, budget: RegisterBudget) -> Iterator[tuple[int, int]]:
    """Yield (height, width) of the tiles that fit into registers.

    rows, columns: of the complete output. shared: whether rows share the vectors of columns, which then also occupy
    registers.
    """
    registers, per_row, per_column = budget
    for height in range(1, min(rows, registers) + 1):
        for width in range(1, min(columns, registers if rows > 1 else MAX_STREAMS) + 1):
            if height * width + (per_row * height + per_column * width if shared else 1) > registers:
                break
            yield height, width


@functools.cache
def _best_size(
    rows: int,
    columns: int,
    vector_cost: float,
    budget: RegisterBudget,
    avoid_edges: bool = False,
    are_rows_near: bool = False,
) -> tuple[float, tuple[int, int]]:
    """Return (work, (height, width)) of the tile with the least work for an output of `rows` by `columns`.

    An edge tile counts as a complete one. On ties the tile with the fewest reads wins; there, vector reads count more
    than scalars, which come from nearer caches, and more still where the scalars of all rows lie close together.
    avoid_edges: prefer the smallest tile that leaves no edges, where that costs little (why: MAX_EVEN_WORK).
    """

    def cost(size: tuple[int, int]) -> tuple[float, int, tuple[int, int]]:
        """Return the key by which sizes are compared: work, then weighted reads."""
        reads = size[0] + (4 if are_rows_near else 2) * size[1]
        return _work(rows, columns, *size, vector_cost), _tile_count(rows, columns, *size) * reads, size

    candidates = [cost(size) for size in _tile_sizes(rows, columns, vector_cost > 0, budget)]
    best = min(candidates)
    if avoid_edges:
        almost = (candidate for candidate in candidates if candidate[0] <= MAX_EVEN_WORK * best[0])
        without_edges = (
            candidate for candidate in almost if not rows % candidate[2][0] and not columns % candidate[2][1]
        )
        best = min(without_edges, key=lambda candidate: (prod(candidate[2]), candidate), default=best)
    return best[0], best[2]


def _tile_count(rows: int, columns: int, height: int, width: int) -> int:
    """Return the number of tiles that cover an output, edge tiles included."""
    return -(-rows // height) * -(-columns // width)


READ_COST = 4 / 3
"""Time of a read relative to a product. As many of both start in a cycle, but not all reads hit the first-level cache.
"""


def _work(rows: int, columns: int, height: int, width: int, vector_cost: float) -> float:
    """Estimate the work of all tiles in a step of the reduction, in products: products, or reads if they take longer.

    vector_cost: cost of a vector read, as in TileAxes.
    """
    reads = READ_COST * (height + vector_cost * width) if vector_cost else 0
    return _tile_count(rows, columns, height, width) * (max(height * width, reads) + 1)


def _outer_loops(
    others: list[Axis], rows: Axis | None, columns: Axis | None, vectors: list[Load], scalars: list[Load],
    rows_outside: bool | None,
) -> list[Axis]:  # fmt: skip
    """Return the loops around a tile in order: those over rows outside or inside of those over columns.

    others: loops that the tile does not span. rows, columns: loops over tiles. rows_outside: None for the order that
    causes the least memory traffic, which may be the loop over tiles of rows inside and other loops over rows outside.
    """
    along_rows = [axis for axis in others if _is_invariant(vectors, axis) and not _is_invariant(scalars, axis)]
    along_columns = [axis for axis in others if _is_invariant(scalars, axis) and not _is_invariant(vectors, axis)]
    first = [axis for axis in others if axis not in (*along_rows, *along_columns)]
    images, tiles = along_rows, [axis for axis in (rows,) if axis is not None]
    along_columns += [axis for axis in (columns,) if axis is not None]
    by_rows, by_columns = [*images, *tiles, *along_columns], [*along_columns, *images, *tiles]
    if rows_outside is not None:
        return [*first, *(by_rows if rows_outside else by_columns)]
    outer, inner, breadth = (max(1, prod(axis.extent for axis in axes)) for axes in (images, tiles, along_columns))
    height = outer * inner
    vector_bytes, scalar_bytes = (sum(read.tensor.nbytes for read in reads) for reads in (vectors, scalars))
    orders = [(
        _read_cost(scalar_bytes, breadth, scalar_bytes) + _read_cost(vector_bytes, height, vector_bytes / breadth),
        by_columns,
    ), (
        _read_cost(vector_bytes, height, vector_bytes) + _read_cost(scalar_bytes, breadth, scalar_bytes / height),
        by_rows,
    )]  # fmt: skip
    if outer > 1 and inner > 1:
        scalar_cost = _read_cost(scalar_bytes, breadth, scalar_bytes / outer)
        vector_cost = _read_cost(vector_bytes, outer, vector_bytes)
        vector_cost += outer * _read_cost(vector_bytes, inner, vector_bytes / breadth) - outer * vector_bytes
        orders.append((scalar_cost + vector_cost, [*images, *along_columns, *tiles]))
    return [*first, *min(orders, key=lambda order: order[0])[1]]


FAR_BYTES, FAR_MISS_COST = 1 << 21, 8
"""Bytes after which data has left all caches but a shared one, or all, and what a further pass over it costs then: it
comes in more streams than the processor prefetches."""


def _read_cost(nbytes: int, passes: int, distance: float) -> float:
    """Estimate the cost of reading `nbytes` in several passes, each after `distance` other bytes of the same tensor."""
    miss_cost = _miss_share(distance, L1_BYTES) + 2 * _miss_share(distance, target().cache_bytes // 2)
    miss_cost += FAR_MISS_COST * _miss_share(distance, FAR_BYTES)
    return nbytes * (1 + (passes - 1) * miss_cost)


def _miss_share(nbytes: float, capacity: int) -> float:
    """Estimate the share of data that misses a cache, after `nbytes` of other data.

    It is 0 up to `capacity`, half of the cache, and 1 from twice that on.
    """
    return min(1.0, max(0.0, nbytes / capacity - 1))
