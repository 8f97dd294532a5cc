"""Random programs leave the same bytes on the RTL and on the functional simulator."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from programs import CONFIGS, TestProgram, random_program

from celosia.hw.isa import Opcode
from celosia.sim.build import BuildError, compiler, verilator_root
from celosia.sim.compare import first_difference
from celosia.sim.device import DeviceError
from celosia.sim.fsim import FunctionalDevice
from celosia.sim.rtlsim import ZYNQ_HP, MemoryModel, RtlDevice, random_stalls

pytestmark = pytest.mark.rtl


@cache
def rtl(name: str) -> RtlDevice:
    try:
        compiler(), verilator_root()
    except BuildError as error:
        pytest.skip(str(error))
    return RtlDevice(CONFIGS[name], quiet=True)


def check(program: TestProgram, device: RtlDevice, memory: MemoryModel) -> None:
    device.use(memory)
    expected = program.run(FunctionalDevice(program.cfg))
    found = program.run(device)
    if not np.array_equal(expected, found):
        image = program.loaded()
        pytest.fail(str(first_difference(FunctionalDevice(program.cfg), device, image, 0, len(program.instructions))))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("memory", ["zynq-hp", "random"])
def test_same_bytes(name: str, memory: str) -> None:
    cfg = CONFIGS[name]
    for seed in range(20):
        program = random_program(cfg, seed, count=30, align=1 if seed % 2 else None)
        check(program, rtl(name), ZYNQ_HP if memory == "zynq-hp" else random_stalls(seed))


def test_long_program() -> None:
    check(random_program(CONFIGS["4x4"], 1000, count=250), rtl("4x4"), ZYNQ_HP)


@pytest.mark.parametrize("fault", ["opcode", "size", "own bit", "address"])
def test_same_error(fault: str) -> None:
    """A faulty instruction in the middle of a program ends both with the same words about the same instruction."""
    device = rtl("4x4")
    device.use(ZYNQ_HP)
    for seed in range(10):
        program = random_program(CONFIGS["4x4"], seed, count=40)
        moves = [i for i, it in enumerate(program.instructions) if it.opcode in (Opcode.LOAD, Opcode.STORE)]
        number = moves[len(moves) // 2 + seed % 3]
        fields = program.instructions[number].fields
        if fault == "size":
            fields["y_size"] = 0
        elif fault == "own bit":
            fields["post"] |= 1 << program.instructions[number].unit
        elif fault == "address":
            fields["dram_addr"] = len(program.image) - 1
        image = program.loaded()
        if fault == "opcode":
            image[number * 64] |= 7
        reports = []
        for each in (FunctionalDevice(program.cfg), device):
            each.allocate(len(image))
            each.write(0, image)
            with pytest.raises(DeviceError) as error:
                each.run(0, len(program.instructions), 1_000_000)
            reports.append(str(error.value).replace(";", ":").split(":")[:2])
        assert reports[0] == reports[1]
        assert reports[0][0] == f"instruction {number}"


def test_programs_without_tokens_are_found_out() -> None:
    """The test itself would see a machine that ignores tokens."""
    wrong = 0
    for seed in range(10):
        program = random_program(CONFIGS["4x4"], seed, count=60, tokens=False)
        device = rtl("4x4")
        device.use(ZYNQ_HP)
        wrong += not np.array_equal(program.run(FunctionalDevice(program.cfg)), program.run(device))
    assert wrong >= 5


def test_cycles_depend_on_the_memory_model_only() -> None:
    program = random_program(CONFIGS["4x4"], 7, count=40)
    device = rtl("4x4")
    device.use(ZYNQ_HP)
    program.run(device)
    first = device.run(program.instr_addr, len(program.instructions), 1_000_000).cycles
    again = device.run(program.instr_addr, len(program.instructions), 1_000_000).cycles
    device.use(random_stalls(3, stall=0.5))
    slower = device.run(program.instr_addr, len(program.instructions), 1_000_000).cycles
    assert first is not None and slower is not None
    assert first == again < slower
