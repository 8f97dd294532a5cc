"""Register tiles: compute a reduction for several rows and columns of its output at once, so that operands are
reused.

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

from celosia.compiler.cpu.schedule.streaming_stores import CACHE_LINE_BYTES
from celosia.compiler.expr import Axis, Load, Reduce, Stage
from celosia.compiler.expr.affine import flatten, linear, stride_along
from celosia.compiler.expr.math_functions import OF_PAIRS
from celosia.compiler.expr.nodes import Binary, Call, Cast, Expr, Var
from celosia.compiler.expr.walk import substitute, walk
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import MAX_STREAMS, TILE_COLUMNS, TILE_ROWS, TILE_STEPS, target

MAX_UNROLLED_READS = 64
"""Limit of the reads of reduction steps that are unrolled."""
MAX_UNROLLED_SLIDING_READS = 128
"""The limit where most unrolled reads reuse what other steps have read."""
MAX_UNROLLED_INT16_READS = 256
"""The limit where an instruction multiplies int16 values, which leaves time to read."""
MAX_EVEN_WORK = 1.05
"""Relative work that a tile may cost to leave no edge tiles, where these would be loop nests of their own."""
L1_BYTES = 24 << 10
"""Bytes that may stay in the first-level cache while other data pass through it."""


def stride_of(read: Load, axis: Axis) -> int | None:
    """Return the distance in elements between what `read` takes for neighbours along `axis`; None where it varies."""
    return stride_along(read.tensor, read.index, axis)


@dataclass(frozen=True)
class RegisterTile:
    """A tile of accumulators in registers, as a choice of the kernel tuner.

    rows and columns: names of the loops that it spans, "" for none. height: rows. width: columns, in vectors.
    rows_outside: whether the loop over rows lies around that over columns; None for the order with less traffic.
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

    Returns False, with the stage unchanged, where the strides of `reads` do not allow it. choose: selects one of all
    tiles that fit into registers, instead of the one with the least work.
    """
    if not data or data[-1].extent < 4:
        return False
    column = data[-1]
    inside = [node for node in walk(reduce.value) if isinstance(node, Load)]
    steps = [stride_of(read, column) for read in inside]
    if (
        any(s not in (0, 1, 2) for s in steps)
        or not any(steps)
        or any(stride_of(read, column) is None for read in reads)
    ):
        return False
    outer, lane = stage.split(column, min(column.extent, _vector_lanes(reduce)))
    first: dict[Var, Expr] = {column: outer * lane.extent}
    inside = [Load(read.tensor, tuple(substitute(i, first) for i in read.index)) for read in inside]  # by vectors
    vectors = [read for read, s in zip(inside, steps) if s]
    scalars = [read for read, s in zip(inside, steps) if not s]
    others = [*(axis for axis in data[:-1] if axis.extent > 1), *([outer] if outer.extent > 1 else [])]
    if outer.extent == 1 and not scalars and all(read.tensor.body is not None for read in vectors):
        others = []  # nothing is shared, and row by row they stay beside the loops that make what they read
    elif not scalars:
        others = [axis for axis in others if _reduction_loops(stage, vectors, [axis])[1]] or others
    kinds = _tile_axes(others, vectors, scalars, 2 in steps, lane.extent)
    rows_outside, room = None, _register_budget(reduce)
    if choose is not None:
        chosen = choose(_candidate_tiles(*kinds, room))
        by_name = {axis.name: axis for axis in others}
        row, block, (height, width) = (
            by_name.get(chosen.rows),
            by_name.get(chosen.columns),
            (chosen.height, chosen.width),
        )
        rows_outside = chosen.rows_outside
    else:
        row, block, (height, width) = _choose_tile(*kinds, room, stage.tail == "peel", partial(_rows_are_near, scalars))
        if row is not None and lane.extent == 16 and _fits_amx(stage, reduce, vectors, scalars):
            height, width = _amx_tile(row.extent, _extent(block))
    around = [axis for axis in (*data[:-1], outer) if axis not in (row, block)]
    rows, columns, tile = None, None, []
    if row is not None:
        rows, inner = stage.split(row, height)
        tile.append(inner)
    if block is not None:
        columns, inner = stage.split(block, width)
        tile.append(inner)
    for axis in tile:
        stage.unroll(axis)
    across = [
        tile_axis
        for tile_axis in (row, block)
        if tile_axis is not None and not kinds[2] and reduce.kind != "ordered_sum"
    ]
    sums, sliding = _reduction_loops(stage, vectors, across)
    stage.reorder(*_outer_loops(around, rows, columns, vectors, scalars, rows_outside), *sums, *tile, lane)
    for few, limit in ((sums, _max_unrolled(reduce)), (sliding, MAX_UNROLLED_SLIDING_READS)):
        if few and prod(axis.extent for axis in (*few, *tile)) * len(inside) <= limit:
            for axis in few:
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
    """Return whether steps along `axis` mostly read what earlier steps read for other rows, as convolutions do.

    Unrolled, such elements are read only once.
    """
    steps = [(stride_of(read, axis), stride_of(read, row)) for read in vectors]
    return all(a and r and (a % r == 0 or r % a == 0) and r < a * axis.extent and a < r * row.extent for a, r in steps)


TileAxes = tuple[list[Axis | None], list[Axis | None], float]
"""Candidate axes for rows and for columns of a tile, with None for a tile without, and the cost of a vector read.

A scalar read costs 1. The cost is 0 where the rows do not share the vectors of columns."""


def _tile_axes(axes: list[Axis], vectors: list[Load], scalars: list[Load], narrow: bool, lanes: int) -> TileAxes:
    """Find the axes for rows, along which vectors are invariant, and for columns, along which scalars are.

    Where no axis suits rows, as in a depthwise convolution, rows share at least some vectors.
    """
    rows = [axis for axis in axes if _is_invariant(vectors, axis) and not _is_invariant(scalars, axis)]
    columns = [axis for axis in axes if _is_invariant(scalars, axis) and not _is_invariant(vectors, axis)]
    shared = bool(rows)
    if not rows:
        rows = [axis for axis in axes if any(_is_invariant([read], axis) for read in vectors)]
    if narrow or (rows and not shared):
        columns = []
    costs = 1 + (0 if _is_aligned(vectors, lanes) else target().vector_bytes / CACHE_LINE_BYTES)
    return [*rows[::-1]] or [None], [*columns[::-1]] or [None], costs if shared else 0


def _is_aligned(vectors: list[Load], lanes: int) -> bool:
    """Return whether all vectors begin at multiples of `lanes` elements, so that none spans two cache lines."""
    terms = [linear(flatten(read.tensor.shape, read.index)) for read in vectors]
    return all(coefficient % lanes == 0 for form in terms for coefficient in form.values())


def _choose_tile(
    rows: list[Axis | None],
    columns: list[Axis | None],
    costs: float,
    room: RegisterBudget,
    even: bool,
    near: Callable[[Axis | None], bool],
) -> tuple[Axis | None, Axis | None, tuple[int, int]]:
    """Return (axis of the rows, axis of the columns, (height, width)) with the least work; on ties the innermost
    axes.
    """
    best: tuple[float, Axis | None, Axis | None, tuple[int, int]] = float("inf"), None, None, (1, 1)
    for row, column in itertools.product(rows, columns):
        if row is not None and row is column:
            continue
        extents = _extent(row), _extent(column)
        work, size = _best_size(*extents, costs, room, even, near(row))
        if (relative := work / prod(extents)) < best[0]:
            best = relative, row, column, size
    return best[1:]


def _multiplies_int16(reduce: Reduce) -> bool:
    """Return whether the reduction adds products of int16, which NEON widens as it multiplies."""
    match reduce.value:
        case Binary("mul", Cast(Load() as a), Cast(Load() as b)):
            return reduce.dtype == "int32" and {a.dtype, b.dtype} == {"int16"} and "neon" in target().features
    return False


def _vector_lanes(reduce: Reduce) -> int:
    """Return the lanes of the vectors in a tile."""
    return target().lanes(reduce.dtype) * (target().interleave if _multiplies_int16(reduce) else 1)


def _max_unrolled(reduce: Reduce) -> int:
    """Return the limit of reads in unrolled steps."""
    return MAX_UNROLLED_INT16_READS if _multiplies_int16(reduce) else MAX_UNROLLED_READS


RegisterBudget = tuple[int, int, int]


def _register_budget(reduce: Reduce) -> RegisterBudget:
    """Return (registers for accumulators and loads, registers for each row, for each column)."""
    if isinstance(reduce.value, Call) and reduce.value.name in OF_PAIRS:  # sums of two products need more registers
        loaded = 2 // target().half_vectors
        return target().registers * 13 // 16, loaded, loaded
    if _multiplies_int16(reduce):
        return target().registers * 3 // 8 // target().interleave, 0, 1
    return target().registers - 1, 0, 1


def _candidate_tiles(
    rows: list[Axis | None], columns: list[Axis | None], costs: float, room: RegisterBudget
) -> list[RegisterTile]:
    """Return all tiles that fit into registers, those with the least work first."""
    work_of: dict[RegisterTile, float] = {}
    for row, column in itertools.product(rows, columns):
        if row is not None and row is column:
            continue
        extents = _extent(row), _extent(column)
        names = ("" if row is None else row.name), ("" if column is None else column.name)
        for height, width in _tile_sizes(*extents, costs > 0, room):
            for outside in (True, False):
                tile = RegisterTile(*names, height, width, outside)
                work_of[tile] = _work(*extents, height, width, costs) / prod(extents)
    return sorted(work_of, key=work_of.__getitem__)


def _fits_amx(stage: Stage, reduce: Reduce, vectors: list[Load], scalars: list[Load]) -> bool:
    """Return whether AMX tiles of the target can run the last loop of the reduction."""
    product = isinstance(reduce.value, Call) and reduce.value.name == "dot4"
    if not product or not target().has_amx or len(vectors) != 1 or len(scalars) != 1:
        return False
    k = [axis for axis in stage.order if axis.reduce][-1]
    return k.extent >= TILE_STEPS and stride_of(scalars[0], k) == 1 and bool(stride_of(vectors[0], k))


def _amx_tile(rows: int, columns: int) -> tuple[int, int]:
    """Return (height, width) for AMX, or of a plain register tile where there are too few rows."""
    if rows < TILE_ROWS[0]:
        return _best_size(rows, columns, 1, (target().registers - 1, 0, 1))[1]
    limit = min(columns, TILE_COLUMNS - 2)
    return min(rows, TILE_ROWS[-1]), -(-columns // -(-columns // limit))


MAX_STRIDE_BYTES = 256
"""Bytes between neighbouring rows; further apart, they may compete for the same few sets of the first-level cache."""


def _rows_are_near(scalars: list[Load], row: Axis | None) -> bool:
    """Return whether the scalars of neighbouring rows lie close together in memory."""
    steps = [(stride_of(read, row), itemsize(read.tensor.dtype)) for read in scalars] if row is not None else []
    return all(distance is not None and distance * size <= MAX_STRIDE_BYTES for distance, size in steps)


def _extent(axis: Axis | None) -> int:
    return 1 if axis is None else axis.extent


def _is_invariant(reads: list[Load], axis: Axis) -> bool:
    """Return whether all `reads` take the same elements all along `axis`."""
    return all(stride_of(read, axis) == 0 for read in reads)


def _tile_sizes(rows: int, columns: int, shared: bool, room: RegisterBudget) -> Iterator[tuple[int, int]]:
    """Yield (height, width) of the tiles that fit into registers.

    shared: rows share the vectors of columns, which then also occupy registers.
    """
    registers, by_row, by_column = room
    for height in range(1, min(rows, registers) + 1):
        for width in range(1, min(columns, registers if rows > 1 else MAX_STREAMS) + 1):
            if height * width + (by_row * height + by_column * width if shared else 1) > registers:
                break
            yield height, width


@functools.cache
def _best_size(
    rows: int, columns: int, costs: float, room: RegisterBudget, even: bool = False, near: bool = False
) -> tuple[float, tuple[int, int]]:
    """Return (work, (height, width)) of the tile with the least work for the complete output; on ties with the fewest
    reads.

    Edge tiles count as computed twice. Vector reads count more than scalars, which come from nearer caches, and more
    still where the scalars of all rows are `near`. even: prefer the smallest tile that leaves no edges, where that
    costs little.
    """

    def cost(size: tuple[int, int]) -> tuple[float, int, tuple[int, int]]:
        reads = size[0] + (4 if near else 2) * size[1]
        return _work(rows, columns, *size, costs), _tile_count(rows, columns, *size) * reads, size

    candidates = [cost(size) for size in _tile_sizes(rows, columns, costs > 0, room)]
    best = min(candidates)
    if even:
        almost = (candidate for candidate in candidates if candidate[0] <= MAX_EVEN_WORK * best[0])
        without_edges = (
            candidate for candidate in almost if not rows % candidate[2][0] and not columns % candidate[2][1]
        )
        best = min(without_edges, key=lambda candidate: (prod(candidate[2]), candidate), default=best)
    return best[0], best[2]


def _tile_count(rows: int, columns: int, height: int, width: int) -> int:
    return -(-rows // height) * -(-columns // width)


READ_COST = 4 / 3
"""Time of a read in products: as many of both start in a cycle, but not all reads hit the first-level cache."""


def _work(rows: int, columns: int, height: int, width: int, costs: float) -> float:
    """Estimate the work of all tiles in a step of the reduction: products, or reads where these take longer.

    costs: cost of a vector read, see TileAxes.
    """
    reads = READ_COST * (height + costs * width) if costs else 0
    return _tile_count(rows, columns, height, width) * (max(height * width, reads) + 1)


def _outer_loops(
    others: list[Axis], rows: Axis | None, columns: Axis | None, vectors: list[Load], scalars: list[Load],
    rows_outside: bool | None,
) -> list[Axis]:  # fmt: skip
    """Order the loops around a tile: those over rows outside or inside of those over columns.

    By default the order that causes less memory traffic.
    """
    along_rows = [axis for axis in others if _is_invariant(vectors, axis) and not _is_invariant(scalars, axis)]
    along_columns = [axis for axis in others if _is_invariant(scalars, axis) and not _is_invariant(vectors, axis)]
    first = [axis for axis in others if axis not in (*along_rows, *along_columns)]
    along_rows += [axis for axis in (rows,) if axis is not None]
    along_columns += [axis for axis in (columns,) if axis is not None]
    if rows_outside is None:
        height, breadth = (max(1, prod(axis.extent for axis in axes)) for axes in (along_rows, along_columns))
        vector_bytes, scalar_bytes = (sum(read.tensor.nbytes for read in reads) for reads in (vectors, scalars))
        by_rows = _read_cost(vector_bytes, height, vector_bytes) + _read_cost(
            scalar_bytes, breadth, scalar_bytes / height
        )
        by_columns = _read_cost(scalar_bytes, breadth, scalar_bytes) + _read_cost(
            vector_bytes, height, vector_bytes / breadth
        )
        rows_outside = by_rows < by_columns
    if rows_outside:
        return [*first, *along_rows, *along_columns]
    return [*first, *along_columns, *along_rows]


def _read_cost(nbytes: int, passes: int, distance: float) -> float:
    """Estimate the cost of reading `nbytes` in several passes, each after `distance` other bytes of the same tensor."""
    miss_cost = _miss_share(distance, L1_BYTES) + 2 * _miss_share(distance, target().cache_bytes // 2)
    return nbytes * (1 + (passes - 1) * miss_cost)


def _miss_share(nbytes: float, capacity: int) -> float:
    """Estimate the share of data that misses a cache: none up to `capacity` (half of the cache), all from twice that
    on.
    """
    return min(1.0, max(0.0, nbytes / capacity - 1))
