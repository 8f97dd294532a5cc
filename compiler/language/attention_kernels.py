"""Recognise attention in a traced kernel: scores, the softmax of their rows, and the product with the values.

    s = cl.requantise(cl.dot(q, k.T), scales)         q [queries, columns], k [keys, columns] of one head
    p = (the softmax of s, see softmax_of_rows.py)
    y = cl.requantise(cl.dot(p, v), scales)           v [keys, columns]

A table and a residual may follow each product (lookup, residual_add). A head is a matrix of an array
[..., rows, columns], or some columns of a matrix [rows, heads * columns].
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from celosia.compiler.language.block_reader import ON_CPU, BlockReader, TableAndResidual, Values, is_equal
from celosia.compiler.language.language_errors import fail
from celosia.compiler.language.softmax_of_rows import Elements, SoftmaxOfRows, linear_form, recognise_softmax
from celosia.compiler.language.tile import ArrayArgument, Tile, origin, upstream
from celosia.compiler.language.tile_views import (
    VIEWS,
    before_reshapes,
    element_order,
    is_identity_order,
    source_of_view,
)


@dataclass(frozen=True)
class Heads:
    """An array as one matrix for each head.

    side_by_side: whether its elements are [rows, heads, columns] in memory, and not [heads, rows, columns]. pixels:
    "rows" or "columns", those that are pixels of the activation; the others are channels.
    """

    array: ArrayArgument
    heads: int
    rows: int
    columns: int
    side_by_side: bool
    pixels: str = "rows"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows, columns."""
        return self.heads, self.rows, self.columns


@dataclass(frozen=True)
class HeadProduct:
    """A product of the matrices of two arrays with its requantise, table and residual.

    w: the second operand. scales: the parameters of the requantise, one or one for each column. offsets: added to both
    operands. requantise: zero point and clip. bias: the array that the residual adds, one matrix for all heads or one
    for each. rescale: scales, shift and clip of the residual.
    """

    w: Heads
    scales: ArrayArgument
    offsets: tuple[int, int]
    requantise: dict[str, Any]
    table: ArrayArgument | None
    bias: Heads | None
    rescale: dict[str, Any]


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel that computes y by attention.

    tile: the block of y that a program writes. x: the queries. scores: the product of queries and keys. rows: the
    softmax of its rows. mixed: the product of the softmax with the values. out: y as matrices.
    """

    y: ArrayArgument
    tile: tuple[int, ...]
    x: Heads
    scores: HeadProduct
    rows: SoftmaxOfRows
    mixed: HeadProduct
    out: Heads


@dataclass(frozen=True)
class HeadsKernel:
    """A kernel that computes y as products of the matrices of two arrays, head by head.

    tile: the block of y that a program writes. x: the first operand. out: y as matrices.
    """

    y: ArrayArgument
    tile: tuple[int, ...]
    x: Heads
    product: HeadProduct
    out: Heads


def is_product_of_heads(reader: BlockReader, value: Tile, varying: Collection[ArrayArgument]) -> bool:
    """Return whether `value` is a product whose second operand is one of several matrices of an array.

    The array must be no constant: `quantised`, or one of `varying`.
    """
    source = reader.split_epilogue(value)[1]
    dot = before_reshapes(source.args[0]) if source.op == "requantise" else source
    w = origin(dot.args[1], *VIEWS, "cast", "binary") if dot.op == "dot" else dot
    if w.op != "load" or w.more["block"] is None:
        return False
    array, dims = w.more["array"], w.more["block"][1]
    varies = array.quantised or array in varying
    return varies and len(dims) > 2 and len(reader.shape) > 2 and {*dims[:-2], *reader.shape[:-2]} == {1}


def read_heads(reader: BlockReader, value: Tile) -> HeadsKernel:
    """Recognise a product of matrices, head by head. Raises LanguageError for another kernel."""
    kernel = _AttentionReader(reader).read_product(value)
    _require_separate_output(reader, kernel.x, kernel.product)
    return kernel


def is_attention(value: Tile) -> bool:
    """Return whether `value` is computed from a softmax, which is the only operation that rounds floats to bytes.

    A kernel whose result is itself the softmax is to be recognised before.
    """
    return any(tile.op == "unary" and tile.more["name"] == "round_even" for tile in upstream([value]))


def read_attention(reader: BlockReader, value: Tile) -> AttentionKernel:
    """Recognise attention. Raises LanguageError for another kernel."""
    kernel = _AttentionReader(reader).read_attention(value)
    _require_separate_output(reader, kernel.x, kernel.scores, kernel.mixed)
    return kernel


def _require_separate_output(reader: BlockReader, x: Heads, *products: HeadProduct) -> None:
    """Raise LanguageError where y is one of the operands, too."""
    for side in (x, *(operand for product in products for operand in (product.w, product.bias))):
        if side is not None and side.array is reader.y:
            reader.refuse(f"{reader.y.name} is read and written; the accelerator needs another array for its output")


class _AttentionReader:
    """Follows the operations that make a block of y.

    out: y as matrices. head, row: the head and the first row of the block that each program writes.
    """

    def __init__(self, reader: BlockReader) -> None:
        self.reader, y, dims = reader, reader.y, reader.shape
        self.out = self._as_matrices(y, dims, reader.store.at)
        self.head, self.row = self._position(self.out, reader.starts)

    def read_product(self, value: Tile) -> HeadsKernel:
        """Recognise `value` as a single product."""
        out = self.out
        end, dot = self._split_product(value)
        x, head_product = self._read_rows_product(end, dot, out.columns, out.columns)
        return HeadsKernel(self.reader.y, self.reader.shape, x, head_product, out)

    def read_attention(self, value: Tile) -> AttentionKernel:
        """Recognise `value` as two products with the softmax between them, from the last one upwards."""
        reader, out = self.reader, self.out
        last, dot = self._split_product(value)
        shares, offset, element_indices = _read_operand(dot, 0)
        if shares.op != "cast" or not is_identity_order(element_indices):
            fail(f"what the second product of attention takes is a softmax{ON_CPU}", shares.at)
        rows = recognise_softmax(shares)
        first, scores = self._split_product(before_reshapes(rows.source))
        values, w_offset = self._read_second_operand(dot, rows.width, rows.count, padded=True)
        mixed = self._build_product(*last, values, (offset, w_offset), out.columns, out.columns)
        x, score_product = self._read_rows_product(first, scores, rows.count, rows.width)
        if _output_count(values) != out.columns:
            fail(f"{values.array.name} gives the {out.columns} columns of {out.array.name}{ON_CPU}", dot.at)
        return AttentionKernel(reader.y, reader.shape, x, score_product, rows, mixed, out)

    def _read_rows_product(
        self, end: tuple[TableAndResidual, Tile], dot: Tile, count: int, width: int
    ) -> tuple[Heads, HeadProduct]:
        """Recognise a product whose first operand has the rows that the program writes. Returns (x, product).

        end: what follows the product, from `_split_product`. count: columns of the result; width: those that the kernel
        computes, with padding.
        """
        load, x_offset, element_indices = _read_operand(dot, 0)
        w, w_offset = self._read_second_operand(dot, width, count, padded=False)
        x, starts = self._read_block(load)
        if (
            not is_identity_order(element_indices)
            or x.rows != self.out.rows
            or not self._is_at_same_head(x, starts, self.row)
        ):
            fail(f"the rows of {x.array.name} are those of {self.out.array.name}, head by head{ON_CPU}", load.at)
        if _depth(w) != x.columns or x.heads != self.out.heads:
            fail(f"columns of {x.array.name} meet those of {w.array.name}, head by head{ON_CPU}", dot.at)
        return x, self._build_product(*end, w, (x_offset, w_offset), count, width)

    def _split_product(self, value: Tile) -> tuple[tuple[TableAndResidual, Tile], Tile]:
        """Split `value` into ((its table and residual, its requantise), the product before them)."""
        epilogue, requantise = self.reader.split_epilogue(value)
        if requantise.op != "requantise":
            fail(f"attention requantises its products, and this is no cl.requantise{ON_CPU}", requantise.at)
        return (epilogue, requantise), _single_product(requantise.args[0])

    # Arrays of matrices -------------------------------------------------------------------------------------------

    def _as_matrices(self, array: ArrayArgument, dims: tuple[int, ...], at: str) -> Heads:
        """View `array`, of which blocks of `dims` are read or written, as a matrix for each head.

        at: file and line of the load or store. Raises LanguageError where a block is not a part of one matrix.
        """
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

    def _position(self, side: Heads, starts: Values) -> tuple[Any, Any]:
        """Return the head and the row at which blocks begin. starts: their offsets in the array of `side`."""
        if side.side_by_side:
            return starts[1] / side.columns, starts[0]
        head: Any = np.zeros((1,) * starts[0].ndim, np.int64)
        for size, start in zip(side.array.shape[:-2], starts):
            head = head * size + start
        return head, starts[-2]

    def _read_block(self, load: Tile) -> tuple[Heads, Values]:
        """Return the matrices that a load reads from, and where its blocks begin."""
        block_load, starts, dims = self.reader.load(load, "a side of cl.dot")
        side = self._as_matrices(block_load.more["array"], dims, load.at)
        if not side.side_by_side and starts[-1].any():
            fail(f"a program has all columns of {side.array.name}{ON_CPU}", load.at)
        return side, starts

    def _is_at_same_head(self, side: Heads, starts: Values, row: Any) -> bool:
        """Return whether blocks belong to the head that is written, and begin at `row`."""
        head, first = self._position(side, starts)
        return is_equal(head, self.head) and is_equal(first, row)

    def _read_second_operand(self, dot: Tile, width: int, count: int, padded: bool) -> tuple[Heads, int]:
        """Recognise the second operand of a product: complete matrices with `count` keys, read as `width`.

        Returns it and the offset that is added to it. padded: whether the operand has the values, whose rows beyond the
        last key must be zeros; else it has the keys, and what lies beyond them does not matter.
        """
        load, offset, element_indices = _read_operand(dot, 1)
        side, starts = self._read_block(load)
        dims = load.more["block"][1]
        if not self._is_at_same_head(side, starts, np.zeros(1, np.int64)):
            fail(f"{side.array.name} is read from its first row on, head by head{ON_CPU}", load.at)
        straight, transposed = is_identity_order(element_indices), is_identity_order(element_indices.T)
        by_rows = straight if padded else transposed and not straight  # whether keys are rows
        keys = (side.rows, dims[-2]) if by_rows else (side.columns, dims[-1])
        if not (straight or transposed) or keys != (count, width) or not (by_rows or side.rows == dims[-2]):
            fail(f"all {count} keys of {side.array.name} are read at once, in blocks of {width}{ON_CPU}", load.at)
        if side.heads != self.out.heads:
            fail(
                f"{side.array.name} has {side.heads} heads, and {self.out.array.name} {self.out.heads}{ON_CPU}", load.at
            )
        pixels = "columns" if straight else "rows"
        if padded and width > count and self.reader.padding_value(load) != -offset:
            fail(f"values beyond the last are {-offset}, and `other` of {side.array.name} is not", load.at)
        return Heads(side.array, side.heads, side.rows, side.columns, side.side_by_side, pixels), offset

    # What follows a product ---------------------------------------------------------------------------------------

    def _build_product(
        self, epilogue: TableAndResidual, requantise: Tile, w: Heads, offsets: tuple[int, int], columns: int, width: int
    ) -> HeadProduct:
        """Collect a product with its requantise, table and bias. Raises LanguageError for unsuitable parameters.

        columns: of the result; width: columns that the kernel computes, with padding.
        """
        load, starts, dims = self.reader.load(requantise.args[1], "the parameters of requantise")
        array, element_indices = load.more["array"], element_order(requantise.args[1], load).reshape(-1, width)
        is_by_column = array.shape == (columns,) and dims == (width,) and (element_indices == np.arange(width)).all()
        if any(start.any() for start in starts) or not (is_by_column or (array.shape == dims == (1,))):
            fail(f"the parameters of a product are one, or one for each of its {columns} columns{ON_CPU}", load.at)
        table = None if epilogue.table is None else self.reader.complete_array(epilogue.table, "a table")
        bias = None if epilogue.residual is None else self._read_bias(epilogue.residual, columns, width)
        return HeadProduct(w, array, offsets, requantise.more, table, bias, epilogue.rescale)

    def _read_bias(self, tile: Tile, columns: int, width: int) -> Heads:
        """Recognise the array that a residual adds to a product: one row, a matrix, or a matrix for each head."""
        load, starts, dims = self.reader.load(tile, "what a residual_add adds")
        array, element_indices = load.more["array"], element_order(tile, load).reshape(-1, width)
        side = Heads(array, int(np.prod(array.shape[:-2])), (1, *array.shape)[-2], array.shape[-1], False)
        head, row = self._position(side, (np.zeros_like(starts[-1]), *starts)[-max(len(starts), 2) :])
        is_single_row = side.rows == 1 and (element_indices == np.arange(width)).all() and not row.any()
        is_same_head = side.heads == 1 or is_equal(head, self.head)
        is_same_row = is_single_row or (
            is_equal(row, self.row) and is_identity_order(element_indices) and side.rows == self.out.rows
        )
        if array.dtype != "int8" or side.columns != columns or dims[-1] != width or starts[-1].any():
            is_same_head = False
        if not (is_same_head and is_same_row) or side.heads not in (1, self.out.heads):
            fail(f"what is added to scores is int8 [{columns}], [queries, {columns}], or that of each head", load.at)
        return side


def _single_product(acc: Tile) -> Tile:
    """Return the cl.dot that is all of the sum `acc`. Raises LanguageError where there is more."""
    tile = before_reshapes(acc)
    if tile.op != "dot" or (len(tile.args) == 3 and source_of_view(tile.args[2]).more.get("number") != 0):
        fail(f"a product of two activations is one cl.dot, of whole rows and columns{ON_CPU}", tile.at)
    return tile


def _read_operand(dot: Tile, number: int) -> tuple[Tile, int, Elements]:
    """Return operand `number` of a product: (int8 tile, offset that is added to it, order of its elements)."""
    first, parts = linear_form(dot.args[number])
    leaves = [(leaf, order) for leaf, (factor, order) in parts.items() if factor == 1]
    if len(parts) != 1 or not leaves or leaves[0][0].dtype != "int8":
        fail(f"a side of cl.dot is int8, or that less a zero point{ON_CPU}", dot.at)
    offset = first - int(dot.more["zeros"][number])
    if not -127 <= offset <= 128:
        fail(f"a zero point of int8 is between -128 and 127, and not {-offset}", dot.at)
    return leaves[0][0], offset, leaves[0][1]


def _depth(side: Heads) -> int:
    """Return the number of elements of a second operand that are added up for each result."""
    return side.rows if side.pixels == "columns" else side.columns


def _output_count(side: Heads) -> int:
    """Return the number of result columns that a second operand gives."""
    return side.columns if side.pixels == "columns" else side.rows
