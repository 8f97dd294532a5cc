"""Run the driver for boards on the RTL: BoardDevice's own code with compiled programs.

An AXI4-Lite master replaces the registers, and the host sees memory through a cache. Outputs must be those of the
functional device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import bench
import cocotb
import numpy as np
import onnx
import pytest
import test_compiled
from cocotb.task import bridge, resume
from cocotb.triggers import First, RisingEdge, Timer
from cocotb.utils import get_sim_time
from configs import CONFIGS
from host import BASE, Host
from numpy.typing import NDArray
from thorough import some

from celosia.compiler.program import Program
from celosia.driver.board.board_device import BoardDevice
from celosia.driver.run.run_result import Result
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, Unit, encode, instruction_bytes
from celosia.hw.spec.regs import REGISTERS, STATUS_DONE, STATUS_ERROR_SHIFT, Error
from celosia.sim.device import DeviceError
from celosia.sim.functional.fsim import FunctionalDevice

LINE = 32
"""Bytes of a cache line, as on a Cortex-A9."""
CLOCK_HZ = 500e6
LEASE = 600
"""Cycles of a lease; the host sleeps 100 cycles at a time."""


def simulate(make: Callable[[], onnx.ModelProto], config: str, folder: Path, only: str) -> None:
    import celosia
    from celosia.hw.top import Accelerator

    model, cfg = make(), CONFIGS[config]
    program = celosia.compile(model, cfg)
    program.save(folder / "program")
    rng = np.random.default_rng(1)
    feed = {t.name: rng.random(t.shape, np.float32) * 4 for t in program.inputs}
    np.savez(folder / "inputs.npz", **feed)
    np.savez(folder / "expected.npz", **Runtime(program, FunctionalDevice(cfg)).run(feed).outputs)
    bench.run(partial(Accelerator, cfg), __file__, cfg=cfg, params={"folder": str(folder)}, only=[only])


@pytest.mark.rtl
@pytest.mark.parametrize("config", some([*test_compiled.VARIED, "8x4-batch2-taps5"], test_compiled.VARIED[1:]))
def test_driver_on_rtl(config: str, tmp_path: Path) -> None:
    simulate(test_compiled.residual, config, tmp_path, "runs_programs")


@pytest.mark.rtl
def test_faults_are_noticed(tmp_path: Path) -> None:
    simulate(test_compiled.depthwise, test_compiled.VARIED[1], tmp_path, "notices_faults")


# The simulation ------------------------------------------------------------------------------------------


class SimRegisters:
    """Access registers through the AXI4-Lite master; `move` changes offsets, to plant faults."""

    def __init__(self, host: Host, move: Callable[[int], int] = lambda offset: offset) -> None:
        self.bus, self.move = host.bus, move

    def read(self, offset: int) -> int:
        return int(resume(self.bus.read_dword)(self.move(offset)))

    def write(self, offset: int, value: int) -> None:
        resume(self.bus.write_dword)(self.move(offset), value)


class CachedBuffer:
    """Memory of the simulation behind a cache that never writes back or fetches lines by itself."""

    physical_address = BASE

    def __init__(self, host: Host, size: int, flushes: bool, invalidates: bool) -> None:
        self.host, self.flushes, self.invalidates = host, flushes, invalidates
        self.data = np.frombuffer(random.randbytes(-(-size // LINE) * LINE), np.uint8).copy()
        self.host.put(0, random.randbytes(len(self.data)))
        self.freed = False

    def _lines(self, start: int, size: int) -> slice:
        return slice(start // LINE * LINE, -(-(start + size) // LINE) * LINE)

    def flush(self, start: int, size: int) -> None:
        lines = self._lines(start, size)
        if self.flushes:
            self.host.put(lines.start, self.data[lines].tobytes())

    def invalidate(self, start: int, size: int) -> None:
        lines = self._lines(start, size)
        if self.invalidates:
            self.data[lines] = self.host.get(lines.start, lines.stop - lines.start)

    def free(self) -> None:
        self.freed = True


class CachedMemory:
    def __init__(self, host: Host, flushes: bool = True, invalidates: bool = True) -> None:
        self.host, self.flags = host, (flushes, invalidates)
        self.buffers: list[CachedBuffer] = []

    def allocate(self, size: int) -> CachedBuffer:
        for checker in self.host.checkers.values():
            checker.size = size
        if size > test_compiled.MEMORY - BASE:
            raise MemoryError(f"{size} bytes")
        self.buffers.append(CachedBuffer(self.host, size, *self.flags))
        return self.buffers[-1]


class Board:
    """Create BoardDevices for the simulated accelerator."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def device(self, config: Config | None = None, **options: Any) -> BoardDevice:
        registers = SimRegisters(self.host, options.pop("move", lambda offset: offset))
        memory = options.pop("memory", None) or CachedMemory(self.host)
        return BoardDevice(
            config or self.host.cfg, registers, memory, clock_hz=CLOCK_HZ, now=lambda: get_sim_time("fs") * 1e-15,
            sleep=resume(self._sleep), **options,
        )  # fmt: skip

    async def _sleep(self, seconds: float) -> None:
        await bench.cycles(self.host.dut, 100)

    async def irq(self, seconds: float) -> None:
        """Wait for the interrupt, for at most `seconds`."""
        if not self.host.dut.irq.value:
            await First(RisingEdge(self.host.dut.irq), Timer(max(seconds, 1e-9), "sec", round_mode="ceil"))


def loaded() -> tuple[Program, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    folder = Path(bench.params()["folder"])
    inputs, expected = (dict(np.load(folder / f"{name}.npz")) for name in ("inputs", "expected"))
    return Program.load(folder / "program"), inputs, expected


def equal(result: Result, expected: dict[str, NDArray[Any]]) -> bool:
    return all(np.array_equal(result.outputs[name], array) for name, array in expected.items())


async def begun(dut: bench.Dut) -> tuple[Host, Board]:
    host = Host(dut, test_compiled.MEMORY)
    await host.begin()
    return host, Board(host)


@cocotb.test()
async def runs_programs(dut: bench.Dut) -> None:
    program, inputs, expected = loaded()
    host, board = await begun(dut)

    def drive(**options: Any) -> None:
        memory = CachedMemory(host)
        device = board.device(memory=memory, **options)
        with Runtime(program, device) as runtime:
            for _ in range(2):
                result = runtime.run(inputs)
                assert equal(result, expected)
                assert result.report["cycles"] == sum(c.values["cycles"] for c in result.counters) > 0
                assert all(c.values["gemm_busy"] > 0 and c.values["read_beats"] > 0 for c in result.counters)
                assert max(c.values["cycles"] for c in result.counters) > LEASE
        assert [buffer.freed for buffer in memory.buffers] == [True]

    await bridge(drive)(lease_cycles=LEASE)
    host.pause(0.3)
    await bridge(drive)(interrupt=resume(board.irq))


@cocotb.test()
async def notices_faults(dut: bench.Dut) -> None:
    program, inputs, expected = loaded()
    host, board = await begun(dut)

    def run(**options: Any) -> Result:
        return Runtime(program, board.device(**options)).run(inputs)

    def refused(words: str, **options: Any) -> None:
        with pytest.raises(DeviceError, match=words):
            run(**options)

    def wrong(**options: Any) -> None:
        """Check that a run with this fault fails or gives other outputs, and that the next run without it is right."""
        with suppress(DeviceError):
            assert not equal(run(watchdog_cycles=2000, **options), expected), f"nobody noticed {options}"
        assert equal(run(), expected)

    def faults() -> None:
        # Another Config, and registers at other offsets.
        refused("the board has Config [0-9a-f]{8}, not custom", config=CONFIGS["batch2"])
        refused("there is no Celosia accelerator: its first register reads", move=lambda offset: offset + 4)
        one, other = REGISTERS["instr_addr"].offset, REGISTERS["instr_count"].offset
        swapped = {one: other, other: one}
        wrong(move=lambda offset: swapped.get(offset, offset))
        # A cache that is never flushed, or never invalidated.
        wrong(memory=CachedMemory(host, flushes=False))
        wrong(memory=CachedMemory(host, invalidates=False))
        # A lease that ends before the host polls again.
        refused("the host has not renewed its lease in time", lease_cycles=20)
        assert equal(run(), expected)
        # Too little memory.
        with pytest.raises(DeviceError, match="2097152"):
            board.device().allocate(1 << 21)
        with pytest.raises(ValueError, match=r"8 to 23.*16 bytes"):
            device = board.device()
            device.allocate(16)
            device.write(8, np.zeros(16, np.uint8))

    await bridge(faults)()

    def errors() -> None:
        """Check the hardware's own errors, with the number of the instruction."""
        device = board.device(watchdog_cycles=2000)
        device.allocate(4096)
        good = encode(host.cfg, Opcode.LOAD, dram_addr=0, x_size=1, y_size=1, z_size=1)
        for code, word, words in (
            (Error.ILLEGAL_INSTRUCTION, 0, "instruction 1: an illegal instruction"),
            (Error.WATCHDOG, good | 1 << 3 + Unit.STORE, "instruction 1: no progress within the watchdog's time"),
            (Error.ADDRESS, encode(host.cfg, Opcode.LOAD, dram_addr=8192, x_size=1, y_size=1, z_size=1),
             "instruction 1: a DRAM address outside the DMA limits"),
        ):  # fmt: skip
            size = instruction_bytes(host.cfg)
            raw = b"".join(each.to_bytes(size, "little") for each in (good, word))
            device.write(1024, np.frombuffer(raw, np.uint8))
            with pytest.raises(DeviceError, match=words):
                device.run(1024, 2, 100_000)
            assert device.last_error == (code, 1)
        assert device.run(1024, 0, 100).cycles == 0

    await bridge(errors)()

    def hang() -> None:
        """If memory stops forever without a watchdog, the host's limit ends the run, by polling and by interrupt."""
        refused(r"no end within \d+ cycles .*LOAD worked", watchdog_cycles=0)
        refused("memory has not answered all that the accelerator asked", interrupt=resume(board.irq))

    def late() -> None:
        """If memory resumes when the next run begins, that run is right."""
        host.pause(0)
        assert equal(run(), expected)

    def stops() -> None:
        """A run past the host's limit ends before its memory is freed."""
        memory = CachedMemory(host)
        device = board.device(memory=memory)
        with pytest.raises(DeviceError, match=r"no end within \d+ cycles"), Runtime(program, device) as runtime:
            runtime.run(inputs)
        assert device.control.read("status") == STATUS_DONE | Error.ABORTED << STATUS_ERROR_SHIFT
        assert [buffer.freed for buffer in memory.buffers] == [True]

    from celosia.driver.board import board_device
    from celosia.driver.run import program_runtime

    enough, program_runtime.CYCLES_PER_INSTRUCTION = program_runtime.CYCLES_PER_INSTRUCTION, 10
    await bridge(stops)()
    program_runtime.CYCLES_PER_INSTRUCTION = enough
    assert equal(await bridge(run)(), expected)
    program_runtime.CYCLES_PER_INSTRUCTION = 10
    host.pause(1)
    settle, board_device.SETTLE_SECONDS = board_device.SETTLE_SECONDS, 1e-5
    await bridge(hang)()
    board_device.SETTLE_SECONDS, program_runtime.CYCLES_PER_INSTRUCTION = settle, enough
    await bridge(late)()
