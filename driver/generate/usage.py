"""Add up the use of the accelerator by the runs of a session: cycles, bytes, tokens per second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celosia.hw.boards.boards import clock_of_report
from celosia.hw.spec.config import Config


@dataclass
class RunTotals:
    """Totals over the runs of one Program.

    tokens: new ones, without padding. cycles: None on a device without cycles. bytes_loaded: by launches, without
    instructions. macs: on the accelerator. seconds: of the host's clock. memory: name of the memory model.
    """

    runs: int = 0
    tokens: int = 0
    cycles: int | None = 0
    bytes_loaded: int = 0
    macs: int = 0
    seconds: float = 0.0
    memory: str | None = None

    def add(self, report: dict[str, Any], tokens: int) -> None:
        """Add a run, by its report, of so many tokens."""
        self.runs += 1
        self.tokens += tokens
        self.cycles = None if self.cycles is None or report["cycles"] is None else self.cycles + report["cycles"]
        self.bytes_loaded += sum(layer["bytes_loaded"] for layer in report["layers"])
        self.macs += report["macs_accelerator"]
        self.seconds += report["seconds"]["run"]
        self.memory = report["memory_model"]


@dataclass
class SessionUsage:
    """Use of the accelerator by a session. steps: runs of one token; prompt: runs of a chunk. launches: of a step."""

    config: Config
    steps: RunTotals = field(default_factory=RunTotals)
    prompt: RunTotals = field(default_factory=RunTotals)
    launches: int = 0
    share: float | None = None
    """Share of the multiplications of a step that the accelerator executes."""

    def add(self, steps: int, report: dict[str, Any], tokens: int) -> None:
        """Add a run of the Program for `steps` tokens, of which `tokens` were no padding."""
        (self.steps if steps == 1 else self.prompt).add(report, tokens)
        if steps == 1:
            self.launches = report["launches"]
            self.share = report["macs_accelerator"] / report["macs_total"] if report["macs_total"] else None

    def report(self) -> dict[str, Any]:
        """Return the usage as plain data.

        `tokens_per_second`: of the accelerator only, at the clock of the memory model's board; None on a device without
        cycles. `bandwidth`: bytes loaded, as a share of what the bus could carry in the cycles of steps.
        """
        step, mhz = self.steps, clock_of_report(self.steps.memory)
        cycles = step.cycles / step.runs if step.cycles and step.runs else None
        bus = self.config.bus_bytes * self.config.ports
        return {
            "config": self.config.name, "memory_model": step.memory, "clock_mhz": mhz, "launches": self.launches,
            "share": self.share, "cycles_per_token": cycles,
            "tokens_per_second": mhz * 1e6 / cycles if cycles else None,
            "bandwidth": step.bytes_loaded / (step.cycles * bus) if step.cycles else None,
            "steps": vars(step), "prompt": vars(self.prompt),
        }  # fmt: skip
