"""Rows of `gain`: cycles by the timing model, with the schedules that come with Celosia and without them."""

from __future__ import annotations

from collections.abc import Iterator

import celosia
from benchmarks.rows import Request, Row, judged, skipped
from benchmarks.workloads import WORKLOADS, Missing
from celosia.compiler.program import Program
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.timing import predict

CONFIGS = ("pynq", "ultra96", "zcu104")
NETWORKS = ("resnet18", "mobilenet_v2", "mobilenet_v2_160", "ds_cnn", "lite", "demo")


def cycles(program: Program, memory: MemoryModel) -> int:
    """Cycles of all launches of `program`, by the timing model."""
    total = 0
    for launch in program.launches:
        start = launch.address - program.image_address
        code = program.image[start : start + launch.count * instruction_bytes(program.config)]
        total += predict(program.config, code.tobytes(), memory, launch.address).cycles
    return total


def rows(asked: Request) -> Iterator[Row]:
    """A row for each of NETWORKS on each of CONFIGS, or what is asked for."""
    memory = asked.memory
    for name in asked.models or NETWORKS:
        for each in (asked.config,) if asked.config else CONFIGS:
            command = f"python -m benchmarks gain --models {name} --config {each} --memory {memory.name}"
            key, what = f"gain/{name}/{each}", f"{name} on {each}: cycles by the timing model, untuned and tuned"
            asked.say(f"{name} on {each}: compiling with records and without")
            try:
                path = WORKLOADS[name].path(asked.folder)
            except Missing as reason:
                yield skipped(key, what, command, reason)
                continue
            untuned, tuned = (
                cycles(celosia.compile(path, each, check=False, records=records), memory)
                for records in ("none", "shipped")
            )
            details = {"config": each, "untuned": untuned, "tuned": tuned, "gain": 100 * (1 - tuned / untuned)}
            yield judged(key, what, command, details, "gain >= 0")
