"""Integer convolutions and matrix products of int8 and uint8, four products at a time (dot4).

Operands are packed into uint32 of four bytes each, as the intrinsic dot4 takes them: the left one as uint8, the right
one as int8. A type of the other sign is shifted by 128, together with its zero point. Zero points are subtracted
afterwards:

    sum (x - zx) * (w - zw)  =  sum x*w  -  zx * sum w  -  zw * sum x  +  count * zx * zw

int32 wraps on both sides of this equation, so that it always holds. Packed weights, their sums and all else that
depends on constants alone are computed when a model is compiled (see CpuFunction in cpu/kernels.py).

Its parts, in order: zero points and words of bytes; matrix products; convolutions; the layouts of their bytes. The
image of a convolution is split into one for each remainder of the stride, in which windows move by one element.
ConvPacking has a subclass for each way in which processors multiply bytes; `_choose_packing` decides which is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Axis, Expr, Tensor, call, select, wrap
from celosia.compiler.expr.math_functions import ONES
from celosia.compiler.ops.products import SlidingWindow, batch_index, batch_shape
from celosia.compiler.ops.registry import Node, Shape, clamp, reshaped, round_even
from celosia.compiler.program.op_spec import op_spec
from celosia.compiler.target import TILE_ROWS, TILE_STEPS, dot_instructions, target

Index = tuple[Expr, ...]
WIDTHS = (256, 128, 64, 32, 16)
"""Columns that lie together in packed matrices (the width of a panel), best first for few rows.

Many rows take at most 32. Tiles of AMX take 16, so that the rows of a tile, which have 64 bytes, are contiguous.
"""


@dataclass(frozen=True)
class ZeroPoint:
    """The zero point of the right operand (weights), as int32.

    at: returns it for an output channel. is_zero: it is known to be 0 when the model is compiled, so that sums of the
    left operand are not needed.
    """

    at: Callable[[Expr], Expr]
    is_zero: bool = False


def left_zero(node: Node, operand: str, dtype: str) -> Expr:
    """Return the zero point of the left operand, of type `dtype`, as int32 after its shift to uint8."""
    zero = node.scalar(operand, dtype).astype("int32")
    return zero + 128 if dtype == "int8" else zero


def right_zero(node: Node, operand: str, dtype: str) -> ZeroPoint:
    """Return the zero points of the right operand, of type `dtype`, after their shift to int8."""
    move = 128 if dtype == "uint8" else 0
    if not node.has(operand):
        return ZeroPoint(lambda m: wrap(-move, "int32"), is_zero=not move)
    tensor, value = node.input(operand), node.value(operand)
    is_zero = value is not None and not np.any(value.astype(np.int32) - move)
    return ZeroPoint(lambda m: tensor.flat(0 if tensor.size == 1 else m).astype("int32") - move, is_zero)


def _as_int8(w: Expr) -> Expr:
    """Return a byte as int8; a uint8 is shifted by 128."""
    return w.astype("int8") ^ -128 if w.dtype == "uint8" else w


def pack_quad(element: Callable[[int], Expr], flip: bool = False) -> Expr:
    """Pack element(0) to element(3), bytes, into a uint32, the first lowest; flip: invert the top bit of each byte."""
    total: Expr | None = None
    for k in range(4):
        byte = element(k).astype("uint8").astype("uint32") << 8 * k
        total = byte if total is None else total | byte
    assert total is not None
    return total ^ (0x80 * ONES) if flip else total


def pack_pair(element: Callable[[int], Expr], flip: bool = False) -> Expr:
    """Pack element(0) and element(1), bytes, into a uint16, the first lowest; flip: invert the top bit of each byte."""
    low, high = (element(k).astype("uint8").astype("uint16") for k in range(2))
    total = low | high << 8
    return total ^ 0x8080 if flip else total


def dot(x: Expr, w: Expr, axes: Any) -> Expr:
    """Return the int32 sum over `axes` of dot4(x, w), four products of bytes each."""
    return T.sum(call("dot4", x, w), axes)


# Matrix products


def matrix_product(
    a: Tensor, b: Tensor, za: Expr, zb: ZeroPoint, finish: Callable[[Expr, Index], Expr],
    transpose_a: bool = False, transpose_b: bool = False,
) -> Tensor:  # fmt: skip
    """Return finish(int32 of numpy.matmul(a - za, b - zb), its index), for tensors of at least two dimensions.

    a, b: of bytes. za, zb: zero points, shifted to uint8 and int8. transpose_a, transpose_b: matrices are transposed.
    Raises ValueError for shapes that do not fit.
    """
    inner = a.shape[-2 if transpose_a else -1]
    m, n = a.shape[-1 if transpose_a else -2], b.shape[-2 if transpose_b else -1]
    batch = batch_shape(a, b, inner, b.shape[-1 if transpose_b else -2])
    steps = -(-inner // 4)
    tiled = target().has_amx and m >= TILE_ROWS[0] and steps >= TILE_STEPS
    width = panel_width(n, TILE_STEPS if tiled else 32 if m > 4 else WIDTHS[0])
    left = pack_rows(a, steps, transpose_a)
    right = pack_columns(b, steps, width, transpose_b)

    def correction(*i: Expr) -> Expr:
        """Return the terms of a column that do not depend on a: -za * sum w + count * za * zw."""
        k = T.reduce_axis(steps, "k")
        total = dot(wrap(ONES, "uint32"), right[(*i[:-2], i[-2], k, i[-1])], k)
        return za * (wrap(inner, "int32") * zb.at(i[-2] * width + i[-1]) - total)

    offset = T.compute((*right.shape[:-3], right.shape[-3], width), correction, "offset")
    sums = None if zb.is_zero else _row_sums(left, inner)

    def body(*i: Expr) -> Expr:
        """Return the result of a row and a column of a panel."""
        row, block, column = i[-3:]
        lead_a, lead_b = batch_index(a, i[:-3]), batch_index(b, i[:-3])
        k = T.reduce_axis(steps, "k")
        acc = dot(left[(*lead_a, row, k)], right[(*lead_b, block, k, column)], k) + offset[(*lead_b, block, column)]
        j = block * width + column
        if sums is not None:
            acc = acc - zb.at(j) * sums[(*lead_a, row)]
        return finish(acc, (*i[:-3], row, j))

    product = T.compute((*batch, m, n // width, width), body, "matmul")
    return replace(product, shape=(*batch, m, n))


def panel_width(n: int, max_width: int) -> int:
    """Return how many of n columns a panel has: the first of WIDTHS up to `max_width` that divides n, else n."""
    return next((w for w in WIDTHS if n % w == 0 and w <= max_width), n)


def pack_rows(a: Tensor, steps: int, turn: bool) -> Tensor:
    """Pack the rows of the left matrix into uint32 words of four uint8: [..., m, steps].

    steps: words of a row. turn: `a` is transposed. Bytes beyond the end of a row are arbitrary, since the other operand
    has zeros there.
    """
    inner, m = (a.shape[-2], a.shape[-1]) if turn else (a.shape[-1], a.shape[-2])
    flip = a.dtype == "int8"
    if turn or (a.body is not None and not a.stored) or inner % 4:

        def element(*i: Expr) -> Expr:
            k = i[-1] if inner % 4 == 0 else T.minimum(i[-1], inner - 1)
            return a[(*i[:-2], k, i[-2])] if turn else a[(*i[:-2], i[-2], k)]

        a = replace(T.compute((*a.shape[:-2], m, 4 * steps), element, "rows"), stored=True)
    source = a

    def body(*i: Expr) -> Expr:
        return pack_quad(lambda j: source[(*i[:-1], i[-1] * 4 + j)], flip)

    return T.compute((*a.shape[:-2], m, steps), body, "left")


def pack_columns(b: Tensor, steps: int, width: int, turn: bool) -> Tensor:
    """Pack the columns of the right matrix into uint32 words of four int8, in panels: [..., n / width, steps, width].

    steps: words of a column, the last filled up with 0. width: columns of a panel. turn: `b` is transposed.
    """
    inner, n = (b.shape[-1], b.shape[-2]) if turn else (b.shape[-2], b.shape[-1])

    def body(*i: Expr) -> Expr:
        column = i[-3] * width + i[-1]

        def element(j: int) -> Expr:
            k = i[-2] * 4 + j
            value = _as_int8(b[(*i[:-3], column, k)] if turn else b[(*i[:-3], k, column)])
            return value if inner % 4 == 0 else select(k < inner, value, 0)

        return pack_quad(element)

    return T.compute((*b.shape[:-2], n // width, steps, width), body, "right")


def _row_sums(left: Tensor, inner: int) -> Tensor:
    """Return the sum of the first `inner` bytes of each row of `left`, words of four bytes; zero points need it."""
    steps = left.shape[-1]

    def body(*i: Expr) -> Expr:
        k = T.reduce_axis(steps, "k")
        ones_word = (
            pack_quad(lambda j: select(k * 4 + j < inner, wrap(1, "uint8"), 0)) if inner % 4 else wrap(ONES, "uint32")
        )
        return dot(left[(*i, k)], ones_word, k)

    return T.compute(left.shape[:-1], body, "row_sums")


# Convolutions


def convolution(
    node: Node, x: Tensor, w: Tensor, zx: Expr, zw: ZeroPoint, bias: Tensor | None, finish: Callable[[Expr, Expr], Expr]
) -> Tensor:
    """Return finish(int32 sum over the window of (x - zx) * (w - zw), plus bias; output channel).

    x: [N, C, ...], w: [M, C/group, ...]. zx: shifted to uint8. Raises Unsupported for shapes that do not fit.

    Bytes share words, see `_choose_packing`. The image is split into one for each remainder of the stride, in which
    windows move by one element: vectors run over complete images, and only results between lines are wasted.
    """
    group = int(node.attrs.get("group", 1))
    n, c, m = x.shape[0], x.shape[1], w.shape[0]
    if len(x.shape) < 3 or len(w.shape) != len(x.shape) or c != w.shape[1] * group or m % group:
        raise node.fail(f"x {list(x.shape)}, w {list(w.shape)}, group {group}")
    cg = c // group
    window = SlidingWindow.of(node, x.shape[2:], w.shape[2:])
    if cg == 0:
        nothing = wrap(0, "int32")
        return T.compute(
            (n, m, *window.out), lambda ni, mi, *o: finish(nothing if bias is None else bias[mi], mi), "conv"
        )
    if window.is_global and group == prod(window.out) == 1:
        return _convolve_global_window(node, x, w, zx, zw, bias, finish)
    pack = _choose_packing(node, x, w, window, group, zx)
    return pack.extract_windows(_convolve_planes(pack, zw, bias, finish))


def _choose_packing(node: Node, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr) -> ConvPacking:
    """Choose the layout of image and weights for the byte products that the processor has.

    Four channels share a uint32, or, where a group has too few, four elements of a line. With NEON two channels share a
    uint16, or each element has an int16.
    """
    channels = w.shape[1]
    fill_words = channels % 4 == 0 or channels == 3 or channels > 4
    if dot_instructions(target().features)[0] != "neon":
        return (Channels if fill_words else LineQuads)(x, w, window, group, zx)
    if not fill_words:
        return Widened(x, w, window, group, zx)
    values = node.value(op_spec(node.op).factors[1])
    least = 0 if w.dtype == "uint8" else -128
    return Pairs(x, w, window, group, zx, values is not None and not np.any(values == least))


def _convolve_planes(
    pack: ConvPacking, zw: ZeroPoint, bias: Tensor | None, finish: Callable[[Expr, Expr], Expr]
) -> Tensor:
    """Convolve a packed image: return finish(sum, channel) at each position of a plane: [N, group, M/group, length].

    Positions between the lines are computed, too; `ConvPacking.extract_windows` discards them.
    """
    image, weights = pack.packed_image(), pack.packed_weights(_as_int8)
    m, count = weights.shape[0], pack.group_channels * prod(pack.window.kernel)
    n, group, mg = image.shape[0], pack.group, m // pack.group

    def correction(mi: Expr) -> Expr:
        """Return the terms of an output channel that do not depend on x: bias and -zx * sum w + count * zx * zw."""
        if pack.zero is None:
            return wrap(0, "int32") if bias is None else bias[mi]
        total = pack.zero * (wrap(count, "int32") * zw.at(mi) - pack.weight_sum(weights, mi))
        return total if bias is None else total + bias[mi]

    offset = T.compute((m,), correction, "offset")
    sums: Tensor | None = None
    if not zw.is_zero:
        ones = pack.packed_weights(lambda v: wrap(1, "int8"))
        sums = T.compute(
            (n, group, pack.length), lambda ni, g, p: pack.window_product(image, ones, g * mg, ni, g, p), "window_sums"
        )  # fmt: skip

    def plane(ni: Expr, g: Expr, mi: Expr, position: Expr) -> Expr:
        """Return the result of the window at a position of the plane of an output channel."""
        channel = g * mg + mi
        acc = pack.window_product(image, weights, channel, ni, g, position) + offset[channel]
        if sums is not None:
            acc = acc - zw.at(channel) * sums[ni, g, position]
        return finish(acc, channel)

    return T.compute((n, group, mg, pack.length), plane, "conv")


def _convolve_global_window(
    node: Node, x: Tensor, w: Tensor, zx: Expr, zw: ZeroPoint, bias: Tensor | None, finish: Callable[[Expr, Expr], Expr]
) -> Tensor:
    """Compute a convolution whose only window is the complete image, as a matrix product of images and weights.

    It has one pixel, along which no vector could run.
    """

    def finish_channel(acc: Expr, i: Index) -> Expr:
        return finish(acc if bias is None else acc + bias[i[-1]], i[-1])

    n, m = x.shape[0], w.shape[0]
    images, weights = reshaped(x, (n, prod(x.shape[1:]))), reshaped(w, (m, prod(w.shape[1:])))
    y = matrix_product(images, weights, zx, zw, finish_channel, transpose_b=True)
    return replace(y, shape=(n, m, *(1 for _ in x.shape[2:])))


def rescaled_sum(a: Expr, b: Expr, factors: Sequence[int]) -> Expr:
    """Return the sum of two bytes as the accelerator's rescale-add (numerics.rescale_add) computes it.

    factors: ma, mb, c, shift, and perhaps lo and hi of a RescaleAdd. It is computed in float64, which is exact for
    these integers.
    """
    flip = 0.0 if a.dtype == "int8" else 128.0
    ma, mb, constant, shift, *bounds = factors
    low, high = bounds or (-128, 127)
    total = (a.astype("float64") - flip) * float(ma) + (b.astype("float64") - flip) * float(mb) + float(constant)
    return (clamp(round_even(total * 2.0**-shift), low, high) + flip).astype(a.dtype)


class ConvPacking:
    """Layout in which the bytes of a convolution share words; this base class has uint32 words of four bytes.

    x, w: image [N, C, ...] and weights [M, C/group, ...]. group_channels: input channels of a group.
    steps: extents of the reduction axes, the first over words of channels, the others over taps of the kernel.
    step_distance: elements of the image from one tap step to the next, in each dimension.
    phases, lines: of the packed image, in each dimension: remainders of the stride, and the elements of each.
    line_strides: elements of a packed plane from one line to the next, in each dimension.
    length: elements of a plane from the start of the first window to that of the last, inclusive.
    extents: elements of the padded image that lines cover, in each dimension.
    flips_sign: whether packing inverts top bits, since x is int8 and the products take uint8 (or the reverse).
    zero: the zero point of the packed image, None for 0. pad_byte: the zero point as an element of x.
    """

    reads_image: bool
    """Whether words are packed from x itself, not from a padded copy; set by subclasses."""
    source: Tensor
    """x or its padded copy, of which words are packed; set by subclasses."""

    def __init__(
        self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr, steps: Shape, step_distance: Shape
    ):  # fmt: skip
        self.x, self.w, self.window, self.group = x, w, window, group
        self.group_channels = w.shape[1]
        self.steps, self.step_distance = steps, step_distance
        self.phases = tuple(s if k > 1 else 1 for s, k in zip(window.stride, steps[1:]))
        self.lines = tuple(
            o + (k - 1) * d // s for o, k, d, s in zip(window.out, steps[1:], step_distance, window.stride)
        )  # fmt: skip
        self.flips_sign = x.dtype == "int8"
        self.zero: Expr | None = zx
        self.pad_byte = (zx.astype("uint8") ^ (128 if self.flips_sign else 0)).astype(x.dtype)
        self.extents = tuple(line * s for line, s in zip(self.lines, window.stride))
        self.line_strides = [prod(self.lines[d + 1 :]) for d in range(len(self.lines))]
        self.length = sum((o - 1) * stride for o, stride in zip(window.out, self.line_strides)) + 1

    def needs_padding(self) -> bool:
        """Return whether the packed image has elements outside of x."""
        return any(b != 0 or e > n for b, e, n in zip(self.window.before, self.extents, self.window.size))

    def reduction_axes(self) -> tuple[Axis, ...]:
        """Create the reduction axes of one sum: words of channels, then taps in each dimension."""
        return tuple(T.reduce_axis(size, f"k{d}") for d, size in enumerate(self.steps))

    def window_product(self, image: Tensor, weights: Tensor, channel: Expr, ni: Expr, g: Expr, position: Expr) -> Expr:
        """Return the sum of products of a window with the weights of an output channel.

        image, weights: as packed. ni: sample. g: group. position: of the window in its plane.
        """
        ks = self.reduction_axes()
        return dot(image.flat(self.flat_start(image, ni, g, ks) + position), weights[(channel, *ks)], ks)

    def weight_sum(self, weights: Tensor, channel: Expr) -> Expr:
        """Return the sum of the packed weights of an output channel, by which the zero point of x is multiplied."""
        ks = self.reduction_axes()
        return dot(wrap(ONES, "uint32"), weights[(channel, *ks)], ks)

    def packed_image(self) -> Tensor:
        """Pack the image: [N, group * channel steps, phases..., lines...] of uint32."""
        return self._pack_image(self.group * self.steps[0])

    def _pack_image(self, words: int) -> Tensor:
        """Pack the image into `words` words of uint32 for each pixel: channel blocks, as `word_at` computes them."""
        sp = len(self.window.size)

        def body(ni: Expr, block: Expr, *spatial: Expr) -> Expr:
            phase, line = spatial[:sp], spatial[sp:]
            pixel = [i * s + p for i, s, p in zip(line, self.window.stride, phase)]
            return self.word_at(ni, block, pixel)

        shape = (self.x.shape[0], words, *self.phases, *self.lines)
        return T.compute(shape, body, "image")

    def word_at(self, ni: Expr, block: Expr, index: Sequence[Expr]) -> Expr:
        """Return the word of channel block `block` at spatial `index` of the padded image, of sample `ni`."""
        raise NotImplementedError

    def packed_weights(self, change: Callable[[Expr], Expr]) -> Tensor:
        """Pack the weights of this convolution, each through `change`: [M, *steps] of uint32, filled up with 0."""
        return self.pack_weights(self.w, change)

    def pack_weights(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Pack any weights [..., C/group, *kernel] as `packed_weights` does with w, such as bit planes or ones."""
        raise NotImplementedError

    def flat_start(self, image: Tensor, ni: Expr, g: Expr, ks: Sequence[Expr]) -> Expr:
        """Return the flat index into `image` of reduction step `ks` of the first window, for sample ni and group g."""
        channel: Expr = g * self.steps[0] + ks[0]
        phase: Expr = wrap(0, INDEX)
        position: Expr = wrap(0, INDEX)
        for k, distance, phases, lines in zip(ks[1:], self.step_distance, self.phases, self.lines):
            phase = phase * phases + k * distance % phases
            position = position * lines + k * distance // phases
        return ((ni * image.shape[1] + channel) * prod(self.phases) + phase) * prod(self.lines) + position

    def extract_windows(self, planes: Tensor) -> Tensor:
        """Extract the results of windows from `planes` [N, group, M/group, length]: [N, M, ...].

        Results of positions between the lines of a plane, which are no windows, are left out.
        """
        n, m, out = planes.shape[0], planes.shape[1] * planes.shape[2], self.window.out
        if self.length == prod(out):
            return replace(planes, shape=(n, m, *out))
        planes = replace(planes, stored=True)

        def body(ni: Expr, mi: Expr, *o: Expr) -> Expr:
            position: Expr = wrap(0, INDEX)
            for i, stride in zip(o, self.line_strides):
                position = position + i * stride
            return planes.flat((ni * m + mi) * self.length + position)

        return T.compute((n, m, *out), body, "lines")

    def bounds_test(self, index: Sequence[Expr], ends: Sequence[int]) -> Expr | None:
        """Return the condition that an index into the padded image lies in the image; None where it always does.

        ends: upper limits of the index, in each dimension.
        """
        result: Expr | None = None
        for i, before, size, end in zip(index, self.window.before, self.window.size, ends):
            for is_needed, test in ((before > 0, i >= before), (end > before + size, i < before + size)):
                if is_needed:
                    result = test if result is None else result & test
        return result

    def unpadded_index(self, index: Sequence[Expr]) -> list[Expr]:
        """Convert an index into the padded image to one into the image."""
        return [i - before for i, before in zip(index, self.window.before)]

    def pad_image(self, ends: Sequence[int]) -> Tensor:
        """Return a copy of x in memory, padded by zero points to `ends` elements in each dimension."""

        def body(ni: Expr, c: Expr, *index: Expr) -> Expr:
            word, is_inside = self.x[(ni, c, *self.unpadded_index(index))], self.bounds_test(index, ends)
            return word if is_inside is None else select(is_inside, word, self.pad_byte)

        return replace(T.compute((*self.x.shape[:2], *ends), body, "padded"), stored=True)

    def channel_at(self, ni: Expr, channel: Expr, index: Sequence[Expr]) -> Expr:
        """Return an element of `source`, of which words of several channels are packed, at `index` of the padded image.

        Words beyond the last channel read the last one; their weights are 0.
        """
        if self.group_channels % 4:
            channel = T.minimum(channel, self.x.shape[1] - 1)
        return self.source[(ni, channel, *(self.unpadded_index(index) if self.reads_image else index))]

    def pad_word(self, word: Expr, index: Sequence[Expr], padding: Callable[[], Expr]) -> Expr:
        """Return `word`, or `padding()` where it is packed from x itself and `index` lies outside of x."""
        is_inside = self.bounds_test(index, self.extents) if self.reads_image else None
        return word if is_inside is None else select(is_inside, word, padding())


class Channels(ConvPacking):
    """Four channels in a uint32: for groups with enough channels and processors with dot products of four bytes."""

    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr):
        super().__init__(x, w, window, group, zx, (-(-w.shape[1] // 4), *window.kernel), window.dilation)
        self.reads_image = not self.needs_padding() or set(window.stride) == {1}
        self.source = x if self.reads_image else self.pad_image(self.extents)

    def word_at(self, ni: Expr, block: Expr, index: Sequence[Expr]) -> Expr:
        """Return four channels of an element; zero points outside of the image."""
        first = block * 4
        if self.group_channels % 4:
            first = block // self.steps[0] * self.group_channels + block % self.steps[0] * 4
        word = pack_quad(lambda j: self.channel_at(ni, first + j, index), self.flips_sign)
        return self.pad_word(word, index, lambda: pack_quad(lambda j: self.pad_byte, self.flips_sign))

    def pack_weights(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Return weights [M, *steps] of uint32: four channels each."""

        def body(m: Expr, kc: Expr, *taps: Expr) -> Expr:
            def element(j: int) -> Expr:
                value = change(w[(m, kc * 4 + j, *taps)])
                return value if self.group_channels % 4 == 0 else select(kc * 4 + j < self.group_channels, value, 0)

            return pack_quad(element)

        return T.compute((w.shape[0], *self.steps), body, "weights")


class LineQuads(ConvPacking):
    """Four elements of a line in a uint32: for groups with few channels, such as depthwise convolutions."""

    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr):
        *first, last = window.kernel
        *distances, last_distance = window.dilation
        steps = (w.shape[1], *first, -(-last // 4))
        super().__init__(x, w, window, group, zx, steps, (*distances, 4 * last_distance))
        self.ends = (*self.extents[:-1], self.extents[-1] + 3 * last_distance)
        # Elements are read up to four times, and with conditions, which only masks of bytes make fast.
        self.reads_image = (
            set(window.stride) == {1} and (x.body is None or x.stored) and "avx512bw" in target().features
        )
        self.source = x if self.reads_image else self.pad_image(self.ends)

    def word_at(self, ni: Expr, block: Expr, index: Sequence[Expr]) -> Expr:
        """Return four elements of a line, spaced by the dilation; zero points outside of the image."""
        *lead, last = index

        def element(j: int) -> Expr:
            at = [*lead, last + j * self.window.dilation[-1]]
            if not self.reads_image:
                return self.source[(ni, block, *at)]
            word, is_inside = self.source[(ni, block, *self.unpadded_index(at))], self.bounds_test(at, self.ends)
            return word if is_inside is None else select(is_inside, word, self.pad_byte)

        return pack_quad(element, self.flips_sign)

    def pack_weights(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Return weights [M, *steps] of uint32: four taps of a line each."""
        size = self.window.kernel[-1]

        def body(m: Expr, kc: Expr, *taps: Expr) -> Expr:
            def element(j: int) -> Expr:
                tap = taps[-1] * 4 + j
                value = change(w[(m, kc, *taps[:-1], tap)])
                return value if size % 4 == 0 else select(tap < size, value, 0)

            return pack_quad(element)

        return T.compute((w.shape[0], *self.steps), body, "weights")


def store_once(value: Expr) -> Expr:
    """Return a value that is computed once, into memory, instead of by each vector in a wider type."""
    return replace(T.compute((1,), lambda i: value, "fixed"), stored=True)[0]


class Pairs(ConvPacking):
    """Two channels in a uint16, for NEON's products of int8 that are added in pairs. Four channels are a step.

    narrow: no weight is -128, so that the sum of two products fits into int16.
    """

    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr, narrow: bool):
        super().__init__(x, w, window, group, zx, (-(-w.shape[1] // 4), *window.kernel), window.dilation)
        self.flips_sign, self.zero, self.narrow = x.dtype == "uint8", zx - 128, narrow
        self.reads_image = not self.needs_padding() or set(window.stride) == {1}
        self.pad_byte = store_once(self.pad_byte)
        self.source = x if self.reads_image else self.pad_image(self.extents)

    def packed_image(self) -> Tensor:
        """Pack the image: [N, group * channel steps * 2, phases..., lines...] of uint16."""
        return self._pack_image(2 * self.group * self.steps[0])

    def word_at(self, ni: Expr, block: Expr, index: Sequence[Expr]) -> Expr:
        """Return two channels of an element; zero points outside of the image."""
        first = block * 2
        if self.group_channels % 4:
            pairs = 2 * self.steps[0]
            first = block // pairs * self.group_channels + block % pairs * 2
        word = pack_pair(lambda j: self.channel_at(ni, first + j, index), self.flips_sign)
        return self.pad_word(word, index, lambda: store_once(pack_pair(lambda j: self.pad_byte, self.flips_sign)))

    def pack_weights(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Return weights [M, *steps, 2] of uint16: two channels each."""

        def body(m: Expr, kc: Expr, *taps: Expr) -> Expr:
            def element(j: int) -> Expr:
                channel = kc * 4 + taps[-1] * 2 + j
                value = change(w[(m, channel, *taps[:-1])])
                return value if self.group_channels % 4 == 0 else select(channel < self.group_channels, value, 0)

            return pack_pair(element)

        return T.compute((w.shape[0], *self.steps, 2), body, "weights")

    def window_product(self, image: Tensor, weights: Tensor, channel: Expr, ni: Expr, g: Expr, position: Expr) -> Expr:
        ks = self.reduction_axes()
        start = self.flat_start(image, ni, g * 2, [ks[0] * 2, *ks[1:]]) + position
        plane = prod(image.shape[2:])
        x, w = [image.flat(start + half * plane) for half in range(2)], [weights[(channel, *ks, k)] for k in range(2)]
        return T.sum(call("narrow_pairs" if self.narrow else "pairs", *x, *w), ks)

    def weight_sum(self, weights: Tensor, channel: Expr) -> Expr:
        ks, ones = self.reduction_axes(), wrap(ONES & 0xFFFF, "uint16")
        return T.sum(call("pairs", ones, ones, *(weights[(channel, *ks, k)] for k in range(2))), ks)


class Widened(ConvPacking):
    """An int16 for each element, its difference from zx: for few channels with NEON."""

    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr):
        super().__init__(x, w, window, group, zx, w.shape[1:], window.dilation)
        self.zero = None
        zero_point = zx - 128 if x.dtype == "int8" else zx  # as x has it, without the shift to uint8
        self.stored_zero_point = store_once(zero_point.astype("int16"))
        self.reads_image = not self.needs_padding() or set(window.stride) == {1}
        self.pad_byte = store_once(self.pad_byte)
        self.source = x if self.reads_image else self.pad_image(self.extents)

    def word_at(self, ni: Expr, block: Expr, index: Sequence[Expr]) -> Expr:
        """Return the difference of one element from zx; 0 outside of the image."""
        at = self.unpadded_index(index) if self.reads_image else index
        word = self.source[(ni, block, *at)].astype("int16") - self.stored_zero_point
        return self.pad_word(word, index, lambda: wrap(0, "int16"))

    def pack_weights(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Return weights [M, *steps] of int16."""
        return T.compute(w.shape, lambda *i: change(w[i]).astype("int16"), "weights")

    def window_product(self, image: Tensor, weights: Tensor, channel: Expr, ni: Expr, g: Expr, position: Expr) -> Expr:
        ks = self.reduction_axes()
        x = image.flat(self.flat_start(image, ni, g, ks) + position)
        return T.sum(x.astype("int32") * weights[(channel, *ks)].astype("int32"), ks)
