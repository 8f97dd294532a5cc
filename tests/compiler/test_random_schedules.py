"""Random schedules compute numpy's results; stages inside a vectorised loop are computed lane by lane."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import numpy as np
import pytest
import random_schedules as cases
from thorough import some

from celosia import te
from celosia.compiler import expr as T
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.schedule.parallel import legalise_vector_loops

QUICK, THOROUGH, CHUNK = 80, 10_000, 250
SEED = int(os.environ.get("CELOSIA_SCHEDULES_SEED", "1"))
"""Of the thorough cases: `CELOSIA_SCHEDULES_SEED=12345 pytest -m thorough tests/compiler/test_random_schedules.py`."""
RNG = np.random.default_rng(0)


def compute(seed: int, count: int) -> None:
    """Run schedules until `count` of them are not refused."""
    done = 0
    for number in itertools.islice(cases.case_seeds(seed), 3 * count):
        done += cases.run(number)
        if done == count:
            return
    pytest.fail(f"only {done} of {3 * count} schedules were computed, the others refused")


@pytest.mark.parametrize("seed, count", some([(0, QUICK // 4), (0, QUICK // 2), (1, QUICK // 2)], [(0, QUICK // 4)]))
def test_random_schedules(seed: int, count: int) -> None:
    compute(seed, count)


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", range(THOROUGH // CHUNK))
def test_ten_thousand_random_schedules(chunk: int) -> None:
    compute(SEED * (THOROUGH // CHUNK) + chunk + 1000, CHUNK)


def product(kind: str, dtype: str, m: int = 3, n: int = 6, k: int = 5) -> tuple[list[T.Tensor], T.Tensor]:
    a, b = T.placeholder((m, k), dtype, "a"), T.placeholder((k, n), dtype, "b")
    r = T.reduce_axis(k, "r")
    return [a, b], T.compute((m, n), lambda i, j: T.Reduce(kind, a[i, r] * b[r, j], (r,)) + 1, "y")


KINDS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum, "ordered_sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod
}  # fmt: skip


def both(schedule: T.Schedule, *arrays: np.ndarray) -> np.ndarray:
    """Return the output, after a comparison of LLVM with the interpreter."""
    function = T.verify(T.lower(schedule))
    (expected,), (result,) = T.interpret(function, *arrays), compile_function(function)(*arrays)
    np.testing.assert_array_equal(result, expected)
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ("float32", "int32", "int8", "float64"))
def test_a_reduction_inside_a_vectorized_loop_is_each_lane_s_own(kind: str, dtype: str) -> None:
    """A reduction inside a vectorised loop has an accumulator for each lane."""
    _, y = product(kind, dtype)
    s = T.create_schedule(y)
    s[y].vectorize(y.axes[1])
    a, b = (RNG.integers(-3, 4, shape).astype(dtype) for shape in ((3, 5), (5, 6)))
    terms = a[:, :, None] * b[None]
    np.testing.assert_array_equal(both(s, a, b), KINDS[kind](terms, axis=1, **_typed(kind, dtype)) + 1)


def _typed(kind: str, dtype: str) -> dict[str, str]:
    return {"dtype": dtype} if kind in ("sum", "ordered_sum", "prod") else {}


def test_lanes_that_hold_accumulators_are_still_vectors() -> None:
    _, y = product("sum", "float32")
    s = T.create_schedule(y)
    s[y].vectorize(y.axes[1])
    assert (
        str(legalise_vector_loops(T.lower(s)))
        == """\
y(a: float32[3, 5], b: float32[5, 6]) -> (y: float32[3, 6]):
  for i0 in 3:
    local y.acc: float32[6]
    vectorized i1 in 6:
      y.acc[i1] = 0.0
      for r in 5:
        y.acc[i1] sum= (a[i0, r] * b[r, i1])
      y[i0, i1] = (y.acc[i1] + 1.0)"""
    )


@pytest.mark.parametrize("tail", ("shift", "guard", "peel"))
@pytest.mark.parametrize("reduced", (False, True))
def test_the_last_tile_of_a_vectorized_loop_may_be_smaller(tail: str, reduced: bool) -> None:
    """A guard inside a vectorised loop differs between lanes."""
    x = T.placeholder((5, 10), "int32", "x")
    k = T.reduce_axis(5, "k")
    y = T.compute((10,), lambda i: T.sum(x[k, i], k) if reduced else x[1, i] * 2, "y")
    s = T.create_schedule(y)
    _, inner = s[y].split(y.axes[0], 4, tail)
    s[y].vectorize(inner)
    a = RNG.integers(-9, 9, (5, 10)).astype(np.int32)
    np.testing.assert_array_equal(both(s, a), a.sum(0, dtype=np.int32) if reduced else a[1] * 2)


def test_lanes_that_read_apart_under_a_condition() -> None:
    """Masked lanes read nothing outside of the tensor, even without a masked vector load."""
    x = T.placeholder((6, 4), "float32", "x")
    y = T.compute((4, 8), lambda i, j: T.select((j >= 1) & (j < 7), x[j - 1, i], 0.5), "y")
    s = T.create_schedule(y)
    s[y].vectorize(y.axes[1])
    a = RNG.standard_normal((6, 4)).astype(np.float32)
    np.testing.assert_array_equal(both(s, a), np.pad(a, ((1, 1), (0, 0)), constant_values=0.5).T)


def test_a_reduction_inside_a_vectorized_loop_through_te() -> None:
    a, b = te.placeholder((4, 7), "float32", "a"), te.placeholder((7, 9), "float32", "b")
    k = te.reduce_axis((0, 7), "k")
    c = te.compute((4, 9), lambda y, x: te.sum(a[y, k] * b[k, x], axis=k), "c")
    s = te.create_schedule(c)
    s[c].vectorize(c.op.axis[1])
    x, y = (RNG.integers(-9, 9, shape).astype(np.float32) for shape in ((4, 7), (7, 9)))
    made = np.zeros((4, 9), np.float32)
    te.build(s, [a, b, c])(x, y, made)
    np.testing.assert_array_equal(made, x @ y)


def test_schedules_that_cannot_be_followed_are_refused() -> None:
    _, y = product("ordered_sum", "float32")
    *_, r = T.create_schedule(y)[y].order

    def refused(reason: str, *steps: Callable[[T.Stage], object]) -> None:
        s = T.create_schedule(y)
        with pytest.raises(T.ScheduleError, match=reason):
            for step in steps:
                step(s[y])
            T.lower(s)

    i, j = y.axes
    refused("an ordered sum of floats over r in another order",
            lambda s: s.split(r, 2), lambda s: s.reorder("r.i", "r.o"))  # fmt: skip
    refused("an ordered sum of floats cannot be accumulated in lanes", lambda s: s.accumulate_lanes(r, (4,)))
    refused("r, which is accumulated in lanes, is not the innermost loop any more",
            lambda s: s.accumulate_lanes(r, (4,)), lambda s: s.reorder(r, j))  # fmt: skip
    refused("y: the vectorized loop i1 contains the vectorized loop i0",
            lambda s: s.vectorize(j), lambda s: s.reorder(j, i), lambda s: s.vectorize(i))  # fmt: skip
    refused("only the innermost data loop can be vectorized", lambda s: s.vectorize(i))


def test_nothing_is_computed_inside_the_loops_of_a_vectorized_loop() -> None:
    x = T.placeholder((4, 6), "int32", "x")
    p = T.compute((4, 6), lambda i, j: x[i, j] * 2, "p")
    k = T.reduce_axis(6, "k")
    y = T.compute((4,), lambda i: T.sum(p[i, k], k), "y")
    s = T.create_schedule(y)
    s[y].vectorize(y.axes[0])
    s[p].compute_at(s[y], s[y].order[1])
    with pytest.raises(T.ScheduleError, match=r"p.*vectorized loop i0"):
        T.lower(s)


def test_an_empty_loop_can_be_split() -> None:
    x = T.placeholder((0, 3), "float32", "x")
    y = T.compute((0, 3), lambda i, j: x[i, j] + 1.0, "y")
    s = T.create_schedule(y)
    s[y].split(y.axes[0], 4)
    assert both(s, np.zeros((0, 3), np.float32)).shape == (0, 3)


@pytest.mark.parametrize(
    "change", [lambda stage: stage.split(stage.order[0], 2), lambda stage: stage.fuse(*stage.order)]
)
def test_a_tensorized_loop_that_is_split_or_fused_is_refused(change: Callable[[T.Stage], object]) -> None:
    """A split or fused tensorised loop is refused, also in a stage at the loop of a reader with larger tiles."""
    x, a = te.placeholder((4, 4), "float32", "x"), te.placeholder((4, 4), "float32", "a")
    y = te.compute((4, 4), lambda i, j: x[i, j], "y")
    z = te.compute((4, 4), lambda i, j: y[i, j] + 1, "z")
    tile = te.compute((4, 4), lambda i, j: a[i, j], "tile")
    schedule = T.create_schedule(z.node)
    stage, reader = schedule[y.node], schedule[z.node]
    stage.tensorize(stage.order[0], te.decl_tensor_intrin(tile.op, lambda p, q: te.hardware_intrin("t", *p, *q)))
    stage.compute_at(reader, reader.order[0])
    change(stage)
    with pytest.raises(T.ScheduleError, match="was split or fused"):
        T.lower(schedule)


@pytest.mark.parametrize("extents", [(0, 5), (5, 0), (0,)])
def test_no_steps_in_lanes(extents: tuple[int, ...]) -> None:
    x = T.placeholder((3, *(max(extent, 1) for extent in extents)), "float32", "x")
    axes = tuple(T.reduce_axis(extent, f"k{number}") for number, extent in enumerate(extents))
    y = T.compute((3,), lambda i: T.Reduce("max", x[(i, *axes)], axes), "y")
    schedule = T.create_schedule(y)
    schedule[y].accumulate_lanes(axes[-1], (4, 2))
    assert np.all(both(schedule, np.ones(x.shape, np.float32)) == -np.inf)


def test_an_intrinsic_does_not_take_no_steps() -> None:
    """An intrinsic with a loop of no steps is refused: the reduction would lose its start value."""
    a, b = te.placeholder((4, 0), "float32", "a"), te.placeholder((0, 4), "float32", "b")
    r = te.reduce_axis((0, 0), "r")
    y = te.compute((4, 4), lambda i, j: te.sum(a[i, r] * b[r, j], r), "y")
    schedule = T.create_schedule(y.node)
    stage = schedule[y.node]
    stage.tensorize(stage.order[0], te.decl_tensor_intrin(y.op, lambda p, q: te.hardware_intrin("t", *p, *q)))
    with pytest.raises(T.ScheduleError, match="reduction r"):
        T.lower(schedule)


def test_no_element_of_a_tensor_is_outside_of_another() -> None:
    """Tensors without elements have no index outside of another tensor."""
    x = te.placeholder((2, 8), "float32", "x")
    y = te.compute((0, 8), lambda i, j: x[i + 2, j], "y")
    te.build(te.create_schedule(y), [x, y])(np.ones((2, 8), np.float32), np.empty((0, 8), np.float32))


@pytest.mark.parametrize("source", ["int8", "int16", "int32"])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_negative_numbers_as_long_unsigned_ones_become_floats(source: str, size: int) -> None:
    """Negative numbers cast to uint64 convert to floats correctly. LLVM 22 narrows the operand and takes it as
    unsigned."""
    x = T.placeholder((size,), source, "x")
    y = T.compute((size,), lambda i: x[i].astype("uint64").astype("float32"), "y")
    values = np.arange(-size // 2, size - size // 2).astype(source)
    np.testing.assert_array_equal(both(T.create_schedule(y), values), values.astype("uint64").astype("float32"))
