"""Recognise attention in a traced kernel, a product of two activations by heads, and a softmax of rows.

Attention is scores, the softmax of their rows, and the product with the values:

    s = cl.requantise(cl.dot(q, k.T), scales)         q [queries, columns], k [keys, columns] of one head
    p = (the softmax of s, see below)
    y = cl.requantise(cl.dot(p, v), scales)           v [keys, columns]

A table and a residual may follow each product (lookup, residual_add). A head is a matrix of an array
[..., rows, columns], or some columns of a matrix [rows, heads * columns].

A softmax of rows is recognised in the one spelling with the accelerator's bits:

    index = 255 + v - cl.max(v, axis=1)[:, None]              v int8 [rows, columns], as int32
    e = cl.load(powers + index, mask=inside, other=0.0)       powers float32[256]
    total = cl.sum(e, axis=1, ordered=True)
    (cl.rint(cl.div_rn(e * steps, total[:, None])) + zero_point).to(cl.int8)

Beyond the end of a row `v` is -128. The order of elements is followed through all views (`linear_form`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.block_reader import (
    ON_CPU,
    BlockReader,
    TableAndResidual,
    Values,
    apply_view,
    before_reshapes,
    element_order,
    is_equal,
    is_identity_order,
    source_of_view,
)
from celosia.compiler.language.interpreter import constant_value
from celosia.compiler.language.tile import VIEWS, ArrayArgument, Tile, fail, origin, upstream
from celosia.hw.spec.scratchpads import EXP_ENTRIES

TABLE_ENTRIES = EXP_ENTRIES // 2
"""Number of entries of a table of powers."""
INT8_MIN = -128
Elements = NDArray[np.int64]
"""For each element of a tile, the number of the element of another tile that it is."""
WIDENING_CASTS = (("int8", "int32"), ("int8", "int64"), ("int32", "int64"))
"""Casts (from, to) that change no value."""


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


def is_attention(value: Tile) -> bool:
    """Return whether `value` is computed from a softmax, which is the only operation that rounds floats to bytes.

    A kernel whose result is itself the softmax is to be recognised before.
    """
    return any(tile.op == "unary" and tile.attributes["name"] == "round_even" for tile in upstream([value]))


def is_product_of_heads(reader: BlockReader, value: Tile, varying: Collection[ArrayArgument]) -> bool:
    """Return whether `value` is a product whose second operand is one of several matrices of an array.

    The array must be no constant: `quantised`, or one of `varying`.
    """
    source = reader.split_epilogue(value)[1]
    dot = before_reshapes(source.args[0]) if source.op == "requantise" else source
    w = origin(dot.args[1], *VIEWS, "cast", "binary") if dot.op == "dot" else dot
    if w.op != "load" or w.attributes["block"] is None:
        return False
    array, dims = w.attributes["array"], w.attributes["block"][1]
    varies = array.quantised or array in varying
    return varies and len(dims) > 2 and len(reader.shape) > 2 and {*dims[:-2], *reader.shape[:-2]} == {1}


class AttentionReader:
    """Follows the operations that make a block of y: attention, or a product by heads.

    out: y as matrices. head, row: the head and the first row of the block that each program writes.
    """

    def __init__(self, reader: BlockReader) -> None:
        self.reader, y, dims = reader, reader.y, reader.shape
        self.out = self._as_matrices(y, dims, reader.store.at)
        self.head, self.row = self._position(self.out, reader.starts)

    def read_product(self, value: Tile) -> HeadsKernel:
        """Recognise `value` as a product of matrices, head by head. Raises LanguageError for another kernel."""
        out = self.out
        end, dot = self._split_product(value)
        x, head_product = self._read_rows_product(end, dot, out.columns, out.columns)
        self._require_separate_output(x, head_product)
        return HeadsKernel(self.reader.y, self.reader.shape, x, head_product, out)

    def read_attention(self, value: Tile) -> AttentionKernel:
        """Recognise `value` as two products with the softmax between them, from the last one upwards.

        Raises LanguageError for another kernel.
        """
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
        if (values.columns if values.pixels == "columns" else values.rows) != out.columns:
            fail(f"{values.array.name} gives the {out.columns} columns of {out.array.name}{ON_CPU}", dot.at)
        self._require_separate_output(x, score_product, mixed)
        return AttentionKernel(reader.y, reader.shape, x, score_product, rows, mixed, out)

    def _require_separate_output(self, x: Heads, *products: HeadProduct) -> None:
        """Raise LanguageError where y is one of the operands, too."""
        y = self.reader.y
        for side in (x, *(operand for product in products for operand in (product.w, product.bias))):
            if side is not None and side.array is y:
                self.reader.refuse(f"{y.name} is read and written; the accelerator needs another array for its output")

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
        depth = w.rows if w.pixels == "columns" else w.columns
        if depth != x.columns or x.heads != self.out.heads:
            fail(f"columns of {x.array.name} meet those of {w.array.name}, head by head{ON_CPU}", dot.at)
        return x, self._build_product(*end, w, (x_offset, w_offset), count, width)

    def _split_product(self, value: Tile) -> tuple[tuple[TableAndResidual, Tile], Tile]:
        """Split `value` into ((its table and residual, its requantise), the product before them)."""
        epilogue, requantise = self.reader.split_epilogue(value)
        if requantise.op != "requantise":
            fail(f"attention requantises its products, and this is no cl.requantise{ON_CPU}", requantise.at)
        return (epilogue, requantise), _single_product(requantise.args[0])

    # Arrays of matrices -----------------------------------------------------------------------------------------------

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
        side = self._as_matrices(block_load.attributes["array"], dims, load.at)
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
        dims = load.attributes["block"][1]
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

    # Requantisation -------------------------------------------------------------------------------------------------

    def _build_product(
        self, epilogue: TableAndResidual, requantise: Tile, w: Heads, offsets: tuple[int, int], columns: int, width: int
    ) -> HeadProduct:
        """Collect a product with its requantise, table and bias. Raises LanguageError for unsuitable parameters.

        columns: of the result; width: columns that the kernel computes, with padding.
        """
        load, starts, dims = self.reader.load(requantise.args[1], "the parameters of requantise")
        array, element_indices = load.attributes["array"], element_order(requantise.args[1], load).reshape(-1, width)
        is_by_column = array.shape == (columns,) and dims == (width,) and (element_indices == np.arange(width)).all()
        if any(start.any() for start in starts) or not (is_by_column or (array.shape == dims == (1,))):
            fail(f"the parameters of a product are one, or one for each of its {columns} columns{ON_CPU}", load.at)
        table = None if epilogue.table is None else self.reader.complete_array(epilogue.table, "a table")
        bias = None if epilogue.residual is None else self._read_bias(epilogue.residual, columns, width)
        return HeadProduct(w, array, offsets, requantise.attributes, table, bias, epilogue.rescale)

    def _read_bias(self, tile: Tile, columns: int, width: int) -> Heads:
        """Recognise the array that a residual adds to a product: one row, a matrix, or a matrix for each head."""
        load, starts, dims = self.reader.load(tile, "what a residual_add adds")
        array, element_indices = load.attributes["array"], element_order(tile, load).reshape(-1, width)
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
    if tile.op != "dot" or (len(tile.args) == 3 and source_of_view(tile.args[2]).attributes.get("number") != 0):
        fail(f"a product of two activations is one cl.dot, of whole rows and columns{ON_CPU}", tile.at)
    return tile


def _read_operand(dot: Tile, number: int) -> tuple[Tile, int, Elements]:
    """Return operand `number` of a product: (int8 tile, offset that is added to it, order of its elements)."""
    first, parts = linear_form(dot.args[number])
    leaves = [(leaf, order) for leaf, (factor, order) in parts.items() if factor == 1]
    if len(parts) != 1 or not leaves or leaves[0][0].dtype != "int8":
        fail(f"a side of cl.dot is int8, or that less a zero point{ON_CPU}", dot.at)
    offset = first - int(dot.attributes["zeros"][number])
    if not -127 <= offset <= 128:
        fail(f"a zero point of int8 is between -128 and 127, and not {-offset}", dot.at)
    return leaves[0][0], offset, leaves[0][1]


# Softmax of rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftmaxOfRows:
    """The softmax of the rows of `source`, a tile of rows of `width` int8, of which the first `count` are valid.

    powers: the array with the table of exp. steps: 1 / scale of the result, a number or an array of one. zero_point: of
    the result.
    """

    source: Tile
    width: int
    count: int
    powers: ArrayArgument
    steps: ArrayArgument | float
    zero_point: int


@dataclass(frozen=True)
class SoftmaxKernel:
    """A kernel that computes the softmax of rows of x. tile: the block of y that a program writes."""

    y: ArrayArgument
    tile: tuple[int, ...]
    x: ArrayArgument
    rows: SoftmaxOfRows

    @staticmethod
    def read(reader: BlockReader, value: Tile) -> SoftmaxKernel:
        """Recognise the kernel. Raises LanguageError for another one."""
        rows, y = recognise_softmax(value), reader.y
        x = reader.activation(rows.source, "what a softmax is of")
        if rows.count != y.shape[-1] or rows.width != reader.shape[-1]:
            here = f"{rows.count}, in rows of {rows.width}"
            fail(f"a softmax is of the {y.shape[-1]} columns of {y.name}, and here of {here}{ON_CPU}", value.at)
        if x is y:
            reader.refuse(f"{y.name} is read and written; the accelerator needs another array for its output")
        return SoftmaxKernel(y, reader.shape, x, rows)


def recognise_softmax(value: Tile) -> SoftmaxOfRows:
    """Recognise `value`, floats converted to int8, as a softmax. Raises LanguageError where it is none."""
    shifted = before_reshapes(value.args[0])
    zero_point = 0
    if shifted.op == "binary" and shifted.attributes["name"] == "add":
        a, b = shifted.args
        shifted, addend = (a, source_of_view(b)) if source_of_view(b).op == "const" else (b, source_of_view(a))
        zero_point = addend.attributes.get("number", 0.5)
    share = before_reshapes(shifted)
    is_int8 = -128 <= zero_point <= 127 and zero_point == int(zero_point)
    if share.op != "unary" or share.attributes["name"] != "round_even" or not is_int8:
        _refuse_softmax("int8 is made by cl.rint(share) and a zero point between -128 and 127, .to(cl.int8)", value)
    divided = before_reshapes(share.args[0])
    if divided.op != "binary" or "nearest" not in divided.attributes:
        _refuse_softmax("a share is cl.div_rn(e * steps, total[:, None]), rounded once", divided)
    steps, power = _split_factor(before_reshapes(divided.args[0]))
    total = source_of_view(divided.args[1])
    if total.op != "reduce" or total.attributes["name"] != "ordered_sum":
        _refuse_softmax("powers are added up one after the other, by cl.sum(e, axis=1, ordered=True)", total)
    numerator, denominator = _Power.read(power), _Power.read(before_reshapes(total.args[0]))
    if (
        numerator.source is not denominator.source
        or numerator.powers is not denominator.powers
        or numerator.count < denominator.count
    ):
        _refuse_softmax("the powers that are divided are those that are added up", divided)
    if not _is_by_row(divided.args[1], total, denominator.width):
        _refuse_softmax("every row has a sum of its own, over its last axis", total)
    return SoftmaxOfRows(
        denominator.int8_rows(), denominator.width, denominator.count, denominator.powers, steps, int(zero_point)
    )


@dataclass(frozen=True)
class _Power:
    """Powers exp(v - maximum of the row) of the int8 tile `source`, looked up in the array `powers`.

    width: elements of a row. count: valid elements; beyond them the powers are 0.
    """

    source: Tile
    powers: ArrayArgument
    width: int
    count: int

    @staticmethod
    def read(tile: Tile) -> _Power:
        """Recognise a load of powers. Raises LanguageError for another tile."""
        mask = None
        if tile.op == "where" and _is_zero(tile.args[2]):
            mask, tile = tile.args[0], before_reshapes(tile.args[1])
        if tile.op != "load" or tile.attributes["block"] is not None:
            _refuse_softmax("a power is cl.load(powers + (255 + v - cl.max(v, axis=1)[:, None]))", tile)
        if len(tile.args) > 1 and mask is None:
            mask = tile.args[1]
            if not _is_zero(tile.args[2]):
                _refuse_softmax("beyond the end of a row, powers are 0", tile)
        array, (first, parts) = tile.attributes["array"], linear_form(tile.args[0])
        if array.dtype != "float32" or array.shape != (TABLE_ENTRIES,):
            _refuse_softmax(
                f"powers are float32[{TABLE_ENTRIES}], as cl.powers makes them, and {array.name} is another array", tile
            )
        added = [(leaf, order) for leaf, (factor, order) in parts.items() if factor == 1]
        subtracted = [leaf for leaf, (factor, _) in parts.items() if factor == -1]
        if len(parts) != 2 or len(added) != 1 or len(subtracted) != 1 or first != TABLE_ENTRIES - 1:
            _refuse_softmax("the place of a power is 255 + v - cl.max(v, axis=1)[:, None], in int32", tile)
        ((source, order),), (maximum,) = added, subtracted
        width = tile.shape[-1] if maximum.op != "reduce" else maximum.args[0].shape[-1]
        if (
            maximum.op != "reduce"
            or maximum.attributes["name"] != "max"
            or not _is_same_values(maximum.args[0], source)
        ):
            _refuse_softmax("what is subtracted is the largest element, cl.max(v, axis=1)", tile)
        rows = np.repeat(np.arange(source.size // width), width)
        is_last_axis = maximum.attributes["axis"] == len(maximum.args[0].shape) - 1
        if not is_last_axis or not is_identity_order(order) or not np.array_equal(parts[maximum][1].ravel(), rows):
            _refuse_softmax("every row has a largest element of its own, over its last axis", tile)
        return _Power(source, array, width, width if mask is None else _valid_count(mask, width))

    def int8_rows(self) -> Tile:
        """Return the int8 tile behind `source`, before its padding.

        Raises LanguageError where elements beyond the end of a row are not INT8_MIN.
        """
        tile, padding = self.source, None
        if tile.op == "where" and _valid_count(tile.args[0], self.width) == self.count:
            padding, (tile, *others) = tile.args[2], linear_form(tile.args[1])[1]
            if others or not _is_same_values(self.source.args[1], tile):
                _refuse_softmax("it is of int8", self.source)
        elif tile.op == "load" and len(tile.args) > 2:
            padding = tile.args[2]
        if self.count < self.width and (
            padding is None or source_of_view(padding).attributes.get("number") != INT8_MIN
        ):
            fail(
                f"beyond the end of a row, what a softmax is of is {INT8_MIN}: other={INT8_MIN} where it is loaded, or "
                f"cl.where(inside, v, {INT8_MIN}){ON_CPU}", self.source.at,
            )  # fmt: skip
        if tile.dtype != "int8":
            _refuse_softmax(f"it is of int8, and this is {tile}", tile)
        return tile


def _split_factor(tile: Tile) -> tuple[ArrayArgument | float, Tile]:
    """Split a product into (number or array of one number, tile); the number is 1 for other tiles."""
    if tile.op == "binary" and tile.attributes["name"] == "mul":
        for factor, rest in (tile.args, tile.args[::-1]):
            number = source_of_view(factor)
            if number.op == "const":
                return float(number.attributes["number"]), before_reshapes(rest)
            if number.op == "load" and number.shape == () and number.attributes["array"].size == len(number.args) == 1:
                return number.attributes["array"], before_reshapes(rest)
    return 1.0, tile


def _is_by_row(tile: Tile, reduced: Tile, width: int) -> bool:
    """Return whether the view `tile` repeats the result of `reduced` for each of `width` elements of its row."""
    (source,) = reduced.args
    rows = source.size // width
    if source.shape[-1] != width or reduced.attributes["axis"] != len(source.shape) - 1 or tile.size != source.size:
        return False
    return np.array_equal(element_order(tile, reduced).ravel(), np.repeat(np.arange(rows), width))


def _is_zero(tile: Tile) -> bool:
    """Return whether all elements of a tile are the constant 0."""
    return source_of_view(tile).op == "const" and source_of_view(tile).attributes["number"] == 0


def _is_same_values(tile: Tile, source: Tile) -> bool:
    """Return whether `tile` has the values of `source` in order."""
    first, parts = linear_form(tile)
    if first or len(parts) > 1 or source not in parts:
        return False
    factor, order = parts[source]
    return factor == 1 and is_identity_order(order)


def _valid_count(mask: Tile, width: int) -> int:
    """Count the elements of each row that the mask selects, which must be the first ones. Raises LanguageError."""
    mask_values: Any = constant_value(mask)
    if mask_values is None:
        _refuse_softmax("which elements a row has is known, as columns < N is", mask)
    by_row = np.broadcast_to(mask_values, mask.shape).reshape(-1, width)
    count = int(by_row[0].sum())
    if count == 0 or not (by_row == (np.arange(width) < count)).all():
        _refuse_softmax("a row has its first elements, as columns < N says", mask)
    return count


def _refuse_softmax(sentence: str, tile: Tile) -> None:
    """Raise LanguageError at `tile`, with the rule that the kernel breaks."""
    fail(f"the accelerator makes int8 of floats by a softmax as in docs/language.md alone: {sentence}{ON_CPU}", tile.at)


# Order of elements ------------------------------------------------------------------------------------------------


def linear_form(tile: Tile) -> tuple[int, dict[Tile, tuple[int, Elements]]]:
    """Write an integer `tile` as constant + sum of factor * leaf. Returns (constant, leaf -> (factor, element order)).

    The order says which element of the leaf each element of `tile` adds. A leaf is a tile that is no view, sum,
    difference or widening cast.
    """
    if "same" in tile.attributes:
        return linear_form(tile.attributes["same"])
    if tile.op == "const":
        return int(tile.attributes["number"]), {}
    if tile.op in VIEWS:
        first, parts = linear_form(tile.args[0])
        return first, {leaf: (factor, apply_view(order, tile)) for leaf, (factor, order) in parts.items()}
    if tile.op == "cast" and (tile.args[0].dtype, tile.dtype) in WIDENING_CASTS:
        return linear_form(tile.args[0])
    if tile.op == "binary" and tile.attributes["name"] in ("add", "sub") and tile.dtype in ("int32", "int64"):
        (a, left), (b, right) = map(linear_form, tile.args)
        sign = 1 if tile.attributes["name"] == "add" else -1
        if not left.keys() & right.keys():
            return a + sign * b, left | {leaf: (sign * factor, order) for leaf, (factor, order) in right.items()}
    return 0, {tile: (1, np.arange(tile.size).reshape(tile.shape))}
