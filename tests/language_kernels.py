"""Kernels of the tile language that several tests run: Triton's tutorials with other imports, and the accelerator's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import celosia.language as cl
import celosia.language as tl
from celosia.language import cdiv

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


# Triton's tutorials -----------------------------------------------------------------------------------------------


@triton.jit(target="cpu")
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    block_start = pid * BLOCK_SIZE
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    output = x + y
    tl.store(output_ptr + offsets, output, mask=mask)


@triton.jit(target="cpu")
def softmax_kernel(output_ptr, input_ptr, input_row_stride, output_row_stride, n_rows, n_cols, BLOCK_SIZE: tl.constexpr,
                   num_stages: tl.constexpr):  # fmt: skip
    # starting row of the program
    row_start = tl.program_id(0)
    row_step = tl.num_programs(0)
    for row_idx in tl.range(row_start, n_rows, row_step, num_stages=num_stages):
        # The stride represents how much we need to increase the pointer to advance 1 row
        row_start_ptr = input_ptr + row_idx * input_row_stride
        # The block size is the next power of two greater than n_cols, so we can fit each
        # row in a single block
        col_offsets = tl.arange(0, BLOCK_SIZE)
        input_ptrs = row_start_ptr + col_offsets
        # Load the row into SRAM, using a mask since BLOCK_SIZE may be > than n_cols
        mask = col_offsets < n_cols
        row = tl.load(input_ptrs, mask=mask, other=-float("inf"))
        # Subtract maximum for numerical stability
        row_minus_max = row - tl.max(row, axis=0)
        # Note that exponentiation in Triton is fast but approximate (i.e., think __expf in CUDA)
        numerator = tl.exp(row_minus_max)
        denominator = tl.sum(numerator, axis=0)
        softmax_output = numerator / denominator
        # Write back output to DRAM
        output_row_start_ptr = output_ptr + row_idx * output_row_stride
        output_ptrs = output_row_start_ptr + col_offsets
        tl.store(output_ptrs, softmax_output, mask=mask)


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit(target="cpu")
def matmul_kernel(
        # Pointers to matrices
        a_ptr, b_ptr, c_ptr,
        # Matrix dimensions
        M, N, K,
        # The stride variables represent how much to increase the ptr by when moving by 1
        # element in a particular dimension. E.g. `stride_am` is how much to increase `a_ptr`
        # by to get the element one row down (A has M rows).
        stride_am, stride_ak,
        stride_bk, stride_bn,
        stride_cm, stride_cn,
        # Meta-parameters
        BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
        GROUP_SIZE_M: tl.constexpr,
        ACTIVATION: tl.constexpr
):  # fmt: skip
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + ((pid % num_pid_in_group) % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m

    tl.assume(pid_m >= 0)
    tl.assume(pid_n >= 0)

    offs_am = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    offs_bn = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)

    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_SIZE_K)):
        # Load the next block of A and B, generate a mask by checking the K dimension.
        # If it is out of bounds, set it to 0.
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_SIZE_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=0.0)
        # We accumulate along the K dimension.
        accumulator = tl.dot(a, b, accumulator)
        # Advance the ptrs to the next K block.
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk
    # You can fuse arbitrary activation functions here
    # while the accumulator is still in FP32!
    if ACTIVATION == "leaky_relu":
        accumulator = leaky_relu(accumulator)
    c = accumulator.to(tl.float16)

    # -----------------------------------------------------------
    # Write back the block of the output matrix C with masks.
    offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    tl.store(c_ptrs, c, mask=c_mask)


# On the CPU -------------------------------------------------------------------------------------------------------


@cl.jit(target="cpu")
def softmax(x, y, N, BLOCK: cl.constexpr):
    row, cols = cl.program_id(0), cl.arange(0, BLOCK)
    mask = cols < N
    v = cl.load(x + row * N + cols, mask=mask, other=-float("inf"))
    e = cl.exp(v - cl.max(v, axis=0))
    cl.store(y + row * N + cols, e / cl.sum(e, axis=0), mask=mask)


@cl.jit(target="cpu")
def layernorm(x, w, b, y, N, eps, BLOCK: cl.constexpr):
    row, cols = cl.program_id(0), cl.arange(0, BLOCK)
    mask = cols < N
    v = cl.load(x + row * N + cols, mask=mask, other=0.0)
    d = cl.where(mask, v - cl.sum(v, axis=0) / N, 0.0)
    scale = 1.0 / cl.sqrt(cl.sum(d * d, axis=0) / N + eps)
    v = d * scale * cl.load(w + cols, mask=mask) + cl.load(b + cols, mask=mask)
    cl.store(y + row * N + cols, v, mask=mask)


@cl.jit(target="cpu")
def matmul(a, b, c, M, N, K, BM: cl.constexpr, BN: cl.constexpr, BK: cl.constexpr):
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    acc = cl.zeros((BM, BN), cl.float32)
    for k in cl.range(0, K, BK):
        acc = cl.dot(cl.load(a, (m, k), (BM, BK)), cl.load(b, (k, n), (BK, BN)), acc)
    cl.store(c, (m, n), acc)


@cl.jit(target="cpu")
def attention(q, k, v, o, L, scale, BM: cl.constexpr, BN: cl.constexpr, D: cl.constexpr):
    """One head, with the softmax of each row corrected as more of it is known."""
    rows = cl.program_id(0) * BM
    queries = cl.load(q, (rows, 0), (BM, D)) * scale
    most, total = cl.full((BM,), -float("inf"), cl.float32), cl.zeros((BM,), cl.float32)
    acc = cl.zeros((BM, D), cl.float32)
    for n in cl.range(0, L, BN):
        s = cl.dot(queries, cl.load(k, (n, 0), (BN, D)).T)
        if L % BN:
            s = cl.where((n + cl.arange(0, BN) < L)[None, :], s, -float("inf"))
        new = cl.maximum(most, cl.max(s, axis=1))
        alpha, p = cl.exp(most - new), cl.exp(s - new[:, None])
        total = total * alpha + cl.sum(p, axis=1)
        acc = cl.dot(p, cl.load(v, (n, 0), (BN, D)), acc * alpha[:, None])
        most = new
    cl.store(o, (rows, 0), acc / total[:, None])


# On the accelerator -----------------------------------------------------------------------------------------------


def linear(x, w, par, y, M, N, K, BM: cl.constexpr, BN: cl.constexpr):
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    acc = cl.zeros((BM, BN), cl.int32)
    for k in cl.range(0, K, 16):
        a = cl.load(x, (m, k), (BM, 16), other=x.zero_point)
        b = cl.load(w, (n, k), (BN, 16))
        acc = cl.dot(a, b.T, acc)
    cl.store(y, (m, n), cl.requantise(acc, cl.load(par, (n,), (BN,)), zero_point=y.zero_point))


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


def conv3x3(x, w, par, y, H, W, C, N, BH: cl.constexpr, BN: cl.constexpr):
    """x [H, W, C] and w [N, 3, 3, C], padded by one pixel on each side."""
    row, n = cl.program_id(0) * BH, cl.program_id(1) * BN
    acc = cl.zeros((BH * W, BN), cl.int32)
    for c in cl.range(0, C, 16):
        for dy in cl.static_range(3):
            for dx in cl.static_range(3):
                a = cl.load(x, (row + dy - 1, dx - 1, c), (BH, W, 16), other=x.zero_point)
                b = cl.load(w, (n, dy, dx, c), (BN, 1, 1, 16))
                acc = cl.dot(a.reshape(BH * W, 16), b.reshape(BN, 16).T, acc)
    v = cl.requantise(acc, cl.load(par, (n,), (BN,)), zero_point=y.zero_point)
    cl.store(y, (row, 0, n), v.reshape(BH, W, BN))


def table_and_residual(x, table, r, y, BM: cl.constexpr, BN: cl.constexpr):
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    v = cl.lookup(cl.load(x, (m, n), (BM, BN)), cl.load(table, (0,), (256,)))
    cl.store(y, (m, n), cl.residual_add(v, cl.load(r, (m, n), (BM, BN)), 900, 800, -5, 10))


__all__ = ["cdiv"]
