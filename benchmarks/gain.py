"""Rows of `gain`: cycles by the timing model, with the schedules that come with Celosia and without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import celosia
from benchmarks.rows import Row
from benchmarks.workloads import WORKLOADS, Missing
from celosia.compiler.program import Program
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.timing import predict

CONFIGS = ("pynq", "ultra96", "zcu104")
NETWORKS = ("resnet18", "mobilenet_v2", "mobilenet_v2_160", "ds_cnn", "lite", "demo")


def cycles(program: Program, memory: MemoryModel) -> int:
    """Of all launches of `program`, by the timing model."""
    total = 0
    for launch in program.launches:
        start = launch.address - program.image_address
        code = program.image[start : start + launch.count * instruction_bytes(program.config)]
        total += predict(program.config, code.tobytes(), memory, launch.address).cycles
    return total


def rows(
    folder: Path | None, models: tuple[str, ...], config: str | None, memory: MemoryModel, say: Callable[[str], None]
) -> Iterator[Row]:
    """A row for each network, or those of `models`, on each of CONFIGS, or on `config`."""
    for name in models or NETWORKS:
        for each in (config,) if config else CONFIGS:
            command = f"python -m benchmarks gain --models {name} --config {each} --memory {memory.name}"
            head = f"gain/{name}/{each}", f"{name} on {each}: cycles by the timing model, untuned over tuned", "≥ 1"
            say(f"{name} on {each}: compiling with records and without")
            try:
                path = WORKLOADS[name].path(folder)
            except Missing as reason:
                yield Row(*head, f"skipped: {reason}", None, command)
                continue
            untuned, tuned = (
                cycles(celosia.compile(path, each, check=False, records=records), memory)
                for records in ("none", "shipped")
            )
            details = {"config": each, "untuned": untuned, "tuned": tuned, "gain": 100 * (1 - tuned / untuned)}
            text = f"{untuned / tuned:.3f} ({untuned:,} to {tuned:,})"
            yield Row(*head, text, tuned <= untuned, command, details)
