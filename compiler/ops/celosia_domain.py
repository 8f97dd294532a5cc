"""Operators of our own domain, "celosia", which passes of the graph insert.

Its parts, in order:

1. Images in blocks of channels, [N, C/c, H, W, c], so that vectors go over channels. The layout pass
   (graph/simplify/blocked_layout.py) replaces ONNX's operators by these. ONNX's element-wise operators serve blocked
   images, too. An image [N, C, H, W] counts as one in blocks of one channel. The layout is that of E. Georganas et al.,
   "Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures" (2018).
2. Products of bytes in blocks: QuantizeBlocks, BlockSums and ScaleSums compute a MatMulNBits, which graph/block_sums.py
   replaces by them. BlockSums is what the accelerator executes. Its sums of a row lie as the accelerator stores them:
   [parts, bytes, blocks, lanes] int8, the lowest byte of all sums of a part first; a part has `lanes` columns of the
   matrix.
3. QLinearNorm, a normalisation in the accelerator's integers (graph/quantized/rounded.py).

Others stand beside the operators whose code they share: QLinearMean (pooling.py), QLinearConvTranspose and Table
(quantized.py), and RoundBlocks (contrib.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from celosia.compiler import expr as T
from celosia.compiler.expr import Axis, Expr, Tensor, call, select, wrap
from celosia.compiler.expr.lower import reduction_identity
from celosia.compiler.numerics.norm import norm_row
from celosia.compiler.numerics.norm import sums as row_sums
from celosia.compiler.ops.contrib import block_quantisation
from celosia.compiler.ops.pooling import replace_empty_maxima
from celosia.compiler.ops.products import SlidingWindow
from celosia.compiler.ops.quantized import requantize
from celosia.compiler.ops.registry import F32, Node, op
from celosia.compiler.ops.shape import padded
from celosia.compiler.program.op_spec import Kind


@op("Block", kind=Kind.COMPLEX, domain="celosia", operands="x")
def block(node: Node) -> Tensor:
    """Build Block: split channels into blocks, [N, C, ...] to [N, C/c, ..., c], where c is the attribute `block`."""
    x, c = node.input(0), int(node.attrs["block"])
    n, channels, *size = x.shape
    if channels % c:
        raise node.fail(f"{channels} channels in blocks of {c}")
    return T.compute((n, channels // c, *size, c), lambda ni, b, *at: x[(ni, b * c + at[-1], *at[:-1])], "block")


@op("Unblock", kind=Kind.COMPLEX, domain="celosia", operands="x")
def unblock(node: Node) -> Tensor:
    """Build Unblock: merge blocks of channels, [N, C/c, ..., c] to [N, C, ...]."""
    x = node.input(0)
    n, blocks, *size, c = x.shape
    y = T.compute((n, blocks, c, *size), lambda ni, b, lane, *at: x[(ni, b, *at, lane)], "unblock")
    return replace(y, shape=(n, blocks * c, *size))


@op("BlockedConv", kind=Kind.COMPLEX, domain="celosia", operands="x w:weights b:bias?")
def blocked_conv(node: Node) -> Tensor:
    """Build BlockedConv: a convolution to [N, M/m, H, W, m].

    x: [N, C/c, H, W, c] or [N, C, H, W]. w: [M/m, C/group/c, h, w, c, m]. bias: [M]. With several groups each has
    complete blocks, or one input and one output channel (depthwise).
    """
    x, w, bias = node.input("x"), node.input("w"), node.optional("b")
    group = int(node.attrs.get("group", 1))
    outs, ins, *kernel, wc, m = w.shape
    is_unblocked = len(x.shape) == len(kernel) + 2
    n, blocks, *size, c = (*x.shape, 1) if is_unblocked else x.shape
    window = SlidingWindow.of(node, tuple(size), tuple(kernel))
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(kernel))
    by_channel = group == outs * m and c == m and ins == wc == 1
    if not by_channel and (blocks != ins * group or c != wc or outs % group):
        raise node.fail(f"x {list(x.shape)}, w {list(w.shape)}, group {group}")

    def finish(acc: Expr, channel: Expr) -> Expr:
        return acc if bias is None else acc + bias[channel]

    if by_channel:
        read = _padded_reader(window, x, wrap(0, x.dtype))

        def depthwise(ni: Expr, b: Expr, *at: Expr) -> Expr:
            lane = at[-1]
            product = read(ni, b, window.at(at[:-1], ks), lane) * w[(b, 0, *ks, 0, lane)]
            return finish(T.sum(product, ks), b * m + lane)

        return T.compute((n, outs, *window.out, m), depthwise, "conv")
    before, after = window.margins()
    lane_padding = () if is_unblocked else (0,)
    p = padded(x, (0, 0, *before, *lane_padding), (0, 0, *after, *lane_padding), wrap(0, x.dtype))
    kb, kc = T.reduce_axis(ins, "cb"), T.reduce_axis(c, "c")

    def body(ni: Expr, g: Expr, mb: Expr, *at: Expr) -> Expr:
        b, lane = g * (outs // group) + mb, at[-1]
        pixel = (ni, g * ins + kb, *window.at(at[:-1], ks))
        product = p[pixel if is_unblocked else (*pixel, kc)] * w[(b, kb, *ks, kc, lane)]
        return finish(T.sum(product, (kb, *ks, kc)), b * m + lane)

    y = T.compute((n, group, outs // group, *window.out, m), body, "conv")
    return replace(y, shape=(n, outs, *window.out, m))


def _padded_reader(window: SlidingWindow, x: Tensor, value: Expr) -> Callable[..., Expr]:
    """Return a function that reads x [N, C/c, ..., c] at an index into its padded form, without a padded copy.

    The function takes (sample, block, spatial index, lane) and returns `value` in the padding. It serves windows that
    read each element a few times, where a test of the index costs less than a copy.
    """
    before, after = window.margins()

    def read(n: Expr, b: Expr, at: Sequence[Expr], lane: Expr) -> Expr:
        tests = [i >= low for i, low in zip(at, before) if low > 0]
        tests += [i < low + size for i, low, size, high in zip(at, before, window.size, after) if high]
        element = x[(n, b, *(i - low for i, low in zip(at, before)), lane)]
        return select(functools.reduce(lambda p, q: p & q, tests), element, value) if tests else element

    return read


@op("BlockedMaxPool", kind=Kind.COMPLEX, domain="celosia", operands="x")
def blocked_max_pool(node: Node) -> Tensor:
    """Build BlockedMaxPool: the maximum of each window, without its padding."""
    x = node.input(0)
    window = SlidingWindow.of(node, x.shape[2:-1])
    read = _padded_reader(window, x, reduction_identity("max", x.dtype))
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))

    def body(n: Expr, b: Expr, *at: Expr) -> Expr:
        return T.max(read(n, b, window.at(at[:-1], ks), at[-1]), ks)

    return replace_empty_maxima(window, T.compute((*x.shape[:2], *window.out, x.shape[-1]), body, "max_pool"))


@op("BlockedAveragePool", kind=Kind.COMPLEX, domain="celosia", operands="x")
def blocked_average_pool(node: Node) -> Tensor:
    """Build BlockedAveragePool: the mean of each window, with ONNX's divisor."""
    x = node.input(0)
    window = SlidingWindow.of(node, x.shape[2:-1])
    read = _padded_reader(window, x, wrap(0, x.dtype))
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))

    def body(n: Expr, b: Expr, *at: Expr) -> Expr:
        total = T.sum(read(n, b, window.at(at[:-1], ks), at[-1]), ks)
        return total / window.count(at[:-1]).astype(x.dtype)

    return T.compute((*x.shape[:2], *window.out, x.shape[-1]), body, "average_pool")


@op("BlockedGlobalAveragePool", "BlockedGlobalMaxPool", kind=Kind.REDUCTION, domain="celosia", operands="x")
def blocked_global_pool(node: Node) -> Tensor:
    """Build BlockedGlobalAveragePool or BlockedGlobalMaxPool: [N, C/c, ..., c] to [N, C, 1, ...]."""
    x = node.input(0)
    n, blocks, *size, c = x.shape
    ks: tuple[Axis, ...] = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(size))

    def body(ni: Expr, b: Expr, lane: Expr) -> Expr:
        value = x[(ni, b, *ks, lane)]
        return T.max(value, ks) if node.op == "BlockedGlobalMaxPool" else T.sum(value, ks) / prod(size)

    y = T.compute((n, blocks, c), body, "global_pool")
    return replace(y, shape=(n, blocks * c, *(1 for _ in size)))


@op("QuantizeBlocks", kind=Kind.OPAQUE, domain="celosia", operands="x")
def quantize_blocks(node: Node) -> list[Tensor]:
    """Build QuantizeBlocks: quantise x [..., K] float32 to int8 [..., blocks, block_size], and the scale of each block.

    Bytes beyond K are zeros. Scales: [..., blocks] float32.
    """
    x, size = node.input(0), int(node.attrs["block_size"])
    largest, inverse_scales = block_quantisation(x, size)
    inner, blocks = x.shape[-1], largest.shape[-1]

    def byte(*i: Expr) -> Expr:
        """Return a quantised element; 0 beyond K."""
        position = i[-2] * size + i[-1]
        divides = inner % size == 0
        value = x[(*i[:-2], position if divides else T.minimum(position, inner - 1))] * inverse_scales[i[:-1]]
        value = call("round_even", value)
        return (value if divides else select(position < inner, value, wrap(0, F32))).astype("int8")

    quantised = T.compute((*x.shape[:-1], blocks, size), byte, "bytes")
    return [quantised, T.compute(largest.shape, lambda *i: largest[i] / 127.0, "scale")]


@op("BlockSums", kind=Kind.OPAQUE, needs_kernel=True, domain="celosia", operands="x w:weights")
def block_sums(node: Node) -> Tensor:
    """Build BlockSums: the dot product of each block of x with each column of w, an int32 as separate bytes.

    x: [..., blocks, size] int8. w: [parts, blocks, lanes, size] int8, filled up with zeros. Result: [..., parts,
    sum_bytes, blocks, lanes] int8. Attributes K and N: size of the matrix.
    """
    x, w, count = node.input("x"), node.input("w"), int(node.attrs["sum_bytes"])
    parts, blocks, lanes, size = w.shape
    k = T.reduce_axis(size, "k")

    def product(*i: Expr) -> Expr:
        *row, part, block, lane = i
        return T.sum(x[(*row, block, k)].astype("int32") * w[part, block, lane, k].astype("int32"), k)

    def byte(*i: Expr) -> Expr:
        *row, part, number, block, lane = i
        return (sums[(*row, part, block, lane)] >> (number * 8).astype("int32")).astype("int8")

    sums = T.compute((*x.shape[:-2], parts, blocks, lanes), product, "sums")
    return T.compute((*x.shape[:-2], parts, count, blocks, lanes), byte, "bytes")


@op("ScaleSums", kind=Kind.OPAQUE, domain="celosia", operands="sums x_scales scales x? zeros?")
def scale_sums(node: Node) -> Tensor:
    """Build ScaleSums: multiply block sums by the scales of the blocks of x and w, and add them over blocks in order.

    sums: as from BlockSums. x_scales: scales of x, [..., blocks]. scales: of w, [parts, blocks, lanes]. Result: [...,
    parts, lanes] float32. With x, as from QuantizeBlocks, and zero points of w [parts, blocks, lanes] int32, the
    products of x and the zero points are subtracted.
    """
    sums, x_scales, scales = node.input("sums"), node.input("x_scales"), node.input("scales")
    x, zeros = node.optional("x"), node.optional("zeros")
    count, (parts, blocks, lanes) = sums.shape[-3], scales.shape
    b = T.reduce_axis(blocks, "block")
    totals: Tensor | None = None
    if x is not None:
        k = T.reduce_axis(x.shape[-1], "k")
        totals = T.compute(x.shape[:-1], lambda *i: T.sum(x[(*i, k)].astype("int32"), k), "sums_of_x")

    def block_sum(row: list[Expr], part: Expr, lane: Expr) -> Expr:
        """Return the int32 sum of a block from its bytes, without the product of the zero point."""
        total: Expr = wrap(0, "int32")
        for number in range(count):
            value = sums[(*row, part, number, b, lane)].astype("int32")
            total = total + ((value if number == count - 1 else value & 255) << 8 * number)
        return total if zeros is None or totals is None else total - totals[(*row, b)] * zeros[part, b, lane]

    def scaled(*i: Expr) -> Expr:
        *row, part, lane = i
        return T.sum(block_sum(row, part, lane).astype(F32) * (x_scales[(*row, b)] * scales[part, b, lane]), b)

    return T.compute((*x_scales.shape[:-1], parts, lanes), scaled, "scaled")


@op(
    "QLinearNorm", kind=Kind.REDUCTION, domain="celosia",
    operands="x x_scale x_zero_point epsilon bias:bias factor y_scale y_zero_point",
)  # fmt: skip
def qlinear_norm(node: Node) -> Tensor:
    """Build our QLinearNorm: normalise rows of the last axis as the accelerator does, in integers.

    epsilon, bias, factor: as numerics.NormConstants derives them. Attribute centre: the mean is subtracted first.
    """
    x, rows = node.input("x"), node.input("x").shape[:-1]
    zx, zy = node.scalar("x_zero_point", "int64"), node.scalar("y_zero_point", "int32")
    bias, factor = node.input("bias"), node.input("factor")

    def compute_for_rows(name: str, number: Callable[..., Expr]) -> Callable[..., Expr]:
        """Compute a number of each row once; return a function that reads it."""
        tensor = T.compute(rows, number, name)
        return lambda *i: tensor[i]

    def element(*i: Expr) -> Expr:
        return x[i].astype("int64") - zx

    total, squares = (
        compute_for_rows(name, number) for name, number in zip(("total", "squares"), row_sums(element, x.shape[-1]))
    )
    row = norm_row(
        total, squares, node.scalar("epsilon", "int64"), x.shape[-1], bool(node.attrs["centre"]), compute_for_rows
    )

    def result(*i: Expr) -> Expr:
        z = row.element(element(*i), *i[:-1])
        return requantize(z + bias[i[-1]], factor[i[-1]], zy, x.dtype)

    return T.compute(x.shape, result, "norm")
