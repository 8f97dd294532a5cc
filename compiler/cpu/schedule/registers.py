"""Register tiles: a reduction for several rows and columns of its output at once, so that operands are read once.

For each step of the reduction a tile of `rows` by `columns` vectors reads one number for each row and one vector for
each column, and adds all their products to accumulators that stay in registers. This is the inner kernel of K. Goto,
R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008); here rows and columns are whatever axes the
accesses let play that part: rows and columns of a matrix product, or pixels and blocks of output channels of a
convolution.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

from celosia.compiler.cpu.schedule.streamed import LINE
from celosia.compiler.expr import Axis, Load, Reduce, Stage
from celosia.compiler.expr.affine import flatten, linear, stride_along
from celosia.compiler.expr.functions import OF_PAIRS
from celosia.compiler.expr.nodes import Binary, Call, Cast, Expr, Var
from celosia.compiler.expr.walk import substitute, walk
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import STREAMS, TILE_COLUMNS, TILE_ROWS, TILE_STEPS, target

UNROLLED = 64
"""Reads that the steps of a reduction may have if they are written out."""
SLIDING = 128
"""The limit where most of them take what others have read."""
WIDENED = 256
"""The limit where products of int16 have an instruction, beside which there is time to read."""
EVEN = 1.05
"""How much more work it may be to leave no edges, and to have less code, where edges are loop nests of their own."""
L1_BYTES = 24 << 10
"""What may stay in the first-level cache while other data pass; of the second one it is a half."""


def step(read: Load, axis: Axis) -> int | None:
    """How far apart in memory lie what `read` takes for neighbours along `axis`; None where that varies."""
    return stride_along(read.tensor, read.index, axis)


@dataclass(frozen=True)
class RegisterTile:
    """rows and columns: names of loops that a tile spans, "" for none, columns in vectors; height and width: how much
    of them. rows_outside: the loop over rows around that over columns; None for the order that brings less traffic."""

    rows: str
    columns: str
    height: int
    width: int
    rows_outside: bool | None = None


def register_tile(
    stage: Stage,
    reduce: Reduce,
    data: list[Axis],
    reads: list[Load],
    choose: Callable[[list[RegisterTile]], RegisterTile] | None = None,
) -> bool:
    """Compute tiles of vectors along the last of the `data` axes; False where the `reads` do not allow it.

    choose: takes one of all that fit into registers, in the place of the one with the least work.
    """
    if not data or data[-1].extent < 4:
        return False
    column = data[-1]
    inside = [node for node in walk(reduce.value) if isinstance(node, Load)]
    steps = [step(read, column) for read in inside]
    if any(s not in (0, 1, 2) for s in steps) or not any(steps) or any(step(read, column) is None for read in reads):
        return False
    outer, lane = stage.split(column, min(column.extent, _lanes(reduce)))
    first: dict[Var, Expr] = {column: outer * lane.extent}
    inside = [Load(read.tensor, tuple(substitute(i, first) for i in read.index)) for read in inside]  # by vectors
    vectors = [read for read, s in zip(inside, steps) if s]
    scalars = [read for read, s in zip(inside, steps) if not s]
    others = [*(axis for axis in data[:-1] if axis.extent > 1), *([outer] if outer.extent > 1 else [])]
    if outer.extent == 1 and not scalars and all(read.tensor.body is not None for read in vectors):
        others = []  # nothing is shared, and row by row they stay beside the loops that make what they read
    elif not scalars:
        others = [axis for axis in others if _steps(stage, vectors, [axis])[1]] or others
    kinds = _kinds(others, vectors, scalars, 2 in steps, lane.extent)
    rows_outside, room = None, _room(reduce)
    if choose is not None:
        tile_ = choose(_tiles_of(*kinds, room))
        named = {axis.name: axis for axis in others}
        row, block, (height, width) = named.get(tile_.rows), named.get(tile_.columns), (tile_.height, tile_.width)
        rows_outside = tile_.rows_outside
    else:
        row, block, (height, width) = _shape(*kinds, room, stage.tail == "peel", partial(_are_near, scalars))
        if row is not None and lane.extent == 16 and _fits_tiles(stage, reduce, vectors, scalars):
            height, width = _tiles(row.extent, _extent(block))
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
    across = [each for each in (row, block) if each is not None and not kinds[2] and reduce.kind != "ordered_sum"]
    sums, sliding = _steps(stage, vectors, across)
    stage.reorder(*_around(around, rows, columns, vectors, scalars, rows_outside), *sums, *tile, lane)
    for few, most in ((sums, _unrolled(reduce)), (sliding, SLIDING)):
        if few and prod(axis.extent for axis in (*few, *tile)) * len(inside) <= most:
            for axis in few:
                stage.unroll(axis)
            break
    stage.vectorize(lane)
    return True


def _steps(stage: Stage, vectors: list[Load], across: list[Axis]) -> tuple[list[Axis], list[Axis]]:
    """(the loops of a reduction, last of which those that slide over axes of a tile; those)."""
    sums = [axis for axis in stage.order if axis.reduce]
    sliding = [axis for axis in sums if any(_slides(vectors, axis, each) for each in across)]
    return [*(axis for axis in sums if axis not in sliding), *sliding], sliding


def _slides(vectors: list[Load], axis: Axis, row: Axis) -> bool:
    """Whether steps along `axis` read for most rows what steps before read for others; written out, that is read
    once."""
    steps = [(step(read, axis), step(read, row)) for read in vectors]
    return all(a and r and (a % r == 0 or r % a == 0) and r < a * axis.extent and a < r * row.extent for a, r in steps)


Kinds = tuple[list[Axis | None], list[Axis | None], float]
"""Axes that rows and columns of a tile can be along, None for a tile without, and what the read of a vector costs where
all rows share those of columns, as one of a number costs 1; 0 where they do not."""


def _kinds(axes: list[Axis], vectors: list[Load], scalars: list[Load], narrow: bool, lanes: int) -> Kinds:
    """Along rows the vectors stay the same, along columns the numbers. Where no axis is of the first kind, as in a
    convolution by channel, rows share at least some vectors.
    """
    rows = [axis for axis in axes if _still(vectors, axis) and not _still(scalars, axis)]
    columns = [axis for axis in axes if _still(scalars, axis) and not _still(vectors, axis)]
    shared = bool(rows)
    if not rows:
        rows = [axis for axis in axes if any(_still([read], axis) for read in vectors)]
    if narrow or (rows and not shared):
        columns = []
    costs = 1 + (0 if _whole(vectors, lanes) else target().vector_bytes / LINE)
    return [*rows[::-1]] or [None], [*columns[::-1]] or [None], costs if shared else 0


def _whole(vectors: list[Load], lanes: int) -> bool:
    """Whether vectors of so many lanes begin at multiples of that: then none lies in two lines of the cache."""
    terms = [linear(flatten(read.tensor.shape, read.index)) for read in vectors]
    return all(coefficient % lanes == 0 for each in terms for coefficient in each.values())


def _shape(
    rows: list[Axis | None],
    columns: list[Axis | None],
    costs: float,
    room: Room,
    even: bool,
    near: Callable[[Axis | None], bool],
) -> tuple[Axis | None, Axis | None, tuple[int, int]]:
    """(axis of the rows of a tile, axis of its columns, how many of each); of equals the innermost axes."""
    best: tuple[float, Axis | None, Axis | None, tuple[int, int]] = float("inf"), None, None, (1, 1)
    for row, column in itertools.product(rows, columns):
        if row is not None and row is column:
            continue
        extents = _extent(row), _extent(column)
        work, size = _size(*extents, costs, room, even, near(row))
        if (relative := work / prod(extents)) < best[0]:
            best = relative, row, column, size
    return best[1:]


def _of_int16(reduce: Reduce) -> bool:
    """Whether it adds products of int16, which NEON widens as it multiplies."""
    match reduce.value:
        case Binary("mul", Cast(Load() as a), Cast(Load() as b)):
            return reduce.dtype == "int32" and {a.dtype, b.dtype} == {"int16"} and "neon" in target().features
    return False


def _lanes(reduce: Reduce) -> int:
    return target().lanes(reduce.dtype) * (target().abreast if _of_int16(reduce) else 1)


def _unrolled(reduce: Reduce) -> int:
    return WIDENED if _of_int16(reduce) else UNROLLED


Room = tuple[int, int, int]


def _room(reduce: Reduce) -> Room:
    """(registers for accumulators and what is read, those for each of a tile's rows, for each of its columns)."""
    if isinstance(reduce.value, Call) and reduce.value.name in OF_PAIRS:  # sums of two products take others
        held = 2 // target().halves
        return target().registers * 13 // 16, held, held
    if _of_int16(reduce):
        return target().registers * 3 // 8 // target().abreast, 0, 1
    return target().registers - 1, 0, 1


def _tiles_of(rows: list[Axis | None], columns: list[Axis | None], costs: float, room: Room) -> list[RegisterTile]:
    """All tiles that fit into registers, those with the least work first."""
    found: dict[RegisterTile, float] = {}
    for row, column in itertools.product(rows, columns):
        if row is not None and row is column:
            continue
        extents = _extent(row), _extent(column)
        names = ("" if row is None else row.name), ("" if column is None else column.name)
        for height, width in _sizes(*extents, costs > 0, room):
            for outside in (True, False):
                tile = RegisterTile(*names, height, width, outside)
                found[tile] = _work(*extents, height, width, costs) / prod(extents)
    return sorted(found, key=found.__getitem__)


def _fits_tiles(stage: Stage, reduce: Reduce, vectors: list[Load], scalars: list[Load]) -> bool:
    """Whether the processor has tiles for the last loop of the reduction."""
    product = isinstance(reduce.value, Call) and reduce.value.name == "dot4"
    if not product or not target().tiles or len(vectors) != 1 or len(scalars) != 1:
        return False
    k = [axis for axis in stage.order if axis.reduce][-1]
    return k.extent >= TILE_STEPS and step(scalars[0], k) == 1 and bool(step(vectors[0], k))


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of what tiles compute at once, where there are enough rows."""
    if rows < TILE_ROWS[0]:
        return _size(rows, columns, 1, (target().registers - 1, 0, 1))[1]
    most = min(columns, TILE_COLUMNS - 2)
    return min(rows, TILE_ROWS[-1]), -(-columns // -(-columns // most))


MAX_STRIDE_BYTES = 256
"""Bytes: numbers of rows that are further apart may be in the same places of the first cache, of which there are few.
"""


def _are_near(scalars: list[Load], row: Axis | None) -> bool:
    """Whether what tiles read for neighbouring rows lies close together."""
    steps = [(step(read, row), itemsize(read.tensor.dtype)) for read in scalars] if row is not None else []
    return all(apart is not None and apart * size <= MAX_STRIDE_BYTES for apart, size in steps)


def _extent(axis: Axis | None) -> int:
    return 1 if axis is None else axis.extent


def _still(reads: list[Load], axis: Axis) -> bool:
    """Whether all of `reads` take the same elements all along `axis`."""
    return all(step(read, axis) == 0 for read in reads)


def _sizes(rows: int, columns: int, shared: bool, room: Room) -> Iterator[tuple[int, int]]:
    """(height, width) of tiles that fit into registers.

    shared: rows share the vectors of columns, which are then held in registers beside the accumulators.
    """
    registers, by_row, by_column = room
    for height in range(1, min(rows, registers) + 1):
        for width in range(1, min(columns, registers if rows > 1 else STREAMS) + 1):
            if height * width + (by_row * height + by_column * width if shared else 1) > registers:
                break
            yield height, width


@functools.cache
def _size(
    rows: int, columns: int, costs: float, room: Room, even: bool = False, near: bool = False
) -> tuple[float, tuple[int, int]]:
    """(work, height and width of a tile) with the least work for all of it, edges computed twice included; of equals
    that with the fewest reads. Vectors count more than numbers, which come from nearer caches, all the more where those
    of all rows are `near` each other.

    even: the smallest tile that leaves no edges, where that is not much more work.
    """

    def cost(size: tuple[int, int]) -> tuple[float, int, tuple[int, int]]:
        reads = size[0] + (4 if near else 2) * size[1]
        return _work(rows, columns, *size, costs), _tiles_in(rows, columns, *size) * reads, size

    found = [cost(size) for size in _sizes(rows, columns, costs > 0, room)]
    best = min(found)
    if even:
        almost = (each for each in found if each[0] <= EVEN * best[0])
        whole = (each for each in almost if not rows % each[2][0] and not columns % each[2][1])
        best = min(whole, key=lambda each: (prod(each[2]), each), default=best)
    return best[0], best[2]


def _tiles_in(rows: int, columns: int, height: int, width: int) -> int:
    return -(-rows // height) * -(-columns // width)


READ = 4 / 3
"""How long a read takes, in products: as many of both begin in a cycle, but not all reads find their data at once."""


def _work(rows: int, columns: int, height: int, width: int, costs: float) -> float:
    """Work of all tiles in a step of the reduction: products, or reads where these take longer. costs: see `_kinds`."""
    reads = READ * (height + costs * width) if costs else 0
    return _tiles_in(rows, columns, height, width) * (max(height * width, reads) + 1)


def _around(
    others: list[Axis], rows: Axis | None, columns: Axis | None, vectors: list[Load], scalars: list[Load],
    rows_outside: bool | None,
) -> list[Axis]:  # fmt: skip
    """The loops around a tile: those over rows outside or inside those over columns, by default by which brings less
    traffic."""
    along_rows = [axis for axis in others if _still(vectors, axis) and not _still(scalars, axis)]
    along_columns = [axis for axis in others if _still(scalars, axis) and not _still(vectors, axis)]
    first = [axis for axis in others if axis not in (*along_rows, *along_columns)]
    along_rows += [axis for axis in (rows,) if axis is not None]
    along_columns += [axis for axis in (columns,) if axis is not None]
    if rows_outside is None:
        high, wide = (max(1, prod(axis.extent for axis in axes)) for axes in (along_rows, along_columns))
        vector_bytes, scalar_bytes = (sum(read.tensor.nbytes for read in reads) for reads in (vectors, scalars))
        by_rows = _traffic(vector_bytes, high, vector_bytes) + _traffic(scalar_bytes, wide, scalar_bytes / high)
        by_columns = _traffic(scalar_bytes, wide, scalar_bytes) + _traffic(vector_bytes, high, vector_bytes / wide)
        rows_outside = by_rows < by_columns
    if rows_outside:
        return [*first, *along_rows, *along_columns]
    return [*first, *along_columns, *along_rows]


def _traffic(nbytes: int, times: int, between: float) -> float:
    """What it costs to read `nbytes` several times where each is read again after `between` bytes of the same."""
    again = _beyond(between, L1_BYTES) + 2 * _beyond(between, target().cache_bytes // 2)
    return nbytes * (1 + (times - 1) * again)


def _beyond(nbytes: float, half: int) -> float:
    """How much of data does not stay in a cache that has this half: nothing up to it, all from the whole on."""
    return min(1.0, max(0.0, nbytes / half - 1))
