"""Tensor expressions, schedules and loops have the meaning that the interpreter defines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some, tries

from celosia.compiler import expr as T
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.expr import loops
from celosia.compiler.expr.affine import interval, linear, unravel
from celosia.compiler.expr.loop_passes import merge

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def matmul(m: int, n: int, k: int) -> tuple[T.Tensor, T.Tensor, T.Tensor]:
    a, b = T.placeholder((m, k), "float32", "a"), T.placeholder((k, n), "float32", "b")
    r = T.reduce_axis(k, "k")
    return a, b, T.compute((m, n), lambda i, j: T.sum(a[i, r] * b[r, j], r) + 1.0, "c")


def both(function: T.Function, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return the interpreter's outputs, after a comparison with LLVM's."""
    expected = T.interpret(function, *inputs)
    for actual, reference in zip(compile_function(function)(*inputs), expected, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-5)
    return expected


def test_expressions_fold_and_check_types() -> None:
    x = T.Var("x")
    assert str(x * 1 + 0) == "x"
    assert str((x + 2) * 3) == "((x + 2) * 3)"
    with pytest.raises(TypeError, match="add of int64 and float32"):
        x + T.wrap(1.0, "float32")
    with pytest.raises(TypeError, match="not a truth value"):
        bool(x < 3)
    with pytest.raises(ValueError, match=r"a has 2 dimensions.*1"):
        T.placeholder((2, 3), "int8", "a")[x]
    with pytest.raises(ValueError, match="not a reduce_axis"):
        T.sum(x, T.Axis("i", extent=3))


def test_linear_forms_and_intervals() -> None:
    i, j = T.Axis("i", extent=4), T.Axis("j", extent=8)
    assert linear((i * 8 + j) * 2 - i * 16) == {j: 2}
    assert interval(T.clip(i * 8 + j - 3, 0, 20)) == (0, 20)
    assert interval(i * 8 + j - 3) == (-3, 28)
    assert [str(k) for k in unravel((2, 3, 4), i)] == ["(i // 12)", "((i // 4) % 3)", "(i % 4)"]


def test_lowered_loops_read_well() -> None:
    _, _, c = matmul(4, 6, 8)
    assert (
        str(T.lower(c))
        == """\
c(a: float32[4, 8], b: float32[8, 6]) -> (c: float32[4, 6]):
  for i0 in 4:
    for i1 in 6:
      local c.acc: float32[]
      c.acc[] = 0.0
      for k in 8:
        c.acc[] sum= (a[i0, k] * b[k, i1])
      c[i0, i1] = (c.acc[] + 1.0)"""
    )


@settings(max_examples=tries(15), deadline=None)
@given(
    st.integers(1, 7), st.integers(1, 9), st.integers(1, 8), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4),
    st.booleans(), st.permutations(range(5)),
)  # fmt: skip
def test_any_schedule_computes_the_same(
    m: int, n: int, k: int, fm: int, fn: int, fk: int, fuse: bool, order: list[int]
) -> None:
    a, b, c = matmul(m, n, k)
    s = T.create_schedule(c)
    i, j = c.axes
    r = s[c].order[-1]
    if fuse:
        f = s[c].fuse(i, j)
        s[c].split(f, fm)
        s[c].split(r, fk)
    else:
        io, ii = s[c].split(i, fm)
        jo, ji = s[c].split(j, fn)
        ro, ri = s[c].split(r, fk)
        loops_ = [io, ii, jo, ro, ri]
        s[c].reorder(*(loops_[p] for p in order), ji)
        s[c].unroll(ii)
        s[c].vectorize(ji)
    x, y = floats(m, k), floats(k, n)
    (result,) = both(T.lower(s, [a, b]), x, y)
    np.testing.assert_allclose(result, x @ y + 1, rtol=1e-5, atol=1e-5)


def test_illegal_schedules_say_why() -> None:
    _, _, c = matmul(4, 6, 8)
    stage = T.create_schedule(c)[c]
    i, j = c.axes
    r = stage.order[-1]
    with pytest.raises(ValueError, match=r"reduction k.*parallel"):
        stage.parallel(r)
    with pytest.raises(ValueError, match="only the innermost data loop"):
        stage.vectorize(i)
    with pytest.raises(ValueError, match=r"i0.*i1"):
        stage.fuse(j, i)
    with pytest.raises(ValueError, match="a reduction cannot be inlined"):
        stage.compute_inline()
    stage.split(i, 2)
    with pytest.raises(ValueError, match="i0 is not one of the loops"):
        stage.unroll(i)


def test_inlining_keeps_values() -> None:
    a = T.placeholder((3, 8), "float32", "a")
    b = T.compute((3, 8), lambda i, j: a[i, j] * 2.0, "b")
    c = T.compute((8, 3), lambda i, j: b[j, i] + 1.0, "c")
    d = T.compute((24,), lambda i: c.flat(i) - 3.0, "d")
    s = T.create_schedule(d)
    s[b].compute_inline()
    s[c].compute_inline()
    x = floats(3, 8)
    function = T.lower(s)
    assert "workspace" not in str(function)
    np.testing.assert_allclose(both(function, x)[0], (x * 2 + 1).T.reshape(-1) - 3, rtol=1e-6)


def test_chains_become_one_loop_over_merged_axes() -> None:
    a = T.placeholder((3, 4, 8), "float32", "a")
    b = T.compute(a.shape, lambda *i: T.call("exp", a[i]), "b")
    c = T.compute(a.shape, lambda *i: b[i] + a[i], "c")
    text = str(T.lower(T.collapse(T.fuse_injective([c]))))
    assert text.count("for ") == 1 and "in 96" in text and "workspace" not in text


def test_a_reduction_does_not_compute_its_operand_again_and_again() -> None:
    a, b = T.placeholder((4, 8), "float32", "a"), T.placeholder((8, 6), "float32", "b")
    e = T.compute(a.shape, lambda *i: T.call("exp", a[i]), "e")
    k = T.reduce_axis(8, "k")
    c = T.compute((4, 6), lambda i, j: T.sum(e[i, k] * b[k, j], k), "c")
    assert "workspace e" in str(T.lower(T.fuse_injective([c])))


def test_guarded_loads_stay_inside() -> None:
    a = T.placeholder((5,), "float32", "a")
    b = T.compute((9,), lambda i: T.select((i >= 2) & (i < 7), a[i - 2], 0.0), "b")
    x = floats(5)
    np.testing.assert_array_equal(both(T.lower(b), x)[0], np.pad(x, 2))


def test_the_interpreter_catches_an_index_out_of_range() -> None:
    a = T.placeholder((5,), "float32", "a")
    with pytest.raises(IndexError, match=r"a\[5\] accessed at \[5\]"):
        T.interpret(T.lower(T.compute((6,), lambda i: a[i], "b")), floats(5))


KINDS = "int8", "uint8", "int16", "int32", "int64", "uint32", "uint64"


@pytest.mark.parametrize("dtype", some(KINDS, ["int8", "int64", "uint32"]))
def test_integer_arithmetic(dtype: str) -> None:
    info = np.iinfo(dtype)
    values = np.array([info.min, info.min + 1, 0, 1, 2, 3, 7, info.max - 1, info.max], dtype)
    x, y = np.meshgrid(values, np.append(values, np.array(info.max // 3 * 2, dtype)))
    a, b = T.placeholder(x.shape, dtype, "a"), T.placeholder(x.shape, dtype, "b")
    ops = ("add", "sub", "mul", "div", "floordiv", "mod", "min", "max", "and", "or", "xor", "lt", "le", "eq", "ne")
    outputs = [T.compute(x.shape, lambda *i, o=o: T.binary(o, a[i], b[i]), o) for o in ops]
    function = T.lower(outputs, [a, b])
    with np.errstate(all="ignore"):
        expected = T.interpret(function, x, y)
    for op, actual, reference in zip(ops, compile_function(function)(x, y), expected, strict=True):
        np.testing.assert_array_equal(actual, reference, err_msg=op)


def test_statements() -> None:
    a = T.placeholder((4,), "int32", "a")
    out = T.Tensor("out", (4,), "int32")
    i, v = T.Axis("i", extent=4), T.Var("v", "int32")
    body = loops.For(i, 4, loops.Let(v, a[i] * 2, loops.If(
        i < 2, loops.Store(out, (i,), v), loops.Store(out, (i,), v + 1))))  # fmt: skip
    function = T.Function("f", (a,), (out,), body)
    assert (
        str(function)
        == """\
f(a: int32[4]) -> (out: int32[4]):
  for i in 4:
    v = (a[i] * int32(2))
    if (i < 2):
      out[i] = v
    else:
      out[i] = (v + int32(1))"""
    )
    assert both(function, np.arange(4, dtype=np.int32))[0].tolist() == [0, 2, 5, 7]


def test_the_cpu_refuses_what_it_cannot_run() -> None:
    i = T.Axis("i", extent=4)
    out = T.Tensor("out", (4,), "int64")
    store = loops.Store(out, (i,), i)
    with pytest.raises(ValueError, match="vthread"):
        compile_function(T.Function("f", (), (out,), loops.For(i, 4, store, "vthread")))
    with pytest.raises(ValueError, match="Intrinsic gemm"):
        compile_function(T.Function("f", (), (out,), loops.Intrinsic("gemm", (out,))))


def softmax(n: int, c: int) -> tuple[T.Tensor, T.Tensor]:
    a = T.placeholder((n, c), "float32", "a")
    k, l = T.reduce_axis(c, "k"), T.reduce_axis(c, "l")
    m = T.compute((n,), lambda i: T.max(a[i, k], k), "m")
    e = T.compute((n, c), lambda i, j: T.call("exp", a[i, j] - m[i]), "e")
    s = T.compute((n,), lambda i: T.sum(e[i, l], l), "s")
    return a, T.compute((n, c), lambda i, j: e[i, j] / s[i], "o")


def test_loops_over_the_same_rows_are_merged() -> None:
    _, o = softmax(4, 8)
    before = T.lower(T.fuse_injective([o]))
    after = T.fuse_loops(before)
    assert (
        str(after)
        == """\
o(a: float32[4, 8]) -> (o: float32[4, 8]):
  local m: float32[1]
  local e: float32[8]
  local s: float32[1]
  for i0 in 4:
    local m.acc: float32[]
    m.acc[] = -inf
    for k in 8:
      m.acc[] max= a[i0, k]
    m[0] = m.acc[]
    local s.acc: float32[]
    s.acc[] = 0.0
    for i1 in 8:
      e[i1] = exp((a[i0, i1] - m[0]))
      s.acc[] sum= e[i1]
    s[0] = s.acc[]
    for i1 in 8:
      o[i0, i1] = (e[i1] / s[0])"""
    )
    x = floats(4, 8)
    np.testing.assert_array_equal(T.interpret(before, x)[0], both(after, x)[0])


def test_loops_that_read_other_iterations_stay_apart() -> None:
    a = T.placeholder((8, 4), "float32", "a")
    b = T.compute((8, 4), lambda i, j: T.call("exp", a[i, j]), "b")
    for shifted in (lambda i, j: b[7 - i, j], lambda i, j: b[i, j] + b[T.maximum(i - 1, 0), j]):
        c = T.compute((8, 4), shifted, "c")
        function = T.lower([c])
        assert str(T.fuse_loops(function)) == str(function)


PLACES = {
    "here": lambda i: i,
    "there": lambda i: 7 - i,
    "beside": lambda i: T.minimum(i + 1, 7),
    "first": lambda i: i * 0,
}


@settings(max_examples=tries(40), deadline=None)
@given(st.lists(st.tuples(
    st.integers(0, 3), st.sampled_from(["here", "here", "there", "first"]), st.integers(0, 3),
    st.sampled_from(["here", "here", "there", "beside", "first"]), st.booleans(),
), min_size=2, max_size=5))  # fmt: skip
def test_merged_loops_of_any_order_do_the_same(rows: list[tuple[int, str, int, str, bool]]) -> None:
    tensors = [T.Tensor(f"t{n}", (8,), "int32") for n in range(4)]
    nests: list[loops.Stmt] = []
    for number, (to, at, source, read, added) in enumerate(rows):
        i = T.Axis("i", extent=8)
        value = T.Load(tensors[source], (PLACES[read](i),)) * 2 + number + i.astype("int32")
        index = (PLACES[at](i),)
        body = T.Update("sum", tensors[to], index, value) if added else T.Store(tensors[to], index, value)
        nests.append(T.For(i, 8, body))
    runs = [T.Function("f", (), tuple(tensors), loops.block(*each)) for each in (nests, merge(nests))]
    for actual, expected in zip(*map(T.interpret, runs), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_what_is_computed_is_summed_in_the_same_loop() -> None:
    x, e, s = (T.Tensor(name, shape, "int32") for name, shape in (("x", (4, 8)), ("e", (4, 8)), ("s", ())))
    row, i, j = (T.Axis(name, extent=n) for name, n in (("row", 4), ("i", 8), ("j", 8)))
    first = T.For(i, 8, T.Store(e, (row, i), T.Load(x, (row, i)) + 1))
    start = T.Store(s, (), T.wrap(0, "int32"))
    second = T.For(j, 8, T.Update("sum", s, (), T.Load(e, (row, j))))
    assert len(merge([first, start, second])) == 2
    assert len(merge([first, T.Store(e, (row, i * 0), T.wrap(0, "int32")), second])) == 3  # it changes what is summed


def test_alike_loops_alone() -> None:
    x, y, z = (T.Tensor(name, shape, "int32") for name, shape in (("x", (4,)), ("y", (4,)), ("z", (4, 8))))
    i, k, j = (T.Axis(name, extent=n) for name, n in (("i", 4), ("k", 4), ("j", 8)))
    flat = T.For(i, 4, T.Store(y, (i,), T.Load(x, (i,)) + 1))
    nest = T.For(k, 4, T.For(j, 8, T.Store(z, (k, j), T.Load(y, (k,)))))
    assert len(merge([flat, nest])) == 1
    assert merge([flat, nest], same_depth=True) == [flat, nest]


def test_padding_joins_the_window_that_reads_it() -> None:
    a = T.placeholder((5, 9), "float32", "a")
    p = T.compute((5, 11), lambda c, x: T.select((x >= 1) & (x < 10), a[c, x - 1], 0.0), "p")
    k = T.reduce_axis(3, "k")
    o = T.compute((5, 9), lambda c, x: T.sum(p[c, x + k], k), "o")
    function = T.fuse_loops(T.lower(o))
    assert "local p: float32[11]" in str(function)
    x = floats(5, 9)
    expected = sum(np.pad(x, ((0, 0), (1, 1)))[:, k : k + 9] for k in range(3))
    np.testing.assert_allclose(both(function, x)[0], expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=tries(15), deadline=None)
@given(st.integers(1, 5), st.integers(1, 150), st.sampled_from(["sum", "max", "min", "prod"]), st.booleans())
def test_lanes_reduce_any_length(n: int, c: int, kind: str, whole: bool) -> None:
    dtype = "int32" if whole else "float32"
    a, k = T.placeholder((n, c), dtype, "a"), T.reduce_axis(c, "k")
    o = T.compute((n,), lambda i: getattr(T, kind)(a[i, k], k), "o")
    s = T.create_schedule(o)
    s[o].accumulate_lanes(k, (16, 4))
    x = RNG.integers(-2, 3, (n, c)).astype(dtype)
    np.testing.assert_array_equal(both(T.lower(s), x)[0], getattr(np, kind)(x, 1, dtype=dtype) if kind in (
        "sum", "prod") else getattr(np, kind)(x, 1))  # fmt: skip


def test_tables_are_part_of_the_kernel() -> None:
    table = T.constant(np.array([3, 1, 2], np.int64), "table")
    a = T.placeholder((4,), "float32", "a")
    function = T.lower(T.compute((3,), lambda i: a[table[i]], "b"))
    x = floats(4)
    assert [t.name for t in function.inputs] == ["a"]
    np.testing.assert_array_equal(both(function, x)[0], x[[3, 1, 2]])


def test_a_reduction_in_a_reduction_is_refused() -> None:
    a = T.placeholder((3, 4), "float32", "a")
    k, l = T.reduce_axis(3, "k"), T.reduce_axis(4, "l")
    with pytest.raises(ValueError, match="make the inner one a tensor"):
        T.lower(T.compute((1,), lambda i: T.sum(T.max(a[k, l], l), k), "b"))
