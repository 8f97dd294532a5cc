"""No schedule changes results, and an impossible one is refused with a reason.

Each lowered function is verified, printed and parsed again, and run by the interpreter and by LLVM.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler import expr as T
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.vthread.interleave import interleave

RNG = np.random.default_rng(0)
Tensors = tuple[list[T.Tensor], list[T.Tensor]]
SCOPES = ["workspace", "local", "inp", "acc"]


def integers(*shape: int) -> np.ndarray:
    return RNG.integers(-9, 10, shape).astype(np.int32)


def checked(function: T.Function) -> T.Function:
    """Verify `function`, parse its text and compare the texts; return the function."""
    T.verify(function)
    again = T.parse(str(function))
    assert str(again) == str(function)
    T.verify(again)
    return function


def results(function: T.Function, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return the interpreter's outputs, after a comparison with virtual threads, with the parsed text and with LLVM."""
    checked(function)
    expected = T.interpret(function, *inputs)
    spread = checked(interleave(function))
    for other in (T.interpret(spread, *inputs), T.interpret(T.parse(str(spread)), *inputs),
                  compile_function(spread.expanded())(*inputs)):  # fmt: skip
        for got, want in zip(other, expected, strict=True):
            np.testing.assert_array_equal(got, want)
    return expected


def chain(m: int, n: int, k: int, number: Callable[[int, int], int] = lambda low, high: low) -> Tensors:
    """Return (inputs, tensors computed from them): shifted reads, padding, a reduction, and functions of it.

    number(low, high) chooses operations and how far reads are shifted.
    """
    a, b = T.placeholder((m, k), "int32", "a"), T.placeholder((k, n), "int32", "b")
    window, stride, before = number(1, 3), number(1, 2), number(0, 1)
    wide = (n - 1) * stride + window
    r, q = T.reduce_axis(k, "r"), T.reduce_axis(window, "q")
    kind = [T.sum, T.max, T.min, T.ordered_sum][number(0, 3)]

    def op(x: T.Expr, y: T.Expr) -> T.Expr:
        return T.binary(["add", "mul", "sub", "max", "xor"][number(0, 4)], x, y)

    def mirrored(i: T.Expr, size: int) -> T.Expr:
        return [size - 1 - i, (i + 1) % size, i // 2, T.minimum(i + 1, size - 1)][number(0, 3)]

    p = T.compute((m, k), lambda i, j: op(a[i, j] * 2, a[i, mirrored(j, k)]), "p")
    pad = T.compute((k, wide), lambda i, j: T.select((j >= before) & (j < n + before), b[i, j - before], 7), "pad")
    c = T.compute((m, n), lambda i, j: kind(op(p[i, r], pad[r, j * stride + q]), (r, q)), "c")
    d = T.compute((m, n), lambda i, j: op(c[i, j], -c[mirrored(i, m), j]) + p[i, 0], "d")
    up = number(0, 1)

    def neighbour(i: T.Expr, j: T.Expr) -> T.Expr:
        return T.select(i < m - 1, d[i + 1, j], 3) if up else T.select(i >= 1, d[i - 1, j], 0)

    e = T.compute((m, n), lambda i, j: op(d[i, j], neighbour(i, mirrored(j, n))), "e")
    return [a, b], [p, pad, c, d, e]


@settings(max_examples=tries(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), st.data())
def test_any_legal_schedule_computes_the_same(m: int, n: int, k: int, data: st.DataObject) -> None:
    inputs, tensors = chain(m, n, k, lambda low, high: data.draw(st.integers(low, high)))
    arrays = [integers(*t.shape) for t in inputs]
    expected = T.interpret(T.lower(tensors[-1], inputs), *arrays)
    s = T.create_schedule(tensors[-1])
    for _ in range(data.draw(st.integers(1, 8))):
        stage = s[data.draw(st.sampled_from(list(s.stages)))]
        axis = data.draw(st.sampled_from(stage.order))
        match data.draw(st.integers(0, 9)):
            case 0 | 1:
                stage.split(axis, data.draw(st.integers(1, 4)))
            case 2:
                stage.reorder(*data.draw(st.permutations(stage.order)))
            case 3:
                stage.vthread(axis) if not axis.reduce else stage.unroll(axis)
            case 4:
                later = [t for t in s.stages if any(n.tensor is stage.tensor for n in reads(s, t))]
                s.cache_read(stage.tensor, data.draw(st.sampled_from(SCOPES)), later[:1]) if later else None
            case 5:
                s.cache_read(inputs[0], data.draw(st.sampled_from(SCOPES)), first_reader(s, inputs[0]))
            case 6 if not (stage.relations or stage.kinds or stage.attached):
                s.cache_write(stage.tensor, data.draw(st.sampled_from(SCOPES)))
            case _ if stage.tensor is not tensors[-1]:
                after = list(s.stages)[list(s.stages).index(stage.tensor) + 1 :]
                consumer = s[data.draw(st.sampled_from(after))]
                before = stage.attached
                stage.compute_at(consumer, data.draw(st.sampled_from(consumer.order)))
                if not legal(s):
                    stage.attached = before
    if not legal(s):
        return
    for got, want in zip(results(T.lower(s, inputs), *arrays), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def reads(s: T.Schedule, tensor: T.Tensor) -> list[T.Load]:
    from celosia.compiler.expr.nodes import loads

    return loads(s[tensor].body)


def first_reader(s: T.Schedule, tensor: T.Tensor) -> T.Tensor:
    return next(t for t in s.stages if any(load.tensor is tensor for load in reads(s, t)))


REFUSALS = ("but also read outside it", "where nothing reads it", "was split or fused since", "is accumulated in place")


def legal(s: T.Schedule) -> bool:
    """Return whether the schedule can be lowered; a refusal must have one of the known reasons."""
    try:
        T.lower(s)
        return True
    except ValueError as error:
        assert any(reason in str(error) for reason in REFUSALS), error
        return False


def test_compute_at_keeps_only_what_one_iteration_needs() -> None:
    a = T.placeholder((8, 10), "float32", "a")
    p = T.compute((8, 10), lambda i, j: a[i, j] * 2.0, "p")
    q = T.compute((8, 8), lambda i, j: p[i, j] + p[i, j + 2], "q")
    s = T.create_schedule(q)
    outer, _ = s[q].split(q.axes[1], 4)
    s[p].compute_at(s[q], outer)
    assert (
        str(T.lower(s))
        == """\
q(a: float32[8, 10]) -> (q: float32[8, 8]):
  for i0 in 8:
    for i1.o in 2:
      local p: float32[1, 6]
      for i1 in 6:
        p[0, i1] = (a[i0, ((i1.o * 4) + i1)] * 2.0)
      for i1.i in 4:
        q[i0, ((i1.o * 4) + i1.i)] = (p[0, i1.i] + p[0, (i1.i + 2)])"""
    )


def test_caches_and_scopes() -> None:
    a, b = T.placeholder((4, 8), "int32", "a"), T.placeholder((8, 4), "int32", "b")
    k = T.reduce_axis(8, "k")
    c = T.compute((4, 4), lambda i, j: T.sum(a[i, k] * b[k, j], k), "c")
    s = T.create_schedule(c)
    acc = s.cache_write(c, "acc")
    near = s.cache_read(a, "inp", acc)
    s[acc].compute_at(s[c], c.axes[0])
    ko, _ = s[acc].split(k, 4)
    s[acc].reorder(ko, *acc.axes)
    s[near].compute_at(s[acc], ko)
    function = T.lower(s)
    assert (
        str(function)
        == """\
c(a: int32[4, 8], b: int32[8, 4]) -> (c: int32[4, 4]):
  for i0 in 4:
    acc c.acc: int32[1, 4]
    for i1 in 4:
      c.acc[0, i1] = int32(0)
    for k.o in 2:
      inp a.inp: int32[1, 4]
      for i1 in 4:
        a.inp[0, i1] = a[i0, ((k.o * 4) + i1)]
      for i1 in 4:
        for k.i in 4:
          c.acc[0, i1] sum= (a.inp[0, k.i] * b[((k.o * 4) + k.i), i1])
    for i1 in 4:
      c[i0, i1] = c.acc[0, i1]"""
    )
    x, y = integers(4, 8), integers(8, 4)
    np.testing.assert_array_equal(results(function, x, y)[0], x @ y)


def test_virtual_threads_have_their_own_memory() -> None:
    a = T.placeholder((4, 8), "int32", "a")
    k = T.reduce_axis(8, "k")
    c = T.compute((4,), lambda i: T.sum(a[i, k], k), "c")
    s = T.create_schedule(c)
    near, acc = s.cache_read(a, "inp", c), s.cache_write(c, "acc")
    outer, _ = s[c].split(c.axes[0], 2)
    s[c].vthread(outer)
    s[acc].compute_at(s[c], outer)
    s[near].compute_at(s[acc], acc.axes[0])
    function = T.lower(s)
    assert "vthread i0.o in 2" in str(function)
    spread = str(interleave(function))
    assert "acc c.acc: int32[2, 2]" in spread and "inp a.inp: int32[2, 1, 8]" in spread and "vthread" not in spread
    np.testing.assert_array_equal(results(function, (x := integers(4, 8)))[0], x.sum(1))


def test_divisions_that_a_split_makes_needless_go() -> None:
    a = T.placeholder((3, 4), "int32", "a")
    b = T.compute((12,), lambda i: a[i // 4, i % 4], "b")
    s = T.create_schedule(b)
    s[b].split(b.axes[0], 4)
    assert "a[i0.o, i0.i]" in str(T.lower(s))


def test_illegal_placements_say_why() -> None:
    _, (p, pad, c, d, e) = chain(4, 6, 8)
    s = T.create_schedule([d, e])
    i, _ = c.axes
    s[p].compute_at(s[c], i)
    with pytest.raises(ValueError, match=r"p.*loop i0 of c.*outside"):
        T.lower(s)
    s[p].compute_root()
    s[pad].compute_at(s[e], e.axes[0])
    with pytest.raises(ValueError, match=r"pad.*inside e at loop i0"):
        T.lower(s)
    s[pad].compute_at(s[c], i)
    s[c].split(i, 2)
    with pytest.raises(ValueError, match=r"pad.*loop i0 of c.*split or fused"):
        T.lower(s)
    s[pad].compute_root()
    s[d].compute_at(s[e], e.axes[0])
    with pytest.raises(ValueError, match=r"d is an output.*after e"):
        T.lower(s)
    s[d].compute_root()
    s[d].set_scope("acc")
    with pytest.raises(ValueError, match=r"d is an output.*acc.*cache_write"):
        T.lower(s)
    s[d].compute_at(s[e], e.axes[0])
    with pytest.raises(ValueError, match="e cannot be computed inside itself"):
        s[e].compute_at(s[e], e.axes[0])
    with pytest.raises(ValueError, match="d is computed inside e already"):
        s[e].compute_at(s[d], d.axes[0])
    with pytest.raises(ValueError, match="i0 is not one of the loops"):
        s[p].compute_at(s[c], i)
    s[e].vectorize(e.axes[1])
    with pytest.raises(ValueError, match="inside the vectorized loop i1"):
        s[c].compute_at(s[e], e.axes[1])
    with pytest.raises(ValueError, match=r"at a loop.*inlined"):
        s[d].compute_inline()
    s[p].compute_inline()
    with pytest.raises(ValueError, match="p is inlined"):
        s[p].compute_at(s[c], c.axes[1])


def test_illegal_caches_and_threads_say_why() -> None:
    (a, b), (p, _, c, _, e) = chain(4, 6, 8)
    s = T.create_schedule(e)
    with pytest.raises(ValueError, match=r"'attic'.*workspace, local, inp"):
        s.cache_read(a, "attic", p)
    with pytest.raises(ValueError, match="'attic'"):
        s[p].set_scope("attic")
    with pytest.raises(ValueError, match="c does not read a"):
        s.cache_read(a, "inp", c)
    with pytest.raises(ValueError, match="without a reader"):
        s.cache_read(a, "inp", [])
    with pytest.raises(ValueError, match="b is not computed by this schedule"):
        s.cache_write(b, "out")
    s[e].split(e.axes[0], 2)
    with pytest.raises(ValueError, match=r"cache_write.*before"):
        s.cache_write(e, "out")
    with pytest.raises(ValueError, match=r"reduction r.*virtual thread"):
        s[c].vthread(s[c].order[2])
    s[c].set_scope("acc")
    s[c].split(c.axes[0], 3)
    with pytest.raises(ValueError, match=r"in place.*tiles of 3.*4 of i0"):
        T.lower(s)
