"""Pipelined loops of own operators give the same bytes, load ahead of compute, and load nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import numpy as np
import pytest
from expressions import TALL, TINY, WIDE, int8, matmul, matmul_arrays
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler import expr as T
from celosia.compiler.expr.nodes import Axis
from celosia.compiler.tensorize import intrinsics as hw
from celosia.compiler.tensorize.render import RenderError, render
from celosia.compiler.vthread.pipeline import Load, Ring, Stream
from celosia.driver.te.kernels import run
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.sim.functional.fsim import FunctionalDevice

from .test_intrinsics import on_device, opcodes

SETTINGS = settings(
    max_examples=tries(12), deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)  # fmt: skip


def product(
    cfg: Config, inputs: list[T.Tensor], acc: T.Tensor, y: T.Tensor, tiles: tuple[int, int, int],
    rows_outside: bool = True, kept: str = "", split: bool = False, pipelined: bool = True,
) -> T.Schedule:  # fmt: skip
    """Return a schedule of a product in tiles of (rows, output blocks, input blocks).

    kept: letters of x, w and p whose copies stay on chip. split: sums of all output blocks of some rows stay in acc
    while several GEMMs add to them.
    """
    x, w, par = inputs
    (tm, tn, tk), bi, bo = tiles, cfg.block_in, cfg.block_out
    s = T.create_schedule(y)
    s[acc].set_scope("acc")
    out = s.cache_write(y, "out")
    copies = {"x": s.cache_read(x, "inp", acc), "w": s.cache_read(w, "wgt", acc), "p": s.cache_read(par, "par", out)}
    for name in kept:
        s[copies[name]].keep()
    rows, row = s[y].split(y.axes[0], tm, "peel")
    blocks, block = s[y].split(y.axes[1], tn * bo, "peel")
    pieces, lane = s[y].split(block, cfg.group)
    order = [rows, blocks] if rows_outside or split else [blocks, rows]
    s[y].reorder(*order, row, pieces, lane)
    s[y].tensorize(lane, hw.store(cfg))
    s[out].compute_at(s[y], order[1])
    s[out].tensorize(s[out].split(out.axes[1], bo)[1], hw.requantise(cfg))
    s[copies["p"]].compute_at(s[y], order[1])
    s[copies["p"]].tensorize(copies["p"].axes[1], hw.load(cfg, "par"))
    s[acc].compute_at(s[y], rows if split else order[1])
    k = s[acc].order[-1]
    ai, aj = acc.axes
    ab, ac = s[acc].split(aj, bo)
    kb, ke = s[acc].split(k, bi)
    ke, kc = s[acc].split(ke, cfg.group)
    reader, loop = s[y], order[1]
    if split:
        ko, kb = s[acc].split(kb, tk, "peel")
        s[acc].reorder(ko, ai, ab, kb, ac, ke, kc)
        reader, loop = s[acc], ko
    else:
        s[acc].reorder(ai, ab, kb, ac, ke, kc)
    s[acc].tensorize(ac, hw.gemm(cfg))
    near_x, near_w = s[copies["x"]], s[copies["w"]]
    near_x.compute_at(reader, loop)
    near_w.compute_at(reader, loop)
    near_x.tensorize(near_x.split(near_x.order[1], cfg.group)[1], hw.load(cfg, "inp"))
    near_w.tensorize(near_w.order[3], hw.load(cfg, "wgt"))
    if pipelined:
        s[y].pipeline(order[1])
        if split:
            s[acc].pipeline(ko)
    return s


@SETTINGS
@given(st.sampled_from([TINY, WIDE, TALL]), st.data())
def test_pipelined_products_compute_the_same(cfg: Config, data: st.DataObject) -> None:
    number: Callable[[int, int], int] = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    m, n, k = number(1, 7), number(1, 4), number(1, 4)
    inputs, acc, y = matmul(cfg, m, n * cfg.block_out, k * cfg.block_in)
    tiles = number(1, m), number(1, n), number(1, k)
    kept = "".join(name for name in "xwp" if data.draw(st.booleans()))
    s = product(cfg, inputs, acc, y, tiles, data.draw(st.booleans()), kept, data.draw(st.booleans()))
    on_device(cfg, T.lower(s, inputs), *matmul_arrays(cfg, m, n * cfg.block_out, k * cfg.block_in))


def rendered(kept: str = "", pipelined: bool = True, rows_outside: bool = False) -> list[Opcode | None]:
    """Return the opcodes of a product of 3 x 4 tiles whose inner loop is over rows."""
    inputs, acc, y = matmul(TINY, 12, 16, 8)
    s = product(TINY, inputs, acc, y, (4, 1, 2), rows_outside, kept, pipelined=pipelined)
    return opcodes(on_device(TINY, T.lower(s, inputs), *matmul_arrays(TINY, 12, 16, 8)))


def test_loads_go_ahead_of_what_computes() -> None:
    plain, ahead = rendered(pipelined=False), rendered()
    assert sorted(map(str, plain)) == sorted(map(str, ahead))
    assert plain[:3].count(Opcode.LOAD) == 2 and plain[2] == Opcode.GEMM
    first = ahead.index(Opcode.GEMM)
    assert ahead[:first] == [Opcode.LOAD] * first and first >= 3 * 3  # of three tiles, as many as there is room for
    computes = [opcode for opcode in ahead if opcode != Opcode.LOAD]
    assert computes == [Opcode.GEMM, Opcode.VECTOR, Opcode.STORE] * 12


def test_what_is_kept_is_not_loaded_again() -> None:
    assert rendered().count(Opcode.LOAD) == 12 * 3
    assert rendered("w").count(Opcode.LOAD) == 4 + 12 * 2
    assert rendered("wp").count(Opcode.LOAD) == 4 * 2 + 12
    assert rendered("xwp").count(Opcode.LOAD) == 4 * 2 + 3
    assert rendered("x", rows_outside=True).count(Opcode.LOAD) == 3 + 12 * 2
    assert rendered("xwp", pipelined=False).count(Opcode.LOAD) == 12 * 3  # other instructions take fixed places


def test_what_is_kept_goes_when_others_need_the_room() -> None:
    cfg = Config(name="few", block_in=4, block_out=4, inp_depth=16, wgt_depth=16, acc_depth=16, out_depth=16)
    inputs, acc, y = matmul(cfg, 8, 16, 24)  # 6 entries of wgt a tile, two tiles at a time, four in all
    s = product(cfg, inputs, acc, y, (2, 1, 6), True, "w")
    kernel = on_device(cfg, T.lower(s, inputs), *matmul_arrays(cfg, 8, 16, 24))
    assert opcodes(kernel).count(Opcode.LOAD) == 16 * 3


# Several loops after each other -----------------------------------------------------------------------------------


CLIP = hw.VectorOp("vin")
Triple = tuple[T.Tensor, T.Tensor, T.Tensor]


def clipped(x: T.Tensor, name: str, low: int = -100) -> Triple:
    """Return (copy of x in vin, the clipped values in out, the result in DRAM): each [rows, 1, 1, 4]."""
    near = T.compute(x.shape, lambda *i: x[i], f"{name}.near")
    top = T.wrap(100, "int32")
    out = T.compute(x.shape, lambda *i: T.clip(near[i].astype("int32"), low, top).astype("int8"), f"{name}.out")
    return near, out, T.compute(x.shape, lambda *i: out[i], name)


def arrange(cfg: Config, s: T.Schedule, tensors: Triple, rows: int, pipelined: bool, kept: bool = False) -> Axis:
    near, out, y = tensors
    s[near].set_scope("vin")
    s[out].set_scope("out")
    tile, _ = s[y].split(y.axes[0], rows, "peel")
    for stage in (s[near], s[out]):
        stage.compute_at(s[y], tile)
    if pipelined:
        s[y].pipeline(tile)
    if kept:
        s[near].keep()
    s[y].tensorize(y.axes[2], hw.store(cfg))
    s[near].tensorize(near.axes[2], hw.load(cfg, "vin"))
    s[out].tensorize(out.axes[1], hw.vector(cfg, CLIP))
    return tile


@SETTINGS
@given(st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.booleans()), min_size=2, max_size=4))
def test_loops_that_follow_each_other(stages: list[tuple[int, bool, bool]]) -> None:
    """Each loop reads the DRAM results of the loop before it, and loads none before it is stored."""
    x = T.placeholder((12, 1, 1, 4), "int8", "x")
    last, all_ = x, []
    for number, _ in enumerate(stages):
        all_.append(clipped(last, f"t{number}", -90 + 7 * number))
        last = all_[-1][-1]
    s = T.create_schedule(last)
    for number, (tensors, (rows, pipelined, kept)) in enumerate(zip(all_, stages)):
        arrange(TINY, s, tensors, rows, pipelined, kept and number == 0)
    on_device(TINY, T.lower(s, [x]), int8(12, 1, 1, 4))


def test_what_other_instructions_overwrite_is_not_found_again() -> None:
    """Entries that instructions between two loops overwrite are loaded again."""
    x, z = (T.placeholder((4, 1, 1, 4), "int8", name) for name in "xz")
    a, b, c = clipped(x, "a"), clipped(z, "b"), clipped(x, "c", -50)
    s = T.create_schedule([a[-1], b[-1], c[-1]])
    for tensors, pipelined in ((a, True), (b, False), (c, True)):
        arrange(TINY, s, tensors, 4, pipelined, pipelined)
    function = T.verify(T.lower(s, [x, z]))
    arrays = int8(4, 1, 1, 4), int8(4, 1, 1, 4)
    result, _ = run(render(TINY, function), FunctionalDevice(TINY, checking=True), *arrays)
    for one, other in zip(result, T.interpret(function, *arrays), strict=True):
        np.testing.assert_array_equal(one, other)


# What is refused --------------------------------------------------------------------------------------------------


def test_what_changes_is_not_kept() -> None:
    x = T.placeholder((4, 1, 1, 4), "int8", "x")
    a = clipped(x, "a")
    b = clipped(a[-1], "b")
    s = T.create_schedule(b[-1])
    arrange(TINY, s, a, 2, True)
    arrange(TINY, s, b, 2, True, kept=True)
    with pytest.raises(RenderError, match=r"b\.near.*kept.*a"):
        render(TINY, T.lower(s, [x]))


def test_loads_of_a_pipelined_loop_lie_inside_it() -> None:
    x = T.placeholder((8, 1, 1, 4), "int8", "x")
    near, out, y = clipped(x, "y")
    s = T.create_schedule(y)
    tile = arrange(TINY, s, (near, out, y), 4, False)
    inner, _ = s[y].split(s[y].order[1], 2)
    s[out].compute_at(s[y], inner)
    s[y].pipeline(inner)
    s[near].compute_at(s[y], tile)
    with pytest.raises(RenderError, match=r"pipelined loop.*same scratchpad"):
        render(TINY, T.lower(s, [x]))
    s[near].pipeline(s[near].order[0])
    with pytest.raises(RenderError, match=r"y\.near.*pipelined loop i0.*outside"):
        render(TINY, T.lower(s, [x]))


def test_a_pipelined_loop_holds_instructions_alone() -> None:
    x = T.placeholder((8, 1, 1, 4), "int8", "x")
    near, out, y = clipped(x, "y")
    s = T.create_schedule(y)
    tile = arrange(TINY, s, (near, out, y), 4, True)
    inner, _ = s[y].split(s[y].order[1], 2)
    s[out].compute_at(s[y], inner)
    s[near].compute_at(s[y], inner)
    with pytest.raises(RenderError, match=r"pipelined loop i0\.o.*no instruction"):
        render(TINY, T.lower(s, [x]))
    s[y].pipeline(inner)
    with pytest.raises(RenderError, match=r"pipelined loop i0\.o.*no instruction"):
        render(TINY, T.lower(s, [x]))
    s[y].kinds.pop(tile)
    on_device(TINY, T.lower(s, [x]), int8(8, 1, 1, 4))


def test_tensors_of_one_tile_never_lie_over_each_other() -> None:
    """Two tensors of one tile get separate entries, also if the ring has no room for both in a row."""
    cfg = Config(name="few", block_in=4, block_out=4, vin_depth=16)

    def function(rows: int, part: int, before: int) -> T.Function:
        """Return loops with a tile of all rows, then `part` of them and the others, one after the other."""
        v, x = (T.placeholder((n, 1, 1, 4), "int8", name) for n, name in ((before, "v"), (rows, "x")))
        first, (near, out, y) = clipped(v, "first"), clipped(x, "y")
        s = T.create_schedule([first[-1], y])
        arrange(cfg, s, first, before, True)
        arrange(cfg, s, (near, out, y), rows, True)
        parts, _ = s[y].split(s[y].order[1], part, "peel")
        s[near].compute_at(s[y], parts)
        s[out].compute_at(s[y], parts)
        return T.verify(T.lower(s, [v, x]))

    for rows, part in ((16, 9), (12, 8), (7, 4)):
        both, arrays = function(rows, part, 8), (int8(8, 1, 1, 4), int8(rows, 1, 1, 4))
        result, _ = run(render(cfg, both), FunctionalDevice(cfg, checking=True), *arrays)
        for one, expected in zip(result, T.interpret(both, *arrays), strict=True):
            np.testing.assert_array_equal(one, expected)
    with pytest.raises(RenderError, match=r"y\.near.*7 entries of vin"):
        render(cfg, function(16, 9, 6))
    with pytest.raises(RenderError, match=r"loop i0\.o.*17 of 16 vin entries"):
        render(cfg, function(17, 12, 8))


# Rings ------------------------------------------------------------------------------------------------------------


@settings(max_examples=tries(100), deadline=None)
@given(st.data())
def test_what_a_tile_holds_is_given_to_no_other(data: st.DataObject) -> None:
    """No two tiles hold the same entries of a ring, in any legal order of computation."""
    stream = Stream(TINY)
    depth = data.draw(st.integers(1, 24))
    ring = Ring(depth, stream.make_room)
    held: list[tuple[int, int, int | None]] = []
    """First entry, end and key of what tiles hold that have not computed."""

    def tile(size: int, key: int | None) -> Load:
        def load() -> list[Callable[[], None] | None]:
            first = None if key is None else stream.find(ring, (key, size))
            if first is None:
                first = stream.take(ring, size, None if key is None else (key, size))
            entry_range = first, first + size, key
            held.append(entry_range)

            def compute() -> None:
                held.remove(entry_range)

            return [*before, compute]

        before = data.draw(st.lists(st.sampled_from([None, lambda: None]), max_size=2))
        return load

    for _ in range(data.draw(st.integers(1, 30))):
        load = tile(data.draw(st.integers(1, depth)), data.draw(st.one_of(st.none(), st.integers(0, 2))))
        if data.draw(st.booleans()):
            stream.start(0, None, load, data.draw(st.integers(1, 8)))
        else:
            stream.follow(0, None, load)
        assert sorted(ring.pins) == sorted((first, end) for first, end, _ in held)
        for (a, b, one), (c, d, other) in combinations(held, 2):
            assert b <= c or d <= a or (one == other is not None and (a, b) == (c, d)), (held, depth)
        assert all(0 <= first < end <= depth for first, end, _ in held)
        live = sorted(ring.live.values())
        assert all(b <= c for (_, b), (c, _) in pairwise(live)), "two tiles are remembered in one place"
    stream.finish()
    assert held == [] and ring.pins == []


# Phases ---------------------------------------------------------------------------------------------------------------


def test_phases_of_tiles_overlap() -> None:
    """The second phase of a tile follows the first phase of the next tile; a reader of several tiles follows all of
    them."""
    stream, done = Stream(TINY), list[str]()

    def tile(*names: str | None) -> Load:
        return lambda: [None if name is None else lambda n=name: done.append(n) for name in names]  # type: ignore[misc]

    for number in range(3):
        stream.start(0, None, tile(f"a{number}", f"b{number}", f"c{number}"), ahead=1)
    stream.start(0, None, tile(None, None, None, "sum"), ahead=1)
    stream.start(0, None, tile("a3", "b3", "c3"), ahead=1)
    stream.finish()
    assert done == ["a0", "a1", "b0", "a2", "b1", "c0", "a3", "b2", "c1", "b3", "c2", "c3", "sum"]


def test_places_are_kept_until_the_last_phase() -> None:
    stream = Stream(TINY)
    ring = stream.rings["inp"]

    def load() -> list[Callable[[], None] | None]:
        stream.take(ring, ring.depth // 2)
        return [lambda: None, lambda: None]

    stream.start(0, "y", load, ahead=1)
    stream.start(0, "y", load, ahead=1)
    assert stream.running and len(ring.pins) == 2
    stream.settle("y")
    assert not ring.pins and not stream.running and not stream.waiting


def test_the_end_of_a_ring_is_reserved() -> None:
    room = iter([True, False])
    ring = Ring(16, lambda: next(room))
    one, other = object(), object()
    assert ring.take(4, "kept") == 0
    assert ring.reserve(6, one) == (10, 16) and ring.reserve(4, one) == (6, 10) and ring.end == 6
    assert ring.find("kept") == 0 and ring.take(6) == 0 and ring.find("kept") is None
    assert ring.reserve(2, other) is None  # nobody makes room
    for place in ((10, 16), (6, 10)):
        ring.release(place)
    assert ring.end == 16 and ring.reserve(16, other) == (0, 16)
