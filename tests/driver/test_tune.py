"""`celosia tune`: never worse, resumed without loss, nothing measured twice, and no record believed for its word."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import celosia
from celosia.compiler.image import Image
from celosia.compiler.tune.measure import TIMED, Result, Status
from celosia.compiler.tune.model import LEARNERS
from celosia.compiler.tune.network import Network, apply
from celosia.compiler.tune.pool import Fleet
from celosia.compiler.tune.records import Key, Records, schedule_of
from celosia.compiler.tune.search import SEARCHES
from celosia.compiler.tune.tuner import State
from celosia.driver import cli
from celosia.driver.cli.tuning import LearnerName, SearchName
from celosia.driver.tune import Tuning, tune
from celosia.hw.isa import instruction_bytes
from celosia.sim.timing import predict

TRIALS = 20


def call(*line: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, [str(word) for word in line])
    return result.exit_code, result.stdout, result.stderr


def cycles(program: celosia.Program) -> int:
    """Of all launches, by the timing model."""
    size, found = instruction_bytes(program.config), 0
    for launch in program.launches:
        start = launch.address - program.image_address
        code = program.image[start : start + launch.count * size].tobytes()
        found += predict(program.config, code, address=launch.address).cycles
    return found


@pytest.fixture(scope="module")
def tuned(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning]:
    """The records of a tuning, and what it found."""
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
    assert set(statuses) <= {
        Status.OK,
        Status.CENSORED,
        Status.REFUSED,
    }  # a block's groups may not fit beside each other
    assert report["failed"] == statuses.count(Status.REFUSED)
    assert all(row["best"] <= row["usual"] and row["regret"] >= 0 for row in report["layers"])


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

    def stop(state: State) -> None:
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
    """Records in which every layer's worst schedule takes `cycles`, and the network nothing is known of."""
    truth, lies = Records.load(path), Records()
    worst: dict[str, tuple[Key, Result]] = {}
    for key, result in truth.trials.items():
        if result.cost and not key.workload.startswith("network") and key.workload not in worst:
            known = truth.by_workload[key.workload, key.config].items()
            worst[key.workload] = max(((k, r) for k, r in known if r.cost), key=lambda each: each[1].cycles)
    for key, _ in worst.values():
        lies.add(key, Result(Status.OK, cycles))
    return lies


def test_records_that_lie_make_nothing_worse(models: Path, tuned: tuple[Path, Tuning]) -> None:
    path, found = tuned
    lies = lying(path, 1)
    applied: list[str] = []

    def improve(network: Network) -> Image:
        image, told = apply(network, lies, TIMED)
        applied.append(str(told))
        return image

    program = celosia.compile(models / "quantised.onnx", "tiny", improve=improve)
    assert cycles(program) == found.report["untuned"] and "no better than without" in applied[0]
    again = tune(models / "quantised.onnx", "tiny", trials=TRIALS, records=lying(path, 1))
    assert again.report["cycles"] == found.report["cycles"]  # below the bound: measured instead of believed


def test_schedules_that_do_not_fit_are_refused_with_the_reason(models: Path, tuned: tuple[Path, Tuning]) -> None:
    path, found = tuned
    wrong = Records()
    for key in Records.load(path).trials:
        if not key.workload.startswith("network"):
            point = [d.to_json() | {"n": 99} for d in schedule_of(key.schedule)]
            bad = Key(key.workload, key.config, json.dumps(point), key.measurer)
            wrong.add(bad, Result(Status.OK, 10_000))
    told = []

    def improve(network: Network) -> Image:
        image, applied = apply(network, wrong, TIMED)
        told.append(str(applied))
        return image

    program = celosia.compile(models / "quantised.onnx", "tiny", improve=improve)
    assert cycles(program) == found.report["untuned"] and "n must be between 1 and" in told[0]


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


def test_no_such_search(models: Path) -> None:
    with pytest.raises(ValueError, match="there is no 'luck'; take descent"):
        tune(models / "quantised.onnx", "tiny", search="luck")


def test_the_command_knows_every_search_and_learner() -> None:
    """Its own lists keep the start of the command line from importing the tuner."""
    assert [each.value for each in SearchName] == [*SEARCHES]
    assert [each.value for each in LearnerName] == [*LEARNERS]
