"""Predicted cycles are cached on disk under everything that they depend on."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.compile_time import chain

import celosia
from celosia.compiler.launch import blocks, order
from celosia.compiler.layer import Layer, Storage
from celosia.compiler.switches import leaving_out
from celosia.compiler.tensorize import remembered_cycles as module
from celosia.compiler.tensorize.computation import DramPlace
from celosia.compiler.tensorize.plan import Planner, collect_tilings
from celosia.compiler.tensorize.remembered_cycles import RememberedCycles, constant_pattern, remembered_cycles
from celosia.compiler.tune import network
from celosia.hw.spec.config import PRESETS

CFG = PRESETS["tiny"]
SMALL = chain(2, 12)
"""A model of two layers, which may be a block."""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty cache folder."""
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(module.VARIABLE, "1")
    return tmp_path / "cache" / module.KIND


def compiled(path: Path, **options: Any) -> bytes:
    """Return the file of the demo model's Program."""
    celosia.compile(celosia.models.demo_model_path(), "pynq", check=False, **options).save(path)
    return path.read_bytes()


@pytest.mark.parametrize("records", ["none", "shipped"])
def test_a_second_compilation_predicts_nothing_and_gives_the_same_program(
    records: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = compiled(tmp_path / "program", records=records)
    for user in (order, network):
        monkeypatch.setattr(user, "predict", lambda *args: pytest.fail("cycles are predicted"))
    assert compiled(tmp_path / "program", records=records) == first


def test_nothing_is_kept_if_the_user_does_not_want_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.VARIABLE, "0")
    celosia.compile(SMALL, "pynq", check=False)
    assert remembered_cycles(CFG) is None and not cache.exists()


def test_a_file_of_tilings_neither_uses_nor_changes_predictions(cache: Path) -> None:
    """A file of tilings neither reads nor writes predictions, which hold for the compiler's own tilings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(module.VARIABLE, "0")
        decisions = collect_tilings(celosia.compile(SMALL, "pynq", check=False))
    celosia.compile(SMALL, "pynq", check=False, decisions=decisions)
    assert not cache.exists()
    celosia.compile(SMALL, "pynq", check=False)
    assert cache.exists()


# Files -----------------------------------------------------------------------------------------------------------


def saved(cycles: float, *key: object) -> RememberedCycles:
    """Save one more prediction and return all predictions."""
    remembered = RememberedCycles(CFG)
    remembered.recall(lambda: cycles, *key)
    remembered.save()
    return remembered


def recalled(*key: object) -> float:
    """Return the prediction that a new compilation reads under a key, or -1."""
    return RememberedCycles(CFG).recall(lambda: -1.0, *key)


def test_predictions_are_read_again() -> None:
    saved(5, "chain", (0, 1))
    saved(float("inf"), "chain", (0, 0))
    assert (recalled("chain", (0, 1)), recalled("chain", (0, 0))) == (5, float("inf"))
    assert recalled("chain", (1, 0)) == recalled("other", (0, 1)) == -1


def test_a_file_holds_one_config_one_memory_plan_and_one_version_of_the_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = {RememberedCycles(cfg).path for cfg in (CFG, replace(CFG, acc_depth=2 * CFG.acc_depth))}
    with leaving_out(["memory"]):
        paths.add(RememberedCycles(CFG).path)
    monkeypatch.setattr(module, "_source_digest", lambda: "others")
    paths.add(RememberedCycles(CFG).path)
    assert len(paths) == 4


def test_the_sources_of_predictions_are_all_there() -> None:
    root = Path(module.__file__).parents[2]
    assert all(list((root / folder).glob("*.py")) for folder in module.SOURCES)
    folders = {Path(str(source.__file__)).parent for source in (order, blocks, module)}
    assert folders <= {(root / folder).resolve() for folder in module.SOURCES} | {root / f for f in module.SOURCES}


def test_damaged_lines_and_files_of_others_count_as_missing() -> None:
    path = saved(5, "a").path
    path.write_bytes(b"\xff\xfe\n" + b"0" * module.KEY_DIGITS + b" none\n" + path.read_bytes() + b"cut of")
    assert recalled("a") == 5
    path.chmod(0o666)
    assert recalled("a") == -1


@pytest.mark.parametrize("number", ["nan", "-1.0", "12"])
def test_a_number_that_is_none_or_was_cut_off_counts_as_missing(number: str) -> None:
    """Invalid and truncated numbers count as missing. A last line without an end was cut off when a process died."""
    path = saved(125, "a").path
    key = path.read_text().split(" ")[0]
    path.write_text(f"{key} {number}" + "\n" * (number != "12"))
    assert recalled("a") == -1


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "file"))
    saved(5, "a")
    assert recalled("a") == -1


def test_a_file_that_is_too_large_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    saved(5, "a")
    saved(6, "b")
    assert (recalled("a"), recalled("b")) == (-1, 6)


# Keys ------------------------------------------------------------------------------------------------------------


@dataclass
class Places:
    """The attributes of a LayerComputation that a pattern reads."""

    places: dict[int, DramPlace]


def pattern(*homes: np.ndarray[Any, Any] | Storage, book_bytes: int = 0) -> tuple[object, ...]:
    """Return the pattern of constants at these places."""
    places = Places({number: DramPlace(home, 0, (), book_bytes) for number, home in enumerate(homes)})
    return constant_pattern([places])  # type: ignore[list-item]


def test_a_pattern_says_which_constants_are_equal() -> None:
    a, b = np.zeros(4, np.uint8), np.ones(4, np.uint8)
    assert pattern(a, b) == pattern(b, a) == pattern(a, Storage("x", 1), b)
    assert pattern(a, a.copy()) != pattern(a, b)
    assert len({pattern(a, b, a), pattern(a, b, b), pattern(a, a, b), pattern(a, a, a)}) == 4


def test_a_pattern_holds_codebooks() -> None:
    a, b = np.zeros(4, np.uint8), np.ones(4, np.uint8)
    assert pattern(a, book_bytes=2) != pattern(b, book_bytes=2)
    assert pattern(a, book_bytes=2) == pattern(np.array([0, 0, 1, 1], np.uint8), book_bytes=2)


def wrong_estimates(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many estimates of a compilation differ from newly computed ones."""
    wrong = count = 0
    estimate = blocks._ChainPartitioner._estimate

    def compared(self: blocks._ChainPartitioner, layer: Layer) -> float | None:
        nonlocal wrong, count
        value = estimate(self, layer)
        count += 1
        wrong += value != self._estimate_anew(layer)
        return value

    monkeypatch.setattr(blocks._ChainPartitioner, "_estimate", compared)
    for user in (blocks, order):
        monkeypatch.setattr(user, "time_layers", lambda *args: 1.0)  # the timing model takes most of the time
    for model in (celosia.models.demo_model_path(), chain(4, 8)):
        celosia.compile(model, "pynq", check=False, records="none")
    assert count > 10
    return wrong


def test_estimates_of_one_geometry_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_estimates(monkeypatch) == 0


@pytest.mark.parametrize("part", range(3))
def test_a_geometry_that_leaves_out_a_part_is_noticed(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison finds a key without cuts, without the first layer, or without the other layers."""
    geometry = blocks.geometry

    def careless(planner: Planner, layer: Layer) -> Hashable:
        layers, cuts = geometry(planner, layer)  # type: ignore[misc]
        return (layers, (layers[1:], len(layers), cuts), (layers[0], cuts))[part]

    monkeypatch.setattr(blocks, "geometry", careless)
    assert wrong_estimates(monkeypatch)
