"""Test the ring of events alone: order, overflow of the ring, and events that come too fast."""

from __future__ import annotations

import random
from typing import Any

import pytest
from amaranth.sim import Simulator
from thorough import some

from celosia.hw.event_trace import FIRST_CYCLE, QUEUE_DEPTH, SOURCES, EventTrace
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit
from celosia.sim.device import Event
from celosia.sim.host import Control


def recorded(depth: int, pulses: list[dict[str, int]], before: list[dict[str, int]] | None = None) -> tuple[int, Any]:
    """Simulate a run and return the number of events and the rows of the ring, as (event, cycle).

    pulses: for each cycle, instruction numbers by source. before: those of an earlier run.
    """
    dut, rows = EventTrace(Config(trace_depth=depth)), []
    count = 0

    async def host(ctx: Any) -> None:
        nonlocal count
        for run in [before or [], [*pulses, *[{}] * (len(SOURCES) * QUEUE_DEPTH)]]:
            ctx.set(dut.clear, 1)
            await ctx.tick()
            ctx.set(dut.clear, 0)
            for cycle in run:
                for source, pulse in zip(SOURCES, dut.pulses):
                    ctx.set(pulse.valid, source in cycle)
                    ctx.set(pulse.payload.index, cycle.get(source, 0))
                await ctx.tick()
        count = ctx.get(dut.registers.count)
        for at in range(depth):
            ctx.set(dut.registers.at, at)
            await ctx.tick().repeat(2)
            rows.append((ctx.get(dut.registers.event), ctx.get(dut.registers.cycle)))

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(host)
    simulator.run()
    return count, rows


class Host(Control):
    """Registers of a ring with these rows, after a run."""

    def __init__(self, count: int, rows: list[tuple[int, int]]) -> None:
        self._ring, self._at = (count, rows), 0
        self._run_number, self._prepared = 1, {}

    def read(self, name: str) -> int:
        count, rows = self._ring
        event, cycle = rows[self._at]
        return {"trace_count": count, "trace_event": event, "trace_cycle": cycle, "runs": 1}[name]

    def write(self, name: str, value: int) -> None:
        assert name == "trace_at"
        self._at = value


def random_run(seed: int, length: int) -> tuple[list[dict[str, int]], list[Event]]:
    """Draw instructions of random lengths, up to four of a unit at once. Return their pulses and expected events."""
    rng = random.Random(seed)
    pulses: list[dict[str, int]] = [{} for _ in range(length + 200)]
    events, number = [], 0
    for unit in Unit:
        name, now, ends = unit.name.lower(), rng.randrange(20), 0
        while now < length:
            ends = max(ends + 1, now + rng.randrange(1, 40))
            pulses[now][f"{name}_start"] = pulses[ends][f"{name}_done"] = number
            events.append(Event(name, number, now + FIRST_CYCLE, ends + FIRST_CYCLE + 1))
            number, now = number + 1, now + rng.randrange(4, 30)
    events.sort(key=lambda event: (event.end, Unit[event.unit.upper()]))
    return pulses, events


@pytest.mark.parametrize("seed", some(range(4), [0, 1]))
def test_all_events(seed: int) -> None:
    pulses, events = random_run(seed, 300)
    count, rows = recorded(300, pulses)
    assert count == 2 * len(events) <= 300
    assert Host(count, rows).read_events(300, len(pulses)) == events


@pytest.mark.parametrize("kept", [0, 1, QUEUE_DEPTH])
def test_nothing_is_kept_of_an_earlier_run(kept: int) -> None:
    """Events of an earlier run do not appear, not even those that still wait to be written.

    kept: cycles with events of all units directly before the next run.
    """
    pulses, events = random_run(3, 100)
    before = [*random_run(4, 50)[0], *[{source: 7 for source in SOURCES}] * kept]
    count, rows = recorded(300, pulses, before)
    assert count == 2 * len(events)
    assert Host(count, rows).read_events(300, len(pulses)) == events


@pytest.mark.parametrize("depth", [1, 5, 32])
def test_the_last_events(depth: int) -> None:
    pulses, events = random_run(9, 300)
    count, rows = recorded(depth, pulses)
    assert count == 2 * len(events) > depth
    read = Host(count, rows).read_events(depth, len(pulses))
    assert len(read) <= depth // 2
    assert all(event in events for event in read)
    if depth == 32:
        assert events[-1] in read


def test_what_comes_too_fast_is_dropped() -> None:
    pulses = [{source: cycle for source in SOURCES} for cycle in range(4 * QUEUE_DEPTH)]
    count, rows = recorded(512, pulses)
    assert len(SOURCES) * QUEUE_DEPTH < count < len(SOURCES) * len(pulses)
    read = Host(count, rows).read_events(512, len(pulses))
    assert all((event.start, event.end) == (event.index + FIRST_CYCLE, event.index + FIRST_CYCLE + 1) for event in read)
    assert {event.unit for event in read} == {unit.name.lower() for unit in Unit}


@pytest.mark.parametrize("laps", [0, 1, 3])
def test_cycles_beyond_32_bits(laps: int) -> None:
    cycles = (laps << 32) + 100
    rows = [(0 << 3 | 1 << 1, 0xFFFFFFF0 if laps else 3), (0 << 3 | 1 << 1 | 1, 40)]
    start = ((laps - 1) << 32) + 0xFFFFFFF0 if laps else 3
    assert Host(2, rows).read_events(8, cycles) == [Event("gemm", 0, start, (laps << 32) + 41)]
