"""Window attributes have onnxruntime's meaning everywhere, and no wrong shape is accepted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from thorough import some

import celosia
from celosia.compiler import compile as compiler
from celosia.compiler.graph import shapes
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing import shape_inference
from celosia.compiler.graph.passes import BrokenGraph, GraphPass, Pipeline
from celosia.compiler.graph.pipeline import PASSES
from celosia.compiler.ops import products
from celosia.compiler.program.host import shape_rules as meaning
from celosia.compiler.program.host.hostops import vision

from . import windows_sweep as sweep

EACH = len(sweep.OPERATORS)


@pytest.mark.parametrize("count", some([20, 60], [20]))
def test_random_windows_are_onnxruntimes(count: int) -> None:
    counts, wrong = sweep.sweep(sweep.cases(count * EACH, seed=1))
    assert not wrong
    assert all(counts[f"{op}: equal"] > count // 2 for op in sweep.OPERATORS)


@pytest.mark.parametrize("count", some([1, 20], [1]))
def test_random_windows_are_onnxruntimes_when_compiled(count: int) -> None:
    assert not sweep.sweep(sweep.cases(count * EACH, seed=2), sweep.by_compiler)[1]
    assert not sweep.sweep(sweep.cases(count * EACH, seed=3), sweep.by_cpu)[1]


@pytest.mark.parametrize("op", sorted({*sweep.OPERATORS} - {"MaxUnpool"}))  # whose input says where
def test_the_sweep_sees_pads_that_are_off(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep finds windows whose padding before them is one too large."""

    def moved(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any) -> Any:
            geometry = original(*args)
            return replace(geometry, before=tuple(b + 1 for b in geometry.before))

        return wrong

    cases = list(sweep.cases(20, 1, [op]))
    monkeypatch.setattr(sweep, "windows", moved(meaning.windows))
    monkeypatch.setattr(sweep, "transposed_windows", moved(meaning.transposed_windows))
    assert sweep.sweep(iter(cases))[1]


# What once was wrong ----------------------------------------------------------------------------------------------


def bytes_of(*shape: int, dtype: Any = np.int8) -> sweep.Array:
    return np.random.default_rng(0).integers(-100, 100, shape).astype(dtype)


def average(size: tuple[int, int], **attrs: Any) -> sweep.Case:
    parameters = [np.float32(1), np.int8(3), np.float32(1.37), np.int8(-7)]
    return sweep.Case("QLinearAveragePool", attrs, size, bytes_of(1, 4, *size), parameters)


CASES = {
    "a last window that would begin outside": sweep.Case(
        "MaxPool", dict(kernel_shape=[1, 1], strides=[2, 2], ceil_mode=1), (4, 4), bytes_of(1, 4, 4, 4)
    ),
    "SAME with dilations": sweep.Case(
        "MaxPool", dict(kernel_shape=[3, 3], dilations=[2, 2], auto_pad="SAME_UPPER"), (7, 7), bytes_of(1, 4, 7, 7)
    ),
    "SAME_UPPER, padding counts": average(
        (7, 7), kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER", count_include_pad=1
    ),
    "SAME_LOWER, padding counts": average(
        (6, 5), kernel_shape=[3, 4], strides=[2, 1], auto_pad="SAME_LOWER", count_include_pad=1
    ),
    "rounded up, padding counts": average(
        (6, 6), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, count_include_pad=1
    ),
    "one window, a tie": sweep.Case(
        "QLinearAveragePool", dict(kernel_shape=[4]), (4,), np.array([[[48, 45, 13, -28]]], np.int8),
        [np.float32(1), np.int8(70), np.float32(1), np.int8(-39)],
    ),
    "a transposed kernel shorter than its stride": sweep.Case(
        "ConvTranspose", dict(strides=[3, 3], auto_pad="SAME_UPPER"), (4, 4),
        bytes_of(1, 3, 4, 4, dtype=np.float32), [bytes_of(3, 2, 2, 2, dtype=np.float32)], (2, 2),
    ),
    "no window has an element": sweep.Case(
        "MaxPool", dict(kernel_shape=[2], dilations=[3], pads=[1, 1]), (2,), bytes_of(1, 3, 2, dtype=np.float32),
        outputs=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", [sweep.by_windows, sweep.by_compiler, sweep.by_cpu])
@pytest.mark.parametrize("name", CASES)
def test_that(name: str, way: sweep.Way) -> None:
    assert sweep.compare(CASES[name], way) == "equal"


def test_what_follows_from_an_overruled_shape() -> None:
    """Operators after a pool use onnxruntime's shape, though onnx infers another one.

    onnx infers 3x3 for the pool, and 12 channels of one pixel for the operators after it.
    """
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,3,4,4] x) => (float[?,?] y) <int64[2] dims = {1, -1}> {
          p = MaxPool<kernel_shape = [1, 1], strides = [2, 2], ceil_mode = 1>(x)
          y = Reshape(p, dims)
        }
    """)
    x = np.random.default_rng(0).standard_normal((1, 3, 4, 4)).astype(np.float32)
    y = celosia.Runtime(celosia.compile(model, "tiny")).run({"x": x}).outputs["y"]
    np.testing.assert_array_equal(y, x[:, :, ::2, ::2].reshape(1, -1))


# Planted faults ----------------------------------------------------------------------------------------------------


def first(op: str, without: Collection[str] = ()) -> sweep.Case:
    """Return a random case without these attributes for which all agree."""
    fits = (case for case in sweep.cases(500, 7, [op]) if not set(without) & set(case.attrs))
    return next(case for case in fits if sweep.compare(case, sweep.by_windows) == "equal")


PLANTED = {op: first(op) for op in sweep.OPERATORS}


@pytest.mark.parametrize("op", PLANTED)
@pytest.mark.parametrize("axis", [-1, 2])
def test_a_wrong_shape_that_a_pass_leaves(op: str, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(model: ir.Model) -> None:
        value = next(node for node in model.graph if node.op_type == op).outputs[0]
        dims = list(value.shape or ())
        dims[axis] += 1  # type: ignore[operator]
        value.shape = ir.Shape(dims)

    passes = Pipeline(next(iter(PASSES)), GraphPass("bad", "", fault), *list(PASSES)[1:])
    monkeypatch.setattr("celosia.compiler.graph.pipeline.PASSES", passes)
    with pytest.raises(BrokenGraph, match=rf"after pass bad.*{op} "):
        compiler.compile(PLANTED[op].model(), "tiny")


@pytest.mark.parametrize("op", PLANTED)
def test_a_wrong_shape_at_import(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(model: ir.Model) -> None:
        value = next(node for node in model.graph if node.op_type == op).outputs[0]
        value.shape = ir.Shape([2, 3, *[99] * (len(PLANTED[op].size))])

    monkeypatch.setattr("celosia.compiler.graph.pipeline.PASSES", Pipeline(GraphPass("bad", "", fault), *PASSES))
    with pytest.raises((ModelError, BrokenGraph), match=rf"{op} .* makes"):
        compiler.compile(PLANTED[op].model(), "tiny")


@pytest.mark.parametrize("op", sorted({*PLANTED} - {"NhwcMaxPool", "Col2Im"}))  # onnx knows nothing of them
def test_a_wrong_meaning(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong window size is found by onnx's inference, which agrees for these attributes."""
    case = first(op, without=("ceil_mode", "auto_pad"))

    def one_more(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: replace(right := original(*args), out=tuple(n + 1 for n in right.out))

    for module in (shape_inference, products, shapes, vision):
        for name in {"windows", "transposed_windows"} & set(vars(module)):
            monkeypatch.setattr(module, name, one_more(getattr(module, name)))
    with pytest.raises(ModelError, match=r"windows.*onnx infers|FLOAT.*makes FLOAT"):
        compiler.compile(case.model(), "tiny")
