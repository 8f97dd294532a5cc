"""Operators as tensor expressions, scheduled for the accelerator: what tests of several folders run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import expr as T
from celosia.compiler.layer import Requantise
from celosia.compiler.tensorize import intrinsics as hw
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config

TINY = Config.load("tiny")
WIDE = Config(name="wide", batch=1, block_in=8, block_out=4, inp_depth=512, wgt_depth=128, acc_depth=256)
TALL = Config(name="tall", batch=1, block_in=4, block_out=8, inp_depth=512, wgt_depth=128, acc_depth=256)
PAIR = Config(name="pair", batch=2, block_in=4, block_out=4, inp_depth=512, wgt_depth=128, acc_depth=256)
RNG = np.random.default_rng(1)


def int8(*shape: int) -> NDArray[np.int8]:
    return RNG.integers(-128, 128, shape).astype(np.int8)


def parameters(cfg: Config, channels: int) -> NDArray[np.uint64]:
    """Entries of par that bring sums of some hundred products into int8."""
    bias = RNG.integers(-3000, 3000, channels).astype(np.int32)
    multiplier = RNG.integers(1 << 23, 1 << 24, channels).astype(np.uint32)
    shift = RNG.integers(29, 33, channels).astype(np.uint8)
    data = pack.arrange_parameters(cfg, Requantise(bias, multiplier, shift, 0))
    return data.view(np.uint64).reshape(-1, cfg.block_out)


def matmul(cfg: Config, m: int, n: int, k: int) -> tuple[list[T.Tensor], T.Tensor, T.Tensor]:
    """y = requantised(x w): x [m, k] and y [m, n] as they are, w in entries of wgt."""
    bi, bo, g = cfg.block_in, cfg.block_out, cfg.group
    x = T.placeholder((m, k), "int8", "x")
    w = T.placeholder((n // bo, k // bi, bi // g, bo, g), "int8", "w")
    par = T.placeholder((n // bo, bo), "uint64", "par")
    r = T.reduce_axis(k, "k")

    def product(i: T.Expr, j: T.Expr) -> T.Expr:
        return T.sum(x[i, r].astype("int32") * w[j // bo, r // bi, r % bi // g, j % bo, r % g].astype("int32"), r)

    acc = T.compute((m, n), product, "acc")
    y = T.compute((m, n), lambda i, j: hw.requantised(acc[i, j], par[j // bo, j % bo], 3.0), "y")
    return [x, w, par], acc, y


def scheduled(
    cfg: Config, inputs: list[T.Tensor], acc: T.Tensor, y: T.Tensor, tm: int, tn: int, tk: int, threads: int = 1
) -> T.Schedule:
    """Tiles of tm rows, tn output and tk input blocks; `threads` virtual threads over output blocks."""
    x, w, par = inputs
    bi, bo, g = cfg.block_in, cfg.block_out, cfg.group
    s = T.create_schedule(y)
    s[acc].set_scope("acc")
    out = s.cache_write(y, "out")
    near_x, near_w, near_par = s.cache_read(x, "inp", acc), s.cache_read(w, "wgt", acc), s.cache_read(par, "par", out)

    i, j = y.axes
    io, jo, ii, ji = s[y].tile(i, j, tm, tn * bo)
    if threads > 1:
        jt, jo = s[y].split(jo, -(-jo.extent // threads))
        s[y].reorder(io, jo, jt)
        s[y].vthread(jt)
        jo = jt
    jp, jg = s[y].split(ji, g)
    s[y].reorder(io, jo, ii, jp, jg)
    s[y].tensorize(jg, hw.store(cfg))

    s[out].compute_at(s[y], jo)
    _, oc = s[out].split(out.axes[1], bo)
    s[out].tensorize(oc, hw.requantise(cfg))
    s[near_par].compute_at(s[y], jo)
    s[near_par].tensorize(near_par.axes[1], hw.load(cfg, "par"))

    s[acc].compute_at(s[y], jo)
    ai, aj = acc.axes
    k = s[acc].order[-1]
    ab, ac = s[acc].split(aj, bo)
    ko, kb, kc = *s[acc].split(k, tk * bi), k
    kb, ke = s[acc].split(kb, bi)
    ke, kc = s[acc].split(ke, g)
    s[acc].reorder(ko, ai, ab, kb, ac, ke, kc)
    s[acc].tensorize(ac, hw.gemm(cfg))
    s[near_x].compute_at(s[acc], ko)
    _, xc = s[near_x].split(near_x.axes[1], g)
    s[near_x].tensorize(xc, hw.load(cfg, "inp"))
    s[near_w].compute_at(s[acc], ko)
    s[near_w].tensorize(near_w.axes[3], hw.load(cfg, "wgt"))
    return s


def matmul_arrays(cfg: Config, m: int, n: int, k: int) -> tuple[np.ndarray, ...]:
    entries = int8(n // cfg.block_out, k // cfg.block_in, cfg.inp_pieces, cfg.block_out, cfg.group)
    return int8(m, k), entries, parameters(cfg, n)


def convolution(
    cfg: Config, channels: tuple[int, int], size: tuple[int, int], kernel: int, stride: int, pad: int, tiles: list[int]
) -> tuple[list[T.Tensor], T.Schedule]:
    """Blocks of channels (in, out), padded with 5; tiles of output blocks, rows, columns, and input blocks."""
    (cb, ob), (h, w) = channels, size
    q, p, b, g = cfg.inp_pieces, cfg.out_pieces, cfg.batch, cfg.group
    oh, ow = ((n + 2 * pad - kernel) // stride + 1 for n in size)
    data = T.placeholder((cb * q, h, w, b, g), "int8", "data")
    weight = T.placeholder((ob, cb, kernel, kernel, q, cfg.block_out, g), "int8", "weight")
    par = T.placeholder((ob, cfg.block_out), "uint64", "par")

    def padded(c: T.Expr, y: T.Expr, x: T.Expr, piece: T.Expr, n: T.Expr, k: T.Expr) -> T.Expr:
        if not pad:
            return data[c * q + piece, y, x, n, k]
        inside = (y >= pad) & (y < h + pad) & (x >= pad) & (x < w + pad)
        return T.select(inside, data[c * q + piece, y - pad, x - pad, n, k], 5)

    near = T.compute((cb, h + 2 * pad, w + 2 * pad, q, b, g), padded, "near")
    c, r, s = T.reduce_axis(cb, "c"), T.reduce_axis(kernel, "r"), T.reduce_axis(kernel, "s")
    e, k = T.reduce_axis(q, "e"), T.reduce_axis(g, "k")

    def product(o: T.Expr, y: T.Expr, x: T.Expr, piece: T.Expr, n: T.Expr, m: T.Expr) -> T.Expr:
        value = near[c, y * stride + r, x * stride + s, e, n, k].astype("int32")
        return T.sum(value * weight[o, c, r, s, e, piece * g + m, k].astype("int32"), (c, r, s, e, k))

    acc = T.compute((ob, oh, ow, p, b, g), product, "acc")
    out = T.compute(acc.shape, lambda o, y, x, i, n, m: hw.requantised(acc[o, y, x, i, n, m], par[o, i * g + m]), "out")
    y = T.compute((ob * p, oh, ow, b, g), lambda o, y, x, n, m: out[o // p, y, x, o % p, n, m], "y")

    plan = T.create_schedule(y)
    plan[near].set_scope("inp")
    plan[acc].set_scope("acc")
    plan[out].set_scope("out")
    near_w, near_par = plan.cache_read(weight, "wgt", acc), plan.cache_read(par, "par", out)
    to, ty, tx, tc = tiles
    oo, yo, oi, yi = plan[y].tile(y.axes[0], y.axes[1], to * p, ty)
    xo, xi = plan[y].split(y.axes[2], tx)
    ob_, op = plan[y].split(oi, p)
    plan[y].reorder(oo, yo, xo, ob_, yi, xi, op)
    plan[y].vthread(yo)
    plan[y].tensorize(y.axes[3], hw.store(cfg))
    for stage in (out, acc, near_par):
        plan[stage].compute_at(plan[y], xo)
    plan[near_par].tensorize(near_par.axes[1], hw.load(cfg, "par"))
    plan[out].tensorize(out.axes[3], hw.requantise(cfg))
    co, ci = plan[acc].split(c, tc)
    plan[acc].reorder(co, *acc.axes[:3], ci, r, s, *acc.axes[3:], e, k)
    plan[acc].tensorize(acc.axes[3], hw.gemm(cfg))
    plan[near].compute_at(plan[acc], co)
    plan[near].tensorize(near.axes[4], hw.padded_load(cfg, "inp") if pad else hw.load(cfg, "inp"))
    plan[near_w].compute_at(plan[acc], co)
    plan[near_w].tensorize(near_w.axes[5], hw.load(cfg, "wgt"))
    return [data, weight, par], plan
