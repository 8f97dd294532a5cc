"""The functional simulator does the same as the reference, only faster, and its checks find planted faults."""

from __future__ import annotations

import numpy as np
import pytest
from configs import CONFIGS
from programs import random_program

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    VECTOR_LOOPS,
    ASource,
    Buffer,
    Destination,
    Opcode,
    Unit,
    encode,
    formats,
    instruction_bytes,
)
from celosia.sim.device import DeviceError
from celosia.sim.functional import reference, vectorised
from celosia.sim.functional.checking import CheckError
from celosia.sim.functional.decode import decode
from celosia.sim.functional.fsim import FunctionalDevice


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(6))
def test_each_instruction_equals_the_reference(name: str, seed: int) -> None:
    cfg = CONFIGS[name]
    program = random_program(cfg, seed, count=60, wrap=0.2, align=1 + seed % 2 * (cfg.piece_bytes - 1), tokens=False)
    expected, dram = reference.State(cfg), program.image.copy()
    device = FunctionalDevice(cfg)
    device.allocate(len(dram))
    device.write(0, dram)
    words = program.words()
    size = instruction_bytes(cfg)
    code = np.frombuffer(b"".join(word.to_bytes(size, "little") for word in words), np.uint8).reshape(-1, size)
    for i, (word, instruction) in enumerate(zip(words, decode(cfg, code), strict=True)):
        assert instruction is not None and instruction.fields == formats(cfg)[instruction.opcode].decode(word)
        reference.execute(expected, dram, word, i)
        device.execute(instruction)
        for buffer in ("inp", "wgt", "acc", "vin", "out", "par", "lut", "tap"):
            same = np.array_equal(getattr(expected, buffer), getattr(device.state, buffer))
            assert same, f"instruction {i} {program.instructions[i]} differs in {buffer}"
        assert np.array_equal(dram, device.dram), f"instruction {i} {program.instructions[i]} differs in DRAM"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_program_keeps_the_sequential_meaning(name: str, seed: int) -> None:
    cfg = CONFIGS[name]
    program = random_program(cfg, seed, count=40, wrap=0.0)
    state, dram = reference.State(cfg), program.image.copy()
    device = FunctionalDevice(cfg, checking=True)
    after = program.run(device)
    size = instruction_bytes(cfg)
    for i, word in enumerate(program.words()):
        dram[program.instr_addr + i * size :][:size] = np.frombuffer(word.to_bytes(size, "little"), np.uint8)
    for i, word in enumerate(program.words()):
        reference.execute(state, dram, word, i)
    assert np.array_equal(dram, after)


def _run(
    cfg: Config, instructions: list[tuple[Opcode, dict[str, int]]], checking: bool = True, cycles: int = 0
) -> None:
    size = instruction_bytes(cfg)
    words = [encode(cfg, opcode, **fields) for opcode, fields in instructions]
    device = FunctionalDevice(cfg, checking)
    device.allocate(1 << 16)
    device.write(4096, np.frombuffer(b"".join(word.to_bytes(size, "little") for word in words), np.uint8))
    device.run(4096, len(words), cycles)


CFG = CONFIGS["4x4"]
LOAD = (Opcode.LOAD, dict(x_size=4, y_size=1, z_size=1, sram_x=1))
WEIGHTS = (Opcode.LOAD, dict(x_size=4, y_size=1, z_size=1, sram_x=1, buffer=Buffer.WGT))
GEMM = (Opcode.GEMM, {f"extent_{loop}": 1 for loop in GEMM_LOOPS} | {"extent_x": 4, "inp_x": 1, "acc_x": 1})
OUT = (
    Opcode.VECTOR,
    {f"extent_{loop}": 1 for loop in VECTOR_LOOPS}
    | {"extent_x": 4, "a_x": 1, "dst_x": 1, "destination": Destination.OUT},
)
STORE = (Opcode.STORE, dict(x_size=4, y_size=1, z_size=1, sram_x=1, dram_addr=1024))


def to(instruction: tuple[Opcode, dict[str, int]], **fields: int) -> tuple[Opcode, dict[str, int]]:
    return instruction[0], instruction[1] | fields


def bit(*units: Unit) -> int:
    return sum(1 << unit for unit in units)


SOUND = [
    LOAD,
    to(WEIGHTS, post=bit(Unit.GEMM)),
    to(GEMM, wait=bit(Unit.LOAD), post=bit(Unit.VECTOR)),
    to(OUT, wait=bit(Unit.GEMM), post=bit(Unit.STORE)),
    to(STORE, wait=bit(Unit.VECTOR)),
]


def test_a_sound_program_passes_the_checks() -> None:
    _run(CFG, SOUND)


@pytest.mark.parametrize(
    "faulty, message",
    [
        ([to(GEMM)], r"instruction 0 \(GEMM\) reads inp piece 0, which was never written"),
        ([to(STORE)], r"instruction 0 \(STORE\) reads out piece 0, which was never written"),
        ([to(LOAD, sram_base=62)], r"instruction 0 \(LOAD\): sram leaves inp, which ends at 63"),
        (
            [SOUND[0], to(SOUND[1], post=0), to(SOUND[2], wait=0)],
            r"instruction 2 \(GEMM\) reads inp piece 0, which instruction 0 \(LOAD\) writes; no token orders the two",
        ),
        (
            [*SOUND[:3], to(LOAD, sram_base=3, buffer=Buffer.INP)],
            r"instruction 3 \(LOAD\) writes inp piece 3, which instruction 2 \(GEMM\) reads",
        ),
        (
            [*SOUND, to(LOAD, dram_addr=1039, sram_base=40)],
            r"instruction 5 \(LOAD\) reads DRAM byte 1039, which instruction 4 \(STORE\) writes",
        ),
        (
            [*SOUND[:3], to(SOUND[3], post=bit(Unit.STORE, Unit.LOAD)), SOUND[4], to(LOAD, wait=bit(Unit.VECTOR))],
            None,  # GEMM's token reaches LOAD through VECTOR
        ),
        (
            [SOUND[0], to(SOUND[1], post=bit(Unit.GEMM)), LOAD, to(SOUND[2])],
            r"instruction 3 \(GEMM\) reads inp piece 0, which instruction 2 \(LOAD\) writes",  # the earlier token
        ),
    ],
)
def test_planted_faults_are_found(faulty: list[tuple[Opcode, dict[str, int]]], message: str | None) -> None:
    if message is None:
        return _run(CFG, faulty)
    with pytest.raises(CheckError, match=message):
        _run(CFG, faulty)


TAPS = CONFIGS["taps3"]
VIN = to(LOAD, x_size=8, buffer=Buffer.VIN)
TAP = to(LOAD, buffer=Buffer.TAP, post=bit(Unit.VECTOR))
DEPTHWISE = to(OUT, a_source=ASource.VIN, taps=1, wait=bit(Unit.LOAD))
PASS = to(OUT, a_source=ASource.VIN, wait=bit(Unit.LOAD), post=bit(Unit.GEMM))


@pytest.mark.parametrize(
    "program, message",
    [
        ([VIN, TAP, DEPTHWISE], None),
        ([VIN, to(TAP), to(DEPTHWISE, extent_n=2, tap_n=4)], r"\(VECTOR\) reads tap entry 4, which was never written"),
        ([VIN, TAP, to(DEPTHWISE, a_base=3)], r"\(VECTOR\) reads vin piece 8, which was never written"),
        ([VIN, to(TAP, post=0), to(DEPTHWISE, wait=0)], r"\(VECTOR\) reads vin piece 0, which instruction 0"),
        (
            [WEIGHTS, to(VIN, post=bit(Unit.VECTOR)), to(PASS, destination=Destination.INP),
             to(GEMM, wait=bit(Unit.VECTOR))],
            None,
        ),
        (
            [WEIGHTS, to(VIN, post=bit(Unit.VECTOR, Unit.GEMM)), to(PASS, destination=Destination.INP, post=0),
             to(GEMM, wait=bit(Unit.LOAD))],
            r"\(GEMM\) reads inp piece 0, which instruction 2 \(VECTOR\) writes; no token orders the two",
        ),
        (
            [to(VIN, post=bit(Unit.VECTOR)), to(PASS, destination=Destination.VIN, post=0), VIN],
            r"\(LOAD\) writes vin piece 0, which instruction 1 \(VECTOR\)",
        ),
    ],
)  # fmt: skip
def test_planted_faults_with_taps_are_found(program: list[tuple[Opcode, dict[str, int]]], message: str | None) -> None:
    if message is None:
        return _run(TAPS, program)
    with pytest.raises(CheckError, match=message):
        _run(TAPS, program)


@pytest.mark.parametrize(
    "stuck, message",
    [
        ([to(LOAD, wait=bit(Unit.STORE))], "LOAD waits at instruction 0 for a token from STORE"),
        (
            [to(LOAD, post=bit(Unit.GEMM))] * 300,
            "LOAD waits at instruction 255 for room for a token to GEMM",
        ),
        (  # the GEMM that would post lies behind a full queue
            [to(LOAD, wait=bit(Unit.GEMM))] * 8 + [to(GEMM, post=bit(Unit.LOAD))],
            "GEMM has nothing to do.*4 of 9 instructions fetched",
        ),
    ],
)
def test_a_program_that_cannot_proceed_ends_in_an_error(
    stuck: list[tuple[Opcode, dict[str, int]]], message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        _run(CFG, stuck, checking=False)


def test_a_token_may_come_from_a_later_instruction() -> None:
    _run(CFG, [to(LOAD, wait=bit(Unit.GEMM)), to(GEMM, post=bit(Unit.LOAD))], checking=False)


def test_failing_instructions_are_named() -> None:
    with pytest.raises(DeviceError, match=r"instruction 1.*DMA limits.*bytes 65535"):
        _run(CFG, [LOAD, to(LOAD, dram_addr=65535)])
    with pytest.raises(DeviceError, match=r"instruction 0.*LOAD: a size is 0"):
        _run(CFG, [to(LOAD, x_size=0)])
    with pytest.raises(ValueError, match=r"65536 to 65599.*65536"):
        device = FunctionalDevice(CFG)
        device.allocate(1 << 16)
        device.run(65536, 1)


@pytest.mark.parametrize("endless", [
    to(GEMM, **dict.fromkeys((f"extent_{loop}" for loop in GEMM_LOOPS), 4000)),
    to(OUT, **dict.fromkeys((f"extent_{loop}" for loop in VECTOR_LOOPS), 4000)),
    to(LOAD, y_size=4000, z_size=4000), to(STORE, y_size=4000, z_size=4000),
])  # fmt: skip
def test_an_instruction_without_end_is_refused(endless: tuple[Opcode, dict[str, int]]) -> None:
    """An instruction of excessive size is refused by the time limit, before it fills all memory."""
    with pytest.raises(DeviceError, match=rf"1000000 cycles.*1 \({endless[0].name}\)"):
        _run(CFG, [LOAD, endless], checking=False, cycles=1_000_000)
    _run(CFG, SOUND, cycles=1000)


def test_requantise_equals_the_reference_everywhere_near_int8() -> None:
    rng = np.random.default_rng(0)
    size = 200_000
    v = rng.integers(-(1 << 31), 1 << 31, size) >> rng.integers(0, 31, size)
    bias = rng.integers(-(1 << 31), 1 << 31, size) >> rng.integers(0, 31, size)
    multiplier = np.where(rng.random(size) < 0.01, 0, rng.integers(1 << 23, 1 << 24, size))
    multiplier = np.where(rng.random(size) < 0.2, 1 << 23, multiplier)  # many exact ties
    shift = rng.integers(0, 64, size)
    expected = reference.requantise(v.astype(np.int32), bias.astype(np.int32), multiplier, shift)
    par = (bias & 0xFFFFFFFF).astype(np.uint64) | (multiplier << 32 | shift << 56).astype(np.uint64)
    actual = vectorised._requantise(v.astype(np.int32), par)
    assert np.array_equal(np.clip(actual, -512, 512).astype(np.int64), np.clip(expected, -512, 512))
    assert (np.abs(expected) < 512).mean() > 0.2
