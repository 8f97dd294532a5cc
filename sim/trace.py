"""The event trace of a run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celosia.hw.spec.isa import Unit
from celosia.sim.device import Event

HOST = len(Unit)
"""Number of the timeline's row for the host, behind those of the units."""


def timeline(
    events: Sequence[Event], labels: Sequence[str] = (), clock_mhz: float = 100.0,
    host: Sequence[tuple[str, float, float]] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return a run in Chrome's trace format: one row for each unit, and one for the host where it has work.

    events: times of the instructions. labels: text for each instruction, by its number, shown behind unit and number.
    clock_mhz: converts cycles to microseconds. host: (label, start, length) of each step on the CPU, in cycles.

    A unit starts an instruction while the one before is still in its pipeline, and a row cannot show both. So each bar
    begins at the end of the one before; the true start is in the bar's `args`.
    """
    rows: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": int(unit), "args": {"name": unit.name}} for unit in Unit
    ]
    busy_until = dict.fromkeys(Unit, 0)
    for event in sorted(events, key=lambda event: event.end):
        unit = Unit[event.unit.upper()]
        start = max(event.start, busy_until[unit])
        busy_until[unit] = event.end
        name = f"{event.unit} {event.index}"
        if event.index < len(labels) and labels[event.index]:
            name += f" {labels[event.index]}"
        rows.append({
            "name": name, "ph": "X", "pid": 0, "tid": int(unit),
            "ts": start / clock_mhz, "dur": (event.end - start) / clock_mhz,
            "args": {"instruction": event.index, "start_cycle": event.start, "end_cycle": event.end},
        })  # fmt: skip
    if host:
        rows.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": HOST, "args": {"name": "CPU"}})
    rows += [
        {
            "name": label,
            "ph": "X",
            "pid": 0,
            "tid": HOST,
            "ts": start / clock_mhz,
            "dur": length / clock_mhz,
            "args": {},
        }
        for label, start, length in host
    ]
    return {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": {"clock_mhz": clock_mhz}}
