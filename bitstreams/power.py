"""Estimate of the power in watts that an accelerator draws on a board.

Coefficients are medians over reports of Vivado's report_power on public designs of others; power.toml has the reports
and their sources. The share of bits that toggle was counted in the RTL simulator (activity.json, `python -m
benchmarks.activity`). The share of cycles in which each unit works comes from the caller. Imports only the standard
library, hw/ and bitstreams/.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

from celosia.bitstreams.memories import memories_of_pad
from celosia.bitstreams.synthesis import multipliers
from celosia.hw.boards.board import Board
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import scratchpads

FIGURES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("power.toml").read_text(encoding="utf-8"))
"""Content of power.toml."""
ACTIVITY_FILE = Path(__file__).with_name("activity.json")
"""Toggles of each part of the accelerator, as the RTL simulator has counted them."""
TOGGLE_RATE, ENABLED = float(FIGURES["toggle_rate"]), float(FIGURES["enabled"])
"""Activity that the reports assume: toggles of a bit in a cycle, and share of cycles in which block RAM is enabled."""
UNITS = ("load", "gemm", "vector", "store")
"""Units whose share of busy cycles the estimate takes into account."""


@dataclass(frozen=True)
class PowerKind:
    """A kind of dynamic power, which reports list in a row of its own.

    label : name for users.
    cells : the field of `Cells` and of PowerReport that the power is proportional to.
    min_exposure : smallest product of cells and MHz that counts. Below it the rounding of reports to a milliwatt would
        distort the coefficient.
    """

    label: str
    cells: str
    min_exposure: float = 0


KINDS = {
    "clocks": PowerKind("clock tree, flip-flops", "ff", 2e5), "logic": PowerKind("LUTs", "lut", 2e5),
    "signals": PowerKind("signals", "lut", 2e5), "ram": PowerKind("block RAM", "ram", 500),
    "dsp": PowerKind("DSP blocks", "dsp", 500),
}  # fmt: skip
"""Kinds of power that are proportional to the clock."""
LABELS = {name: kind.label for name, kind in KINDS.items()} | {
    "mmcm": "clock manager", "static": "static, of the device", "ps": "processors, apart",
}  # fmt: skip
"""Parts of the estimated power, and their names for users."""
DEVICE_LABELS = ("static", "ps")
"""Parts of the power that depend on the device, not on the design in it."""


@dataclass(frozen=True)
class PowerReport:
    """A report of Vivado on a public design; power.toml explains the fields.

    repository, path, commit : where the report is published.
    part, tool : the FPGA, and the version of Vivado.
    activity : "vectorless" if the report assumes toggle rates; else they come from a simulation.
    lut, ff, ram, dsp, mmcm : numbers of cells.
    watts : power by the names of LABELS.
    mhz : clock; None if several clocks share the fabric.
    fork_of : repository from which the design was copied.
    """

    repository: str
    path: str
    commit: str
    part: str
    tool: str
    activity: str
    lut: int
    ff: int
    ram: float
    dsp: int
    mmcm: int
    watts: Mapping[str, float]
    mhz: float | None = None
    fork_of: str = ""

    @property
    def source(self) -> str:
        """Repository of the design's author; all reports on designs of one source count as one."""
        return self.fork_of or self.repository

    def exposure(self, name: str) -> float:
        """Return cells times MHz for one of KINDS; 0 if the report lacks it, or the product is too small to count."""
        kind = KINDS[name]
        exposure = getattr(self, kind.cells) * (self.mhz or 0.0)
        return float(exposure) if name in self.watts and exposure >= kind.min_exposure else 0.0

    @property
    def dynamic(self) -> float:
        """Sum of the watts of those KINDS whose exposure counts."""
        return sum(self.watts[name] for name in KINDS if self.exposure(name))


@dataclass(frozen=True)
class Coefficient:
    """Power of one cell, the median over reports.

    watts : of one cell at 1 MHz; for "mmcm", "static" and "ps" of one piece of hardware at any clock.
    sources : number of sources of designs in the median.
    reports : number of reports in the median.
    is_stand_in : for lack of reports, the value is that of another family or device.
    """

    watts: float
    sources: int
    reports: int
    is_stand_in: bool = False


@dataclass(frozen=True)
class Cells:
    """Cells of a design that draw power.

    lut, ff : LUTs and flip-flops.
    dsp : DSP blocks; those at twice the clock count twice.
    ram : block RAMs of 36 kbit.
    mmcm : clock managers.
    """

    lut: float
    ff: float
    dsp: float
    ram: float
    mmcm: int = 0

    @staticmethod
    def from_counts(cfg: Config, lut: float, ff: float, dsp: float, ram: float) -> Cells:
        """Return the cells of `cfg` from counted or estimated resources; adds the second clock of pump = 2."""
        return Cells(lut, ff, dsp + (cfg.pump - 1) * _array_dsp_blocks(cfg), ram, cfg.pump - 1)


@dataclass(frozen=True)
class Toggling:
    """Activity of a design.

    toggles : mean toggles of a bit in a cycle.
    computing : the same for the results of DSP blocks.
    enabled : share of cycles in which block RAM is enabled.
    """

    toggles: float
    computing: float
    enabled: float

    def scale(self, name: str) -> float:
        """Return the factor for the watts of one of KINDS, relative to the activity that reports assume."""
        factors = {
            "logic": self.toggles / TOGGLE_RATE, "signals": self.toggles / TOGGLE_RATE,
            "dsp": self.computing / TOGGLE_RATE, "ram": self.enabled / ENABLED,
        }  # fmt: skip
        return factors.get(name, 1.0)


AS_REPORTED = Toggling(TOGGLE_RATE, TOGGLE_RATE, ENABLED)
"""The activity that reports assume."""
AT_REST = Toggling(0.0, 0.0, 0.0)
"""No activity but that of the clocks."""


@dataclass(frozen=True)
class Power:
    """Estimated power of an accelerator.

    watts : by the names of LABELS.
    stand_ins : names whose coefficients come from another family or device.
    """

    watts: Mapping[str, float]
    stand_ins: tuple[str, ...] = field(default=())

    @property
    def dynamic(self) -> float:
        """Watts of the design in the FPGA fabric, without static power."""
        return sum(watts for name, watts in self.watts.items() if name not in DEVICE_LABELS)

    @property
    def fabric(self) -> float:
        """Watts of the FPGA fabric, with static power and without the processors."""
        return self.dynamic + self.watts["static"]


class PowerModel:
    """Coefficients of power, and estimates with them, from a set of reports."""

    def __init__(self, reports: Iterable[PowerReport]) -> None:
        self.reports = tuple(reports)
        self._coefficients: dict[str, Mapping[str, Coefficient]] = {}

    def without(self, source: str) -> PowerModel:
        """Return a model of all reports but those of one source."""
        return PowerModel(report for report in self.reports if report.source != source)

    def coefficient(self, name: str, part: str) -> Coefficient:
        """Return the coefficient of one of LABELS for a part. KeyError if no report of any family has it."""
        reports, is_stand_in = self._reports_for(name, part)
        sources: defaultdict[str, list[float]] = defaultdict(list)
        for report in reports:
            sources[report.source].append(_watts_per_cell(report, name))
        watts = median(median(values) for values in sources.values())
        return Coefficient(watts, len(sources), len(reports), is_stand_in)

    def _reports_for(self, name: str, part: str) -> tuple[list[PowerReport], bool]:
        """Return the reports that determine a coefficient for a part, and whether they only stand in.

        Preferred are reports on the same device, for DEVICE_LABELS, or on the same class of parts; else all stand in.
        """
        usable = [report for report in self.reports if _is_usable(report, name)]
        if not usable:
            raise KeyError(name)
        same_class = [report for report in usable if part_class(report.part) == part_class(part)]
        if name in DEVICE_LABELS:
            same_device = [report for report in same_class if _strip_package(report.part) == _strip_package(part)]
            return (same_device, False) if same_device else (same_class or usable, True)
        return (same_class, False) if same_class else (usable, True)

    def coefficients(self, part: str) -> Mapping[str, Coefficient]:
        """Return the coefficients of all LABELS for a part."""
        if part not in self._coefficients:
            self._coefficients[part] = {name: self.coefficient(name, part) for name in LABELS}
        return self._coefficients[part]

    def power(self, cells: Cells, mhz: float, activity: Toggling, part: str) -> Power:
        """Estimate the power of `cells` on a part at a clock of `mhz`."""
        coefficients = self.coefficients(part)
        watts = {
            name: coefficients[name].watts * getattr(cells, kind.cells) * mhz * activity.scale(name)
            for name, kind in KINDS.items()
        }
        watts["mmcm"] = coefficients["mmcm"].watts * cells.mmcm
        watts |= {name: coefficients[name].watts for name in ("static", "ps")}
        return Power(watts, tuple(name for name, row in coefficients.items() if row.is_stand_in and watts[name]))

    def predict(self, report: PowerReport) -> float:
        """Predict `report.dynamic`, in watts, at the activity that reports assume."""
        coefficients = self.coefficients(report.part)
        return sum(coefficients[name].watts * report.exposure(name) for name in KINDS)

    @cached_property
    def errors(self) -> list[tuple[PowerReport, float]]:
        """Leave-one-out errors: each vectorless report, and the power predicted without its source over its own."""
        rows = [report for report in self.reports if report.activity == "vectorless" and report.dynamic > 0]
        models = {source: self.without(source) for source in {report.source for report in rows}}
        return [(report, models[report.source].predict(report) / report.dynamic) for report in rows]

    def error(self, part: str) -> tuple[float, float]:
        """Return two factors within which half of the reports, and all reports, on parts of this class are predicted.

        A class without reports takes the reports of all classes.
        """
        factors = [
            max(ratio, 1 / ratio) for report, ratio in self.errors if part_class(report.part) == part_class(part)
        ] or [max(ratio, 1 / ratio) for _, ratio in self.errors]
        return median(factors), max(factors)


def _is_usable(report: PowerReport, name: str) -> bool:
    """Return whether a report counts for the coefficient of one of LABELS.

    Reports with toggle rates from a simulation only count for clocks, as the rates are unknown. Static power counts
    only with processors, which warm the chip.
    """
    if name in KINDS:
        return report.exposure(name) > 0 and (name == "clocks" or report.activity == "vectorless")
    if name == "mmcm":
        return report.mmcm > 0 and name in report.watts
    return "ps" in report.watts and name in report.watts


def _watts_per_cell(report: PowerReport, name: str) -> float:
    """Return the watts in a report for one of LABELS, divided by cells times MHz, by MMCMs, or by 1."""
    cells = report.exposure(name) if name in KINDS else report.mmcm if name == "mmcm" else 1
    return report.watts[name] / cells


@cache
def part_class(part: str) -> str:
    """Return the class of parts with similar power that a part belongs to: the first matching group of power.toml.

    KeyError if there is none.
    """
    for group in FIGURES["group"]:
        if re.fullmatch(group["parts"], part):
            return str(group["name"])
    raise KeyError(part)


def _strip_package(part: str) -> str:
    """Return the device of a part, without package and speed grade; the whole text for an unknown form.

    >>> _strip_package("xc7z020clg400-1"), _strip_package("xczu3eg-sbva484-1-i"), _strip_package("xck26-sfvc784-2LV-c")
    ('xc7z020', 'xczu3eg', 'xck26')
    """
    match = re.match(r"x[acq]7[az]\d+[ts]?|xck\d+|x[acq]zu\d+t?[a-z]{2}", part)
    return match[0] if match else part


@cache
def shipped_model() -> PowerModel:
    """Return the model of the reports in power.toml.

    >>> from celosia.hw.boards.boards import BOARDS
    >>> row = shipped_model().coefficient("ps", BOARDS["pynq-z2"].part)
    >>> row.watts > 1, row.sources > 3, row.is_stand_in
    (True, True, False)
    """
    return PowerModel(PowerReport(**row) for row in FIGURES["report"])


# Activity -----------------------------------------------------------------------------------------------------------


UNIT_OF = {unit: unit for unit in UNITS} | {"array": "gemm"}
"""Unit whose work a measured part does, by the name of the part."""


@dataclass(frozen=True)
class ToggledPart:
    """Toggles of a part of the accelerator, as measured.

    bits : bits of its registers, without those that depend on `per`.
    working, waiting : mean toggles of one bit in a cycle in which the part's unit works, and in which it does not. A
        part of no unit has one value for all cycles of a run.
    each : additional bits, multiplied by the value of `per`.
    per : field or property of Config on which the number of bits depends; "": none.
    """

    bits: float
    working: float
    waiting: float
    each: float = 0.0
    per: str = ""

    def bits_of(self, cfg: Config) -> float:
        """Return the bits of its registers with Config `cfg`."""
        return self.bits + (self.each * float(getattr(cfg, self.per)) if self.per else 0.0)

    def toggles(self, busy: float) -> float:
        """Return the mean toggles of one bit in a cycle. busy: share of cycles in which the part's unit works."""
        return busy * self.working + (1 - busy) * self.waiting


@cache
def measured_parts() -> Mapping[str, ToggledPart]:
    """Return the measured parts of the accelerator, by name."""
    rows = json.loads(ACTIVITY_FILE.read_text(encoding="utf-8"))["parts"]
    return {
        name: ToggledPart(**{key: value for key, value in row.items() if key != "cycles"}) for name, row in rows.items()
    }  # fmt: skip


def activity(cfg: Config, busy: Mapping[str, float], measured: Mapping[str, ToggledPart] | None = None) -> Toggling:
    """Return the activity of the accelerator during a run.

    busy: share of cycles in which each of UNITS works. measured: the parts, by default those of `measured_parts`.
    """
    parts = measured_parts() if measured is None else measured
    share = {unit: min(1.0, busy[unit]) for unit in UNITS}
    rates = {name: part.toggles(share[UNIT_OF[name]] if name in UNIT_OF else 1.0) for name, part in parts.items()}
    bits = {name: part.bits_of(cfg) for name, part in parts.items()}
    toggles = sum(bits[name] * rates[name] for name in parts) / sum(bits.values())
    array, products = _array_dsp_blocks(cfg), multipliers(cfg)
    computing = (array * rates["array"] + (products - array) * rates["vector"]) / products
    return Toggling(toggles, computing, _mean_ram_enable(cfg, share))


def _array_dsp_blocks(cfg: Config) -> int:
    """Return the DSP blocks of the array."""
    return cfg.macs_per_cycle // (2 if cfg.packed else 1) // cfg.pump


def _mean_ram_enable(cfg: Config, share: Mapping[str, float]) -> float:
    """Return the mean share of cycles in which block RAM of scratchpads is enabled.

    Each block has a port for its writers and one for its readers, which are enabled while one of these units works.
    share: share of cycles in which each unit works.
    """
    total = enabled = 0.0
    for pad, blocks in _block_rams_by_pad(cfg).items():
        spec = scratchpads(cfg)[pad]
        ports = (min(1.0, sum(share[unit] for unit in units)) for units in (spec.writers, spec.readers))
        total += blocks
        enabled += blocks * sum(ports) / 2
    return enabled / total if total else 0.0


@cache
def _block_rams_by_pad(cfg: Config) -> Mapping[str, float]:
    """Return the block RAMs of 36 kbit of each scratchpad, by name."""
    return {name: sum(memory.blocks for memory in memories_of_pad(cfg, pad)) for name, pad in scratchpads(cfg).items()}


ALL_BUSY = dict.fromkeys(UNITS, 1.0)
"""Busy shares of a run in which every unit works in every cycle."""


# Estimate for a Config on a board ------------------------------------------------------------------------------------


def estimate(cfg: Config, cells: Cells, board: Board, mhz: float, busy: Mapping[str, float] | None) -> Power:
    """Estimate the power that the accelerator of `cfg` draws on `board`.

    cells: its cells. mhz: its clock. busy: share of cycles in which each of UNITS works; None: nothing runs.
    """
    toggling = AT_REST if busy is None else activity(cfg, busy)
    return shipped_model().power(cells, mhz, toggling, board.part)


def caveat(board: Board) -> str:
    """Return sentences that say how the estimate was made, and how large its error may be."""
    half, max_factor = shipped_model().error(board.part)
    count = sum(part_class(report.part) == part_class(board.part) for report, _ in shipped_model().errors)
    return (
        "An estimate: medians of what Vivado's report_power says of other designs. Dynamic watts of half of the "
        f"{count} reports are within a factor of {_round_up(half)} of a model of the other reports, those of all "
        f"within {_round_up(max_factor)}."
    )


def _round_up(factor: float) -> str:
    """Return a factor as text, rounded up to one decimal place."""
    return f"{math.ceil(10 * factor) / 10:.1f}"
