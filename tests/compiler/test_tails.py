"""Tiles that do not divide a loop ("peel" and "guard") compute what the plain loops compute."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler import expr as T
from celosia.compiler.expr.loops import children
from celosia.compiler.expr.nodes import Axis
from celosia.compiler.tensorize import intrinsics as hw
from celosia.hw.spec.config import Config

from .test_schedule import REFUSALS, chain, integers, results

TINY = Config.load("tiny")
TAILS = st.sampled_from(["peel", "guard", None])


def bounded(examples: int) -> settings:
    return settings(max_examples=tries(examples), deadline=None, suppress_health_check=list(HealthCheck))


@bounded(50)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 7), st.data())
def test_ragged_tiles_compute_the_same(m: int, n: int, k: int, data: st.DataObject) -> None:
    """Ragged tiles of data and reduction loops give the same results, nested and in any order.

    Other stages may be computed inside of them, in temporaries or in place in a scratchpad.
    """
    inputs, tensors = chain(m, n, k, lambda low, high: data.draw(st.integers(low, high)))
    arrays = [integers(*t.shape) for t in inputs]
    expected = T.interpret(T.lower(tensors[-1], inputs), *arrays)
    s = T.create_schedule(tensors[-1])
    for _ in range(data.draw(st.integers(1, 6))):
        stage = s[data.draw(st.sampled_from(list(s.stages)))]
        match data.draw(st.integers(0, 5)):
            case 0 | 1 | 2:
                stage.split(data.draw(st.sampled_from(stage.order)), data.draw(st.integers(1, 4)), data.draw(TAILS))
            case 3:
                stage.reorder(*data.draw(st.permutations(stage.order)))
            case 4 if stage.tensor is not tensors[-1]:
                stage.set_scope(data.draw(st.sampled_from(["workspace", "acc"])))
            case _ if stage.tensor is not tensors[-1]:
                after = list(s.stages)[list(s.stages).index(stage.tensor) + 1 :]
                consumer = s[data.draw(st.sampled_from(after))]
                stage.compute_at(consumer, data.draw(st.sampled_from(consumer.order)))
    try:
        function = T.lower(s, inputs)
    except ValueError as error:
        assert any(reason in str(error) for reason in REFUSALS), error
        return
    np.testing.assert_array_equal(results(function, *arrays)[0], expected[0])


def test_a_peeled_tile_is_a_loop_nest_of_its_own() -> None:
    a = T.placeholder((7,), "int32", "a")
    p = T.compute((7,), lambda i: a[i] * 2, "p")
    b = T.compute((7,), lambda i: p[i] + 1, "b")
    s = T.create_schedule(b)
    outer, _ = s[b].split("i0", 3, "peel")
    s[p].compute_at(s[b], outer)
    function = T.lower(s)
    assert (
        str(function)
        == """\
b(a: int32[7]) -> (b: int32[7]):
  for i0.o in 2:
    local p: int32[3]
    for i0 in 3:
      p[i0] = (a[((i0.o * 3) + i0)] * int32(2))
    for i0.i in 3:
      b[((i0.o * 3) + i0.i)] = (p[i0.i] + int32(1))
  local p: int32[1]
  p[0] = (a[6] * int32(2))
  b[6] = (p[0] + int32(1))"""
    )
    x = integers(7)
    np.testing.assert_array_equal(results(function, x)[0], x * 2 + 1)


def test_a_guard_keeps_back_what_is_beyond_the_end() -> None:
    a = T.placeholder((5,), "int32", "a")
    b = T.compute((5,), lambda i: a[i] + 1, "b")
    s = T.create_schedule(b)
    s[b].split("i0", 4, "guard")
    assert "if (((i0.o * 4) + i0.i) < 5):" in str(T.lower(s))
    np.testing.assert_array_equal(results(T.lower(s), np.arange(5, dtype=np.int32))[0], np.arange(1, 6))


@pytest.mark.parametrize("n", [7, 8, 40, 45])
def test_tiles_of_tiles_are_peeled_so_that_each_element_is_computed_once(n: int) -> None:
    a = T.placeholder((n,), "int32", "a")
    b = T.compute((n,), lambda i: a[i] * 2, "b")
    s = T.create_schedule(b)
    s[b].set_tail("peel")
    outer, _ = s[b].split("i0", 8)
    s[b].split(outer, 2)
    function = T.lower(s)
    assert "if" not in str(function) and "min" not in str(function)
    array = integers(n)
    np.testing.assert_array_equal(T.interpret(function, array)[0], 2 * array)
    assert _writes(function.body) == n


def _writes(stmt: T.Stmt) -> int:
    return (stmt.extent if isinstance(stmt, T.For) else 1) * (sum(map(_writes, children(stmt))) or 1)


@pytest.mark.parametrize("tail", ["peel", "guard"])
@pytest.mark.parametrize("scope", ["workspace", "acc"])
def test_sums_begin_once_and_end_once(tail: str, scope: str) -> None:
    """A peeled loop of a sum, or inside it, is refused: it would begin and end the sum twice."""
    a = T.placeholder((5, 7), "int32", "a")
    k = T.reduce_axis(7, "k")
    c = T.compute((5,), lambda i: T.sum(a[i, k], k), "c")
    y = T.compute((5,), lambda i: c[i] + 1, "y")
    x = integers(5, 7)
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [2, 3, 0, 1], [2, 0, 3, 1], [1, 0, 3, 2], [3, 2, 1, 0]):
        s = T.create_schedule(y)
        s[c].set_scope(scope)
        loops = [*s[c].split("i0", 2, tail), *s[c].split(k, 3, tail)]
        s[c].reorder(*(loops[i] for i in order))
        np.testing.assert_array_equal(results(T.lower(s), x)[0], x.sum(1) + 1)


def test_tails_that_cannot_be_say_why() -> None:
    a = T.placeholder((5, 7), "int32", "a")
    k = T.reduce_axis(7, "k")
    c = T.compute((5,), lambda i: T.sum(a[i, k], k), "c")
    s = T.create_schedule(c)
    with pytest.raises(ValueError, match=r"c: .*k.*'shift'"):
        s[c].split(k, 2, "shift")
    with pytest.raises(ValueError, match=r"c: .*i0.*'drop'"):
        s[c].split("i0", 2, "drop")
    with pytest.raises(ValueError, match="c: split i0 by 0"):
        s[c].split("i0", 0, "peel")
    assert s.trace.steps == []
    _, inner = s[c].split(k, 2, "guard")
    s[c].accumulate_lanes(inner, (2,))
    with pytest.raises(ValueError, match=r"c: tiles.*lanes"):
        T.lower(s)


# With instructions ------------------------------------------------------------------------------------------------


def product(rows: int, blocks: int) -> tuple[list[T.Tensor], T.Tensor, T.Tensor]:
    """Return (inputs, acc, y): y = acc * 2, acc a product of `blocks` blocks of four."""
    x = T.placeholder((rows, blocks, 4), "int8", "x")
    w = T.placeholder((blocks, 4, 4), "int8", "w")
    k, c = T.reduce_axis(blocks, "k"), T.reduce_axis(4, "c")
    near, far = T.compute(x.shape, lambda *i: x[i], "near"), T.compute(w.shape, lambda *i: w[i], "far")

    def element(i: T.Expr, j: T.Expr) -> T.Expr:
        return T.sum(near[i, k, c].astype("int32") * far[k, j, c].astype("int32"), (k, c))

    acc = T.compute((rows, 4), element, "acc")
    return [x, w], acc, T.compute((rows, 4), lambda i, j: acc[i, j] * 2, "y")


@bounded(25)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_ragged_tiles_of_instructions(rows: int, blocks: int, data: st.DataObject) -> None:
    """Peeled tiles continue the sum of the whole tiles; the second part never overwrites it."""
    inputs, acc, y = product(rows, blocks)
    near, far = (t for t in T.create_schedule(y).stages if t.name in ("near", "far"))
    s = T.create_schedule(y)
    for tensor, scope in ((near, "inp"), (far, "wgt"), (acc, "acc")):
        s[tensor].set_scope(scope)
    i, j, k, c = s[acc].order
    loops: list[Axis] = [i, k]
    for _ in range(data.draw(st.integers(1, 3))):
        axis = data.draw(st.sampled_from([loop for loop in loops if not loop.name.endswith(".o")]))
        loops.remove(axis)
        loops += s[acc].split(axis, data.draw(st.integers(1, 4)), "peel")
    order = _outer_first(loops, data)
    s[acc].reorder(*order, j, c)
    s[acc].tensorize(j, hw.gemm(TINY))
    outer = data.draw(st.sampled_from(order))
    if data.draw(st.booleans()):
        s[near].compute_at(s[acc], outer)
        s[far].compute_at(s[acc], outer)
    row = data.draw(st.sampled_from(s[near].order[:2]))
    s[near].split(row, data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["peel", "guard"])))
    s[near].tensorize(s[near].order[-1], hw.load(TINY, "inp"))
    s[far].tensorize(s[far].order[-2], hw.load(TINY, "wgt"))
    function = T.verify(T.lower(s, inputs))
    a = np.random.default_rng(0).integers(-128, 128, (rows, blocks, 4)).astype(np.int8)
    b = np.random.default_rng(1).integers(-128, 128, (blocks, 4, 4)).astype(np.int8)
    want = np.einsum("ikc,kjc->ij", a.astype(np.int32), b.astype(np.int32)) * 2
    np.testing.assert_array_equal(T.interpret(function, a, b)[0], want)


def _outer_first(loops: list[Axis], data: st.DataObject) -> list[Axis]:
    """Draw an order of the loops in which tiles come before the loops inside them."""
    order = list(data.draw(st.permutations(loops)))
    return sorted(order, key=lambda axis: (axis.name.count(".i"), order.index(axis)))


def test_instructions_with_tiles_that_do_not_divide_are_refused() -> None:
    inputs, acc, y = product(4, 5)
    s = T.create_schedule(y)
    s[acc].set_scope("acc")
    i, j, k, c = s[acc].order
    s[acc].split(k, 2, "guard")
    s[acc].reorder(*s[acc].order[2:4], i, j, c)
    s[acc].tensorize(j, hw.gemm(TINY))
    refusal = "acc: tiles do not divide what gemm computes at once, or its reduction"
    with pytest.raises(ValueError, match=refusal):
        T.lower(s, inputs)

    x = T.placeholder((4, 6), "int8", "x")
    z = T.compute(x.shape, lambda *i: x[i], "z")
    s = T.create_schedule(z)
    near = s.cache_read(x, "inp", z)
    _, inner = s[near].split("i1", 4, "guard")
    s[near].tensorize(inner, hw.load(TINY, "inp"))
    with pytest.raises(ValueError, match=r"x\.inp: tiles.*load_inp"):
        T.lower(s)


def test_the_window_of_an_instruction_stays_whole() -> None:
    x = T.placeholder((6, 1, 1, 4), "int8", "x")
    near = T.compute(x.shape, lambda *i: x[i], "near")
    p = hw.VectorOp("vin", "max")
    r = T.reduce_axis(3, "r")
    lo, hi = T.wrap(-128, "int32"), T.wrap(127, "int32")
    out = T.compute(
        (4, 1, 1, 4),
        lambda i, *e: T.clip(T.max(near[(i + r, *e)].astype("int32"), r), lo, hi).astype("int8"), "out",
    )  # fmt: skip
    y = T.compute(out.shape, lambda *i: out[i], "y")
    s = T.create_schedule(y)
    s[near].set_scope("vin")
    s[out].set_scope("out")
    s[out].tensorize(s[out].order[1], hw.vector(TINY, p))
    function = T.lower(s)
    a = np.random.default_rng(0).integers(-128, 128, (6, 1, 1, 4)).astype(np.int8)
    np.testing.assert_array_equal(T.interpret(function, a)[0], np.maximum(np.maximum(a[:4], a[1:5]), a[2:6]))
    s[out].split(r, 3)
    with pytest.raises(ValueError, match=r"out: the reduction.*vector_vin_max"):
        T.lower(s)
