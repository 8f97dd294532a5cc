"""Drive the register file and the states of a run over AXI4-Lite."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import partial

import bench
import cocotb
import pytest
from cocotbext.axi import AxiLiteBus, AxiLiteMaster

from celosia.hw.control import ERROR_SOURCES, Control
from celosia.hw.sources import sources_identity
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.isa import Unit
from celosia.hw.spec.regs import (
    CONTROL_ABORT,
    CONTROL_START,
    COUNTERS,
    MAGIC,
    REGISTERS,
    STATUS_BUSY,
    STATUS_DONE,
    STATUS_ERROR_SHIFT,
    STATUS_STUCK,
    TRACE_PREFIX,
    Access,
    Error,
)

CONFIG = PRESETS["tiny"]


@pytest.mark.rtl
def test_control() -> None:
    bench.run(partial(Control, CONFIG), __file__, cfg=CONFIG)


@pytest.mark.rtl
def test_two_ports_and_the_trace() -> None:
    cfg = replace(CONFIG, ports=2, trace_depth=8)
    only = ["counters_count", "watchdog", "the_registers_of_the_trace_are_the_rings"]
    bench.run(partial(Control, cfg), __file__, cfg=cfg, only=only)


class Host:
    """Access the registers over AXI4-Lite."""

    def __init__(self, dut: bench.Dut) -> None:
        self.dut = dut
        logging.getLogger("cocotb").setLevel(logging.WARNING)
        self.bus = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "axil_"), dut.clk, dut.rst)

    async def read(self, name: str) -> int:
        return int(await self.bus.read_dword(REGISTERS[name].offset))

    async def write(self, name: str, value: int) -> None:
        await self.bus.write_dword(REGISTERS[name].offset, value)

    async def begin(self, watchdog: int = 0) -> None:
        await self.write("watchdog", watchdog)
        await self.write("control", CONTROL_START)
        assert await self.read("status") == STATUS_BUSY
        assert self.dut.run.value and not self.dut.clear.value


async def host(dut: bench.Dut) -> Host:
    await bench.start(dut)
    dut.idle.value, dut.fetch_idle.value = 15, 1
    return Host(dut)


async def pulse_error(dut: bench.Dut, **errors: tuple[Error, int]) -> None:
    await bench.rise(dut)
    for source, (code, index) in errors.items():
        getattr(dut, f"errors__{ERROR_SOURCES.index(source)}__valid").value = 1
        getattr(dut, f"errors__{ERROR_SOURCES.index(source)}__payload").value = code | index << 4
    await bench.rise(dut)
    for source in errors:
        getattr(dut, f"errors__{ERROR_SOURCES.index(source)}__valid").value = 0


@cocotb.test()
async def registers_hold_what_is_written(dut: bench.Dut) -> None:
    bus = await host(dut)
    assert await bus.read("magic") == MAGIC
    assert await bus.read("identity") == CONFIG.identity
    assert await bus.read("sources") == sources_identity()
    written = {
        name: random.getrandbits(32) | 1
        for name, register in REGISTERS.items()
        if register.access != Access.READ and name != "control" and not name.startswith(TRACE_PREFIX)
    }
    for name in random.sample(list(REGISTERS), len(REGISTERS)):  # writes to the others change nothing
        if name != "control":
            await bus.write(name, written.get(name, 0xFFFFFFFF))
    for name in REGISTERS:
        if name not in ("magic", "identity", "sources"):
            assert await bus.read(name) == written.get(name, 0), name
    assert int(dut.instr_addr.value) == written["instr_addr"]
    assert int(dut.dma_base.value) == (written["dma_base_lo"] | written["dma_base_hi"] << 32) & (1 << 40) - 1
    assert await bus.bus.read_dword(0xFFC) == 0
    offset = REGISTERS["dma_size"].offset
    await bus.bus.write(offset + 1, b"\xab\xcd")
    assert await bus.read("dma_size") == written["dma_size"] & 0xFF0000FF | 0xCDAB00


@cocotb.test()
async def the_registers_of_the_trace_are_the_rings(dut: bench.Dut) -> None:
    if not bench.config().trace_depth:
        return
    bus = await host(dut)
    for _ in range(3):
        values = {name: random.getrandbits(32) for name in ("event", "cycle", "count")}
        for name, value in values.items():
            getattr(dut, f"trace__{name}").value = value
        index = random.getrandbits(32)
        await bus.write("trace_at", index)
        await bench.cycles(dut, 3)
        assert int(dut.trace__at.value) == index
        assert {name: await bus.read(f"trace_{name}") for name in values} == values


@cocotb.test()
async def nothing_is_taken_during_reset(dut: bench.Dut) -> None:
    await bench.start(dut)
    dut.rst.value = 1
    await bench.rise(dut)
    for name in ("awvalid", "wvalid", "arvalid"):
        getattr(dut, f"axil__{name}").value = 1
    for _ in range(3):
        await bench.fall(dut)
        assert not dut.axil__awready.value and not dut.axil__wready.value and not dut.axil__arready.value
    await bench.rise(dut)
    dut.rst.value = 0
    await bench.cycles(dut, 3)
    await bench.fall(dut)
    assert dut.axil__bvalid.value and dut.axil__rvalid.value


@cocotb.test()
async def control_is_its_first_byte(dut: bench.Dut) -> None:
    """Start and abort depend only on the byte that contains them: the write must enable this byte."""
    bus = await host(dut)
    offset = REGISTERS["control"].offset

    async def write(value: int, strobe: int) -> None:
        await bench.rise(dut)
        dut.axil__awaddr.value, dut.axil__wdata.value, dut.axil__wstrb.value = offset, value, strobe
        dut.axil__awvalid.value = dut.axil__wvalid.value = dut.axil__bready.value = 1
        await bench.rise(dut)
        dut.axil__awvalid.value = dut.axil__wvalid.value = 0
        await bench.cycles(dut, 5)

    dut.idle.value = 7
    await write(CONTROL_START, 0b1110)
    assert await bus.read("status") == 0 and await bus.read("runs") == 0
    await write(CONTROL_START, 0b0001)
    assert await bus.read("status") == STATUS_BUSY and await bus.read("runs") == 1
    await write(CONTROL_ABORT, 0b1110)
    assert await bus.read("status") == STATUS_BUSY
    await write(CONTROL_ABORT, 0b0001)
    assert await bus.read("status") == STATUS_BUSY | Error.ABORTED << STATUS_ERROR_SHIFT


@cocotb.test()
async def a_run_ends_when_all_is_quiet(dut: bench.Dut) -> None:
    bus = await host(dut)
    for interrupt in (0, 1):
        dut.finished.value = 0
        await bus.write("irq_enable", interrupt)
        assert await bus.read("runs") == interrupt
        clears: list[int] = []
        watch = cocotb.start_soon(count_clears(dut, clears))
        await bus.begin()
        await bus.write("control", CONTROL_START)  # while busy: nothing happens
        for finished, quiet, fetch in ((0, 15, 1), (1, 7, 1), (1, 14, 1), (1, 15, 0)):
            dut.finished.value, dut.idle.value, dut.fetch_idle.value = finished, quiet, fetch
            await bench.cycles(dut, 5)
            assert await bus.read("status") == STATUS_BUSY
            assert not dut.irq.value
        dut.finished.value, dut.idle.value, dut.fetch_idle.value = 1, 15, 1
        await bench.cycles(dut, 5)
        assert await bus.read("status") == STATUS_DONE
        assert int(dut.irq.value) == interrupt
        assert not dut.run.value and not dut.halt.value and len(clears) == 1
        assert await bus.read("runs") == interrupt + 1
        watch.cancel()
    await bus.write("irq_enable", 0)
    assert not dut.irq.value
    dut.finished.value = 0
    await bus.write("irq_enable", 1)
    await bus.begin()
    assert not dut.irq.value


async def count_clears(dut: bench.Dut, into: list[int]) -> None:
    while True:
        await bench.fall(dut)
        if dut.clear.value:
            assert not dut.run.value
            into.append(1)


@cocotb.test()
async def counters_count(dut: bench.Dut) -> None:
    bus = await host(dut)
    ports = bench.config().ports
    lanes = (1 << ports) - 1
    for _ in range(2):  # the second run starts from 0 again
        dut.finished.value = 0
        await bus.begin()
        expected = dict.fromkeys(COUNTERS, 0)
        before = await bus.read("cycles_lo")
        await bench.rise(dut)
        for _ in range(random.randrange(50, 100)):
            bits = {"active": 3 + ports, "stalled": 3 + ports, "wait_token": 4, "read_beat": ports, "write_beat": 1}
            values = {name: random.getrandbits(count) for name, count in bits.items()}
            for name, value in values.items():
                getattr(dut, name).value = value
            expected["load_busy"] += (values["active"] & lanes).bit_count()
            expected["load_wait_memory"] += (values["stalled"] & lanes).bit_count()
            for unit in Unit:
                name = unit.name.lower()
                if unit != Unit.LOAD:
                    expected[f"{name}_busy"] += values["active"] >> ports - 1 + unit & 1
                    expected[f"{name}_wait_memory"] += values["stalled"] >> ports - 1 + unit & 1
                expected[f"{name}_wait_token"] += values["wait_token"] >> unit & 1
            expected["read_beats"] += values["read_beat"].bit_count()
            expected["write_beats"] += values["write_beat"]
            expected["cycles"] += 1
            await bench.rise(dut)
        for name in ("active", "stalled", "wait_token", "read_beat", "write_beat"):
            getattr(dut, name).value = 0
        dut.finished.value = 1
        await bench.cycles(dut, 5)
        dut.active.value = 15  # does not count any more
        counts = {name: await bus.read(f"{name}_lo") | await bus.read(f"{name}_hi") << 32 for name in COUNTERS}
        assert 0 < counts.pop("cycles") - expected.pop("cycles") - before < 10
        assert counts == expected
        dut.active.value = 0


@cocotb.test()
async def counters_ignore_what_the_last_run_left(dut: bench.Dut) -> None:
    """While `clear` resets the units, they still show signals of the last run, which the new run must not count."""
    bus = await host(dut)
    inputs = ("active", "stalled", "wait_token", "read_beat", "write_beat")
    for name in inputs:
        getattr(dut, name).value = (1 << len(getattr(dut, name))) - 1
    start = cocotb.start_soon(bus.write("control", CONTROL_START))
    while not dut.clear.value:
        await bench.fall(dut)
    await bench.rise(dut)
    for name in inputs:
        getattr(dut, name).value = 0
    await start
    dut.finished.value = 1
    await bench.cycles(dut, 5)
    assert await bus.read("status") == STATUS_DONE
    for name in COUNTERS:
        count = await bus.read(f"{name}_lo")
        assert count > 0 if name == "cycles" else count == 0, f"{name} is {count}"


@cocotb.test()
async def the_first_error_is_kept(dut: bench.Dut) -> None:
    bus = await host(dut)
    for attempt in range(8):
        dut.idle.value = 15
        await bus.begin()
        assert not dut.halt.value
        dut.idle.value = 13
        sources = random.sample(ERROR_SOURCES, random.randrange(1, 4))
        errors = {name: (random.choice(list(Error)[1:5]), random.getrandbits(24)) for name in sources}
        await pulse_error(dut, **errors)
        await bench.cycles(dut, 1)
        await bench.fall(dut)
        assert dut.halt.value
        await pulse_error(dut, load=(Error.READ, attempt))
        assert await bus.read("status") & 0xFF == STATUS_BUSY
        dut.idle.value = 15
        await bench.cycles(dut, 3)
        code, index = errors[min(sources, key=ERROR_SOURCES.index)]
        assert await bus.read("status") == STATUS_DONE | code << STATUS_ERROR_SHIFT
        assert await bus.read("error_index") == index
        assert dut.halt.value


@cocotb.test()
async def watchdog(dut: bench.Dut) -> None:
    bus = await host(dut)
    dut.oldest.value = 77
    for signal, value in (
        ("active", 1), ("active", 2), ("read_beat", bench.config().ports), ("write_beat", 1), ("write_answer", 1),
    ):  # fmt: skip
        await bus.begin(watchdog=50)
        for _ in range(5):
            await bench.cycles(dut, 35)
            getattr(dut, signal).value = value
            await bench.rise(dut)
            getattr(dut, signal).value = 0
        assert await bus.read("status") == STATUS_BUSY
        await bench.cycles(dut, 60)
        assert await bus.read("status") == STATUS_DONE | Error.WATCHDOG << STATUS_ERROR_SHIFT
        assert await bus.read("error_index") == 77
    await bus.begin(watchdog=0)
    await bench.cycles(dut, 3000)
    assert await bus.read("status") == STATUS_BUSY


@cocotb.test()
async def watchdog_ends_a_halt_that_never_becomes_quiet(dut: bench.Dut) -> None:
    bus = await host(dut)
    dut.idle.value = 7
    await bus.begin(watchdog=50)
    await pulse_error(dut, store=(Error.WRITE, 3))
    await bench.cycles(dut, 25)
    assert await bus.read("status") == STATUS_BUSY | Error.WRITE << STATUS_ERROR_SHIFT
    await bench.cycles(dut, 60)
    # A unit that is not idle is not reset, so no run starts until all units are idle.
    stuck = STATUS_DONE | STATUS_STUCK | Error.WRITE << STATUS_ERROR_SHIFT
    clears: list[int] = []
    cocotb.start_soon(count_clears(dut, clears))
    for _ in range(5):
        assert await bus.read("status") == stuck
        assert await bus.read("error_index") == 3
        await bus.write("control", CONTROL_START)
        await bus.write("control", CONTROL_ABORT)
        assert dut.halt.value and not dut.run.value and not clears
        assert await bus.read("runs") == 1
    dut.idle.value = 15
    await bench.cycles(dut, 3)
    assert await bus.read("status") == stuck & ~STATUS_STUCK
    await bus.begin()
    assert len(clears) == 1 and not dut.halt.value


@cocotb.test()
async def watchdog_gives_a_halted_run_its_time_once_more(dut: bench.Dut) -> None:
    """When the watchdog ends a run, it starts anew: the units have its time again to become idle."""
    bus = await host(dut)
    for attempt in range(2):
        dut.idle.value = 7
        await bus.begin(watchdog=80)
        while not dut.halt.value:
            await bench.fall(dut)
        expired = Error.WATCHDOG << STATUS_ERROR_SHIFT
        await bench.cycles(dut, 60)
        assert await bus.read("status") == STATUS_BUSY | expired
        await bench.cycles(dut, 30)
        assert await bus.read("status") == STATUS_DONE | STATUS_STUCK | expired
        dut.idle.value = 15
        await bench.cycles(dut, 3)
        assert await bus.read("status") == STATUS_DONE | expired
        assert await bus.read("runs") == attempt + 1


@cocotb.test()
async def an_abort_ends_a_run(dut: bench.Dut) -> None:
    bus = await host(dut)
    dut.oldest.value = 0xFEDCBA98
    for busy in (7, 15):
        dut.finished.value = 0
        await bus.begin()
        await bench.cycles(dut, random.randrange(20))
        dut.idle.value = busy
        await bus.write("control", CONTROL_ABORT | CONTROL_START)
        await bench.cycles(dut, 1)  # the abort passes through a register
        assert dut.halt.value and not dut.run.value
        dut.idle.value = 15
        await bench.cycles(dut, 3)
        assert await bus.read("status") == STATUS_DONE | Error.ABORTED << STATUS_ERROR_SHIFT
        assert await bus.read("error_index") == 0xFEDCBA98
    dut.finished.value = 0
    await bus.begin()
    dut.finished.value = 1
    await bench.cycles(dut, 5)
    await bus.write("control", CONTROL_ABORT)  # too late: the run has ended without an error
    await bench.cycles(dut, 3)
    assert await bus.read("status") == STATUS_DONE
    # Write the abort directly behind the start, while the pipeline is reset.
    dut.finished.value = 0
    await bench.rise(dut)
    dut.axil__bready.value, dut.axil__wstrb.value = 1, 15
    dut.axil__awvalid.value = dut.axil__wvalid.value = 1
    dut.axil__awaddr.value = REGISTERS["control"].offset
    for value in (CONTROL_START, CONTROL_ABORT):
        dut.axil__wdata.value = value
        await bench.fall(dut)
        assert dut.axil__awready.value and dut.axil__wready.value
        await bench.rise(dut)
    dut.axil__awvalid.value = dut.axil__wvalid.value = 0
    dut.idle.value = 7
    for _ in range(6):
        await bench.cycles(dut, 1)
        await bench.fall(dut)
        assert dut.busy.value and dut.halt.value and not dut.run.value
        await bench.rise(dut)
    dut.idle.value = 15
    await bench.cycles(dut, 3)
    assert await bus.read("status") == STATUS_DONE | Error.ABORTED << STATUS_ERROR_SHIFT


@cocotb.test()
async def a_lease_that_is_not_renewed_ends_a_run(dut: bench.Dut) -> None:
    bus = await host(dut)
    dut.oldest.value = 55
    await bus.write("lease", 60)
    await bench.cycles(dut, 200)  # without a run; the lease counts from the start of a run
    await bus.begin()
    dut.active.value = 15  # progress does not help
    for _ in range(6):
        await bench.cycles(dut, 40)
        assert await bus.read("status") == STATUS_BUSY and dut.run.value
        await bus.write("lease", 60)
    dut.idle.value = 7
    await bench.cycles(dut, 55)
    assert dut.run.value and not dut.halt.value
    await bench.cycles(dut, 15)
    assert dut.halt.value and not dut.run.value
    lapsed = Error.LEASE << STATUS_ERROR_SHIFT
    assert await bus.read("status") == STATUS_BUSY | lapsed
    dut.idle.value = 15
    await bench.cycles(dut, 3)
    assert await bus.read("status") == STATUS_DONE | lapsed
    assert await bus.read("error_index") == 55
    # Give a lease up, and take another one during the run.
    await bus.write("lease", 60)
    await bus.begin()
    await bus.write("lease", 0)
    await bench.cycles(dut, 300)
    assert await bus.read("status") == STATUS_BUSY
    await bus.write("lease", 30)
    await bench.cycles(dut, 50)
    assert await bus.read("status") == STATUS_DONE | lapsed
    # A lease has no effect on a run that has ended without an error.
    dut.finished.value = 1
    await bus.write("control", CONTROL_START)
    await bench.cycles(dut, 100)
    assert await bus.read("status") == STATUS_DONE


@cocotb.test()
async def registers_of_a_run_are_locked(dut: bench.Dut) -> None:
    bus = await host(dut)

    async def writes(locked: bool) -> None:
        for name, register in REGISTERS.items():
            before = await bus.read(name)
            if register.access == Access.SETUP:
                await bus.write(name, before ^ 0xFFFFFFFF)
                assert await bus.read(name) == before ^ (0 if locked else 0xFFFFFFFF), name

    await writes(locked=False)
    await bus.begin()
    await writes(locked=True)
    dut.idle.value = 0
    await bus.write("watchdog", 50)  # the watchdog register is not locked
    await bus.write("control", CONTROL_ABORT)
    await bench.cycles(dut, 60)
    assert await bus.read("status") & STATUS_STUCK
    await writes(locked=True)
    dut.idle.value = 15
    await bench.cycles(dut, 3)
    await writes(locked=False)
