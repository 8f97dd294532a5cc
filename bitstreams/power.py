"""Estimate of the watts that an accelerator draws on a board.

Coefficients are medians over what Vivado's report_power says of designs of others; power.toml has what those reports
say, and where they are. How many bits toggle was counted in the RTL simulator (activity.json, `python -m
benchmarks.activity`), and which units work says whoever has counted cycles. Standard library and bitstreams/ only.
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

from celosia.bitstreams.memories import of_pad
from celosia.bitstreams.synthesis import multipliers
from celosia.hw.boards.board import Board
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import scratchpads

FIGURES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("power.toml").read_text(encoding="utf-8"))
MEASURED = Path(__file__).with_name("activity.json")
TOGGLE_RATE, ENABLED = float(FIGURES["toggle_rate"]), float(FIGURES["enabled"])
"""Activity for which the watts of the reports are taken."""
UNITS = ("load", "gemm", "vector", "store")
"""Units whose cycles of work are counted."""


@dataclass(frozen=True)
class PowerKind:
    """A row of a report. cells: the count that it is proportional to. least: of cells times MHz; below, a milliwatt,
    as which reports are rounded, would say too much."""

    label: str
    cells: str
    least: float = 0


KINDS = {
    "clocks": PowerKind("clock tree, flip-flops", "ff", 2e5), "logic": PowerKind("LUTs", "lut", 2e5),
    "signals": PowerKind("signals", "lut", 2e5), "ram": PowerKind("block RAM", "ram", 500),
    "dsp": PowerKind("DSP blocks", "dsp", 500),
}  # fmt: skip
"""Kinds of power that are proportional to the clock."""
LABELS = {name: kind.label for name, kind in KINDS.items()} | {
    "mmcm": "clock manager", "static": "static, of the device", "ps": "processors, apart",
}  # fmt: skip
OF_DEVICE = ("static", "ps")
"""Kinds in which devices of one family differ."""


@dataclass(frozen=True)
class PowerReport:
    """Figures of one power report; power.toml explains them. mhz: None where several clocks share the fabric."""

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
        """Source of the design: all reports of one count as one."""
        return self.fork_of or self.repository

    def exposure(self, name: str) -> float:
        """Cells times MHz of one of KINDS; 0 where the report rounds its watts too much."""
        kind = KINDS[name]
        rate = getattr(self, kind.cells) * (self.mhz or 0.0)
        return float(rate) if name in self.watts and rate >= kind.least else 0.0

    @property
    def dynamic(self) -> float:
        """Watts of those KINDS that the report gives precisely enough."""
        return sum(self.watts[name] for name in KINDS if self.exposure(name))


@dataclass(frozen=True)
class Coefficient:
    """A coefficient of the power model. watts: of one cell at 1 MHz; of an MMCM, processors and what is static, of one.
    sources: designs that it is the median of, reports: how many reports. stands_in: it is of another family, or device,
    for want of reports."""

    watts: float
    sources: int
    reports: int
    stands_in: bool = False


@dataclass(frozen=True)
class Cells:
    """Cells that an accelerator takes of a device. dsp: those at twice the clock count twice."""

    lut: float
    ff: float
    dsp: float
    ram: float
    mmcm: int = 0

    @staticmethod
    def of(cfg: Config, lut: float, ff: float, dsp: float, ram: float) -> Cells:
        """Cells counted, or estimated, for `cfg`; with its second clock, if it has one."""
        return Cells(lut, ff, dsp + (cfg.pump - 1) * _array(cfg), ram, cfg.pump - 1)


@dataclass(frozen=True)
class Toggling:
    """Assumed switching activity. toggles: of a bit in a cycle. computing: the same of what DSP blocks compute.
    enabled: the share of cycles in which block RAM is."""

    toggles: float
    computing: float
    enabled: float

    def of(self, name: str) -> float:
        """Factor of one of KINDS, by which its watts are multiplied."""
        factors = {
            "logic": self.toggles / TOGGLE_RATE, "signals": self.toggles / TOGGLE_RATE,
            "dsp": self.computing / TOGGLE_RATE, "ram": self.enabled / ENABLED,
        }  # fmt: skip
        return factors.get(name, 1.0)


AS_REPORTED = Toggling(TOGGLE_RATE, TOGGLE_RATE, ENABLED)
AT_REST = Toggling(0.0, 0.0, 0.0)
"""Nothing but clocks."""


@dataclass(frozen=True)
class Power:
    """Power of an accelerator. watts: by the names of LABELS. stand_ins: those whose coefficient is of another family
    or device."""

    watts: Mapping[str, float]
    stand_ins: tuple[str, ...] = field(default=())

    @property
    def dynamic(self) -> float:
        """Dynamic power in watts of the programmable logic."""
        return sum(watts for name, watts in self.watts.items() if name not in OF_DEVICE)

    @property
    def fabric(self) -> float:
        """Watts of all but the processors."""
        return self.dynamic + self.watts["static"]


class PowerModel:
    """Power model: coefficients fitted to the reports."""

    def __init__(self, reports: Iterable[PowerReport]) -> None:
        self.reports = tuple(reports)
        self._known: dict[str, Mapping[str, Coefficient]] = {}

    def without(self, source: str) -> PowerModel:
        """Return the model without the reports of a design."""
        return PowerModel(report for report in self.reports if report.source != source)

    def coefficient(self, name: str, part: str) -> Coefficient:
        """Coefficient of one of LABELS, for a part. KeyError where no report of any family has one."""
        reports, stand_in = self._nearest(name, part)
        sources: defaultdict[str, list[float]] = defaultdict(list)
        for report in reports:
            sources[report.source].append(_each(report, name))
        watts = median(median(values) for values in sources.values())
        return Coefficient(watts, len(sources), len(reports), stand_in)

    def _nearest(self, name: str, part: str) -> tuple[list[PowerReport], bool]:
        """Reports that say it: of the device where it is the device's, else of the group, else of all; and whether
        those only stand in."""
        saying = [report for report in self.reports if _counts_for(report, name)]
        if not saying:
            raise KeyError(name)
        alike = [report for report in saying if group_of(report.part) == group_of(part)]
        if name in OF_DEVICE:
            same_device = [report for report in alike if _device(report.part) == _device(part)]
            return (same_device, False) if same_device else (alike or saying, True)
        return (alike, False) if alike else (saying, True)

    def coefficients(self, part: str) -> Mapping[str, Coefficient]:
        """Coefficients of all LABELS."""
        if part not in self._known:
            self._known[part] = {name: self.coefficient(name, part) for name in LABELS}
        return self._known[part]

    def power(self, cells: Cells, mhz: float, activity: Toggling, part: str) -> Power:
        """Power that `cells` draw on a part at a clock."""
        coefficients = self.coefficients(part)
        watts = {
            name: coefficients[name].watts * getattr(cells, kind.cells) * mhz * activity.of(name)
            for name, kind in KINDS.items()
        }
        watts |= {
            "mmcm": coefficients["mmcm"].watts * cells.mmcm,
            "static": coefficients["static"].watts,
            "ps": coefficients["ps"].watts,
        }
        return Power(
            watts, tuple(name for name, coefficient in coefficients.items() if coefficient.stands_in and watts[name])
        )

    def predicted(self, report: PowerReport) -> float:
        """Watts that the model has for what `report.dynamic` has, at the activity that reports assume."""
        coefficients = self.coefficients(report.part)
        return sum(coefficients[name].watts * report.exposure(name) for name in KINDS)

    @cached_property
    def errors(self) -> list[tuple[PowerReport, float]]:
        """For each report of watts that it assumes itself what toggles, what a model that does not know its design says
        of it, over what it says."""
        rows = [report for report in self.reports if report.activity == "vectorless" and report.dynamic > 0]
        models = {source: self.without(source) for source in {report.source for report in rows}}
        return [(report, models[report.source].predicted(report) / report.dynamic) for report in rows]

    def error(self, part: str) -> tuple[float, float]:
        """Return (the factor within which half of the reports of such parts are, that within which all are)."""
        factors = [
            max(ratio, 1 / ratio) for report, ratio in self.errors if group_of(report.part) == group_of(part)
        ] or [max(ratio, 1 / ratio) for _, ratio in self.errors]
        return median(factors), max(factors)


def _counts_for(report: PowerReport, name: str) -> bool:
    """Whether a report counts for a coefficient. Toggling that a simulation measured is specific to that design; what
    is static depends on how warm the processors make it."""
    if name in KINDS:
        return report.exposure(name) > 0 and (name == "clocks" or report.activity == "vectorless")
    if name == "mmcm":
        return report.mmcm > 0 and name in report.watts
    return "ps" in report.watts and name in report.watts


def _each(report: PowerReport, name: str) -> float:
    cells = report.exposure(name) if name in KINDS else report.mmcm if name == "mmcm" else 1
    return report.watts[name] / cells


@cache
def group_of(part: str) -> str:
    """First group of power.toml that a part is in. KeyError."""
    for group in FIGURES["group"]:
        if re.fullmatch(group["parts"], part):
            return str(group["name"])
    raise KeyError(part)


def _device(part: str) -> str:
    """
    >>> _device("xc7z020clg400-1"), _device("xczu3eg-sbva484-1-i"), _device("xck26-sfvc784-2LV-c")
    ('xc7z020', 'xczu3eg', 'xck26')
    """
    match = re.match(r"x[acq]7[az]\d+[ts]?|xck\d+|x[acq]zu\d+t?[a-z]{2}", part)
    return match[0] if match else part


@cache
def model() -> PowerModel:
    """Power model of the shipped reports.

    >>> from celosia.hw.boards.boards import BOARDS
    >>> found = model().coefficient("ps", BOARDS["pynq-z2"].part)
    >>> found.watts > 1, found.sources > 3, found.stands_in
    (True, True, False)
    """
    return PowerModel(PowerReport(**row) for row in FIGURES["report"])


# Activity -----------------------------------------------------------------------------------------------------------


UNIT_OF = {unit: unit for unit in UNITS} | {"array": "gemm"}
"""Unit whose work toggles a part."""


@dataclass(frozen=True)
class ToggledPart:
    """A part of the accelerator, as it was measured. bits: of its registers, and `each` more for each of what the field
    or property `per` of a Config says. working, waiting: toggles of one of them in a cycle, where its unit works, and
    where it does not; the same where it is no unit's, of all cycles of a run."""

    bits: float
    working: float
    waiting: float
    each: float = 0.0
    per: str = ""

    def bits_of(self, cfg: Config) -> float:
        """Bits of the memories of a Config."""
        return self.bits + (self.each * float(getattr(cfg, self.per)) if self.per else 0.0)

    def toggles(self, busy: float) -> float:
        """Toggles of one bit in a cycle, where its unit works in such a share of them."""
        return busy * self.working + (1 - busy) * self.waiting


@cache
def parts() -> Mapping[str, ToggledPart]:
    """Measured resources, by the part's name."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["parts"]
    return {
        name: ToggledPart(**{key: value for key, value in row.items() if key != "cycles"}) for name, row in rows.items()
    }  # fmt: skip


def activity(cfg: Config, busy: Mapping[str, float], measured: Mapping[str, ToggledPart] | None = None) -> Toggling:
    """Switching activity during a run. busy: for each of UNITS the share of cycles in which it works."""
    fitted = parts() if measured is None else measured
    share = {unit: min(1.0, busy[unit]) for unit in UNITS}
    rates = {name: part.toggles(share[UNIT_OF[name]] if name in UNIT_OF else 1.0) for name, part in fitted.items()}
    bits = {name: part.bits_of(cfg) for name, part in fitted.items()}
    toggles = sum(bits[name] * rates[name] for name in fitted) / sum(bits.values())
    array, products = _array(cfg), multipliers(cfg)
    computing = (array * rates["array"] + (products - array) * rates["vector"]) / products
    return Toggling(toggles, computing, _enabled(cfg, share))


def _array(cfg: Config) -> int:
    """DSP blocks of the array."""
    return cfg.macs_per_cycle // (2 if cfg.packed else 1) // cfg.pump


def _enabled(cfg: Config, share: Mapping[str, float]) -> float:
    """Share of enabled block RAM ports of scratchpads, of which one is the writers' and one the readers'."""
    total = enabled = 0.0
    for pad, blocks in _blocks(cfg).items():
        of = scratchpads(cfg)[pad]
        ports = (min(1.0, sum(share[unit] for unit in units)) for units in (of.writers, of.readers))
        total += blocks
        enabled += blocks * sum(ports) / 2
    return enabled / total if total else 0.0


@cache
def _blocks(cfg: Config) -> Mapping[str, float]:
    """Block RAM of each scratchpad."""
    return {name: sum(memory.blocks for memory in of_pad(cfg, pad)) for name, pad in scratchpads(cfg).items()}


WORKING = dict.fromkeys(UNITS, 1.0)
"""Every unit works in every cycle."""


# Power of a Config on a board -------------------------------------------------------------------------------------


def estimate(cfg: Config, cells: Cells, board: Board, mhz: float, busy: Mapping[str, float] | None) -> Power:
    """Watts that the accelerator of `cfg` draws on `board`. busy: for each of UNITS the share of cycles in which it
    works; None: nothing runs."""
    switching = AT_REST if busy is None else activity(cfg, busy)
    return model().power(cells, mhz, switching, board.part)


def caveat(board: Board) -> str:
    """Sentence on the meaning of the figures, and how far they may be off."""
    half, all_of = model().error(board.part)
    count = sum(group_of(report.part) == group_of(board.part) for report, _ in model().errors)
    return (
        "An estimate: medians of what Vivado's report_power says of other designs. Dynamic watts of half of the "
        f"{count} reports are within a factor of {_up(half)} of what the others make of them, of all within "
        f"{_up(all_of)}."
    )


def _up(factor: float) -> str:
    return f"{math.ceil(10 * factor) / 10:.1f}"
