"""Points of an exploration as a file of JSON lines in its folder, one evaluation a line.

    {"digest": "9a31...", "set": {"block_in": 16, ...}, "rung": "timed", "costs": {"resnet18": {"cycles": 72061, ...}},
     "area": {"lut": 40449, ...}, "failure": null, "how": "wider bus_bytes", "at": 12.3, "crc": 305419896}

A line is written at once, so that a run that is ended keeps all of them. Damaged lines are left out and counted. If
several lines are about one Config, the one of the highest rung counts. An evaluation depends on models, board, memory
and this code alone; explore.json in the same folder says which those were, and another exploration may not use the
folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celosia.compiler.program.program_file import from_plain
from celosia.compiler.program.safe_files import OutputError, write_text
from celosia.compiler.tune.layer_trial import VERSION
from celosia.compiler.tune.records import append_line, decode_line, encode_line
from celosia.driver.explore.model_cost import Cost, ExploredModel
from celosia.driver.explore.resource_use import Resources
from celosia.driver.run.explain import UNITS
from celosia.hw.spec.config import Config, ConfigError
from celosia.plain import Sentence, from_json

FORMAT = 2
"""Version of the file's format; a change of the meaning of rungs or objectives raises it."""
RUNGS = ("closed", "timed", "yosys", "rtl")
"""Rungs of evaluation, the cheapest first."""
PRESET = "the board's preset"
"""`how` of the Point of the board's own Config."""
FAILURES = {
    "device": "it does not fit the device",
    "layers": "a layer does not fit its scratchpads",
    "cpu": "it leaves more operators to the CPU than another Config does",
    "lost": "whoever measured gave no answer",
}
"""Kinds of failures, with an explanation of each."""


class ExploreError(Sentence, ValueError):
    """An impossible exploration. The message says what to do."""


@dataclass(frozen=True)
class Failure:
    """Failure of a Config. kind: a key of FAILURES. why: a sentence."""

    kind: str
    why: str


@dataclass(frozen=True)
class Rewriting:
    """Result of rewriting a model for a Config.

    file: the rewritten model, relative to the folder of points; "" where the original is best. cost: of the rewritten
    model; None where the original is best. seconds: search time, for all Configs of that search together.
    """

    file: str
    cost: Cost | None
    seconds: float


@dataclass(frozen=True)
class Point:
    """A Config that was evaluated, and the results.

    rung: the highest one at which it was evaluated. costs: by model, of that rung or of `timed`. area: fields of a
    `resource_use.Resources`. failure: None for none. clock_mhz: Yosys' estimate; None without one. rtl: cycles on the
    RTL by model; None without. how: why it was tried. at: seconds from the start of the exploration. rewritten: by
    model.
    """

    cfg: Config
    rung: str
    costs: dict[str, Cost]
    area: dict[str, Any]
    failure: Failure | None = None
    clock_mhz: float | None = None
    rtl: dict[str, int] | None = None
    how: str = ""
    at: float = 0.0
    rewritten: dict[str, Rewriting] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether it has no failure and its cycles are of rung `timed` or a higher one, not of the closed form."""
        return self.failure is None and RUNGS.index(self.rung) >= RUNGS.index("timed")

    def to_json(self) -> dict[str, Any]:
        """Return the point as a line of the file; `from_json` reads it."""
        fields = {name: value for name, value in self.cfg.to_dict().items() if name != "name"}
        return {
            "digest": self.cfg.digest, "set": fields, "rung": self.rung,
            "costs": {name: dataclasses.asdict(cost) for name, cost in self.costs.items()}, "area": self.area,
            "failure": None if self.failure is None else dataclasses.asdict(self.failure),
            "clock_mhz": self.clock_mhz, "rtl": self.rtl, "how": self.how, "at": round(self.at, 2),
            "rewritten": {name: dataclasses.asdict(rewriting) for name, rewriting in self.rewritten.items()},
        }  # fmt: skip

    @staticmethod
    def from_json(row: dict[str, Any]) -> Point:
        """Parse a line of the file, which may be damaged.

        ValueError, KeyError, TypeError, ConfigError for a wrong one.
        """
        cfg = Config.from_dict(row["set"])
        if cfg.digest != row["digest"] or row["rung"] not in RUNGS:
            raise ValueError("it is of another version")
        fields = {name: value for name, value in row.items() if name not in ("digest", "set", "area")}
        point: Point = from_plain(Point, fields, cfg=cfg, area=_check_area(row["area"]))
        if point.failure is not None and point.failure.kind not in FAILURES:
            raise ValueError(f"there is no failure {point.failure.kind!r}")
        costs = [rewriting.cost for rewriting in point.rewritten.values() if rewriting.cost is not None]
        for cost in (*point.costs.values(), *costs):
            least = min(cost.bound, cost.moved, cost.macs, cost.on_cpu, *cost.busy.values())
            if cost.busy.keys() != set(UNITS) or min(cost.images, cost.cycles) < 1 or least < 0:
                raise ValueError("a model takes cycles of the accelerator's units")
        for name, rewriting in point.rewritten.items():
            if (
                name not in point.costs
                or (rewriting.file != "") is not (rewriting.cost is not None)
                or _leaves_folder(rewriting.file)
            ):
                raise ValueError(f"no model {name!r} was rewritten so")
        if not 0 <= point.at < math.inf or (point.clock_mhz is not None and not 0 < point.clock_mhz < math.inf):
            raise ValueError("seconds and clocks are finite")
        return point


def _leaves_folder(file: str) -> bool:
    """Whether a relative path points outside its folder: a file from others must not."""
    return Path(file).is_absolute() or ".." in Path(file).parts


def _check_area(row: Any) -> dict[str, Any]:
    """Check the area of a Config in a file, which may be damaged: fields of Resources, finite numbers.

    ValueError, TypeError where it is none.
    """
    if not isinstance(row, dict) or not all(
        isinstance(value, (bool, int, float)) and 0 <= value < 2**40 for value in row.values()
    ):
        raise ValueError("an area holds numbers")
    Resources(**row)
    return row


class Points:
    """Points of an exploration, kept in a file in its folder.

    path: the file; None without a folder: in memory only. known: points by digest of the Config. damaged: lines of the
    file that could not be read.
    """

    def __init__(self, folder: Path | None, context: dict[str, Any]) -> None:
        """Read the points in `folder`. context: see `exploration_context`.

        ExploreError where the folder holds another exploration; OutputError.
        """
        self.path = None if folder is None else folder / "points.jsonl"
        self.known: dict[str, Point] = {}
        self.damaged = 0
        if folder is None:
            return
        _prepare_folder(folder, context)
        if self.path is not None and self.path.exists():
            for line in filter(bytes.strip, self.path.read_bytes().split(b"\n")):
                try:
                    self._keep(Point.from_json(decode_line(line)))
                except (ValueError, KeyError, TypeError, ConfigError):
                    self.damaged += 1

    def add(self, point: Point) -> None:
        """Keep a point, and append it to the file. OutputError."""
        self._keep(point)
        if self.path is not None:
            append_line(self.path, encode_line(point.to_json()))

    def get(self, cfg: Config) -> Point | None:
        """Return the point of `cfg`, whatever its name; None for an unknown one."""
        return self.known.get(cfg.digest)

    @property
    def seconds(self) -> float:
        """Seconds of exploration, of all runs together."""
        return max((point.at for point in self.known.values()), default=0.0)

    def _keep(self, point: Point) -> None:
        """Keep a point in memory unless a higher rung of its Config is known."""
        before = self.known.get(point.cfg.digest)
        if before is None or RUNGS.index(point.rung) >= RUNGS.index(before.rung):
            self.known[point.cfg.digest] = point


def exploration_context(subjects: list[ExploredModel], board: str, memory: str) -> dict[str, Any]:
    """Return the context of an exploration: everything on which its points depend, as plain data for explore.json."""
    models = {subject.name: subject.digest for subject in subjects}
    return {"models": models, "board": board, "memory": memory, "format": FORMAT, "timing": VERSION}


def _prepare_folder(folder: Path, context: dict[str, Any]) -> None:
    """Make the folder with its explore.json, or check that it holds the same exploration. ExploreError, OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}") from None
    context_file = folder / "explore.json"
    if not context_file.exists():
        if (folder / "points.jsonl").exists():
            raise ExploreError(f"{folder} has points of an exploration that nothing is known of; give another folder")
        write_text(context_file, json.dumps(context, indent=1) + "\n")
        return
    try:
        header = from_json(context_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ExploreError(f"{context_file} cannot be read as JSON; give another folder, or remove this one") from None
    for name, value in context.items():
        if not isinstance(header, dict) or header.get(name) != value:
            raise ExploreError(f"{folder} holds an exploration of {_describe_other_context(name)}; give another folder")


def _describe_other_context(name: str) -> str:
    """Describe in words which entry of the context differs."""
    return {"models": "other models", "board": "another board", "memory": "another memory"}.get(
        name, "another version of Celosia"
    )
