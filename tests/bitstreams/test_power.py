"""The power model reproduces the reports within its stated error, and more of anything takes no less power."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from celosia.bitstreams import area, power
from celosia.bitstreams.memories import block_rams, memories_of_pad
from celosia.bitstreams.power import (
    ALL_BUSY,
    AS_REPORTED,
    AT_REST,
    KINDS,
    UNITS,
    Cells,
    Coefficient,
    PowerModel,
    PowerReport,
)
from celosia.hw.boards.boards import BOARDS
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.scratchpads import scratchpads

ROOT = Path(__file__).parents[2]
MODEL = power.shipped_model()
BOARD = BOARDS["pynq-z2"]
PARTS = sorted({board.part for board in BOARDS.values()})
CELLS = Cells(lut=20_000, ff=30_000, dsp=200, ram=130)


# What the reports say -----------------------------------------------------------------------------------------------


def test_the_reports_are_what_they_are_said_to_be() -> None:
    for report in MODEL.reports:
        assert len(report.commit) == 40 and "/" in report.repository and report.activity in ("vectorless", "saif")
        assert power.part_class(report.part) in {group["name"] for group in power.FIGURES["group"]}
        assert all(0 <= watts < 10 for watts in report.watts.values())
    assert len({(report.repository, report.path) for report in MODEL.reports}) == len(MODEL.reports)


@pytest.mark.parametrize("part", PARTS)
def test_reports_are_given_back(part: str) -> None:
    """Models that do not know a report's design predict half of them within one factor, all within a larger one."""
    half, largest = MODEL.error(part)
    class_errors = [(r, ratio) for r, ratio in MODEL.errors if power.part_class(r.part) == power.part_class(part)]
    factors = [max(ratio, 1 / ratio) for _, ratio in class_errors]
    assert (
        len(factors) >= 4 and sum(factor <= half for factor in factors) >= len(factors) / 2 and max(factors) == largest
    )
    assert 1 < half < 2 and largest < 5
    assert f"{len(factors)} reports" in power.caveat(next(board for board in BOARDS.values() if board.part == part))


def test_the_error_is_of_models_that_do_not_know_the_design() -> None:
    report, ratio = next((r, ratio) for r, ratio in MODEL.errors if r.repository == "NotCleo/TPU-Cores")
    others = PowerModel(r for r in MODEL.reports if r.source != report.source)
    cells = Cells(report.lut, report.ff, report.dsp, report.ram)
    predicted = others.power(cells, report.mhz or 0, AS_REPORTED, report.part)
    assert predicted.dynamic / report.dynamic == pytest.approx(ratio)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", power.LABELS)
def test_each_coefficient_has_sources(name: str, part: str) -> None:
    coefficient = MODEL.coefficient(name, part)
    assert coefficient.watts > 0 and coefficient.sources >= 3 and coefficient.reports >= coefficient.sources
    assert coefficient.is_stand_in == (name == "mmcm" and "7z" not in part)


def test_a_device_without_reports_is_marked() -> None:
    assert MODEL.coefficient("static", "xc7z045ffg900-2").is_stand_in
    estimated = MODEL.power(CELLS, 100, AS_REPORTED, "xc7z045ffg900-2")
    assert estimated.stand_ins == ("static", "ps")
    assert not MODEL.power(CELLS, 100, AS_REPORTED, BOARD.part).stand_ins


class Wrong(PowerModel):
    """A model in which one coefficient is 20 times too large."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(MODEL.reports)

    def coefficient(self, name: str, part: str) -> Coefficient:
        right = super().coefficient(name, part)
        return replace(right, watts=20 * right.watts) if name == self.name else right


@pytest.mark.parametrize("name", ["", *KINDS])
def test_a_wrong_coefficient_is_found(name: str) -> None:
    """With a wrong coefficient, the model does not reproduce the reports within the stated error."""
    model = Wrong(name)
    ratios = [model.predict(report) / report.dynamic for report, _ in MODEL.errors if "7z" in report.part]
    within = max(max(ratio, 1 / ratio) for ratio in ratios) <= MODEL.error(BOARD.part)[1]
    assert within == (name == "")


def test_coefficients_are_found() -> None:
    """The model recovers the coefficients from reports that follow a rule, one of which is a fork of another."""
    generator = random.Random(1)
    known = {name: generator.uniform(1e-8, 1e-7) * (100 if kind.cells in ("ram", "dsp") else 1)
             for name, kind in KINDS.items()}  # fmt: skip

    def report(number: int, factor: float = 1.0, **more: str) -> PowerReport:
        cells = {"lut": 10_000 + number, "ff": 9_000, "ram": 40.0, "dsp": 50, "mmcm": 1}
        watts = {
            name: coefficient * float(cells[KINDS[name].cells]) * 80 * factor for name, coefficient in known.items()
        }
        return PowerReport(
            f"a/{number}", "p", "c", BOARD.part, "t", "vectorless", watts=watts | {"mmcm": 0.1, "static": 0.1, "ps": 1},
            mhz=80.0, **cells, **more,
        )  # type: ignore[arg-type]  # fmt: skip

    model = PowerModel([report(1), report(2), report(3, 9.0), report(4, 9.0, fork_of="a/3")])
    for name, coefficient in known.items():
        assert model.coefficient(name, BOARD.part).watts == pytest.approx(coefficient)
        assert model.coefficient(name, BOARD.part).sources == 3


# docs/bitstreams.md -------------------------------------------------------------------------------------------------

UNITS_OF = {
    "clocks": ("clock tree and flip-flops: nW a flip-flop and MHz", 1e9), "logic": ("LUTs: nW a LUT and MHz", 1e9),
    "signals": ("signals: nW a LUT and MHz", 1e9), "ram": ("block RAM: µW a block of 36 kbit and MHz", 1e6),
    "dsp": ("DSP blocks: µW a block and MHz", 1e6), "mmcm": ("clock manager: mW", 1e3),
    "static": ("static, of the device: W", 1.0), "ps": ("processors, apart: W", 1.0),
}  # fmt: skip
SHOWN = ("pynq-z2", "ultra96", "zcu104", "kv260")


def coefficient_table() -> list[str]:
    """Return the rows of the page with each coefficient and its number of designs."""
    boards = [BOARDS[name] for name in SHOWN]
    rows = []
    for name, (label, scale) in UNITS_OF.items():
        coefficients = [MODEL.coefficient(name, board.part) for board in boards]
        cells = [
            f"{coefficient.watts * scale:.3g}{'?' if coefficient.is_stand_in else ''} ({coefficient.sources})"
            for coefficient in coefficients
        ]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    for label, place in (("half of the reports are within a factor of", 0), ("all are within a factor of", 1)):
        rows.append(f"| {label} | {' | '.join(f'{MODEL.error(board.part)[place]:.2f}' for board in boards)} |")
    return rows


def watts_table() -> list[str]:
    """Return the rows of the page with the power of presets, by the area model."""
    rows = []
    for name in SHOWN:
        board = BOARDS[name]
        used = area.shipped_model().estimate(board.config)
        cells = Cells.from_counts(board.config, used.lut, used.ff, used.dsp, used.ram)
        working, resting = (
            power.estimate(board.config, cells, board, board.clock_mhz, busy) for busy in (ALL_BUSY, None)
        )
        parts = " | ".join(f"{working.watts[kind]:.2f}" for kind in KINDS)
        rows.append(
            f"| `{board.config.name}` on {name}, {board.clock_mhz} MHz | {parts} | {working.watts['static']:.2f} "
            f"| {working.fabric:.2f} | {resting.fabric:.2f} |"
        )
    return rows


def test_the_page_says_what_the_model_does() -> None:
    text = (ROOT / "docs" / "bitstreams.md").read_text(encoding="utf-8")
    missing = [row for row in (*coefficient_table(), *watts_table()) if row not in text]
    assert not missing, "docs/bitstreams.md should have these rows:\n" + "\n".join(missing)
    simulated = [MODEL.predict(report) / report.dynamic for report in MODEL.reports if report.activity == "saif"]
    assert f"{min(simulated):.1f} and {max(simulated):.1f} times" in text and len(simulated) == 2
    assert f"{len(MODEL.reports)} reports of {len({report.source for report in MODEL.reports})} designs" in text


# The estimate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_more_of_anything_is_no_less(part: str) -> None:
    base = MODEL.power(CELLS, 100, AS_REPORTED, part)
    assert base.dynamic > 0 and base.fabric > base.dynamic
    for name in ("lut", "ff", "dsp", "ram", "mmcm"):
        more = replace(CELLS, **{name: getattr(CELLS, name) + 10})
        assert MODEL.power(more, 100, AS_REPORTED, part).dynamic > base.dynamic, name
    assert MODEL.power(CELLS, 200, AS_REPORTED, part).dynamic == pytest.approx(2 * base.dynamic)
    for name in ("toggles", "computing", "enabled"):
        more_active = replace(AS_REPORTED, **{name: 2 * getattr(AS_REPORTED, name)})
        assert MODEL.power(CELLS, 100, more_active, part).dynamic > base.dynamic, name
    still = MODEL.power(CELLS, 100, AT_REST, part)
    assert still.dynamic == pytest.approx(still.watts["clocks"]) and still.watts["static"] == base.watts["static"]


@pytest.mark.parametrize("preset", ["tiny", "pynq", "wide"])
def test_more_work_is_no_less(preset: str) -> None:
    cfg = PRESETS[preset]
    used = area.shipped_model().estimate(cfg)
    cells = Cells.from_counts(cfg, used.lut, used.ff, used.dsp, used.ram)

    def watts(busy: Mapping[str, float] | None) -> float:
        return power.estimate(cfg, cells, BOARD, 100, busy).dynamic

    idle = dict.fromkeys(UNITS, 0.0)
    assert watts(None) < watts(idle) < watts(ALL_BUSY)
    for unit in UNITS:
        assert watts(idle) < watts(idle | {unit: 0.5}) < watts(idle | {unit: 1.0}), unit
    assert watts(ALL_BUSY) == watts(dict.fromkeys(UNITS, 1.5))  # no unit works more than always


def test_a_second_clock_takes_its_manager_and_its_blocks_twice() -> None:
    cfg = replace(PRESETS["pynq"], pump=2)
    cells = Cells.from_counts(cfg, 1, 1, 100, 1)
    assert cells.mmcm == 1 and cells.dsp == 100 + cfg.macs_per_cycle // 4
    assert Cells.from_counts(PRESETS["pynq"], 1, 1, 100, 1) == Cells(1, 1, 100, 1, 0)


def test_what_toggles_is_between_what_its_parts_do() -> None:
    rates = [rate for part in power.measured_parts().values() for rate in (part.working, part.waiting)]
    for preset in ("tiny", "pynq", "zcu104"):
        busy_activity = power.activity(PRESETS[preset], ALL_BUSY)
        assert min(rates) < busy_activity.toggles < busy_activity.computing < max(rates) and busy_activity.enabled == 1
        idle_activity = power.activity(PRESETS[preset], dict.fromkeys(UNITS, 0.0))
        assert idle_activity.toggles < busy_activity.toggles and idle_activity.enabled == 0
    # A larger array has a larger share
    tiny, large = (power.activity(PRESETS[name], ALL_BUSY) for name in ("tiny", "zcu104"))
    assert tiny.toggles < large.toggles


def test_memories_of_scratchpads_are_most_of_the_block_ram() -> None:
    for cfg in PRESETS.values():
        scratchpad_blocks = sum(
            memory.blocks for pad in scratchpads(cfg).values() for memory in memories_of_pad(cfg, pad)
        )
        assert scratchpad_blocks <= block_rams(cfg) and (scratchpad_blocks > block_rams(cfg) / 2 or cfg.name == "tiny")


def test_parts_are_as_measured() -> None:
    parts = power.measured_parts()
    assert set(UNITS) < set(parts) and set(power.UNIT_OF) <= set(parts)
    assert all(0 <= part.waiting <= part.working < 1 and part.bits > 0 for part in parts.values())
    for preset in ("tiny", "pynq"):
        total = sum(part.bits_of(PRESETS[preset]) for part in parts.values())
        row = next(
            row for row in area.shipped_model().rows if replace(row.cfg, name="x") == replace(PRESETS[preset], name="x")
        )
        assert math.isclose(
            total, row.ff, rel_tol=0.8
        )  # registers before synthesis merges some and moves others into blocks


def test_a_board_of_somebodys_own_has_an_estimate() -> None:
    own = replace(BOARD, name="own", clock_mhz=50)
    assert power.estimate(PRESETS["tiny"], CELLS, own, 50, ALL_BUSY).fabric > 0
