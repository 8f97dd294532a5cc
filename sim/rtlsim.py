"""A Device that executes programs on the Verilated RTL, cycle by cycle, with a memory model at its AXI ports."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.isa import Unit
from celosia.hw.regs import (
    CONTROL_START,
    COUNTERS,
    ERROR_TEXT,
    MAGIC,
    REGISTERS,
    STATUS_DONE,
    STATUS_ERROR_SHIFT,
    Error,
)
from celosia.sim.build import library
from celosia.sim.device import Counters, DeviceError, Event, TimeLimit
from celosia.sim.fsim import Memory
from celosia.sim.memory import IDEAL, ZYNQ_HP, MemoryModel, memory_model, random_stalls

__all__ = ["IDEAL", "ZYNQ_HP", "MemoryModel", "RtlDevice", "random_stalls"]

DMA_BASE = 0x12_3456_7000
"""Physical address of the memory: not 0, so that a forgotten base is found out."""
PAGE = 4096
SLICE = 100_000
"""Most cycles between two looks at the outside: a KeyboardInterrupt waits no longer than these take."""
SLICE_PRODUCTS = 25_600_000
"""Most products of the array in that time: large arrays are simulated slowly."""


class _Parameters(ctypes.Structure):
    """`Parameters` of harness.cpp."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "read_latency", "write_latency", "outstanding", "refresh_period", "refresh_cycles", "bytes_per_cycle",
            "stall", "jitter", "seed", "error_start", "error_end", "freeze_after",
        )
    ]  # fmt: skip


_EVENT = np.dtype([("unit", np.uint32), ("index", np.uint32), ("start", np.uint64), ("end", np.uint64)])


@cache
def _load(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    handle, u64, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    for name, result, arguments in (
        ("create", handle, ()),
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
    """The accelerator's RTL of `config`, built at the first use (see build.py).

    memory: behind its AXI ports; a model or its name.
    progress: called now and then during a run with the cycles passed.
    watchdog_cycles: cycles without progress of any unit after which the hardware itself ends a run.
    """

    def __init__(
        self,
        config: Config,
        memory: MemoryModel | str = ZYNQ_HP,
        progress: Callable[[int], None] | None = None,
        watchdog_cycles: int = 100_000,
        quiet: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.memory = memory_model(memory)
        self.progress = progress
        self.watchdog_cycles = watchdog_cycles
        self.last_error: tuple[Error, int] | None = None
        """Code and instruction number of the last run's error."""
        self._lib = _load(library(config, quiet))
        self._handle = ctypes.c_void_p(self._lib.celosia_create())
        self.allocate(0)
        magic, identity = self._read("magic"), self._read("identity")
        if (magic, identity) != (MAGIC, config.identity):
            raise DeviceError(
                f"the simulator answers as {magic:#x}, {identity:#x}, which is not this Config's hardware"
            )

    @property
    def memory_model(self) -> str | None:
        return str(self.memory)

    def allocate(self, size: int) -> None:
        super().allocate(size)
        whole = -(-size // PAGE) * PAGE + PAGE
        self._pages = np.zeros(whole, np.uint8)
        self.dram = self._pages[:size]
        self.use(self.memory)

    @property
    def behind(self) -> NDArray[np.uint8]:
        """The memory that follows the DMA limit: a page and more, which no program can reach."""
        return self._pages[len(self.dram) :]

    def use(self, memory: MemoryModel) -> None:
        """Replace the memory model; the contents stay."""
        self.memory = memory
        values = {name: getattr(memory, name) for name, _ in _Parameters._fields_}  # type: ignore[misc]
        values["stall"] = int(memory.stall * 65536)
        values["freeze_after"] = 2**64 - 1 if memory.freeze_after is None else memory.freeze_after
        self._parameters = _Parameters(**values)
        pointer = self._pages.ctypes.data
        self._lib.celosia_memory(self._handle, pointer, DMA_BASE, len(self._pages), ctypes.byref(self._parameters))

    def close(self) -> None:
        """Release the simulator; the device cannot be used afterwards."""
        if self._handle:
            self._lib.celosia_destroy(self._handle)
            self._handle = ctypes.c_void_p()

    def run(self, instr_addr: int, count: int, timeout_cycles: int, trace: bool = False) -> Counters:
        """Execute `count` instructions; returns the hardware's counters, and with `trace` each instruction's time.

        DeviceError where an instruction fails, or the run takes over `timeout_cycles`; the device can be used again.
        """
        self.last_error = None
        if count == 0:
            return Counters(0, dict.fromkeys(COUNTERS, 0))
        for name, value in (
            ("instr_addr", instr_addr),
            ("instr_count", count),
            ("dma_base_lo", DMA_BASE & 0xFFFFFFFF),
            ("dma_base_hi", DMA_BASE >> 32),
            ("dma_size", len(self.dram)),
            ("watchdog", self.watchdog_cycles),
            ("irq_enable", 1),
        ):
            self._write(name, value)
        self._lib.celosia_begin(self._handle, trace)  # cycles of events begin here, as those of the counters
        self._write("control", CONTROL_START)
        try:
            self._until_done(timeout_cycles)
        except BaseException:
            self._lib.celosia_reset(self._handle)  # whatever is under way
            raise
        try:
            return self._result()
        finally:
            if self.memory.freeze_after is not None:  # bursts that it never answers end with a reset only
                self._lib.celosia_reset(self._handle)

    def states(self) -> NDArray[np.uint64]:
        """Cycles that the units have spent in each combination of states since this device was opened: an axis of four
        for each Unit, in the order of `hw.top.State` (idle, busy, waiting for memory, waiting for a token)."""
        counts = np.ctypeslib.as_array(self._lib.celosia_states(self._handle), (4 ** len(Unit),))
        return counts.reshape((4,) * len(Unit)).transpose().copy()

    def _until_done(self, timeout_cycles: int) -> None:
        slice_cycles = min(SLICE, SLICE_PRODUCTS // self.config.macs_per_cycle)
        while True:
            passed = self._lib.celosia_cycle(self._handle)
            if passed >= timeout_cycles:
                raise TimeLimit(f"no end within {timeout_cycles} cycles: {self._state()}")
            done = self._lib.celosia_run(self._handle, min(slice_cycles, timeout_cycles - passed))
            if done < 0:
                raise DeviceError(f"{self._lib.celosia_error(self._handle).decode()}; {self._state()}")
            if self.progress is not None:
                self.progress(self._lib.celosia_cycle(self._handle))
            if done:
                return

    def _result(self) -> Counters:
        events = [
            Event(Unit(int(row["unit"])).name.lower(), int(row["index"]), int(row["start"]), int(row["end"]))
            for row in self._events()
        ]
        status = self._read("status")
        code = status >> STATUS_ERROR_SHIFT & 0xFF
        if code:
            self.last_error = Error(code), self._read("error_index")
            raise DeviceError(f"instruction {self.last_error[1]}: {ERROR_TEXT[Error(code)]}; {self._state()}")
        if not status & STATUS_DONE:
            raise DeviceError(f"the interrupt came, but the status is {status:#x}")
        values = {name: self._read(f"{name}_lo") | self._read(f"{name}_hi") << 32 for name in COUNTERS}
        return Counters(values["cycles"], values, events)

    def _events(self) -> NDArray[np.void]:
        count = self._lib.celosia_event_count(self._handle)
        if count == 0:
            return np.zeros(0, _EVENT)
        return np.frombuffer(ctypes.string_at(self._lib.celosia_events(self._handle), count * _EVENT.itemsize), _EVENT)

    def _state(self) -> str:
        """How far each unit has come."""
        values = (ctypes.c_int64 * (4 * len(Unit)))()
        self._lib.celosia_progress(self._handle, values)
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

    def _write(self, name: str, value: int) -> None:
        if not self._lib.celosia_write_register(self._handle, REGISTERS[name].offset, value):
            raise DeviceError(f"no answer to a write of register {name}")

    def _read(self, name: str) -> int:
        value = ctypes.c_uint32()
        if not self._lib.celosia_read_register(self._handle, REGISTERS[name].offset, ctypes.byref(value)):
            raise DeviceError(f"no answer to a read of register {name}")
        return value.value
