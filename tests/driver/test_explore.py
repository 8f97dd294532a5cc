"""`celosia explore` finds the front of all Configs with exact cycles, measures nothing twice and explains errors."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from demo_block import save_demo_block
from driver_models import convolution, quantised
from small_models import Builder
from thorough import some
from typer.testing import CliRunner

pytest.importorskip("moocore")

import celosia
from celosia.bitstreams import area, synthesis
from celosia.bitstreams.synthesis import Usage
from celosia.compiler.layer import TilingError
from celosia.compiler.tune.device_pool import Fleet, Job
from celosia.compiler.tune.layer_trial import Status, TrialResult
from celosia.driver import cli
from celosia.driver.explore import confirm, explorer, model_cost
from celosia.driver.explore.configs import ConfigSpace
from celosia.driver.explore.explore import Interrupted, explore, parse_seconds
from celosia.driver.explore.explorer import is_dominated
from celosia.driver.explore.model_cost import Cost, CostJob, ExploredModel, estimate_cycles, measure_cycles
from celosia.driver.explore.objectives import energy_mj, objectives, power_drawn
from celosia.driver.explore.records import ExploreError, Points, exploration_context
from celosia.driver.explore.resource_use import Resources
from celosia.hw.boards.boards import find_board
from celosia.hw.spec.config import PRESETS, Config

MEMORY = "pynq-z2"
BOARD = find_board("pynq-z2")
SPACE = {
    "block_in": (4, 8), "block_out": (4, 8), "bus_bytes": (8,), "inp_depth": (512,), "wgt_depth": (64, 256),
    "taps": (0, 3), "forward": (False,), "batch": (1,), "packed": (True,), "ports": (1,), "acc_depth": (512,),
    "vin_depth": (512,), "out_depth": (256,), "par_depth": (32,), "lut_count": (2,), "queue_depth": (16,),
    "tap_depth": (64,), "residual_cycles": (1,), "pump": (1,),
}  # fmt: skip
"""16 Configs."""
FRONT = ("cycles", "area")


FEW = {**SPACE, "block_in": (8,), "taps": (0,)}
"""4 Configs of SPACE."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explored") / "quantised.onnx"
    onnx.save(convolution(), path)
    return path


def pooled() -> onnx.ModelProto:
    """Return a block with a pooling at its end, a depthwise convolution and a residual."""
    b = Builder("qdq", np.int8, seed=5)
    x = b.conv(b.input([1, 3, 9, 9]), 8, (3, 3), pads=(1, 1, 1, 1), activation="Relu")
    y = b.conv(b.max_pool(x, (2, 2), (3, 3), (0, 0, 0, 0)), 8, (3, 3), pads=(1, 1, 1, 1), group=8, activation="Relu")
    b.output(b.binary("Add", b.conv(y, 8, (1, 1)), y), real=True)
    return b.model()


def random_config(rng: np.random.Generator) -> Config:
    space = ConfigSpace.of(BOARD, {"block_in": [2, 4, 8], "block_out": [2, 4, 8], "wgt_depth": [64, 256]})
    found = space.sample(rng)
    assert found is not None
    return found


# What a Config is judged by ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", some([2, 6], [2]))
def test_cycles_are_those_of_a_run_and_never_below_the_bound(rounds: int, tmp_path: Path) -> None:
    rng, tight = np.random.default_rng(0), 0.0
    for name, proto in (("quantised", quantised()), ("pooled", pooled())):
        onnx.save(proto, tmp_path / f"{name}.onnx")
        one = ExploredModel.of(tmp_path / f"{name}.onnx")
        for _ in range(rounds):
            cfg = random_config(rng)
            try:
                at_least, found = estimate_cycles(one, cfg, MEMORY), measure_cycles(one, cfg, MEMORY)
            except TilingError:
                continue
            program = celosia.compile(one.path, cfg, check=False, records="none")
            report = celosia.driver.run.explain.estimate(program, MEMORY)
            assert found.cycles == report["cycles"] and found.macs == at_least.macs == report["macs_accelerator"]
            assert at_least.bound <= found.cycles and at_least.on_cpu == found.on_cpu
            assert 0.2 < at_least.cycles / found.cycles < 5
            tight = max(tight, at_least.bound / found.cycles)
    assert tight > 0.6  # a bound of nothing would be below everything


def test_what_shares_products_takes_as_many_cycles(model: Path) -> None:
    """`packed` and `pump` do not change cycles, so that they are not part of what is measured."""
    one = ExploredModel.of(model)
    cfg = PRESETS["tiny"]
    expected = measure_cycles(one, cfg, MEMORY)
    assert expected == measure_cycles(one, replace(cfg, packed=False), MEMORY)
    assert expected == measure_cycles(one, replace(cfg, pump=2), MEMORY)


def test_a_wider_bus_is_no_slower_and_objectives_follow(model: Path) -> None:
    one, tiny = ExploredModel.of(model), replace(PRESETS["tiny"], forward=False)

    def figures(cfg: Config, clock: float = 100.0) -> dict[str, float]:
        return objectives(cfg, [measure_cycles(one, cfg, MEMORY)], quarter, BOARD, clock)

    of = BOARD.device
    quarter = Resources(of.lut // 10, of.ff // 5, 3 * of.dsp // 10, 0.4 * of.ram, False, False)

    narrow, wide = figures(replace(tiny, bus_bytes=4)), figures(tiny)
    assert narrow["cycles"] > wide["cycles"] and narrow["energy"] > 0 and narrow["area"] == pytest.approx(25)
    assert wide["latency"] == pytest.approx(wide["cycles"] / 100_000) and wide["period"] == wide["latency"]
    assert figures(tiny, 200.0)["latency"] == pytest.approx(wide["latency"] / 2)


def test_energy_is_watts_for_the_time_of_an_image(model: Path) -> None:
    tiny = PRESETS["tiny"]
    cost, used = measure_cycles(ExploredModel.of(model), tiny, MEMORY), Resources.of(tiny, BOARD.device)

    def energy(cost: Cost, used: Resources = used, clock: float = 100.0) -> float:
        return energy_mj(tiny, cost, used, BOARD, clock)

    watts = power_drawn(tiny, cost, used, BOARD, 100.0)
    assert energy(cost) == pytest.approx(watts.fabric * cost.cycles / cost.images / 100_000)
    assert 0 < watts.dynamic < watts.fabric < watts.fabric + watts.watts["ps"]
    # As much work in more cycles, more work in as many, and more cells take more; a faster clock takes less of what
    # is static, and as much of the rest.
    assert energy(replace(cost, cycles=2 * cost.cycles)) > energy(cost)
    for unit in cost.busy:
        assert energy(replace(cost, busy={**cost.busy, unit: 0})) < energy(cost), unit
    for name in ("lut", "ff", "dsp", "ram"):
        assert energy(cost, replace(used, **{name: 2 * getattr(used, name)})) > energy(cost), name
    static = watts.watts["static"] * cost.cycles / cost.images / 100_000
    assert energy(cost, clock=200.0) == pytest.approx(energy(cost) - static / 2)
    assert energy(replace(cost, images=2 * cost.images)) == pytest.approx(energy(cost) / 2)


def test_a_bound_has_no_more_energy_than_what_is_measured(model: Path, tmp_path: Path) -> None:
    """The energy of a point's lower bound is at most the measured energy."""
    one = ExploredModel.of(model)
    for cfg in (PRESETS["tiny"], replace(PRESETS["tiny"], bus_bytes=4)):
        at_least, measured = estimate_cycles(one, cfg, MEMORY), measure_cycles(one, cfg, MEMORY)
        used, idle = Resources.of(cfg, BOARD.device), dict.fromkeys(measured.busy, 0)
        bound = replace(at_least, cycles=max(1, at_least.bound), busy=idle)
        assert energy_mj(cfg, bound, used, BOARD, 100) <= energy_mj(cfg, measured, used, BOARD, 100)


# The front --------------------------------------------------------------------------------------------------------


def brute(path: Path, left: float = 0.05) -> set[str]:
    """Return the digests of the front of SPACE, found by compiling each Config and comparing all pairs."""
    device, objectives = BOARD.device, {}
    for cfg in ConfigSpace.of(BOARD, SPACE):
        used = Resources.of(cfg, device)
        shares = used.shares(device)
        if max(shares.values()) > 1 - left:
            continue
        program = celosia.compile(path, cfg, check=False, records="none")
        cycles = celosia.driver.run.explain.estimate(program, MEMORY)["cycles"]
        objectives[cfg.digest] = cycles, sum(shares.values())
    values = {tuple(map(float, costs)) for costs in objectives.values()}
    front = {v for v in values if not any(w != v and w[0] <= v[0] and w[1] <= v[1] for w in values)}
    return {tuple(map(float, costs)) for digest, costs in objectives.items() if tuple(map(float, costs)) in front}  # type: ignore[return-value]


def found_values(exploration: Any) -> set[tuple[float, float]]:
    return {(round(r["objectives"]["cycles"]), round(r["objectives"]["area"], 6)) for r in exploration.report["front"]}


@pytest.fixture(scope="module")
def expected(model: Path) -> set[tuple[float, float]]:
    return {(round(c), round(25 * a, 6)) for c, a in brute(model)}  # type: ignore[misc]


@pytest.mark.parametrize("search", some(["bottleneck", "nsga2", "random"], ["bottleneck"]))
def test_the_front_of_a_space_that_ends_is_the_true_one(
    search: str, model: Path, expected: set[tuple[float, float]], tmp_path: Path
) -> None:
    found = explore(model, space=SPACE, search=search, folder=tmp_path / "out")
    assert found_values(found) == expected and len(expected) > 3
    rows = [json.loads(line) for line in (tmp_path / "out" / "points.jsonl").read_text().splitlines()]
    timed_rows = [row["digest"] for row in rows if row["rung"] == "timed" and row["how"] != "the board's preset"]
    assert len(timed_rows) == len(set(timed_rows)) == found.report["state"]["points"] < 16  # bounds left some out


def test_a_bound_that_is_too_high_loses_points(
    model: Path, expected: set[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that is too high loses points: a planted fault that the test above must find."""
    right = model_cost.network_bound
    monkeypatch.setattr(model_cost, "network_bound", lambda *given: 3 * right(*given))
    assert found_values(explore(model, space=SPACE)) != expected


def test_a_front_that_keeps_what_is_dominated_is_found(
    model: Path, expected: set[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorer, "on_front", lambda points: np.ones(len(points), bool))
    assert found_values(explore(model, space=SPACE)) != expected


def test_less_room_leaves_out_what_is_too_large(model: Path) -> None:
    found = explore(model, space=SPACE, left=0.75)
    assert found.report["state"]["failed"]["device"] > 0
    device = BOARD.device
    for cfg in found.front:
        shares = Resources.of(cfg, device).shares(device)
        assert max(shares.values()) <= 0.25
    assert not is_dominated(np.array([[1.0, 2.0]]), [1.0, 2.0])


def test_failures_say_what_kind_they_are(model: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures name their kind: no tile fits, operators stay on the CPU, or the measuring process dies."""
    shallow = {name: values[-1:] for name, values in SPACE.items()} | {"wgt_depth": (8,)}
    found = explore(models / "quantised.onnx", space=shallow)
    (point,) = [point for point in found.points if point.how != "the board's preset"]
    assert point.failure is not None and point.failure.kind == "layers" and "wgt_depth 8" in point.failure.why
    assert found.front == () and found.report["take"].startswith("No Config")

    right = model_cost.measure_cycles
    lazy = lambda *given: replace(right(*given), on_cpu=9)  # noqa: E731
    monkeypatch.setitem(model_cost.RUNGS, "timed", lazy)
    found = explore(model, space=FEW, points=3)
    kinds = {point.failure.kind for point in found.points if point.rung == "timed" and point.failure is not None}
    assert kinds == {"cpu"} and found.front == ()

    class Dying:
        name = "a board that dies"

        def measure(self, job: Job, deadline: float) -> TrialResult:
            assert isinstance(job, CostJob)
            return job.run() if job.rung == "closed" else TrialResult(Status.HUNG, detail="no answer")

        def close(self) -> None:
            pass

    fleet = Fleet([Dying(), Dying()])
    with pytest.raises(RuntimeError, match="no device is left to measure on"):
        explore(model, space=FEW, fleet=fleet)


# Records ----------------------------------------------------------------------------------------------------------


def test_the_same_again_measures_nothing_and_damage_is_counted(
    model: Path, expected: set[tuple[float, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = explore(model, space=SPACE, points=8, folder=tmp_path)
    assert first.report["state"]["points"] <= 8
    explore(model, space=SPACE, folder=tmp_path)
    lines = (tmp_path / "points.jsonl").read_bytes().splitlines(keepends=True)
    monkeypatch.setitem(model_cost.RUNGS, "timed", None)  # nothing is measured any more
    again = explore(model, space=SPACE, folder=tmp_path)
    assert found_values(again) == expected and again.report["state"]["points"] == 0
    monkeypatch.undo()
    broken = [lines[0][:40] + b"\n", lines[1].replace(b'"cycles":', b'"cycles":1', 1), b"\xff\x00\n", b"[1]\n"]
    (tmp_path / "points.jsonl").write_bytes(b"".join(broken + lines[2:-1]) + lines[-1][:-10])
    again = explore(model, space=SPACE, folder=tmp_path)
    assert again.report["state"]["damaged"] == 5 and found_values(again) == expected


@pytest.mark.thorough  # test_ctrl_c_leaves_the_front_so_far reads the file before the next measurement
def test_a_run_that_is_killed_goes_on(model: Path, expected: set[tuple[float, float]], tmp_path: Path) -> None:
    line = [
        sys.executable, "-m", "celosia.driver.cli", "explore", str(model), "--space", str(space_file(tmp_path)),
        "--jobs", "1", "--budget", "1h", "-o", str(tmp_path / "out"),
    ]  # fmt: skip
    points = tmp_path / "out" / "points.jsonl"
    with subprocess.Popen(line, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (points.exists() and b'"timed"' in points.read_bytes()):
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    known = Points(tmp_path / "out", exploration_context([ExploredModel.of(model)], "pynq-z2", MEMORY)).known
    measured = {digest for digest, point in known.items() if point.measured}
    assert measured
    found = explore(model, space=SPACE, folder=tmp_path / "out")
    assert found_values(found) == expected
    rows = [json.loads(row) for row in points.read_bytes().splitlines() if row.endswith(b"}")]
    timed_rows = [row["digest"] for row in rows if row["rung"] == "timed"]
    assert len(timed_rows) == len(set(timed_rows)) and measured <= set(timed_rows)


def test_a_folder_is_of_one_exploration(model: Path, tmp_path: Path) -> None:
    explore(model, space=FEW, points=1, folder=tmp_path / "out")
    onnx.save(convolution(6), tmp_path / "other.onnx")
    with pytest.raises(ExploreError, match="exploration of other models"):
        explore(tmp_path / "other.onnx", space=FEW, folder=tmp_path / "out")
    with pytest.raises(ExploreError, match="exploration of another board"):
        explore(model, "pynq-z1", space=FEW, folder=tmp_path / "out")
    (tmp_path / "out" / "explore.json").write_text("{")
    with pytest.raises(ExploreError, match="cannot be read as JSON"):
        explore(model, space=FEW, folder=tmp_path / "out")


def test_energy_of_an_earlier_version_is_mixed_with_none(model: Path, tmp_path: Path) -> None:
    """An exploration of format 1, whose energy was a proxy, is not continued, and its page says so."""
    pytest.importorskip("bokeh")
    names = ["cycles", "energy"]
    explore(model, space=FEW, points=2, objective=names, folder=tmp_path)
    for name in ("explore.json", "front.json"):
        text = (tmp_path / name).read_text()
        assert '"format": 2' in text
        (tmp_path / name).write_text(text.replace('"format": 2', '"format": 1'))
    with pytest.raises(ExploreError, match="another version of Celosia"):
        explore(model, space=FEW, points=2, objective=names, folder=tmp_path)
    code, _, err = call("report", tmp_path / "front.json", "-o", tmp_path / "old.html")
    assert code == 0, err
    old, new = ((tmp_path / f"{name}.html").read_text(encoding="utf-8") for name in ("old", "report"))
    head = "<th>mJ (an estimate)</th>"
    assert "proxy of 45 nm" in old and head not in old and head in new and "proxy of 45 nm" not in new


# Where it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", some([1, 3], [1]))
def test_no_more_configs_are_measured_than_were_asked_for(most: int, model: Path, tmp_path: Path) -> None:
    state = explore(model, space=FEW, points=most, folder=tmp_path).report["state"]
    assert state["points"] == most and state["ended"] == "points"
    state = explore(model, space=FEW, points=most + 1, folder=tmp_path).report["state"]
    assert (state["points"], state["known"]) == (1, most)


def test_what_has_not_begun_within_the_budget_is_not_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No measurement starts after the budget.

    Each Config takes ten seconds: the preset, one more, and one that is under way at the end.
    """
    passed = 0.0

    def slow(*given: Any) -> Any:
        nonlocal passed
        passed += 10
        return measure_cycles(*given)

    monkeypatch.setitem(model_cost.RUNGS, "timed", slow)
    monkeypatch.setattr("celosia.driver.explore.explore._start_clock", lambda before: lambda: before + passed)
    state = explore(model, space=SPACE, budget=25, folder=tmp_path).report["state"]
    assert (state["points"], state["ended"], state["seconds"]) == (2, "budget", 30)
    passed = 0.0
    state = explore(model, space=SPACE, budget=60, folder=tmp_path).report["state"]
    assert (state["known"], state["points"], state["seconds"]) == (2, 3, 60)


def test_what_measured_nothing_gives_no_advice(model: Path, tmp_path: Path) -> None:
    space = space_file(tmp_path, FEW)
    line = "explore", model, "--space", space, "--jobs", 1, "--budget", "0.001s", "-o", tmp_path / "out"
    code, out, err = call(*line)
    assert code == 0, err
    report, told = json.loads((tmp_path / "out" / "front.json").read_text()), " ".join(out.split())
    assert "Take " not in told and "there is nothing to choose from yet" in report["take"]
    assert "with a larger one the same command goes on where it was" in told
    assert report["state"]["looked"] == 0 and report["state"]["ended"] == "budget"


def test_ctrl_c_leaves_the_front_so_far(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a round leaves the front of the Configs measured so far."""
    calls = 0

    def until_then(*given: Any) -> Any:
        nonlocal calls
        # A measurement is in the file before the next one begins, so a process that is killed loses no more.
        assert (tmp_path / "points.jsonl").read_text().count('"timed"') == calls
        calls += 1
        if calls > 3:
            raise KeyboardInterrupt
        return measure_cycles(*given)

    monkeypatch.setitem(model_cost.RUNGS, "timed", until_then)
    with pytest.raises(Interrupted) as ended:
        explore(model, space=SPACE, folder=tmp_path)
    monkeypatch.undo()
    report = json.loads((tmp_path / "front.json").read_text())
    assert report == json.loads(json.dumps(ended.value.found.report)) and report["state"]["ended"] == "interrupted"
    rows = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    measured = {row["digest"] for row in rows if row["rung"] == "timed" and row["how"] != "the board's preset"}
    assert len(measured) == report["state"]["points"] == 2 and {row["digest"] for row in report["front"]} <= measured
    state = explore(model, space=SPACE, folder=tmp_path).report["state"]
    assert state["known"] == 2 and state["ended"] == ""


def space_file(folder: Path, space: dict[str, tuple[Any, ...]] = SPACE) -> Path:
    """Return a file with a space in the command's format."""
    (folder / "space.toml").write_text(
        "\n".join(f"{name} = {json.dumps(list(values))}" for name, values in space.items())
    )
    return folder / "space.toml"


def test_ctrl_c_on_the_command(model: Path, tmp_path: Path) -> None:
    points = tmp_path / "out" / "points.jsonl"
    line = [
        sys.executable, "-m", "celosia.driver.cli", "explore", str(model), "--space", str(space_file(tmp_path)),
        "--jobs", "1", "--budget", "1h", "-o", str(points.parent),
    ]  # fmt: skip
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 240
        while time.monotonic() < until and not (points.exists() and points.read_bytes().count(b'"timed"') > 1):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "interrupted; the front so far is in" in err and "the same command goes on" in err
    report = json.loads((points.parent / "front.json").read_text())
    assert report["front"] and report["take"] in " ".join(out.split()) and "Traceback" not in err


# The preset -------------------------------------------------------------------------------------------------------


def test_the_preset_has_its_cycles_with_the_records_that_come_with_celosia(tmp_path: Path) -> None:
    """The preset's cycles with shipped records equal those of `celosia inspect`, next to those without records."""
    demo = save_demo_block(tmp_path)
    space = space_file(tmp_path, {name: values[:1] for name, values in SPACE.items()})
    code, out, err = call("explore", demo, "--space", space, "--points", 1, "--jobs", 1, "-o", tmp_path)
    output = " ".join(out.split())
    assert code == 0, err
    assert "pynq is the board's preset, to compare with" in output
    row = json.loads((tmp_path / "front.json").read_text())["preset"]
    (name,) = row["models"]
    for records, cycles in (("shipped", row["records"][name]), ("none", row["models"][name]["cycles"])):
        program = celosia.compile(demo, "pynq", check=False, records=records)
        assert cycles == celosia.driver.run.explain.estimate(program, MEMORY)["cycles"]
    assert row["records"][name] < row["models"][name]["cycles"]
    assert f"{row['records'][name]:,}, not {row['models'][name]['cycles']:,}" in output


# Confirmed --------------------------------------------------------------------------------------------------------


def test_the_front_is_counted_again_until_all_of_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Yosys counts Configs until it has counted all of the front; a Config that exceeds the FPGA leaves the front."""
    counted: dict[str, Usage] = {}

    def usage(cfg: Config, device: Any, say: Callable[[str], None]) -> Usage:
        used = Resources.of(cfg, device)
        lut = 60_000 if len(counted) == 1 else used.lut + 7
        counted[cfg.digest] = Usage(lut, used.ff, used.dsp, used.ram, 1.0, "Yosys")
        return counted[cfg.digest]

    monkeypatch.setattr(confirm, "measure_usage", usage)
    monkeypatch.setattr(synthesis, "cached_usage", lambda cfg, device: counted.get(cfg.digest))
    monkeypatch.setattr(confirm.timing, "estimate", lambda cfg, say: type("Timing", (), {"mhz": 125.0}))
    monkeypatch.setattr(confirm, "measure_rtl_cycles", lambda one, cfg, memory: 12345)
    exploration = explore(model, space=SPACE, confirmed=["yosys", "rtl"])
    for row in exploration.report["front"]:
        assert row["area"]["counted"] and row["clock_mhz"] == 125.0 and row["clock"].startswith("estimated")
        assert row["rung"] == "rtl" and row["models"]["quantised"]["rtl"] == 12345
    refused = [digest for digest, used in counted.items() if used.lut == 60_000]
    assert refused and refused[0] not in {row["digest"] for row in exploration.report["front"]}


@pytest.mark.parametrize("more", some([1.0, 1.5], [1.5]))
def test_what_yosys_counts_goes_into_the_model_of_the_others(
    more: float, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts by Yosys correct the area model of Configs that are not counted, also in a continued run.

    If Yosys counts 1.5 times the LUTs of the model, estimates rise; if the model is right, nothing changes.
    """
    counted: dict[str, Usage] = {}

    def usage(cfg: Config, device: Any, say: Callable[[str], None]) -> Usage:
        used = area.shipped_model().estimate(cfg)
        counted[cfg.digest] = Usage(round(more * used.lut), used.ff, used.dsp, used.ram, 1.0, "Yosys")
        return counted[cfg.digest]

    monkeypatch.setattr(confirm, "measure_usage", usage)
    monkeypatch.setattr(synthesis, "cached_usage", lambda cfg, device: counted.get(cfg.digest))
    monkeypatch.setattr(confirm.timing, "estimate", lambda cfg, say: type("Timing", (), {"mhz": 125.0}))
    explore(model, space=SPACE, points=12, folder=tmp_path)
    for confirmed in (["yosys"], []):
        exploration = explore(model, space=SPACE, points=12, folder=tmp_path, confirmed=confirmed)
        rest = [point for point in exploration.points if not point.area["counted"]]
        ratios = [point.area["lut"] / area.shipped_model().estimate(point.cfg).lut for point in rest]
        assert rest and counted and all(ratio == pytest.approx(1, abs=1e-3) for ratio in ratios) == (more == 1)
        assert more == 1 or np.mean(ratios) > 1.1
    assert {row["digest"] for row in exploration.report["front"]} <= counted.keys()


# The command ------------------------------------------------------------------------------------------------------


def call(*line: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, [str(word) for word in line])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_leaves_a_folder_whose_configs_can_be_used(model: Path, tmp_path: Path) -> None:
    onnx.save(convolution(6), tmp_path / "larger.onnx")
    out, space = tmp_path / "out", space_file(tmp_path, {**FEW, "wgt_depth": (64,), "taps": (0, 3)})
    line = "explore", model, tmp_path / "larger.onnx", "--space", space, "--points", 3, "--jobs", 1
    code, text, err = call(*line, "--objective", "latency", "--objective", "energy", "-o", out)
    assert code == 0, err
    report = json.loads((out / "front.json").read_text())
    assert report["take"] in " ".join(text.split()) and list(report["objectives"]) == ["latency", "energy"]
    assert "an estimate" in report["objectives"]["energy"] and "declared" in text
    assert "An estimate" in report["power"] and report["power"][:60] in " ".join(text.split())
    for row in report["front"]:
        cfg = Config.load(out / row["file"])
        assert cfg.digest == row["digest"] and row["file"] in {path.name for path in out.glob("*.toml")}
        program = celosia.compile(model, cfg, check=False, records="none")
        assert row["models"]["quantised"]["cycles"] == celosia.driver.run.explain.estimate(program, MEMORY)["cycles"]
    assert len(list(out.glob("*.toml"))) == len(report["front"])
    first = out / report["front"][0]["file"]
    code, text, err = call("run", model, "--random", "--config", first, "--device", "timed", "--memory", MEMORY)
    assert code == 0, err
    for name in ("01-mine.toml", "100-4x4x4-0123ab.toml"):  # somebody's, and one of a front that was longer
        (out / name).write_text("batch = 1\n")
    code, text, _ = call(*line, "--points", 1, "-o", out, "--json")
    assert code == 0 and json.loads(text)["state"]["known"] >= 3
    assert (out / "01-mine.toml").exists() and not (out / "100-4x4x4-0123ab.toml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone.onnx", "-o", "out"], "there is no model at gone.onnx"),
        (
            ["@floats.onnx", "-o", "out"],
            "nothing of floats runs on the accelerator; make an int8 model of it",
        ),
        (["@quantised.onnx", "@quantised.onnx", "-o", "out"], "two models are called 'quantised'; give one of them"),
        (
            ["@quantised.onnx", "-o", "out", "--board", "nexys"],
            "there is no board 'nexys'; take one of pynq-z1",
        ),
        (["@quantised.onnx", "-o", "out", "--budget", "soon"], "'soon' is no time; write it as 90s, 30m or 2h"),
        (["@quantised.onnx", "-o", "out", "--budget", "0"], "in 0 s nothing can be explored; give more, as 10m"),
        (["@quantised.onnx", "-o", "out", "--space", "gone.toml"], "cannot read the space gone.toml"),
        (["@quantised.onnx", "-o", "out", "--memory", "gone"], "there is no memory model 'gone'"),
        (["@x.npy", "-o", "out"], "x.npy"),
        (["@quantised.onnx", "-o", "@quantised.onnx"], "cannot make the folder"),
        (["@quantised.onnx", "-o", "out", "--objective", "area", "--objective", "area"], "give each objective once"),
        (["@quantised.onnx", "-o", "out", "--pool", "ftp://x"], "'ftp://x' is no pool"),
    ],
)
def test_errors_are_a_sentence(
    words: list[str], message: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call("explore", *(word.replace("@", f"{models}/") for word in words))
    told = " ".join(err.split())
    assert code in (1, 2, 3) and message in told and "Traceback" not in err and "fault of celosia" not in told


def test_without_moocore_it_says_what_to_install(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moocore", None)
    code, _, err = call("explore", model, "-o", tmp_path / "out")
    assert code == 4 and 'pip install "celosia[explore]"' in " ".join(err.split())


def test_times() -> None:
    assert (parse_seconds("30m"), parse_seconds("2h"), parse_seconds("45"), parse_seconds("0.5s")) == (
        1800,
        7200,
        45,
        0.5,
    )


# The page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_front_and_hostile_names_do_nothing(model: Path, tmp_path: Path) -> None:
    """The page has the front, hostile names do nothing, and tooltips of Configs have a maximal width.

    test_report_in_browser.py measures that width.
    """
    pytest.importorskip("bokeh")
    hostile = tmp_path / "<script>window.hacked=1<!--.onnx"
    hostile.write_bytes(model.read_bytes())
    found = explore(hostile, space=SPACE, points=4, folder=tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert found.report["take"] in text.replace("&lt;", "<").replace("&gt;", ">")
    assert all(row["file"] in text for row in found.report["front"]) and "<script>window.hacked" not in text
    assert "W (an estimate)" in text and all(row["power"]["dynamic"] > 0 for row in found.report["front"])
    assert found.report["path"][-1][0] == len(found.report["points"])
    shown = [each for each in re.findall(r'"tooltips":(.{400})', text) if "@digest" in each]
    assert len(shown) == 2 and all("max-width:" in each and "overflow-wrap:anywhere" in each for each in shown)
    volumes = [volume for _, volume in found.report["path"]]
    assert volumes == sorted(volumes) and volumes[-1] == pytest.approx(found.report["state"]["hypervolume"])
    code, _, err = call("report", tmp_path / "out" / "front.json", "-o", tmp_path / "again.html")
    assert code == 0, err
    again = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert again.split("<script")[0] == text.split("<script")[0]
    (tmp_path / "front.json").write_text('{"searched": []}')
    code, _, err = call("report", tmp_path / "front.json", "-o", tmp_path / "none.html")
    assert code == 1 and "is no front: it has no models; write it again with `celosia explore`" in " ".join(err.split())


def test_a_page_without_a_front(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    explore(model, space=FEW, left=0.99, folder=tmp_path)
    assert "No Config of the space can be taken" in (tmp_path / "report.html").read_text(encoding="utf-8")
