"""Compare the timing model with the RTL: its constants, single instructions, random programs, whole models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from itertools import count, product, zip_longest
from typing import Any

import numpy as np
import pytest
import timing_accuracy
from configs import CONFIGS, VARIED
from numpy.typing import NDArray
from programs import Instruction, TestProgram, random_config, random_program
from simulators import rtl_device
from thorough import some, tries

import celosia
from celosia.compiler.program import Program
from celosia.hw.boards.boards import BOARDS
from celosia.hw.boards.memory import IDEAL, ZYNQ_HP, MemoryModel, random_stalls
from celosia.hw.spec import pipeline
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Opcode,
    Unit,
    instruction_bytes,
    load_channels,
)
from celosia.hw.spec.pipeline import BURST_BOUNDARY, MAX_BURST
from celosia.hw.spec.regs import COUNTERS
from celosia.hw.spec.scratchpads import scratchpads
from celosia.models import demo_images, demo_model_path
from celosia.sim.device import Counters, Device, DeviceError
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl.rtlsim import RtlDevice
from celosia.sim.timing import Timing, compute, copies, machine, ports, predict
from celosia.sim.timing import fetch_timing as fetch
from celosia.sim.timing import memory_timing as timing_memory
from celosia.sim.timing.demand import count_beats_and_bursts, demand
from celosia.sim.timing.memory_timing import Channel, ReadBursts, SharedChannel, Transfers
from celosia.sim.timing.timed import TimedDevice
from celosia.sim.timing.work import RegularCycles, Steps

# Instructions -------------------------------------------------------------------------------------------------


def load(x: int, y: int = 1, dram_y: int = 0, buffer: Buffer = Buffer.INP, **fields: int) -> Instruction:
    defaults: dict[str, int] = dict(
        x_size=x, y_size=y, z_size=1, dram_y=dram_y, buffer=buffer, dram_addr=8192, sram_x=1
    )
    return Instruction(Opcode.LOAD, defaults | fields)


def store(x: int, y: int = 1, dram_y: int = 0, **fields: int) -> Instruction:
    defaults = dict(x_size=x, y_size=y, z_size=1, dram_y=dram_y, dram_addr=65536, sram_x=1)
    return Instruction(Opcode.STORE, defaults | fields)


def gemm(*extents: int, **fields: int) -> Instruction:
    """Return a GEMM with these extents; the others are 1."""
    return Instruction(
        Opcode.GEMM, {f"extent_{loop}": n for loop, n in zip_longest(GEMM_LOOPS, extents, fillvalue=1)} | fields
    )


def vector(*extents: int, **fields: int) -> Instruction:
    return Instruction(
        Opcode.VECTOR, {"destination": 1} | {f"extent_{loop}": n for loop, n in zip(VECTOR_LOOPS, extents)} | fields
    )


EXACT = {
    "one element": [load(1)],
    "a long row": [load(500)],
    "short rows": [load(2, 60, dram_y=64)],
    "rows of a burst": [load(32, 16, dram_y=1024)],
    "rows of several bursts": [load(40, 12, dram_y=1024)],
    "rows across a page": [load(40, 3, dram_y=4096, dram_addr=3 * 4096 - 64)],
    "a block with padding": [load(10, 10, dram_y=256, pad_left=1, pad_right=2, pad_top=3, pad_bottom=1)],
    "more padding than data": [load(2, 2, dram_y=64, pad_top=20, pad_left=10)],
    "weights": [load(30, buffer=Buffer.WGT)],
    "parameters": [load(8, buffer=Buffer.PAR)],
    "a table": [load(1, buffer=Buffer.LUT)],
    "padded tables": [
        load(1, buffer=Buffer.LUT, pad_top=3, pad_bottom=2),
        load(4),
        load(1, buffer=Buffer.LUT, pad_left=1),
        load(20),
    ],
    "accumulators": [load(60, buffer=Buffer.ACC)],
    "widened accumulators": [load(60, buffer=Buffer.ACC, widen=1)],
    "two loads": [load(64), load(64)],
    "a load behind a slow one": [load(200, buffer=Buffer.ACC, widen=1), load(1)],
    "gemm": [gemm(2, 3, 4, 5, 1, 2)],
    "gemms": [gemm(1, 3, 4, 5, 1, 2), gemm(1, 1, 1, 1, 1, 1), gemm(1, 1, 2, 1, 1, 1)],
    "short gemms": [gemm(1, 1, 1, 2, 1, 1) for _ in range(40)],
    "vector": [vector(1, 5, 5, 3, 3)],
    "short vectors": [vector(1, 1, 3, 1, 1) for _ in range(20)],
    "vectors to accumulators": [vector(1, 1, 10, 1, 1, destination=0) for _ in range(5)],
    "one piece": [store(1)],
    "a long row of pieces": [store(60)],
    "short rows of pieces": [store(2, 30, dram_y=64)],
    "long rows of pieces": [store(16, 12, dram_y=128)],
    "stores": [store(5) for _ in range(20)],
    "a chain": [
        load(30, post=1 << Unit.GEMM),
        gemm(1, 3, 4, 5, 1, 2, wait=1 << Unit.LOAD, post=1 << Unit.VECTOR),
        vector(1, 1, 30, 1, 1, wait=1 << Unit.GEMM, post=1 << Unit.STORE),
        store(30, wait=1 << Unit.VECTOR),
    ],
    "both directions": [load(400), store(60), load(300), store(64), load(64, 4, dram_y=512), store(8, 8, dram_y=64)],
}
"""Programs for which the model predicts each instruction's start and end exactly.

Together they depend on every constant of the model.
"""
ACC, OUT, INP, VIN = Destination
HALF = CONFIGS["taps3"].acc_depth // 2
RESIDUAL = dict(b_source=BSource.VIN, rescale_add=1)
PACKED = dict(buffer=Buffer.WGT, expand=1)
EXACT_PACKED = {
    "packed weights": [load(24, **PACKED)],
    "rows of packed weights": [load(8, 6, dram_y=1024, **PACKED)],
    "packed weights with padding": [load(16, pad_left=3, pad_right=1, pad_top=1, **PACKED)],
    "packed weights and others": [load(8 + 8 * (n % 2), **(PACKED if n % 3 else {})) for n in range(6)],
    "codebooks": [
        load(*(256, 1) if n % 3 else (48, 2), buffer=Buffer.BOOK) if n % 2 else load(16, **PACKED) for n in range(5)
    ],
    "packed weights for gemm": [
        load(16, post=1 << Unit.GEMM, **PACKED),
        gemm(1, 3, 4, 5, 1, 2, wait=1 << Unit.LOAD, post=1 << Unit.VECTOR),
        vector(1, 1, 30, 1, 1, wait=1 << Unit.GEMM),
    ],
}
PACKED_CONFIGS = [name for name, cfg in CONFIGS.items() if cfg.weight_bits < 8]
EXACT_VECTOR = {
    "taps": [vector(1, 5, 5, 3, 1, a_source=ASource.VIN, taps=1)],
    "taps, one step each": [vector(1, 4, 6, 1, 1, a_source=ASource.VIN, taps=1) for _ in range(5)],
    "taps and a copy": [vector(1, 1, 8, 1, 1, a_source=ASource.VIN, taps=taps) for taps in (1, 0, 1)],
    "a residual": [vector(1, 1, 1, 1, 1, **RESIDUAL)],
    "residuals": [vector(1, 1, 40, 1, 1, **RESIDUAL)],
    "residuals of windows": [vector(1, 4, 6, 3, 1, **RESIDUAL)],
    "residuals after another": [vector(1, 1, n, 1, 1, **RESIDUAL) for n in (3, 1, 20, 2, 40)],
    "residuals and others": [vector(1, 2, n, 2, 1, **(RESIDUAL if n % 2 else {})) for n in (5, 4, 1, 2, 7, 30, 3, 2)],
    "a short one behind residuals": [vector(1, 1, 12, 1, 1, **RESIDUAL), *(vector(1, 1, 1, 1, 1) for _ in range(9))],
    "residuals to accumulators": [vector(1, 1, 7, 1, 1, destination=ACC, **RESIDUAL) for _ in range(3)],
    "to inp": [vector(1, 1, 10, 1, 1, destination=INP) for _ in range(5)],
    "to vin": [vector(1, 1, 10, 1, 1, destination=VIN) for _ in range(5)],
    "to vin, from there": [vector(1, 1, 10, 1, 1, destination=VIN, a_source=ASource.VIN) for _ in range(5)],
    "to vin, with a residual": [vector(1, 1, 10, 1, 1, destination=VIN, **RESIDUAL) for _ in range(5)],
    "from vin to accumulators": [vector(1, 1, 9, 1, 1, destination=ACC, a_source=ASource.VIN) for _ in range(5)],
    "taps, loaded": [load(20, buffer=Buffer.TAP, post=1 << Unit.VECTOR),
                     vector(1, 3, 5, 3, 1, a_source=ASource.VIN, taps=1, wait=1 << Unit.LOAD)],
    "a load beside a vector to its scratchpad": [load(60), vector(1, 2, 60, 1, 1, destination=INP)],
    "a load of rows beside it": [load(4, 30, dram_y=64), vector(1, 2, 60, 1, 1, destination=INP)],
    "a padded load beside it": [load(20, pad_top=4, pad_left=30), vector(1, 2, 40, 1, 1, destination=INP)],
    "a load beside windows": [load(120), vector(1, 2, 30, 3, 1, destination=INP)],
    "a load beside residuals": [load(120), vector(1, 2, 30, 1, 1, destination=INP, **RESIDUAL)],
    "a load of vin": [load(120, buffer=Buffer.VIN), *(vector(1, 2, 20, 1, 1, destination=VIN) for _ in range(3))],
    "gemm takes turns with vector": [gemm(1, 1, 30, 2, acc_x=1, accumulate=1), vector(1, 1, 30, 1, 1, a_x=1)],
    "gemm keeps vector from its bank": [gemm(1, 9, 30, acc_x=1, accumulate=1), vector(1, 1, 30, 1, 1, a_x=1)],
    "gemms do": [*(gemm(1, n, 30, acc_x=1, accumulate=1) for n in (2, 3, 5)), vector(1, 3, 30, 1, 1, a_x=1)],
    "gemm in the other bank": [gemm(1, 9, 30, acc_x=1, accumulate=1), vector(1, 1, 30, 1, 1, a_x=1, a_base=HALF)],
    "gemm goes over to the bank": [
        gemm(1, 1, 60, 2, acc_x=1, accumulate=1), vector(1, 1, 30, 1, 1, a_x=1, a_base=HALF), vector(1, 1, 9, 1, 1)
    ],
    "vector goes over to the bank": [
        gemm(1, 9, 30, acc_x=1, accumulate=1), vector(1, 1, 40, 1, 1, a_x=1, a_base=HALF), vector(1, 1, 9, 1, 1)
    ],
    "gemm writes where vector does": [
        gemm(1, 9, 30, 2, acc_x=1), vector(1, 1, 30, 1, 1, destination=ACC, dst_x=1), vector(1, 1, 4, 1, 1)
    ],
    "gemm keeps it from writing": [
        gemm(1, 9, 30, acc_x=1), vector(1, 1, 30, 1, 1, destination=ACC, dst_x=1), vector(1, 1, 4, 1, 1)
    ],
    "gemm beside residuals": [gemm(1, 9, 30, acc_x=1, accumulate=1), vector(1, 1, 30, 1, 1, a_x=1, **RESIDUAL)],
    "gemm beside windows": [gemm(1, 9, 30, 2, acc_x=1, accumulate=1), vector(1, 1, 30, 3, 1, a_x=1)],
    "gemm beside residuals, in turns": [
        gemm(1, 9, 20, 3, acc_x=1, accumulate=1), vector(1, 2, 30, 1, 1, a_x=1, **RESIDUAL), vector(1, 1, 9, 1, 1)
    ],
    "gemm beside residuals of windows": [
        gemm(1, 9, 20, 2, acc_x=1, accumulate=1), vector(1, 1, 30, 3, 1, a_x=1, **RESIDUAL), vector(1, 1, 9, 1, 1)
    ],
    "many to accumulators": [
        gemm(1, 9, 60), vector(1, 4, 30, 1, 1, destination=ACC, a_source=ASource.VIN),
        vector(1, 1, 9, 1, 1),
    ],
    "many windows to accumulators": [
        gemm(1, 9, 60), vector(1, 4, 30, 2, 1, destination=ACC, a_source=ASource.VIN),
        vector(1, 1, 9, 1, 1),
    ],
    "many to accumulators, in turns": [
        gemm(1, 9, 60, 2), vector(1, 4, 30, 1, 1, destination=ACC, a_source=ASource.VIN),
        vector(1, 1, 9, 1, 1),
    ],
    "gemm comes in the middle of residuals": [
        gemm(1, 9, 30, acc_x=1, acc_base=HALF), gemm(1, 9, 30, acc_x=1, accumulate=1),
        vector(1, 9, 30, 1, 1, a_x=1, **RESIDUAL), vector(1, 1, 9, 1, 1),
    ],
    "gemm comes behind a load that was late": [
        load(60, post=1 << Unit.GEMM), gemm(1, 9, 30, acc_x=1, wait=1 << Unit.LOAD, post=1 << Unit.VECTOR),
        load(150, post=1 << Unit.GEMM), vector(1, 1, 30, 1, 1, a_x=1, wait=1 << Unit.GEMM),
        gemm(1, 1, 30, acc_x=1, acc_base=HALF, accumulate=1, wait=1 << Unit.LOAD),
        gemm(1, 4, 30, acc_x=1, accumulate=1), vector(1, 3, 30, 1, 1, a_x=1),
    ],
    "gemm comes behind a load beside vector": [
        load(20, post=1 << Unit.GEMM), gemm(1, 1, 30, acc_x=1, wait=1 << Unit.LOAD, post=1 << Unit.VECTOR),
        load(60, post=1 << Unit.GEMM), vector(1, 9, 30, 1, 1, a_x=1, wait=1 << Unit.GEMM),
        gemm(1, 4, 30, acc_x=1, accumulate=1, wait=1 << Unit.LOAD),
    ],
    "a load of another": [load(120, buffer=Buffer.VIN), vector(1, 4, 40, 1, 1, destination=INP)],
}  # fmt: skip
"""Programs like EXACT for a vector unit with all optional parts."""
ROWS = dict(softmax=1, a_source=ASource.VIN, a_n=1)
NORM = dict(norm=1, a_source=ASource.VIN, requantise=1)
EXACT_NORM = {
    "norms": [
        vector(3, 1, 5, 1, 1, **NORM), vector(20, 1, 2, 1, 1, **NORM), vector(1, 1, 9, 1, 1),
        *(vector(3, 1, 4, 1, 1, destination=to, **NORM) for to in Destination), vector(1, 2, 1, 1, 1),
    ],
    "the longest rows, and as many as may be": [vector(512, 1, 3, 1, 1, **NORM), vector(1, 1, 64, 1, 1, **NORM)],
    "a norm between residuals": [
        vector(1, 1, 12, 1, 1, **RESIDUAL), vector(3, 1, 5, 1, 1, **NORM), vector(1, 1, 12, 1, 1, **RESIDUAL)
    ],
    "a softmax beside loads": [vector(3, 1, 21, 1, 1, a_x=3, destination=Destination.INP, **ROWS), load(500)],
    "beside a softmax": [
        vector(3, 1, 21, 1, 1, a_x=3, destination=Destination.INP, **ROWS), vector(1, 4, 5, 1, 1, a_x=1),
        gemm(1, 9, 30, acc_x=1, accumulate=1), vector(1, 1, 30, 1, 1, a_x=1), vector(1, 1, 2, 1, 1),
        vector(1, 1, 3, 1, 1, destination=Destination.VIN), vector(1, 1, 2, 1, 1),
    ],
    "beside the last of some": [
        *[vector(2, 1, rows, 1, 1, a_x=2, destination=Destination.INP, **ROWS) for rows in (9, 16, 12)],
        vector(1, 1, 9, 3, 1), vector(1, 1, 2, 1, 1), vector(2, 1, 9, 1, 1, a_x=2, destination=Destination.INP, **ROWS),
    ],
    "behind the rows of a softmax": [
        vector(3, 1, 21, 1, 1, a_x=3, destination=Destination.INP, **ROWS), vector(1, 1, 5, 1, 1, a_x=1),
        gemm(1, 9, 30, acc_x=1, accumulate=1), vector(1, 1, 63, 1, 1, a_x=1, dst_x=1, destination=VIN), load(200),
        vector(3, 1, 21, 1, 1, a_x=3, destination=Destination.INP, **ROWS),
    ],
    "in front of rows, and beyond them": [
        *[vector(2, 1, rows, 1, 1, a_base=7, a_x=2, **ROWS) for rows in (9, 20)],
        vector(1, 1, 60, 2, 1, a_x=1, dst_x=1, destination=VIN), vector(1, 1, 4, 1, 1, dst_x=1, destination=VIN),
        vector(1, 1, 9, 1, 1, a_x=1, a_source=ASource.VIN),
    ],
    "behind the last rows": [
        load(700, post=1 << Unit.VECTOR), vector(1, 1, 40, 1, 1, a_x=1, **ROWS),
        vector(1, 1, 40, 1, 1, wait=1, a_x=1, dst_x=1, destination=VIN), load(120, buffer=Buffer.VIN),
    ],
    "a norm beside gemm": [
        gemm(1, 9, 30, acc_x=1, accumulate=1), vector(3, 1, 5, 1, 1, **NORM), vector(1, 1, 30, 1, 1, a_x=1)
    ],
}  # fmt: skip
EXACT_SOFTMAX = {
    "a softmax alone": [vector(3, 1, 5, 1, 1, a_x=3, **ROWS)],
    "softmaxes between others": [
        vector(1, 4, 5, 1, 1, a_x=1), vector(4, 1, 40, 1, 1, a_x=4, **ROWS), vector(1, 4, 5, 1, 1, a_x=1),
        vector(4, 1, 9, 1, 1, a_x=4, **ROWS), vector(1, 4, 5, 1, 1, a_x=1),
    ],
    "softmaxes one behind another": [
        *[vector(3, 1, rows, 1, 1, a_x=3, **ROWS) for rows in (5, 40, 8, 9)], vector(2, 1, 9, 1, 1, a_x=2, **ROWS),
        *[vector(1, 1, rows, 1, 1, a_x=1, **ROWS) for rows in (1, 2, 30)],
    ],
}  # fmt: skip
SPREAD = dict(buffer=Buffer.WGT, spread=1)
EXACT_SPREAD = {
    "weights behind activations": [load(60), load(4, buffer=Buffer.WGT), load(30), load(4, buffer=Buffer.WGT)],
    "spread weights behind activations": [load(60), load(4, **SPREAD), load(4, **SPREAD), load(30)],
    "weights in both ways": [load(3, **(SPREAD if n // 2 % 2 else {"buffer": Buffer.WGT})) for n in range(8)],
    "padded weights in both ways": [
        load(2, 2, dram_y=512, pad_top=1, pad_right=2, **(SPREAD if n % 2 else {"buffer": Buffer.WGT}))
        for n in range(4)
    ],
}
SPREAD_CONFIGS = [name for name, cfg in CONFIGS.items() if scratchpads(cfg)["wgt"].spread]
SOFTMAX_CONFIGS = [name for name, cfg in CONFIGS.items() if cfg.softmax]
NORM_CONFIGS = [name for name, cfg in CONFIGS.items() if cfg.norm and cfg.forward]  # with all destinations
EXACT_CONFIGS = ("4x4", "8x8-bus16", "8x4")
VECTOR_CONFIGS = ("taps3", "8x4-batch2-taps5", "taps3-ports2")
WEIGHTS = Buffer.WGT
TWO_CHANNELS = {
    "both lanes": [load(400), load(30, buffer=WEIGHTS), load(8, buffer=Buffer.PAR), load(60), load(30, buffer=WEIGHTS)],
    "short loads behind a long one of the other lane": [
        load(500), load(1, buffer=WEIGHTS), load(1, buffer=Buffer.PAR), load(1),
    ],
    "and the other way round": [load(32, buffer=WEIGHTS), load(1), load(2), load(32, buffer=Buffer.PAR), load(1)],
    "lanes that take turns": [load(2, buffer=(Buffer.INP, WEIGHTS)[i // 2 % 2]) for i in range(60)],
    "a chain through both lanes": [
        load(30),
        load(4, buffer=WEIGHTS, post=1 << Unit.GEMM),
        load(200),
        load(2, buffer=Buffer.PAR, post=1 << Unit.VECTOR),
        gemm(1, 3, 4, 5, 1, 2, wait=1 << Unit.LOAD, post=1 << Unit.VECTOR),
        vector(1, 1, 30, 1, 1, wait=1 << Unit.LOAD | 1 << Unit.GEMM, post=1 << Unit.STORE),
        store(30, wait=1 << Unit.VECTOR),
    ],
}  # fmt: skip
"""Programs like EXACT for a LOAD with two channels."""
TWO_PORTS = ("4x4-ports2", "2x8x4-bus16-ports2", "taps3-ports2")


def program_of(cfg: Config, instructions: list[Instruction]) -> TestProgram:
    return TestProgram(cfg, instructions, np.zeros(1 << 17, np.uint8), 0)


def timing_of(program: TestProgram, memory: MemoryModel = ZYNQ_HP) -> Timing:
    size = instruction_bytes(program.cfg)
    code = b"".join(word.to_bytes(size, "little") for word in program.words())
    return predict(program.cfg, code, memory, program.instr_addr)


# On the RTL ---------------------------------------------------------------------------------------------------


@cache
def opened(config: str) -> RtlDevice:
    return rtl_device(CONFIGS.get(config) or PRESETS[config])


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    opened.cache_clear()


def measured(device: RtlDevice, program: TestProgram, memory: MemoryModel = ZYNQ_HP) -> Counters:
    device.use(memory)
    device.allocate(len(program.image))
    device.write(0, program.loaded())
    return device.run(program.instr_addr, len(program.instructions), 10_000_000, trace=True)


def ordered(counters: Counters) -> NDArray[np.int64]:
    """Return the start and end of each instruction, as [instruction, 2], in cycles."""
    events = sorted(counters.events, key=lambda event: event.index)
    return np.array([(event.start, event.end) for event in events], np.int64)


EXACTLY = [
    *product(EXACT, dict.fromkeys((*EXACT_CONFIGS, *VECTOR_CONFIGS, *TWO_PORTS))),
    *product(EXACT_VECTOR, VECTOR_CONFIGS),
    *product(TWO_CHANNELS, TWO_PORTS),
    *product(EXACT_NORM, NORM_CONFIGS),
    *product(EXACT_SOFTMAX, SOFTMAX_CONFIGS),
    *product(EXACT_PACKED, PACKED_CONFIGS),
    *product(EXACT_SPREAD, SPREAD_CONFIGS),
    *product(TWO_CHANNELS, [name for name in PACKED_CONFIGS if CONFIGS[name].ports == 2]),
]


@pytest.mark.rtl
@pytest.mark.parametrize(("name", "config"), some(EXACTLY, [case for case in EXACTLY if case[1] in VARIED]))
def test_the_constants_are_those_of_the_hardware(name: str, config: str) -> None:
    """The model's starts, ends and counters are exact; this fails if the hardware gets one register more or less."""
    programs = EXACT | EXACT_VECTOR | TWO_CHANNELS | EXACT_NORM | EXACT_SOFTMAX | EXACT_PACKED | EXACT_SPREAD
    program = program_of(CONFIGS[config], programs[name])
    expected = measured(opened(config), program)
    timing = timing_of(program)
    np.testing.assert_array_equal(np.stack([timing.start, timing.end], axis=1), ordered(expected))
    assert timing.values == expected.values


@pytest.mark.rtl
@pytest.mark.parametrize("config", some(TWO_PORTS, [each for each in TWO_PORTS if each in VARIED]))
def test_ends_that_cannot_be_told_hold_up_the_next(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More LOADs of weights than the queue of ends holds wait for one LOAD of activations."""
    program = program_of(CONFIGS[config], [load(500), *[load(4, buffer=WEIGHTS)] * 45])
    expected = ordered(measured(opened(config), program))[:, 1]
    np.testing.assert_array_equal(timing_of(program).end, expected)
    planted(monkeypatch, "MAX_UNRETIRED")
    assert not np.array_equal(timing_of(program).end, expected)


def planted(monkeypatch: pytest.MonkeyPatch, constant: str) -> None:
    """Increase a constant by 1 in all modules of the model that have it."""
    modules = (compute, copies, fetch, machine, timing_memory, pipeline)
    owners = [module for module in modules if hasattr(module, constant)]
    assert owners
    for module in owners:
        monkeypatch.setattr(module, constant, getattr(module, constant) + 1)


MEASURED = (
    "FIRST_ASK", "ASK_TO_REQUEST", "ASK_TO_ADDRESS", "BEAT_TO_WORD", "WORD_TO_QUEUE", "QUEUE_TO_GATE",
    "END_TO_ASK", "BEGIN_TO_ASK", "START_TO_STEP", "BEAT_TO_STEP", "STEP_TO_END", "GEMM_STAGES", "WRITE_TO_END",
    "RESPONSE_TO_END", "VECTOR_STAGES", "TAP_STAGES", "VECTOR_IN_FLIGHT", "ARRIVAL_TO_WRITE", "WRITE_TO_ROOM",
    "WRITEBACK_DEPTH",
)  # fmt: skip


@cache
def exact_programs() -> tuple[list[TestProgram], list[Timing]]:
    """Return the exact programs, and their times by the model as it is."""
    programs = [program_of(CONFIGS["taps3"], instructions) for instructions in (EXACT | EXACT_VECTOR).values()]
    return programs, [timing_of(program) for program in programs]


@pytest.mark.parametrize("constant", MEASURED)
def test_a_planted_difference_is_noticed(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cycle more in a constant changes a time or a counter of one of the exact programs."""
    programs, before = exact_programs()
    planted(monkeypatch, constant)
    after = [timing_of(program) for program in programs]
    assert any(
        a.values != b.values or not np.array_equal(np.stack([a.start, a.end]), np.stack([b.start, b.end]))
        for a, b in zip(before, after, strict=True)
    )


def test_declared_constants() -> None:
    """Depths of queues and numbers of stages agree with those in hw/."""
    from amaranth.hdl import Fragment

    from celosia.hw import top
    from celosia.hw.dae_pipeline import dma, load, store

    assert dma.ReadEngine(8)._room == pipeline.READ_BUFFER_BEATS
    for name, acc_stage in (("4x4", pipeline.READ_STAGES), ("taps3", pipeline.TAP_STAGES)):
        stages = pipeline.vector_stages(CONFIGS[name])
        assert stages["acc"] == acc_stage
        assert stages["write"] - stages["acc"] == pipeline.VECTOR_STAGES
        assert stages["write"] - stages["add"] == pipeline.ADD_STAGES
    cfg = CONFIGS["4x4"]
    lane = load.LoadChannel(cfg, load_channels(cfg)[0])
    modules = [part.elaborate(None) for part in (lane, store.Store(cfg), top.Accelerator(cfg))]
    loads, stores, accelerator = (module.submodules for module in modules)
    # LOAD's ring is a power of two.
    assert pipeline.ROW_FIFO_DEPTH == loads.positions._depth - 1 == stores.positions._depth
    assert pipeline.PREFETCH_ROWS == loads.requests._depth + 1 == stores.requests._depth + 1
    assert stores.waiting._depth == pipeline.MAX_UNANSWERED
    assert all(getattr(accelerator, f"issue_{unit.name.lower()}")._depth == pipeline.ISSUE_DEPTH for unit in Unit)
    for module in modules:
        Fragment.get(module, None)  # Amaranth warns of unused components


# Accuracy for random programs ---------------------------------------------------------------------------------

WITHIN = {
    "4x4": 0.03, "8x8-bus16": 0.02, "8x8-bus4-tokens2": 0.03, "batch2": 0.03, "4x8": 0.03, "8x4": 0.03,
    "taps3": 0.03, "8x4-batch2-taps5": 0.02, "8x8-forward": 0.02,
    "4x4-ports2": 0.03, "2x8x4-bus16-ports2": 0.02, "taps3-ports2": 0.03, "8x8-taps3-ports2": 0.03,
    "4x4-softmax2": 0.03, "4x8-softmax2": 0.03, "8x8-bus4-weights4": 0.03, "4x8-ports2-weights2": 0.03,
    "8x8-bus4-spread": 0.03,
}  # fmt: skip
"""Largest relative error in cycles, by Config, for random programs of 10,000 to 20,000 cycles with short rows."""


@pytest.mark.rtl
@pytest.mark.parametrize("config", some(WITHIN, [each for each in WITHIN if each in VARIED]))
def test_random_programs(config: str) -> None:
    errors = []
    for seed in range(tries(10)):
        program = random_program(CONFIGS[config], seed, count=300)
        expected, timing = measured(opened(config), program), timing_of(program)
        for name in COUNTERS:
            if name.endswith(("_busy", "_beats")):
                assert timing.values[name] == expected.values[name], name
        errors.append(timing.cycles / (expected.cycles or 1) - 1)
        assert abs(errors[-1]) <= WITHIN[config], (seed, expected.cycles, timing.cycles)
    assert abs(np.mean(errors)) <= 0.02


@pytest.mark.rtl
@pytest.mark.parametrize("config", some(CONFIGS, VARIED))
def test_random_programs_of_all_lengths(config: str) -> None:
    """Programs of all lengths are accurate, even short ones, in which a few cycles are a large share."""
    for comparison in timing_accuracy.compare(CONFIGS[config], opened(config), range(tries(14))):
        assert abs(comparison.error) <= timing_accuracy.WITHIN, comparison


@pytest.mark.rtl
@pytest.mark.thorough  # each Config is a simulator
@pytest.mark.parametrize("number", range(8))
def test_random_configs(number: int) -> None:
    """95% of the programs on a random Config are accurate; `python -m benchmarks timing` tries more Configs."""
    cfg = random_config(number)
    comparisons = list(timing_accuracy.compare(cfg, RtlDevice(cfg, quiet=True), range(25)))
    assert timing_accuracy.summary(comparisons)["within"] >= 0.95


PYNQ_Z2 = BOARDS["pynq-z2"].memory
MEMORIES = {
    IDEAL: 0.03,
    MemoryModel(read_latency=100, write_latency=20): 0.03,
    MemoryModel(refresh_period=100, refresh_cycles=30): 0.03,
    MemoryModel(outstanding=4): 0.03,
    PYNQ_Z2: 0.03,
    BOARDS["ultra96"].memory: 0.03,
    MemoryModel(bytes_per_cycle=16): 0.03,  # less than all channels together can move, so they share it beat by beat
    MemoryModel(bytes_per_cycle=10): 0.03,
    MemoryModel(bytes_per_cycle=5): 0.03,
}
OTHER_MEMORIES = [*MEMORIES][1:6]
"""Memories that are slower in one way, and those of two boards, which are slower in several ways."""


@pytest.mark.rtl
@pytest.mark.parametrize("config", some(["8x8-bus16", "2x8x4-bus16-ports2", "taps3-ports2"], ["taps3-ports2"]))
@pytest.mark.parametrize("memory", some(MEMORIES, OTHER_MEMORIES), ids=str)
def test_other_memories(memory: MemoryModel, config: str) -> None:
    for seed in range(tries(8)):
        program = random_program(CONFIGS[config], seed, count=300)
        expected, timing = measured(opened(config), program, memory), timing_of(program, memory)
        assert timing.cycles == pytest.approx(expected.cycles, rel=MEMORIES[memory])


@pytest.mark.rtl
@pytest.mark.parametrize("config", some(TWO_PORTS, ["taps3-ports2"]))
def test_read_ports_share_a_slow_memory(config: str) -> None:
    """Beats of a short copy alternate with those of a long copy on the other port, even at two cycles a beat."""
    cfg = CONFIGS[config]
    memory = dataclasses.replace(ZYNQ_HP, bytes_per_cycle=cfg.bus_bytes // 2)
    program = program_of(cfg, [load(20), load(500, buffer=WEIGHTS)])
    (_, short), (_, long) = ordered(measured(opened(config), program, memory))
    assert short < 400 < 1000 < long


@pytest.mark.parametrize("config", some(CONFIGS, VARIED))
@pytest.mark.parametrize(
    "memory",
    [
        MemoryModel(outstanding=1),
        MemoryModel(outstanding=3, refresh_period=0),
        MemoryModel(bytes_per_cycle=1),
        MemoryModel(read_latency=0, write_latency=0),
    ],
    ids=str,
)
def test_units_keep_the_order_whatever_the_memory(memory: MemoryModel, config: str) -> None:
    for seed in range(2 * tries(4)):
        program = random_program(CONFIGS[config], seed, count=60, tokens=seed % 2 == 0)
        timing = timing_of(program, memory)
        assert np.all(timing.end > timing.start) and min(timing.values.values()) >= 0
        for unit in Unit:
            of_unit = timing.unit == unit
            assert np.all(np.diff(timing.start[of_unit]) > 0) and np.all(np.diff(timing.end[of_unit]) > 0)


# Whole models -------------------------------------------------------------------------------------------------


LARGE_LAYER = 5000
"""Cycles above which the cycles of a single layer are compared."""


def compare(program: Program, feed: dict[str, Any], config: str, memory: MemoryModel = ZYNQ_HP) -> None:
    """Compare the timed device with the RTL: outputs, all cycles within 1%, and those of large layers within 3%."""
    device = opened(config)
    device.use(memory)
    expected = celosia.Runtime(program, device).run(feed)
    timed = celosia.Runtime(program, "timed", memory=memory.name).run(feed)
    for name, array in expected.outputs.items():
        np.testing.assert_array_equal(timed.outputs[name], array)
    assert timed.report["cycles"] == pytest.approx(expected.report["cycles"], rel=0.01)
    for measured_layer, timed_layer in zip(expected.report["layers"], timed.report["layers"], strict=True):
        if measured_layer["cycles"] > LARGE_LAYER:
            assert timed_layer["cycles"] == pytest.approx(measured_layer["cycles"], rel=0.03), measured_layer["name"]
    assert timed.report["memory_model"] == expected.report["memory_model"] == str(memory)
    for unit, counts in expected.report["units"].items():
        assert timed.report["units"][unit]["busy"] == counts["busy"]


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("config", "memory"),
    some([("tiny", ZYNQ_HP), ("pynq", ZYNQ_HP), ("pynq", PYNQ_Z2)], [("tiny", ZYNQ_HP)]),
    ids=str,
)
def test_the_demo_model(config: str, memory: MemoryModel) -> None:
    """The demo model's cycles are accurate; `python -m benchmarks timed` measures networks for ImageNet."""
    program = celosia.compile(demo_model_path(), config)
    compare(program, {program.inputs[0].name: demo_images()[0][:1]}, config, memory)


# The device ---------------------------------------------------------------------------------------------------


def test_it_is_a_device_with_the_functional_bytes_and_the_models_cycles() -> None:
    cfg = CONFIGS["4x4"]
    program = random_program(cfg, 3, count=60)
    device = TimedDevice(cfg)
    assert isinstance(device, Device)
    np.testing.assert_array_equal(program.run(device), program.run(FunctionalDevice(cfg)))
    counters = device.run(0, len(program.instructions), 1_000_000, trace=True)
    expected = timing_of(program)
    assert counters.cycles == expected.cycles and tuple(counters.values) == COUNTERS
    np.testing.assert_array_equal(ordered(counters), np.stack([expected.start, expected.end], axis=1))
    for event in counters.events:
        assert event.unit == program.instructions[event.index].unit.name.lower()
    assert [event.end for event in counters.events] == sorted(event.end for event in counters.events)
    assert device.run(0, len(program.instructions), 1_000_000).events == []


def test_it_names_its_memory() -> None:
    assert TimedDevice(CONFIGS["4x4"]).memory_model == "zynq-hp"
    assert TimedDevice(CONFIGS["4x4"], MemoryModel(read_latency=9)).memory_model == "zynq-hp (read_latency=9)"


def test_the_memory_matters() -> None:
    program = program_of(CONFIGS["4x4"], [load(1, 60, dram_y=64)])
    assert timing_of(program, IDEAL).cycles < timing_of(program).cycles / 2


def test_a_program_that_takes_too_long() -> None:
    device = TimedDevice(CONFIGS["4x4"])
    program = program_of(CONFIGS["4x4"], EXACT["a chain"])
    with pytest.raises(DeviceError, match=r"380 cycles.*404"):
        program.run(device, 380)


def test_no_instructions() -> None:
    timing = predict(CONFIGS["4x4"], b"")
    assert (timing.cycles, len(timing.start)) == (0, 0) and set(timing.values.values()) == {0}


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (random_stalls(1), "no memory that pauses at random or freezes, so not random"),
        (dataclasses.replace(ZYNQ_HP, freeze_after=9), "no memory that pauses at random or freezes"),
        (MemoryModel(refresh_period=5, refresh_cycles=5), "refresh_cycles must be below refresh_period"),
        ("ddr9", "there is no memory model 'ddr9'; take zynq-hp, ideal, .* or aup-zu3, or a board's"),
    ],
)
def test_memories_that_it_does_not_know(memory: MemoryModel | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(CONFIGS["4x4"], b"", memory)


def test_code_that_is_cut_off() -> None:
    with pytest.raises(ValueError, match=r"65 bytes.*64 bytes"):
        predict(CONFIGS["4x4"], bytes(65))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (load(0), "instruction 1: LOAD: a size is 0"),
        (load(1, buffer=6), "instruction 1: LOAD: the buffer does not exist"),  # type: ignore[arg-type]
        (gemm(1, 1, 0, 1, 1, 1), "instruction 1: GEMM: an extent is 0"),
        (store(1, post=1 << Unit.STORE), "instruction 1: STORE: waits for or posts to itself"),
    ],
)
def test_illegal_instructions(wrong: Instruction, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timing_of(program_of(CONFIGS["4x4"], [gemm(1, 1, 1, 1, 1, 1), wrong]))


def test_an_opcode_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"instruction 0.*opcode 7"):
        predict(CONFIGS["4x4"], b"\7" + bytes(63))


# Parts --------------------------------------------------------------------------------------------------------


def test_tokens_from_later_instructions() -> None:
    """A token may be posted by an instruction that comes later in the program."""
    first = [
        gemm(1, 1, 1, 1, 1, 1, wait=1 << Unit.LOAD),
        load(30, post=1 << Unit.GEMM),
    ]
    program = program_of(CONFIGS["4x4"], first)
    timing = timing_of(program)
    assert timing.start[0] == timing.end[1] + 1


@pytest.mark.rtl
def test_tokens_from_later_instructions_on_the_rtl() -> None:
    program = program_of(CONFIGS["4x4"], [gemm(1, 1, 1, 1, 1, 1, wait=1 << Unit.LOAD), load(30, post=1 << Unit.GEMM)])
    expected, timing = measured(opened("4x4"), program), timing_of(program)
    np.testing.assert_array_equal(np.stack([timing.start, timing.end], axis=1), ordered(expected))


def test_a_program_that_cannot_end() -> None:
    with pytest.raises(DeviceError, match=r"no unit.*1 of 2 instructions"):
        timing_of(program_of(CONFIGS["4x4"], [load(1), gemm(1, 1, 1, 1, 1, 1, wait=1 << Unit.LOAD)]))


def _bursts_one_by_one(bus_bytes: int, offset: int, size: int) -> tuple[int, int]:
    beats, bursts, place = 0, 0, offset // bus_bytes * bus_bytes
    while place < offset + size:
        room = min(MAX_BURST * bus_bytes, BURST_BOUNDARY - place % BURST_BOUNDARY)
        length = min(room, -(-(offset + size - place) // bus_bytes) * bus_bytes)
        beats, bursts, place = beats + length // bus_bytes, bursts + 1, place + length
    return beats, bursts


@pytest.mark.parametrize("bus_bytes", [4, 8, 16, 64, 128])
def test_beats_and_bursts(bus_bytes: int) -> None:
    rng = np.random.default_rng(bus_bytes)
    offset, size = rng.integers(0, 20_000, 500), rng.integers(1, 12_000, 500)
    beats, bursts = count_beats_and_bursts(bus_bytes, offset, size)
    for counts, start, length in zip(zip(beats, bursts, strict=True), offset.tolist(), size.tolist(), strict=True):
        assert counts == _bursts_one_by_one(bus_bytes, start, length)


def test_cycles_that_a_port_leaves() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        port, taken, cycle = ports.Port(), set[int](), 0
        for _ in range(rng.integers(0, 4)):
            reserved = RegularCycles(cycle + int(rng.integers(0, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 9)))
            port.reserve(reserved)
            taken |= {reserved.first + i * reserved.period for i in range(reserved.entries)}
            cycle = reserved.last + 1
        start, count = int(rng.integers(0, 30)), int(rng.integers(1, 30))
        free = [c for c in range(start, 200) if c not in taken]
        assert port.free_cycle(start, count) == free[count - 1]
        port.forget(start)
        assert port.free_cycle(start, count) == free[count - 1]


def test_steps_that_a_port_holds_up() -> None:
    """The last step is that of a model step by step, in which each step keeps its distance to the one before."""
    rng = np.random.default_rng(6)
    for _ in range(500):
        port, taken, cycle = ports.Port(), set[int](), 0
        for _ in range(rng.integers(0, 5)):
            reserved = RegularCycles(
                cycle + int(rng.integers(0, 30)), int(rng.integers(1, 5)), int(rng.integers(1, 20))
            )
            port.reserve(reserved)
            taken |= {reserved.first + i * reserved.period for i in range(reserved.entries)}
            cycle = reserved.last + 1
        steps_per_gap, gap = int(rng.integers(1, 4)), int(rng.choice([0, 1, 3]))
        steps = Steps(int(rng.integers(0, 40)), steps_per_gap * int(rng.integers(1, 15)), steps_per_gap, gap)
        cycle = steps.first
        for number in range(steps.steps):
            cycle += number > 0 and 1 + gap * (number % steps_per_gap == 0)
            cycle = next(free for free in count(cycle) if free not in taken)
        assert port.last_step(steps) == cycle


@pytest.mark.parametrize("extent", [(1, 1, 40), (2, 3, 20), (3, 1, 30)])
def test_where_accumulators_lie(extent: tuple[int, int, int]) -> None:
    """The banks of an instruction's outputs agree with those of all addresses one by one."""
    cfg = CONFIGS["4x4"]
    for base, (n, y, x) in product((0, 10, HALF - 5, HALF, 2 * HALF - 7), ((0, 0, 1), (30, 20, 1), (1, 60, 0))):
        program = program_of(cfg, [gemm(*extent, acc_base=base, acc_n=n, acc_y=y, acc_x=x)])
        demands = demand(cfg, b"".join(word.to_bytes(instruction_bytes(cfg), "little") for word in program.words()))
        banks = [(base + i * n + j * y + k * x) // HALF % 2 for i, j, k in np.ndindex(*extent)]
        other = [number for number, bank in enumerate(banks) if bank != banks[0]]
        assert demands.write_bank[0] == demands.read_bank[0] == banks[0]
        assert demands.write_bank_outputs[0] == demands.read_bank_outputs[0] == (other[0] if other else len(banks))


@pytest.mark.parametrize("memory", [ZYNQ_HP, IDEAL, MemoryModel(refresh_period=0, outstanding=3)], ids=str)
def test_bursts_that_are_skipped(memory: MemoryModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long trains of bursts end when they would if each burst was placed alone."""

    def ends() -> list[int]:
        rng, found = np.random.default_rng(7), []
        for _ in range(60):
            port = ReadBursts(Channel(memory), memory.read_latency, min(8, memory.outstanding))
            ask = 0
            for _ in range(4):
                bursts = int(rng.integers(1, 300))
                port.begin_train(ask, bursts, bursts * int(rng.choice([1, 2, 5, 16])))
                assert port.predicted_end() == port.predicted_end() == port.finish_train()
                found.append(port.ends[-1])
                ask = port.next_ask
        return found

    skipping = np.array(ends())
    monkeypatch.setattr(ReadBursts, "_place_in_closed_form", lambda self, until: None)
    one_by_one = np.array(ends())
    if memory.refresh_period:  # only the last bursts consider a refresh in the middle of a burst
        assert np.abs(skipping - one_by_one).max() <= memory.refresh_cycles
    else:
        np.testing.assert_array_equal(skipping, one_by_one)


@pytest.mark.parametrize("memory", [ZYNQ_HP, IDEAL, MemoryModel(refresh_period=7, refresh_cycles=3)], ids=str)
def test_slots(memory: MemoryModel) -> None:
    channel = timing_memory.Channel(memory)
    period, closed = memory.refresh_period, memory.refresh_cycles
    for cycle in (0, 1, 2, 3, 5, 6, 7, 15, 16, 17, 700, 779, 780, 790, 800):
        free = [c for c in range(cycle, cycle + 900) if not period or c % period >= closed]
        for slots in (0, 1, 2, 5, 300):
            assert channel.cycle_of_slot(cycle, slots) == free[slots]


Bursts = list[tuple[int, int]]
"""For each burst of a channel: the cycle in which it is due, and its number of beats."""


def turn_by_turn(channels: list[Bursts], bus_bytes: int, bytes_per_cycle: int) -> list[list[int]]:
    """Return the cycle of the last beat of each burst, if channels alternate beat by beat.

    DRAM saves the bytes of at most two beats.
    """
    beats_left = [[beats for _, beats in bursts] for bursts in channels]
    ends: list[list[int]] = [[] for _ in channels]
    credit = turn = 0
    for cycle in range(1_000_000):
        credit = min(credit + bytes_per_cycle, 2 * max(bus_bytes, bytes_per_cycle))
        for channel in [(turn + n) % len(channels) for n in range(len(channels))]:
            burst = len(ends[channel])
            if credit >= bus_bytes and burst < len(channels[channel]) and channels[channel][burst][0] <= cycle:
                credit -= bus_bytes
                turn = channel + 1
                beats_left[channel][burst] -= 1
                if not beats_left[channel][burst]:
                    ends[channel].append(cycle)
        if all(len(done) == len(bursts) for done, bursts in zip(ends, channels)):
            return ends
    raise AssertionError("bursts are left")


@pytest.mark.parametrize("bytes_per_cycle", [3, 8, 11, 16, 20])
@pytest.mark.parametrize("seed", range(6))
def test_channels_that_share(seed: int, bytes_per_cycle: int) -> None:
    """Beats of 8 bytes on three channels come when they would if the channels alternated beat by beat."""
    rng = np.random.default_rng(seed)
    memory = MemoryModel(refresh_period=0, bytes_per_cycle=bytes_per_cycle)
    gaps = [int(rng.choice([10, 60, 200])) for _ in range(3)]
    channels = [
        list(zip(np.cumsum(rng.integers(1, gap, 30)).tolist(), rng.integers(1, 17, 30).tolist())) for gap in gaps
    ]
    expected = turn_by_turn(channels, 8, bytes_per_cycle)
    moves: list[Transfers] = [()] * 3
    for _ in range(machine.MAX_PASSES):
        shared = [SharedChannel(memory, 8, moves[:n] + moves[n + 1 :]) for n in range(3)]
        ends = [
            [
                channel_or_ends.move(channel_or_ends.cycle_of_slot(max(due, channel_or_ends.next), 0), beats, beats)
                for due, beats in bursts
            ]
            for channel_or_ends, bursts in zip(shared, channels)
        ]
        moves = [channel_or_ends.transfers for channel_or_ends in shared]
    for channel_or_ends, expected_ends in zip(ends, expected):
        assert np.abs(np.array(channel_or_ends) - expected_ends).max() <= 0.03 * max(map(max, expected))
