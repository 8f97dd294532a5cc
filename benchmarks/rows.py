"""Rows that sections measure, and what the command asks of a section."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import Program
from celosia.driver.run.run_result import Result
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config

Array = NDArray[Any]
Say = Callable[[str], None]
ROOT = Path(__file__).parent.parent
PRESETS = ("tiny", "pynq", "wide", "ultra96", "zcu104")
VERDICT = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}


@dataclass(frozen=True)
class Request:
    """The options of the command that a section reads: `python -m benchmarks --help`.

    say: told what is going on. folder: of the models that are not in this repository. models, kernels, charts: names
    that were chosen, all where there are none.
    """

    say: Say = lambda text: None
    folder: Path | None = None
    models: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    charts: tuple[str, ...] = ()
    config: str | None = None
    device: str | None = None
    memory: MemoryModel = ZYNQ_HP
    seconds: float | None = None
    images: int | None = None
    count: int | None = None
    seed: int = 1
    jobs: int = 1
    out: Path = Path("findings")
    resume: Path | None = None
    base: str | None = None
    full: bool = False
    short: bool = False
    only: str | None = None

    @property
    def preset(self) -> str:
        """The Config, where one is needed."""
        return self.config or "pynq"


@dataclass
class Row:
    """A promise and what was measured. met: None where the row was skipped, or has no target."""

    key: str
    what: str
    target: str
    measured: str
    met: bool | None
    command: str
    details: dict[str, Any] = field(default_factory=dict)


COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


def judged(key: str, what: str, command: str, details: dict[str, Any], asked: str = "") -> Row:
    """A row whose text are the numbers of `details`.

    asked: bounds of them; the row is met where all hold.

    >>> row = judged("a", "a model", "", {"ratio": 1.25, "different": 0, "layers": []}, "ratio <= 1.3, different <= 0")
    >>> row.measured, row.met
    ('ratio 1.25, different 0', True)
    """
    bounds = [bound.split() for bound in asked.split(", ") if bound]
    kept = all(COMPARISONS[sign](details[name], float(limit)) for name, sign, limit in bounds)
    text = ", ".join(
        f"{name} {_shown(value)}" for name, value in details.items() if isinstance(value, int | float | str)
    )
    return Row(key, what, asked, text, kept if bounds else None, command, details)


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def skipped(key: str, what: str, command: str, reason: object) -> Row:
    """The row of what cannot be measured here."""
    return Row(key, what, "", f"skipped: {reason}", None, command)


def cost(program: Program, result: Result) -> dict[str, Any]:
    """Numbers of a run: cycles, their ratio to products / products a cycle, the share of the products on the
    accelerator, and launches."""
    report, cfg = result.report, program.config
    return {
        "cycles": report["cycles"], "ratio": report["cycles"] * cfg.macs_per_cycle / report["macs_total"],
        "share": report["macs_accelerator"] / report["macs_total"], "launches": len(program.launches),
        "config": cfg.name,
    }  # fmt: skip


def different(a: Array, b: Array) -> int:
    """Bytes that differ; all of the larger one where shapes or types do."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.nbytes, b.nbytes)
    raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b)]
    return int(np.count_nonzero(raw[0] != raw[1]))


def describe(config: str) -> dict[str, Any]:
    """Where the figures come from."""
    cfg = Config.load(config)
    return {"config": cfg.to_dict(), "digest": cfg.digest, "cores": os.cpu_count()}
