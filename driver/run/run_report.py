"""Build the report of a run, as plain data; explain.py makes its rows for layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celosia.compiler.program import CpuStep, LaunchStep, Program, with_inner_steps
from celosia.driver.run.explain import layer_rows
from celosia.sim.device import Counters


def build_report(
    program: Program, counters: Sequence[Counters], seconds: dict[str, float], device: str, memory_model: str | None,
    parts: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Return the report of a run, as it is written to REPORT.json.

    cycles, utilization (macs_accelerator / cycles / MACs per cycle) and all times of units are None on devices without
    a clock. counters: those of all launches. seconds: by phase. device, memory_model: names. parts: how many times the
    Program ran for a large batch, each time with counters for all its launches.
    """
    timed = [c for c in counters if c.cycles is not None]
    cycles = sum(c.cycles or 0 for c in timed) if timed else None
    units: dict[str, dict[str, int | None]] = {}
    for unit in ("load", "gemm", "vector", "store"):
        units[unit] = {
            counter: sum(c.values[f"{unit}_{counter}"] for c in timed) if timed else None
            for counter in ("busy", "wait_token", "wait_memory")
        }
    macs = parts * program.macs_accelerator
    return {
        "model": program.name,
        "device": device,
        "rounding": program.rounding,
        "cycles": cycles,
        "memory_model": memory_model if timed else None,
        "config": program.config.to_dict(),
        "macs_total": parts * program.macs_total,
        "macs_accelerator": macs,
        "utilization": macs / cycles / program.config.macs_per_cycle if cycles else None,
        "launches": len(counters),
        "cpu_nodes": [
            {"name": node.name, "op": node.op, "reason": node.reason}
            for step in with_inner_steps(program.steps) if not isinstance(step, LaunchStep) for node in step.nodes
        ],
        "saved_traffic": sum(step.saved_bytes for step in with_inner_steps(program.steps) if isinstance(step, CpuStep)),
        "arena": {"bytes": program.arena.size, "lower_bound": program.arena.lower_bound},
        "layers": layer_rows(program, counters),
        "units": units,
        "seconds": seconds,
    }  # fmt: skip
