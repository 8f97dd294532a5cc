"""Products of operands with 1 or 2 bits, by bit planes, `and` and population counts.

Operands are x = x0 + sx * u and w = w0 + sw * v, where u and v have one bit or two (`BitLevels`). Bit i of
all u is a plane, u_i, with eight channels in a byte. Planes are convolved as bytes are (integer.py), but with

    sum u * v  =  sum over planes i, j of 2**(i + j) * popcount(u_i & v_j)

instead of products. Each byte of a word counts its own bits; counts are added up as long as a byte holds them, then
dot4 by ones adds the bytes of a word. And

    sum (x - zx) * (w - zw)  =  sx * sw * sum u * v  +  (w0 - zw) * sx * sum u
                                + (x0 - zx) * (sw * sum v + count * (w0 - zw))

The idea is that of the bit-serial operators of M. Cowan et al., "Automatic Generation of High-Performance Quantized
Machine Learning Kernels" (CGO 2020).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, call, select, wrap
from celosia.compiler.expr.math_functions import ONES
from celosia.compiler.ops.integer import WIDTHS, Channels, Index, ZeroPoint, pack_columns, pack_rows, panel_width
from celosia.compiler.ops.products import SlidingWindow, batch_index, batch_shape
from celosia.compiler.ops.registry import Node
from celosia.compiler.program.op_spec import op_spec
from celosia.compiler.target import dot_instructions, target

MAX_LEVEL_BITS = 2
"""Limit of the bits of a code; with more bits, products of bytes are faster."""


@dataclass(frozen=True)
class BitLevels:
    """Evenly spaced values low + step * u, where 0 <= u < 2**bits.

    step is a power of two, so that kernels get the bits of u by shifts.

    >>> BitLevels.of([-1, 1]), BitLevels.of([0, 3])
    (BitLevels(low=-1, step=2, bits=1), BitLevels(low=0, step=1, bits=2))
    """

    low: int
    step: int
    bits: int

    @staticmethod
    def of(values: Any) -> BitLevels | None:
        """Return the levels with the fewest bits that contain the integers `values`; None where they need too many."""
        distinct = np.unique(np.asarray(values))
        if not distinct.size or distinct.size > 1 << MAX_LEVEL_BITS:
            return None
        offsets = [int(value) - int(distinct[0]) for value in distinct]
        distance = reduce(gcd, offsets)
        step = max(distance & -distance, 1)
        bits = max((offsets[-1] // step).bit_length(), 1)
        return BitLevels(int(distinct[0]), step, bits) if bits <= MAX_LEVEL_BITS else None

    @property
    def values(self) -> list[int]:
        """All levels in ascending order."""
        return [self.low + self.step * u for u in range(1 << self.bits)]

    def code_of(self, value: int) -> int:
        """Return the code u of `value`. Raises ValueError where it is no level."""
        return self.values.index(value)

    def bit(self, values: NDArray[Any], position: int) -> NDArray[Any]:
        """Return bit `position` of the code of each value."""
        return (values.astype(np.int64) - self.low) // self.step >> position & 1

    def with_values(self, *others: BitLevels | int) -> BitLevels | None:
        """Return the levels that contain these and all of `others`, levels or single values; None as for `of`."""
        other_values = (other if isinstance(other, int) else other.values for other in others)
        return BitLevels.of(np.concatenate([self.values, *map(np.atleast_1d, other_values)]))


LEVELS = "levels"
"""Attribute that the compiler adds to an operator: the BitLevels of operands with few values, by the input's number."""
MAX_BYTE = 255
"""Largest count that a byte holds."""


def max_countable_words(x: BitLevels, w: BitLevels) -> int:
    """Return how many words, each of 32 products, can be counted before a byte of the count could overflow."""
    return MAX_BYTE // (8 * ((1 << x.bits) - 1) * ((1 << w.bits) - 1))


MAX_ADDED_WORDS = 9
"""Limit of the words whose counts are added before bytes are widened to int32. All are unrolled; more gain little."""
CountedWords = tuple[int, Expr, Expr] | tuple[int, Expr]
"""Words whose set bits are counted: (binary place of the count, two words, whose `and` is counted) or (place, word)."""


def sum_of_bit_counts(words: Iterable[CountedWords]) -> Expr:
    """Return the sum of 2**place * popcount(u & v) over all `words`, as int32.

    Each byte of a uint32 counts separately, up to MAX_BYTE; dot4 by ones adds the four.
    """
    by_place: dict[int, Expr] = {}
    for place, word, *other_word in words:
        count = call("popcount4", word & other_word[0] if other_word else word)
        by_place[place] = by_place[place] + count if place in by_place else count
    total = by_place.pop(max(by_place))
    for place in sorted(by_place, reverse=True):
        total = by_place[place] + (total << 1)
    return call("dot4", total, wrap(ONES, "uint32"))


def chunk_sizes(steps: Sequence[int], max_product: int) -> tuple[int, ...]:
    """Return how many steps of each reduction axis to add before bytes are widened to int32.

    steps: extents of the axes, of which the last ones are taken first. max_product: limit of the product of the sizes.
    Not all steps are taken, so that a reduction remains.
    """
    sizes: list[int] = []
    max_product = min(max_product, MAX_ADDED_WORDS, prod(steps) - 1)
    for extent in reversed(steps):
        sizes.append(max(n for n in range(1, min(extent, max(max_product, 1)) + 1) if extent % n == 0))
        max_product //= sizes[-1]
    return tuple(reversed(sizes))


def reduce_bit_counts(
    words_at: Callable[[Sequence[Expr]], Iterable[CountedWords]], steps: Sequence[int], chunks: Sequence[int] = ()
) -> Expr:
    """Return the sum over all reduction steps of the bit counts of `words_at` a step.

    steps: extents of the reduction axes. chunks: steps of each axis that are added before bytes are widened (see
    `chunk_sizes`); () for one each.
    """
    chunks = chunks or (1,) * len(steps)
    axes = tuple(T.reduce_axis(n // size, f"k{d}") for d, (n, size) in enumerate(zip(steps, chunks)))
    words: list[CountedWords] = []
    for offsets in itertools.product(*map(range, chunks)):
        words += words_at([axis * n + wrap(k, INDEX) for axis, n, k in zip(axes, chunks, offsets)])
    return T.sum(sum_of_bit_counts(words), axes)


def bit_planes(x: Tensor, levels: BitLevels, axis: int, dtype: str, strided: bool = False) -> list[Tensor]:
    """Split x into bit planes, one tensor for each bit of u: eight elements along `axis` in a byte of type `dtype`.

    Byte p has the elements from 8 * p on, the first in the lowest bit; bits beyond the end of the axis are 0. With
    `strided` byte p has every n-th element from p on, where n is the number of bytes, a multiple of four; then vectors
    run along the axis.
    """
    axis, size = axis % len(x.shape), x.shape[axis]
    count = -(-size // 32) * 4 if strided else -(-size // 8)
    if x.body is not None or size != 8 * count:  # computed once, and filled up
        source, shape = x, tuple(8 * count if d == axis else n for d, n in enumerate(x.shape))

        def element(*i: Expr) -> Expr:
            return source[i] if size == 8 * count else select(i[axis] < size, source[i], levels.low)

        x = replace(T.compute(shape, element, "levels"), stored=True)
    return [_bit_plane(x, levels, place, axis, dtype, count if strided else 1) for place in range(levels.bits)]


def _bit_plane(x: Tensor, levels: BitLevels, place: int, axis: int, dtype: str, distance: int) -> Tensor:
    """Return the plane of bit `place` of u; distance: along `axis` between the elements of one byte."""
    shift = place + levels.step.bit_length() - 1

    def body(*i: Expr) -> Expr:
        """Return a byte with the bits of eight elements."""
        first, total = i[axis] if distance > 1 else i[axis] * 8, None
        for k in range(8):
            u = x[(*i[:axis], first + k * distance, *i[axis + 1 :])].astype("uint8") - (levels.low & 255)
            bit = (u >> shift - k if shift >= k else u << k - shift) & (1 << k)
            total = bit if total is None else total | bit
        assert total is not None
        return total.astype(dtype)

    shape = tuple(n // 8 if d == axis else n for d, n in enumerate(x.shape))
    return replace(T.compute(shape, body, f"plane{place}"), stored=True)


@dataclass(frozen=True)
class LevelArithmetic:
    """Turns sums of u and v into the sum of (x - zx) * (w - zw), by the equation at the top of this file.

    x, w: levels of both operands. zx, zw: zero points as in the model. count: terms of a sum.
    """

    x: BitLevels
    w: BitLevels
    zx: Expr
    zw: ZeroPoint
    count: int

    def offset(self, channel: Expr, sum_v: Expr) -> Expr:
        """Return the terms of an output channel's sum that do not depend on x; sum_v: the sum of its v."""
        lowest_x = wrap(self.x.low, "int32") - self.zx
        return lowest_x * (sum_v * self.w.step + self.lowest_weight(channel) * self.count)

    def lowest_weight(self, channel: Expr) -> Expr:
        """Return w0 - zw of an output channel: its lowest weight without the zero point."""
        return wrap(self.w.low, "int32") - self.zw.at(channel)

    def sum_of_products(self, sum_uv: Expr, sum_u: Expr | None, offset: Expr, channel: Expr) -> Expr:
        """Return the sum of (x - zx) * (w - zw) of an output channel.

        sum_uv: sum of u * v. sum_u: sum of u, None where its factor is 0. offset: see the method.
        """
        total = sum_uv * (self.x.step * self.w.step) + offset
        return total if sum_u is None else total + self.lowest_weight(channel) * (sum_u * self.x.step)

    @property
    def needs_sum_u(self) -> bool:
        """Whether sums of u have to be computed: not where the lowest weight and the zero points are 0."""
        return self.w.low != 0 or not self.zw.is_zero


def convolution(
    node: Node, x: Tensor, w: Tensor, levels: tuple[BitLevels, BitLevels], zx: Expr, pad: int, zw: ZeroPoint,
    bias: Tensor | None, finish: Callable[[Expr, Expr], Expr],
) -> Tensor:  # fmt: skip
    """Return finish(int32 sum over the window of (x - zx) * (w - zw), plus bias; output channel), by bit planes.

    It equals integer.convolution for operands that have these `levels`. zx, zw: zero points as in the model, which
    integer.py shifts by 128 where dot products need it. pad: value of the padding, one of the levels of x if windows
    reach it. finish: what becomes of a sum, such as its requantisation.
    """
    group = int(node.attrs.get("group", 1))
    window = SlidingWindow.of(node, x.shape[2:], w.shape[2:])
    count = w.shape[1] * prod(window.kernel)
    arithmetic = LevelArithmetic(*levels, zx, zw, count)
    pad_code = levels[0].code_of(pad) if pad in levels[0].values else 0
    weight_planes = bit_planes(w, levels[1], 1, "int8")
    packs = [
        Channels(plane, weight_planes[0], window, group, wrap(255 * (pad_code >> place & 1), "int32"))
        for place, plane in enumerate(bit_planes(x, levels[0], 1, "uint8"))
    ]
    images, first = [pack.packed_image() for pack in packs], packs[0]
    weights = [first.pack_weights(plane, lambda v: v) for plane in weight_planes]
    all_of_x = T.compute((1, *w.shape[1:]), lambda *i: wrap(1, "uint8"), "ones")
    ones = [first.pack_weights(plane, lambda v: v) for plane in bit_planes(all_of_x, BitLevels(0, 1, 1), 1, "int8")]
    chunks = chunk_sizes(first.steps, max_countable_words(*levels))

    def window_sum(right: Sequence[Tensor], channel: Expr, ni: Expr, g: Expr, position: Expr) -> Expr:
        """Return the sum of u * v over a window; right: packed planes of v."""

        def words_at(ks: Sequence[Expr]) -> Iterator[CountedWords]:
            start = first.flat_start(images[0], ni, g, ks) + position
            for (i, image), (j, plane) in itertools.product(enumerate(images), enumerate(right)):
                yield i + j, image.flat(start), plane[(channel, *ks)]

        return reduce_bit_counts(words_at, first.steps, chunks)

    def channel_offset(mi: Expr) -> Expr:
        """Return the terms of an output channel that do not depend on x, and its bias."""
        sum_v = reduce_bit_counts(lambda ks: [(j, plane[(mi, *ks)]) for j, plane in enumerate(weights)], first.steps)
        terms = arithmetic.offset(mi, sum_v)
        return terms if bias is None else terms + bias[mi]

    offset = T.compute((w.shape[0],), channel_offset, "offset")
    n, mg, zero = x.shape[0], w.shape[0] // group, wrap(0, INDEX)
    sums: Tensor | None = None
    if arithmetic.needs_sum_u:
        sums = T.compute((n, group, first.length), lambda ni, g, p: window_sum(ones, zero, ni, g, p), "window_sums")

    def body(ni: Expr, g: Expr, mi: Expr, position: Expr) -> Expr:
        channel = g * mg + mi
        sum_u = None if sums is None else sums[ni, g, position]
        sum_uv = window_sum(weights, channel, ni, g, position)
        return finish(arithmetic.sum_of_products(sum_uv, sum_u, offset[channel], channel), channel)

    return first.extract_windows(T.compute((n, group, mg, first.length), body, "conv"))


def matrix_product(
    a: Tensor, b: Tensor, levels: tuple[BitLevels, BitLevels], za: Expr, zb: ZeroPoint,
    finish: Callable[[Expr, Index], Expr], transpose_a: bool = False, transpose_b: bool = False,
) -> Tensor:  # fmt: skip
    """Return finish(int32 of numpy.matmul(a - za, b - zb), its index), by bit planes.

    It equals integer.matrix_product for operands that have these `levels`. za, zb: zero points as in the model.
    transpose_a, transpose_b: matrices are transposed. Raises ValueError for shapes that do not fit.
    """
    inner = a.shape[-2 if transpose_a else -1]
    m, n = a.shape[-1 if transpose_a else -2], b.shape[-2 if transpose_b else -1]
    batch = batch_shape(a, b, inner, b.shape[-1 if transpose_b else -2])
    arithmetic, steps = LevelArithmetic(*levels, za, zb, inner), -(-inner // 32)
    width = panel_width(n, 32 if m > 4 else WIDTHS[0])
    lefts = [
        pack_rows(plane, steps, transpose_a)
        for plane in bit_planes(a, levels[0], -2 if transpose_a else -1, "uint8", strided=True)
    ]
    b_axis = -1 if transpose_b else -2
    rights = [
        pack_columns(plane, steps, width, transpose_b)
        for plane in bit_planes(b, levels[1], b_axis, "int8", strided=True)
    ]
    all_of_a = T.compute((inner, 1), lambda *i: wrap(1, "uint8"), "ones")
    (ones,) = (
        pack_columns(plane, steps, 1, False)
        for plane in bit_planes(all_of_a, BitLevels(0, 1, 1), -2, "int8", strided=True)
    )
    chunks = chunk_sizes((steps,), max_countable_words(*levels))

    def column_offset(*i: Expr) -> Expr:
        """Return the terms of a column of b that do not depend on a."""
        *lead, block, column = i

        def words_at(ks: Sequence[Expr]) -> Iterator[CountedWords]:
            yield from ((j, plane[(*lead, block, *ks, column)]) for j, plane in enumerate(rights))

        return arithmetic.offset(block * width + column, reduce_bit_counts(words_at, (steps,)))

    offset = T.compute((*rights[0].shape[:-3], n // width, width), column_offset, "offset")

    def row_sums(*i: Expr) -> Expr:
        """Return the sum of u of a row of a."""
        return reduce_bit_counts(
            lambda ks: [(j, plane[(*i, *ks)], ones[0, ks[0], 0]) for j, plane in enumerate(lefts)], (steps,), chunks
        )

    sums = T.compute((*a.shape[:-2], m), row_sums, "row_sums") if arithmetic.needs_sum_u else None

    def body(*i: Expr) -> Expr:
        """Return the result of a row and a column of a panel."""
        row, block, column = i[-3:]
        lead_a, lead_b = batch_index(a, i[:-3]), batch_index(b, i[:-3])

        def words_at(ks: Sequence[Expr]) -> Iterator[CountedWords]:
            for (p, left), (q, right) in itertools.product(enumerate(lefts), enumerate(rights)):
                yield p + q, left[(*lead_a, row, *ks)], right[(*lead_b, block, *ks, column)]

        j = block * width + column
        sum_u = None if sums is None else sums[(*lead_a, row)]
        sum_uv = reduce_bit_counts(words_at, (steps,), chunks)
        acc = arithmetic.sum_of_products(sum_uv, sum_u, offset[(*lead_b, block, column)], j)
        return finish(acc, (*i[:-3], row, j))

    product = T.compute((*batch, m, n // width, width), body, "matmul")
    return replace(product, shape=(*batch, m, n))


# Whether it is faster than products of bytes, by the number of vector instructions that the processor needs


DOT4_COST = {"vnni": 1.0, "i8mm": 1.0, "dotprod": 2.0, "pairs": 7.0, "neon": 4.5, "bytes": 16.0}
"""Vector instructions for four products in each 32-bit lane, by the instructions of dot4 (llvm/byte_products.py)."""
PACKING_COST = 1.0
"""Vector instructions for packing an element of x into one plane."""
REQUIRED_GAIN = 1.15
"""Factor by which the bit-serial way must need fewer instructions."""


def _bit_product_cost() -> float:
    """Return the vector instructions for 32 products of bits in each 32-bit lane: `and`, population count, addition."""
    features = target().features
    if features & {"avx512bitalg", "neon"}:
        return 3
    return 8 if "avx2" in features else 14


def is_faster(levels: tuple[BitLevels, BitLevels], channels: int, taps: int, outputs: int, packed: int = 1) -> bool:
    """Return whether a product or convolution is faster bit-serially than by bytes.

    channels: input channels, or elements, that are reduced for each of the `taps` of a window (1 for a product).
    outputs: output channels, or columns, that are computed from them. packed: elements of a channel of x that are
    packed for each position of the result.
    """
    bit_planes = levels[0].bits * levels[1].bits
    by_bits = (
        -(-channels // 32) * taps * outputs * bit_planes * _bit_product_cost()
        + packed * channels * levels[0].bits * PACKING_COST
    )
    by_bytes = -(-channels // 4) * taps * outputs * DOT4_COST[dot_instructions(target().features)[0]]
    return not target().has_amx and REQUIRED_GAIN * by_bits < by_bytes


def _levels_of_operands(node: Node) -> tuple[BitLevels, BitLevels] | None:
    """Return the levels of both operands; None where they are unknown, or the second is not packed at compile time."""
    first, second = op_spec(node.op).factors
    levels = node.attrs.get(LEVELS, {})
    x, w = levels.get(first), levels.get(second)
    return (x, w) if x is not None and w is not None and node.is_fixed(second) else None


def convolution_levels(node: Node, zero: str) -> tuple[tuple[BitLevels, BitLevels], int] | None:
    """Return (levels of both operands, zero point of x) of a convolution that is faster bit-serially; None for others.

    zero: name of the operand that is the zero point of x. Where windows reach beyond the image, the levels of x include
    the zero point, with which it is padded.
    """
    first, second = (node.input(number) for number in op_spec(node.op).factors)
    levels, group = _levels_of_operands(node), int(node.attrs.get("group", 1))
    if levels is None or len(second.shape) < 3 or (group > 1 and second.shape[1] % 8) or not second.size * first.size:
        return None
    window = SlidingWindow.of(node, first.shape[2:], second.shape[2:])
    zero_point = node.value(zero) if node.has(zero) else np.zeros((), np.int64)
    if zero_point is None or zero_point.size != 1:
        return None
    x: BitLevels | None
    x, w = levels
    if any(sum(window.margins(), ())):
        x = x.with_values(int(zero_point.item()))
    outputs, packed = second.shape[0] // group, prod(window.stride)
    if x is None or not is_faster((x, w), second.shape[1], prod(window.kernel), outputs, packed):
        return None
    return (x, w), int(zero_point.item())


def product_levels(node: Node, transpose_a: bool, transpose_b: bool) -> tuple[BitLevels, BitLevels] | None:
    """Return the levels of both operands of a matrix product that is faster bit-serially; None for others."""
    a, b = (node.input(number) for number in op_spec(node.op).factors)
    levels = _levels_of_operands(node)
    if levels is None or min(len(a.shape), len(b.shape)) < 2 or not a.size * b.size:
        return None
    inner, columns = a.shape[-2 if transpose_a else -1], b.shape[-2 if transpose_b else -1]
    return levels if is_faster(levels, inner, 1, columns) else None
