"""Test the timeline of a run."""

from celosia.sim.device import Event
from celosia.sim.trace import timeline


def test_overlapping_instructions_of_a_unit_follow_each_other() -> None:
    events = [Event("gemm", 0, 10, 110), Event("gemm", 1, 90, 210), Event("store", 2, 5, 6)]
    rows = [row for row in timeline(events, ["first"])["traceEvents"] if row["ph"] == "X"]
    assert [(row["name"], row["tid"], row["ts"], row["dur"]) for row in rows] == [
        ("store 2", 3, 0.05, 0.01),
        ("gemm 0 first", 1, 0.1, 1.0),
        ("gemm 1", 1, 1.1, 1.0),
    ]
    assert len(timeline(events)["traceEvents"]) == 4 + 3
