"""Kernels on the accelerator give the interpreter's bytes on each device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks.language import conv3x3, linear
from hypothesis import given, settings
from hypothesis import strategies as st
from language_kernels import both, fused, maxpool, product, table_and_residual, window
from thorough import paired, tries

import celosia.language as cl

CONFIGS = ("tiny", "pynq")
FUNCTIONS = (linear, fused, conv3x3, table_and_residual, window, maxpool, product)
KERNELS = {(f.__name__, c): cl.jit(f, config=c) for f in FUNCTIONS for c in CONFIGS}


def bytes_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-128, 128, shape).astype(np.int8)


def parameters(rng: np.random.Generator, columns: int, depth: int) -> np.ndarray:
    return cl.parameters(rng.integers(-1000, 1000, columns), rng.random(columns) / (30 * depth**0.5))


def run_linear(config: str, m: int, n: int, k: int, bm: int, bn: int, device: Any) -> Any:
    rng = np.random.default_rng(m * n + k)
    x, w, par = bytes_of(rng, m, k), bytes_of(rng, n, k), parameters(rng, n, k)
    y = np.zeros((m, n), np.int8)
    grid = lambda meta: (cl.cdiv(m, meta["BM"]), cl.cdiv(n, meta["BN"]))  # noqa: E731
    reports = []

    def run() -> None:
        quantised_x, out = cl.quantised(x, 3), cl.quantised(y, -5)
        reports.append(
            KERNELS["linear", config][grid](quantised_x, w, par, out, m, n, k, BM=bm, BN=bn, device=device).report
        )

    compiled, interpreted_output = both(run, y)
    assert np.array_equal(compiled, interpreted_output)
    assert len(np.unique(compiled)) > 10
    return reports[0]


@pytest.mark.parametrize(("config", "size"), paired(CONFIGS, [(50, 40, 72), (33, 16, 16), (64, 64, 64), (1, 100, 256)]))
def test_linear_in_cycles(config: str, size: tuple[int, int, int]) -> None:
    m, n, k = size
    functional = run_linear(config, m, n, k, 16, 16, "functional")
    timed = run_linear(config, m, n, k, 16, 16, "timed")
    assert functional["cycles"] is None and timed["cycles"] > 0
    assert timed["instructions"] == functional["instructions"]


@pytest.mark.rtl
@pytest.mark.parametrize(("m", "n", "k"), [(32, 32, 32), (13, 20, 24)])
def test_linear_on_the_rtl(m: int, n: int, k: int) -> None:
    assert run_linear("tiny", m, n, k, 16, 16, "rtl")["cycles"] > 0


@settings(max_examples=tries(12))
@given(
    st.sampled_from(CONFIGS), st.integers(1, 40), st.integers(1, 60), st.integers(1, 70), st.sampled_from([1, 8, 16]),
    st.sampled_from([16, 32]), st.sampled_from([2, 16, 24]), st.sampled_from([(-128, 127), (-3, 100)]),
    st.booleans(), st.booleans(), st.integers(-128, 127),
)  # fmt: skip
def test_random_products_with_what_follows(
    config: str, m: int, n: int, k: int, bm: int, bn: int, step: int, clip: tuple[int, int], lookup: bool,
    residual: bool, zero: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(m * n * k)
    x, w, par, table, r = (
        bytes_of(rng, m, k),
        bytes_of(rng, k, n),
        parameters(rng, n, k),
        bytes_of(rng, 256),
        bytes_of(rng, m, n),
    )
    y = np.zeros((m, n), np.int8)

    def run() -> None:
        kernel = KERNELS["fused", config][(cl.cdiv(m, bm), cl.cdiv(n, bn))]
        quantised_x, out = cl.quantised(x, zero), cl.quantised(y, zero)
        kernel(quantised_x, w, par, table, r, out, m, n, k, bm, bn, clip, lookup, residual, step)

    compiled, interpreted_output = both(run, y)
    assert np.array_equal(compiled, interpreted_output)


@pytest.mark.parametrize(("config", "size"), paired(CONFIGS, [(6, 7, 16, 16), (5, 4, 20, 40)]))
def test_a_convolution(config: str, size: tuple[int, int, int, int]) -> None:
    h, w, c, n = size
    rng = np.random.default_rng(h * w)
    x, weights, par = bytes_of(rng, h, w, c), bytes_of(rng, n, 3, 3, c), parameters(rng, n, 9 * c)
    y = np.zeros((h, w, n), np.int8)

    def run() -> None:
        kernel = KERNELS["conv3x3", config][(cl.cdiv(h, 4), cl.cdiv(n, 16))]
        kernel(cl.quantised(x, 7), weights, par, cl.quantised(y, 1), h, w, c, n, 4, 16)

    compiled, interpreted_output = both(run, y)
    assert np.array_equal(compiled, interpreted_output)
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)), constant_values=7).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(0, 1))
    sums = np.einsum("hwcyx,nyxc->hwn", windows - 7, weights.astype(np.int64))
    bias = (par & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    scale = np.ldexp(
        ((par >> np.uint64(32)) & np.uint64(0xFFFFFF)).astype(np.float64), -(par >> np.uint64(56)).astype(int)
    )
    exact = (sums + bias) * scale
    inside = np.abs(exact - np.floor(exact) - 0.5) > 1e-4  # no ties
    assert np.array_equal(compiled[inside], np.clip(np.rint(exact) + 1, -128, 127)[inside])


STRIDES = st.sampled_from([(1, 1), (2, 2), (1, 2), (3, 2)])
WINDOWS = st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2), (3, 3)])


@settings(max_examples=tries(8))
@given(
    st.sampled_from(CONFIGS), st.integers(3, 9), st.integers(3, 8), st.integers(2, 40), st.integers(2, 40),
    WINDOWS, st.integers(1, 2), STRIDES, st.sampled_from([2, 3, 16]), st.booleans(),
)  # fmt: skip
def test_random_windows(
    config: str, h: int, w: int, c: int, n: int, taps: tuple[int, int], step: int, strides: tuple[int, int], depth: int,
    out_last: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(h * w * c * n)
    pad = min((taps[0] - 1) * step, (taps[1] - 1) * step, 1)
    x, y = bytes_of(rng, 1, h, w, c), np.zeros((1, -(-h // strides[0]), -(-w // strides[1]), n), np.int8)
    weights = bytes_of(rng, *((c, taps[1], taps[0], n) if out_last else (*taps, n, c)))
    par = parameters(rng, n, c * taps[0] * taps[1])

    def run() -> None:
        kernel = KERNELS["window", config][(cl.cdiv(n, 16), cl.cdiv(y.shape[1], 2))]
        quantised_x, out = cl.quantised(x, -9), cl.quantised(y, 1)
        kernel(quantised_x, weights, par, out, (y.shape[2], c), taps, step, strides, pad, 2, 16, depth, out_last)

    compiled, interpreted_output = both(run, y)
    assert np.array_equal(compiled, interpreted_output)


@settings(max_examples=tries(8))
@given(
    st.sampled_from(CONFIGS), st.integers(3, 9), st.integers(3, 8), st.integers(2, 40), WINDOWS, st.integers(1, 2),
    STRIDES, st.booleans(),
)  # fmt: skip
def test_random_maxima(
    config: str, h: int, w: int, c: int, taps: tuple[int, int], step: int, strides: tuple[int, int], traced: bool
) -> None:
    pad = min((taps[0] - 1) * step, (taps[1] - 1) * step, 1)
    x = bytes_of(np.random.default_rng(h * w * c), h, w, c)
    y = np.zeros((-(-h // strides[0]), -(-w // strides[1]), c), np.int8)
    block = 8 if config == "tiny" else 16  # channels whose windows fit in vin, however far apart they reach

    def run() -> None:
        kernel = KERNELS["maxpool", config][(cl.cdiv(len(y), 2), cl.cdiv(c, block))]
        kernel(x, y, y.shape[1], taps, step, strides, pad, 2, block, traced)

    compiled, interpreted_output = both(run, y)
    assert np.array_equal(compiled, interpreted_output)
    places = [(dy * step, dx * step) for dy in range(taps[0]) for dx in range(taps[1])]
    beyond = [(pad, size + 3 * step) for size in x.shape[:2]]
    padded = np.pad(x, (*beyond, (0, 0)), constant_values=-128)
    rows, columns = ((slice(0, (n - 1) * s + 1, s)) for n, s in zip(y.shape, strides))
    assert np.array_equal(compiled, np.max([padded[r:, t:][rows, columns] for r, t in places], axis=0))


@pytest.mark.parametrize("config", CONFIGS)
def test_a_table_and_a_residual_alone(config: str) -> None:
    rng = np.random.default_rng(0)
    x, table, r, y = bytes_of(rng, 20, 40), bytes_of(rng, 256), bytes_of(rng, 20, 40), np.zeros((20, 40), np.int8)
    compiled, interpreted_output = both(lambda: KERNELS["table_and_residual", config][(3, 3)](x, table, r, y, 8, 16), y)
    assert np.array_equal(compiled, interpreted_output)


def test_other_weights_are_seen() -> None:
    rng = np.random.default_rng(1)
    kernel = KERNELS["linear", "tiny"]
    x, par, y = bytes_of(rng, 8, 16), parameters(rng, 16, 16), np.zeros((8, 16), np.int8)
    for w in (bytes_of(rng, 16, 16), bytes_of(rng, 16, 16)):
        for weights in (w, -w // 2):
            compiled, interpreted_output = both(lambda: kernel[(1, 1)](x, weights, par, y, 8, 16, 16, 16, 16), y)  # noqa: B023
            assert np.array_equal(compiled, interpreted_output)
    before = y.copy()
    w[...] = 0  # in place
    kernel[(1, 1)](x, w, par, y, 8, 16, 16, 16, 16)
    assert not np.array_equal(before, y)


@settings(max_examples=tries(8))
@given(
    st.sampled_from(CONFIGS), st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.sampled_from([1, 8, 16]),
    st.sampled_from([(0, 0), (3, 0), (0, -9), (-128, 5)]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_products_of_two_activations(
    config: str, m: int, n: int, k: int, bm: int, zeros: tuple[int, int], turned: bool, residual: bool
) -> None:
    """A product of two activations is compiled once, and computes with any values of the second one."""
    rng = np.random.default_rng(m * n * k)
    kernel, par, r = KERNELS["product", config], parameters(rng, n, k), bytes_of(rng, m, n)
    y = np.zeros((m, n), np.int8)
    images = set()
    for _ in range(2):
        x, w = bytes_of(rng, m, k), bytes_of(rng, *((k, n) if turned else (n, k)))
        arguments = cl.quantised(x, zeros[0]), cl.quantised(w, zeros[1]), par, r, cl.quantised(y, 4), k, bm, 16
        run = lambda: kernel[(cl.cdiv(m, bm), cl.cdiv(n, 16))](*arguments, turned, residual)  # noqa: B023, E731
        compiled, interpreted_output = both(run, y)
        assert np.array_equal(compiled, interpreted_output)
        variant = next(v for v in reversed(kernel.variants.values()) if hasattr(v, "image"))
        assert variant.layers[0].product is not None
        images.add(variant.image.constants.tobytes())
    assert len(images) == 1
