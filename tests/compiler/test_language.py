"""LLVM compiles kernels of the tile language for the CPU with the meaning that the numpy interpreter defines."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from benchmarks import language
from hypothesis import given, settings
from hypothesis import strategies as st
from language_kernels import add_kernel, both, interpreted, matmul_kernel, softmax_kernel
from thorough import paired, some, tries

import celosia.language as cl

RNG = np.random.default_rng(0)
layernorm, matmul, attention = language.layernorm, language.matmul.kernel, language.attention.kernel


@pytest.mark.parametrize("n", [1, 1000, 4096])
def test_add(n: int) -> None:
    x, y, out = RNG.random(n, np.float32), RNG.random(n, np.float32), np.zeros(n, np.float32)
    grid = lambda meta: (cl.cdiv(n, meta["BLOCK"]),)  # noqa: E731
    compiled, interpreted_output = both(lambda: add_kernel[grid](x, y, out, n, BLOCK=1024), out)
    assert np.array_equal(compiled, x + y) and np.array_equal(interpreted_output, x + y)


@pytest.mark.parametrize(("rows", "columns"), [(57, 781), (8, 64), (3, 1)])
def test_softmax_of_every_so_many_rows(rows: int, columns: int) -> None:
    x, out = RNG.standard_normal((rows, columns)).astype(np.float32), np.zeros((rows, columns), np.float32)
    block = 1 << (columns - 1).bit_length()
    run = lambda: softmax_kernel[(8,)](out, x, columns, columns, rows, columns, BLOCK=block, num_stages=4)  # noqa: E731
    compiled, interpreted_output = both(run, out)
    e = np.exp(x - x.max(1, keepdims=True))
    for output in (compiled, interpreted_output):
        np.testing.assert_allclose(output, e / e.sum(1, keepdims=True), rtol=2e-6)


@pytest.mark.parametrize(("activation", "size"), paired(["", "leaky_relu"], [(64, 128, 64), (50, 70, 45)]))
def test_matmul_in_groups_of_programs(activation: str, size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, b = RNG.standard_normal((m, k)).astype(np.float32), RNG.standard_normal((k, n)).astype(np.float32)
    c = np.zeros((m, n), np.float16)
    grid = lambda meta: (cl.cdiv(m, meta["BM"]) * cl.cdiv(n, meta["BN"]),)  # noqa: E731

    def run() -> None:
        matmul_kernel[grid](
            a, b, c, m, n, k, a.strides[0] // 4, a.strides[1] // 4, n, 1, n, 1, BM=32, BN=64, BK=32, GROUP=8,
            ACTIVATION=activation, num_warps=4,
        )  # fmt: skip

    compiled, interpreted_output = both(run, c)
    exact = a.astype(np.float64) @ b
    exact = np.where(exact >= 0, exact, 0.01 * exact) if activation else exact
    for output in (compiled, interpreted_output):
        np.testing.assert_allclose(output.astype(np.float64), exact, rtol=2e-3, atol=2e-4)


def test_layernorm_and_a_float_that_changes() -> None:
    x, w, b = (RNG.standard_normal(s).astype(np.float32) for s in ((5, 300), 300, 300))
    for eps in (1e-5, 0.5):
        out = np.zeros_like(x)
        run = lambda out=out, eps=eps: layernorm[(5,)](x, w, b, out, 300, eps, 512)  # noqa: E731
        compiled, interpreted_output = both(run, out)
        d = x - x.mean(1, keepdims=True)
        np.testing.assert_allclose(compiled, d / np.sqrt((d * d).mean(1, keepdims=True) + eps) * w + b, atol=2e-5)
        np.testing.assert_allclose(compiled, interpreted_output, atol=2e-5)
    assert len({key for key in layernorm.variants if b"1" not in key}) == 1


@pytest.mark.parametrize(("length", "columns"), some([(96, 32), (70, 32), (40, 64)], [(40, 64)]))
def test_attention(length: int, columns: int) -> None:
    q, k, v = (RNG.standard_normal((length, 16)).astype(np.float32) for _ in range(3))
    out = np.zeros_like(q)
    compiled, interpreted_output = both(
        lambda: attention[(cl.cdiv(length, 32),)](q, k, v, out, length, 0.25, 32, columns, 16), out
    )
    s = q.astype(np.float64) @ k.T * 0.25
    p = np.exp(s - s.max(1, keepdims=True))
    for output in (compiled, interpreted_output):
        np.testing.assert_allclose(output, p / p.sum(1, keepdims=True) @ v, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_beyond_the_edges(threads: int) -> None:
    kernel = cl.jit(matmul.function, target="cpu", threads=threads)
    a, b = RNG.standard_normal((37, 29)).astype(np.float32), RNG.standard_normal((29, 50)).astype(np.float32)
    c = np.full((37, 50), 7, np.float32)
    kernel[(3, 2)](a, b, c, 37, 50, 29, 16, 32, 8)
    np.testing.assert_allclose(c, a @ b, atol=1e-5)


# Memory -----------------------------------------------------------------------------------------------------------


@cl.jit(target="cpu")
def shifted(x, n, BLOCK: cl.constexpr):
    i = cl.program_id(0) * BLOCK + cl.arange(0, BLOCK)
    before = cl.load(x + i, mask=i < n)
    cl.store(x + i, before * 0, mask=i < n)
    cl.store(x + i, before + 1, mask=(i < n) & (i % 2 == 0))


def test_a_store_changes_no_earlier_load_and_nothing_beyond_its_mask() -> None:
    x = np.arange(20, dtype=np.int32)
    compiled, interpreted_output = both(lambda: shifted[(3,)](x, 17, 8), x)
    expected = np.where(np.arange(20) % 2 == 0, np.arange(20) + 1, 0)
    expected[17:] = [17, 18, 19]
    assert compiled.tolist() == interpreted_output.tolist() == expected.tolist()


def test_one_array_as_input_and_output() -> None:
    x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    add_kernel[(1,)](x, y, x, 100, 128)
    assert np.array_equal(x, np.arange(100) + 1)
    add_kernel[(1,)](x, y, np.zeros(100, np.float32), 100, 128)  # the same shapes, and no array twice
    assert np.array_equal(x, np.arange(100) + 1)
    add_kernel[(1,)](x, x, x, 100, 128)
    assert np.array_equal(x, 2 * (np.arange(100) + 1))


@cl.jit(target="cpu")
def gathered(x, index, y, n, BLOCK: cl.constexpr):
    i = cl.arange(0, BLOCK)
    at = cl.load(index + i, mask=i < n)
    cl.store(y + i, cl.load(x + at, mask=i < n, other=-1), mask=i < n)


def test_offsets_from_memory() -> None:
    x, index, y = np.arange(50, dtype=np.int32) * 3, RNG.permutation(50)[:20].astype(np.int32), np.zeros(20, np.int32)
    compiled, interpreted_output = both(lambda: gathered[(1,)](x, index, y, 20, 32), y)
    assert np.array_equal(compiled, 3 * index) and np.array_equal(interpreted_output, 3 * index)


@cl.jit(target="cpu")
def scaled(x, y, factor: cl.constexpr, more):
    cl.store(y + cl.arange(0, 4), cl.load(x + cl.arange(0, 4)) * factor + more)


def test_every_value_of_a_constexpr_is_a_kernel_of_its_own() -> None:
    x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    for factor in (1, True, 0.5, 2.0, 0.5):
        for more in (1.0, 2.5):
            scaled[(1,)](x, y, factor, more)
            assert np.array_equal(y, x * np.float32(factor) + np.float32(more))
    assert len(scaled.variants) == 4


@pytest.mark.parametrize(
    ("how", "other"), [("cpu", 0), ("cpu", 5), ("interpreted", 0), ("interpreted", 5), ("accelerator", 0)]
)  # the accelerator takes weights with the zero point 0, and says so
def test_products_subtract_zero_points(how: str, other: int) -> None:
    """Products subtract the zero points of both sides, for transposed blocks, beyond the end, and in a loop."""

    def product(x, w, par, y, BK: cl.constexpr):
        acc, a = cl.zeros((16, 16), cl.int32), cl.load(x, (0, 0), (16, BK), other=x.zero_point)
        for k in cl.range(0, 40, BK):
            a = cl.load(x, (0, k), (16, BK), other=x.zero_point)
            acc = cl.dot(a, cl.load(w, (0, k), (16, BK), other=w.zero_point).T, acc)
        cl.store(y, (0, 0), cl.requantise(acc, cl.load(par, (0,), (16,))))

    rng = np.random.default_rng(0)
    x, w = (rng.integers(-128, 128, (16, 40)).astype(np.int8) for _ in range(2))
    y = np.zeros((16, 16), np.int8)
    bias = rng.integers(-1000, 1000, 16)
    par = cl.parameters(bias=bias, scale=np.full(16, 2.0**-10, np.float32))
    with interpreted() if how == "interpreted" else nullcontext():
        kernel = cl.jit(product, target="cpu" if how == "interpreted" else how, config="tiny")
        kernel[(1,)](cl.quantised(x, 3), cl.quantised(w, other), par, y, 16)
    exact = ((x.astype(np.int64) - 3) @ (w.astype(np.int64) - other).T + bias) * 2.0**-10
    assert np.array_equal(y, np.clip(np.rint(exact), -128, 127))  # a power of two: no rounding but this one


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_erf(dtype: Any) -> None:
    @cl.jit(target="cpu")
    def of(x, y, N: cl.constexpr):
        at = cl.arange(0, N)
        cl.store(y + at, cl.erf(cl.load(x + at)))

    x = np.concatenate([np.linspace(-6, 6, 1001), [0.0, -0.0, np.inf, -np.inf, np.nan]]).astype(dtype)
    expected = np.array([math.erf(float(each)) for each in x])
    for running in (nullcontext, interpreted):
        y = np.zeros_like(x)
        with running():
            of[(1,)](x, y, len(x))
        np.testing.assert_allclose(y, expected, rtol=0, atol=2 * float(np.finfo(dtype).eps), equal_nan=True)


def test_quantised_arrays_that_are_one() -> None:
    @cl.jit(target="cpu")
    def shift(x, y):
        at = cl.arange(0, 4)
        cl.store(y + at, cl.load(x + at) + (x.zero_point - y.zero_point))

    a, b = np.arange(4, dtype=np.int8), np.zeros(4, np.int8)
    shift[(1,)](cl.quantised(a, 3), cl.quantised(b, 1))
    assert b.tolist() == [2, 3, 4, 5]
    with pytest.raises(cl.LanguageError, match=r"y.*shares memory with x"):
        shift[(1,)](cl.quantised(a, 3), cl.quantised(a, 1))
    shift[(1,)](cl.quantised(a, 3), cl.quantised(a, 3))
    assert a.tolist() == [0, 1, 2, 3]


@cl.jit(target="cpu")
def with_its_transpose(x, y, LOOP: cl.constexpr):
    a = cl.load(x, (0, 0), (8, 8))
    e = cl.exp(a - cl.max(a))
    for _ in cl.range(LOOP):
        e = cl.dot(a, a, e * 0.5 + (e * 0.25).T)
    e = cl.exp(e * 0.001)
    cl.store(y, (0, 0), e / cl.sum(e, axis=1)[:, None] + e.T)


@pytest.mark.parametrize("loop", [0, 1, 3])
def test_what_is_read_elsewhere_is_not_written_over(loop: int) -> None:
    x, y = RNG.standard_normal((8, 8)).astype(np.float32), np.zeros((8, 8), np.float32)
    compiled, interpreted_output = both(lambda: with_its_transpose[(1,)](x, y, loop), y)
    np.testing.assert_allclose(compiled, interpreted_output, rtol=1e-5)


# Loops ------------------------------------------------------------------------------------------------------------


@cl.jit(target="cpu")
def fibonacci(y, N: cl.constexpr):
    a, b = cl.full((4,), 0, cl.int32) + cl.arange(0, 4).to(cl.int32), cl.full((4,), 1, cl.int32)
    for _ in cl.range(N):
        a, b = b, a + b
    cl.store(y + cl.arange(0, 4), a)


@cl.jit(target="cpu")
def turned(y, N: cl.constexpr):
    a = cl.arange(0, 6).to(cl.int32).reshape(2, 3)
    b = a.T
    for k in cl.range(N):
        a, b = (b + k.to(cl.int32)).reshape(2, 3), a.T  # each is made of the other, elsewhere
        for j in cl.range(k, N):
            a = a + j.to(cl.int32)
    cl.store(y, (0, 0), a)
    cl.store(y, (2, 0), b.reshape(2, 3))


@cl.jit(target="cpu")
def doubled(x, N: cl.constexpr):
    a = cl.load(x + cl.arange(0, 4))
    for _ in cl.static_range(N):
        a = (a + a) ^ a
    cl.store(x + cl.arange(0, 4), a)


def test_a_chain_of_what_is_read_twice() -> None:
    x = np.arange(4, dtype=np.int32)
    compiled, interpreted_output = both(lambda: doubled[(1,)](x, 40), x)
    assert np.array_equal(compiled, interpreted_output)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_what_loops_carry(count: int) -> None:
    y = np.zeros(4, np.int32)
    compiled, interpreted_output = both(lambda: fibonacci[(1,)](y, count), y)
    a, b = np.arange(4), np.ones(4, np.int64)
    for _ in range(count):
        a, b = b, a + b
    assert compiled.tolist() == interpreted_output.tolist() == a.tolist()
    z = np.zeros((4, 3), np.int32)
    compiled, interpreted_output = both(lambda: turned[(1,)](z, count), z)
    assert compiled.tolist() == interpreted_output.tolist()


# Random kernels ---------------------------------------------------------------------------------------------------

BINARY = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "min": cl.minimum,
    "max": cl.maximum, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "where": lambda a, b: cl.where(a < b, a, b),
    "shl": lambda a, b: a << (b & 7), "shr": lambda a, b: a >> (b & 7),
}  # fmt: skip
UNARY = {
    "neg": lambda a: -a, "not": lambda a: ~a, "abs": cl.abs, "int8": lambda a: a.to(cl.int8).to(cl.int32),
    "uint16": lambda a: a.to(cl.uint16).to(cl.int32), "trans": lambda a: a.T.reshape(*a.shape),
    "float": lambda a: (a.to(cl.float32) * 0.5).to(cl.int32), "rows": lambda a: a + cl.max(a, axis=1)[:, None],
    "columns": lambda a: a - cl.sum(a, axis=0)[None, :], "least": lambda a: a ^ cl.min(a),
    "shares": lambda a: shares(a),
}  # fmt: skip


def shares(a):
    """Use a value in two reductions and in their result."""
    root = cl.sqrt(cl.abs(a).to(cl.float32)).to(cl.int32)
    return root - cl.max(root, axis=1)[:, None] + (root * 3 + a) // (cl.sum(root, axis=1)[:, None] + 1)


@cl.jit(target="cpu")
def random_kernel(x, y, o, M, N, BM: cl.constexpr, BN: cl.constexpr, STEPS: cl.constexpr, LOOP: cl.constexpr):
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    a, b = cl.load(x, (m, n), (BM, BN), other=5), cl.load(y, (m, n), (BM, BN)).to(cl.int32)

    def steps(a, b):
        for name in STEPS:
            a, b = (BINARY[name](b, a), a) if name in BINARY else (UNARY[name](a), b)
        return a, b

    if LOOP:
        for k in cl.range(0, LOOP):
            a, b = steps(a + k.to(cl.int32), b)
    else:
        a, b = steps(a, b)
    cl.store(o, (m, n), a ^ b)


@settings(max_examples=tries(10))
@given(
    st.lists(st.sampled_from([*BINARY, *UNARY]), min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 40),
    st.integers(1, 70), st.sampled_from([1, 4, 16]), st.sampled_from([8, 24, 64]), st.integers(0, 1 << 30),
)  # fmt: skip
def test_random_kernels_mean_the_same(
    steps: list[str], loop: int, m: int, n: int, bm: int, bn: int, seed: int
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    x, y = rng.integers(-(2**31), 2**31, (m, n)).astype(np.int32), rng.integers(-128, 128, (m, n)).astype(np.int8)
    o = np.zeros((m, n), np.int32)
    grid = (cl.cdiv(m, bm), cl.cdiv(n, bn))
    compiled, interpreted_output = both(lambda: random_kernel[grid](x, y, o, m, n, bm, bn, tuple(steps), loop), o)
    assert np.array_equal(compiled, interpreted_output)


@cl.jit(target="cpu")
def integer_product(a, b, c, K, BM: cl.constexpr, BN: cl.constexpr, BK: cl.constexpr):
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    acc = cl.full((BM, BN), -3, cl.int32)
    for k in cl.range(0, K, BK):
        acc = cl.dot(cl.load(a, (m, k), (BM, BK)), cl.load(b, (n, k), (BN, BK)).T, acc)
    cl.store(c, (m, n), acc)


@settings(max_examples=tries(4))
@given(
    st.integers(1, 40), st.integers(1, 70), st.integers(1, 50), st.sampled_from([1, 7, 16]), st.sampled_from([5, 64])
)
def test_random_products_mean_the_same(m: int, n: int, k: int, bm: int, bn: int) -> None:
    rng = np.random.default_rng(m * n * k)
    a, b = rng.integers(-128, 128, (m, k)).astype(np.int8), rng.integers(-128, 128, (n, k)).astype(np.int8)
    c = np.zeros((m, n), np.int32)
    compiled, interpreted_output = both(
        lambda: integer_product[(cl.cdiv(m, bm), cl.cdiv(n, bn))](a, b, c, k, bm, bn, 16), c
    )
    assert np.array_equal(compiled, interpreted_output) and np.array_equal(
        compiled, a.astype(np.int32) @ b.T.astype(np.int32) - 3
    )


# Calls ------------------------------------------------------------------------------------------------------------


def test_the_next_call_costs_little() -> None:
    x = np.ones(16, np.float32)
    out = np.zeros_like(x)
    call = lambda: add_kernel[(1,)](x, x, out, 16, 16)  # noqa: E731
    call()
    known = len(add_kernel.variants)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    assert len(add_kernel.variants) == known
    assert min(times) < 50e-6


def test_the_interpreter_prints_values(capsys: pytest.CaptureFixture[str]) -> None:
    @cl.jit(target="cpu")
    def shown(x):
        print(cl.load(x + cl.arange(0, 3)))
        cl.store(x + 0, 1)

    with interpreted():
        shown[(1,)](np.array([4, 5, 6], np.int32))
    assert capsys.readouterr().out == "[4 5 6]\n"
