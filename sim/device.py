"""The Device protocol: what a Runtime needs of an accelerator; simulators and boards implement it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit
from celosia.hw.spec.regs import COUNTERS
from celosia.plain import Sentence

UNITS = frozenset(unit.name.lower() for unit in Unit)
"""Names of the units in events: load, gemm, vector, store."""


class DeviceError(Sentence, RuntimeError):
    """A run that ended in an error status, or did not end in time; the message says which instruction and why."""


class TimeLimitError(DeviceError):
    """A run that took over `timeout_cycles`."""


@dataclass(frozen=True)
class Event:
    """The time of one instruction on its unit.

    unit: one of `UNITS`. index: number of the instruction in the run. start, end: cycles since the start of the run.
    """

    unit: str
    index: int
    start: int
    end: int


@dataclass(frozen=True)
class Counters:
    """Counters of one run. `values` has the names of `hw.spec.regs.COUNTERS`; it is empty where there are no cycles.

    events: times of instructions; empty where no trace was asked for. lost: number of instructions whose time is
    unknown, since a board keeps the events of a limited number.
    """

    cycles: int | None = None
    values: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    lost: int = 0

    def check(self, count: int | None = None) -> None:
        """Raise DeviceError where these cannot be the counters of a run of `count` instructions (None: any number).

        A Runtime checks every answer, since a faulty board may answer anything.
        """
        numbers = (self.lost, *self.values.values(), *(() if self.cycles is None else (self.cycles,)))
        if not all(0 <= number < 1 << 64 for number in numbers) or self.values.keys() not in (set(), set(COUNTERS)):
            raise DeviceError("the accelerator's counters are invalid; load its bitstream again")
        if bool(self.values) != (self.cycles is not None):
            raise DeviceError("the accelerator gives cycles without counters, or counters without cycles")
        for event in self.events:
            is_of_run = event.index >= 0 and (count is None or event.index < count)
            if event.unit not in UNITS or not is_of_run or not 0 <= event.start <= event.end < 1 << 64:
                raise DeviceError(
                    f"the accelerator reports an event that fits no instruction of the run: {event}; load its "
                    "bitstream again"
                )


@runtime_checkable
class Device(Protocol):
    """An accelerator with its memory. Addresses are byte offsets from the DMA base."""

    config: Config

    @property
    def memory_model(self) -> str | None:
        """Name and parameters of the memory model behind a cycle count, None where cycles are not modelled."""
        ...

    def allocate(self, size: int) -> None:
        """Make `size` bytes of memory available, from offset 0; also the DMA limit. Contents are undefined."""

    def write(self, addr: int, data: NDArray[np.uint8]) -> None:
        """Copy `data` to memory from byte `addr` on. ValueError where it does not fit."""
        ...

    def read(self, addr: int, size: int) -> NDArray[np.uint8]:
        """Return a copy of `size` bytes from byte `addr` on. ValueError where they are not there."""
        ...

    def run(self, instr_addr: int, count: int, timeout_cycles: int, trace: bool = False) -> Counters:
        """Execute `count` instructions. DeviceError where the run ends in an error or takes over `timeout_cycles`."""
        ...

    def close(self) -> None:
        """Release what the device holds; it is not used any more."""
        ...


@runtime_checkable
class SharedDevice(Device, Protocol):
    """A Device whose accelerator serves several memories in turns: one runs while another is filled."""

    abandoned: bool
    """Whether the caller of the run under way has given up. Another thread sets it; a long run then ends in a
    DeviceError."""

    def clone_shared(self) -> Device:
        """Return a Device for this accelerator with a memory of its own, yet to be allocated.

        Runs of both must not overlap. DeviceError where the accelerator has no second memory.
        """
        ...
