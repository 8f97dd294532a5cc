"""Kernels prefetch the next program's data, sum ragged rows, and stream large outputs past the caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks import language

import celosia.language as cl
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.llvm.codegen import render
from celosia.compiler.cpu.schedule import caches as streaming
from celosia.compiler.cpu.schedule.caches import next_iteration_prefetches
from celosia.compiler.expr.loops import For, Function, Store, Update, exprs, statements
from celosia.compiler.expr.nodes import Const, Load, walk
from celosia.compiler.language.cpu import CpuKernel
from celosia.compiler.target import target


def lowered(kernel: Any, grid: tuple[int, ...], *args: Any) -> Function:
    return CpuKernel(kernel.name, kernel.trace(grid, args)[0]).function


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("n", [300, 1000, 1024])
def test_of_several_passes_the_last(n: int) -> None:
    function = lowered(language.softmax, (8,), floats(8, n), floats(8, n), n, 1024)
    result = next_iteration_prefetches(function.body)
    assert set(result.values()) == {n}
    written = [e for s in statements(function.body) if isinstance(s, Store) for e in exprs(s)]
    read = {id(node) for e in written for node in walk(e) if isinstance(node, Load)}
    assert result.keys() <= read  # and none of the pass that finds the maximum, an Update
    assert f"i64 {n}" in render(function).text and "llvm.prefetch" in render(function).text


@pytest.mark.parametrize("n", [77, 300, 1000, 1024])
def test_a_sum_that_masks_cut_is_one(n: int) -> None:
    """Masked rows have one vector reduction for the maximum and one for the sum, without the mask's -inf."""
    function = lowered(language.softmax, (8,), floats(8, n), floats(8, n), n, 1024)
    loops = [s for s in statements(function.body) if isinstance(s, For) and isinstance(s.body, Update)]
    assert [s.body.kind for s in loops if not s.body.tensor.shape and s.kind == "vectorized"] == ["max", "sum"]  # type: ignore[attr-defined]
    added = [s for s in statements(function.body) if isinstance(s, Update) and s.kind == "max"]
    assert not any(isinstance(s.value, Const) for s in added)


@cl.jit(target="cpu")
def scaled(x, y, N, BLOCK: cl.constexpr):  # type: ignore[no-untyped-def]
    at = cl.program_id(0) * BLOCK + cl.arange(0, BLOCK)
    cl.store(y + at, cl.load(x + at) * 2.0)


@cl.jit(target="cpu")
def ranked(x, y, z, N, BLOCK: cl.constexpr):  # type: ignore[no-untyped-def]
    """Subtract row maxima. x is the same row for all programs; y is read and written."""
    row, columns = cl.program_id(0), cl.arange(0, BLOCK)
    v, w = cl.load(x + columns), cl.load(y + row * N + columns)
    cl.store(y + row * N + columns, w - cl.max(w, axis=0) + v - cl.max(v, axis=0))


@pytest.mark.parametrize(
    "function",
    [
        lowered(scaled, (8,), floats(8, 1024), floats(8, 1024), 1024, 1024),
        lowered(ranked, (8,), floats(1024), floats(8, 1024), floats(1), 1024, 1024),
        lowered(language.softmax, (8,), floats(8, 200), floats(8, 200), 200, 256),
        lowered(language.softmax, (8,), floats(8, 8192), floats(8, 8192), 8192, 8192),
        lowered(language.softmax, (1,), floats(1, 1024), floats(1, 1024), 1024, 1024),
    ],
    ids=["one pass", "of all programs or written", "short", "long", "one program"],
)
def test_nothing_else(function: Function) -> None:
    assert next_iteration_prefetches(function.body) == {}


def added(n: int, block: int = 1024) -> Function:
    grid = (-(-n // block),)
    return lowered(language.add, grid, floats(n), floats(n), floats(n), n, block)


@pytest.mark.skipif(
    target().vector_bytes != streaming.CACHE_LINE_BYTES, reason="this processor has no vectors of 64 bytes"
)
@pytest.mark.parametrize("skipped", [0, 1, 4, 16])
def test_large_outputs_pass_by_the_caches_wherever_they_lie(monkeypatch: pytest.MonkeyPatch, skipped: int) -> None:
    monkeypatch.setattr(streaming, "MIN_STREAMED_BYTES", 1 << 16)
    n, rng = (1 << 16) + 5, np.random.default_rng(0)
    function = added(n)
    assert streaming.streamed_outputs(function) == set(function.outputs)
    text = render(function).text
    assert "!nontemporal" in text and ("sfence" in text) == ("sse2" in target().features)
    whole = rng.random(n + 2 * skipped, np.float32)
    x, y, out = rng.random(n, np.float32), rng.random(n, np.float32), whole[skipped : skipped + n]
    before = whole.copy()
    compile_function(function, keep=False).run([x, y], [out], threads=2)
    assert np.array_equal(out, x + y)
    assert np.array_equal(whole[:skipped], before[:skipped])
    assert np.array_equal(whole[skipped + n :], before[skipped + n :])


def test_other_outputs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs do not bypass the caches if they are small, read again, of short rows, or in place of an input."""
    assert not streaming.streamed_outputs(added(1 << 16)) and "nontemporal" not in render(added(1 << 16)).text
    monkeypatch.setattr(streaming, "MIN_STREAMED_BYTES", 1 << 16)
    assert not streaming.streamed_outputs(
        lowered(language.softmax, (64,), floats(64, 1024), floats(64, 1024), 1024, 1024)
    )
    norm = lowered(
        language.layernorm, (999,), floats(999, 100), floats(100), floats(100), floats(999, 100), 100, 1e-5, 128
    )
    assert not streaming.streamed_outputs(norm)
    assert not streaming.streamed_outputs(replace(added(1 << 16), in_place=((0, 0),)))
