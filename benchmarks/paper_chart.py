"""A chart of the papers' page, and how much is measured for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import networks
from benchmarks.rows import Row
from benchmarks.workloads import MADE, WORKLOADS, Missing

Say = Callable[[str], None]


@dataclass
class Chart:
    """title: of the page's section. figures: (title, text, Bokeh's figure), the first of which docs/ shows. rows: what
    was measured. fact: what the page's head shows, a number and what it is."""

    title: str
    text: str
    figures: list[tuple[str, str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    fact: tuple[str, str] | None = None


@dataclass(frozen=True)
class PaperSize:
    """How much is measured. configs: of the chart of latency hiding; the first one is that of all others.
    network, small: names of networks, see `quantised`. seconds: for each kernel on the CPU, each search of the
    superoptimiser. trials, shapes: of searches. operators: at most so many of each network. jobs: trials of workers.
    explored: seconds for Configs."""

    command: str
    configs: Sequence[str]
    network: str
    small: str
    seconds: float
    budget: float
    trials: int
    shapes: int
    operators: int
    jobs: int
    explored: float


FULL = PaperSize(
    "python -m benchmarks paper", ("pynq", "ultra96"), "resnet18", "mobilenet_v2", 1.0, 60.0, 32, 3, 100, 60, 240.0,
)  # fmt: skip
SHORT = PaperSize("python -m benchmarks paper --short", ("pynq", "tiny"), "demo", "ds_cnn", 0.05, 5.0, 8, 1, 3, 6, 15.0)

MADE_AS = {"resnet18": "resnet18_224", "mobilenet_v2": "mobilenet_v2_224"}
"""Networks with random weights in the place of those of the folder of models."""


def quantised(name: str, folder: Path | None) -> tuple[Path, str]:
    """(the int8 network of that name, what it is): of the folder of models, or made here with random weights."""
    try:
        return WORKLOADS[name].path(folder), f"{name}, as it is in the folder of models" * (name in MADE_AS) or name
    except Missing:
        return networks.cached(MADE_AS[name], MADE), f"{name} with random weights"


def floats(name: str) -> Path:
    """The network of that name in float, made here with random weights."""
    return networks.cached(MADE_AS.get(name, "ds_cnn" if name == "demo" else name), MADE, floats=True)
