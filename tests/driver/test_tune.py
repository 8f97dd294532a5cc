"""`celosia tune` is never worse than before, resumes without loss, measures nothing twice and doubts records."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks import networks
from benchmarks.workloads import MADE
from thorough import some
from typer.testing import CliRunner

import celosia
from celosia.compiler.compile import network_of
from celosia.compiler.launch import blocks
from celosia.compiler.launch.order import CHAIN
from celosia.compiler.tensorize.plan import DecisionsError
from celosia.compiler.tune import network_tuner
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.layer_space import layer_space
from celosia.compiler.tune.layer_trial import TIMED, LayerJob, Status, TrialResult, measure, pickled
from celosia.compiler.tune.network import Network, apply_records, network_schedule
from celosia.compiler.tune.network_tuner import NetworkState
from celosia.compiler.tune.records import Key, Records, schedule_of, shipped
from celosia.compiler.tune.tuner_options import DEADLINE
from celosia.driver import cli
from celosia.driver.cli.tuning import tune as command_line
from celosia.driver.tune.tune import Tuning, tune
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.timing import predict

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.shipped import winners

TRIALS = 20


def call(*line: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, [str(word) for word in line])
    return result.exit_code, result.stdout, result.stderr


def cycles(program: celosia.Program) -> int:
    """Return the cycles of all launches by the timing model."""
    size, total = instruction_bytes(program.config), 0
    for launch in program.launches:
        start = launch.address - program.image_address
        code = program.image[start : start + launch.count * size].tobytes()
        total += predict(program.config, code, address=launch.address).cycles
    return total


@pytest.fixture(scope="module")
def tuned(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning]:
    """Return the path of a tuning's records, and the tuning."""
    path = tmp_path_factory.mktemp("tuned") / "r.jsonl"
    return path, tune(models / "quantised.onnx", "tiny", trials=TRIALS, records=path)


def test_a_tuning_is_never_worse_and_gives_the_same_bytes(models: Path, tuned: tuple[Path, Tuning]) -> None:
    path, found = tuned
    usual = celosia.compile(models / "quantised.onnx", "tiny")
    report, given = found.report, {"input_1": np.load(models / "x.npy")}
    assert report["untuned"] == cycles(usual) and report["cycles"] == cycles(found.program)
    assert report["cycles"] < report["untuned"]  # there is something to be won in this one
    outputs = [celosia.Runtime(program, "timed").run(given).outputs for program in (usual, found.program)]
    for name in outputs[0]:
        np.testing.assert_array_equal(outputs[0][name], outputs[1][name])
    assert report["trials"] <= TRIALS and report["left_out"] == {}
    statuses = [result.status for result in Records.load(path).trials.values()]
    assert set(statuses) <= {Status.OK, Status.CENSORED} and report["failed"] == 0
    assert all(row["best"] <= row["usual"] and row["regret"] >= 0 for row in report["layers"])


def test_points_of_blocks_of_several_groups_are_legal_where_they_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's point is legal exactly if it compiles, which is known before a trial.

    Data that stays on chip may not fit beside the tiles of two groups.
    """
    monkeypatch.setattr(
        blocks._ChainPartitioner, "if_faster", lambda self, part: [part]
    )  # form blocks even if separate layers are faster
    results: list[tuple[bool, Status]] = []
    searched = network_of(networks.cached("ds_cnn", MADE), "pynq")
    for occurrence in searched.occurrences():
        if len(occurrence.usual) > 1:
            space = layer_space(searched.cfg, occurrence.layer, occurrence.usual)
            assert space.is_legal(space.index(occurrence.usual))
            for number in space.sample(8, np.random.default_rng(0)):
                result = measure(LayerJob(searched.cfg, pickled(occurrence.layer), space.points[number]))
                results.append((space.is_legal(number), result.status))
    assert any(legal for legal, _ in results)
    assert all(status == (Status.OK if legal else Status.REFUSED) for legal, status in results)


@pytest.mark.parametrize("looks", some([1, 2, 4], [1, 2]))
def test_a_budget_ends_all_stages(looks: int, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget ends all stages, also the first round over all layers and the trials of the whole network.

    looks: how often the tuner reads the clock before the budget is spent.
    """
    clock = SimpleNamespace(monotonic=count(1).__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr(network_tuner, "time", clock)
    monkeypatch.setattr("celosia.driver.tune.tune.deadline_of_budget", lambda budget: float(looks + 1))
    report = tune(models / "quantised.onnx", "tiny", trials=1000, budget="1s").report
    layers = len(report["layers"])
    assert report["cycles"] <= report["untuned"]
    assert (
        report["trials"] <= layers + (looks - 1) * network_tuner.SEARCHES_PER_ROUND * network_tuner.POINTS_PER_ASK
    )  # usual points, and some asks
    assert report["measured"] <= report["trials"] + 2  # of the whole: untuned, and all that layers found


def test_a_second_run_measures_nothing_and_finds_the_same(models: Path, tuned: tuple[Path, Tuning]) -> None:
    path, first = tuned
    size = path.stat().st_size
    again = tune(models / "quantised.onnx", "tiny", trials=TRIALS, records=path)
    assert again.report["measured"] == 0 and again.report["known"] > 0
    assert again.program.image.tobytes() == first.program.image.tobytes()
    assert path.stat().st_size == size
    told: list[str] = []
    compiled = celosia.compile(models / "quantised.onnx", "tiny", records=path, progress=told.append)
    assert cycles(compiled) == first.report["cycles"]
    assert any("this network's own" in line for line in told)


def test_an_interrupted_tuning_loses_nothing(models: Path, tuned: tuple[Path, Tuning], tmp_path: Path) -> None:
    _, whole = tuned
    path = tmp_path / "r.jsonl"

    def stop(state: NetworkState) -> None:
        if state.measured == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(models / "quantised.onnx", "tiny", trials=TRIALS, records=path, told=stop)
    kept = len(Records.load(path).trials)
    assert kept >= 7
    rest = tune(models / "quantised.onnx", "tiny", trials=TRIALS, records=path)
    assert rest.report["measured"] == whole.report["measured"] - kept
    assert rest.program.image.tobytes() == whole.program.image.tobytes()


def test_processes_find_what_this_one_finds(models: Path, tuned: tuple[Path, Tuning]) -> None:
    _, alone = tuned
    with Fleet.local(2) as fleet:
        found = tune(models / "quantised.onnx", "tiny", trials=TRIALS, fleet=fleet)
    assert found.report["measured"] == alone.report["measured"]
    assert found.program.image.tobytes() == alone.program.image.tobytes()


def lying(path: Path, cycles: int) -> Records:
    """Return records in which the worst schedule of each layer takes `cycles`, and nothing is known of the network."""
    truth, lies = Records.load(path), Records()
    worst: dict[str, tuple[Key, TrialResult]] = {}
    for key, result in truth.trials.items():
        if result.cost and not key.workload.startswith("network") and key.workload not in worst:
            known = truth.by_workload[key.workload, key.config].items()
            worst[key.workload] = max(((k, r) for k, r in known if r.cost), key=lambda trial: trial[1].cycles)
    for key, _ in worst.values():
        lies.add(key, TrialResult(Status.OK, cycles))
    return lies


def test_records_that_lie_make_nothing_worse(models: Path, tuned: tuple[Path, Tuning]) -> None:
    path, found = tuned
    searched = network_of(models / "quantised.onnx", "tiny")
    image, applied = apply_records(searched, lying(path, 1), TIMED)
    assert searched.cycles(image, TIMED) == found.report["untuned"] and "no better than without" in str(applied)
    again = tune(models / "quantised.onnx", "tiny", trials=TRIALS, records=lying(path, 1))
    assert again.report["cycles"] == found.report["cycles"]  # below the bound: measured instead of believed


def test_complete_networks_are_compared_only_where_layers_promise_a_saving(
    models: Path, tuned: tuple[Path, Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, compared = tuned[0], []
    searched = network_of(models / "quantised.onnx", "tiny")
    monkeypatch.setattr(Network, "cycles", lambda network, image, judge: compared.append(image) or 1)
    image, applied = apply_records(searched, lying(path, 1 << 30), TIMED)
    assert image is searched.image and not compared and "no better than without" in str(applied)
    apply_records(searched, lying(path, 1), TIMED)
    assert len(compared) == 2
    other = Records()  # another measurer's cycles promise nothing: they are compared on the complete network
    for key, result in lying(path, 1 << 30).trials.items():
        other.add(replace(key, measurer="rtl 5, ideal"), result)
    compared.clear()
    apply_records(searched, other, TIMED)
    assert len(compared) == 2


def test_schedules_that_do_not_fit_are_refused_with_the_reason(models: Path, tuned: tuple[Path, Tuning]) -> None:
    path, found = tuned
    wrong = Records()
    for key in Records.load(path).trials:
        if not key.workload.startswith("network"):
            point = [d.to_json() | {"n": 99} for d in schedule_of(key.schedule)]
            bad = Key(key.workload, key.config, json.dumps(point), key.measurer)
            wrong.add(bad, TrialResult(Status.OK, 10_000))
    searched = network_of(models / "quantised.onnx", "tiny")
    image, applied = apply_records(searched, wrong, TIMED)
    assert searched.cycles(image, TIMED) == found.report["untuned"] and "n must be between 1 and" in str(applied)


def test_decisions_of_a_search_go_before_records_or_are_refused_in_a_sentence(
    models: Path, tuned: tuple[Path, Tuning]
) -> None:
    model, searched = models / "quantised.onnx", network_of(models / "quantised.onnx", "tiny")
    usual = {each.workload: each.usual for each in searched.occurrences()}
    assert cycles(celosia.compile(model, "tiny", records=tuned[0], tuned=usual)) == tuned[1].report["untuned"]
    assert cycles(celosia.compile(model, "tiny", tuned={})) == tuned[1].report["untuned"]
    wrong = {name: tuple(replace(each, n=99) for each in point) for name, point in usual.items()}
    with pytest.raises(DecisionsError, match=r"decisions for .*n must be between"):
        celosia.compile(model, "tiny", tuned=wrong)


def test_the_command(models: Path, tmp_path: Path) -> None:
    records, model = tmp_path / "r.jsonl", models / "quantised.onnx"
    line = "tune", model, "--config", "tiny", "--records", records, "--trials", 4, "--jobs", 1
    code, out, err = call(*line, "--report", tmp_path / "report.json", "-o", tmp_path / "a.celosia")
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert f"{report['cycles']:,} cycles, {report['untuned']:,} untuned" in out and report["measured"] > 0
    code, out, err = call(*line)
    assert code == 0 and " 0 measured" in out
    code, out, err = call("compile", model, "--config", "tiny", "--records", records, "-o", tmp_path / "b.celosia")
    assert code == 0 and "records: this network's own" in err
    programs = [celosia.Program.load(tmp_path / name) for name in ("a.celosia", "b.celosia")]
    assert programs[0].image.tobytes() == programs[1].image.tobytes()


# Records that come with Celosia -----------------------------------------------------------------------------------


@pytest.fixture
def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the path of the shipped records for `tiny`, which do not exist yet."""
    monkeypatch.setattr("celosia.compiler.tune.records.SHIPPED_FOLDER", tmp_path / "presets")
    (tmp_path / "presets").mkdir()
    shipped.cache_clear()
    yield tmp_path / "presets" / "tiny.jsonl"
    shipped.cache_clear()


def test_compile_takes_what_comes_with_celosia(models: Path, tuned: tuple[Path, Tuning], presets: Path) -> None:
    model, (path, found) = models / "quantised.onnx", tuned
    without = celosia.compile(model, "tiny")
    assert without.schedules == "records: none for this network on tiny; the compiler decides"
    shutil.copy(path, presets)
    shipped.cache_clear()
    program = celosia.compile(model, "tiny")
    assert cycles(program) == found.report["cycles"] < cycles(without) == found.report["untuned"]
    assert "this network's own" in program.schedules and f"{cycles(without):,} without" in program.schedules
    for off in ("none", None):
        plain = celosia.compile(model, "tiny", records=off)
        assert plain.image.tobytes() == without.image.tobytes() and plain.schedules == ""
    other = celosia.compile(model, "pynq")  # nothing for that preset in this folder
    assert other.schedules == "records: none for this network on pynq; the compiler decides"


def test_a_file_of_records_counts_beside_what_comes_with_celosia(
    models: Path, tuned: tuple[Path, Tuning], presets: Path, tmp_path: Path
) -> None:
    shutil.copy(tuned[0], presets)
    key = Key("another network's", celosia.Config.load("tiny").digest, "[]", TIMED.version)
    Records(tmp_path / "r.jsonl").add(key, TrialResult(Status.OK, 5))
    program = celosia.compile(models / "quantised.onnx", "tiny", records=tmp_path / "r.jsonl")
    assert cycles(program) == tuned[1].report["cycles"]


def test_what_comes_with_celosia_makes_nothing_worse(models: Path, tuned: tuple[Path, Tuning], presets: Path) -> None:
    """Neither wrong shipped records nor those of another version make a result worse, and both are reported."""
    usual = tuned[1].report["untuned"]
    for key, result in lying(tuned[0], 1).trials.items():
        Records(presets).add(key, result)
    shipped.cache_clear()
    program = celosia.compile(models / "quantised.onnx", "tiny")
    assert cycles(program) == usual and "no better than without" in program.schedules
    presets.unlink()
    for key, result in Records.load(tuned[0]).trials.items():
        Records(presets).add(replace(key, measurer=f"older {key.measurer}"), result)
    shipped.cache_clear()
    program = celosia.compile(models / "quantised.onnx", "tiny")
    assert cycles(program) <= usual and "measured by another version or device" in program.schedules


def test_the_winners_of_a_tuning_are_what_decides(models: Path, tuned: tuple[Path, Tuning], presets: Path) -> None:
    """`python -m benchmarks.shipped` keeps the records that decide the result, none of which can be left out."""
    path, tuning = tuned
    searched = network_of(models / "quantised.onnx", "tiny")
    won = winners(searched, Records.load(path))
    lines = {key: result for key, result in won.items() if not key.workload.startswith(CHAIN)}
    for key, result in lines.items():
        Records(presets).add(key, result)
    shipped.cache_clear()
    assert cycles(celosia.compile(models / "quantised.onnx", "tiny")) == tuning.report["cycles"]
    network_key, without = sorted(
        (key for key in lines if key.workload.startswith("network")), key=lambda key: -len(network_schedule(key))
    )
    decided = network_schedule(network_key)
    assert len(lines) == len(decided) + 2 and not network_schedule(without)
    assert (lines[network_key].cycles, lines[without].cycles) == (tuning.report["cycles"], tuning.report["untuned"])
    for name in decided if len(decided) > 1 else ():
        fewer = Records()
        rest = {other: point for other, point in decided.items() if other != name}
        fewer.add(
            Key.of(celosia.Config.load("tiny"), network_key.workload, rest, network_key.measurer),
            TrialResult(Status.OK, 1),
        )
        assert searched.cycles(apply_records(searched, fewer, TIMED)[0], TIMED) > tuning.report["cycles"]


def test_the_demo_model_is_faster_by_default() -> None:
    """The shipped records make the demo model faster on a preset."""
    model = celosia.models.demo_model_path()
    usual, program = (celosia.compile(model, "pynq", records=records) for records in ("none", "shipped"))
    assert cycles(program) < cycles(usual) and "this network's own" in program.schedules
    images = celosia.models.demo_images()[0]
    outputs = [celosia.Runtime(each).run({"image": images[:1]}).outputs["logits"] for each in (usual, program)]
    np.testing.assert_array_equal(*outputs)


def test_the_command_without_records(models: Path, tuned: tuple[Path, Tuning], presets: Path, tmp_path: Path) -> None:
    shutil.copy(tuned[0], presets)
    line = "compile", models / "quantised.onnx", "--config", "tiny", "-o", tmp_path / "p.celosia"
    code, out, err = call(*line)
    assert code == 0 and "schedules" in out and "this network's own" in " ".join(out.split())
    assert celosia.Program.load(tmp_path / "p.celosia").schedules.startswith("records: this network's own")
    code, out, err = call(*line, "--records", "none")
    assert code == 0 and "schedules" not in out and "records" not in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tune {m} --records {t}/none/r.jsonl", "there is no folder"),
        ("tune {t}/no.onnx --records {t}/r.jsonl", "there is no model at"),
        ("tune {m} --config tiny --records {m}", "it is an input, too"),
        ("compile {m} --config tiny --records {t}/no.jsonl -o {t}/p", "there are no records at"),
        ("compile {m} --config tiny --records {m} -o {t}/p", "holds no records"),
    ],
)
def test_wrong_lines_are_one_sentence(line: str, message: str, models: Path, tmp_path: Path) -> None:
    code, _, err = call(*line.format(m=models / "quantised.onnx", t=tmp_path).split())
    assert code == 1 and message in err and "Traceback" not in err and err.strip().count("\n") <= 8


def test_a_model_that_stays_on_the_cpu_has_nothing_to_tune(models: Path, tmp_path: Path) -> None:
    line = "tune", models / "floats.onnx", "--records", tmp_path / "r.jsonl", "--jobs", 1
    code, _, err = call(*line)
    assert code == 1 and "nothing of floats runs on the accelerator of pynq" in err
    assert "celosia quantize" in err and "--device cpu" in err
    code, _, err = call(*line, "--device", "cpu", "--trials", 2)
    assert code == 0, err


def test_no_such_search(models: Path) -> None:
    with pytest.raises(ValueError, match=r"'luck'.*descent"):
        tune(models / "quantised.onnx", "tiny", search="luck")


def test_a_trial_has_as_long_on_every_device() -> None:
    """All tuners have the deadline that `--help` states; the command passes on only a given one."""
    defaults = {
        signature(function).parameters["deadline"].default for function in (tune, celosia.tune_cpu, celosia.tune_kernel)
    }
    assert defaults == {DEADLINE} == {600.0}
    assert signature(command_line).parameters["deadline"].default is None
