"""A trace is a schedule as data: it is printed as Python and JSON, applied again, or refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from expressions import TALL, TINY, WIDE, convolution, matmul, scheduled
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler import expr as T
from celosia.compiler.expr.schedule import PRIMITIVES, ReplayError, Trace, TraceStep
from celosia.compiler.layer import TilingError, Window
from celosia.compiler.tensorize import intrinsics as hw
from celosia.compiler.tensorize.computation import LayerComputation
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.templates import schedule
from celosia.hw.spec.config import Config

from .layers import Builder, builders, sample_tilings, windows
from .test_loops import fits, small
from .test_schedule import chain

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking a trace takes long


def loops(s: T.Schedule) -> str:
    return str(T.lower(s))


def bounded(examples: int) -> settings:
    return settings(max_examples=tries(examples), deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)


def again(cfg: Config, s: T.Schedule, fresh: Any) -> None:
    """Assert that the trace of `s` builds the same loops on a new schedule: directly, as Python and through JSON."""
    expected, known = loops(s), hw.declared(cfg)
    stored = Trace.from_json(json.loads(json.dumps(s.trace.to_json())))
    assert str(stored) == str(s.trace)
    assert stored.to_json() == json.loads(json.dumps(s.trace.to_json()))
    for trace in (s.trace, stored):
        other = fresh()
        trace.replay(other, known)
        assert loops(other) == expected
        assert str(other.trace) == str(s.trace)
    other = fresh()
    exec(str(s.trace), {"s": _ByName(other, known)})
    assert loops(other) == expected


class _ByName:
    """A schedule whose tensorize takes an intrinsic by its name, as a trace prints it."""

    def __init__(self, inner: Any, known: Any) -> None:
        self.inner, self.known = inner, known

    def __getitem__(self, name: str) -> Any:
        return _ByName(self.inner[name], self.known)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name == "tensorize":
            return lambda axis, intrinsic: method(axis, self.known[intrinsic])
        return lambda *args: method(*(arg.inner if isinstance(arg, _ByName) else arg for arg in args))


@bounded(25)
@given(builders(), windows(3), st.sampled_from(["conv", "pool", "add", "multiply"]), st.data())
def test_traces_of_layers(b: Builder, window: Window, kind: str, data: st.DataObject) -> None:
    x = small(b, data, size=6)
    same = (x.images, x.channels, x.height, x.width)
    assume(fits(window, x))
    if kind == "conv":
        b.conv(x, window, data.draw(st.integers(1, 20)))
    elif kind == "pool":
        b.pool(x, window, data.draw(st.booleans()))
    elif kind == "add":
        b.map(x, b.host_input(*same))
    else:
        b.multiply(x, b.host_input(*same))
    layer = b.net.layers[0]
    try:
        computations = lower_layer(b.cfg, layer)
    except TilingError:
        assume(False)
    for number, d in enumerate(computations):
        try:
            [decisions] = sample_tilings(b.cfg, d.workload, 1, b.rng)
        except ValueError:
            assume(False)

        def fresh(number: int = number) -> T.Schedule:
            return T.create_schedule(lower_layer(b.cfg, layer)[number].y)

        again(b.cfg, schedule(b.cfg, d, decisions), fresh)


@bounded(40)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), st.data())
def test_traces_of_any_schedule(m: int, n: int, k: int, data: st.DataObject) -> None:
    drawn: list[int] = []

    def number(low: int, high: int) -> int:
        drawn.append(data.draw(st.integers(low, high)))
        return drawn[-1]

    _, tensors = chain(m, n, k, number)
    s = T.create_schedule(tensors[-1])
    for _ in range(data.draw(st.integers(1, 10))):
        stage = s[data.draw(st.sampled_from([t for t in s.stages]))]
        axis = data.draw(st.sampled_from(stage.order))
        named = data.draw(st.booleans())
        target = axis.name if named and [a.name for a in stage.order].count(axis.name) == 1 else axis
        assume([a.name for a in stage.order].count(axis.name) == 1)  # a trace knows loops by their names
        match data.draw(st.integers(0, 6)):
            case 0:
                stage.split(target, data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["peel", "guard", None])))
            case 1:
                stage.reorder(*data.draw(st.permutations(stage.order)))
            case 2:
                stage.unroll(target)
            case 3 if stage.tensor is not tensors[-1]:
                stage.set_scope(data.draw(st.sampled_from(["inp", "workspace"])))
                stage.keep()
            case 4 if not (stage.relations or stage.kinds or stage.attached or stage.inlined):
                s.cache_write(stage.tensor if named else stage.tensor.name, "local")
            case 5:
                stage.tile(*stage.order[:2], 2, 3) if len(stage.order) > 1 else None
            case _ if stage.tensor is not tensors[-1] and not stage.inlined:
                consumer = s[data.draw(st.sampled_from(list(s.stages)[list(s.stages).index(stage.tensor) + 1 :]))]
                stage.compute_at(consumer, data.draw(st.sampled_from(consumer.order)))
    names = [t.name for t in s.tensors]
    assert len(set(names)) == len(names)

    def fresh() -> T.Schedule:
        values = iter(drawn)
        return T.create_schedule(chain(m, n, k, lambda low, high: next(values))[1][-1])

    try:
        T.lower(s)
    except ValueError:
        assume(False)
    again(TINY, s, fresh)


@pytest.mark.parametrize("cfg", [TINY, WIDE, TALL], ids=lambda cfg: cfg.name)
def test_traces_of_users(cfg: Config) -> None:
    def product() -> tuple[list[T.Tensor], T.Tensor, T.Tensor]:
        return matmul(cfg, 4, 2 * cfg.block_out, 2 * cfg.block_in)

    again(cfg, scheduled(cfg, *product(), 2, 1, 1, 2), lambda: T.create_schedule(product()[2]))
    _, plan = convolution(cfg, (2, 2), (5, 6), 3, 1, 1, [1, 2, 3, 1])
    fresh = convolution(cfg, (2, 2), (5, 6), 3, 1, 1, [1, 2, 3, 1])[1]
    again(cfg, plan, lambda: T.create_schedule(convolution(cfg, (2, 2), (5, 6), 3, 1, 1, [1, 2, 3, 1])[1].outputs))
    assert str(fresh.trace) == str(plan.trace)


# What is refused --------------------------------------------------------------------------------------------------


def layer() -> tuple[Config, LayerComputation, Trace]:
    """Return a convolution and a trace that fits it."""
    from celosia.compiler.layer import Activation, Gemm, Layer, Requantise

    x = Activation.alone(TINY, "x", 1, 8, 4, 4)
    y = Activation.alone(TINY, "y", 1, 8, 4, 4)
    scale = Requantise(np.zeros(8, np.int32), np.ones(8, np.uint32), np.zeros(8, np.uint8), 0)
    conv = Layer("c", x, y, gemm=Gemm(np.ones((8, 8, 1, 1), np.int8)), requantise=scale)
    [d] = lower_layer(TINY, conv)
    [decisions] = sample_tilings(TINY, d.workload, 1, np.random.default_rng(0))
    trace = schedule(TINY, d, decisions).trace
    return TINY, d, Trace.from_json(trace.to_json())


REFUSED: list[tuple[list[Any], str]] = [
    (["attic", "split", "i0", 2], "no tensor of this schedule is called attic"),
    (["x", "split", "i0", 2], "x is not computed by this schedule"),
    (["y", "split", "attic", 2], "attic is not one of the loops"),
    (["y", "explode", "row"], "has no primitive 'explode'"),
    (["y", "__init__", "row"], "has no primitive '__init__'"),
    (["y", "resized", {}], "has no primitive 'resized'"),
    (["", "split", "row", 2], "the schedule has no primitive 'split'"),
    (["y", "cache_read", "x", "inp", "y"], "a tensor has no primitive 'cache_read'"),
    (["y", "tensorize", "b", "attic"], "no intrinsic is called 'attic'"),
    (["y", "tensorize", "b", ["store"]], "intrinsic"),
    (["y", "tensorize", "b", {"stage": "y"}], "intrinsic"),
    (["y", "tensorize"], "tensorize"),
    (["y", "split", "row", 0], "split row by 0"),
    (["y", "split", "row", -3], "split row by -3"),
    (["y", "split", "row", "2"], "2"),
    (["y", "split", "row", 2.5], "2.5"),
    (["y", "split", "row", True], "True"),
    (["y", "split", "row", None], "None"),
    (["y", "split", "row", [2]], "2"),
    (["y", "split", "row", 2, "shrink"], "'shrink'"),
    (["y", "split", "row", 2, ["peel"]], "peel"),
    (["y", "split", "row"], "split"),
    (["y", "split", ["row"], 2], "row"),
    (["y", "split", 3, 2], "3"),
    (["y", "split", None, 2], "None"),
    (["y", "split", {"stage": "y"}, 2], "y"),
    (["y", "split", {"loop": "y"}, 2], "loop"),
    (["y", "split", {"stage": ["y"]}, 2], "y"),
    (["y", "split", "row", 2, "peel", 1], "split"),
    (["y", "reorder", "row", "row"], "twice in reorder"),
    (["y", "reorder", ["row"]], "row"),
    (["y", "fuse", "row", "image"], "does not follow"),
    (["y", "fuse", "row"], "fuse"),
    (["y", "set_scope", "attic"], "no memory is called 'attic'"),
    (["y", "set_scope", ["inp"]], "inp"),
    (["y", "set_scope", 7], "7"),
    (["y", "compute_at", "acc", "image"], "acc"),
    (["y", "compute_at", {"stage": "y"}, "row"], "inside itself"),
    (["near", "compute_at", {"stage": "attic"}, "row"], "attic"),
    (["near", "compute_at", {"stage": "y"}, 1], "1"),
    (["near", "compute_at", {"stage": "y"}], "compute_at"),
    (["acc", "compute_inline"], "a reduction cannot be inlined"),
    (["acc", "parallel", "k"], "the reduction k cannot be parallel"),
    (["acc", "accumulate_lanes", "k", [4]], "not the innermost loop"),
    (["acc", "accumulate_lanes", "c", 4], "4"),
    (["acc", "accumulate_lanes", "c", [0]], "0"),
    (["acc", "accumulate_lanes", "c", ["wide"]], "wide"),
    (["", "cache_read", "x", "attic", "near"], "no memory is called 'attic'"),
    (["", "cache_read", "attic", "inp", "near"], "attic"),
    (["", "cache_read", "x", "inp", []], "without a reader"),
    (["", "cache_read", "x", "inp", 5], "5"),
    (["", "cache_read", "x", "inp", [["near"]]], "near"),
    (["", "cache_read", 5, "inp", "near"], "5"),
    (["", "cache_read", "x", ["inp"], "near"], "inp"),
    (["", "cache_read", "x", "inp"], "cache_read"),
    (["", "cache_write", "x", "inp"], "x is not computed"),
    (["", "cache_write", None, "inp"], "None"),
    (["y", "keep", 3], "keep"),
    (["y", "pipeline", "attic"], "attic"),
]


@pytest.mark.parametrize("row,words", REFUSED, ids=lambda value: str(value) if isinstance(value, list) else "")
def test_illegal_steps_say_why(row: list[Any], words: str) -> None:
    _, d, _ = layer()
    with pytest.raises(ReplayError) as error:
        Trace.from_json([row]).replay(T.create_schedule(d.y), hw.declared(TINY))
    message = str(error.value)
    assert message.startswith("step 0, s") and words in message and "\n" not in message, message


@pytest.mark.parametrize("rows", [
    None, 3, "text", {"steps": []}, [3], ["text"], [None], [[]], [["y"]], [["y", 3]], [[3, "split"]], [["y", None]],
    [{"stage": "y"}], [[["y"], "split"]],
])  # fmt: skip
def test_what_is_no_trace_says_so(rows: object) -> None:
    with pytest.raises(ReplayError, match=r"\[stage, primitive, arguments"):
        Trace.from_json(rows)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 5), st.floats(), st.sampled_from(
        ["", "y", "near", "acc", "row", "image", "k", "inp", "peel", "gemm", "store", "stage", *sorted(PRIMITIVES)]
    )),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["stage", "a"]), inner)),
    max_leaves=6,
)  # fmt: skip


@bounded(300)
@given(st.data())
def test_garbage_in_a_trace_is_refused_or_does_what_it_says(data: st.DataObject) -> None:
    """Changed, removed and moved steps of a trace give a ReplayError or valid loops."""
    cfg, d, trace = layer()
    rows = trace.to_json()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(rows) - 1))
        match data.draw(st.integers(0, 4)):
            case 0:
                rows[at] = [*rows[at][:-1], data.draw(JSON)]
            case 1:
                rows[at] = data.draw(st.lists(JSON, min_size=1, max_size=5))
            case 2:
                del rows[at]
            case 3:
                other = data.draw(st.integers(0, len(rows) - 1))
                rows[at], rows[other] = rows[other], rows[at]
            case _:
                rows[at] = [rows[at][0], data.draw(st.sampled_from(sorted(PRIMITIVES))), *rows[at][2:]]
    s = T.create_schedule(d.y)
    try:
        Trace.from_json(json.loads(json.dumps(rows))).replay(s, hw.declared(cfg))
    except ReplayError as error:
        assert str(error) and "\n" not in str(error)
        return
    try:
        function = T.lower(s, d.inputs, "layer", d.variables)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
        return
    T.verify(function)


def test_a_step_prints_as_the_call() -> None:
    assert str(TraceStep("y", "split", ("row", 4, "peel"))) == 's["y"].split("row", 4, "peel")'
    assert str(TraceStep("", "cache_read", ("x", "inp", ["a", "b"]))) == 's.cache_read("x", "inp", ["a", "b"])'
    assert str(TraceStep("acc", "compute_at", ({"stage": "y"}, "row"))) == 's["acc"].compute_at(s["y"], "row")'
