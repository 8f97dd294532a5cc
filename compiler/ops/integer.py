"""Integer convolutions and matrix products of int8 and uint8, four products at a time (dot4).

Operands are packed into uint32 of four bytes each, as the intrinsic dot4 takes them: the left one as uint8, the right
one as int8. A type of the other sign is shifted by 128, together with its zero point. Zero points are subtracted
afterwards:

    sum (x - zx) * (w - zw)  =  sum x*w  -  zx * sum w  -  zw * sum x  +  count * zx * zw

int32 wraps on both sides of this equation, so that it always holds. Convolutions for processors that multiply bytes by
twos or int16 have other operands (packing.py). What depends on constants alone, such as packed
weights and their sums, is computed when a model is compiled (see function.CpuFunction).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor, select, wrap
from celosia.compiler.expr.math_functions import ONES
from celosia.compiler.ops.packing import Channels, ConvPacking, LineQuads, Pairs, Widened, dot, quad
from celosia.compiler.ops.products import at_lead, batch_of
from celosia.compiler.ops.registry import Node, clamp, reshaped, round_even
from celosia.compiler.ops.window import SlidingWindow
from celosia.compiler.program.op_spec import op_spec
from celosia.compiler.target import TILE_ROWS, TILE_STEPS, dot_instructions, target

Index = tuple[Expr, ...]
WIDTHS = (256, 128, 64, 32, 16)  # columns that lie together in packed matrices, best first; for many rows from 32 on,
# and for tiles 16: rows of theirs, which are 64 bytes, lie behind each other


@dataclass(frozen=True)
class Zero:
    """A zero point as int32: one for all, or one for each output channel. none: it is known to be 0."""

    at: Callable[[Expr], Expr]
    none: bool = False


def left_zero(node: Node, operand: str, dtype: str) -> Expr:
    """Return the only zero point of a left operand, shifted to uint8, as int32."""
    zero = node.scalar(operand, dtype).astype("int32")
    return zero + 128 if dtype == "int8" else zero


def right_zero(node: Node, operand: str, dtype: str) -> Zero:
    """Return the zero points of a right operand, shifted to int8, as int32."""
    move = 128 if dtype == "uint8" else 0
    if not node.has(operand):
        return Zero(lambda m: wrap(-move, "int32"), none=not move)
    tensor, value = node.input(operand), node.value(operand)
    known = value is not None and not np.any(value.astype(np.int32) - move)
    return Zero(lambda m: tensor.flat(0 if tensor.size == 1 else m).astype("int32") - move, known)


def _as_int8(w: Expr) -> Expr:
    return w.astype("int8") ^ -128 if w.dtype == "uint8" else w


# Matrix products


def matrix_product(
    a: Tensor, b: Tensor, za: Expr, zb: Zero, finish: Callable[[Expr, Index], Expr],
    turn_a: bool = False, turn_b: bool = False,
) -> Tensor:  # fmt: skip
    """Return finish(int32 of numpy.matmul(a - za, b - zb), its index), of tensors with at least two dimensions.

    za, zb: shifted to uint8 and int8. turn_a, turn_b: matrices are transposed. Raises ValueError for shapes that do not
    fit.
    """
    inner = a.shape[-2 if turn_a else -1]
    m, n = a.shape[-1 if turn_a else -2], b.shape[-2 if turn_b else -1]
    batch = batch_of(a, b, inner, b.shape[-1 if turn_b else -2])
    steps = -(-inner // 4)
    tiled = target().has_amx and m >= TILE_ROWS[0] and steps >= TILE_STEPS
    width = width_of(n, TILE_STEPS if tiled else 32 if m > 4 else WIDTHS[0])
    left = rows_of(a, steps, turn_a)
    right = columns_of(b, steps, width, turn_b)

    def correction(*i: Expr) -> Expr:
        """Return -za * sum w + count * za * zw of a column."""
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
    """Return the number of columns in a panel: the best of WIDTHS up to `most` that divides n; else n."""
    return next((w for w in WIDTHS if n % w == 0 and w <= most), n)


def rows_of(a: Tensor, steps: int, turn: bool) -> Tensor:
    """Return the rows of `a` as uint8 words of four: [..., m, steps]. Bytes beyond their end are multiplied by 0."""
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
    """Return the columns of `b` as int8 words of four, in panels: [..., n / width, steps, width]; filled up with 0."""
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
    """Return the sum of each row of `left`, words of four bytes; `inner`: elements of a row."""
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
    """Return finish(int32 sum over the window of (x - zx) * (w - zw), plus bias; output channel).

    x: [N, C, ...], w: [M, C/group, ...]. Channels share a word, see `_packing`. The image is split into one for each
    remainder of the stride, in which windows move by one element: vectors run over complete images, and only results
    between lines are wasted.
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
        return _one_window(node, x, w, zx, zw, bias, finish)
    pack = _packing(node, x, w, window, group, zx)
    return pack.windows_of(_planes(pack, zw, bias, finish))


def _packing(node: Node, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr) -> ConvPacking:
    """Return the layout for the processor's byte products.

    Four channels share a uint32, or, where a group has too few, four elements of a line; with NEON two channels share a
    uint16, or each element has an int16.
    """
    channels = w.shape[1]
    several = channels % 4 == 0 or channels == 3 or channels > 4
    if dot_instructions(target().features)[0] != "neon":
        return (Channels if several else LineQuads)(x, w, window, group, zx)
    if not several:
        return Widened(x, w, window, group, zx)
    values = node.value(op_spec(node.op).factors[1])
    least = 0 if w.dtype == "uint8" else -128
    return Pairs(x, w, window, group, zx, values is not None and not np.any(values == least))


def _planes(pack: ConvPacking, zw: Zero, bias: Tensor | None, finish: Callable[[Expr, Expr], Expr]) -> Tensor:
    """Return finish of the sums at each position of a packed image: [N, group, M/group, length]."""
    image, weights = pack.image(), pack.weights(_as_int8)
    m, count = weights.shape[0], pack.cg * prod(pack.window.kernel)
    n, group, mg = image.shape[0], pack.group, m // pack.group

    def correction(mi: Expr) -> Expr:
        if pack.zero is None:
            return wrap(0, "int32") if bias is None else bias[mi]
        total = pack.zero * (wrap(count, "int32") * zw.at(mi) - pack.total(weights, mi))
        return total if bias is None else total + bias[mi]

    offset = T.compute((m,), correction, "offset")
    sums: Tensor | None = None
    if not zw.none:
        ones = pack.weights(lambda v: wrap(1, "int8"))
        sums = T.compute(
            (n, group, pack.length), lambda ni, g, p: pack.product(image, ones, g * mg, ni, g, p), "window_sums"
        )  # fmt: skip

    def plane(ni: Expr, g: Expr, mi: Expr, place: Expr) -> Expr:
        channel = g * mg + mi
        acc = pack.product(image, weights, channel, ni, g, place) + offset[channel]
        if sums is not None:
            acc = acc - zw.at(channel) * sums[ni, g, place]
        return finish(acc, channel)

    return T.compute((n, group, mg, pack.length), plane, "conv")


def _one_window(
    node: Node, x: Tensor, w: Tensor, zx: Expr, zw: Zero, bias: Tensor | None, finish: Callable[[Expr, Expr], Expr]
) -> Tensor:
    """Return a convolution whose only window is the complete image, as a matrix product."""

    def last(acc: Expr, i: Index) -> Expr:
        return finish(acc if bias is None else acc + bias[i[-1]], i[-1])

    n, m = x.shape[0], w.shape[0]
    images, weights = reshaped(x, (n, prod(x.shape[1:]))), reshaped(w, (m, prod(w.shape[1:])))
    y = matrix_product(images, weights, zx, zw, last, turn_b=True)
    return replace(y, shape=(n, m, *(1 for _ in x.shape[2:])))


def rescaled_sum(a: Expr, b: Expr, factors: Sequence[int]) -> Expr:
    """Return a + b of bytes by numerics.rescale_add of the accelerator's values; float64 is exact.

    factors: ma, mb, c and shift of rescale_add.
    """
    flip = 0.0 if a.dtype == "int8" else 128.0
    ma, mb, constant, shift = factors
    total = (a.astype("float64") - flip) * float(ma) + (b.astype("float64") - flip) * float(mb) + float(constant)
    return (clamp(round_even(total * 2.0**-shift), -128, 127) + flip).astype(a.dtype)
