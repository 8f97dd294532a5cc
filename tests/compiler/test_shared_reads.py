"""Neighbouring elements share vector reads, window lines and the memory of stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper
from oracle import opened
from thorough import tries

from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import CpuFunction, compile_op
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.llvm.codegen import render
from celosia.compiler.cpu.schedule import schedule
from celosia.compiler.cpu.schedule.output_reuse import place_in_outputs
from celosia.compiler.expr import loops
from celosia.compiler.expr.loops import statements
from celosia.compiler.ops.registry import CpuNode, input_type
from celosia.compiler.target import compiling_for, this_processor

Array = NDArray[Any]
NARROW = (0, 1, 2, 3, 4, 5, 7, 8, 9, 17)
WIDE = replace(this_processor(), vector_bytes=64, registers=32)
DTYPES = ("float32", "float64", "float16", "int8", "bool")


def loops_of(op: str, attributes: dict[str, Any], *shapes: tuple[int, ...]) -> T.Function:
    types = {f"x{k}": input_type((shape, "float32")) for k, shape in enumerate(shapes)}
    return CpuFunction((CpuNode(op, tuple(types), ("y",), attributes, ""),), types, ("y",)).lower()[0]


def kinds(function: T.Function, kind: str) -> list[int]:
    return [s.extent for s in statements(function.body) if isinstance(s, loops.For) and s.kind == kind]


def workspace(function: T.Function) -> dict[str, int]:
    """Return the number of elements of each temporary, by name."""
    return {s.tensor.name: s.tensor.size for s in statements(function.body) if isinstance(s, loops.Alloc)}


# Transpositions --------------------------------------------------------------------------------------------------


@settings(max_examples=tries(40))
@given(data=st.data(), dtype=st.sampled_from(DTYPES), long=st.sampled_from((1, 15, 16, 33, 70)))
def test_transpositions_of_narrow_axes(data: st.DataObject, dtype: str, long: int) -> None:
    rank = data.draw(st.integers(1, 4))
    shape = [data.draw(st.sampled_from(NARROW)) for _ in range(rank)]
    shape[data.draw(st.integers(0, rank - 1))] = long
    perm = data.draw(st.permutations(range(rank)))
    x = np.random.default_rng(prod(shape)).integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    (y,) = compile_op("Transpose", {"perm": perm}, [(tuple(shape), dtype)])(x)
    np.testing.assert_array_equal(y, x.transpose(perm))


@pytest.mark.parametrize("channels", [2, 3, 5, 8])
def test_few_channels_are_read_and_written_in_one_piece(channels: int) -> None:
    """A Transpose of few channels reads and writes whole vectors, without gathers and partly filled tiles."""
    with compiling_for(WIDE):
        lanes = 16
        separating = render(loops_of("Transpose", {"perm": [1, 0]}, (100, channels))).text
        joining = render(loops_of("Transpose", {"perm": [1, 0]}, (channels, 100))).text
    assert (
        separating.count(f"load <{lanes * channels} x float>") == 1
        and separating.count(f"store <{lanes} x float>") == channels
    )
    assert joining.count(f"load <{lanes} x float>") == channels
    assert joining.count(f"store <{lanes * channels} x float>") == 1
    assert not any(f"{move} float" in text for move in ("load", "store") for text in (separating, joining))


def test_pieces_beside_other_operands() -> None:
    """Reads of whole vectors combine with a bias for each channel and an operand in the other order."""
    x, bias, other = (T.placeholder(s, "float32", n) for n, s in (("x", (37, 3)), ("b", (3,)), ("o", (3, 37))))
    first = T.compute((3, 37), lambda c, p: x[p, c] * 2 + bias[c] * other[c, p], "y")
    second = T.compute((37, 3), lambda p, c: other[c, p] - x[p, c] * bias[c], "y")
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((37, 3), (3,), (3, 37)))
    for y, expected in ((first, a.T * 2 + b[:, None] * c), (second, c.T - a * b)):
        (found,) = compile_function(T.lower(schedule([y]), [x, bias, other]))(a, b, c)
        np.testing.assert_array_equal(found, expected)


# Windows ---------------------------------------------------------------------------------------------------------


@settings(max_examples=tries(25))
@given(data=st.data(), dtype=st.sampled_from((np.float32, np.int8, np.uint8)), axes=st.sampled_from((1, 2, 2, 3)))
def test_maxima_of_windows(data: st.DataObject, dtype: type, axes: int) -> None:
    kernel = [data.draw(st.integers(1, 4)) for _ in range(axes)]
    more = {
        "strides": [data.draw(st.integers(1, 3)) for _ in range(axes)],
        "dilations": [data.draw(st.integers(1, 2)) for _ in range(axes)],
        "pads": [data.draw(st.integers(0, k - 1)) for k in (*kernel, *kernel)],
        "ceil_mode": data.draw(st.integers(0, 1)),
    }
    shape = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), *(7 + 5 * d for d in range(axes)))
    x = np.random.default_rng(0).integers(-100 * (dtype is not np.uint8), 100, shape).astype(dtype)
    (expected,) = pooled(x, {"kernel_shape": kernel} | more)
    (found,) = compile_op("MaxPool", {"kernel_shape": kernel} | more, [(shape, np.dtype(dtype).name)])(x)
    np.testing.assert_array_equal(found, expected)


def pooled(x: Array, attributes: dict[str, Any]) -> list[Array]:
    """Return onnxruntime's MaxPool of x."""
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    input_info, output_info = (
        helper.make_tensor_value_info(n, kind, s) for n, s in (("x", x.shape), ("y", [None] * x.ndim))
    )
    graph = helper.make_graph(
        [helper.make_node("MaxPool", ["x"], ["y"], **attributes)], "g", [input_info], [output_info]
    )
    session = opened(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8))
    return list(session.run(None, {"x": x}))


def test_lines_of_windows_take_the_memory_of_one_image() -> None:
    """Lines of windows take the memory of one image, with loops over channels and lines and conditional reads."""
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    taken = workspace(loops_of("MaxPool", attributes, (1, 32, 40, 40)))
    assert taken["lines"] == 20 * 40


@pytest.mark.parametrize(("kernel", "size"), [(3, 56), (5, 28)])
def test_steps_that_slide_over_lines_are_written_out(kernel: int, size: int) -> None:
    """Loops that slide over lines are unrolled, so that each line is read once and not for each row of weights."""
    with compiling_for(WIDE):
        shapes = (1, 32, size, size), (32, 1, kernel, kernel)
        function = loops_of("Conv", {"pads": [kernel // 2] * 4, "group": 32}, *shapes)
    times = Counter(kinds(function, "unrolled"))
    assert times[kernel] == 1 and kinds(function, "serial").count(kernel) == 1


# Loops and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
def test_loops_of_a_multiple_merge_where_conditions_keep_reads_inside(held: bool) -> None:
    """Two loops merge only if a condition keeps the second from reading the row before."""
    x = T.placeholder((8, 8), "float32", "x")
    t, y = T.Tensor("t", (64,), "float32"), T.Tensor("y", (64,), "float32")
    i, j, f, k = (T.Axis(name, extent=extent) for name, extent in (("i", 8), ("j", 8), ("f", 16), ("k", 4)))
    first = loops.For(i, 8, loops.For(j, 8, loops.Store(t, (i * 8 + j,), x[i, j] * 2)))
    shifted = T.select(T.wrap(1, T.INDEX) <= (k if held else f), t.flat(f * 4 + k - 1), 7)
    second = loops.For(f, 16, loops.For(k, 4, loops.Store(y, (f * 4 + k,), shifted)))
    before = T.Function("g", (x,), (y,), loops.Alloc(t, loops.Block((first, second)), "workspace"))
    after = T.fuse_loops(before)
    assert (workspace(after)["t"] == 4) == held
    values = np.random.default_rng(0).integers(0, 99, (8, 8)).astype(np.float32)
    line = np.concatenate([[7], 2 * values.ravel()[:-1]]).reshape(16, 4)
    line[(slice(None), 0) if held else 0] = 7
    np.testing.assert_array_equal(T.interpret(after, values)[0], line.ravel())


def scaled(columns: int) -> T.Function:
    """Return exp(x) divided by its sum, for each row."""
    x = T.placeholder((6, columns), "float32", "x")
    k = T.reduce_axis(columns, "k")
    e = T.compute((6, columns), lambda i, j: T.call("exp", x[i, j]), "e")
    total = T.compute((6,), lambda i: T.sum(e[i, k], k), "total")
    y = T.compute((6, columns), lambda i, j: e[i, j] / total[i], "y")
    return T.fuse_loops(T.lower(schedule([y]), [x]))


@pytest.mark.parametrize(("columns", "moved"), [(2048, True), (2056, False)])
def test_temporaries_lie_in_the_output(columns: int, moved: bool) -> None:
    """Temporaries lie in the output, unless overlapping vectors at the end of a row would scale elements twice."""
    with compiling_for(WIDE):
        function = scaled(columns)
        after = place_in_outputs(function)
    assert "e" in workspace(function) and ("e" in workspace(after)) != moved
    a = np.random.default_rng(0).standard_normal((6, columns), np.float32)
    powers = np.exp(a.astype(np.float64))
    (found,) = compile_function(after)(a)
    np.testing.assert_allclose(found, powers / powers.sum(1, keepdims=True), rtol=1e-5)
