"""The host of the whole accelerator in a cocotb simulation: registers, memory, and a Device around both."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import axi_model
import bench
import cocotb
import numpy as np
from cocotb.task import resume
from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiRam, AxiRamRead, AxiReadBus
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit, instruction_bytes
from celosia.hw.spec.regs import (
    CONTROL_START,
    COUNTERS,
    ERROR_TEXT,
    REGISTERS,
    STATUS_BUSY,
    STATUS_DONE,
    STATUS_ERROR_SHIFT,
    Error,
)
from celosia.sim.device import Counters, DeviceError

BASE, MEMORY = 1 << 16, 1 << 17
NAMES = [unit.name.lower() for unit in Unit]


class Host:
    """Access the accelerator's registers, and `size` bytes of memory at DMA base BASE.

    The memory is cocotbext-axi's AxiRam, or `axi_model.Memory` with the parameters `model`. Checkers watch every access
    of the accelerator. second: the memory behind the second read port, if there is one.
    """

    def __init__(self, dut: bench.Dut, size: int = MEMORY, **model: Any) -> None:
        self.dut, self.cfg = dut, bench.config()
        logging.getLogger("cocotb").setLevel(logging.ERROR)
        self.bus = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axil_"), dut.clk, dut.rst)
        self.model: axi_model.Memory | None = None
        self.second: Any = None
        both, self._size = self.cfg.ports == 2, size
        if model:
            self.model = axi_model.Memory(dut, bytearray(size), self.cfg.bus_bytes, **model)
            if both:
                self.second = replace(self.model, prefix="m_axi1")
        channels = [("m_axi", axi_model.READ), ("m_axi", axi_model.WRITE), *[("m_axi1", axi_model.READ)] * both]
        self.checkers = {channel: axi_model.Checker(self.cfg.bus_bytes, BASE, size) for channel in channels}

    async def begin(self) -> None:
        await bench.start(self.dut, timeout=1_000_000)
        if not self.model:  # before the reset, AxiRam would accept undefined values of the pins
            dut = self.dut
            self.ram = AxiRam(AxiBus.from_prefix(dut, "m_axi_"), dut.clk, dut.rst, size=self._size)
            if self.cfg.ports == 2:
                self.second = AxiRamRead(AxiReadBus.from_prefix(dut, "m_axi1_"), dut.clk, dut.rst, mem=self.ram.mem)
        for (prefix, names), checker in self.checkers.items():
            cocotb.start_soon(axi_model.check(self.dut, prefix, names, checker))
        if self.model:
            cocotb.start_soon(self.model.reads())
            cocotb.start_soon(self.model.writes())
            if self.second:
                cocotb.start_soon(self.second.reads())

    def pause(self, probability: float) -> None:
        """Stall each channel of AxiRam with this probability in each cycle."""
        write, read = self.ram.write_if, self.ram.read_if
        channels = [write.aw_channel, write.w_channel, write.b_channel, read.ar_channel, read.r_channel]
        if self.second:
            channels += [self.second.ar_channel, self.second.r_channel]
        for channel in channels:
            channel.set_pause_generator(random.random() < share for share in repeat(probability))

    async def read(self, name: str) -> int:
        return int(await self.bus.read_dword(REGISTERS[name].offset))

    async def write(self, name: str, value: int) -> None:
        await self.bus.write_dword(REGISTERS[name].offset, value)

    def put(self, offset: int, data: bytes) -> None:
        """Write memory directly, `offset` bytes from the DMA base."""
        if self.model:
            self.model.data[BASE + offset : BASE + offset + len(data)] = data
        else:
            self.ram.write(BASE + offset, data)

    def get(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Read `size` bytes of memory directly, `offset` bytes from the DMA base."""
        start = BASE + offset
        content = self.model.data[start : start + size] if self.model else self.ram.read(start, size)
        return np.frombuffer(bytes(content), np.uint8)

    async def launch(self, addr: int, count: int, size: int, watchdog: int = 3000) -> tuple[Error, int]:
        """Run `count` instructions at `addr` with a DMA limit of `size` bytes.

        Return the error and the index of its instruction.
        """
        for checker in self.checkers.values():
            checker.size = size
        for name, value in {
            "instr_addr": addr, "instr_count": count, "dma_base_lo": BASE, "dma_base_hi": 0, "dma_size": size,
            "watchdog": watchdog, "irq_enable": 1, "control": CONTROL_START,
        }.items():  # fmt: skip
            await self.write(name, value)
        await bench.fall(self.dut)
        while not self.dut.irq.value:
            if self.dut.busy.value:
                assert self._lights() == (0, 1, 0)
            await bench.fall(self.dut)
        status = await self.read("status")
        assert status & (STATUS_BUSY | STATUS_DONE) == STATUS_DONE, f"status is {status:#x}"
        assert self.checkers["m_axi", axi_model.WRITE].written_out
        error = Error(status >> STATUS_ERROR_SHIFT)
        assert self._lights() == ((1, 0, 0) if error == Error.NONE else (0, 0, 1))
        return error, await self.read("error_index")

    def _lights(self) -> tuple[int, int, int]:
        return bench.value(self.dut.idle), bench.value(self.dut.busy), bench.value(self.dut.error)

    async def run(
        self, dram: NDArray[np.uint8], addr: int, words: Sequence[int], watchdog: int = 3000
    ) -> tuple[Error, int]:
        """Put `words` at `addr` of `dram`, run them, and copy memory back to `dram`. Return error and index."""
        place(dram, self.cfg, addr, words)
        self.put(0, dram.tobytes())
        outcome = await self.launch(addr, len(words), len(dram), watchdog)
        dram[:] = self.get(0, len(dram))
        return outcome

    async def counters(self) -> dict[str, int]:
        return {name: await self.read(f"{name}_lo") | await self.read(f"{name}_hi") << 32 for name in COUNTERS}


def place(dram: NDArray[np.uint8], cfg: Config, addr: int, words: Sequence[int]) -> None:
    raw = b"".join(word.to_bytes(instruction_bytes(cfg), "little") for word in words)
    dram[addr : addr + len(raw)] = np.frombuffer(raw, np.uint8)


# Events --------------------------------------------------------------------------------------------------


async def record(dut: bench.Dut, events: list[tuple[str, str, int]]) -> None:
    """Append (unit, "start" or "done", index) in order; in a cycle, ends come before starts."""
    ports = [
        (name, event, getattr(dut, f"trace__{name}__{event}"), getattr(dut, f"trace__{name}__{event}_index"))
        for event in ("done", "start")
        for name in NAMES
    ]
    while True:
        await bench.fall(dut)
        for name, event, valid, index in ports:
            if valid.value:
                events.append((name, event, bench.value(index)))


def check_events(words: Sequence[int], events: list[tuple[str, str, int]]) -> None:
    """Check that each instruction starts and ends once, in its unit's order, and takes no token before it is posted."""
    for unit, name in zip(Unit, NAMES):
        expected = [index for index, word in enumerate(words) if (word & 7) - 1 == unit]
        for kind in ("start", "done"):
            assert [index for n, k, index in events if (n, k) == (name, kind)] == expected, f"{name} {kind}"
    tokens = {(source, target): 0 for source in Unit for target in Unit}
    for name, kind, index in events:
        unit = Unit[name.upper()]
        for other in Unit:
            if kind == "done":
                tokens[unit, other] += words[index] >> 7 + other & 1
            else:
                tokens[other, unit] -= words[index] >> 3 + other & 1
                assert tokens[other, unit] >= 0, f"instruction {index} did not wait for {other.name}"


# The Device ----------------------------------------------------------------------------------------------


class CocotbDevice:
    """Make the simulated accelerator of a Host with AxiRam a Device, so that a Runtime can drive it.

    `run` lets the simulation go on, so it must be called in a function that cocotb's `bridge` made awaitable:

        await bridge(Runtime(program, CocotbDevice(host)).run)(inputs)
    """

    memory_model: str | None = "AxiRam"

    def __init__(self, host: Host) -> None:
        self.host, self.config, self.size = host, host.cfg, 0
        self.events: list[tuple[str, str, int]] = []
        cocotb.start_soon(record(host.dut, self.events))

    def allocate(self, size: int) -> None:
        self.size = size
        self.host.put(0, bytes(size))

    def write(self, addr: int, data: NDArray[Any]) -> None:
        assert addr >= 0 and addr + data.nbytes <= self.size
        self.host.put(addr, data.tobytes())

    def read(self, addr: int, size: int) -> NDArray[np.uint8]:
        assert addr >= 0 and addr + size <= self.size
        return self.host.get(addr, size)

    def run(self, instr_addr: int, count: int, timeout_cycles: int, trace: bool = False) -> Counters:
        """Run a launch, and check that no unit ran ahead of its tokens. Raise DeviceError if it ends with an error.

        The result holds no events.
        """
        return resume(self._run)(instr_addr, count)

    async def _run(self, instr_addr: int, count: int) -> Counters:
        self.events.clear()
        error, index = await self.host.launch(instr_addr, count, self.size)
        if error:
            raise DeviceError(f"instruction {index}: {ERROR_TEXT[error]}")
        size = instruction_bytes(self.config)
        code = self.read(instr_addr, count * size).reshape(count, size)
        check_events(bench.pack(code), self.events)
        values = await self.host.counters()
        return Counters(values["cycles"], values)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
