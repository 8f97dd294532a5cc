"""Attention in a traced kernel: a product of two activations, the softmax of its rows, and their product by a third.

    s = cl.requantise(cl.dot(q, k.T), scales)         q [queries, columns], k [keys, columns] of one head
    p = (the softmax of s, see rows.py)
    y = cl.requantise(cl.dot(p, v), scales)           v [keys, columns]

Behind each product may be a table and a residual. A head is a matrix of arrays [..., rows, columns], or some columns of
a matrix [rows, heads * columns].
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from celosia.compiler.language.blocks import ON_CPU, BlockReader, Followed, Values, equal
from celosia.compiler.language.errors import fail
from celosia.compiler.language.rows import Elements, SoftmaxOfRows, linear, softmax_of
from celosia.compiler.language.tile import ArrayArgument, Tile, origin, upstream
from celosia.compiler.language.views import VIEWS, is_counted, order, regrouped, viewed


@dataclass(frozen=True)
class Heads:
    """An array as matrices: [heads, rows, columns], or, where they lie `beside` each other, [rows, heads, columns].
    pixels: what of them are pixels, the other is channels."""

    array: ArrayArgument
    heads: int
    rows: int
    columns: int
    beside: bool
    pixels: str = "rows"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows, columns."""
        return self.heads, self.rows, self.columns


@dataclass(frozen=True)
class HeadProduct:
    """A product of matrices and what follows it. scales: its parameters, one or one for each column. offsets: added to
    either side. bias: what a residual adds, whose matrices are one for all heads or one for each."""

    w: Heads
    scales: ArrayArgument
    offsets: tuple[int, int]
    requantise: dict[str, Any]
    table: ArrayArgument | None
    bias: Heads | None
    rescale: dict[str, Any]


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel that makes y of queries, keys and values. tile: the block of y that a program writes."""

    y: ArrayArgument
    tile: tuple[int, ...]
    x: Heads
    scores: HeadProduct
    rows: SoftmaxOfRows
    mixed: HeadProduct
    out: Heads


@dataclass(frozen=True)
class HeadsKernel:
    """A kernel that makes y of products of the matrices of two arrays."""

    y: ArrayArgument
    tile: tuple[int, ...]
    x: Heads
    product: HeadProduct
    out: Heads


def is_of_heads(reader: BlockReader, value: Tile, varying: Collection[ArrayArgument]) -> bool:
    """Whether `value` is a product by one matrix of several in an array that is no constant."""
    made = reader.behind(value)[1]
    dot = regrouped(made.args[0]) if made.op == "requantise" else made
    w = origin(dot.args[1], *VIEWS, "cast", "binary") if dot.op == "dot" else dot
    if w.op != "load" or w.more["block"] is None:
        return False
    array, dims = w.more["array"], w.more["block"][1]
    varies = array.quantised or array in varying
    return varies and len(dims) > 2 and len(reader.shape) > 2 and {*dims[:-2], *reader.shape[:-2]} == {1}


def read_heads(reader: BlockReader, value: Tile) -> HeadsKernel:
    """LanguageError for another kernel."""
    found = _AttentionReader(reader).product(value)
    _require_other(reader, found.x, found.product)
    return found


def is_attention(value: Tile) -> bool:
    """Whether bytes that are rounded to integers come before `value`, which is none itself."""
    return any(tile.op == "unary" and tile.more["name"] == "round_even" for tile in upstream([value]))


def read_attention(reader: BlockReader, value: Tile) -> AttentionKernel:
    """LanguageError for another kernel."""
    found = _AttentionReader(reader).read(value)
    _require_other(reader, found.x, found.scores, found.mixed)
    return found


def _require_other(reader: BlockReader, x: Heads, *products: HeadProduct) -> None:
    """LanguageError where y is read, too."""
    for side in (x, *(each for made in products for each in (made.w, made.bias))):
        if side is not None and side.array is reader.y:
            reader.refuse(f"{reader.y.name} is read and written; the accelerator needs another array for its output")


class _AttentionReader:
    """Follows what a block of y is made of; `head` and `row` are where it lies, for all programs."""

    def __init__(self, reader: BlockReader) -> None:
        self.reader, y, dims = reader, reader.y, reader.shape
        self.out = self._matrices(y, dims, reader.store.at)
        self.head, self.row = self._place(self.out, reader.starts)

    def product(self, value: Tile) -> HeadsKernel:
        """Read a product alone."""
        out = self.out
        end, dot = self._ended(value)
        x, made = self._first(end, dot, out.columns, out.columns)
        return HeadsKernel(self.reader.y, self.reader.shape, x, made, out)

    def read(self, value: Tile) -> AttentionKernel:
        """Read two products, and the softmax between them."""
        reader, out = self.reader, self.out
        last, dot = self._ended(value)
        shares, offset, where = _side(dot, 0)
        if shares.op != "cast" or not is_counted(where):
            fail(f"what the second product of attention takes is a softmax{ON_CPU}", shares.at)
        rows = softmax_of(shares)
        first, scores = self._ended(regrouped(rows.source))
        values, w_offset = self._right(dot, rows.width, rows.count, padded=True)
        mixed = self._made(*last, values, (offset, w_offset), out.columns, out.columns)
        x, made = self._first(first, scores, rows.count, rows.width)
        if _outputs(values) != out.columns:
            fail(f"{values.array.name} gives the {out.columns} columns of {out.array.name}{ON_CPU}", dot.at)
        return AttentionKernel(reader.y, reader.shape, x, made, rows, mixed, out)

    def _first(self, end: tuple[Followed, Tile], dot: Tile, count: int, width: int) -> tuple[Heads, HeadProduct]:
        """A product of the rows that are written, and what gives `count` columns, computed as `width`."""
        load, x_offset, counted = _side(dot, 0)
        w, w_offset = self._right(dot, width, count, padded=False)
        x, starts = self._block(load)
        if not is_counted(counted) or x.rows != self.out.rows or not self._is_here(x, starts, self.row):
            fail(f"the rows of {x.array.name} are those of {self.out.array.name}, head by head{ON_CPU}", load.at)
        if _depth(w) != x.columns or x.heads != self.out.heads:
            fail(f"columns of {x.array.name} meet those of {w.array.name}, head by head{ON_CPU}", dot.at)
        return x, self._made(*end, w, (x_offset, w_offset), count, width)

    def _ended(self, value: Tile) -> tuple[tuple[Followed, Tile], Tile]:
        """What follows a product, its requantise among it, and the product."""
        behind, made = self.reader.behind(value)
        if made.op != "requantise":
            fail(f"attention requantises its products, and this is no cl.requantise{ON_CPU}", made.at)
        return (behind, made), _product(made.args[0])

    # Arrays of matrices -------------------------------------------------------------------------------------------

    def _matrices(self, array: ArrayArgument, dims: tuple[int, ...], at: str) -> Heads:
        """`array`, of which blocks of `dims` are read or written."""
        shape = array.shape
        if array.dtype != "int8" or len(shape) < 2 or any(size != 1 for size in dims[:-2]):
            fail(f"{array.name} is int8, [..., rows, columns], of which a program has a part of one matrix{ON_CPU}", at)
        if len(shape) > 2 and dims[-1] != shape[-1]:
            fail(f"a program has all {shape[-1]} columns of {array.name}, and not {dims[-1]}{ON_CPU}", at)
        if len(shape) == 2:
            heads, rest = divmod(shape[1], dims[1])
            if rest:
                fail(f"heads are equal parts of the {shape[1]} columns of {array.name}, and not {dims[1]}{ON_CPU}", at)
            return Heads(array, heads, shape[0], dims[1], heads > 1)
        return Heads(array, int(np.prod(shape[:-2])), shape[-2], shape[-1], False)

    def _place(self, side: Heads, starts: Values) -> tuple[Any, Any]:
        """Head and row at which blocks begin."""
        if side.beside:
            return starts[1] / side.columns, starts[0]
        head: Any = np.zeros((1,) * starts[0].ndim, np.int64)
        for size, start in zip(side.array.shape[:-2], starts):
            head = head * size + start
        return head, starts[-2]

    def _block(self, load: Tile) -> tuple[Heads, Values]:
        found, starts, dims = self.reader.load(load, "a side of cl.dot")
        side = self._matrices(found.more["array"], dims, load.at)
        if not side.beside and starts[-1].any():
            fail(f"a program has all columns of {side.array.name}{ON_CPU}", load.at)
        return side, starts

    def _is_here(self, side: Heads, starts: Values, row: Any) -> bool:
        """Whether blocks are of the head that is written, and begin at `row`."""
        head, first = self._place(side, starts)
        return equal(head, self.head) and equal(first, row)

    def _right(self, dot: Tile, width: int, count: int, padded: bool) -> tuple[Heads, int]:
        """The second side of a product, whole matrices with `count` keys, read as `width`; what is added to it. padded:
        beyond the keys there is nothing, else nothing that matters."""
        load, offset, where = _side(dot, 1)
        side, starts = self._block(load)
        dims = load.more["block"][1]
        if not self._is_here(side, starts, np.zeros(1, np.int64)):
            fail(f"{side.array.name} is read from its first row on, head by head{ON_CPU}", load.at)
        straight, turned = is_counted(where), is_counted(where.T)
        by_rows = straight if padded else turned and not straight  # whether keys are rows
        keys = (side.rows, dims[-2]) if by_rows else (side.columns, dims[-1])
        if not (straight or turned) or keys != (count, width) or not (by_rows or side.rows == dims[-2]):
            fail(f"all {count} keys of {side.array.name} are read at once, in blocks of {width}{ON_CPU}", load.at)
        if side.heads != self.out.heads:
            fail(
                f"{side.array.name} has {side.heads} heads, and {self.out.array.name} {self.out.heads}{ON_CPU}", load.at
            )
        pixels = "columns" if straight else "rows"
        if padded and width > count and self.reader.other(load) != -offset:
            fail(f"values beyond the last are {-offset}, and `other` of {side.array.name} is not", load.at)
        return Heads(side.array, side.heads, side.rows, side.columns, side.beside, pixels), offset

    # What follows a product ---------------------------------------------------------------------------------------

    def _made(
        self, behind: Followed, requantise: Tile, w: Heads, offsets: tuple[int, int], columns: int, width: int
    ) -> HeadProduct:
        load, starts, dims = self.reader.load(requantise.args[1], "the parameters of requantise")
        array, where = load.more["array"], order(requantise.args[1], load).reshape(-1, width)
        many = array.shape == (columns,) and dims == (width,) and (where == np.arange(width)).all()
        if any(start.any() for start in starts) or not (many or (array.shape == dims == (1,))):
            fail(f"the parameters of a product are one, or one for each of its {columns} columns{ON_CPU}", load.at)
        table = None if behind.table is None else self.reader.whole(behind.table, "a table")
        bias = None if behind.residual is None else self._bias(behind.residual, columns, width)
        return HeadProduct(w, array, offsets, requantise.more, table, bias, behind.rescale)

    def _bias(self, tile: Tile, columns: int, width: int) -> Heads:
        """What is added to each score, or to those of each key."""
        load, starts, dims = self.reader.load(tile, "what a residual_add adds")
        array, where = load.more["array"], order(tile, load).reshape(-1, width)
        side = Heads(array, int(np.prod(array.shape[:-2])), (1, *array.shape)[-2], array.shape[-1], False)
        head, row = self._place(side, (np.zeros_like(starts[-1]), *starts)[-max(len(starts), 2) :])
        one = side.rows == 1 and (where == np.arange(width)).all() and not row.any()
        here = side.heads == 1 or equal(head, self.head)
        there = one or (equal(row, self.row) and is_counted(where) and side.rows == self.out.rows)
        if array.dtype != "int8" or side.columns != columns or dims[-1] != width or starts[-1].any():
            here = False
        if not (here and there) or side.heads not in (1, self.out.heads):
            fail(f"what is added to scores is int8 [{columns}], [queries, {columns}], or that of each head", load.at)
        return side


def _product(acc: Tile) -> Tile:
    """The cl.dot that a sum consists of."""
    tile = regrouped(acc)
    if tile.op != "dot" or (len(tile.args) == 3 and viewed(tile.args[2]).more.get("number") != 0):
        fail(f"a product of two activations is one cl.dot, of whole rows and columns{ON_CPU}", tile.at)
    return tile


def _side(dot: Tile, number: int) -> tuple[Tile, int, Elements]:
    """Read a side of a product: a tile of int8, what is added to it, and which element of it each of the side is."""
    first, parts = linear(dot.args[number])
    leaves = [(leaf, where) for leaf, (times, where) in parts.items() if times == 1]
    if len(parts) != 1 or not leaves or leaves[0][0].dtype != "int8":
        fail(f"a side of cl.dot is int8, or that less a zero point{ON_CPU}", dot.at)
    offset = first - int(dot.more["zeros"][number])
    if not -127 <= offset <= 128:
        fail(f"a zero point of int8 is between -128 and 127, and not {-offset}", dot.at)
    return leaves[0][0], offset, leaves[0][1]


def _depth(side: Heads) -> int:
    """Channels of what is multiplied by."""
    return side.rows if side.pixels == "columns" else side.columns


def _outputs(side: Heads) -> int:
    return side.columns if side.pixels == "columns" else side.rows
