"""Integer convolutions and matrix products of int8 and uint8, four products at a time (dot4).

Operands are packed into uint32 of four bytes each, as the intrinsic dot4 takes them: the left one as uint8, the right
one as int8. A type of the other sign is shifted by 128, together with its zero point. Zero points are subtracted
afterwards:

    sum (x - zx) * (w - zw)  =  sum x*w  -  zx * sum w  -  zw * sum x  +  count * zx * zw

int32 wraps on both sides of this equation, so that it always holds. Convolutions on processors that multiply pairs of
bytes, or int16, have other operands (packing.py). Packed weights, their sums and all else that depends on constants
alone are computed when a model is compiled (see function.CpuFunction).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor, select, wrap
from celosia.compiler.expr.math_functions import ONES
from celosia.compiler.ops.packing import Channels, ConvPacking, LineQuads, Pairs, Widened, dot, pack_quad
from celosia.compiler.ops.products import batch_index, batch_shape
from celosia.compiler.ops.registry import Node, clamp, reshaped, round_even
from celosia.compiler.ops.window import SlidingWindow
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


# Matrix products


def matrix_product(
    a: Tensor, b: Tensor, za: Expr, zb: ZeroPoint, finish: Callable[[Expr, Index], Expr],
    turn_a: bool = False, turn_b: bool = False,
) -> Tensor:  # fmt: skip
    """Return finish(int32 of numpy.matmul(a - za, b - zb), its index), for tensors of at least two dimensions.

    a, b: of bytes. za, zb: zero points, shifted to uint8 and int8. turn_a, turn_b: matrices are transposed. Raises
    ValueError for shapes that do not fit.
    """
    inner = a.shape[-2 if turn_a else -1]
    m, n = a.shape[-1 if turn_a else -2], b.shape[-2 if turn_b else -1]
    batch = batch_shape(a, b, inner, b.shape[-1 if turn_b else -2])
    steps = -(-inner // 4)
    tiled = target().has_amx and m >= TILE_ROWS[0] and steps >= TILE_STEPS
    width = panel_width(n, TILE_STEPS if tiled else 32 if m > 4 else WIDTHS[0])
    left = pack_rows(a, steps, turn_a)
    right = pack_columns(b, steps, width, turn_b)

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


def panel_width(n: int, most: int) -> int:
    """Return how many of n columns a panel has: the first of WIDTHS up to `most` that divides n, else n."""
    return next((w for w in WIDTHS if n % w == 0 and w <= most), n)


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
        counted = (
            pack_quad(lambda j: select(k * 4 + j < inner, wrap(1, "uint8"), 0)) if inner % 4 else wrap(ONES, "uint32")
        )
        return dot(left[(*i, k)], counted, k)

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
    y = matrix_product(images, weights, zx, zw, finish_channel, turn_b=True)
    return replace(y, shape=(n, m, *(1 for _ in x.shape[2:])))


def rescaled_sum(a: Expr, b: Expr, factors: Sequence[int]) -> Expr:
    """Return the sum of two bytes as the accelerator's rescale-add (numerics.rescale_add) computes it.

    factors: ma, mb, c and shift of a RescaleAdd. It is computed in float64, which is exact for these integers.
    """
    flip = 0.0 if a.dtype == "int8" else 128.0
    ma, mb, constant, shift = factors
    total = (a.astype("float64") - flip) * float(ma) + (b.astype("float64") - flip) * float(mb) + float(constant)
    return (clamp(round_even(total * 2.0**-shift), -128, 127) + flip).astype(a.dtype)
