"""The file of tilings (CLI option `--decisions`): the tiling of each layer, to be read, changed and compiled with.

    {"format": "celosia-decisions", "version": 1, "config": "pynq", "config_digest": "...",
     "layers": [{"layer": "conv1", "parts": [{"workload": "...", "n": 4, "y": 8, "x": 56, "k": 4, "order": "input",
                                              "ahead": 8, "part": 2}]}]}

The compiler chooses the tilings of layers that the file leaves out. Tilings for another Config, layer or workload are
refused. The public name of the format is "decisions"; inside the compiler these are tilings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celosia.compiler.program import Contents
from celosia.compiler.program.safe_files import reading
from celosia.compiler.tensorize import block_space
from celosia.compiler.tensorize.block_space import Group
from celosia.compiler.tensorize.space import Tiling, Workload, why_not
from celosia.hw.spec.config import Config
from celosia.plain import Sentence, from_json

FORMAT, VERSION = "celosia-decisions", 1
"""Values of the fields "format" and "version" of a file."""


class DecisionsError(Sentence, ValueError):
    """Raised for a file of tilings that cannot be followed; the message names the layer and what to do."""


def collect_tilings(program: Contents) -> dict[str, Any]:
    """Collect the tilings of a compiled Program as the contents of a file of tilings."""
    layers = [
        {"layer": info.name, "parts": [{"workload": part.workload, **part.decisions} for part in info.parts]}
        for launch in program.launches for info in launch.layers
    ]  # fmt: skip
    config = program.config
    return {
        "format": FORMAT, "version": VERSION, "config": config.name, "config_digest": config.digest, "layers": layers
    }  # fmt: skip


@dataclass
class ScheduleFile:
    """The tilings in a user's file, a source of SchedulePolicy.

    layers: by layer's name, the text of the workload and the tiling of each part. used: layers whose tilings were asked
    for, so that those of no layer are found.
    """

    cfg: Config
    layers: dict[str, list[tuple[str, Tiling]]]
    used: set[str] = field(default_factory=set)

    @staticmethod
    def load(source: str | Path | Mapping[str, Any], cfg: Config) -> ScheduleFile:
        """Read a file, or take its contents. Raises DecisionsError for other formats and other Configs."""
        if not isinstance(source, Mapping):
            with reading(source, DecisionsError, "holds no decisions"):
                source = from_json(Path(source).read_text(encoding="utf-8"))
        if not isinstance(source, Mapping) or source.get("format") != FORMAT:
            raise DecisionsError(
                f"these are no decisions of format {FORMAT!r}; `celosia inspect --decisions` writes them"
            )
        if source.get("version") != VERSION:
            raise DecisionsError(f"decisions of version {source.get('version')!r}; this Celosia reads {VERSION}")
        if source.get("config_digest") != cfg.digest:
            raise DecisionsError(
                f"the decisions were made for another Config, which was called {source.get('config')!r}, not for this "
                f"{cfg.name}; compile with that one, or write new ones with `celosia inspect --decisions`"
            )
        return ScheduleFile(cfg, _parse_layers(source.get("layers")))

    def tilings_of(self, layer: str, workloads: Sequence[Workload | Group]) -> list[Tiling] | None:
        """Return a tiling for each workload of `layer`; None if the file leaves it out. Raises DecisionsError if they
        do not fit."""
        if layer not in self.layers:
            return None
        tilings = self.layers[layer]
        self.used.add(layer)
        if len(tilings) != len(workloads):
            raise DecisionsError(f"layer {layer!r} has {len(workloads)} parts, decisions are given for {len(tilings)}")
        for number, ((text, tiling), workload) in enumerate(zip(tilings, workloads)):
            where = f"layer {layer!r}" + (f", part {number}" if len(workloads) > 1 else "")
            if text != workload.text:
                raise DecisionsError(f"{where} is `{workload.text}`, its decisions are for `{text}`; write new ones")
            if reason := why_not_tiling(self.cfg, workload, tiling):
                raise DecisionsError(f"{where} cannot be tiled so: {reason}")
        return [tiling for _, tiling in tilings]

    def require_all_used(self) -> None:
        """Raise DecisionsError if the file has a layer that this model does not have on the accelerator."""
        if unknown := [layer for layer in self.layers if layer not in self.used]:
            raise DecisionsError(
                f"decisions are given for {unknown[0]!r}, which is no layer of this model on the accelerator; "
                "`celosia inspect --layers` lists them"
            )


def why_not_tiling(cfg: Config, workload: Workload | Group, tiling: Tiling) -> str | None:
    """Return why `tiling` is not in the space of `workload`, of a layer or a group of a block; None if it is."""
    if isinstance(workload, Group):
        return block_space.why_not(cfg, workload, tiling)
    return why_not(cfg, workload, tiling)


def _parse_layers(rows: Any) -> dict[str, list[tuple[str, Tiling]]]:
    """Parse the "layers" of a file. Raises DecisionsError if they are no tilings by layer."""
    if not isinstance(rows, list):
        raise DecisionsError('decisions hold a list of "layers"')
    layers: dict[str, list[tuple[str, Tiling]]] = {}
    for row in rows:
        name = row.get("layer") if isinstance(row, dict) else None
        parts = row.get("parts") if isinstance(row, dict) else None
        if not isinstance(name, str) or not isinstance(parts, list) or not all(isinstance(p, dict) for p in parts):
            raise DecisionsError(f'a layer\'s decisions are {{"layer": name, "parts": [...]}}, not {str(row)[:80]}')
        if name in layers:
            raise DecisionsError(f"layer {name!r} is decided twice; leave one out")
        try:
            layers[name] = [
                (str(part.get("workload")), Tiling.from_json({k: v for k, v in part.items() if k != "workload"}))
                for part in parts
            ]
        except ValueError as error:
            raise DecisionsError(f"layer {name!r}: {error}") from None
    return layers
