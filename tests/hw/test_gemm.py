"""Compare the gemm unit with sim/functional/reference.py."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import bench
import cocotb
import numpy as np
import pytest
from configs import COVERING, COVERING_PAIR
from thorough import some, tries

from celosia.hw.gemm_core.gemm import Gemm
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import GEMM_LOOPS, OUTER_LOOPS, Opcode, encode, formats
from celosia.sim.functional import reference

pytestmark = pytest.mark.rtl

SMALL = dict(inp_depth=64, wgt_depth=32, acc_depth=16)
CONFIGS = {name: replace(cfg, **SMALL) for name, cfg in COVERING.items()} | {
    "2x2": Config(block_in=2, block_out=2, **SMALL),
    "16x16": Config(**SMALL),
}


@pytest.mark.parametrize("name", some(CONFIGS, ["4x4", COVERING_PAIR[0]]))
def test_gemm(name: str) -> None:
    bench.run(partial(Gemm, CONFIGS[name]), __file__, cfg=CONFIGS[name])


@pytest.mark.thorough  # `test_gemm` has seed 1
@pytest.mark.parametrize("seed", range(2, 6))
def test_gemm_seeds(seed: int) -> None:
    cfg = CONFIGS["8x4-batch2-taps5"]
    bench.run(partial(Gemm, cfg), __file__, cfg=cfg, seed=seed, only=["random_instructions"])


def random_fields(cfg: Config) -> dict[str, int]:
    """Draw a GEMM with few steps; addresses repeat often, and many loops have one iteration."""
    fields = {f"extent_{loop}": random.choice([1, 1, 1, 2, 3]) for loop in GEMM_LOOPS}
    fields |= {"accumulate": random.getrandbits(1), "post": random.getrandbits(4) & 0b1101}
    for operand, depth, loops in (
        ("acc", cfg.acc_depth, OUTER_LOOPS),
        ("inp", cfg.inp_depth, GEMM_LOOPS),
        ("wgt", cfg.wgt_depth, GEMM_LOOPS),
    ):
        for part in ("base", *loops):
            fields[f"{operand}_{part}"] = random.choice([0, 0, 1, random.randrange(depth)])
    return fields


def outputs(fields: dict[str, int]) -> int:
    return math.prod(fields[f"extent_{loop}"] for loop in OUTER_LOOPS)


def steps(fields: dict[str, int]) -> int:
    return math.prod(fields[f"extent_{loop}"] for loop in GEMM_LOOPS)


def test_a_wrong_accumulator_is_noticed() -> None:
    cfg = CONFIGS["4x4"]
    with pytest.raises(pytest.fail.Exception, match=r"accumulator 3, piece 0, batch 0, lane 2: expected 7, found 8"):
        bench.run(partial(Gemm, cfg), __file__, cfg=cfg, only=["planted_fault"])


class Machine:
    """A gemm unit, the memories around it, and the state that the reference expects."""

    def __init__(self, dut):
        self.dut, self.cfg = dut, bench.config()
        self.state = reference.State(self.cfg)
        rng = bench.generator()
        for array in (self.state.inp, self.state.wgt):
            array[:] = rng.integers(-128, 128, array.shape)
            array[rng.random(array.shape) < 0.2] = -128
        self.state.acc[:] = rng.integers(-(2**31), 2**31, self.state.acc.shape)
        self.acc = bench.pack(self.state.acc)
        self.reads = self.writes = self.active = 0

    async def run(self, instructions, memory_pause=0.0, instr_pause=0.0, timeout=20_000):
        """Execute, compare the accumulators and check `done`, `active`, `stalled`, `idle` and the accesses to acc."""
        dut = self.dut
        await bench.start(dut, timeout=timeout)
        for port, array in (("inp", self.state.inp), ("wgt", self.state.wgt)):
            cocotb.start_soon(bench.memory(dut, bench.pack(array), [port], pause=memory_pause))
        cocotb.start_soon(bench.memory(dut, self.acc, ["acc_read"], ["acc_write"], grain=32))
        await bench.rise(dut)
        payloads = [bench.instruction(self.cfg, Opcode.GEMM, i, **fields) for i, fields in enumerate(instructions)]
        cocotb.start_soon(bench.stream_put(dut, "instr", payloads, instr_pause))

        expected_writes = 0
        for index, fields in enumerate(instructions):
            word = encode(self.cfg, Opcode.GEMM, **fields)
            reference.gemm(self.state, formats(self.cfg)[Opcode.GEMM].decode(word))
            expected_writes += outputs(fields)
            while not await self.cycle():
                pass
            assert bench.value(dut.done__payload) == fields["post"] | index << 4
            # A write in the cycle of the pulse belongs to the next instruction.
            assert self.writes - bench.value(dut.acc_write__en) == expected_writes, f"done of {index} at the wrong time"
        assert self.active == sum(map(steps, instructions))
        assert self.reads == sum(outputs(fields) for fields in instructions if fields["accumulate"])
        assert not dut.idle.value, "quiet while done is given"
        assert not await self.cycle()
        assert dut.idle.value
        self.compare()

    def compare(self):
        accumulators = bench.unpack(self.acc, self.state.acc)
        for place in np.argwhere(accumulators != self.state.acc)[:1]:
            entry, piece, batch, lane = (int(index) for index in place)
            expected, value = self.state.acc[*place], accumulators[*place]
            location = f"accumulator {entry}, piece {piece}, batch {batch}, lane {lane}"
            raise AssertionError(f"{location}: expected {expected}, found {value}")

    async def cycle(self):
        """Simulate one cycle, up to its middle, count its activity, and return True if `done` came."""
        dut = self.dut
        await bench.fall(dut)
        active, held = bench.value(dut.active), bench.value(dut.stalled)
        assert active + held == bench.value(dut.inp__en) == bench.value(dut.wgt__en)
        assert active == int(dut.inp__en.value and dut.inp__ready.value and dut.wgt__ready.value)
        assert not (dut.idle.value and (active or held or dut.acc_write__en.value))
        assert not dut.error__valid.value
        self.active += active
        self.reads += bench.value(dut.acc_read__en)
        self.writes += bench.value(dut.acc_write__en)
        return bool(bench.value(dut.done__valid))


@cocotb.test()
@cocotb.parametrize(memory_pause=[0.0, 0.4], instr_pause=[0.0, 0.8])
async def random_instructions(dut, memory_pause, instr_pause):
    machine = Machine(dut)
    instructions = [random_fields(machine.cfg) for _ in range(tries(100 if machine.cfg.macs_per_cycle < 200 else 30))]
    await machine.run(instructions, memory_pause, instr_pause)


@cocotb.test()
async def repeated_accumulator(dut):
    """Every step is an output, and adds to the same few accumulators, also across instructions."""
    machine = Machine(dut)
    instructions = [
        {
            "accumulate": 1, "post": 0, "acc_base": random.getrandbits(1), "acc_x": random.getrandbits(1), "acc_y": 1,
            "inp_x": 1, "wgt_x": 1, "inp_y": 3,
            **{f"extent_{loop}": 1 for loop in GEMM_LOOPS}, "extent_y": 2, "extent_x": random.randint(1, 4),
        }
        for _ in range(60)
    ]  # fmt: skip
    await machine.run(instructions, timeout=sum(map(steps, instructions)) + 30)


@cocotb.test()
async def extremes(dut):
    """The largest products are right, and sums wrap around."""
    machine = Machine(dut)
    machine.state.inp[:] = machine.state.wgt[:] = -128
    machine.state.acc[:] = 2**31 - 1
    machine.acc[:] = bench.pack(machine.state.acc)
    ones = {f"extent_{loop}": 1 for loop in GEMM_LOOPS}
    long = ones | {"accumulate": 1, "post": 1, "extent_k": 3, "extent_r": 5}
    await machine.run([long, long | {"acc_base": 1, "extent_k": 40}, ones | {"accumulate": 0, "post": 0}])


@cocotb.test()
async def halt(dut):
    """After `halt` the unit is idle within 15 cycles, and the next run is right."""
    machine = Machine(dut)
    await bench.start(dut)
    long = {f"extent_{loop}": 3 for loop in GEMM_LOOPS} | {"accumulate": 1, "post": 0}
    putting = cocotb.start_soon(
        bench.stream_put(dut, "instr", [bench.instruction(machine.cfg, Opcode.GEMM, **long)] * 2)
    )
    dut.inp__ready.value = dut.wgt__ready.value = 1
    await bench.cycles(dut, 50)
    putting.cancel()
    dut.halt.value = 1
    for cycle in range(20):
        await bench.fall(dut)
        assert not (dut.active.value or dut.stalled.value or dut.instr__ready.value)
        assert cycle < 15 or dut.idle.value
        await bench.rise(dut)
    await machine.run([long])


@cocotb.test(skip=True)
async def planted_fault(dut):
    machine = Machine(dut)
    await bench.start(dut)
    machine.state.acc[3, 0, 0, 2] = 7
    machine.acc = bench.pack(machine.state.acc)
    machine.acc[3] += 1 << 64
    machine.compare()


@cocotb.test()
async def full_rate(dut):
    """GEMM does a tile operation in at least 99% of the cycles, for long and for short instructions."""
    machine = Machine(dut)
    long = {f"extent_{loop}": extent for loop, extent in zip(GEMM_LOOPS, (2, 3, 4, 4, 3, 3))}
    long |= {"accumulate": 1, "post": 0, "acc_x": 1, "inp_s": 1, "wgt_k": 1}
    short = {f"extent_{loop}": 1 for loop in GEMM_LOOPS} | {"accumulate": 1, "post": 0, "extent_x": 2}
    instructions = [long] * 2 + [short] * 200
    total = sum(map(steps, instructions))
    await machine.run(instructions, timeout=int(total / 0.99))
