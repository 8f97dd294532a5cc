"""Tuning of CPU kernels keeps results, never accepts a wrong kernel, and measures nothing twice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import onnx
import pytest
from onnx import helper
from thorough import some

from celosia.compiler import expr as T
from celosia.compiler.compile import compile as compile_model
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.schedule import schedule
from celosia.compiler.cpu.schedule.kernel_schedules import KernelSchedules, KernelWorkload, using_schedules
from celosia.compiler.expr.schedule import Trace
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import compiling_for, this_processor
from celosia.compiler.tune import kernel_trial as trials
from celosia.compiler.tune.device_pool import Fleet, FleetError
from celosia.compiler.tune.kernel_plan import RULES, KernelPlan, LoopCut, PlannedStage, neighbours
from celosia.compiler.tune.kernel_space import (
    MAX_CODE,
    Plans,
    count_features,
    estimate_plan,
    initial_plans,
    template_space,
)
from celosia.compiler.tune.kernel_trial import KernelJob, pickled, processor
from celosia.compiler.tune.kernel_tuner import (
    OWN_SCHEDULE,
    KernelState,
    KernelTuner,
    measurer_name,
    plan_text,
    recorded_traces,
)
from celosia.compiler.tune.layer_trial import Status, TrialResult
from celosia.compiler.tune.records import Key, Records
from celosia.compiler.tune.search import Climb
from celosia.driver.runtime import Runtime
from celosia.driver.tune.cpu import tune_cpu, tune_kernel

Array = np.ndarray[Any, Any]


def product(m: int = 9, n: int = 21, k: int = 10, dtype: str = "float32") -> KernelWorkload:
    """Return a product x w with the operations that a layer does after it."""
    x, w = T.placeholder((m, k), dtype, "x"), T.placeholder((k, n), dtype, "w")
    r = T.reduce_axis(k, "r")
    wide = "int32" if dtype == "int8" else dtype
    acc = T.compute((m, n), lambda i, j: T.sum(x[i, r].astype(wide) * w[r, j].astype(wide), r), "acc")
    return KernelWorkload.of([T.compute((m, n), lambda i, j: T.maximum(acc[i, j], 0) + 1, "y")], [x, w])


def window(size: int = 11, channels: int = 18) -> KernelWorkload:
    """Return the maximum of windows of 3 x 3 for each channel, with borders."""
    x = T.placeholder((size, size, channels), "float32", "x")
    padded = T.compute(
        (size + 2, size + 2, channels),
        lambda i, j, c: T.select(
            (i >= 1) & (i < size + 1) & (j >= 1) & (j < size + 1), x[i - 1, j - 1, c], T.Const(-1.0, "float32")
        ),
        "padded",
    )
    a, b = T.reduce_axis(3, "a"), T.reduce_axis(3, "b")
    return KernelWorkload.of([T.compute(x.shape, lambda i, j, c: T.max(padded[i + a, j + b, c], (a, b)), "y")], [x])


def softmax(rows: int = 7, columns: int = 37) -> KernelWorkload:
    x = T.placeholder((rows, columns), "float32", "x")
    k, m = T.reduce_axis(columns, "k"), T.reduce_axis(columns, "m")
    top = T.compute((rows,), lambda i: T.max(x[i, k], k), "top")
    e = T.compute((rows, columns), lambda i, j: T.call("exp", x[i, j] - top[i]), "e")
    total = T.compute((rows,), lambda i: T.sum(e[i, m], m), "total")
    return KernelWorkload.of([T.compute((rows, columns), lambda i, j: e[i, j] / total[i], "y")], [x])


def in_order(rows: int = 6, columns: int = 40) -> KernelWorkload:
    """Return ordered sums of numbers for which the order of additions matters."""
    x = T.placeholder((rows, columns), "float32", "x")
    k = T.reduce_axis(columns, "k")
    return KernelWorkload.of([T.compute((rows,), lambda i: T.ordered_sum(x[i, k] * 1e4, k), "y")], [x])


def turned(rows: int = 20, columns: int = 33) -> KernelWorkload:
    x = T.placeholder((rows, columns), "int8", "x")
    return KernelWorkload.of([T.compute((columns, rows), lambda i, j: x[j, i] + 1, "y")], [x])


def equally_named() -> KernelWorkload:
    """Return tensors of the same name, of which none can be inlined."""
    x = T.placeholder((8, 12), "float32", "x")
    k, m = T.reduce_axis(12, "k"), T.reduce_axis(8, "m")
    rows = T.compute((8,), lambda i: T.sum(x[i, k], k), "sum")
    columns = T.compute((12,), lambda j: T.sum(x[m, j], m), "sum")
    return KernelWorkload.of([T.compute((8, 12), lambda i, j: rows[i] * columns[j], "sum")], [x])


WORKLOADS: dict[str, Callable[[], KernelWorkload]] = {
    "product": product, "product of bytes": lambda: product(dtype="int8"), "window": window, "softmax": softmax,
    "in order": in_order, "turned": turned, "equally named": equally_named,
}  # fmt: skip


def random_inputs(workload: KernelWorkload) -> list[Array]:
    rng = np.random.default_rng(0)
    return [
        rng.integers(-128, 128, t.shape).astype(np.int8) if t.dtype == "int8"
        else rng.standard_normal(t.shape, np.float32)
        for t in workload.inputs
    ]  # fmt: skip


def meaning(workload: KernelWorkload, arrays: Sequence[Array]) -> list[Array]:
    """Return the interpreter's outputs of unscheduled loops."""
    return list(T.interpret(T.lower(workload.outputs, workload.inputs, "plain"), *arrays))


def own(workload: KernelWorkload) -> KernelPlan:
    return KernelPlan.of(schedule(workload.outputs))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_plan_is_its_schedule(name: str) -> None:
    workload = WORKLOADS[name]()
    plan = own(workload)
    again = workload.apply(Trace.from_json(json.loads(plan_text(plan))))
    assert str(workload.loops(again)) == str(workload.loops(schedule(workload.outputs)))
    assert KernelPlan.of(again) == plan


@pytest.mark.parametrize("plans", some([1, 3], [1]))
@pytest.mark.parametrize("name", WORKLOADS)
def test_what_rules_lead_to_means_the_same(name: str, plans: int) -> None:
    """Plans that several rules reach compute the interpreter's results."""
    workload = WORKLOADS[name]()
    arrays = random_inputs(workload)
    expected = meaning(workload, arrays)
    rng = np.random.default_rng(len(name))
    compared = 0
    for _ in range(plans):
        plan = own(workload)
        for _ in range(4):
            others = list(neighbours(plan, workload.apply(plan.trace)))
            order = (others[place] for place in rng.permutation(len(others)))
            plan = next((other for other in order if estimate_plan(workload, other, 100) is not None), plan)
        try:
            kernel = compile_function(workload.loops(workload.apply(plan.trace)), keep=False)
        except ValueError:  # vectors that the processor has no instructions for
            continue
        for found, wanted in zip(kernel(*arrays), expected, strict=True):
            compared += 1
            if wanted.dtype.kind == "f" and name != "in order":
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=str(plan.trace))
            else:
                np.testing.assert_array_equal(found, wanted, err_msg=str(plan.trace))
    assert compared


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_finds_something_that_can_be_compiled(rule: Any) -> None:
    """Each rule yields a plan that compiles, from the compiler's own plan or from its neighbours."""
    for name in WORKLOADS:
        workload = WORKLOADS[name]()
        begin = own(workload)
        for plan in (begin, *list(neighbours(begin, workload.apply(begin.trace)))[::5]):
            if estimate_plan(workload, plan) is None:
                continue
            made = workload.apply(plan.trace)
            views = (PlannedStage(plan, made, stage) for stage, _ in plan.stages)
            for other in (each for view in views for each in rule(view)):
                if other != plan and estimate_plan(workload, other) is not None:
                    return
    raise AssertionError(f"{rule.__name__} leads nowhere")


def test_sums_keep_their_order() -> None:
    """No neighbouring plan adds in another order if the order matters."""
    workload = in_order()
    plan = own(workload)
    for other in neighbours(plan, workload.apply(plan.trace)):
        loops = other["y"]
        assert not loops.lanes
        assert [loop for loop in loops.order if loop.startswith("k")] == ["k"]


def test_two_plans_that_make_the_same_loops_are_equal() -> None:
    workload = product()
    a, b = (T.Schedule(workload.outputs) for _ in range(2))
    (stage,) = [t.name for t in a.stages if t.name == "y"]
    a[stage].split("i0", 4)
    a[stage].unroll("i0.i")
    a[stage].reorder("i1", "i0.o", "i0.i")
    b[stage].split("i0", 4)
    b[stage].reorder("i1", "i0.o", "i0.i")
    b[stage].unroll("i0.i")
    assert KernelPlan.of(a) == KernelPlan.of(b)


def test_counts_know_tiles_of_registers() -> None:
    """The estimate knows that a tile of 4 rows reads a vector of the right operand only once."""
    workload = product(32, 64, 32)
    plain = T.Schedule(workload.outputs)
    acc = next(t.name for t in plain.stages if t.name == "acc")
    costs = []
    for rows in (1, 4):
        made = T.Schedule(workload.outputs)
        made[acc].split("i1", 16)
        made[acc].split("i0", rows)
        made[acc].reorder("i0.o", "i1.o", "r", "i0.i", "i1.i")
        made[acc].unroll("i0.i")
        made[acc].vectorize("i1.i")
        costs.append(count_features(workload.loops(made)))
    assert costs[1].loads < costs[0].loads
    assert costs[1].cost < costs[0].cost


def test_what_takes_long_to_compile_is_no_point() -> None:
    workload = turned(256, 256)
    plan = KernelPlan.of(T.Schedule(workload.outputs))
    loops = plan["y"]
    wide = replace(loops, kinds=frozenset((loop, "unrolled") for loop in loops.order))
    assert estimate_plan(workload, plan.with_stage("y", wide)) is None
    assert estimate_plan(workload, plan.with_stage("y", wide), float("inf")) is not None
    assert MAX_CODE < 256 * 256


def test_the_template_is_all_tiles_that_fit() -> None:
    workload = product(32, 64, 32)
    space = template_space(workload)
    knobs = [space.knobs(plan) for plan in space.points]
    sizes = {(row["height"], row["width"]) for row in knobs if row["stage"] == "y"} | {
        (row["height"], row["width"]) for row in knobs
    }
    assert len(sizes) > 10
    assert space.points[0] == own(workload)
    assert {space.index(plan) for plan in space.points} == set(range(len(space)))
    around = space.neighbours(0)
    assert around
    assert 0 not in around


# Trials --------------------------------------------------------------------------------------------------------------


def job(workload: KernelWorkload, plan: KernelPlan, **more: Any) -> KernelJob:
    return KernelJob(pickled(workload), plan_text(plan), seconds=0.001, **more)


def test_a_trial_has_picoseconds() -> None:
    workload = product(64, 64, 64)
    result = job(workload, own(workload)).run()
    assert result.status == Status.OK
    assert 1e5 < result.cycles < 1e11
    scaled = job(workload, own(workload), usual=1000).run()
    assert 300 < scaled.cycles < 3000  # the same schedule: about once


def test_a_slow_schedule_is_given_up() -> None:
    workload = product(256, 256, 256)
    plain = KernelPlan.of(T.Schedule(workload.outputs))
    result = job(workload, plain, usual=1000, limit=1500).run()
    assert result == replace(result, status=Status.CENSORED, cycles=1500)


def test_a_trace_that_cannot_be_followed_is_refused() -> None:
    workload = product()
    for trace in ("[]x", '[["nobody", "split", "i0", 4]]', '[["y", "split", "i9", 4]]', "{}", "[[]]"):
        result = KernelJob(pickled(workload), trace).run()
        assert result.status == Status.REFUSED
        assert result.detail


@pytest.mark.parametrize("fault", ["other numbers", "nothing written", "crash", "hang", "error"])
def test_faults_of_the_compiler_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault planted in the kernel of a trial never gives a time."""
    workload = product()
    original = trials.compile_function

    def planted(function: Any, **options: Any) -> CompiledKernel:
        kernel = original(function, **options)
        if not options:  # the compiler's own kernel, and the reference
            return kernel
        if fault == "other numbers":
            other = product()
            x = T.compute((9, 21), lambda i, j: T.Const(1.0, "float32"), "y")
            return original(T.lower(x, other.inputs, "kernel"))
        if fault == "error":
            raise TypeError("no such operation")
        if fault == "hang":
            time.sleep(60)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        monkeypatch.setattr(CompiledKernel, "run", lambda *args: None)
        return kernel

    monkeypatch.setattr(trials, "compile_function", planted)
    monkeypatch.setattr(trials, "MAX_SECONDS", 1.0)
    trials._case.cache_clear()
    result = job(workload, own(workload)).run()
    trials._case.cache_clear()
    expected = {"hang": Status.REFUSED, "error": Status.REFUSED}.get(fault, Status.WRONG)
    assert result.status == expected, result
    assert result.cost is None
    assert result.detail


# The tuner -----------------------------------------------------------------------------------------------------------


class Pretended:
    """A device whose times depend only on the schedule: small tiles are fast, and all times differ."""

    name = "pretended"

    def __init__(self, most: int = 10**9, failing: bool = False) -> None:
        self.asked: list[KernelJob] = []
        self.most, self.failing = most, failing

    def measure(self, job: Any, deadline: float) -> TrialResult:
        if len(self.asked) >= self.most:
            raise KeyboardInterrupt
        self.asked.append(job)
        if self.failing:
            return TrialResult(Status.CRASHED, detail="planted")
        sizes = [args[1] for _, primitive, *args in json.loads(job.trace) if primitive == "split"]
        return TrialResult(Status.OK, 1_000_000 + 10_000 * sum(sizes) + crc32(job.trace.encode()) % 10_000)

    def close(self) -> None:
        pass


TRIALS = 12


def tuned(
    records: Records, device: Pretended, trials: int = TRIALS, seed: int = 0
) -> tuple[KernelState, dict[str, Trace]]:
    with Fleet([device]) as fleet:
        tuner = KernelTuner(records, fleet, trials, seed=seed)
        return tuner.state, tuner.tune([(product(), 3), (softmax(), 1)])


def test_a_second_tuning_measures_nothing_and_finds_the_same(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    device = Pretended()
    state, traces = tuned(Records(path), device)
    assert state.measured == TRIALS
    assert traces
    again = Pretended()
    second, same = tuned(Records.load(path), again)
    assert (second.measured, second.known, again.asked) == (0, TRIALS, [])
    assert {name: str(trace) for name, trace in traces.items()} == {name: str(t) for name, t in same.items()}
    assert second.tuned == state.tuned < state.untuned
    assert {name: str(t) for name, t in recorded_traces(Records.load(path)).items()} == {
        n: str(t) for n, t in traces.items()
    }


def test_an_interrupted_tuning_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first = Pretended(most=5)
    with pytest.raises(KeyboardInterrupt):
        tuned(Records(path), first)
    second = Pretended()
    state, traces = tuned(Records.load(path), second)
    whole, other = Pretended(), Records()
    _, expected = tuned(other, whole)
    assert len(first.asked) + len(second.asked) == len(whole.asked)
    assert state.known == 5
    assert {name: str(t) for name, t in traces.items()} == {name: str(t) for name, t in expected.items()}


def test_no_device_left_is_said(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="pretended"):
        tuned(Records(), Pretended(failing=True))


def test_names_that_there_are_not() -> None:
    with Fleet([Pretended()]) as fleet, pytest.raises(ValueError, match="climb"):
        KernelTuner(Records(), fleet, 1, search="luck")


def test_climb_reaches_what_is_best() -> None:
    """The search finds the best plan of a space with known costs: tiles of 5 rows, and nothing else split."""
    with compiling_for(replace(this_processor(), vector_bytes=64, registers=32)):
        space = Plans(product(40, 40, 40), initial_plans(product(40, 40, 40)))
    space.add_remaining_plans()
    search = Climb(space, np.random.default_rng(0))

    def cost(plan: KernelPlan) -> float:
        return 100.0 + sum(abs(cut.factor - 5) for _, loops in plan.stages for cut in loops.cuts)

    while numbers := search.ask(4):
        search.tell([(number, cost(space.points[number])) for number in numbers])
    assert search.best is not None
    assert search.known[search.best] < 0.9 * cost(space.points[0])
    assert len(search.known) < 400


def records_of(
    path: Path, workload: KernelWorkload, plan: KernelPlan, where: str, own_time: int, time_: int
) -> Records:
    records = Records(path)
    records.add(
        Key(workload.name, where, plan_text(own(workload)), measurer_name(True, False)),
        TrialResult(Status.OK, own_time, OWN_SCHEDULE),
    )
    records.add(Key(workload.name, where, plan_text(plan), measurer_name(True, False)), TrialResult(Status.OK, time_))
    return records


def other_plan(workload: KernelWorkload) -> KernelPlan:
    plan = own(workload)
    name, loops = next((name, loops) for name, loops in plan.stages if loops.cuts)
    cut = loops.cuts[0]
    return plan.with_stage(
        name, replace(loops, cuts=(LoopCut(cut.loop, max(1, cut.factor // 2), cut.tail), *loops.cuts[1:]))
    )


def test_records_of_another_processor_are_left_alone(tmp_path: Path) -> None:
    workload = product()
    other = other_plan(workload)
    assert recorded_traces(records_of(tmp_path / "a", workload, other, "z80 #1", 100, 50)) == {}
    assert recorded_traces(records_of(tmp_path / "b", workload, other, processor(), 100, 99)) == {}
    assert str(
        recorded_traces(records_of(tmp_path / "c", workload, other, processor(), 100, 50))[workload.name]
    ) == str(other.trace)
    short = Records()
    short.add(Key(workload.name, processor(), plan_text(other), measurer_name(False, False)), TrialResult(Status.OK, 1))
    assert recorded_traces(short) == {}


def gelu_model() -> onnx.ModelProto:
    """Return a model of a product and the operators after it; its nodes have no names."""
    shape = onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"]),
        helper.make_node("Relu", ["t"], ["r"]),
        helper.make_node("Softmax", ["r"], ["y"], axis=-1),
    ]
    weights = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32), "w")
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", shape, [12, 24])],
        [helper.make_tensor_value_info("y", shape, [12, 40])], [weights],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_model_is_compiled_with_its_records(tmp_path: Path) -> None:
    model, path = gelu_model(), tmp_path / "records.jsonl"
    with using_schedules(KernelSchedules()) as met:
        compile_model(model, accelerator=False)
    assert met is not None
    assert met.workloads
    for workload, _ in met.workloads.values():
        plan = own(workload)
        if any(loops.cuts for _, loops in plan.stages):
            records_of(path, workload, other_plan(workload), processor(), 100, 50)
    said: list[str] = []
    program = compile_model(model, accelerator=False, records=path, progress=said.append)
    assert any("kernels for this CPU are scheduled by them" in line for line in said), said
    plain = compile_model(model, accelerator=False)
    assert [kernel.code for kernel in program.kernels] != [kernel.code for kernel in plain.kernels]
    feed = {"x": np.random.default_rng(1).standard_normal((12, 24)).astype(np.float32)}
    np.testing.assert_allclose(
        Runtime(program).run(feed).outputs["y"], Runtime(plain).run(feed).outputs["y"], rtol=1e-5, atol=1e-6
    )


def test_a_record_that_cannot_be_followed_is_said(tmp_path: Path) -> None:
    model, path = gelu_model(), tmp_path / "records.jsonl"
    with using_schedules(KernelSchedules()) as met:
        compile_model(model, accelerator=False)
    assert met is not None
    records = Records(path)
    for workload, _ in met.workloads.values():
        records.add(
            Key(workload.name, processor(), plan_text(own(workload)), measurer_name(True, False)),
            TrialResult(Status.OK, 100, OWN_SCHEDULE),
        )
        records.add(
            Key(workload.name, processor(), '[["nobody","split","i0",4]]', measurer_name(True, False)),
            TrialResult(Status.OK, 1),
        )
    said: list[str] = []
    compile_model(model, accelerator=False, records=path, progress=said.append)
    assert any("cannot be followed" in line and "nobody" in line for line in said), said


def test_tuning_a_model_for_real(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first = tune_cpu(gelu_model(), trials=4, records=path, accelerator=False)
    assert first.report["measured"] == 4
    assert first.report["seconds_tuned"] <= first.report["seconds_own"]
    again = tune_cpu(gelu_model(), trials=4, records=path, accelerator=False)
    assert again.report["measured"] == 0
    assert [k["trace"] for k in again.report["kernels"]] == [k["trace"] for k in first.report["kernels"]]


def test_tuning_ones_own_expression() -> None:
    workload = product(16, 16, 16)
    kernel, trace = tune_kernel(workload.outputs, workload.inputs, trials=3)
    arrays = random_inputs(workload)
    np.testing.assert_allclose(kernel(*arrays)[0], meaning(workload, arrays)[0], rtol=1e-4, atol=1e-4)
    assert trace.steps


def test_constants_of_a_large_model_come_from_beyond_the_cache() -> None:
    """A model whose weights exceed the caches is measured so, with other records than a small one."""
    small = product(4, 64, 64)
    _, w = small.inputs
    weights = KernelWorkload.of(small.outputs, small.inputs, [w])
    assert weights.constant_bytes == 64 * 64 * 4
    assert KernelWorkload.of(small.outputs, small.inputs).constant_bytes == 0
    device = Pretended()
    for times, cold in ((1, False), (10_000, True)):
        records = Records()
        with Fleet([device]) as fleet:
            KernelTuner(records, fleet, 2).tune([(weights, times)])
        assert {key.measurer.endswith("cold") for key in records.trials} == {cold}
        assert device.asked[-1].cold is cold
    case = trials.KernelCase(weights)
    copies = case._copies
    assert len(copies) > 1
    assert all(row[0] is case.arrays[0] and row[1] is not case.arrays[1] for row in copies)
    assert KernelJob(pickled(weights), plan_text(own(weights)), seconds=0.001, cold=True).run().status == Status.OK


def test_a_kernel_without_inputs_is_timed() -> None:
    workload = KernelWorkload.of([T.compute((32, 32), lambda i, j: (i * j).astype("float32"), "table")], [])
    assert job(workload, own(workload)).run().status == Status.OK


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the plain loops do not compile, the trial ends, but not the measuring process."""

    def fails(*args: Any, **options: Any) -> CompiledKernel:
        raise ValueError("planted")

    monkeypatch.setattr(trials, "compile_function", fails)
    trials._case.cache_clear()
    assert job(product(), own(product())).run() == TrialResult(Status.REFUSED, detail="planted")
    trials._case.cache_clear()
