"""The event ring of the hardware holds the events that the simulator has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from configs import CONFIGS
from programs import random_program

from celosia.driver.board.board_device import BoardDevice
from celosia.hw.event_trace import SOURCES
from celosia.hw.spec.config import Config
from celosia.sim.device import Counters, Event
from celosia.sim.rtl.rtlsim import DMA_BASE, RtlDevice

MAX_CYCLES = 10**10
"""Time limit in cycles, far above any run, because a board's limit is one of wall-clock time."""
CFG = CONFIGS["8x8-bus4-weights4"]
DEPTH = CFG.trace_depth


@pytest.fixture(scope="module")
def device() -> Iterator[RtlDevice]:
    device = RtlDevice(CFG, quiet=True)
    yield device
    device.close()


def traced(device: RtlDevice, seed: int, count: int) -> Counters:
    """Run a random program, and return the counters and events that the simulator recorded."""
    program = random_program(CFG, seed, count=count)
    program.run(device)
    return device.run(program.instr_addr, len(program.instructions), 1_000_000, trace=True)


@pytest.mark.rtl
@pytest.mark.parametrize("seed", range(3))
def test_ring_equals_what_the_simulator_saw(device: RtlDevice, seed: int) -> None:
    counters = traced(device, seed, 12)
    assert len(counters.events) * 2 <= DEPTH
    assert device.control.read_events(DEPTH, counters.cycles) == counters.events


def within(counters: Counters, count: int) -> list[Event]:
    """Return the instructions whose start and end are among the last `count` events of the run."""
    edges = sorted(edge for event in counters.events for edge in (event.start, event.end - 1))
    first = edges[-count] if count < len(edges) else 0
    return [event for event in counters.events if event.start >= first]


@pytest.mark.rtl
@pytest.mark.parametrize("seed", range(6, 8))
def test_ring_keeps_the_last_events(device: RtlDevice, seed: int) -> None:
    counters = traced(device, seed, 60)
    kept = device.control.read_events(DEPTH, counters.cycles)
    assert device.control.read("trace_count") == 2 * len(counters.events) > DEPTH
    # The hardware decides the order of simultaneous events.
    at_least, at_most = within(counters, DEPTH - len(SOURCES)), within(counters, DEPTH + len(SOURCES))
    assert [event for event in kept if event in at_least] == at_least
    assert [event for event in at_most if event in kept] == kept
    assert 0 < len(at_least) <= len(kept) <= DEPTH // 2


class Board:
    """Use a simulator's accelerator as the registers, memory and buffer of a board."""

    physical_address = DMA_BASE

    def __init__(self, device: RtlDevice) -> None:
        self._device = device

    def read(self, offset: int) -> int:
        self._device._call("run", 1000)
        return self._device._read_register(offset)

    def write(self, offset: int, value: int) -> None:
        self._device._write_register(offset, value)

    def allocate(self, size: int) -> Board:
        self._device.allocate(size)
        self.data = self._device.dram
        return self

    def flush(self, start: int, size: int) -> None: ...

    invalidate = flush

    def free(self) -> None: ...


@pytest.mark.rtl
@pytest.mark.parametrize(("seed", "count"), [(0, 12), (7, 60)])
def test_a_board_tells_the_same(device: RtlDevice, seed: int, count: int) -> None:
    expected = traced(device, seed, count)
    program = random_program(CFG, seed, count=count)
    board = BoardDevice(CFG, Board(device), Board(device), sleep=lambda seconds: None)
    program.run(board, MAX_CYCLES)
    instructions = len(program.instructions)
    counters = board.run(program.instr_addr, instructions, MAX_CYCLES, trace=True)
    assert counters.lost == instructions - len(counters.events)
    assert bool(counters.lost) == (2 * instructions > DEPTH)
    kept = {(event.unit, event.index) for event in counters.events}
    assert kept <= {(event.unit, event.index) for event in expected.events}
    assert board.run(program.instr_addr, instructions, MAX_CYCLES).events == []


def test_a_config_without_a_ring_is_the_one_of_before() -> None:
    without = replace(CFG, trace_depth=0)
    fields = without.to_dict()
    del fields["trace_depth"]
    assert Config.from_dict(fields).digest == without.digest != CFG.digest
