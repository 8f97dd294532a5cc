"""The trace of a run for Perfetto, in Chrome's format: its steps in order, each instruction with its layer (`--trace`).

`sim/trace.py` converts the events of one launch, without layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from celosia.compiler.program import LaunchStep, Program
from celosia.sim import trace
from celosia.sim.device import Counters, Event


def chrome_trace(
    program: Program, counters: Sequence[Counters], step_seconds: Sequence[float], memory_model: str | None,
    clock_mhz: float = 100.0,
) -> dict[str, Any]:  # fmt: skip
    """Return a run with `trace` in Chrome's trace format, as plain data.

    Launches take their cycles on that memory model at `clock_mhz`, steps on the CPU the seconds that they took here.
    otherData says how many instructions are missing because a board has not kept their times ("lost").

    step_seconds: of each step of the Program, and of all of them again for each part of a batch.
    """
    events: list[Event] = []
    layer_names: list[str] = []
    cpu_steps: list[tuple[str, float, float]] = []
    launches = iter(counters)
    now = 0.0  # in cycles
    for step, seconds in zip(cycle(program.steps), step_seconds):
        if not isinstance(step, LaunchStep):
            cpu_steps.append((", ".join(node.op for node in step.nodes), now, seconds * clock_mhz * 1e6))
            now += seconds * clock_mhz * 1e6
            continue
        counter, start, first = next(launches), round(now), len(layer_names)
        events += [Event(e.unit, e.index + first, e.start + start, e.end + start) for e in counter.events]
        layer_names += [step.layers[number].name for number in step.layer_of]
        now += counter.cycles or 0
    result = trace.timeline(events, layer_names, clock_mhz, cpu_steps)
    result["otherData"]["memory_model"] = memory_model
    result["otherData"]["lost"] = sum(counter.lost for counter in counters)
    result["otherData"]["CPU"] = "measured on the machine that simulated"
    return result
