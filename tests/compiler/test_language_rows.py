"""Loops over rows: what is fetched for the next program, in the last of several passes; sums of ragged rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks import language

import celosia.language as cl
from celosia.compiler.cpu.llvm.codegen import render
from celosia.compiler.cpu.schedule.ahead import ahead
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import For, Function, Store, Update, exprs
from celosia.compiler.expr.nodes import Const, Load, walk
from celosia.compiler.language.cpu import Lowered


def lowered(kernel: Any, grid: tuple[int, ...], *args: Any) -> Function:
    return Lowered(kernel.name, kernel.trace(grid, args)[0]).function


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("n", [300, 1000, 1024])
def test_of_several_passes_the_last(n: int) -> None:
    function = lowered(language.softmax, (8,), floats(8, n), floats(8, n), n, 1024)
    found = ahead(function.body)
    assert set(found.values()) == {n}
    written = [e for s in statements(function.body) if isinstance(s, Store) for e in exprs(s)]
    read = {id(node) for e in written for node in walk(e) if isinstance(node, Load)}
    assert found.keys() <= read  # and none of the pass that finds the maximum, an Update
    assert f"i64 {n}" in render(function).text and "llvm.prefetch" in render(function).text


@pytest.mark.parametrize("n", [77, 300, 1000, 1024])
def test_a_sum_that_masks_cut_is_one(n: int) -> None:
    """Lanes come together once for the maximum and once for the sum, and a mask's -inf is in neither loop."""
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
    """x is the same row for all programs; y is read and written."""
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
    assert ahead(function.body) == {}
