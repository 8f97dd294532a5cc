"""Sums of products of bytes: convolutions and matrix products of int8 and uint8, four products at a time.

Operands are packed into uint32 of four bytes each, as the intrinsic dot4 takes them: the left one as uint8, the right
one as int8. A type of the other sign is moved by 128, together with its zero point. Zero points are taken off
afterwards:

    sum (x - zx) * (w - zw)  =  sum x*w  -  zx * sum w  -  zw * sum x  +  count * zx * zw

int32 wraps on both sides of this equation, so that it always holds. What depends on constants alone, such as packed
weights and their sums, is computed when a model is compiled (see function.CpuFunction).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.cpu.ops.products import at_lead, batch_of
from celosia.compiler.cpu.ops.registry import Node, Shape, clamp, reshaped, round_even
from celosia.compiler.cpu.ops.window import SlidingWindow
from celosia.compiler.cpu.target import TILE_ROWS, TILE_STEPS, target
from celosia.compiler.expr import INDEX, Axis, Expr, Tensor, call, select, wrap
from celosia.compiler.expr.functions import ONES

Index = tuple[Expr, ...]
WIDTHS = (256, 128, 64, 32, 16)  # columns that lie together in packed matrices, best first; for many rows from 32 on,
# and for tiles 16: rows of theirs, which are 64 bytes, lie behind each other


@dataclass(frozen=True)
class Zero:
    """A zero point as int32: one for all, or one for each output channel. `none`: known to be 0."""

    at: Callable[[Expr], Expr]
    none: bool = False


def left_zero(node: Node, i: int, dtype: str) -> Expr:
    """The one zero point of a left operand, as it is among uint8."""
    zero = node.scalar(i, dtype).astype("int32")
    return zero + 128 if dtype == "int8" else zero


def right_zero(node: Node, i: int, dtype: str) -> Zero:
    """The zero points of a right operand, as they are among int8."""
    move = 128 if dtype == "uint8" else 0
    if not node.has(i):
        return Zero(lambda m: wrap(-move, "int32"), none=not move)
    tensor, value = node.input(i), node.values[i]
    known = value is not None and not np.any(value.astype(np.int32) - move)
    return Zero(lambda m: tensor.flat(0 if tensor.size == 1 else m).astype("int32") - move, known)


def _as_int8(w: Expr) -> Expr:
    return w.astype("int8") ^ -128 if w.dtype == "uint8" else w


def quad(element: Callable[[int], Expr], flip: bool = False) -> Expr:
    """Bytes 0 to 3 as a uint32, the first lowest; flip: with their top bits changed."""
    total: Expr | None = None
    for k in range(4):
        byte = element(k).astype("uint8").astype("uint32") << 8 * k
        total = byte if total is None else total | byte
    assert total is not None
    return total ^ (0x80 * ONES) if flip else total


def dot(x: Expr, w: Expr, axes: Any) -> Expr:
    """The sum over `axes` of four products each, of bytes, in int32."""
    return T.sum(call("dot4", x, w), axes)


# Matrix products


def matrix_product(
    a: Tensor, b: Tensor, za: Expr, zb: Zero, finish: Callable[[Expr, Index], Expr],
    turn_a: bool = False, turn_b: bool = False,
) -> Tensor:  # fmt: skip
    """finish(the int32 of numpy.matmul(a - za, b - zb), its index), of tensors with at least two dimensions.

    za, zb: as they are among uint8 and int8. ValueError for shapes that do not fit.
    """
    inner = a.shape[-2 if turn_a else -1]
    m, n = a.shape[-1 if turn_a else -2], b.shape[-2 if turn_b else -1]
    batch = batch_of(a, b, inner, b.shape[-1 if turn_b else -2])
    steps = -(-inner // 4)
    tiled = target().tiles and m >= TILE_ROWS[0] and steps >= TILE_STEPS
    width = width_of(n, TILE_STEPS if tiled else 32 if m > 4 else WIDTHS[0])
    left = rows_of(a, steps, turn_a)
    right = columns_of(b, steps, width, turn_b)

    def correction(*i: Expr) -> Expr:
        """-za * sum w + count * za * zw of a column."""
        k = T.reduce_axis(steps, "k")
        total = dot(wrap(ONES, "uint32"), right[(*i[:-2], i[-2], k, i[-1])], k)
        return za * (wrap(inner, "int32") * zb.at(i[-2] * width + i[-1]) - total)

    offset = T.compute((*right.shape[:-3], right.shape[-3], width), correction, "offset")
    sums = None if zb.none else _row_sums(left, inner)

    def body(*i: Expr) -> Expr:
        row, block, column = i[-3:]
        lead_a, lead_b = at_lead(a, i[:-3]), at_lead(b, i[:-3])
        k = T.reduce_axis(steps, "k")
        acc = dot(left[(*lead_a, row, k)], right[(*lead_b, block, k, column)], k) + offset[(*lead_b, block, column)]
        j = block * width + column
        if sums is not None:
            acc = acc - zb.at(j) * sums[(*lead_a, row)]
        return finish(acc, (*i[:-3], row, j))

    product = T.compute((*batch, m, n // width, width), body, "matmul")
    return replace(product, shape=(*batch, m, n))


def width_of(n: int, most: int) -> int:
    """How many of n columns lie together, at most so many if they can be cut so."""
    return next((w for w in WIDTHS if n % w == 0 and w <= most), n)


def rows_of(a: Tensor, steps: int, turn: bool) -> Tensor:
    """[..., m, steps]: the rows of `a` as uint8, four elements each; what is beyond their end is never counted."""
    inner, m = (a.shape[-2], a.shape[-1]) if turn else (a.shape[-1], a.shape[-2])
    flip = a.dtype == "int8"
    if turn or (a.body is not None and not a.stored) or inner % 4:

        def element(*i: Expr) -> Expr:
            k = i[-1] if inner % 4 == 0 else T.minimum(i[-1], inner - 1)
            return a[(*i[:-2], k, i[-2])] if turn else a[(*i[:-2], i[-2], k)]

        a = replace(T.compute((*a.shape[:-2], m, 4 * steps), element, "rows"), stored=True)
    source = a

    def body(*i: Expr) -> Expr:
        return quad(lambda j: source[(*i[:-1], i[-1] * 4 + j)], flip)

    return T.compute((*a.shape[:-2], m, steps), body, "left")


def columns_of(b: Tensor, steps: int, width: int, turn: bool) -> Tensor:
    """[..., n / width, steps, width]: the columns of `b` as int8, four elements each, filled up with 0."""
    inner, n = (b.shape[-1], b.shape[-2]) if turn else (b.shape[-2], b.shape[-1])

    def body(*i: Expr) -> Expr:
        column = i[-3] * width + i[-1]

        def element(j: int) -> Expr:
            k = i[-2] * 4 + j
            value = _as_int8(b[(*i[:-3], column, k)] if turn else b[(*i[:-3], k, column)])
            return value if inner % 4 == 0 else select(k < inner, value, 0)

        return quad(element)

    return T.compute((*b.shape[:-2], n // width, steps, width), body, "right")


def _row_sums(left: Tensor, inner: int) -> Tensor:
    steps = left.shape[-1]

    def body(*i: Expr) -> Expr:
        k = T.reduce_axis(steps, "k")
        counted = quad(lambda j: select(k * 4 + j < inner, wrap(1, "uint8"), 0)) if inner % 4 else wrap(ONES, "uint32")
        return dot(left[(*i, k)], counted, k)

    return T.compute(left.shape[:-1], body, "row_sums")


# Convolutions


def convolution(
    node: Node, x: Tensor, w: Tensor, zx: Expr, zw: Zero, bias: Tensor | None, finish: Callable[[Expr, Expr], Expr]
) -> Tensor:
    """finish(the int32 sum over the window of (x - zx) * (w - zw), plus bias; output channel).

    x: [N, C, ...], w: [M, C/group, ...]. Four channels share a uint32, or where a group has too few of them, four
    elements of a line. Images are cut into one for each remainder of the stride, in which windows then move by one
    element, so that vectors run over a whole image and only what lies between its lines is computed in vain.
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
    if window.whole and group == prod(window.out) == 1:
        return _one_window(node, x, w, zx, zw, bias, finish)
    pack = Channels(x, w, window, group, zx) if cg % 4 == 0 or cg == 3 or cg > 4 else _Taps(x, w, window, group, zx)
    return pack.windows_of(_planes(pack, zx, zw, bias, finish))


def _planes(pack: _Packing, zx: Expr, zw: Zero, bias: Tensor | None, finish: Callable[[Expr, Expr], Expr]) -> Tensor:
    """The sums of windows that begin at each element of a packed image, [N, group, M/group, length], through finish."""
    image, weights = pack.image(), pack.weights(_as_int8)
    m, count = weights.shape[0], pack.cg * prod(pack.window.kernel)
    n, group, mg = image.shape[0], pack.group, m // pack.group

    def correction(mi: Expr) -> Expr:
        ks = pack.axes()
        total = zx * (wrap(count, "int32") * zw.at(mi) - dot(wrap(ONES, "uint32"), weights[(mi, *ks)], ks))
        return total if bias is None else total + bias[mi]

    offset = T.compute((m,), correction, "offset")

    def sum_at(right: Tensor, channel: Expr, ni: Expr, g: Expr, place: Expr) -> Expr:
        ks = pack.axes()
        return dot(image.flat(pack.start(image, ni, g, ks) + place), right[(channel, *ks)], ks)

    sums: Tensor | None = None
    if not zw.none:
        ones = pack.weights(lambda v: wrap(1, "int8"))
        sums = T.compute((n, group, pack.length), lambda ni, g, p: sum_at(ones, g * mg, ni, g, p), "window_sums")

    def plane(ni: Expr, g: Expr, mi: Expr, place: Expr) -> Expr:
        channel = g * mg + mi
        acc = sum_at(weights, channel, ni, g, place) + offset[channel]
        if sums is not None:
            acc = acc - zw.at(channel) * sums[ni, g, place]
        return finish(acc, channel)

    return T.compute((n, group, mg, pack.length), plane, "conv")


def _one_window(
    node: Node, x: Tensor, w: Tensor, zx: Expr, zw: Zero, bias: Tensor | None, finish: Callable[[Expr, Expr], Expr]
) -> Tensor:
    """A convolution whose only window is the image: a matrix product."""

    def last(acc: Expr, i: Index) -> Expr:
        return finish(acc if bias is None else acc + bias[i[-1]], i[-1])

    n, m = x.shape[0], w.shape[0]
    images, weights = reshaped(x, (n, prod(x.shape[1:]))), reshaped(w, (m, prod(w.shape[1:])))
    y = matrix_product(images, weights, zx, zw, last, turn_b=True)
    return replace(y, shape=(n, m, *(1 for _ in x.shape[2:])))


class _Packing:
    """How the bytes of a convolution share a uint32.

    steps: extents of the reduction, the first over channels. reach: elements of the image from one step to the next,
    in each dimension. phases, lines: of the packed image, how many remainders of the stride and how many lines of each.
    moves: elements from one line to the next, in each dimension; length: from the first window to the end of the last.
    """

    def __init__(
        self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr, steps: Shape, reach: Shape
    ):  # fmt: skip
        self.x, self.w, self.window, self.group = x, w, window, group
        self.cg = w.shape[1]
        self.steps, self.reach = steps, reach
        self.phases = tuple(s if k > 1 else 1 for s, k in zip(window.stride, steps[1:]))
        self.lines = tuple(
            o + (k - 1) * d // s for o, k, d, s in zip(window.out, steps[1:], reach, window.stride)
        )  # fmt: skip
        self.flip = x.dtype == "int8"
        self.pad = (zx.astype("uint8") ^ (128 if self.flip else 0)).astype(x.dtype)
        self.extents = tuple(line * s for line, s in zip(self.lines, window.stride))
        self.moves = [prod(self.lines[d + 1 :]) for d in range(len(self.lines))]
        self.length = sum((o - 1) * move for o, move in zip(window.out, self.moves)) + 1

    def axes(self) -> tuple[Axis, ...]:
        """New ones, for the reduction."""
        return tuple(T.reduce_axis(size, f"k{d}") for d, size in enumerate(self.steps))

    def image(self) -> Tensor:
        """[N, group * channel steps, phases..., lines...] of uint32."""
        sp = len(self.window.size)

        def body(ni: Expr, block: Expr, *rest: Expr) -> Expr:
            phase, line = rest[:sp], rest[sp:]
            own = [i * s + p for i, s, p in zip(line, self.window.stride, phase)]
            return self.bytes_at(ni, block, own)

        shape = (self.x.shape[0], self.group * self.steps[0], *self.phases, *self.lines)
        return T.compute(shape, body, "image")

    def bytes_at(self, ni: Expr, block: Expr, own: Sequence[Expr]) -> Expr:
        """Four bytes of the padded image at `own`, of a group's channels `block`."""
        raise NotImplementedError

    def weights(self, change: Callable[[Expr], Expr]) -> Tensor:
        """[M, *steps] of uint32, elements of w through `change`, filled up with 0."""
        return self.packed(self.w, change)

    def packed(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """The same of any weights [..., C/group, *kernel]."""
        raise NotImplementedError

    def start(self, image: Tensor, ni: Expr, g: Expr, ks: Sequence[Expr]) -> Expr:
        """The element of `image` for step `ks` of the first window."""
        channel: Expr = g * self.steps[0] + ks[0]
        phase: Expr = wrap(0, INDEX)
        place: Expr = wrap(0, INDEX)
        for k, reach, phases, lines in zip(ks[1:], self.reach, self.phases, self.lines):
            phase = phase * phases + k * reach % phases
            place = place * lines + k * reach // phases
        return ((ni * image.shape[1] + channel) * prod(self.phases) + phase) * prod(self.lines) + place

    def windows_of(self, planes: Tensor) -> Tensor:
        """[N, M, ...]: what [N, group, M/group, length] has at windows."""
        n, m, out = planes.shape[0], planes.shape[1] * planes.shape[2], self.window.out
        if self.length == prod(out):
            return replace(planes, shape=(n, m, *out))
        planes = replace(planes, stored=True)

        def body(ni: Expr, mi: Expr, *o: Expr) -> Expr:
            place: Expr = wrap(0, INDEX)
            for i, move in zip(o, self.moves):
                place = place + i * move
            return planes.flat((ni * m + mi) * self.length + place)

        return T.compute((n, m, *out), body, "lines")

    def inside(self, own: Sequence[Expr], ends: Sequence[int]) -> Expr | None:
        """Whether an index below `ends` into the padded image is inside the image; None where it always is."""
        result: Expr | None = None
        for i, before, size, end in zip(own, self.window.before, self.window.size, ends):
            for needed, test in ((before > 0, i >= before), (end > before + size, i < before + size)):
                if needed:
                    result = test if result is None else result & test
        return result

    def shifted(self, own: Sequence[Expr]) -> list[Expr]:
        """An index into the padded image as one into the image."""
        return [i - before for i, before in zip(own, self.window.before)]

    def padded(self, ends: Sequence[int]) -> Tensor:
        """x with zero points around it, `ends` elements in each dimension, in memory."""

        def body(ni: Expr, c: Expr, *own: Expr) -> Expr:
            here, inside = self.x[(ni, c, *self.shifted(own))], self.inside(own, ends)
            return here if inside is None else select(inside, here, self.pad)

        return replace(T.compute((*self.x.shape[:2], *ends), body, "padded"), stored=True)


class Channels(_Packing):
    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr):
        super().__init__(x, w, window, group, zx, (-(-w.shape[1] // 4), *window.kernel), window.dilation)
        whole = all(b == 0 and e <= n for b, e, n in zip(window.before, self.extents, window.size))
        self.direct = whole or set(window.stride) == {1}
        self.source = x if self.direct else self.padded(self.extents)

    def bytes_at(self, ni: Expr, block: Expr, own: Sequence[Expr]) -> Expr:
        first = block * 4
        if self.cg % 4:
            first = block // self.steps[0] * self.cg + block % self.steps[0] * 4
        at = self.shifted(own) if self.direct else own

        def element(j: int) -> Expr:
            return self.source[(ni, first + j if self.cg % 4 == 0 else T.minimum(first + j, self.x.shape[1] - 1), *at)]

        here, inside = quad(element, self.flip), self.inside(own, self.extents) if self.direct else None
        return here if inside is None else select(inside, here, quad(lambda j: self.pad, self.flip))

    def packed(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        def body(m: Expr, kc: Expr, *taps: Expr) -> Expr:
            def element(j: int) -> Expr:
                value = change(w[(m, kc * 4 + j, *taps)])
                return value if self.cg % 4 == 0 else select(kc * 4 + j < self.cg, value, 0)

            return quad(element)

        return T.compute((w.shape[0], *self.steps), body, "weights")


class _Taps(_Packing):
    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr):
        *first, last = window.kernel
        *reach, move = window.dilation
        super().__init__(x, w, window, group, zx, (w.shape[1], *first, -(-last // 4)), (*reach, 4 * move))
        self.ends = (*self.extents[:-1], self.extents[-1] + 3 * move)
        # Elements are read up to four times, and with conditions, for which a processor needs masks of bytes.
        self.direct = set(window.stride) == {1} and (x.body is None or x.stored) and "avx512bw" in target().features
        self.source = x if self.direct else self.padded(self.ends)

    def bytes_at(self, ni: Expr, block: Expr, own: Sequence[Expr]) -> Expr:
        *lead, last = own

        def element(j: int) -> Expr:
            at = [*lead, last + j * self.window.dilation[-1]]
            if not self.direct:
                return self.source[(ni, block, *at)]
            here, inside = self.source[(ni, block, *self.shifted(at))], self.inside(at, self.ends)
            return here if inside is None else select(inside, here, self.pad)

        return quad(element, self.flip)

    def packed(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        size = self.window.kernel[-1]

        def body(m: Expr, kc: Expr, *taps: Expr) -> Expr:
            def element(j: int) -> Expr:
                tap = taps[-1] * 4 + j
                value = change(w[(m, kc, *taps[:-1], tap)])
                return value if size % 4 == 0 else select(tap < size, value, 0)

            return quad(element)

        return T.compute((w.shape[0], *self.steps), body, "weights")


def rescaled_sum(a: Expr, b: Expr, factors: Sequence[int]) -> Expr:
    """a + b of bytes as numerics.rescale_add of what the accelerator stores; float64 is exact. factors: ma, mb, c and
    shift of that."""
    flip = 0.0 if a.dtype == "int8" else 128.0
    ma, mb, constant, shift = factors
    total = (a.astype("float64") - flip) * float(ma) + (b.astype("float64") - flip) * float(mb) + float(constant)
    return (clamp(round_even(total * 2.0**-shift), -128, 127) + flip).astype(a.dtype)
