"""Register tiles, functions inside them, and loops split at conditions do not change results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import CpuFunction
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.schedule import register_tiles, schedule
from celosia.compiler.expr.interpret import interpret
from celosia.compiler.expr.loop_passes import partition
from celosia.compiler.expr.loops import exprs, statements
from celosia.compiler.expr.nodes import Select, walk
from celosia.compiler.expr.verify import verify
from celosia.compiler.ops.registry import CpuNode, InputType
from celosia.compiler.target import Target

RNG = np.random.default_rng(0)
sizes = st.integers(1, 9)
machines = st.sampled_from([Target(size, registers, frozenset()) for size, registers in ((16, 16), (32, 16), (64, 32))])
FEW = settings(max_examples=tries(25), deadline=None, suppress_health_check=list(HealthCheck))


def whole(*shape: int) -> np.ndarray:
    """Draw integers as floats: their sums are exact in any order."""
    return RNG.integers(-4, 5, shape).astype(np.float32)


def selects(function: T.Function) -> int:
    return sum(isinstance(n, Select) for s in statements(function.body) for e in exprs(s) for n in walk(e))


@FEW
@given(st.integers(1, 40), st.integers(1, 70), sizes, machines)
def test_matrix_products_under_any_vectors(m: int, n: int, k: int, machine: Target) -> None:
    a, b = T.placeholder((m, k), "float32", "a"), T.placeholder((k, n), "float32", "b")
    bias = T.placeholder((n,), "float32", "bias")
    kk = T.reduce_axis(k, "k")
    c = T.compute((m, n), lambda i, j: T.sum(a[i, kk] * b[kk, j], kk), "c")
    y = T.compute((m, n), lambda i, j: T.maximum(c[i, j] + bias[j], 0) * c[i, j], "y")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(register_tiles, "target", lambda: machine)
        plan = schedule([y])
    assert len(plan.stages) == 1  # the bias is added where a tile is finished
    function = T.lower(plan, [a, b, bias])
    verify(function)
    x, w, v = whole(m, k), whole(k, n), whole(n)
    product = x @ w
    expected = np.maximum(product + v, 0) * product
    assert np.array_equal(compile_function(function)(x, w, v)[0], expected)


@FEW
@given(st.data())
def test_cut_loops_compute_the_same(data: st.DataObject) -> None:
    """A window over a padded row tests positions only at the edges."""
    size, kernel = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    before, after = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    stride, lanes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    out = (size + before + after - kernel) // stride + 1
    if out < 1:
        return
    x = T.placeholder((size, lanes), "float32", "x")
    k = T.reduce_axis(kernel, "k")

    def element(o: T.Expr, lane: T.Expr) -> T.Expr:
        at = o * stride + k
        return T.sum(T.select((at >= before) & (at < before + size), x[at - before, lane], 7), k)

    y = T.compute((out, lanes), element, "y")
    plan = T.create_schedule(y)
    outer, inner = plan[y].split(y.axes[0], data.draw(st.integers(1, out)))
    plan[y].reorder(outer, *[axis for axis in plan[y].order if axis.reduce], inner, y.axes[1])
    if data.draw(st.booleans()):
        plan[y].unroll(inner)
    function = T.lower(plan)
    cut = partition(function)
    verify(cut)
    array = whole(size, lanes)
    expected = interpret(function, array)
    assert np.array_equal(interpret(cut, array)[0], expected[0])
    assert np.array_equal(compile_function(cut)(array)[0], expected[0])


def test_no_condition_is_left_in_padding_and_concatenation() -> None:
    types = {"x": InputType((1, 2, 6, 6, 16), "float32"), "w": InputType((2, 1, 3, 3, 1, 16), "float32")}
    conv = CpuNode("BlockedConv", ("x", "w"), ("y",), {"group": 32, "pads": [1, 1, 1, 1]})
    assert selects(CpuFunction((conv,), types, ("y",)).lower()[0]) == 0
    types = {"x": InputType((1, 2, 6, 16), "float32"), "z": InputType((1, 3, 6, 16), "float32")}
    concat = CpuNode("Concat", ("x", "z"), ("y",), {"axis": 1})
    function = CpuFunction((concat,), types, ("y",)).lower()[0]
    assert selects(function) == 0
    a, b = whole(1, 2, 6, 16), whole(1, 3, 6, 16)
    assert np.array_equal(interpret(function, a, b)[0], np.concatenate([a, b], 1))


def test_a_reduction_with_two_readers_is_stored() -> None:
    a = T.placeholder((8, 16), "float32", "a")
    k = T.reduce_axis(8, "k")
    s = T.compute((16,), lambda j: T.sum(a[k, j], k), "s")
    y, z = T.compute((16,), lambda j: s[j] + 1, "y"), T.compute((16,), lambda j: s[15 - j], "z")
    both = T.fuse_epilogues([y, z])
    assert both[0].body is y.body or "s[" in str(both[0].body)
    (turned,) = T.fuse_epilogues([z])
    assert "s[" in str(turned.body)
    (joined,) = T.fuse_epilogues([y])
    assert str(joined.body) == "(sum[k](a[k, i0]) + 1.0)"
