"""The records that come with Celosia: whole, small, exact for the presets, and nothing in them that decides nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import celosia
from celosia.compiler.tune import shipped
from celosia.compiler.tune.measure import TIMED, Result, Status
from celosia.compiler.tune.network import network_schedule
from celosia.compiler.tune.records import Key, Records, schedule_of
from celosia.hw.config import PRESETS

FILES = sorted(shipped.FOLDER.glob("*.jsonl"))
WHOLE = f"whole {TIMED.version}"


def is_network(key: Key) -> bool:
    return key.workload.startswith("network of ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_lines_are_exact_for_their_preset(path: Path) -> None:
    """After a change of measure.VERSION or of a preset: `python -m benchmarks.shipped --trials 0` measures them again,
    and without `--trials 0` it searches anew."""
    records, cfg = Records.load(path), PRESETS[path.stem]
    assert records.trials and records.damaged == records.conflicts == 0 and path.stat().st_size < 1 << 17
    assert shipped.shipped(cfg).trials == records.trials
    for key, result in records.trials.items():
        assert key.config == cfg.digest and result.status == Status.OK
        assert key.measurer == (WHOLE if is_network(key) else TIMED.version)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_is_a_winner_of_a_network(path: Path) -> None:
    records = Records.load(path)
    layers = {(key.workload, schedule_of(key.schedule)) for key in records.trials if not is_network(key)}
    decided = {pair for key in records.trials if is_network(key) for pair in network_schedule(key).items()}
    assert layers == decided


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_demo_model_takes_the_cycles_of_its_record(path: Path) -> None:
    program = celosia.compile(celosia.models.demo_model_path(), path.stem, check=False)
    known = {result.cycles for key, result in Records.load(path).trials.items() if is_network(key)}
    assert any(f"; {cycles:,} cycles, " in program.schedules for cycles in known), program.schedules


def test_presets_have_them_and_no_other_config_has() -> None:
    assert {path.stem for path in FILES} >= {"pynq", "ultra96", "zcu104"}
    assert not shipped.shipped(PRESETS["huge"]).trials
    assert {path.stem for path in FILES} <= set(PRESETS)


def test_what_is_asked_for(tmp_path: Path) -> None:
    assert shipped.asked_for(None) is None and shipped.asked_for("none") is None
    given = shipped.asked_for("shipped")
    assert given is not None and given.trials == {}
    path = tmp_path / "r.jsonl"
    key = Key("w", PRESETS["pynq"].digest, "[]", "m")
    Records(path).add(key, Result(Status.OK, 7))
    own = shipped.asked_for(path)
    assert own is not None and own.trials == {key: Result(Status.OK, 7)}
    together = own.joined(shipped.shipped(PRESETS["pynq"]))
    assert together.trials == own.trials | shipped.shipped(PRESETS["pynq"]).trials and together.path == path
    assert key not in shipped.shipped(PRESETS["pynq"]).trials
