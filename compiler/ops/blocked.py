"""Operators on images in blocks of channels, so that vectors go over channels: [N, C/c, H, W, c].

The layout pass (graph/simplify/blocked_layout.py) replaces ONNX's operators by these, whose domain is "celosia".
ONNX's element-wise operators serve blocked images, too. An image [N, C, H, W] counts as one in blocks of one channel.
The layout is that of E. Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD
Architectures" (2018).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from celosia.compiler import expr as T
from celosia.compiler.expr import Axis, Expr, Tensor, select, wrap
from celosia.compiler.expr.nest_parts import reduction_identity
from celosia.compiler.ops.pooling import replace_empty_maxima
from celosia.compiler.ops.registry import Node, op
from celosia.compiler.ops.shape import padded
from celosia.compiler.ops.window import SlidingWindow
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
