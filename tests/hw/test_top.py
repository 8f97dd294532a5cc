"""Compare the whole accelerator with sim/functional/reference.py, for random programs and every error."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import bench
import cocotb
import numpy as np
import pytest
from host import BASE, NAMES, Host, check_events, place, record

from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import ASource, Destination, Opcode, Unit, buffers, encode, formats, instruction_bytes
from celosia.hw.spec.regs import STATUS_STUCK, Error
from celosia.sim.functional.reference import State, execute

sys.path.append(str(Path(__file__).parents[1]))
import configs
import programs
from thorough import some, tries

CONFIGS = {
    name: configs.CONFIGS[name]
    for name in ("4x4", "8x4-batch2-taps5", "8x8-bus4-tokens2", "8x8-bus4-spread", "8x8-taps3-ports2")
} | {
    "2x4x8-bus32": Config(batch=2, block_in=4, block_out=8, bus_bytes=32, lut_count=1, **configs.SMALL),
    "8x8-taps1-bus4": Config(
        block_in=8, block_out=8, bus_bytes=4, taps=1, tap_depth=4, alu=False, int32=False, **configs.SMALL
    ),
}
"""A few Configs that differ in their parts; tests/cosim/test_random_programs.py simulates all of `configs`."""
VARIED = [name for name in CONFIGS if name in configs.CONFIGS]
"""Names of Configs whose Verilog other tests need, too."""
TAPS = CONFIGS["8x8-taps3-ports2"]


def simulate(cfg: Config, *only: str, **params: Any) -> None:
    from celosia.hw.top import Accelerator

    bench.run(partial(Accelerator, cfg), __file__, cfg=cfg, params=params, only=only)


@pytest.mark.rtl
@pytest.mark.parametrize("name", some(CONFIGS, ["8x8-taps3-ports2"]))
def test_accelerator(name: str) -> None:
    only = ["equals_reference"]
    if name == "4x4" or CONFIGS[name].ports == 2:
        only += ["every_error_ends_the_run", "watchdog_names_the_instruction"]
    if name == "4x4":
        only.append("gemm_is_busy")
    if CONFIGS[name] == TAPS:
        only += ["full_rate", "full_rate_of_taps"]
    simulate(CONFIGS[name], *only, programs=8, swapped=name != "4x4")


@pytest.mark.parametrize("field", ["packed", "forward", "alu", "int32", "ports", "taps", "residual_cycles", "batch"])
def test_random_programs_run_with_and_without(field: str) -> None:
    """The tested Configs differ in each optional part."""
    assert len({getattr(CONFIGS[name], field) for name in VARIED}) > 1


@pytest.mark.rtl
def test_a_wrong_instruction_is_noticed() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"program 0: \d+ bytes differ, the first at 0x"):
        simulate(TAPS, "equals_reference", programs=1, fault=True)


@pytest.mark.rtl
@pytest.mark.thorough
def test_one_port_at_full_rate() -> None:
    simulate(replace(TAPS, ports=1), "full_rate")


def test_all_presets_have_the_same_ports() -> None:
    """Presets have the same port names, so that drivers and simulators work for all; a second read port adds one."""
    from celosia.hw.top import Accelerator

    names = {name: set(Accelerator(cfg).signature.members) for name, cfg in PRESETS.items()}
    for name, ports in names.items():
        assert ports == names["tiny"] | ({"m_axi1"} if PRESETS[name].ports == 2 else set())


# Programs ------------------------------------------------------------------------------------------------


@cocotb.test()
async def equals_reference(dut: bench.Dut) -> None:
    cfg = bench.config()
    machine = Host(dut)
    await machine.begin()
    state = State(cfg)  # buffers keep their contents from run to run
    events: list[tuple[str, str, int]] = []
    cocotb.start_soon(record(dut, events))
    for number in range(tries(bench.params()["programs"])):
        align = [None, 1, None, cfg.bus_bytes][number % 4]
        program = programs.random_program(cfg, random.getrandbits(32), count=25, align=align)
        words, expected = program.words(), program.image.copy()
        place(expected, cfg, program.instr_addr, words)
        for index, word in enumerate(words):
            execute(state, expected, word, index)
        machine.pause([0, 0, 0.3, 0.7][number % 4])
        events.clear()
        if bench.params().get("fault"):
            words[-1] ^= 1 << formats(cfg)[Opcode.STORE].offsets["sram_base"]
        assert await machine.run(program.image, program.instr_addr, words) == (Error.NONE, 0)
        differing = np.flatnonzero(program.image != expected)
        assert not len(differing), f"program {number}: {len(differing)} bytes differ, the first at {differing[0]:#x}"
        check_events(words, events)
        counters = await machine.counters()
        assert counters["write_beats"] > 0
        assert counters["read_beats"] * cfg.bus_bytes >= len(words) * instruction_bytes(cfg)


def test_check_of_events_finds_faults() -> None:
    cfg = CONFIGS["4x4"]
    words = [encode(cfg, Opcode.LOAD, post=2), encode(cfg, Opcode.GEMM, wait=1)]
    events = [("load", "start", 0), ("load", "done", 0), ("gemm", "start", 1), ("gemm", "done", 1)]
    check_events(words, events)
    with pytest.raises(AssertionError, match="instruction 1 did not wait for LOAD"):
        check_events(words, [events[0], events[2], events[1], events[3]])
    with pytest.raises(AssertionError, match="gemm done"):
        check_events(words, events[:3])


# Errors --------------------------------------------------------------------------------------------------

CODE, RESULT, LIMIT = 0x8000, 0x6000, 0xC000
GEMM_ONES = {f"extent_{loop}": 1 for loop in "nyxkrs"}
VECTOR_ONES = {f"extent_{loop}": 1 for loop in "nyxrs"}


def whole_path(cfg: Config) -> list[int]:
    """Return a program that loads, multiplies, clips and stores; earlier contents of buffers do not affect it."""
    row = {"y_size": 1, "z_size": 1, "sram_x": 1}
    tokens = {unit: 1 << unit for unit in Unit}
    return [
        encode(cfg, Opcode.LOAD, buffer=0, x_size=4 * cfg.inp_pieces, dram_addr=0x40, **row),
        encode(cfg, Opcode.LOAD, buffer=1, x_size=2, dram_addr=0x200, **row, post=tokens[Unit.GEMM]),
        encode(
            cfg, Opcode.GEMM, **(GEMM_ONES | {"extent_n": 2, "extent_x": 4}), acc_n=4, acc_x=1, inp_x=1, wgt_n=1,
            wait=tokens[Unit.LOAD], post=tokens[Unit.VECTOR],
        ),
        encode(
            cfg, Opcode.VECTOR, **(VECTOR_ONES | {"extent_x": 8}), a_x=1, dst_x=1, destination=1, clip_lo=-128,
            clip_hi=127, wait=tokens[Unit.GEMM], post=tokens[Unit.STORE],
        ),
        encode(
            cfg, Opcode.STORE, x_size=8 * cfg.out_pieces, dram_addr=RESULT + 3, **row, wait=tokens[Unit.VECTOR],
        ),
    ]  # fmt: skip


def harmless(cfg: Config, count: int) -> list[int]:
    """Draw `count` instructions for all units that work without errors, in any order."""
    rows = {"x_size": 30, "y_size": 4, "z_size": 1, "sram_x": 1, "dram_y": 200}
    choice = [
        encode(cfg, Opcode.LOAD, dram_addr=0x1000, pad_top=2, **rows),
        encode(cfg, Opcode.LOAD, dram_addr=0x1000, buffer=1, **(rows | {"x_size": 6})),
        encode(cfg, Opcode.GEMM, **(GEMM_ONES | {"extent_x": 50})),
        encode(cfg, Opcode.VECTOR, **(VECTOR_ONES | {"extent_x": 50}), destination=1),
        encode(cfg, Opcode.STORE, dram_addr=RESULT, **rows),
    ]
    return [random.choice(choice) for _ in range(count)]


@cocotb.test()
async def every_error_ends_the_run(dut: bench.Dut) -> None:
    cfg = bench.config()
    bad = range(0)
    machine = Host(dut, base=0, latency=10, fails=lambda addr: addr in bad)
    await machine.begin()
    block = {"x_size": 4, "y_size": 2, "z_size": 1, "dram_y": 64}
    cases: list[tuple[Error, int, range]] = [
        (Error.ILLEGAL_INSTRUCTION, 0, range(0)),
        (Error.ILLEGAL_INSTRUCTION, encode(cfg, Opcode.LOAD, **block, buffer=len(buffers(cfg))), range(0)),
        (Error.ADDRESS, encode(cfg, Opcode.LOAD, **block, dram_addr=LIMIT - 64), range(0)),
        (Error.ADDRESS, encode(cfg, Opcode.LOAD, **block, dram_addr=(1 << 32) - 8), range(0)),
        (Error.ADDRESS, encode(cfg, Opcode.STORE, **block, dram_addr=LIMIT - 79), range(0)),
        (Error.READ, encode(cfg, Opcode.LOAD, **block, dram_addr=0x100), range(0x140, 0x150)),
        (Error.WRITE, encode(cfg, Opcode.STORE, **block, dram_addr=0x5000), range(0x5040, 0x5050)),
        (Error.READ, 0, range(CODE + 20 * instruction_bytes(cfg), LIMIT)),
        (Error.ADDRESS, encode(cfg, Opcode.LOAD, **block, buffer=1, dram_addr=LIMIT - 64), range(0)),
        (Error.READ, encode(cfg, Opcode.LOAD, **block, buffer=1, dram_addr=0x100), range(0x140, 0x150)),
    ]
    expected = bench.generator().integers(0, 256, LIMIT, np.uint8)
    place(expected, cfg, CODE, whole_path(cfg))
    start = expected.copy()
    state = State(cfg)
    for index, word in enumerate(whole_path(cfg)):
        execute(state, expected, word, index)
    for pause in (0, 0.5):  # half of the cases with each; another Config has the other halves
        assert machine.model is not None
        machine.model.pause = pause
        if machine.second:
            machine.second.pause = pause
        for code, word, addresses in cases[(pause > 0) ^ bench.params()["swapped"] :: 2]:
            bad = range(BASE + addresses.start, BASE + addresses.stop) if addresses else range(0)
            before = harmless(cfg, 20 if addresses.stop == LIMIT else random.randrange(20))
            words = [*before, word, *harmless(cfg, 10)]
            assert await machine.run(start.copy(), CODE, words) == (code, len(before))
            # The next run must be right.
            bad = range(0)
            dram = start.copy()
            assert await machine.run(dram, CODE, whole_path(cfg)) == (Error.NONE, 0)
            assert (dram == expected).all()
    # Instructions outside of the limits, and an empty program.
    dram = start[: CODE + 10 * instruction_bytes(cfg)].copy()
    await machine.write("instr_count", 0)
    assert await machine.run(dram, CODE, harmless(cfg, 10)) == (Error.NONE, 0)
    assert await machine.run(dram, CODE, []) == (Error.NONE, 0)
    machine.model.data[BASE + len(dram) : BASE + len(dram) + 64] = bytes(64)
    assert await machine.run(dram[:-1], CODE, harmless(cfg, 9)) == (Error.NONE, 0)
    assert await machine.run(dram, CODE + 8, []) == (Error.NONE, 0)
    assert await machine.run(dram, CODE + 8, harmless(cfg, 1)) == (Error.ADDRESS, 0)


@cocotb.test()
async def watchdog_names_the_instruction(dut: bench.Dut) -> None:
    cfg = bench.config()
    machine = Host(dut)
    await machine.begin()
    dram = np.zeros(LIMIT, np.uint8)
    ones = {"x_size": 1, "y_size": 1, "z_size": 1} | GEMM_ONES
    for stuck in Unit:
        opcode = Opcode(stuck + 1)
        fields = {Unit.GEMM: GEMM_ONES, Unit.VECTOR: VECTOR_ONES}.get(stuck, dict(list(ones.items())[:3]))
        word = encode(cfg, opcode, **fields)
        waits = encode(cfg, opcode, **fields, wait=1 << (stuck + 1) % 4)
        words = [*harmless(cfg, 5), waits, *[word] * 12]  # more than the queue holds
        assert await machine.run(dram, CODE, words, watchdog=300) == (Error.WATCHDOG, 5)
        assert (await machine.counters())[f"{stuck.name.lower()}_wait_token"] > 290
    # No unit takes the tokens, so the semaphore is full and the next instruction that posts must wait.
    room = (1 << cfg.token_bits) - 1
    dram = np.zeros(CODE + (room + 5) * instruction_bytes(cfg), np.uint8)
    words = [encode(cfg, Opcode.GEMM, post=1, **GEMM_ONES)] * (room + 5)
    assert await machine.run(dram, CODE, words, watchdog=300) == (Error.WATCHDOG, room)
    # Memory that never answers: on the second port, if there is one, then on the first.
    if machine.second:
        machine.second.r_channel.set_pause_generator(repeat(True))
        weights = encode(cfg, Opcode.LOAD, buffer=1, x_size=1, y_size=1, z_size=1)
        assert await machine.run(dram, CODE, [*harmless(cfg, 3), weights, weights], watchdog=300) == (Error.WATCHDOG, 4)
        assert await machine.read("status") & STATUS_STUCK
        machine.second.r_channel.set_pause_generator(repeat(False))
        while await machine.read("status") & STATUS_STUCK:  # no run starts before the last one has all its answers
            pass
    machine.ram.read_if.r_channel.set_pause_generator(repeat(True))
    assert await machine.run(dram, CODE, harmless(cfg, 3), watchdog=300) == (Error.WATCHDOG, 0)


@cocotb.test()
async def gemm_is_busy(dut: bench.Dut) -> None:
    """With many tile operations in a few instructions, GEMM is busy in at least 99% of the cycles of the run."""
    cfg = bench.config()
    machine = Host(dut)
    await machine.begin()
    extents = {"extent_n": 2, "extent_y": 4, "extent_x": 4, "extent_k": 10, "extent_r": 3, "extent_s": 3}
    strides = {"acc_n": 5, "acc_y": 3, "acc_x": 1, "inp_k": 1, "wgt_s": 1}
    words = [encode(cfg, Opcode.GEMM, accumulate=i % 2, **extents, **strides) for i in range(5)]
    dram = np.zeros(LIMIT, np.uint8)
    assert await machine.run(dram, CODE, words) == (Error.NONE, 0)
    counters = await machine.counters()
    assert counters["gemm_busy"] == len(words) * np.prod(list(extents.values()))
    assert counters["gemm_busy"] >= 0.99 * counters["cycles"], counters


@cocotb.test()
async def full_rate(dut: bench.Dut) -> None:
    """Each unit executes 4,008 steps at one a cycle; all of them together take at most 3% longer."""
    cfg = bench.config()
    machine = Host(dut, base=0, latency=20)
    await machine.begin()
    await all_at_once(cfg, machine, {"a_base": cfg.acc_depth // 2})


@cocotb.test()
async def full_rate_of_taps(dut: bench.Dut) -> None:
    """VECTOR computes one product for each tap and lane in each cycle, with results in OUT or INP."""
    cfg = bench.config()
    machine = Host(dut, base=0, latency=20)
    await machine.begin()
    taps_fields = {"a_source": ASource.VIN, "taps": 1, "a_x": 1}
    to_inp = taps_fields | {"destination": Destination.INP, "extent_r": 3, "a_r": 5, "tap_r": 1}
    for vector in (taps_fields, to_inp) if bench.THOROUGH else (to_inp,):
        await all_at_once(cfg, machine, vector)


async def all_at_once(cfg: Config, machine: Host, vector: dict[str, int]) -> None:
    """Run all units at once. vector: fields of the VECTOR; the extent of loop x follows from that of loop r."""
    steps = 4008
    rows = {"x_size": steps // 8, "y_size": 8, "z_size": 1, "dram_y": steps, "sram_x": 1}
    words = [
        encode(cfg, Opcode.GEMM, **(GEMM_ONES | {"extent_y": steps // 8, "extent_k": 8}), inp_k=1, wgt_k=1),
        encode(cfg, Opcode.VECTOR, **(VECTOR_ONES | {
            "extent_x": steps // vector.get("extent_r", 1), "dst_x": 1, "destination": Destination.OUT,
            "requantise": 1, "lookup": 1,
        } | vector)),
        encode(cfg, Opcode.LOAD, buffer=3, dram_addr=0, **rows),
        encode(cfg, Opcode.STORE, dram_addr=RESULT, **(rows | {"dram_y": 0})),
    ]  # fmt: skip
    if cfg.ports == 2:
        weights = rows | {"x_size": steps // 24, "y_size": 3}  # 8 steps each
        words.append(encode(cfg, Opcode.LOAD, buffer=1, dram_addr=0, **weights))
    assert await machine.run(np.zeros(LIMIT, np.uint8), CODE, words) == (Error.NONE, 0)
    counters = await machine.counters()
    lanes = {"load": cfg.ports}
    assert all(counters[f"{name}_busy"] == steps * lanes.get(name, 1) for name in NAMES), counters
    assert counters["read_beats"] == steps * cfg.ports + len(words) * instruction_bytes(cfg) // cfg.bus_bytes
    assert steps >= 0.97 * counters["cycles"], counters
