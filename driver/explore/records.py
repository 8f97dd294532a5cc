"""Points of an exploration as a file of JSON lines in its folder, one evaluation a line.

    {"digest": "9a31...", "set": {"block_in": 16, ...}, "rung": "timed", "costs": {"resnet18": {"cycles": 72061, ...}},
     "area": {"lut": 40449, ...}, "failure": null, "how": "wider bus_bytes", "at": 12.3, "crc": 305419896}

A line is written at once, so that a run that is ended keeps all of them. Damaged lines are left out and counted. If
several lines are about one Config, the one of the highest rung counts. An evaluation depends on models, board, memory
and this code alone; explore.json beside the points says which those were, and no other exploration may go on with them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celosia.compiler.program.safe_files import OutputError, write_text
from celosia.compiler.program.saved import from_plain
from celosia.compiler.tune.layer_trial import VERSION
from celosia.compiler.tune.records import append_line, decode_line, encode_line
from celosia.driver.explore.resource_use import Resources
from celosia.driver.explore.subject import Cost, ExploredModel
from celosia.driver.run.explain import UNITS
from celosia.hw.spec.config import Config, ConfigError
from celosia.plain import Sentence, from_json

FORMAT = 2
"""Version of the file's format; a change of the meaning of rungs or objectives raises it. Until 1 energy was a proxy
of 45 nm."""
RUNGS = ("closed", "timed", "yosys", "rtl")
"""Rungs of evaluation, the cheapest first."""
PRESET = "the board's preset"
"""Why the first Config of all is looked at: as `how` of its Point."""
FAILURES = {
    "device": "it does not fit the device",
    "layers": "a layer does not fit its scratchpads",
    "cpu": "it leaves more operators to the CPU than another Config does",
    "lost": "whoever measured gave no answer",
}
"""Kinds of failures."""


class ExploreError(Sentence, ValueError):
    """An impossible exploration; one sentence that says what to do."""


@dataclass(frozen=True)
class Failure:
    """Failure of a Config. kind: one of FAILURES. why: in a sentence."""

    kind: str
    why: str


@dataclass(frozen=True)
class Rewriting:
    """Result of rewriting a model for a Config. file: of the rewritten model, in the folder of points; "" where the
    original is best. cost: None there. seconds: of searching, for all Configs of that time together."""

    file: str
    cost: Cost | None
    seconds: float


@dataclass(frozen=True)
class Point:
    """A Config and what is known of it. rung: the highest at which it was looked at. costs: by model, of that rung or
    timed. area: as resource_use.Resources. clock_mhz: Yosys' estimate, None where nobody asked. how: why it was tried.
    at: seconds of exploring before it was known. rewritten: by model."""

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
        """Parse a line of the file. ValueError, KeyError, TypeError for anything else."""
        cfg = Config.from_dict(row["set"])
        if cfg.digest != row["digest"] or row["rung"] not in RUNGS:
            raise ValueError("it is of another version")
        fields = {name: value for name, value in row.items() if name not in ("digest", "set", "area")}
        point: Point = from_plain(Point, fields, cfg=cfg, area=_parse_area(row["area"]))
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
    """Whether a path leaves the folder."""
    return Path(file).is_absolute() or ".." in Path(file).parts


def _parse_area(row: Any) -> dict[str, Any]:
    """Parse the area of a Config. ValueError, TypeError where it is none."""
    if not isinstance(row, dict) or not all(
        isinstance(value, (bool, int, float)) and 0 <= value < 2**40 for value in row.values()
    ):
        raise ValueError("an area holds numbers")
    Resources(**row)
    return row


class Points:
    """Points of an exploration, kept in its folder; `folder` None: in memory only."""

    def __init__(self, folder: Path | None, context: dict[str, Any]) -> None:
        """context: what the looks depend on. ExploreError where the folder holds another exploration, OutputError."""
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
        """Keep a point, and write it. OutputError."""
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
        before = self.known.get(point.cfg.digest)
        if before is None or RUNGS.index(point.rung) >= RUNGS.index(before.rung):
            self.known[point.cfg.digest] = point


def exploration_context(subjects: list[ExploredModel], board: str, memory: str) -> dict[str, Any]:
    """Context of an exploration: everything on which its points depend."""
    models = {subject.name: subject.digest for subject in subjects}
    return {"models": models, "board": board, "memory": memory, "format": FORMAT, "timing": VERSION}


def _prepare_folder(folder: Path, context: dict[str, Any]) -> None:
    """Make the folder, or check that it is of the same exploration."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}") from None
    about = folder / "explore.json"
    if not about.exists():
        if (folder / "points.jsonl").exists():
            raise ExploreError(f"{folder} has points of an exploration that nothing is known of; give another folder")
        write_text(about, json.dumps(context, indent=1) + "\n")
        return
    try:
        header = from_json(about.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ExploreError(f"{about} cannot be read as JSON; give another folder, or remove this one") from None
    for name, value in context.items():
        if not isinstance(header, dict) or header.get(name) != value:
            raise ExploreError(f"{folder} holds an exploration of {_describe_other_context(name)}; give another folder")


def _describe_other_context(name: str) -> str:
    return {"models": "other models", "board": "another board", "memory": "another memory"}.get(
        name, "another version of Celosia"
    )
