"""Compare the semaphores and gates with lists of tokens."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import bench
import cocotb
import pytest
from thorough import some

from celosia.hw.dae_pipeline.tokens import DependencyGate
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Opcode, Unit, formats

OPCODE_OF = {unit: opcode for opcode, unit in UNIT_OF.items()}


@pytest.mark.rtl
@pytest.mark.parametrize("token_bits", some([2, 8], [2]))  # 8 bits are never full, here and in whole accelerators
def test_tokens(token_bits: int) -> None:
    cfg = Config(block_in=4, block_out=4, token_bits=token_bits)
    bench.run(partial(DependencyGate, cfg), __file__, cfg=cfg)


def program(cfg: Config, length: int) -> list[tuple[Unit, int, int]]:
    """Draw (unit, wait, post) of instructions that can run in this order with the tokens that `cfg` can hold."""
    token_limit = (1 << cfg.token_bits) - 1
    tokens: Counter[tuple[Unit, Unit]] = Counter()
    instructions = []
    for _ in range(length):
        unit = random.choice(list(Unit))
        wait = [u for u in Unit if u != unit and tokens[u, unit] and random.random() < 0.7]
        post = [u for u in Unit if u != unit and tokens[unit, u] < token_limit and random.random() < 0.5]
        tokens.subtract((u, unit) for u in wait)
        tokens.update((unit, u) for u in post)
        instructions.append((unit, sum(1 << u for u in wait), sum(1 << u for u in post)))
    return instructions


def payload(cfg: Config, unit: Unit, index: int, wait: int, post: int) -> int:
    return bench.instruction(cfg, OPCODE_OF[unit], index, wait=wait, post=post)


def masks(cfg: Config, opcode: Opcode, word: int) -> tuple[list[Unit], list[Unit]]:
    fields = formats(cfg)[opcode].decode(word >> bench.INDEX_BITS)
    return [u for u in Unit if fields["wait"] >> u & 1], [u for u in Unit if fields["post"] >> u & 1]


NAMES = [unit.name.lower() for unit in Unit]


@cocotb.test()
@cocotb.parametrize(pause=[0.0, 0.5])
async def equals_model(dut: bench.Dut, pause: float) -> None:
    cfg = bench.config()
    await bench.start(dut, streams=[f"passed__{name}" for name in NAMES])
    instructions = program(cfg, 400)
    sent: dict[Unit, list[int]] = {unit: [] for unit in Unit}
    for index, (unit, wait, post) in enumerate(instructions):
        sent[unit].append(payload(cfg, unit, index, wait, post))
    takers = []
    running: dict[Unit, list[int]] = {unit: [] for unit in Unit}  # passed, not done
    for unit, name in zip(Unit, NAMES):
        cocotb.start_soon(bench.stream_put(dut, f"queues__{name}", sent[unit], pause))
        takers.append(cocotb.start_soon(bench.stream_get(dut, f"passed__{name}", len(sent[unit]), pause)))
        cocotb.start_soon(finish(dut, cfg, unit, running[unit], pause))
    cocotb.start_soon(check(dut, cfg, running))
    for unit, taker in zip(Unit, takers):
        assert await taker == sent[unit]


async def finish(dut: bench.Dut, cfg: Config, unit: Unit, running: list[int], pause: float) -> None:
    """Send `done` for the instructions of a unit, in order, at random times."""
    done = f"done__{unit.name.lower()}"
    valid, out = getattr(dut, f"{done}__valid"), getattr(dut, f"{done}__payload")
    while True:
        if running and random.random() >= pause:
            word = running.pop(0)
            _, post = masks(cfg, OPCODE_OF[unit], word)
            valid.value, out.value = 1, sum(1 << u for u in post) | (word & 0xFFFFFF) << 4
        else:
            valid.value = 0
        await bench.rise(dut)


async def check(dut: bench.Dut, cfg: Config, running: dict[Unit, list[int]]) -> None:
    """Check in each cycle that a gate is open exactly if a list of tokens and promised tokens permits it."""
    token_limit = (1 << cfg.token_bits) - 1
    tokens: Counter[tuple[Unit, Unit]] = Counter()
    promised: Counter[tuple[Unit, Unit]] = (
        Counter()
    )  # tokens that are there, and those that running instructions will post
    while True:
        await bench.fall(dut)
        taken, granted, posted, passed = [], [], [], []
        waiting = 0
        for unit, name in zip(Unit, NAMES):
            queue = {part: getattr(dut, f"queues__{name}__{part}").value for part in ("valid", "ready", "payload")}
            instr_valid, instr_ready = (
                bench.value(getattr(dut, f"passed__{name}__{part}")) for part in ("valid", "ready")
            )
            if queue["valid"]:
                word = int(queue["payload"])
                wait, post = masks(cfg, OPCODE_OF[unit], word)
                is_open = all(tokens[u, unit] for u in wait) and all(promised[unit, u] < token_limit for u in post)
                assert bool(instr_valid) == is_open, f"{name}: valid is {instr_valid}, expected {is_open}"
                assert bool(queue["ready"]) == (is_open and bool(instr_ready))
                waiting |= (not is_open) << unit
                if is_open and instr_ready:
                    passed.append((unit, word))
                    taken += [(u, unit) for u in wait]
                    granted += [(unit, u) for u in post]
            else:
                assert not instr_valid
            if getattr(dut, f"done__{name}__valid").value:
                mask = bench.value(getattr(dut, f"done__{name}__payload")) & 15
                posted += [(unit, u) for u in Unit if mask >> u & 1]
        assert bench.value(dut.wait_token) == waiting
        tokens.update(posted)
        tokens.subtract(taken)
        promised.subtract(taken)
        promised.update(granted)
        assert all(0 <= tokens[pair] <= promised[pair] <= token_limit for pair in promised)
        await bench.rise(dut)
        for unit, word in passed:
            running[unit].append(word)


@cocotb.test()
async def waits(dut: bench.Dut) -> None:
    """An instruction waits for a missing token."""
    cfg = bench.config()
    await bench.start(dut)
    dut.passed__gemm__ready.value = 1
    dut.queues__gemm__valid.value = 1
    dut.queues__gemm__payload.value = payload(cfg, Unit.GEMM, 7, 1 << Unit.LOAD | 1 << Unit.STORE, 0)
    for giver in ("store", "load"):
        for cycle in range(20):
            await bench.fall(dut)
            assert bench.value(dut.wait_token) == 1 << Unit.GEMM and not dut.passed__gemm__valid.value
            assert cycle < 5 or bench.value(dut.oldest) == 7
        await bench.rise(dut)
        getattr(dut, f"done__{giver}__payload").value = 1 << Unit.GEMM
        getattr(dut, f"done__{giver}__valid").value = 1
        await bench.rise(dut)
        getattr(dut, f"done__{giver}__valid").value = 0
    await bench.fall(dut)
    assert dut.passed__gemm__valid.value and not dut.wait_token.value
    await bench.rise(dut)
    assert not dut.queues__vector__ready.value
    dut.queues__gemm__payload.value = payload(cfg, Unit.GEMM, 9, 1 << Unit.LOAD, 0)
    dut.queues__vector__valid.value = 1
    for index, oldest in ((10, 9), (8, 8)):
        dut.queues__vector__payload.value = payload(cfg, Unit.VECTOR, index, 1 << Unit.LOAD, 0)
        for _ in range(6):
            await bench.fall(dut)
        assert bench.value(dut.oldest) == oldest
    dut.queues__gemm__valid.value = dut.queues__vector__valid.value = 0
    for _ in range(6):
        await bench.fall(dut)
    assert bench.value(dut.oldest) == 7, "the last one that passed"


@cocotb.test()
async def full_rate(dut: bench.Dut) -> None:
    """LOAD and GEMM start one instruction a cycle, with a token from each LOAD to a GEMM."""
    cfg = bench.config()
    await bench.start(dut)
    count = 50
    started: dict[str, list[int]] = {"load": [], "gemm": []}
    cocotb.start_soon(note(dut, started))
    loads = [payload(cfg, Unit.LOAD, i, 0, 1 << Unit.GEMM) for i in range(count)]
    gemms = [payload(cfg, Unit.GEMM, i, 1 << Unit.LOAD, 0) for i in range(count)]
    cocotb.start_soon(bench.stream_put(dut, "queues__load", loads))
    cocotb.start_soon(bench.stream_put(dut, "queues__gemm", gemms))
    cocotb.start_soon(bench.stream_get(dut, "passed__load", count))
    cocotb.start_soon(echo(dut))
    await bench.stream_get(dut, "passed__gemm", count)
    for name, cycles in started.items():
        assert cycles == list(range(cycles[0], cycles[0] + count)), name


async def echo(dut: bench.Dut) -> None:
    """End each LOAD one cycle after its start."""
    while True:
        await bench.fall(dut)
        passes = dut.passed__load__valid.value and dut.passed__load__ready.value
        await bench.rise(dut)
        dut.done__load__valid.value = int(bool(passes))
        dut.done__load__payload.value = 1 << Unit.GEMM


async def note(dut: bench.Dut, started: dict[str, list[int]]) -> None:
    cycle = 0
    while True:
        await bench.fall(dut)
        for name, cycles in started.items():
            if getattr(dut, f"passed__{name}__valid").value and getattr(dut, f"passed__{name}__ready").value:
                cycles.append(cycle)
        cycle += 1
