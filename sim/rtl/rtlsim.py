"""A Device that executes programs on the Verilated RTL, cycle by cycle, with a memory model at its AXI ports."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.hw.boards.boards import memory_model
from celosia.hw.boards.memory import IDEAL, ZYNQ_HP, MemoryModel, random_stalls
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit
from celosia.hw.spec.regs import COUNTERS, Error
from celosia.sim.device import Counters, DeviceError, Event, TimeLimitError
from celosia.sim.functional.fsim import Memory
from celosia.sim.host import Control
from celosia.sim.rtl.build import build_library

__all__ = ["IDEAL", "ZYNQ_HP", "MemoryModel", "RtlDevice", "random_stalls"]

DMA_BASE = 0x12_3456_7000
"""Physical address of the memory: not 0, so that hardware that forgets the base is detected."""
PAGE = 4096
"""Bytes of a page."""
SLICE = 100_000
"""Most cycles that one call of the library simulates; a KeyboardInterrupt waits until the call returns."""
SLICE_PRODUCTS = 25_600_000
"""Most products of the array in one such call, since large arrays are simulated slowly."""
DRAIN_CYCLES, MAX_DRAINS = 500, 200
"""Before a run, memory gets up to MAX_DRAINS times DRAIN_CYCLES cycles to answer the requests of an earlier run."""


class _Parameters(ctypes.Structure):
    """The parameters of the memory model: structure `Parameters` of harness.cpp."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "read_latency", "write_latency", "outstanding", "refresh_period", "refresh_cycles", "bytes_per_cycle",
            "stall", "jitter", "seed", "error_start", "error_end", "freeze_after", "freeze_cycles",
        )
    ]  # fmt: skip


_EVENT = np.dtype([("unit", np.uint32), ("index", np.uint32), ("start", np.uint64), ("end", np.uint64)])
"""An event as harness.cpp stores it."""


@cache
def _load_library(path: Path) -> ctypes.CDLL:
    """Load a simulator's library, and declare the types of its functions."""
    lib = ctypes.CDLL(str(path))
    handle, u64, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    for name, result, arguments in (
        ("create", handle, (u64,)),
        ("destroy", None, (handle,)),
        ("memory", None, (handle, ctypes.c_void_p, u64, u64, ctypes.POINTER(_Parameters))),
        ("reset", None, (handle,)),
        ("begin", None, (handle, ctypes.c_int)),
        ("write_register", ctypes.c_int, (handle, u32, u32)),
        ("read_register", ctypes.c_int, (handle, u32, ctypes.POINTER(u32))),
        ("run", ctypes.c_int, (handle, u64)),
        ("error", ctypes.c_char_p, (handle,)),
        ("cycle", u64, (handle,)),
        ("event_count", u64, (handle,)),
        ("events", ctypes.c_void_p, (handle,)),
        ("progress", None, (handle, ctypes.POINTER(ctypes.c_int64))),
        ("states", ctypes.POINTER(u64), (handle,)),
    ):
        function = getattr(lib, f"celosia_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


class RtlDevice(Memory):
    """Device that runs the RTL of `config`, built at the first use (see build.py).

    memory: the memory model behind its AXI ports, or the model's name.
    progress: called regularly during a run with the number of cycles simulated.
    watchdog_cycles: cycles without progress of any unit after which the hardware itself ends a run.
    quiet: do not report a build on standard error.
    seed: seed of the random values of registers and memories before they are written or reset, and of reads of an entry
        that is written in the same cycle.
    source: Verilog of the top module, such as a netlist, that replaces what `hw.verilog` writes (see build.py).
    simulator: path of a library to load; None: build it, or take it from the cache.
    """

    def __init__(
        self,
        config: Config,
        memory: MemoryModel | str = ZYNQ_HP,
        progress: Callable[[int], None] | None = None,
        watchdog_cycles: int = 100_000,
        quiet: bool = False,
        seed: int = 0,
        source: str | None = None,
        simulator: Path | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.memory = memory_model(memory)
        self.progress = progress
        self.watchdog_cycles = watchdog_cycles
        self.seed = seed
        self.abandoned = False
        self._lib = _load_library(simulator or build_library(config, quiet, source))
        self._create_simulator()

    def _create_simulator(self) -> None:
        """Create an instance of the library's simulator, without memory, and check that it has this Config."""
        self._handle = ctypes.c_void_p(self._lib.celosia_create(self.seed))
        self._using = RLock()  # so that another thread does not destroy the simulator during a call
        self.control = Control(self._read_register, self._write_register)
        """The registers of the hardware."""
        self._place_memory(0)
        self.control.check(self.config)

    def clone_shared(self) -> RtlDevice:
        """Return another simulator of the same hardware, with a memory of its own; see sim.device.SharedDevice."""
        clone = copy(self)
        clone._create_simulator()
        return clone

    @property
    def memory_model(self) -> str | None:
        """Text of the memory model, with each parameter that differs from its default."""
        return str(self.memory)

    @property
    def last_error(self) -> tuple[Error, int] | None:
        """Code and instruction number of the last run's error; None without one."""
        return self.control.last_error

    def allocate(self, size: int) -> None:
        """Allocate memory, as `Device.allocate`. DeviceError where memory still owes answers of an earlier run."""
        self.abort_and_drain()  # late writes would reach memory that was freed
        self._place_memory(size)

    def _place_memory(self, size: int) -> None:
        """Replace memory by `size` bytes of zeros, followed by at least a page `beyond_limit`."""
        super().allocate(size)
        rounded = -(-size // PAGE) * PAGE + PAGE
        with self._using:
            self._pages = np.zeros(rounded, np.uint8)
            self.dram = self._pages[:size]
            self.use(self.memory)

    @property
    def beyond_limit(self) -> NDArray[np.uint8]:
        """The bytes behind the DMA limit, at least a page: tests check that no program writes there."""
        return self._pages[len(self.dram) :]

    def use(self, memory: MemoryModel) -> None:
        """Use another memory model from now on; the contents of memory stay."""
        self.memory = memory
        values = {name: getattr(memory, name) for name, _ in _Parameters._fields_}  # type: ignore[misc]
        values["stall"] = int(memory.stall * 65536)
        for name in ("freeze_after", "freeze_cycles"):
            values[name] = 2**64 - 1 if values[name] is None else values[name]
        self._parameters = _Parameters(**values)
        pointer = self._pages.ctypes.data
        self._call("memory", pointer, DMA_BASE, len(self._pages), ctypes.byref(self._parameters))

    def close(self) -> None:
        """Release the simulator; the device cannot be used afterwards, and a run in another thread ends in an error."""
        with self._using:
            if self._handle:
                self._lib.celosia_destroy(self._handle)
                self._handle = ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the library's function celosia_`name` for this simulator. DeviceError after `close`."""
        with self._using:
            if not self._handle:
                raise DeviceError("the RTL simulator was closed; open another one")
            return getattr(self._lib, f"celosia_{name}")(self._handle, *arguments)

    def run(self, instr_addr: int, count: int, timeout_cycles: int, trace: bool = False) -> Counters:
        """Execute `count` instructions; returns the hardware's counters, and with `trace` each instruction's time.

        DeviceError where an instruction fails, or the run takes over `timeout_cycles`; the device can be used again.
        """
        self.control.last_error = None
        if count == 0:
            return Counters(0, dict.fromkeys(COUNTERS, 0))
        self.abort_and_drain()
        self.control.prepare(
            DMA_BASE, instr_addr=instr_addr, instr_count=count, dma_size=len(self.dram), watchdog=self.watchdog_cycles,
            lease=0, irq_enable=1,
        )  # fmt: skip
        self._call("begin", trace)  # events count cycles from here, as the counters do
        self.control.start()
        self._simulate_until_done(timeout_cycles)
        events = [
            Event(Unit(int(row["unit"])).name.lower(), int(row["index"]), int(row["start"]), int(row["end"]))
            for row in self._read_events()
        ]
        values = self.control.counters(self._describe_units)
        return Counters(values["cycles"], values, events)

    def abort_and_drain(self) -> None:
        """Abort a run that is under way, and wait until memory has answered. DeviceError where it does not."""
        self.control.write("irq_enable", 0)  # an enabled interrupt would end each wait at once
        self.control.abort_and_drain(self._call("run", DRAIN_CYCLES) for _ in range(MAX_DRAINS))

    def advance(self, cycles: int) -> None:
        """Simulate up to `cycles` cycles, fewer at an interrupt, for tests that control the registers themselves.

        DeviceError where the hardware violates the AXI protocol.
        """
        if self._call("run", cycles) < 0:
            error = self._call("error").decode()
            self.reset()
            raise DeviceError(error)

    def reset(self) -> None:
        """Reset the hardware and its memory model, as loading a bitstream does on a board; memory contents stay."""
        self._call("reset")

    def states(self) -> NDArray[np.uint64]:
        """Return the cycles spent in each combination of the units' states since this device was opened.

        The result has an axis of four for each Unit, in the order of `hw.top.State`: idle, busy, waiting for memory,
        waiting for a token.
        """
        with self._using:
            counts = np.ctypeslib.as_array(self._call("states"), (4 ** len(Unit),))
            return counts.reshape((4,) * len(Unit)).transpose().copy()

    def _simulate_until_done(self, timeout_cycles: int) -> None:
        """Simulate in slices until the run is done.

        TimeLimitError after `timeout_cycles`. DeviceError where the caller has given up (`abandoned`), or the hardware
        violates the AXI protocol.
        """
        slice_cycles = min(SLICE, SLICE_PRODUCTS // self.config.macs_per_cycle)
        while True:
            passed = self._call("cycle")
            if self.abandoned:
                raise DeviceError(f"nobody waits for the run any more, after {passed} cycles")
            if passed >= timeout_cycles:
                raise TimeLimitError(f"no end within {timeout_cycles} cycles: {self._describe_units()}")
            is_done = self._call("run", min(slice_cycles, timeout_cycles - passed))
            if is_done < 0:
                error, state = self._call("error").decode(), self._describe_units()
                self.reset()  # the state of hardware that violates the AXI protocol is unknown
                raise DeviceError(f"{error}; {state}")
            if self.progress is not None:
                self.progress(self._call("cycle"))
            if is_done:
                return

    def _read_events(self) -> NDArray[np.void]:
        """Return the events that the harness has recorded since the run began, as rows of _EVENT."""
        with self._using:
            count = self._call("event_count")
            if count == 0:
                return np.zeros(0, _EVENT)
            return np.frombuffer(ctypes.string_at(self._call("events"), count * _EVENT.itemsize), _EVENT)

    def _describe_units(self) -> str:
        """Describe for an error message how many instructions each unit has started and ended."""
        values = (ctypes.c_int64 * (4 * len(Unit)))()
        self._call("progress", values)
        parts = []
        for unit in Unit:
            started, ended, last_started, last_ended = values[4 * unit : 4 * unit + 4]
            if not started:
                parts.append(f"{unit.name} has started nothing")
            elif started == ended:
                parts.append(f"{unit.name} has ended its {ended}, the last was instruction {last_ended}")
            else:
                parts.append(
                    f"{unit.name} has ended {ended} of {started}, the last started is instruction {last_started}"
                )
        return "; ".join(parts)

    def _write_register(self, offset: int, value: int) -> None:
        """Write a register over AXI4-Lite, for `Control`."""
        if not self._call("write_register", offset, value):
            raise DeviceError(f"no answer to a write of the register at {offset:#x}")

    def _read_register(self, offset: int) -> int:
        """Read a register over AXI4-Lite, for `Control`."""
        value = ctypes.c_uint32()
        if not self._call("read_register", offset, ctypes.byref(value)):
            raise DeviceError(f"no answer to a read of the register at {offset:#x}")
        return value.value
