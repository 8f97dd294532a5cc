"""Recognise the softmax of rows in a traced kernel, in the one spelling with the accelerator's bits.

    index = 255 + v - cl.max(v, axis=1)[:, None]              v int8 [rows, columns], as int32
    e = cl.load(powers + index, mask=inside, other=0.0)       powers float32[256]
    total = cl.sum(e, axis=1, ordered=True)
    (cl.rint(cl.div_rn(e * steps, total[:, None])) + zero_point).to(cl.int8)

Beyond the end of a row `v` is -128. The order of elements is followed through all views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.block_reader import ON_CPU, BlockReader
from celosia.compiler.language.interpreter import constant_value
from celosia.compiler.language.language_errors import fail
from celosia.compiler.language.tile import ArrayArgument, Tile
from celosia.compiler.language.tile_views import (
    VIEWS,
    apply_view,
    before_reshapes,
    element_order,
    is_identity_order,
    source_of_view,
)
from celosia.hw.spec.scratchpads import EXP_ENTRIES

TABLE_ENTRIES = EXP_ENTRIES // 2
"""Number of entries of a table of powers."""
INT8_MIN = -128
Elements = NDArray[np.int64]
"""For each element of a tile, the number of the element of another tile that it is."""
WIDENING_CASTS = (("int8", "int32"), ("int8", "int64"), ("int32", "int64"))
"""Casts (from, to) that change no value."""


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
    if shifted.op == "binary" and shifted.more["name"] == "add":
        a, b = shifted.args
        shifted, addend = (a, source_of_view(b)) if source_of_view(b).op == "const" else (b, source_of_view(a))
        zero_point = addend.more.get("number", 0.5)
    share = before_reshapes(shifted)
    if share.op != "unary" or share.more["name"] != "round_even" or not _is_int8(zero_point):
        _refuse("int8 is made by cl.rint(share) and a zero point between -128 and 127, .to(cl.int8)", value)
    divided = before_reshapes(share.args[0])
    if divided.op != "binary" or "nearest" not in divided.more:
        _refuse("a share is cl.div_rn(e * steps, total[:, None]), rounded once", divided)
    steps, power = _split_factor(before_reshapes(divided.args[0]))
    total = source_of_view(divided.args[1])
    if total.op != "reduce" or total.more["name"] != "ordered_sum":
        _refuse("powers are added up one after the other, by cl.sum(e, axis=1, ordered=True)", total)
    numerator, denominator = _Power.read(power), _Power.read(before_reshapes(total.args[0]))
    if (
        numerator.source is not denominator.source
        or numerator.powers is not denominator.powers
        or numerator.count < denominator.count
    ):
        _refuse("the powers that are divided are those that are added up", divided)
    if not _is_by_row(divided.args[1], total, denominator.width):
        _refuse("every row has a sum of its own, over its last axis", total)
    return SoftmaxOfRows(
        denominator.int8_rows(), denominator.width, denominator.count, denominator.powers, steps, int(zero_point)
    )


def _refuse(sentence: str, tile: Tile) -> None:
    """Raise LanguageError at `tile`, with the rule that the kernel breaks."""
    fail(f"the accelerator makes int8 of floats by a softmax as in docs/language.md alone: {sentence}{ON_CPU}", tile.at)


def _is_int8(number: float) -> bool:
    """Return whether a number is an integer that int8 can hold."""
    return -128 <= number <= 127 and number == int(number)


def _split_factor(tile: Tile) -> tuple[ArrayArgument | float, Tile]:
    """Split a product into (number or array of one number, tile); the number is 1 for other tiles."""
    if tile.op == "binary" and tile.more["name"] == "mul":
        for factor, rest in (tile.args, tile.args[::-1]):
            number = source_of_view(factor)
            if number.op == "const":
                return float(number.more["number"]), before_reshapes(rest)
            if number.op == "load" and number.shape == () and number.more["array"].size == len(number.args) == 1:
                return number.more["array"], before_reshapes(rest)
    return 1.0, tile


def _is_by_row(tile: Tile, reduced: Tile, width: int) -> bool:
    """Return whether the view `tile` repeats the result of `reduced` for each of `width` elements of its row."""
    (source,) = reduced.args
    rows = source.size // width
    if source.shape[-1] != width or reduced.more["axis"] != len(source.shape) - 1 or tile.size != source.size:
        return False
    return np.array_equal(element_order(tile, reduced).ravel(), np.repeat(np.arange(rows), width))


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
        if tile.op != "load" or tile.more["block"] is not None:
            _refuse("a power is cl.load(powers + (255 + v - cl.max(v, axis=1)[:, None]))", tile)
        if len(tile.args) > 1 and mask is None:
            mask = tile.args[1]
            if not _is_zero(tile.args[2]):
                _refuse("beyond the end of a row, powers are 0", tile)
        array, (first, parts) = tile.more["array"], linear_form(tile.args[0])
        if array.dtype != "float32" or array.shape != (TABLE_ENTRIES,):
            _refuse(
                f"powers are float32[{TABLE_ENTRIES}], as cl.powers makes them, and {array.name} is another array", tile
            )
        added = [(leaf, order) for leaf, (factor, order) in parts.items() if factor == 1]
        subtracted = [leaf for leaf, (factor, _) in parts.items() if factor == -1]
        if len(parts) != 2 or len(added) != 1 or len(subtracted) != 1 or first != TABLE_ENTRIES - 1:
            _refuse("the place of a power is 255 + v - cl.max(v, axis=1)[:, None], in int32", tile)
        ((source, order),), (maximum,) = added, subtracted
        width = tile.shape[-1] if maximum.op != "reduce" else maximum.args[0].shape[-1]
        if maximum.op != "reduce" or maximum.more["name"] != "max" or not _is_same_values(maximum.args[0], source):
            _refuse("what is subtracted is the largest element, cl.max(v, axis=1)", tile)
        rows = np.repeat(np.arange(source.size // width), width)
        is_last_axis = maximum.more["axis"] == len(maximum.args[0].shape) - 1
        if not is_last_axis or not is_identity_order(order) or not np.array_equal(parts[maximum][1].ravel(), rows):
            _refuse("every row has a largest element of its own, over its last axis", tile)
        return _Power(source, array, width, width if mask is None else _valid_count(mask, width))

    def int8_rows(self) -> Tile:
        """Return the int8 tile behind `source`, before its padding.

        Raises LanguageError where elements beyond the end of a row are not INT8_MIN.
        """
        tile, padding = self.source, None
        if tile.op == "where" and _valid_count(tile.args[0], self.width) == self.count:
            padding, (tile, *others) = tile.args[2], linear_form(tile.args[1])[1]
            if others or not _is_same_values(self.source.args[1], tile):
                _refuse("it is of int8", self.source)
        elif tile.op == "load" and len(tile.args) > 2:
            padding = tile.args[2]
        if self.count < self.width and (padding is None or source_of_view(padding).more.get("number") != INT8_MIN):
            fail(
                f"beyond the end of a row, what a softmax is of is {INT8_MIN}: other={INT8_MIN} where it is loaded, or "
                f"cl.where(inside, v, {INT8_MIN}){ON_CPU}", self.source.at,
            )  # fmt: skip
        if tile.dtype != "int8":
            _refuse(f"it is of int8, and this is {tile}", tile)
        return tile


def _is_zero(tile: Tile) -> bool:
    """Return whether all elements of a tile are the constant 0."""
    return source_of_view(tile).op == "const" and source_of_view(tile).more["number"] == 0


def _is_same_values(tile: Tile, source: Tile) -> bool:
    """Return whether `tile` has the values of `source` in order."""
    first, parts = linear_form(tile)
    if first or len(parts) > 1 or source not in parts:
        return False
    factor, order = parts[source]
    return factor == 1 and is_identity_order(order)


def linear_form(tile: Tile) -> tuple[int, dict[Tile, tuple[int, Elements]]]:
    """Write an integer `tile` as constant + sum of factor * leaf. Returns (constant, leaf -> (factor, element order)).

    The order says which element of the leaf each element of `tile` adds. A leaf is a tile that is no view, sum,
    difference or widening cast.
    """
    if "same" in tile.more:
        return linear_form(tile.more["same"])
    if tile.op == "const":
        return int(tile.more["number"]), {}
    if tile.op in VIEWS:
        first, parts = linear_form(tile.args[0])
        return first, {leaf: (factor, apply_view(order, tile)) for leaf, (factor, order) in parts.items()}
    if tile.op == "cast" and (tile.args[0].dtype, tile.dtype) in WIDENING_CASTS:
        return linear_form(tile.args[0])
    if tile.op == "binary" and tile.more["name"] in ("add", "sub") and tile.dtype in ("int32", "int64"):
        (a, left), (b, right) = map(linear_form, tile.args)
        sign = 1 if tile.more["name"] == "add" else -1
        if not left.keys() & right.keys():
            return a + sign * b, left | {leaf: (sign * factor, order) for leaf, (factor, order) in right.items()}
    return 0, {tile: (1, np.arange(tile.size).reshape(tile.shape))}


def _valid_count(mask: Tile, width: int) -> int:
    """Count the elements of each row that the mask selects, which must be the first ones. Raises LanguageError."""
    mask_values: Any = constant_value(mask)
    if mask_values is None:
        _refuse("which elements a row has is known, as columns < N is", mask)
    by_row = np.broadcast_to(mask_values, mask.shape).reshape(-1, width)
    count = int(by_row[0].sum())
    if count == 0 or not (by_row == (np.arange(width) < count)).all():
        _refuse("a row has its first elements, as columns < N says", mask)
    return count
