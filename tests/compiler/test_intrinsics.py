"""Scheduled expressions give the interpreter's results on the functional simulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from expressions import PAIR, TALL, TINY, WIDE, convolution, int8, matmul, matmul_arrays, parameters, scheduled
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler import expr as T
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.expr import loops
from celosia.compiler.tensorize import intrinsics as hw
from celosia.compiler.tensorize.intrinsic import Compute, Move, TensorIntrinsic
from celosia.compiler.tensorize.render import AcceleratorKernel, RenderError, render
from celosia.compiler.vthread.interleave import interleave
from celosia.driver.te.kernels import run
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, opcode_of
from celosia.sim.functional.fsim import FunctionalDevice

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # examples are small, and shrinking them is slow
INTERPRETED = 300  # elements of inputs up to which the interpreter is quick


def opcodes(kernel: AcceleratorKernel) -> list[Opcode | None]:
    return [opcode_of(int(row[0])) for row in kernel.code]


def on_device(cfg: Config, function: T.Function, *inputs: np.ndarray) -> AcceleratorKernel:
    """Return the kernel, after a comparison of device, LLVM, interpreter and the parsed text."""
    T.verify(function)
    again = T.parse(str(function), hw.declared(cfg))
    assert str(again) == str(function)
    expected = compile_function(interleave(function).expanded())(*inputs)
    if sum(t.size for t in function.inputs) < INTERPRETED:
        np.testing.assert_array_equal(T.interpret(again, *inputs)[0], expected[0])
    kernel = render(cfg, function)
    outputs, _ = run(kernel, FunctionalDevice(cfg, checking=True), *inputs)
    np.testing.assert_array_equal(outputs[0], expected[0])
    return kernel


@pytest.mark.parametrize("cfg", [TINY, WIDE, TALL], ids=lambda cfg: cfg.name)
def test_one_tile_of_a_matrix_product(cfg: Config) -> None:
    m, n, k = 1, cfg.block_out, cfg.block_in
    inputs, acc, y = matmul(cfg, m, n, k)
    kernel = on_device(cfg, T.lower(scheduled(cfg, inputs, acc, y, 1, 1, 1), inputs), *matmul_arrays(cfg, m, n, k))
    assert sorted(opcodes(kernel)) == [Opcode.LOAD] * 3 + [Opcode.GEMM, Opcode.VECTOR, Opcode.STORE]


@settings(max_examples=tries(10), deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(st.sampled_from([TINY, WIDE, TALL]), st.data())
def test_tiled_matrix_products(cfg: Config, data: st.DataObject) -> None:
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    tm, tn, tk = number(1, 3), number(1, 2), number(1, 2)
    threads = number(1, 3)
    m, n, k = tm * number(1, 3), tn * threads * number(1, 2) * cfg.block_out, tk * number(1, 3) * cfg.block_in
    inputs, acc, y = matmul(cfg, m, n, k)
    function = T.lower(scheduled(cfg, inputs, acc, y, tm, tn, tk, threads), inputs)
    kernel = on_device(cfg, function, *matmul_arrays(cfg, m, n, k))
    tiles = m // tm * (n // (tn * cfg.block_out))
    assert opcodes(kernel).count(Opcode.GEMM) == tiles * (k // (tk * cfg.block_in))
    assert opcodes(kernel).count(Opcode.VECTOR) == tiles


def test_virtual_threads_load_while_others_compute() -> None:
    """The loads of the second of two virtual threads come before the GEMM of the first, to other entries."""
    inputs, acc, y = matmul(TINY, 8, 16, 16)
    kernel = on_device(
        TINY, T.lower(scheduled(TINY, inputs, acc, y, 8, 1, 2, threads=2), inputs), *matmul_arrays(TINY, 8, 16, 16)
    )
    order = "".join(o.name[0] for o in opcodes(kernel) if o in (Opcode.LOAD, Opcode.GEMM))
    assert "LLLLGGLLLLGG" in order


# What is refused ----------------------------------------------------------------------------------------------


def refused(y: T.Tensor, intrinsic: loops.Declared, scopes: dict[T.Tensor, str], split: int = 4) -> str:
    """Return the reason why `intrinsic` does not match the innermost `split` elements of the last axis of `y`.

    All reductions are inside.
    """
    s = T.create_schedule(copy(y, "copy"))
    for tensor, scope in scopes.items():
        if tensor not in s.stages:
            continue
        s[tensor].set_scope(scope)
    inner = s[y].split(y.axes[-1], split)[1]
    s[y].reorder(inner, *(axis for axis in s[y].order if axis.reduce))
    s[y].tensorize(inner, intrinsic)
    with pytest.raises(ValueError) as error:
        T.lower(s)
    return str(error.value)


def copy(of: T.Tensor, name: str) -> T.Tensor:
    return T.compute(of.shape, lambda *i: of[i], name)


def test_what_is_not_a_gemm_says_why() -> None:
    x, w = T.placeholder((4, 4), "int8", "x"), T.placeholder((4, 4), "int8", "w")
    nx, nw = copy(x, "nx"), copy(w, "nw")
    k = T.reduce_axis(4, "k")
    scopes: dict[T.Tensor, str] = {nx: "inp", nw: "wgt"}

    def product(body: Callable[[T.Expr, T.Expr], T.Expr]) -> str:
        y = T.compute((4, 4), body, "y")
        return refused(y, hw.gemm(TINY), {**scopes, y: "acc"})

    def wide(e: T.Expr) -> T.Expr:
        return e.astype("int32")

    assert product(lambda i, j: T.max(wide(nx[i, k]) * wide(nw[j, k]), k)) == (
        "gemm is a reduction by sum, but y is computed by a reduction by max"
    )
    assert product(lambda i, j: T.sum(wide(nx[i, k]) + wide(nw[j, k]), k)).startswith("gemm computes (int32(inp[")
    assert product(lambda i, j: T.sum(wide(nx[i, k]) * wide(nw[k, j]), k)) == (
        "gemm has loops of 4 with steps 1 in inp, 1 in wgt; 4 with steps 1 in acc, 4 in wgt; "
        "found 4 with steps 1 in inp, 4 in wgt; 4 with steps 1 in acc, 1 in wgt"
    )
    assert product(lambda i, j: T.sum(wide(nx[i, k]) * wide(nx[j, k]), k)) == "gemm wants wgt in wgt, but nx is in inp"
    assert product(lambda i, j: T.sum(wide(x[i, k]) * wide(w[j, k]), k)) == "gemm wants inp in inp, but x is in dram"
    assert product(lambda i, j: T.sum(wide(x[i, k]) * wide(w[j, k]), k) + 1).endswith(
        "accumulates, so what follows must be a tensor of its own"
    )


def test_what_is_not_a_tile_says_why() -> None:
    x = T.placeholder((4, 10), "int8", "x")
    near = T.compute((4, 4), lambda i, j: x[i, j + 2], "near")
    assert refused(near, hw.load(TINY, "inp"), {near: "inp"}) == (
        "load_inp: tiles of src begin at multiples of 4 elements, not at x[i0, ((i1.o * 4) + 2)]"
    )
    near = T.compute((4, 4), lambda i, j: x[i, j * 2], "near")
    assert "found 4 with steps 1 in dst, 2 in src" in refused(near, hw.load(TINY, "inp"), {near: "inp"})
    near = T.compute((4, 4), lambda i, j: T.select(j < 2, x[i, j], 0), "near")
    assert refused(near, hw.padded_load(TINY, "inp"), {near: "inp"}) == (
        "padded_load_inp: inside is the same for the whole tile, but (((i1.o * 4) + i1.i) < 2) is not"
    )
    near = T.compute((4, 8), lambda i, j: x[i, j], "near")
    assert "found 8 with steps" in refused(near, hw.load(TINY, "inp"), {near: "inp"}, split=8)


def test_what_is_no_instruction_says_why() -> None:
    x = T.placeholder((4, 4), "int8", "x")
    y = T.compute((4, 4), lambda i, j: x[i, j] + T.wrap(1, "int8"), "y")
    with pytest.raises(RenderError, match=r"`y\[i0, i1\] = .*`.*tensorize"):
        render(TINY, T.lower(y))
    s = T.create_schedule(y)
    near = s.cache_read(x, "local", y)
    s[near].compute_at(s[y], y.axes[0])
    with pytest.raises(RenderError, match=r"x\.local.*local memory inside loops"):
        render(TINY, T.lower(s))
    big = T.placeholder((2000, 4), "int8", "big")
    z = copy(big, "z")
    s = T.create_schedule(z)
    near = s.cache_read(big, "inp", z)
    s[near].tensorize(near.axes[1], hw.load(TINY, "inp"))
    with pytest.raises(RenderError, match=r"big\.inp.*2000 entries of inp.*1024, 0"):
        render(TINY, T.lower(s))
    with pytest.raises(ValueError, match=r"Config tiny.*pair"):
        inputs, acc, out = matmul(TINY, 1, 4, 4)
        run(render(TINY, T.lower(scheduled(TINY, inputs, acc, out, 1, 1, 1), inputs)), FunctionalDevice(PAIR))


def test_an_intrinsic_says_all_of_itself() -> None:
    tile = T.placeholder((4,), "int8", "tile")
    copied = T.compute((4,), lambda i: tile[i], "copied")
    with pytest.raises(ValueError, match="odd: the memory of tile"):
        TensorIntrinsic("odd", copied, {"copied": "inp"}, Move(Opcode.LOAD))
    with pytest.raises(ValueError, match=r"odd: copied.*VECTOR"):
        TensorIntrinsic("odd", copied, {"copied": "out", "tile": "acc"}, Compute(Opcode.VECTOR, {"tile": "a"}))


def test_unrolled_loops_become_separate_instructions() -> None:
    inputs, acc, y = matmul(TINY, 4, 4, 16)
    s = scheduled(TINY, inputs, acc, y, 4, 1, 4)
    blocks = next(axis for axis in s[acc].order if axis.name == "k.i.o")
    s[acc].unroll(blocks)
    s[acc].reorder(blocks, acc.axes[0])
    kernel = on_device(TINY, T.lower(s, inputs), *matmul_arrays(TINY, 4, 4, 16))
    assert opcodes(kernel).count(Opcode.GEMM) == 4


# Convolutions -------------------------------------------------------------------------------------------------


@settings(max_examples=tries(10), deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(st.sampled_from([TINY, WIDE, TALL, PAIR]), st.data())
def test_convolutions(cfg: Config, data: st.DataObject) -> None:
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    kernel, stride = number(1, 3), number(1, 2)
    pad = number(0, kernel // 2)
    tiles = [number(1, 2), number(1, 3), number(1, 3), number(1, 2)]
    out = [tiles[1] * number(1, 2), tiles[2] * number(1, 2)]
    size = [(n - 1) * stride + kernel - 2 * pad for n in out]
    if min(size) < 1:
        return
    channels = tiles[3] * number(1, 2), tiles[0] * number(1, 2)
    inputs, plan = convolution(cfg, channels, (size[0], size[1]), kernel, stride, pad, tiles)
    arrays = *(int8(*t.shape) for t in inputs[:2]), parameters(cfg, channels[1] * cfg.block_out)
    on_device(cfg, T.lower(plan, inputs), *arrays)


def test_a_whole_convolution_is_one_gemm() -> None:
    """A convolution is one GEMM that uses all six loops of the instruction; the LOAD pads."""
    inputs, plan = convolution(TINY, (2, 2), (5, 6), 3, 1, 1, [2, 5, 6, 2])
    arrays = *(int8(*t.shape) for t in inputs[:2]), parameters(TINY, 8)
    kernel = on_device(TINY, T.lower(plan, inputs), *arrays)
    assert sorted(opcodes(kernel)) == [Opcode.LOAD] * 3 + [Opcode.GEMM, Opcode.VECTOR, Opcode.STORE]
    assert "pad_top=1 pad_bottom=1 pad_left=1 pad_right=1 pad_value=5" in kernel.listing()


# Pooling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [TINY, TALL, PAIR], ids=lambda cfg: cfg.name)
@pytest.mark.parametrize("cut", [False, True])
def test_pooling_is_a_vector_instruction(cfg: Config, cut: bool) -> None:
    """A pooling window is the reduction of one VECTOR instruction; a split reduction matches no instruction."""
    p, b, g = hw.tile_shape(cfg, "vin")
    data = T.placeholder((2 * p, 6, 7, b, g), "int8", "data")
    r, s = T.reduce_axis(3, "r"), T.reduce_axis(3, "s")

    def padded(c: T.Expr, y: T.Expr, x: T.Expr, i: T.Expr, n: T.Expr, k: T.Expr) -> T.Expr:
        inside = (y >= 1) & (y < 7) & (x >= 1) & (x < 8)
        return T.select(inside, data[c * p + i, y - 1, x - 1, n, k], -128)

    near = T.compute((2, 8, 9, p, b, g), padded, "near")
    out = T.compute((2, 3, 4, p, b, g), lambda c, y, x, *i: T.max(near[(c, y * 2 + r, x * 2 + s, *i)], (r, s)), "out")
    y = T.compute((2 * p, 3, 4, b, g), lambda c, y, x, n, k: out[c // p, y, x, c % p, n, k], "y")
    plan = T.create_schedule(y)
    plan[near].set_scope("vin")
    plan[out].set_scope("out")
    outer, inner = plan[y].split(y.axes[0], p)
    plan[y].reorder(outer, y.axes[1], y.axes[2], inner)
    plan[y].tensorize(y.axes[3], hw.store(cfg))
    for t in (near, out):
        plan[t].compute_at(plan[y], outer)
    plan[near].tensorize(near.axes[4], hw.padded_load(cfg, "vin"))
    plan[out].reorder(*out.axes[:3], r, s, *out.axes[3:])
    plan[out].tensorize(out.axes[3], hw.window_max(cfg))
    if cut:
        plan[out].unroll(r)
        with pytest.raises(RenderError, match=r"reduction.*one instruction"):
            render(cfg, T.lower(plan))
        return
    x = int8(*data.shape)
    kernel = on_device(cfg, T.lower(plan), x)
    assert opcodes(kernel).count(Opcode.VECTOR) == 2
    expected = np.full((*data.shape[:1], 8, 9, b, g), -128, np.int8)
    expected[:, 1:7, 1:8] = x
    windows = np.lib.stride_tricks.sliding_window_view(expected, (3, 3), (1, 2))[:, ::2, ::2].max((-2, -1))
    np.testing.assert_array_equal(run(kernel, FunctionalDevice(cfg), x)[0][0], windows)
