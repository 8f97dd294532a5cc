"""Random programs leave the same bytes on the RTL and on the functional simulator."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from configs import CONFIGS, VARIED
from first_difference import first_difference
from programs import Draws, Generator, Instruction, TestProgram, random_program, synchronise
from simulators import rtl_device
from thorough import some

from celosia.hw.spec.isa import VECTOR_LOOPS, ASource, Buffer, Destination, Opcode
from celosia.sim.device import DeviceError
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl.rtlsim import ZYNQ_HP, MemoryModel, RtlDevice, random_stalls

pytestmark = pytest.mark.rtl


@cache
def rtl(name: str) -> RtlDevice:
    return rtl_device(CONFIGS[name])


def check(program: TestProgram, device: RtlDevice, memory: MemoryModel) -> None:
    device.use(memory)
    expected = program.run(FunctionalDevice(program.cfg))
    actual = program.run(device)
    if not np.array_equal(expected, actual):
        image = program.loaded()
        pytest.fail(str(first_difference(FunctionalDevice(program.cfg), device, image, 0, len(program.instructions))))


MODELS = ("zynq-hp", "random")


@pytest.mark.parametrize(
    ("name", "memory"), some(product(CONFIGS, MODELS), [(name, MODELS[n % 2]) for n, name in enumerate(VARIED)])
)
def test_same_bytes(name: str, memory: str) -> None:
    cfg = CONFIGS[name]
    for seed in range(20):
        program = random_program(cfg, seed, count=30, align=1 if seed % 2 else None)
        check(program, rtl(name), ZYNQ_HP if memory == "zynq-hp" else random_stalls(seed))


def test_long_program() -> None:
    check(random_program(CONFIGS["4x4"], 1000, count=250), rtl("4x4"), ZYNQ_HP)


@pytest.mark.parametrize(("rows", "entries", "first"), [(30, 3, 30), (30, 3, 25), (246, 3, 0), (197, 20, 0)])
def test_behind_the_rows_of_a_softmax(rows: int, entries: int, first: int) -> None:
    """A VECTOR writes the rows of vin that a running softmax reads, and results are right.

    The rows begin at the first entry that is written, behind it, or wrap around the end of vin. The last entry alone is
    read together with the one before it.
    """
    cfg = CONFIGS["4x4-softmax2"]
    generator, ones = Generator(cfg, Draws(1), align=1), {f"extent_{loop}": 1 for loop in VECTOR_LOOPS}
    softmax_fields = dict(
        softmax=1, a_source=ASource.VIN, destination=Destination.OUT, extent_n=entries, a_n=1,
        extent_x=60 // entries, a_base=rows, a_x=entries, dst_n=1, dst_x=entries, clip_lo=-128, clip_hi=127,
        zero_point=-128,
    )  # fmt: skip
    behind = dict(destination=Destination.VIN, extent_x=60, a_x=1, dst_base=first, dst_x=1, clip_lo=-128, clip_hi=127)
    flush = dict(dram_addr=generator.output.start, x_size=60, y_size=1, z_size=1, sram_x=1)
    program = [
        *generator.prologue(), *(Instruction(Opcode.VECTOR, ones | fields) for fields in (softmax_fields, behind)),
        Instruction(Opcode.STORE, flush),
    ]  # fmt: skip
    synchronise(cfg, program)
    check(TestProgram(cfg, program, generator.image, 0, generator.output), rtl("4x4-softmax2"), ZYNQ_HP)


@pytest.mark.parametrize("fault", ["opcode", "size", "own bit", "address"])
def test_same_error(fault: str) -> None:
    """A faulty instruction ends both devices with the same message about the same instruction."""
    device = rtl("4x4")
    device.use(ZYNQ_HP)
    for seed in range(10):
        program = random_program(CONFIGS["4x4"], seed, count=40)
        moves = [
            i for i, instruction in enumerate(program.instructions) if instruction.opcode in (Opcode.LOAD, Opcode.STORE)
        ]
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
        for tested in (FunctionalDevice(program.cfg), device):
            tested.allocate(len(image))
            tested.write(0, image)
            with pytest.raises(DeviceError) as error:
                tested.run(0, len(program.instructions), 1_000_000)
            reports.append(str(error.value).replace(";", ":").split(":")[:2])
        assert reports[0] == reports[1]
        assert reports[0][0] == f"instruction {number}"


def test_programs_without_tokens_are_found_out() -> None:
    """The comparison detects programs without tokens, and so would detect hardware that ignores tokens."""
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


@pytest.mark.parametrize("pads", range(4))
def test_a_padded_table_is_whole_before_it_is_read(pads: int) -> None:
    """VECTOR gets its token only after padding has written the whole table, which takes the hardware many cycles.

    pads: rows of padding after the last row, all in the same table.
    """
    cfg = CONFIGS["4x4"]
    generator = Generator(cfg, Draws(pads))
    table = dict(buffer=Buffer.LUT, sram_base=1, dram_addr=generator.data.start, x_size=1, y_size=1, z_size=1)
    look_up = dict(
        a_source=ASource.VIN, destination=Destination.OUT, lookup=1, table=1, clip_lo=-128, clip_hi=127,
        **{f"extent_{loop}": 1 for loop in VECTOR_LOOPS}, a_x=1, dst_x=1,
    )  # fmt: skip
    store = dict(dram_addr=generator.output.start, x_size=cfg.out_depth, y_size=1, z_size=1, sram_x=1)
    instructions = [
        *generator.prologue(),
        Instruction(Opcode.LOAD, table | dict(pad_top=3, pad_bottom=pads)),
        Instruction(Opcode.VECTOR, look_up | dict(extent_x=cfg.out_depth)),
        Instruction(Opcode.STORE, store),
    ]
    synchronise(cfg, instructions)
    check(TestProgram(cfg, instructions, generator.image, 0), rtl("4x4"), ZYNQ_HP)
