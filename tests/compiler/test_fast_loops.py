"""Products and softmax are fast: tiles read little, blocks are prefetched, and sums are computed beside their terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from thorough import paired

import celosia
from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import CpuFunction, compile_op
from celosia.compiler.cpu.llvm.codegen import nan_free_extremes, render
from celosia.compiler.cpu.schedule.caches import next_block_prefetches
from celosia.compiler.expr import loops
from celosia.compiler.expr.affine import flatten
from celosia.compiler.expr.interpret import evaluate
from celosia.compiler.expr.loops import statements
from celosia.compiler.expr.nodes import Load, Var, walk
from celosia.compiler.ops.registry import CpuNode, input_type
from celosia.compiler.program.host.kernel import align
from celosia.compiler.target import compiling_for, this_processor
from celosia.driver.workstation.oracle import open_session

Array = NDArray[Any]


def product(m: int, k: int, n: int) -> T.Function:
    """Return the loops of a product of an input and a constant, for a processor with small caches."""
    types = {"a": input_type(((m, k), "float32")), "b": input_type(np.ones((k, n), np.float32))}
    return CpuFunction((CpuNode("MatMul", ("a", "b"), ("y",), {}, ""),), types, ("y",)).lower()[0]


def variables(place: T.Expr) -> list[Var]:
    return [node for node in walk(place) if isinstance(node, Var)]


def lines_of(place: T.Expr, loops_: list[loops.For], block: loops.For, at: int) -> set[int]:
    """Return the cache lines that `place` accesses in block `at`."""
    grid = np.meshgrid(*(np.arange(1 if loop is block else loop.extent) for loop in loops_))
    env = {loop.var: at if loop is block else axis.ravel() for loop, axis in zip(loops_, grid)}
    env |= {var: 0 for var in variables(place) if var not in env}
    return set(np.unique(evaluate(place, env) * 4 // 64).tolist())


def test_tiles_fetch_all_of_the_next_block_and_nothing_else() -> None:
    wide = replace(this_processor(), vector_bytes=64, registers=32, cache_bytes=1 << 17)  # tiles that divide the matrix
    with compiling_for(wide):
        function = product(64, 512, 512)
        ((_, fetched),) = next_block_prefetches(function.body).items()
        text = render(function).text
    assert "llvm.prefetch" in text and "i32 0, i32 2, i32 1" in text  # into the second cache
    inside = {s.var: s for s in statements(function.body) if isinstance(s, loops.For)}.values()
    used = set(variables(fetched.element))
    block, *_ = path = [loop for loop in inside if loop.var in used and loop.extent > 1]
    sums = [s for s in statements(function.body) if isinstance(s, loops.Update)]
    (read,) = (n for n in walk(sums[0].value) if isinstance(n, Load) and n.tensor is fetched.tensor)
    place = flatten(read.tensor.shape, read.index)
    around = [loop for loop in inside if loop.var in set(variables(place))]
    blocks = [lines_of(place, around, block, at) for at in range(block.extent)]
    assert len(blocks) > 1 and len(blocks[0]) * 64 > 24 << 10
    for at in range(block.extent):
        assert lines_of(fetched.element, path, block, at) == blocks[min(at + 1, block.extent - 1)]


def test_what_stays_in_the_cache_is_not_fetched_again() -> None:
    with compiling_for(replace(this_processor(), cache_bytes=1 << 24)):
        assert not next_block_prefetches(product(64, 512, 512).body)
    with compiling_for(replace(this_processor(), cache_bytes=1 << 17)):
        assert not next_block_prefetches(product(1, 512, 512).body)  # each element is read once


@pytest.mark.parametrize("n", [197, 176])
def test_tiles_read_less_than_they_multiply(n: int) -> None:
    """Tiles are two columns wide, so that two products share each read.

    n = 197 gives 13 vectors that cross cache lines, n = 176 gives 11 that do not.
    """
    with compiling_for(replace(this_processor(), vector_bytes=64, registers=32)):
        function = product(196, 64, n)
    tile = [s.extent for s in statements(function.body) if isinstance(s, loops.For) and s.kind == "unrolled"]
    assert tile and set(tile[1::2]) == {2}


def test_large_constants_begin_with_a_line_of_the_cache() -> None:
    weights = np.frombuffer(bytes(4 + 4 * 64 * 192), np.float32)[1:].reshape(64, 192)
    ends = (("x", 64), ("y", 192))
    input_info, output_info = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, n]) for name, n in ends)
    constants = [numpy_helper.from_array(weights, "w")]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [input_info], [output_info], constants
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = celosia.compile(model, accelerator=False, check=False)
    assert [array.ctypes.data % 64 for array in program.constants.values()] == [0]
    assert align(weights) is not weights and np.array_equal(align(weights), weights)
    assert align(small := weights[:1]) is small


def softmax(shape: tuple[int, ...], axis: int, op: str = "Softmax", dtype: str = "float32") -> T.Function:
    node = CpuNode(op, ("x",), ("y",), {"axis": axis}, "")
    return CpuFunction((node,), {"x": input_type((shape, dtype))}, ("y",)).lower()[0]


SOFTMAXES = [(op, dtype) for op in ("Softmax", "LogSoftmax") for dtype in ("float32", "float64")]


@pytest.mark.parametrize(("kind", "axis"), paired(SOFTMAXES, [-1, 0]))
def test_a_maximum_of_numbers_changes_no_result(kind: tuple[str, str], axis: int) -> None:
    op, dtype = kind
    x = np.random.default_rng(0).standard_normal((7, 77)).astype(dtype)
    x[2], x[3], x[4, 5], x[5, :9] = np.nan, -np.inf, np.inf, -np.inf
    if dtype == "float32" or op == "Softmax":  # see docs/numerics.md
        x[0, 3] = np.nan
    x = x if axis else x.T.copy()
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    input_info, output_info = (helper.make_tensor_value_info(name, kind, x.shape) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], axis=axis)], "g", [input_info], [output_info])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (expected,) = open_session(model).run(None, {"x": x})
    (output,) = compile_op(op, {"axis": axis}, [(x.shape, dtype)])(x)
    np.testing.assert_allclose(output, expected, rtol=1e-6)  # NaN in the same places
    assert np.isnan(output).any() and not np.isnan(output).all()
    function = softmax(x.shape, axis, op, dtype)
    assert nan_free_extremes(function.body) and "maximum" not in render(function).text


def test_a_maximum_that_may_be_nan_stays_one() -> None:
    x = T.placeholder((4, 64), "float32", "x")
    k = T.reduce_axis(64, "k")
    plain = T.compute((4,), lambda i: T.max(x[i, k], k), "plain")
    assert not nan_free_extremes(T.lower(plain).body)
    number = T.compute((4,), lambda i: T.max(T.select(T.equal(x[i, k], x[i, k]), x[i, k], -np.inf), k), "number")
    other = T.compute((4,), lambda i: T.max(T.select(T.equal(x[i, k], x[0, k]), x[i, k], -np.inf), k), "other")
    assert {t.name for t in nan_free_extremes(T.lower(number).body)} == {"number.acc"}
    assert not nan_free_extremes(T.lower(other).body)  # it tells something else


def test_terms_are_made_beside_their_sum() -> None:
    function = softmax((3, 4096), -1)
    (inner,) = (
        s for s in statements(function.body)
        if isinstance(s, loops.For) and s.kind == "serial"
        and {"softmax", "lanes.acc"}
        <= {w.tensor.name for w in statements(s) if isinstance(w, loops.Store | loops.Update)}
        and s.extent == 4096 // this_processor().lanes("float32")
    )  # fmt: skip
    assert isinstance(inner.body, loops.Block)


def test_a_loop_stays_outside_where_something_between_reads_it() -> None:
    x = T.placeholder((8,), "int32", "x")
    t, s = T.Tensor("t", (8,), "int32"), T.Tensor("s", (1,), "int32")
    i, k, one = T.Axis("i", extent=8), T.Axis("k", extent=8), T.Axis("one", extent=1)
    first = loops.For(i, 8, loops.Store(t, (i,), x[i] * 2))
    last = loops.For(k, 8, loops.Update("sum", s, (one,), t[k]), "unrolled")
    for start, merged in ((T.wrap(3, "int32"), True), (t[7], False)):
        second = loops.For(one, 1, loops.Block((loops.Store(s, (one,), start), last)))
        body = loops.Alloc(t, loops.Block((first, second)), "workspace")
        before = T.Function("f", (x,), (s,), body)
        after = T.fuse_loops(before)
        assert (
            len([statement for statement in statements(after.body) if isinstance(statement, loops.For)]) == 2
        ) == merged
        given = np.arange(8, dtype=np.int32)
        assert T.interpret(after, given)[0] == T.interpret(before, given)[0] == (3 if merged else 14) + 56


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_running_sums_are_added_in_order(dtype: str) -> None:
    """Running sums have numpy's bits and begin with the first element; exclusive ones begin with 0."""
    x = (np.random.default_rng(0).standard_normal((3, 21, 5)) * 9).astype(dtype)
    x[:, 0] = -0.0
    for axis, reverse, exclusive in ((1, 0, 0), (-1, 1, 0), (0, 0, 1), (1, 1, 1)):
        attributes = {"reverse": reverse, "exclusive": exclusive}
        (output,) = compile_op("CumSum", attributes, [(x.shape, dtype), np.array(axis)])(x, np.array(axis))
        given = np.flip(x, axis) if reverse else x
        expected = np.cumsum(given, axis, dtype=dtype)
        if exclusive:
            first = np.zeros_like(np.take(expected, [0], axis))
            expected = np.concatenate([first, np.take(expected, np.arange(x.shape[axis] - 1), axis)], axis)
        expected = np.flip(expected, axis) if reverse else expected
        assert output.dtype == expected.dtype and np.array_equal(output, expected)
        assert exclusive or output.tobytes() == expected.tobytes()
