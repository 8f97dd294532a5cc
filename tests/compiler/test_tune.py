"""Search spaces, bounds, searches, trials and records are compared with simple models of each."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler.layer import Epilogue, Layer, TilingError, Window
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import Planner, why_not_tiling, workload_text, workloads
from celosia.compiler.tensorize.space import Tiling
from celosia.compiler.tune import layer_trial as measuring
from celosia.compiler.tune.layer_space import Point, layer_space
from celosia.compiler.tune.layer_trial import (
    CostSource,
    LayerCase,
    LayerJob,
    Status,
    TrialResult,
    measure,
    pickled,
    reference_output,
)
from celosia.compiler.tune.records import Key, Records, RecordsError, schedule_of
from celosia.compiler.tune.search import SEARCHES, CostModel, Descent, Search, Space, ridge, trees
from celosia.hw.spec.config import Config
from celosia.sim.devices import WITH_CYCLES

from .layers import CONFIGS, Builder, Network, builders, windows
from .layers import meaning as plain_meaning
from .test_loops import fits, small

KINDS = ("conv", "grouped", "depthwise", "pool", "add", "multiply")


def bounded(examples: int) -> settings:
    return settings(max_examples=tries(examples), deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def networks(draw: st.DrawFn, size: int = 9) -> Network:
    """Draw a network of one layer of any kind, on any of CONFIGS."""
    b, window, kind = draw(builders()), draw(windows(3)), draw(st.sampled_from(KINDS))
    x = small(b, draw(st.data()), size=size)
    assume(fits(window, x))
    if kind == "grouped":
        assume(x.channels % 2 == 0)
    groups = {"grouped": 2, "depthwise": x.channels}.get(kind, 1)
    if kind in ("conv", "grouped", "depthwise"):
        b.conv(x, window, x.channels if groups > 1 else draw(st.integers(1, 30)), groups)
    elif kind == "pool":
        b.pool(x, window, draw(st.booleans()))
    else:
        other = b.host_input(x.images, x.channels, x.height, x.width)
        _ = b.map(x, other) if kind == "add" else b.multiply(x, other)
    return b.net


def usual(cfg: Config, layer: Layer) -> Point:
    """Return the point that the compiler chooses."""
    try:
        return tuple(d for part in Planner(cfg).layer(layer) for d in part.tiling.groups)
    except TilingError:
        assume(False)
        raise


def conv(cfg: Config, channels: int = 20, size: int = 8, outputs: int = 24, kernel: int = 3) -> Layer:
    b = Builder(Network(cfg), None, np.random.default_rng(0))  # type: ignore[arg-type]
    b.epilogue = lambda y, second=True: Epilogue()  # type: ignore[method-assign]
    b._name = lambda: "conv"  # type: ignore[method-assign]
    x = b.host_input(1, channels, size, size)
    b.conv(x, Window((kernel,) * 2, pads=(kernel // 2,) * 4), outputs)
    return b.net.layers[0]


# What a layer means -----------------------------------------------------------------------------------------------


@bounded(40)
@given(networks())
def test_meaning_is_that_of_plain_loops(net: Network) -> None:
    (layer,) = net.layers
    np.testing.assert_array_equal(reference_output(layer, net.host_inputs), plain_meaning(layer, net.host_inputs))


# Spaces -----------------------------------------------------------------------------------------------------------


@bounded(25)
@given(networks())
def test_a_space_is_of_legal_points_and_neighbours_are_points_beside(net: Network) -> None:
    (layer,), cfg = net.layers, net.cfg
    point = usual(cfg, layer)
    space = layer_space(cfg, layer, point)
    asked = [p for d in lower_layer(cfg, layer) for p in workloads(d)]
    assert space.name == workload_text(lower_layer(cfg, layer))
    assert len(space) == len(set(space.points)) and space.points[space.index(point)] == point
    rng = np.random.default_rng(0)
    drawn = space.sample(5, rng)
    assert len(set(drawn)) == len(drawn) == min(5, len(space))
    for number in drawn:
        assert all(why_not_tiling(cfg, p, d) is None for p, d in zip(asked, space.points[number], strict=True))
        here = space.knobs(space.points[number])
        near = space.neighbours(number)
        assert number not in near and len(set(near)) == len(near)
        assert len(space) == 1 or near
        changed = [{k for k, v in space.knobs(space.points[n]).items() if v != here[k]} for n in near]
        assert all(changed)
        for knob in here:  # every knob with another value in the space is changed by some neighbour
            if len({space.knobs(p)[knob] for p in space.points}) > 1:
                assert any(knob in each for each in changed)


@bounded(20)
@given(networks(14), st.data())
def test_no_schedule_takes_less_than_its_bound(net: Network, data: st.DataObject) -> None:
    (layer,), cfg = net.layers, net.cfg
    point = usual(cfg, layer)
    memory = data.draw(st.sampled_from(["zynq-hp", "ideal", "pynq-z2"]))
    space, case = layer_space(cfg, layer, point, memory), LayerCase(cfg, layer)
    low = np.argsort(space.predicted / space.bounds)[:2].tolist()
    for number in {*space.sample(3, np.random.default_rng(1)), *low, space.index(point)}:
        cycles = case.cycles(space.points[number], memory)
        assert cycles >= space.bounds[number], (space.points[number], layer)


@pytest.mark.parametrize("outputs", [1, 2])
def test_no_layer_of_channels_that_are_alike_takes_less_than_its_bound(outputs: int) -> None:
    """The bound holds for equal channels, whose repeated weights could stay on chip."""
    cfg = CONFIGS["pynq"]
    layer = conv(cfg, 1, 3, outputs)
    assert layer.gemm is not None and layer.requantise is not None
    alike = replace(layer, gemm=replace(layer.gemm, weights=np.ones_like(layer.gemm.weights)), requantise=replace(
        layer.requantise, bias=np.zeros_like(layer.requantise.bias)
    ))  # fmt: skip
    space, case = layer_space(cfg, alike, usual(cfg, alike)), LayerCase(cfg, alike)
    for point, bound in zip(space.points, space.bounds):
        assert case.cycles(point) >= bound


def test_bounds_are_near_what_schedules_take() -> None:
    """Bounds are within 10% of the best schedule, so that the test above finds a bound that is 10% too high."""
    cfg = CONFIGS["tiny"]
    layer = conv(cfg, 32, 12, 32)
    space, case = layer_space(cfg, layer, usual(cfg, layer)), LayerCase(cfg, layer)
    best = int(np.argmin(space.predicted))
    assert space.bounds[best] <= case.cycles(space.points[best]) < 1.1 * space.bounds[best]


# Searches ---------------------------------------------------------------------------------------------------------


def bowl(
    sizes: tuple[int, int, int] = (9, 9, 3), predicted: float = 0.0
) -> tuple[Space[tuple[int, int, str]], np.ndarray]:
    """Return a space with one valley for each of three texts, and the cost of each point.

    predicted: the standard deviation of the logarithm of the predictions' error.
    """
    points = [(a, b, "xyz"[c]) for a, b, c in itertools.product(*map(range, sizes)) if a + b != 5]
    costs = np.array([100.0 + (a - 6) ** 2 + 3 * (b - 2) ** 2 + 10 * "zxy".index(c) for a, b, c in points])
    noise = np.exp(np.random.default_rng(0).normal(0, predicted, len(points)))
    features = np.array([[a, b, "xyz".index(c)] for a, b, c in points], np.float64)
    knobs = lambda p: {"a": p[0], "b": p[1], "c": p[2]}  # noqa: E731
    return Space("bowl", points, knobs, costs * noise, np.full(len(points), 99.0), features), costs


def run(search: Search, costs: np.ndarray, trials: int, failing: frozenset[int] = frozenset()) -> list[int]:
    """Run a search and return the points that were tried, in order."""
    tried: list[int] = []
    while len(tried) < trials and (asked := search.ask(min(5, trials - len(tried)))):
        tried += asked
        search.tell([(n, None if n in failing else float(costs[n])) for n in asked])
    return tried


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_tries_nothing_twice_and_knows_its_best(name: str) -> None:
    space, costs = bowl(predicted=0.1)
    failing = frozenset(np.argsort(costs)[:3].tolist())
    search = SEARCHES[name](space, np.random.default_rng(3))
    tried = run(search, costs, 60, failing)
    assert len(set(tried)) == len(tried) <= 60 and set(tried) <= set(range(len(space)))
    good = [n for n in tried if n not in failing]
    assert search.best is not None and costs[search.best] == min(costs[n] for n in good)
    again = run(SEARCHES[name](space, np.random.default_rng(3)), costs, 60, failing)
    assert again == tried  # so a tuning from records asks what it asked before


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_ends_with_all_of_a_space_or_a_certificate(name: str) -> None:
    space, costs = bowl((4, 4, 2))
    search = SEARCHES[name](space, np.random.default_rng(0))
    tried = run(search, costs, 10 * len(space))
    if not isinstance(search, Descent):
        assert sorted(tried) == list(range(len(space))) and search.regret == 0
    assert search.best is not None and costs[search.best] == costs.min()


@pytest.mark.parametrize("name", [name for name in SEARCHES if name != "random"])
def test_what_looks_beside_finds_the_valley_sooner_than_any_order(name: str) -> None:
    space, costs = bowl((20, 20, 3), predicted=0.3)

    def median(name: str) -> float:
        runs = (run(SEARCHES[name](space, np.random.default_rng(seed)), costs, 150) for seed in range(5))
        return float(np.median([costs[tried].min() for tried in runs]))

    assert median(name) < median("random")


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_tries_nothing_that_is_not_legal(name: str) -> None:
    """A search tries only legal points and all of them; its certificate holds for legal points."""
    space, costs = bowl((6, 6, 2), predicted=0.1)
    legal = [n for n in range(len(space)) if n % 3 == 1]
    asked: list[tuple[int, int, str]] = []

    def allowed(point: tuple[int, int, str]) -> bool:
        asked.append(point)
        return space.index(point) in legal

    search = SEARCHES[name](replace(space, allowed=allowed), np.random.default_rng(0))
    tried = run(search, costs, 10 * len(space))
    assert set(tried) <= set(legal) and len(asked) == len(set(asked))
    assert search.best in legal
    if not isinstance(search, Descent):
        assert sorted(tried) == legal and search.regret == 0


def test_a_certificate_is_given_only_where_the_rest_cannot_be_better() -> None:
    space, costs = bowl()
    search = SEARCHES["random"](space, np.random.default_rng(0))
    assert search.regret == np.inf
    best = int(np.argmin(costs))
    search.tell([(best, float(costs[best]))])
    assert 0 < search.regret == costs[best] / 99 - 1
    higher = replace(space, bounds=np.where(np.arange(len(space)) == best, 99.0, costs[best]))
    proved = Descent(higher, np.random.default_rng(0))
    proved.tell([(best, float(costs[best]))])
    assert proved.regret == 0 and proved.ask(8) == []
    failed = Descent(higher, np.random.default_rng(0))
    failed.tell([(best, None)])
    assert failed.regret == np.inf and failed.ask(8)


def test_a_model_learns_what_the_estimate_gets_wrong() -> None:
    space, costs = bowl((15, 15, 3))
    wrong = replace(
        space,
        bounds=np.ones(len(space)),
        predicted=costs * np.exp(0.1 * space.features[:, 0] - 0.2 * space.features[:, 1]),
    )
    for learner in (ridge, trees):
        if learner is trees:
            pytest.importorskip("xgboost", reason="no 'xgboost'")
        model = CostModel(learner)
        assert (model.expected(wrong) == np.maximum(wrong.predicted, wrong.bounds)).all()
        for number in wrong.sample(150, np.random.default_rng(0)):
            model.learn(wrong, number, float(costs[number]))
        before, after = (np.abs(np.log(each / costs)).mean() for each in (wrong.predicted, model.expected(wrong)))
        assert after < before / 4


# Trials -----------------------------------------------------------------------------------------------------------


@bounded(15)
@given(networks())
def test_every_kind_of_layer_can_be_tried(net: Network) -> None:
    (layer,), cfg = net.layers, net.cfg
    result = measure(LayerJob(cfg, pickled(layer), usual(cfg, layer)))
    assert (result.status, result.detail) == (Status.OK, "") and result.cycles > 0


def test_a_trial_without_a_result_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = CONFIGS["tiny"]
    layer = conv(cfg)
    job = LayerJob(cfg, pickled(layer), usual(cfg, layer))
    good = measure(job)
    assert good.status == Status.OK
    assert measure(replace(job, limit=good.cycles)) == replace(good, seconds=pytest.approx(0, abs=60))
    assert measure(replace(job, limit=good.cycles - 1)).status == Status.CENSORED
    large = tuple(replace(d, n=6, y=8, x=8) for d in job.decisions)
    refused = measure(replace(job, decisions=large))
    assert refused.status == Status.REFUSED and refused.detail and refused.cost is None
    assert measure(replace(job, decisions=())).status == Status.REFUSED
    measuring._case.cache_clear()
    monkeypatch.setattr(measuring, "reference_output", lambda layer, values: reference_output(layer, values) ^ 1)
    wrong = measure(job)
    assert wrong.status == Status.WRONG and wrong.cycles == 0 and "are wrong, the first at image" in wrong.detail
    measuring._case.cache_clear()


def test_a_schedule_that_makes_one_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = CONFIGS["tiny"]
    case = LayerCase(cfg, conv(cfg))
    image = case.image(usual(cfg, case.layers[0]))
    device = measuring.FunctionalDevice(cfg)
    case.fill(device, image)
    device.run(image.launches[0].address, image.launches[0].count)
    assert case.difference(device, image) == ""
    last = case.layers[-1].y
    device.dram[image.addresses[last.storage] + 17] ^= 4
    assert "1 of" in case.difference(device, image) and "run 1" in case.difference(device, image)


def test_the_copies_of_a_layer_share_no_constants() -> None:
    cfg = CONFIGS["tiny"]
    layer = conv(cfg, 16, 8, 16)
    first, second = measuring.run_twice(layer)
    assert second.x.storage is first.y.storage  # it reads what was made
    assert first.gemm is not None and second.gemm is not None
    assert (first.gemm.weights != second.gemm.weights).any()
    assert not {act.storage for act in first.inputs()} & {act.storage for act in layer.inputs()}


@pytest.mark.rtl
def test_the_rtl_judges_as_the_timing_model_does() -> None:
    cfg = CONFIGS["tiny"]
    layer = conv(cfg)
    job = LayerJob(cfg, pickled(layer), usual(cfg, layer))
    timed, rtl = (measure(replace(job, judge=CostSource(device))) for device in WITH_CYCLES)
    assert timed.status == rtl.status == Status.OK
    assert abs(timed.cycles / rtl.cycles - 1) < 0.03
    assert measure(replace(job, judge=CostSource("rtl"), limit=rtl.cycles // 2)).status == Status.CENSORED


def test_no_such_judge() -> None:
    with pytest.raises(ValueError, match=r"'abacus'.*timed, rtl or ssh://USER@BOARD"):
        CostSource("abacus")


# Records ----------------------------------------------------------------------------------------------------------

CFG = CONFIGS["tiny"]


def key(n: int = 1, workload: str = "w", measurer: str = "timed 1, zynq-hp", cfg: Config = CFG) -> Key:
    return Key.of(cfg, workload, (Tiling(n, 2, 3, 4, "input"),), measurer)


def test_records_come_back(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records = Records.load(path, must_exist=False)
    results = {
        key(1): TrialResult(Status.OK, 40),
        key(2): TrialResult(Status.CENSORED, 90),
        key(3): TrialResult(Status.WRONG, 0, "x"),
    }
    for each, result in results.items():
        records.add(each, result)
    again = Records.load(path)
    assert again.trials == records.trials == results and again.damaged == again.conflicts == 0
    assert again.best(CFG, "w", "timed 1, zynq-hp") == (key(1), results[key(1)], True)
    assert schedule_of(key(1).schedule) == (Tiling(1, 2, 3, 4, "input"),)


def test_only_the_same_key_is_exact(tmp_path: Path) -> None:
    records = Records()
    records.add(key(1, measurer="rtl 1, zynq-hp"), TrialResult(Status.OK, 10))
    assert records.get(key(1)) is None
    found = records.best(CFG, "w", "timed 1, zynq-hp")
    assert found is not None and not found[2]  # another measurer: reported
    records.add(key(2), TrialResult(Status.OK, 20))
    found = records.best(CFG, "w", "timed 1, zynq-hp")
    assert found is not None and found[2] and found[1].cycles == 20
    assert records.best(CFG, "other", "timed 1, zynq-hp") is None
    assert records.best(CONFIGS["pynq"], "w", "timed 1, zynq-hp") is None


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records = Records(path)
    for n in range(1, 6):
        records.add(key(n), TrialResult(Status.OK, 100 + n))
    lines = path.read_bytes().splitlines()
    lines[0] = lines[0].replace(b'"cycles":101', b'"cycles":1')  # a lie
    lines[1] = lines[1][:-9]
    lines[2] = b"\xff\x00{"
    row = json.loads(lines[3])
    lines[3] = json.dumps(row | {"status": "splendid"}).encode()
    path.write_bytes(b"\n".join([*lines, b"", b"[]", b"7"]))
    found = Records.load(path)
    assert list(found.trials.values()) == [TrialResult(Status.OK, 105)] and found.damaged == 6
    found.add(key(9), TrialResult(Status.OK, 1000))  # behind a line without an end
    assert len(Records.load(path).trials) == 2 and Records.load(path).damaged == 6


def test_files_join_and_of_two_answers_the_worse_counts(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for path, results in (
        (a, [TrialResult(Status.OK, 5), TrialResult(Status.HUNG)]),
        (b, [TrialResult(Status.OK, 7), TrialResult(Status.OK, 3)]),
    ):
        for n, result in enumerate(results, 1):
            Records(path).add(key(n), result)
    for first, second in ((a, b), (b, a)):
        joined = tmp_path / "joined"
        joined.write_bytes(first.read_bytes() + second.read_bytes())
        records = Records.load(joined)
        assert [records.trials[key(n)].cycles for n in (1, 2)] == [7, 3] and records.conflicts == 1


def _append(path: Path, worker: int) -> None:
    records = Records(path)
    for n in range(200):
        records.add(key(n + 1, f"worker {worker} " + "x" * 300), TrialResult(Status.OK, n + 1))


def test_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    workers = [multiprocessing.get_context("fork").Process(target=_append, args=(path, n)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    records = Records.load(path)
    assert len(records.trials) == 600 and records.damaged == 0


def test_other_files_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match=r"celosia tune --records "):
        Records.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(RecordsError, match="holds no records"):
        Records.load(tmp_path / "text")
    with pytest.raises(RecordsError, match="cannot read"):
        Records.load(tmp_path)
