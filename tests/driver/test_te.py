"""Programs from the papers on TVM and VTA, and Halide's blur, equal numpy for several sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from celosia import te
from celosia.hw.spec.config import Config

Array = NDArray[Any]


def digits(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Draw numbers whose sums of products are exact in float32."""
    return np.random.default_rng(sum(shape)).integers(-9, 9, shape).astype(dtype)


def ran(kernel: te.BuiltKernel, *inputs: Array, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    output = np.full(shape, 77, dtype)
    kernel(*inputs, output)
    return output


def test_the_matrix_product_of_the_paper() -> None:
    m, n, h = te.var("m"), te.var("n"), te.var("h")
    A = te.placeholder((m, h), name="A")
    B = te.placeholder((n, h), name="B")
    k = te.reduce_axis((0, h), name="k")
    C = te.compute((m, n), lambda y, x: te.sum(A[k, y] * B[k, x], axis=k))
    kernel = te.build(te.create_schedule(C.op), [A, B, C])
    for size in (1, 24):
        a, b = digits((size, size)), digits((size, size)) + 1
        assert np.array_equal(ran(kernel, a, b, shape=(size, size)), a.T @ b)
    with pytest.raises(ValueError, match=r"A at 0 to 5 of dimension 0.*4: A\[k, y\]"):
        ran(kernel, digits((4, 6)), digits((3, 6)), shape=(4, 3))


Sizes = tuple[Any, Any, Any]


def gemm8x8(transposed: bool, dtype: str = "float32", acc: str = "float32") -> Any:
    w, x = te.placeholder((8, 8), dtype), te.placeholder((8, 8), dtype)
    k = te.reduce_axis((0, 8))
    left, right = ((lambda i: w[k, i]), (lambda j: x[k, j])) if transposed else (lambda i: w[i, k], lambda j: x[j, k])
    y = te.compute((8, 8), lambda i, j: te.sum(left(i).astype(acc) * right(j).astype(acc), axis=k))

    def gemm_intrin_lower(inputs: Any, outputs: Any) -> Any:
        ww_ptr = inputs[0].access_ptr("r")
        xx_ptr = inputs[1].access_ptr("r")
        zz_ptr = outputs[0].access_ptr("w")
        compute = te.hardware_intrin("gemm8x8", ww_ptr, xx_ptr, zz_ptr)
        reset = te.hardware_intrin("fill_zero", zz_ptr)
        update = te.hardware_intrin("fuse_gemm8x8_add", ww_ptr, xx_ptr, zz_ptr)
        return compute, reset, update

    return te.decl_tensor_intrin(y.op, gemm_intrin_lower)


def tiled(sizes: Sizes, transposed: bool, intrinsic: Any) -> te.BuiltKernel:
    """Return a schedule with tiling, caches and tensorization, in the paper's order."""
    m, n, h = sizes
    A = te.placeholder((h, m) if transposed else (m, h), name="A")
    B = te.placeholder((h, n) if transposed else (n, h), name="B")
    k = te.reduce_axis((0, h), name="k")
    left, right = (lambda y: A[k, y], lambda x: B[k, x]) if transposed else (lambda y: A[y, k], lambda x: B[x, k])
    C = te.compute((m, n), lambda y, x: te.sum(left(y) * right(x), axis=k), name="C")
    y, x = C.op.axis
    s = te.create_schedule(C.op)
    _, _, ko, yi, _, _ = s[C].tile(y, x, k, 8, 8, 8)
    CL = s.cache_write(C, "acc")
    AL = s.cache_read(A, "inp")
    BL = s.cache_read(B, "wgt")
    _, xo, _, _ = s[C].tile(y, x, 8, 8)
    s[CL].compute_at(s[C], xo)
    s[AL].compute_at(s[CL], ko)
    s[BL].compute_at(s[CL], ko)
    s[CL].tensorize(yi, intrinsic)
    return te.build(s, [A, B, C])


@pytest.mark.parametrize("transposed", (False, True))
def test_tiles_caches_and_an_intrinsic_that_the_program_declares(transposed: bool) -> None:
    kernel = tiled((te.var("m"), te.var("n"), te.var("h")), transposed, gemm8x8(transposed))
    for m, n, h in ((8, 8, 8), (12, 24, 40)):
        a, b = digits((m, h)), digits((n, h))
        given = (a.T.copy(), b.T.copy()) if transposed else (a, b)
        assert np.array_equal(ran(kernel, *given, shape=(m, n)), a @ b.T)
    with pytest.raises(ValueError, match=r"tiles.*gemm8x8"):
        tiled((8, 8, 12), transposed, gemm8x8(transposed))
    with pytest.raises(ValueError, match=r"gemm8x8.*8 with steps.*8 with steps"):
        tiled((16, 16, 16), transposed, gemm8x8(not transposed))


def blocked(env: te.Environment, sizes: Sizes, intrinsic: Any, threads: int = 0) -> tuple[Any, list[te.TensorExpr]]:
    """Return VTA's product of blocks, with `threads` virtual threads over blocks of channels."""
    o, m, n = sizes
    A = te.placeholder((o, n, env.BATCH, env.BLOCK_IN), name="A", dtype=env.inp_dtype)
    B = te.placeholder((m, n, env.BLOCK_OUT, env.BLOCK_IN), name="B", dtype=env.wgt_dtype)
    A_buf = te.compute((o, n, env.BATCH, env.BLOCK_IN), lambda *i: A(*i), "A_buf")
    B_buf = te.compute((m, n, env.BLOCK_OUT, env.BLOCK_IN), lambda *i: B(*i), "B_buf")
    ko = te.reduce_axis((0, n), name="ko")
    ki = te.reduce_axis((0, env.BLOCK_IN), name="ki")
    shape = (o, m, env.BATCH, env.BLOCK_OUT)
    C_buf = te.compute(
        shape,
        lambda bo, co, bi, ci: te.sum(
            A_buf[bo, ko, bi, ki].astype(env.acc_dtype) * B_buf[co, ko, ci, ki].astype(env.acc_dtype), axis=[ko, ki]
        ),
        "C_buf",
    )
    C_out = te.compute(shape, lambda *i: te.clip(C_buf(*i), -128, 127).astype(env.out_dtype), "C_out")
    C = te.compute(shape, lambda *i: C_out(*i), "C")
    s = te.create_schedule(C.op)
    s[A_buf].set_scope(env.inp_scope)
    s[B_buf].set_scope(env.wgt_scope)
    s[C_buf].set_scope(env.acc_scope)
    s[C_out].set_scope(env.out_scope)
    if threads:
        co, tx = s[C].split(s[C].op.axis[1], factor=threads)
        s[C].reorder(co, tx, s[C].op.axis[0])
        s[C].bind(tx, te.thread_axis("vthread"))
        s[C_buf].compute_at(s[C], tx)
        s[C_out].compute_at(s[C], tx)
    s[A_buf].compute_at(s[C_buf], ko)
    s[B_buf].compute_at(s[C_buf], ko)
    for copied in (A_buf, B_buf, C):
        s[copied].pragma(s[copied].op.axis[0], env.dma_copy)
    bo, co, bi, ci = s[C_buf].op.axis
    s[C_buf].reorder(ko, bo, co, bi, ci, ki)
    s[C_buf].tensorize(bi, intrinsic)
    s[C_out].tensorize(s[C_out].op.axis[2], env.clip)
    return s, [A, B, C]


def check_blocked(kernel: te.BuiltKernel, env: te.Environment, o: int, m: int, n: int) -> None:
    a = digits((o, n, env.BATCH, env.BLOCK_IN), np.int8)
    b = digits((m, n, env.BLOCK_OUT, env.BLOCK_IN), np.int8)
    wanted = np.einsum("onbk,mnck->ombc", a.astype(int), b.astype(int)).clip(-128, 127)
    assert np.array_equal(ran(kernel, a, b, shape=wanted.shape, dtype=np.int8), wanted)


@pytest.mark.parametrize("device", ("functional", "timed", pytest.param("rtl", marks=pytest.mark.thorough)))
def test_virtual_threads_on_the_accelerator(device: str) -> None:
    env = te.accelerator("tiny")
    cycles = {}
    for threads in (0, 2):
        s, args = blocked(env, (te.var("o"), te.var("m"), te.var("n")), env.gemm, threads)
        kernel = te.build(s, args, env, device)
        for sizes in ((1, 2, 3), (4, 4, 8)):
            check_blocked(kernel, env, *sizes)
        assert kernel.counters is not None
        cycles[threads] = kernel.counters.cycles
        on_cpu = te.build(s, args)
        check_blocked(on_cpu, env, 4, 4, 8)
    assert "vthread" in str(te.lower(*blocked(env, (4, 4, 8), env.gemm, 2)))
    assert (cycles[2] is None) == (device == "functional")


def test_an_intrinsic_that_is_declared_becomes_the_instruction_that_does_it() -> None:
    env = te.accelerator(Config(batch=8, block_in=8, block_out=8))
    declared = gemm8x8(False, "int8", "int32")
    kernel = te.build(*blocked(env, (2, 3, 2), declared), env)
    check_blocked(kernel, env, 2, 3, 2)
    assert "GEMM" in kernel.compiled({}).listing()
    check_blocked(te.build(*blocked(env, (2, 3, 2), declared)), env, 2, 3, 2)
    other = te.accelerator(Config(batch=8, block_in=8, block_out=16))  # whose weights are of another shape
    with pytest.raises(ValueError, match=r"gemm8x8.*gemm has loops"):
        te.build(*blocked(env, (2, 3, 2), declared), other)


def test_blur() -> None:
    h, w = te.var("h"), te.var("w")
    image = te.placeholder((h, w), "uint16", name="image")
    bx = te.compute((h, w - 2), lambda y, x: (image[y, x] + image[y, x + 1] + image[y, x + 2]) / 3, name="bx")
    by = te.compute((h - 2, w - 2), lambda y, x: (bx[y, x] + bx[y + 1, x] + bx[y + 2, x]) / 3, name="by")
    s = te.create_schedule(by.op)
    yo, xo, _, xi = s[by].tile(*by.op.axis, 32, 256)
    s[by].vectorize(s[by].split(xi, 8)[1])
    s[by].parallel(yo)
    s[bx].compute_at(s[by], xo)
    s[bx].vectorize(s[bx].split(bx.op.axis[1], 8)[1])
    kernel = te.build(s, [image, by])
    for shape in ((3, 3), (40, 300), (66, 530)):
        a = np.random.default_rng(1).integers(0, 1 << 12, shape).astype(np.uint16)
        across = (a[:, :-2] + a[:, 1:-1] + a[:, 2:]) // 3
        wanted = (across[:-2] + across[1:-1] + across[2:]) // 3
        assert np.array_equal(ran(kernel, a, shape=wanted.shape, dtype=np.uint16), wanted)
    with pytest.raises(ValueError, match=r"\[3, -1\]"):
        ran(kernel, np.zeros((5, 1), np.uint16), shape=(3, 1), dtype=np.uint16)


def test_words_of_programs_written_elsewhere() -> None:
    """A padded convolution with conditions, functions, a read index and an unused argument compiles."""
    x, weights, which = (
        te.placeholder(shape, dtype, name)
        for shape, dtype, name in (((3, 6, 6), np.float32, "x"), ((4, 3, 3, 3), "float32", "w"), ((5,), "int32", "i"))
    )
    unread = te.placeholder((2,), name="unread")
    padded = te.compute(
        (3, 8, 8),
        lambda c, i, j: te.if_then_else(te.all(i >= 1, i < 7, j >= 1, j < 7), x[c, i - 1, j - 1], 0.0),
        name="padded",
    )
    rc, ry, rx = (te.reduce_axis((0, 3), name=name) for name in ("rc", "ry", "rx"))
    y = te.compute(
        (4, 6, 6),
        lambda o, i, j: te.sum(padded[rc, i + ry, j + rx] * weights[o, rc, ry, rx], axis=[rc, ry, rx]),
        name="y",
    )
    hundredth = te.const(0.01, "float32")
    z = te.compute(
        (5, 36), lambda b, p: te.exp(y[which[b], te.floordiv(p, 6), te.floormod(p, 6)] * hundredth), name="z"
    )
    s = te.create_schedule(z.op)
    s[padded].compute_inline()
    kernel = te.build(s, [x, unread, weights, which, z], "llvm", name="conv")
    a, b, rows = digits((3, 6, 6)), digits((4, 3, 3, 3)), np.array([3, 0, 0, 2, 1], np.int32)
    around = np.pad(a, ((0, 0), (1, 1), (1, 1)))
    wanted = sum(
        np.einsum("oc,cij->oij", b[:, :, i, j], around[:, i : i + 6, j : j + 6]) for i in range(3) for j in range(3)
    )
    found = ran(kernel, a, digits((2,)), b, rows, shape=(5, 36))
    np.testing.assert_allclose(found, np.exp(wanted[rows].reshape(5, 36) * np.float32(0.01)), rtol=1e-6)
    assert str(kernel).startswith("conv(x(3, 6, 6): float32, ")
    assert "exp" in str(te.lower(s, [x, weights, which, z], simple_mode=True))


def scaled() -> tuple[te.TensorExpr, te.TensorExpr, te.TensorSchedule]:
    n = te.var("n")
    a = te.placeholder((n, 4), name="a")
    b = te.compute((n, 4), lambda y, x: te.select(y < n - 1, a[y + 1, x], 0.0), name="b")
    return a, b, te.create_schedule(b)


def test_errors_are_a_sentence() -> None:
    a, b, s = scaled()
    kernel = te.build(s, [a, b])
    x = digits((5, 4))
    assert np.array_equal(ran(kernel, x, shape=(5, 4)), [*x[1:], np.zeros(4)])  # what is selected away is not read
    loops = s[b]
    mistakes: list[tuple[Any, str]] = [
        (lambda: loops.split("z", 4), r"b: z is not one of the loops \['y', 'x'\]"),
        (lambda: loops.split("y", 0), "b: split y by 0"),
        (lambda: loops.split("y"), "b: split y by a factor or into nparts"),
        (lambda: loops.split("y", nparts=2), "b: y has no 2 parts while its size is open"),
        (lambda: loops.set_scope("shared"), "no memory is called 'shared'"),
        (lambda: te.thread_axis("threadIdx.x"), "no loop is bound to 'threadIdx.x': virtual threads"),
        (lambda: te.reduce_axis((1, 4), "k"), "k begins at 1, not at 0"),
        (lambda: te.compute((2, 2), lambda y: a[y, 0], "c"), "c has 2 dimensions, and its function 1 parameters"),
        (lambda: te.build(s, [a]), "b is computed, but not among the arguments"),
        (lambda: te.build(s, [b])(x), r"placeholders \['a'\] are read but not among"),
        (lambda: kernel(x), "1 arguments given, 2 expected"),
        (lambda: ran(kernel, x, shape=(4, 4)), r"b: float32\(4, 4\) given, float32\(5, 4\) expected"),
        (lambda: ran(kernel, x.astype(int), shape=(5, 4)), r"a: int64\(5, 4\) given, float32\(5, 4\) expected"),
        (lambda: kernel([1], x), "a is an array, not list"),
        (lambda: te.build(s, [a, b], "tiny")(x, x), "tensorize it"),
        (lambda: te.lower(s, [a, b]), "the size n is not known: .*; make the variable an argument, too"),
        (lambda: te.placeholder((2.5,), name="x"), "x has a size of 2.5: that is a whole number"),
        (lambda: te.placeholder((-3,), name="x"), r"x would have the shape \[-3\]"),
        (lambda: te.placeholder((3,), "floaty", "x"), "x has the type 'floaty', which is none"),
        (lambda: te.compute((4,), lambda i: a[a[i, 0], i], "c"), r"a is indexed with a\[i, 0\], a float32"),
        (lambda: te.compute((4,), lambda i: a[i, 0.5], "c"), "a is indexed with 0.5: that is a whole number"),
        (lambda: te.compute((4,), lambda i: (a[i, 0], a[i, 1]), "c"), "c is made of elements, and .* gives tuple"),
        (lambda: te.compute((4,), lambda i: te.const(1, "int8") + 300, "c"), "c: 300 is no int8"),
        (lambda: te.var("alpha", "float32"), "alpha is a size, and no float32"),
        (lambda: loops.reorder([*b.op.axis]), "loops are given one by one"),
    ]  # fmt: skip
    for mistake, words in mistakes:
        with pytest.raises(ValueError, match=words) as raised:
            mistake()
        assert "\n" not in str(raised.value)
    lacking: list[tuple[Any, str]] = [
        (lambda: loops.rfactor("y"), r"a stage has no primitive 'rfactor'; there are .*bind, .*vectorize"),
        (lambda: s.rfactor(b, "y"), "a schedule has no 'rfactor': it has cache_read"),
        (lambda: te.scan, "celosia.te has no 'scan'; docs/expressions.md"),
        (lambda: te.accelerator("tiny").alu, "the accelerator has no 'alu'; it has gemm"),
    ]
    for mistake, words in lacking:
        with pytest.raises(AttributeError, match=words):
            mistake()
