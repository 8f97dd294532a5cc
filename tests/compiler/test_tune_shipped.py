"""The records that Celosia ships are complete, small, exact for the presets, and have no unused line."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from thorough import some

import celosia
from celosia.compiler.compile import network_of
from celosia.compiler.launch import order as chain_times
from celosia.compiler.launch.order import CHAIN
from celosia.compiler.tune.layer_trial import TIMED, Status, TrialResult
from celosia.compiler.tune.network import known_chains, network_schedule
from celosia.compiler.tune.records import SHIPPED_FOLDER, Key, Records, load_requested, schedule_of, shipped
from celosia.driver.run.explain import estimate
from celosia.hw.spec.config import PRESETS

FILES = sorted(SHIPPED_FOLDER.glob("*.jsonl"))
WHOLE = f"whole {TIMED.version}"


def is_network(key: Key) -> bool:
    return key.workload.startswith("network of ")


def is_chain(key: Key) -> bool:
    return key.workload.startswith(f"{CHAIN} of ")


@cache
def compiled(preset: str, records: str) -> celosia.Program:
    """Compile the demo model."""
    return celosia.compile(celosia.models.demo_model_path(), preset, check=False, records=records)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_lines_are_exact_for_their_preset(path: Path) -> None:
    """Each record has the cycles of its preset.

    After a change of measure.VERSION or of a preset, `python -m benchmarks.shipped --trials 0` measures them again, and
    without `--trials 0` it searches anew.
    """
    records, cfg = Records.load(path), PRESETS[path.stem]
    assert records.trials and records.damaged == records.conflicts == 0 and path.stat().st_size < 1 << 17
    assert shipped(cfg).trials == records.trials
    for key, result in records.trials.items():
        assert key.config == cfg.digest
        assert result.status == Status.OK or (is_chain(key) and result.status == Status.REFUSED)
        assert key.measurer == (WHOLE if is_network(key) else TIMED.version)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_is_a_winner_of_a_network(path: Path) -> None:
    records = Records.load(path)
    alone = (key for key in records.trials if not is_network(key) and not is_chain(key))
    layers = {(key.workload, schedule_of(key.schedule)) for key in alone}
    decided = {pair for key in records.trials if is_network(key) for pair in network_schedule(key).items()}
    assert layers == decided


@pytest.mark.parametrize("preset", some([path.stem for path in FILES], ["pynq"]))
def test_the_demo_model_takes_the_cycles_of_its_record(preset: str) -> None:
    """The demo model and its chains of layers take the recorded cycles, and `compile` measures none of them."""
    records = Records.load(SHIPPED_FOLDER / f"{preset}.jsonl")
    tuned, plain = (compiled(preset, known) for known in ("shipped", "none"))
    cycles = [estimate(program, TIMED.memory)["cycles"] for program in (tuned, plain)]
    assert f"; {cycles[0]:,} cycles, {cycles[1]:,} without" in tuned.schedules
    assert set(cycles) <= {result.cycles for key, result in records.trials.items() if is_network(key)}


def test_chains_take_the_cycles_of_their_records() -> None:
    found = network_of(celosia.models.demo_model_path(), "pynq", records="none").planner.timed
    known = known_chains(PRESETS["pynq"], shipped(PRESETS["pynq"]))
    assert found and found == {name: known[name] for name in found}


def test_a_search_of_blocks_times_nothing_that_records_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of blocks times no recorded chain, and finds the same blocks."""
    demo = celosia.models.demo_model_path()
    plain = compiled("pynq", "none")
    monkeypatch.setattr(chain_times, "build", lambda *given, **how: pytest.fail("a chain is timed"))
    tuned = celosia.compile(demo, "pynq", check=False)
    names = [[[layer.name for layer in launch.layers] for launch in each.launches] for each in (plain, tuned)]
    assert names[0] == names[1]


def test_presets_have_them_and_no_other_config_has() -> None:
    assert {path.stem for path in FILES} >= {"pynq", "ultra96", "zcu104"}
    assert not shipped(PRESETS["huge"]).trials
    assert {path.stem for path in FILES} <= set(PRESETS)


def test_what_is_asked_for(tmp_path: Path) -> None:
    assert load_requested(None) is None and load_requested("none") is None
    given = load_requested("shipped")
    assert given is not None and given.trials == {}
    path = tmp_path / "r.jsonl"
    key = Key("w", PRESETS["pynq"].digest, "[]", "m")
    Records(path).add(key, TrialResult(Status.OK, 7))
    own = load_requested(path)
    assert own is not None and own.trials == {key: TrialResult(Status.OK, 7)}
    together = own.joined(shipped(PRESETS["pynq"]))
    assert together.trials == own.trials | shipped(PRESETS["pynq"]).trials and together.path == path
    assert key not in shipped(PRESETS["pynq"]).trials
