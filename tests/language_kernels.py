"""Kernels of the tile language that several tests run: as a user of Triton writes them, and the accelerator's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import celosia.language as cl
import celosia.language as tl

triton = cl  # whose jit, cdiv and language are here, too


@contextmanager
def interpreted() -> Iterator[None]:
    before = os.environ.get("CELOSIA_INTERPRET")
    os.environ["CELOSIA_INTERPRET"] = "1"
    try:
        yield
    finally:
        os.environ.pop("CELOSIA_INTERPRET")
        if before is not None:
            os.environ["CELOSIA_INTERPRET"] = before


def both(run: Callable[[], Any], out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what the target leaves in `out`, what the interpreter does), from the same beginning."""
    before = out.copy()
    run()
    compiled = out.copy()
    out[...] = before
    with interpreted():
        run()
    return compiled, out


# As a user of Triton writes them: pointers with strides, masks, programs in groups, hints ----------------------------


@triton.jit(target="cpu")
def add_kernel(left, right, total, count, BLOCK: tl.constexpr):
    at = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(total + at, tl.load(left + at, mask=inside) + tl.load(right + at, mask=inside), mask=inside)


@triton.jit(target="cpu")
def softmax_kernel(to, of, of_stride, to_stride, rows, columns, BLOCK: tl.constexpr, num_stages: tl.constexpr):
    """Every so many rows, one after the other."""
    column = tl.arange(0, BLOCK)
    inside = column < columns
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=num_stages):
        line = of + row * of_stride
        values = tl.load(line + column, mask=inside, other=-float("inf"))
        powers = tl.exp(values - tl.max(values, axis=0))
        line = to + row * to_stride
        tl.store(line + column, powers / tl.sum(powers, axis=0), mask=inside)


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit(target="cpu")
def matmul_kernel(
    a, b, c, M, N, K, a_row, a_column, b_row, b_column, c_row, c_column, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Pointers that move along K; programs in groups of rows of blocks, which read the same columns."""
    number, down, across = tl.program_id(axis=0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    group, place = number // (GROUP * across), number % (GROUP * across)
    high = min(down - group * GROUP, GROUP)
    top, side = group * GROUP + place % high, place // high
    tl.assume(top >= 0)
    tl.assume(side >= 0)

    row, column, k = top * BM + tl.arange(0, BM), side * BN + tl.arange(0, BN), tl.arange(0, BK)
    of_a = a + ((row % M)[:, None] * a_row + k[None, :] * a_column)
    of_b = b + (k[:, None] * b_row + (column % N)[None, :] * b_column)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        left = K - step * BK
        acc = tl.dot(
            tl.load(of_a, mask=k[None, :] < left, other=0.0), tl.load(of_b, mask=k[:, None] < left, other=0.0), acc
        )
        of_a += BK * a_column
        of_b += BK * b_row
    if ACTIVATION == "leaky_relu":
        acc = leaky_relu(acc)
    inside = (row[:, None] < M) & (column[None, :] < N)
    tl.store(c + c_row * row[:, None] + c_column * column[None, :], acc.to(tl.float16), mask=inside)


# On the accelerator -----------------------------------------------------------------------------------------------


def fused(x, w, par, table, r, y, M, N, K, BM: cl.constexpr, BN: cl.constexpr, CLIP: cl.constexpr,
          LOOKUP: cl.constexpr, RESIDUAL: cl.constexpr, STEP: cl.constexpr):  # fmt: skip
    """`linear` with weights [K, N], a range, a table and a residual."""
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    acc = cl.zeros((BM, BN), cl.int32)
    for k in range(0, K, STEP):
        acc += cl.dot(cl.load(x, (m, k), (BM, STEP), other=x.zero_point), cl.load(w, (k, n), (STEP, BN)))
    v = cl.requantise(acc, cl.load(par, (n,), (BN,)), y.zero_point, CLIP)
    if LOOKUP:
        v = cl.lookup(v, cl.load(table, (0,), (256,)))
    if RESIDUAL:
        v = cl.residual_add(v, cl.load(r, (m, n), (BM, BN)), 700000, -300000, 1 << 20, 20, CLIP)
    cl.store(y, (m, n), v)


def window(
    x, w, par, y, SIZE: cl.constexpr, TAPS: cl.constexpr, STEP: cl.constexpr, STRIDES: cl.constexpr, PAD: cl.constexpr,
    BH: cl.constexpr, BN: cl.constexpr, BC: cl.constexpr, OUT_LAST: cl.constexpr,
):  # fmt: skip
    """Images x [1, H, any, C] and y [1, H, W, N], any window, whose places are a traced loop; w [KH, KW, N, C], or
    [C, KW, KH, N]."""
    (W, C), (KH, KW) = SIZE, TAPS
    row, n = cl.program_id(1) * BH, cl.program_id(0) * BN
    acc = cl.zeros((BH * W, BN), cl.int32)
    for place in cl.range(KH * KW):
        dy, dx = place // KW, place % KW
        for c in cl.range(0, C, BC):
            at = 0, row * STRIDES[0] + dy * STEP - PAD, dx * STEP - PAD, c
            a = cl.load(x, at, (1, BH, W, BC), other=x.zero_point, steps=(1, *STRIDES, 1))
            if OUT_LAST:
                b = cl.load(w, (c, dx, dy, n), (BC, 1, 1, BN)).reshape(BC, BN)
            else:
                b = cl.load(w, (dy, dx, n, c), (1, 1, BN, BC)).reshape(BN, BC).T
            acc += cl.dot(a.reshape(BH * W, BC), b)
    v = cl.requantise(acc, cl.load(par, (n,), (BN,)), y.zero_point)
    cl.store(y, (0, row, 0, n), v.reshape(1, BH, W, BN))


def maxpool(x, y, W, TAPS: cl.constexpr, STEP: cl.constexpr, STRIDES: cl.constexpr, PAD: cl.constexpr,
            BH: cl.constexpr, BN: cl.constexpr, TRACED: cl.constexpr):  # fmt: skip
    """The maximum of any window of images [H, W, C]; W of y."""
    row, n = cl.program_id(0) * BH, cl.program_id(1) * BN
    most = cl.full((BH, W, BN), -128, cl.int8)
    for dy in cl.range(TAPS[0]) if TRACED else cl.static_range(TAPS[0]):
        for dx in cl.static_range(TAPS[1]):
            at = row * STRIDES[0] + dy * STEP - PAD, dx * STEP - PAD, n
            most = cl.maximum(most, cl.load(x, at, (BH, W, BN), other=-128, steps=(*STRIDES, 1)))
    cl.store(y, (row, 0, n), most)


def table_and_residual(x, table, r, y, BM: cl.constexpr, BN: cl.constexpr):
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    v = cl.lookup(cl.load(x, (m, n), (BM, BN)), cl.load(table, (0,), (256,)))
    cl.store(y, (m, n), cl.residual_add(v, cl.load(r, (m, n), (BM, BN)), 900, 800, -5, 10))


def product(x, w, par, r, y, K, BM: cl.constexpr, BN: cl.constexpr, TURNED: cl.constexpr, RESIDUAL: cl.constexpr):
    """x [M, K] by w [N, K], or [K, N]."""
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    acc = cl.zeros((BM, BN), cl.int32)
    for k in cl.range(0, K, 8):
        a = cl.load(x, (m, k), (BM, 8), other=x.zero_point)
        if TURNED:
            b = cl.load(w, (k, n), (8, BN), other=w.zero_point)
        else:
            b = cl.load(w, (n, k), (BN, 8), other=w.zero_point).T
        acc = cl.dot(a, b, acc)
    v = cl.requantise(acc, cl.load(par, (n,), (BN,)), zero_point=y.zero_point)
    if RESIDUAL:
        v = cl.residual_add(v, cl.load(r, (m, n), (BM, BN)), 700000, -300000, 1 << 20, 20)
    cl.store(y, (m, n), v)
