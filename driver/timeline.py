"""The timeline of a whole run: the launches one after the other, each instruction with its layer."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from celosia.compiler.program import Program
from celosia.sim import trace
from celosia.sim.device import Counters, Event


def timeline(program: Program, counters: list[Counters], memory_model: str | None) -> dict[str, Any]:
    """Chrome's trace format of a run with `trace` on that memory model; times of the host are left out."""
    events: list[Event] = []
    labels: list[str] = []
    for launch, counter in zip(cycle(program.launches), counters):  # again for each part of a batch
        last = max((event.end for event in events), default=0)
        first = len(labels)
        events += [Event(e.unit, e.index + first, e.start + last, e.end + last) for e in counter.events]
        labels += [launch.layers[number].name for number in launch.layer_of]
    result = trace.timeline(events, labels)
    result["otherData"]["memory_model"] = memory_model
    return result
