"""The event trace of a run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celosia.hw.spec.isa import Unit
from celosia.sim.device import Event

HOST = len(Unit)
"""The row of the host."""


def timeline(
    events: Sequence[Event], labels: Sequence[str] = (), clock_mhz: float = 100.0,
    host: Sequence[tuple[str, float, float]] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return Chrome's trace format of a run: one row for each unit, and one for the host where it has work.

    events: of the instructions. labels: text for each instruction, by its number; appended to unit and number.
    clock_mhz: converts cycles to microseconds. host: (label, start, length) of the host's work, in cycles. Units start
    an instruction while the one before is still in the pipeline: it is drawn from the end of that one, its true start
    is an argument.
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
