"""A Device on a board: the accelerator's registers behind MMIO, and its memory in contiguous buffers.

`BoardDevice` knows neither PYNQ nor Linux. It uses `Registers` and a `BoardMemory`: `open_pynq_device` implements these
with PYNQ's MMIO and buffers, the tests of the hardware with an AXI4-Lite master and a memory in a simulation.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from celosia.driver.board.lock import hold_lock_file
from celosia.hw.boards.board import NUMBER_LIMITS, PROCESSORS
from celosia.hw.spec.config import Config
from celosia.hw.spec.regs import COUNTERS, Error
from celosia.sim.device import Counters, DeviceError, TimeLimitError
from celosia.sim.host import Control

PAGE = 4096
"""Bytes of a page."""
REGISTER_BYTES = PAGE
"""Bytes of the registers' address range."""
POLL_SECONDS = 1e-4
"""Seconds between two reads of the status without an interrupt."""
INTERRUPT_SECONDS = 0.1
"""Seconds between two reads of the status while waiting for the interrupt; a lost interrupt costs at most that."""
INSTANCE = "celosia"
"""Name of the accelerator in the block design of the bitstream projects."""
INTERRUPT_PIN = f"{INSTANCE}/irq"
"""Name of its interrupt there."""
SETTLE_SECONDS = 1.0
"""Seconds for an aborted run to end, and for memory to answer its requests; the watchdog needs a fifth of them."""
CLOCK_HZ = 1e6 * NUMBER_LIMITS["clock_mhz"][0]
"""Clock in Hz that converts cycles to time limits: the slowest of a board, so that no limit is too short."""
WATCHDOG_CYCLES = 10_000_000
"""Cycles without progress of any unit after which the hardware ends a run: 0.1 s at 100 MHz."""
LEASE_CYCLES = 500_000_000
"""Cycles after which the hardware ends a run whose host has died or sleeps: 5 s at 100 MHz, 2 s at 250 MHz. A host that
waits renews the lease at least ten times a second."""
LOCKS = Path("/run/lock")
"""Folder of lock files."""
BASES = {processor.machine: processor.address for processor in PROCESSORS.values()}
"""Base address of the registers in the bitstream projects, by `platform.machine()`."""
FPGA_STATE = Path("/sys/class/fpga_manager/fpga0/state")
"""File in which Linux reports the state of the FPGA."""
LOADED = "operating"
"""Content of FPGA_STATE while a bitstream is loaded."""


class Registers(Protocol):
    """Protocol of the accelerator's registers. Offsets are bytes, values 32 bits."""

    def read(self, offset: int) -> int:
        """Read the register at `offset`."""

    def write(self, offset: int, value: int) -> None:
        """Write the register at `offset`; return when it is written."""


class BoardBuffer(Protocol):
    """Contiguous physical memory. The host may access it through a cache that the device does not see.

    data: the host's view. Writes to it reach the device after `flush`, and it shows the device's writes after
    `invalidate`. Both affect whole cache lines.
    """

    data: NDArray[np.uint8]
    physical_address: int

    def flush(self, start: int, size: int) -> None:
        """Write `size` bytes from `start` on back from the host's cache."""

    def invalidate(self, start: int, size: int) -> None:
        """Drop `size` bytes from `start` on from the host's cache."""

    def free(self) -> None:
        """Free the memory."""


class BoardMemory(Protocol):
    """Allocator of contiguous memory on a board."""

    def allocate(self, size: int) -> BoardBuffer:
        """Allocate `size` bytes (at least 1) from a page's start. MemoryError where no such block is free."""
        ...


class BoardDevice:
    """Device on a board: the accelerator behind `registers`, with its DRAM in a buffer of `memory`; see
    sim.device.Device.

    clock_hz: clock of the accelerator, which converts limits to seconds. interrupt: function that waits for the
    interrupt, at most the given seconds; None: poll the status. now, sleep: the clock in seconds, and a pause of some
    seconds. watchdog_cycles: cycles without progress of any unit after which the hardware ends a run. lease_cycles:
    cycles without a renewal by this host after which it does; 0 for never. lock: context that is held while the
    registers are in use, so that several processes can share the board in turns, each with memory of its own.

    DeviceError where there is no accelerator, or one of another Config.
    """

    memory_model: str | None = "board"
    abandoned = False

    def __init__(
        self, config: Config, registers: Registers, memory: BoardMemory, *, clock_hz: float = CLOCK_HZ,
        interrupt: Callable[[float], object] | None = None, now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep, watchdog_cycles: int = WATCHDOG_CYCLES,
        lease_cycles: int = LEASE_CYCLES, lock: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        self.config = config
        self.clock_hz, self.watchdog_cycles, self.lease_cycles = clock_hz, watchdog_cycles, lease_cycles
        self._memory, self._buffer = memory, None
        self._interrupt, self._now, self._sleep = interrupt, now, sleep
        self._size, self._process, self._lock = 0, os.getpid(), lock
        self._clone = partial(
            BoardDevice, config, registers, memory, clock_hz=clock_hz, interrupt=interrupt, now=now, sleep=sleep,
            watchdog_cycles=watchdog_cycles, lease_cycles=lease_cycles, lock=lock,
        )  # fmt: skip
        self.control = Control(registers.read, registers.write)
        """The registers of the hardware."""
        with lock():
            self.control.check(config)

    _buffer: BoardBuffer | None

    @property
    def last_error(self) -> tuple[Error, int] | None:
        """Code and instruction number of the last run's error; None without one."""
        return self.control.last_error

    def clone_shared(self) -> BoardDevice:
        """Return a device with the same registers and a buffer of its own; see sim.device.SharedDevice."""
        return self._clone()

    # Memory ----------------------------------------------------------------------------------------------------

    def allocate(self, size: int) -> None:
        """Make `size` bytes of memory available. DeviceError where the board has no such contiguous block."""
        if size < 0:
            raise ValueError(f"cannot allocate {size} bytes")
        self.close()
        try:
            self._buffer = self._memory.allocate(max(size, 1))
        except MemoryError as error:
            raise DeviceError(
                f"the board has no {size} bytes of contiguous memory: {error}; load the bitstream again with `celosia "
                "flash`, end other users of memory, or enlarge CMA (cma=... on the kernel's command line)"
            ) from None
        self._size = size
        if self._buffer.physical_address % PAGE:
            raise DeviceError(f"the buffer at {self._buffer.physical_address:#x} does not begin with a page")

    def write(self, addr: int, data: NDArray[Any]) -> None:
        """Copy the bytes of `data` to `addr`. ValueError where they do not fit."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        buffer = self._require_in_memory(addr, len(flat))
        buffer.data[addr : addr + len(flat)] = flat
        buffer.flush(addr, len(flat))  # at once: a dirty cache line could later overwrite the device's results

    def read(self, addr: int, size: int) -> NDArray[np.uint8]:
        """Return a copy of `size` bytes from `addr`. ValueError where they are not there."""
        buffer = self._require_in_memory(addr, size)
        buffer.invalidate(addr, size)
        return np.array(buffer.data[addr : addr + size], np.uint8)

    def _require_process(self) -> None:
        """Raise DeviceError after a fork: parent and child would write their inputs to the same memory."""
        if self._process != os.getpid():
            raise DeviceError(f"process {self._process} has opened the device, and forked; open one in each process")

    def _require_in_memory(self, addr: int, size: int) -> BoardBuffer:
        """Return the buffer. ValueError where the bytes are not in it; DeviceError after a fork."""
        self._require_process()
        if self._buffer is None or addr < 0 or size < 0 or addr + size > self._size:
            raise ValueError(f"bytes {addr} to {addr + size - 1} are not in the {self._size} bytes allocated")
        return self._buffer

    def close(self) -> None:
        """Free the memory, and end a run of ours that is under way; `allocate` makes the device usable again.

        Memory that the hardware may still write to stays allocated: others must not get it.
        """
        if self._buffer is not None and self._process == os.getpid():
            with suppress(DeviceError):
                if self.control.is_ours():
                    with self._lock():
                        self._abort_and_drain()
                self._buffer.free()
        self._buffer, self._size = None, 0

    def _abort_and_drain(self) -> None:
        """Abort a run that is under way, and wait until memory has answered. DeviceError where it does not."""
        self.control.abort_and_drain(drain_pauses(self._now, self._sleep))

    # Runs ------------------------------------------------------------------------------------------------------

    def run(self, instr_addr: int, count: int, timeout_cycles: int, trace: bool = False) -> Counters:
        """Execute `count` instructions, and return the hardware's counters.

        trace: also return the events that the hardware has kept, if its Config has a `trace_depth`.
        DeviceError where an instruction fails, or the run takes over `timeout_cycles`.
        """
        self.control.last_error = None
        if count == 0:
            return Counters(0, dict.fromkeys(COUNTERS, 0))
        self._require_process()
        if self._buffer is None:
            raise ValueError("no memory is allocated")
        with self._lock():
            self.control.check(self.config)  # another process may have loaded another bitstream
            return self._run_and_read_counters(self._buffer.physical_address, instr_addr, count, timeout_cycles, trace)

    def _run_and_read_counters(
        self, base: int, instr_addr: int, count: int, timeout_cycles: int, trace: bool
    ) -> Counters:
        """Start a run, wait for its end, and read its counters."""
        self._abort_and_drain()
        self.control.prepare(
            base, instr_addr=instr_addr, instr_count=count, dma_size=self._size, watchdog=self.watchdog_cycles,
            lease=self.lease_cycles, irq_enable=int(self._interrupt is not None),
        )  # fmt: skip
        self.control.start()
        self._wait_until_done(timeout_cycles)
        values = self.control.counters(self._describe_units)
        if not (trace and self.config.trace_depth):
            return Counters(values["cycles"], values)
        events = self.control.read_events(self.config.trace_depth, values["cycles"])
        counters = Counters(values["cycles"], values, events, count - len(events))
        counters.check(count)
        return counters

    def _wait_until_done(self, timeout_cycles: int) -> None:
        """Wait until the run has ended, by the interrupt or by polling, and renew the lease meanwhile.

        TimeLimitError after `timeout_cycles`; DeviceError where the caller has given up (`abandoned`).
        """
        limit = timeout_cycles / self.clock_hz
        end = self._now() + limit
        while True:
            is_late = self._now() >= end  # before the status is read: the device may have ended while the host slept
            if self.control.is_done():
                return
            if self.abandoned:
                raise DeviceError(f"nobody waits for the run any more: {self._describe_units()}")
            if is_late:
                raise TimeLimitError(f"no end within {timeout_cycles} cycles ({limit:.3g} s): {self._describe_units()}")
            self.control.write("lease", self.lease_cycles)
            if self._interrupt is not None:
                self._interrupt(min(max(end - self._now(), 0), INTERRUPT_SECONDS))
            else:
                self._sleep(POLL_SECONDS)

    def _describe_units(self) -> str:
        """Describe status and counters of each unit, for an error message."""
        values = self.control.read_counters()
        units = [name.removesuffix("_busy") for name in COUNTERS if name.endswith("_busy")]
        parts = [
            f"{unit.upper()} worked {values[f'{unit}_busy']}, waited {values[f'{unit}_wait_token']} for tokens and "
            f"{values[f'{unit}_wait_memory']} for memory"
            for unit in units
        ]
        return f"status {self.control.read('status'):#x} after {values['cycles']} cycles, of which {'; '.join(parts)}"


def drain_pauses(
    now: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
) -> Iterator[object]:
    """Yield pauses of POLL_SECONDS for SETTLE_SECONDS, for `Control.abort_and_drain`: each step waits one pause."""
    end = now() + SETTLE_SECONDS
    while now() < end:
        yield sleep(POLL_SECONDS)


# PYNQ ----------------------------------------------------------------------------------------------------------


class _PynqBuffer:
    """BoardBuffer in an array of `pynq.allocate`."""

    def __init__(self, buffer: Any) -> None:
        self.data: NDArray[np.uint8] = buffer
        self.physical_address = int(buffer.physical_address)
        self._buffer = buffer

    def flush(self, start: int, size: int) -> None:
        if size:
            self._buffer[start : start + size].flush()

    def invalidate(self, start: int, size: int) -> None:
        if size:
            self._buffer[start : start + size].invalidate()

    def free(self) -> None:
        self._buffer.freebuffer()


class _PynqMemory:
    """BoardMemory of the package pynq."""

    def __init__(self, pynq: Any) -> None:
        self._pynq = pynq

    def allocate(self, size: int) -> BoardBuffer:
        try:
            return _PynqBuffer(self._pynq.allocate((size,), np.uint8, cacheable=True))
        except RuntimeError as error:  # PYNQ raises it where CMA is exhausted
            raise MemoryError(str(error)) from None


def require_pynq() -> Any:
    """Import and return the package pynq. DeviceError where it is missing, or cannot be imported."""
    try:
        import pynq
    except Exception as error:  # pynq has many ways to fail
        raise DeviceError(
            f"--device board needs the Python package pynq on the board itself ({error}); use a PYNQ image "
            "(http://www.pynq.io/boards.html), or run `sudo pip3 install pynq` there; from another machine take "
            "--device ssh://USER@BOARD"
        ) from None
    return pynq


def _open_interrupt(pynq: Any) -> Callable[[float], object] | None:
    """Return a function that waits for the accelerator's interrupt, at most some seconds.

    None where the design has no interrupt controller.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # PYNQ uses the current event loop
    try:
        interrupt = pynq.Interrupt(INTERRUPT_PIN)
    except Exception:  # a bitstream without the controller, a kernel without UIO, a PYNQ that has not loaded it
        loop.close()
        asyncio.set_event_loop(None)
        return None

    def wait(seconds: float) -> None:
        """Wait for the interrupt, at most `seconds`."""
        with suppress(asyncio.TimeoutError):
            loop.run_until_complete(asyncio.wait_for(interrupt.wait(), seconds))

    return wait


def read_fpga_state() -> str:
    """Return the state of the FPGA as Linux names it; LOADED where a bitstream is loaded."""
    try:
        return FPGA_STATE.read_text().strip()
    except OSError:
        return LOADED  # older kernels do not report it


def open_pynq_device(config: Config, base: int | None = None, **options: Any) -> BoardDevice:
    """Open the accelerator on this board. DeviceError where pynq, the right to use it, or a bitstream is missing.

    base: physical address of its registers; None for that of the bitstream projects. options: those of BoardDevice;
    without `interrupt`, it waits for the interrupt if the design has a controller, and polls otherwise.
    """
    pynq = require_pynq()
    if base is None:
        if platform.machine() not in BASES:
            raise DeviceError(f"a {platform.machine()} is no Zynq; run this on the board, or take --device ssh://...")
        base = BASES[platform.machine()]
    state = read_fpga_state()
    if state != LOADED:  # reading an address without registers would stop the processor
        raise DeviceError(f"no bitstream is loaded (the FPGA is in state {state!r}); load one with `celosia flash`")
    try:
        registers = pynq.MMIO(base, REGISTER_BYTES)
    except Exception as error:  # "Root permissions required.", "No Devices Found"
        raise DeviceError(
            f"PYNQ cannot reach the accelerator ({error}); it needs the rights of root, and the environment of a login "
            "shell: log in as root, or take --sudo"
        ) from None
    options.setdefault("interrupt", _open_interrupt(pynq))
    return BoardDevice(config, registers, _PynqMemory(pynq), lock=partial(board_lock, base), **options)


def board_lock(base: int) -> AbstractContextManager[None]:
    """Return a context that holds the lock of the accelerator with registers at `base`.

    A process needs it to use the accelerator, or to load its bitstream.
    """
    return hold_lock_file(LOCKS / f"celosia-{base:x}", f"the accelerator at {base:#x}")
