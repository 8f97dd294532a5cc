"""The host's side of the control registers: how runs begin and end, on simulators and boards alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from celosia.hw.sources import sources_identity
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit
from celosia.hw.spec.regs import (
    CONTROL_ABORT,
    CONTROL_START,
    COUNTERS,
    ERROR_TEXT,
    MAGIC,
    REGISTERS,
    STATUS_BUSY,
    STATUS_DONE,
    STATUS_ERROR_SHIFT,
    STATUS_STUCK,
    TRACE_DONE,
    TRACE_INDEX_SHIFT,
    TRACE_UNIT_SHIFT,
    Access,
    Error,
)
from celosia.sim.device import DeviceError, Event

RING_DELAY = 1000
"""Upper bound of the cycles from the end of a run to the last entry in its event ring."""


class Control:
    """The control registers of an accelerator by name, and the protocol of a run: prepare, start, wait, read.

    read, write: functions that read and write a register of 32 bits, by its offset in bytes.
    """

    def __init__(self, read: Callable[[int], int], write: Callable[[int, int], object]) -> None:
        self._read, self._write = read, write
        self.last_error: tuple[Error, int] | None = None
        """Code and instruction number of the last run's error; None without one."""
        self._prepared: dict[str, int] = {}
        """Values that the last `prepare` wrote to registers that the hardware locks during a run, by name."""
        self._run_number = 0
        """Number, in the register `runs`, that the prepared run will have."""

    def read(self, name: str) -> int:
        """Return the 32 bits of a register."""
        return self._read(REGISTERS[name].offset) & 0xFFFFFFFF

    def write(self, name: str, value: int) -> None:
        """Set a register that can be written."""
        assert REGISTERS[name].access != Access.READ
        self._write(REGISTERS[name].offset, value)

    def check(self, config: Config) -> None:
        """Raise DeviceError where there is no accelerator, or one of another Config or of other sources."""
        magic, identity = self.read("magic"), self.read("identity")
        if magic != MAGIC:
            raise DeviceError(
                f"there is no Celosia accelerator: its first register reads {magic:#010x}, not {MAGIC:#010x}; load its "
                "bitstream, and check the base address of the registers"
            )
        if identity != config.identity:
            raise DeviceError(
                f"the accelerator on the board has Config {identity:08x}, not {config.name} ({config.identity:08x}); "
                "load that Config's bitstream, or compile the model for this one"
            )

        sources = self.read("sources")
        if sources != sources_identity():
            raise DeviceError(
                f"the bitstream on the board was made of other hardware sources ({sources:08x}) than those of this "
                f"Celosia ({sources_identity():08x}); make it again with `celosia bitstream`, and load it with "
                "`celosia flash`"
            )

    def prepare(self, base: int, **values: int) -> None:
        """Write the registers of the next run, and remember what `is_ours` compares.

        base: physical address of DRAM offset 0, in bytes. values: all other registers, by name.
        """
        values = {"dma_base_lo": base & 0xFFFFFFFF, "dma_base_hi": base >> 32, **values}
        for name, value in values.items():
            self.write(name, value)
        self._prepared = {name: value for name, value in values.items() if REGISTERS[name].access == Access.SETUP}
        self._run_number = (self.read("runs") + 1) % (1 << 32)  # after all writes, see `is_ours`

    def start(self) -> None:
        """Start the prepared run; `is_done` says when it has ended."""
        self.write("control", CONTROL_START)

    def is_done(self) -> bool:
        """Return whether the last run has ended, and no other is under way; `counters` checks that it was ours."""
        return self.read("status") & (STATUS_BUSY | STATUS_DONE) == STATUS_DONE

    def is_ours(self) -> bool:
        """Return whether the current or last run is the one that was prepared here.

        It is if exactly one run has begun since, and the registers that are locked during a run have our values.
        """
        return self.read("runs") == self._run_number and all(
            self.read(name) == value for name, value in self._prepared.items()
        )

    def _require_ours(self) -> None:
        """Raise DeviceError where another process started a run; call this after everything of a run has been read."""
        if not self.is_ours():
            raise DeviceError(
                "another process has used the accelerator during this run, whose results are lost; run it again, and "
                "let all who use this board do so through Celosia, which locks it"
            )

    def abort_and_drain(self, pauses: Iterable[object]) -> None:
        """Abort a run that is under way, and wait until memory has answered all requests, so that a run can start.

        pauses: an iterator that waits a while in each step; it ends when the host gives up. DeviceError where memory
        has not answered by then.
        """
        status = self.read("status")
        if status & STATUS_BUSY:
            self.write("control", CONTROL_ABORT)
        for _ in chain((None,), pauses):
            status = self.read("status")
            if not status & (STATUS_BUSY | STATUS_STUCK):
                return
        raise DeviceError(
            "memory has not answered all that the accelerator asked of it in an earlier run, so that no run can start; "
            "restart the board"
        )

    def counters(self, describe: Callable[[], str]) -> dict[str, int]:
        """Return the counters of the last run, by name, after checking that it was ours and ended without an error.

        DeviceError for a run that ended with an error (the message ends with the text of `describe`), and for a run of
        another process.
        """
        status, values = self.read("status"), self.read_counters()
        self._require_ours()
        code = status >> STATUS_ERROR_SHIFT & 0xFF
        if code:
            index, is_known = self.read("error_index"), code in ERROR_TEXT
            self.last_error = (Error(code), index) if is_known else None
            text = ERROR_TEXT[Error(code)] if is_known else f"error code {code}"
            raise DeviceError(f"instruction {index}: {text}; {describe()}")
        return values

    def read_counters(self) -> dict[str, int]:
        """Return all counters by name, without checking whose run they are of."""
        return {name: self.read(f"{name}_lo") | self.read(f"{name}_hi") << 32 for name in COUNTERS}

    def read_events(self, depth: int, cycles: int) -> list[Event]:
        """Return the instructions of the last run whose start and end the event ring has kept, in order of their ends.

        depth: places of the ring. cycles: length of the run. DeviceError if the run was not ours.
        """
        count = self.read("trace_count")
        for _ in range(RING_DELAY):  # the last events are on their way
            if count == (count := self.read("trace_count")):
                break
        else:
            raise DeviceError("the accelerator goes on counting events after its run; load its bitstream again")
        starts: dict[tuple[int, int], int] = {}
        events = []
        for number in range(max(0, count - depth), count):
            self.write("trace_at", number % depth)
            event_word, cycle = self.read("trace_event"), self.read("trace_cycle")
            latest = cycles + RING_DELAY  # the ring keeps 32 bits of a cycle: take the last such cycle up to here
            cycle = latest - (latest - cycle) % (1 << 32)
            unit, index = event_word >> TRACE_UNIT_SHIFT & 3, event_word >> TRACE_INDEX_SHIFT
            if not event_word & TRACE_DONE:
                starts[unit, index] = cycle
            elif (unit, index) in starts:
                events.append((unit, index, starts.pop((unit, index)), cycle + 1))
        self._require_ours()
        events.sort(key=lambda event: (event[3], event[0]))
        return [Event(Unit(unit).name.lower(), *times) for unit, *times in events]
