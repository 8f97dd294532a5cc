"""Products of operands with 1 or 2 bits, by bit planes, `and` and population counts.

Operands are x = x0 + sx * u and w = w0 + sw * v, where u and v have one bit or two (program/bit_levels.py). The bits of
a place of u are a plane, eight channels a byte; planes are convolved as bytes are (integer.py), with

    sum u * v  =  sum over planes i, j of 2**(i + j) * popcount(u_i & v_j)

in the place of products. What bytes count is added up as long as a byte holds it, then dot4 by ones widens it. And

    sum (x - zx) * (w - zw)  =  sx * sw * sum u * v  +  (w0 - zw) * sx * sum u
                                + (x0 - zx) * (sw * sum v + count * (w0 - zw))

The idea is that of the bit-serial operators of M. Cowan et al., "Automatic Generation of High-Performance Quantized
Machine Learning Kernels" (CGO 2020).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, call, select, wrap
from celosia.compiler.expr.math_functions import ONES
from celosia.compiler.ops.integer import WIDTHS, Index, Zero, columns_of, rows_of, width_of
from celosia.compiler.ops.packing import Channels
from celosia.compiler.ops.products import at_lead, batch_of
from celosia.compiler.ops.registry import Node
from celosia.compiler.ops.window import SlidingWindow
from celosia.compiler.program.bit_levels import BitLevels
from celosia.compiler.program.op_spec import op_spec
from celosia.compiler.target import dot_instructions, target

LEVELS = "levels"
"""Attribute of an operator that holds the BitLevels of operands with few values, by the input's number."""
MAX_BYTE = 255
"""Largest count of a byte."""


def most_words(x: BitLevels, w: BitLevels) -> int:
    """Return the number of words of 32 products whose counts a byte can hold."""
    return MAX_BYTE // (8 * ((1 << x.bits) - 1) * ((1 << w.bits) - 1))


MOST_ADDED = 9
"""Limit of words that are added before bytes are widened: more gain little, and are unrolled."""

Pair = tuple[int, Expr, Expr] | tuple[int, Expr]
"""(binary place of a count, two words whose `and` is counted), or (binary place, one word)."""


def counted(pairs: Iterable[Pair]) -> Expr:
    """Return the sum of 2**place * popcount(u & v) over all pairs, as int32.

    Each byte of a uint32 counts separately, up to MAX_BYTE; dot4 by ones adds the four.
    """
    by_place: dict[int, Expr] = {}
    for place, word, *others in pairs:
        count = call("popcount4", word & others[0] if others else word)
        by_place[place] = by_place[place] + count if place in by_place else count
    total = by_place.pop(max(by_place))
    for place in sorted(by_place, reverse=True):
        total = by_place[place] + (total << 1)
    return call("dot4", total, wrap(ONES, "uint32"))


def chunks_of(steps: Sequence[int], most: int) -> tuple[int, ...]:
    """Return how many steps of each reduction axis to add before bytes are widened, the last axes first.

    At most `most` in total, and never all, so that a reduction remains.
    """
    sizes: list[int] = []
    most = min(most, MOST_ADDED, prod(steps) - 1)
    for extent in reversed(steps):
        sizes.append(max(n for n in range(1, min(extent, max(most, 1)) + 1) if extent % n == 0))
        most //= sizes[-1]
    return tuple(reversed(sizes))


def summed(pairs: Callable[[Sequence[Expr]], Iterable[Pair]], steps: Sequence[int], chunks: Sequence[int] = ()) -> Expr:
    """Return the sum of the counts of `pairs` at all reduction steps, `chunks` of them at once."""
    chunks = chunks or (1,) * len(steps)
    axes = tuple(T.reduce_axis(n // size, f"k{d}") for d, (n, size) in enumerate(zip(steps, chunks)))
    inside = itertools.product(*map(range, chunks))
    found = [
        pair for own in inside for pair in pairs([axis * n + wrap(k, INDEX) for axis, n, k in zip(axes, chunks, own)])
    ]
    return T.sum(counted(found), axes)


def planes(x: Tensor, levels: BitLevels, axis: int, dtype: str, spread: bool = False) -> list[Tensor]:
    """Return a tensor for each bit of u: eight elements along `axis` in each byte, of type `dtype`, and 0 beyond its
    end.

    Byte p has the elements from 8 * p on, the first in the lowest bit. spread: it has every n-th element from p on,
    where n is the number of bytes, a multiple of four, so that vectors run along the axis.
    """
    axis, size = axis % len(x.shape), x.shape[axis]
    count = -(-size // 32) * 4 if spread else -(-size // 8)
    if x.body is not None or size != 8 * count:  # computed once, and filled up
        given, shape = x, tuple(8 * count if d == axis else n for d, n in enumerate(x.shape))

        def element(*i: Expr) -> Expr:
            return given[i] if size == 8 * count else select(i[axis] < size, given[i], levels.low)

        x = replace(T.compute(shape, element, "levels"), stored=True)
    return [_plane(x, levels, place, axis, dtype, count if spread else 1) for place in range(levels.bits)]


def _plane(x: Tensor, levels: BitLevels, place: int, axis: int, dtype: str, apart: int) -> Tensor:
    """Return bit `place` of u; `apart`: the distance of the elements of a byte."""
    shift = place + levels.step.bit_length() - 1

    def body(*i: Expr) -> Expr:
        first, total = i[axis] if apart > 1 else i[axis] * 8, None
        for k in range(8):
            u = x[(*i[:axis], first + k * apart, *i[axis + 1 :])].astype("uint8") - (levels.low & 255)
            bit = (u >> shift - k if shift >= k else u << k - shift) & (1 << k)
            total = bit if total is None else total | bit
        assert total is not None
        return total.astype(dtype)

    shape = tuple(n // 8 if d == axis else n for d, n in enumerate(x.shape))
    return replace(T.compute(shape, body, f"plane{place}"), stored=True)


@dataclass(frozen=True)
class Factors:
    """Constants that turn sums of bits into sums of levels: acc = scale * sum u*v + (w0 - zw) * sx * sum u + offset.

    count: terms of a sum.
    """

    x: BitLevels
    w: BitLevels
    zx: Expr
    zw: Zero
    count: int

    def offset(self, channel: Expr, sum_v: Expr) -> Expr:
        """Return the part of an output channel's sum that does not depend on x; sum_v: the sum of its v."""
        low = wrap(self.x.low, "int32") - self.zx
        return low * (sum_v * self.w.step + self.below(channel) * self.count)

    def below(self, channel: Expr) -> Expr:
        """Return w0 - zw of an output channel."""
        return wrap(self.w.low, "int32") - self.zw.at(channel)

    def acc(self, sum_uv: Expr, sum_u: Expr | None, offset: Expr, channel: Expr) -> Expr:
        """Return the sum of (x - zx) * (w - zw). sum_u: None where its factor is 0."""
        total = sum_uv * (self.x.step * self.w.step) + offset
        return total if sum_u is None else total + self.below(channel) * (sum_u * self.x.step)

    @property
    def needs_sum_u(self) -> bool:
        """Whether sums of u matter: not for weights whose lowest level is 0 and that have no zero points."""
        return self.w.low != 0 or not self.zw.none


def convolution(
    node: Node, x: Tensor, w: Tensor, levels: tuple[BitLevels, BitLevels], zx: Expr, pad: int, zw: Zero,
    bias: Tensor | None, finish: Callable[[Expr, Expr], Expr],
) -> Tensor:  # fmt: skip
    """Return integer.convolution of operands that have these `levels`.

    zx, zw: zero points, not shifted. pad: value of the padding, one of the levels of x if windows reach it.
    """
    group = int(node.attrs.get("group", 1))
    window = SlidingWindow.of(node, x.shape[2:], w.shape[2:])
    count = w.shape[1] * prod(window.kernel)
    how, u = Factors(*levels, zx, zw, count), levels[0].place(pad) if pad in levels[0].values else 0
    vs = planes(w, levels[1], 1, "int8")
    packs = [
        Channels(each, vs[0], window, group, wrap(255 * (u >> place & 1), "int32"))
        for place, each in enumerate(planes(x, levels[0], 1, "uint8"))
    ]
    images, first = [each.image() for each in packs], packs[0]
    weights = [first.packed(each, lambda v: v) for each in vs]
    all_of_x = T.compute((1, *w.shape[1:]), lambda *i: wrap(1, "uint8"), "ones")
    ones = [first.packed(each, lambda v: v) for each in planes(all_of_x, BitLevels(0, 1, 1), 1, "int8")]
    chunks = chunks_of(first.steps, most_words(*levels))

    def total(right: Sequence[Tensor], channel: Expr, ni: Expr, g: Expr, place: Expr) -> Expr:
        def pairs(ks: Sequence[Expr]) -> Iterator[Pair]:
            start = first.start(images[0], ni, g, ks) + place
            for (i, image), (j, each) in itertools.product(enumerate(images), enumerate(right)):
                yield i + j, image.flat(start), each[(channel, *ks)]

        return summed(pairs, first.steps, chunks)

    def offsets(mi: Expr) -> Expr:
        found = how.offset(mi, summed(lambda ks: [(j, each[(mi, *ks)]) for j, each in enumerate(weights)], first.steps))
        return found if bias is None else found + bias[mi]

    offset = T.compute((w.shape[0],), offsets, "offset")
    n, mg, zero = x.shape[0], w.shape[0] // group, wrap(0, INDEX)
    sums: Tensor | None = None
    if how.needs_sum_u:
        sums = T.compute((n, group, first.length), lambda ni, g, p: total(ones, zero, ni, g, p), "window_sums")

    def body(ni: Expr, g: Expr, mi: Expr, place: Expr) -> Expr:
        channel = g * mg + mi
        sum_u = None if sums is None else sums[ni, g, place]
        return finish(how.acc(total(weights, channel, ni, g, place), sum_u, offset[channel], channel), channel)

    return first.windows_of(T.compute((n, group, mg, first.length), body, "conv"))


def matrix_product(
    a: Tensor, b: Tensor, levels: tuple[BitLevels, BitLevels], za: Expr, zb: Zero,
    finish: Callable[[Expr, Index], Expr], turn_a: bool = False, turn_b: bool = False,
) -> Tensor:  # fmt: skip
    """Return integer.matrix_product of operands that have these `levels`.

    za, zb: zero points, not shifted. Raises ValueError for shapes that do not fit.
    """
    inner = a.shape[-2 if turn_a else -1]
    m, n = a.shape[-1 if turn_a else -2], b.shape[-2 if turn_b else -1]
    batch = batch_of(a, b, inner, b.shape[-1 if turn_b else -2])
    how, steps = Factors(*levels, za, zb, inner), -(-inner // 32)
    width = width_of(n, 32 if m > 4 else WIDTHS[0])
    lefts = [rows_of(each, steps, turn_a) for each in planes(a, levels[0], -2 if turn_a else -1, "uint8", spread=True)]
    along = -1 if turn_b else -2
    rights = [columns_of(each, steps, width, turn_b) for each in planes(b, levels[1], along, "int8", spread=True)]
    all_of_a = T.compute((inner, 1), lambda *i: wrap(1, "uint8"), "ones")
    (ones,) = (
        columns_of(each, steps, 1, False) for each in planes(all_of_a, BitLevels(0, 1, 1), -2, "int8", spread=True)
    )
    chunks = chunks_of((steps,), most_words(*levels))

    def offsets(*i: Expr) -> Expr:
        *lead, block, column = i

        def pairs(ks: Sequence[Expr]) -> Iterator[Pair]:
            yield from ((j, each[(*lead, block, *ks, column)]) for j, each in enumerate(rights))

        return how.offset(block * width + column, summed(pairs, (steps,)))

    offset = T.compute((*rights[0].shape[:-3], n // width, width), offsets, "offset")

    def row_sums(*i: Expr) -> Expr:
        return summed(
            lambda ks: [(j, each[(*i, *ks)], ones[0, ks[0], 0]) for j, each in enumerate(lefts)], (steps,), chunks
        )

    sums = T.compute((*a.shape[:-2], m), row_sums, "row_sums") if how.needs_sum_u else None

    def body(*i: Expr) -> Expr:
        row, block, column = i[-3:]
        lead_a, lead_b = at_lead(a, i[:-3]), at_lead(b, i[:-3])

        def pairs(ks: Sequence[Expr]) -> Iterator[Pair]:
            for (p, left), (q, right) in itertools.product(enumerate(lefts), enumerate(rights)):
                yield p + q, left[(*lead_a, row, *ks)], right[(*lead_b, block, *ks, column)]

        j = block * width + column
        sum_u = None if sums is None else sums[(*lead_a, row)]
        acc = how.acc(summed(pairs, (steps,), chunks), sum_u, offset[(*lead_b, block, column)], j)
        return finish(acc, (*i[:-3], row, j))

    product = T.compute((*batch, m, n // width, width), body, "matmul")
    return replace(product, shape=(*batch, m, n))


# Whether it pays: instructions of vectors, by what the processor has


DOT4 = {"vnni": 1.0, "i8mm": 1.0, "dotprod": 2.0, "pairs": 7.0, "neon": 4.5, "bytes": 16.0}
"""Cost in vector instructions of four products per 32-bit lane, by the instructions of dot4 (llvm/dot.py)."""
PACKED = 1.0
"""Cost in vector instructions of packing an element of x into one plane."""
MARGIN = 1.15
"""Factor by which the bit-serial way must be cheaper."""


def _count() -> float:
    """Return the cost of 32 products of bits per 32-bit lane: `and`, population count, addition."""
    has = target().features
    if has & {"avx512bitalg", "neon"}:
        return 3
    return 8 if "avx2" in has else 14


def pays(levels: tuple[BitLevels, BitLevels], channels: int, taps: int, outputs: int, moved: int = 1) -> bool:
    """Return whether the bit-serial way is faster.

    channels: reduced channels of each of the `taps`. outputs: columns of a product, or channels of a convolution, made
    of them. moved: elements of x, and of a channel, for each position of the result.
    """
    planes = levels[0].bits * levels[1].bits
    by_bits = -(-channels // 32) * taps * outputs * planes * _count() + moved * channels * levels[0].bits * PACKED
    by_bytes = -(-channels // 4) * taps * outputs * DOT4[dot_instructions(target().features)[0]]
    return not target().has_amx and MARGIN * by_bits < by_bytes


def _levels(node: Node) -> tuple[BitLevels, BitLevels] | None:
    """Return the levels of both operands, if known, and if the second can be packed at compile time."""
    first, second = op_spec(node.op).factors
    known = node.attrs.get(LEVELS, {})
    x, w = known.get(first), known.get(second)
    return (x, w) if x is not None and w is not None and node.is_fixed(second) else None


def for_convolution(node: Node, zero: str) -> tuple[tuple[BitLevels, BitLevels], int] | None:
    """Return (levels, zero point of x) of a convolution that is faster bit-serially; None for others.

    The zero point, input `zero`, is one of the levels where windows reach beyond the image.
    """
    first, second = (node.input(number) for number in op_spec(node.op).factors)
    found, group = _levels(node), int(node.attrs.get("group", 1))
    if found is None or len(second.shape) < 3 or (group > 1 and second.shape[1] % 8) or not second.size * first.size:
        return None
    window = SlidingWindow.of(node, first.shape[2:], second.shape[2:])
    fixed = node.value(zero) if node.has(zero) else np.zeros((), np.int64)
    if fixed is None or fixed.size != 1:
        return None
    x: BitLevels | None = found[0]
    if any(sum(window.margins(), ())):
        x = found[0].joined(int(fixed.item()))
    outputs, moved = second.shape[0] // group, prod(window.stride)
    if x is None or not pays((x, found[1]), second.shape[1], prod(window.kernel), outputs, moved):
        return None
    return (x, found[1]), int(fixed.item())


def for_product(node: Node, turn_a: bool, turn_b: bool) -> tuple[BitLevels, BitLevels] | None:
    """Return the levels of a matrix product that is faster bit-serially; None for others."""
    a, b = (node.input(number) for number in op_spec(node.op).factors)
    found = _levels(node)
    if found is None or min(len(a.shape), len(b.shape)) < 2 or not a.size * b.size:
        return None
    inner, columns = a.shape[-2 if turn_a else -1], b.shape[-2 if turn_b else -1]
    return found if pays(found, inner, 1, columns) else None
