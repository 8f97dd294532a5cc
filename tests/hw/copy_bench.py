"""Test bench of LOAD and STORE: a unit with its DRAM, and the runs that both units must pass."""

from __future__ import annotations

import random
from typing import Any

import bench
import cocotb
import numpy as np
from axi_model import DECERR, SLVERR, Checker, Memory

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, formats
from celosia.hw.spec.regs import Error

BASE = 0x12_3456_7000


class Machine:
    """A unit, its scratchpads and DRAM, and a model of their expected content."""

    opcode: Opcode
    failed_burst: Error
    """The error that the unit reports if memory answers a burst with an error."""

    def __init__(self, dut: Any, cfg: Config, dram_bytes: int) -> None:
        from celosia.sim.functional.reference import State

        self.dut, self.cfg = dut, cfg
        self.rng = bench.generator()
        self.dram = self.rng.integers(0, 256, dram_bytes, np.uint8)
        self.state = State(cfg)
        self.done: list[int] = []
        self.errors: list[int] = []
        self.models: list[Memory] = []
        self.checker = Checker(cfg.bus_bytes, BASE, dram_bytes)

    async def start(self, pause: float, ram: bool = False, **memory: Any) -> None:
        """Reset the unit, then start everything around it. ram: use cocotbext-axi's memory instead of axi_model's."""
        await bench.start(self.dut)
        cocotb.start_soon(bench.check_stream(self.dut, "instr", unless="halt"))
        self.dut.dma_base.value = BASE
        self.dut.dma_size.value = len(self.dram)
        cocotb.start_soon(bench.pulses_get(self.dut, "done", self.done))
        cocotb.start_soon(bench.pulses_get(self.dut, "error", self.errors))

    def random_block(self) -> dict[str, int]:
        """Draw the fields of a legal instruction."""
        raise NotImplementedError

    def compare(self, case: str) -> None:
        """Compare the memories with the model; `case` names the case in a message."""
        raise NotImplementedError

    def settle(self) -> None:
        """Copy the memories into the model, because a failed run may have written any part of its data."""
        raise NotImplementedError

    def calm(self) -> bool:
        """Return True if nothing moves on the bus."""
        raise NotImplementedError

    def execute(self, fields: dict[str, int]) -> None:
        from celosia.sim.functional import reference

        fmt = formats(self.cfg)[self.opcode]
        meaning = {Opcode.LOAD: reference.load, Opcode.STORE: reference.store}[self.opcode]
        meaning(self.state, self.dram, fmt.decode(fmt.encode(**fields)))

    def payloads(self, blocks: list[dict[str, int]], first: int = 0) -> list[int]:
        return [bench.instruction(self.cfg, self.opcode, index=first + i, **block) for i, block in enumerate(blocks)]

    async def finished(self, count: int, limit: int = 50_000) -> None:
        """Wait for `count` pulses of `done`."""
        for _ in range(limit):
            if len(self.done) >= count:
                await bench.fall(self.dut)
                return
            await bench.fall(self.dut)
        raise AssertionError(f"{len(self.done)} of {count} instructions done; errors {self.errors}")


def expected_done(blocks: list[dict[str, int]]) -> list[int]:
    return [block.get("post", 0) | index << 4 for index, block in enumerate(blocks)]


def pausing(pause: float) -> Any:
    """Return a pause generator for a channel of cocotbext-axi."""
    return iter(lambda: int(random.random() < pause), None)


async def random_blocks(machine: Machine, count: int, pause: float) -> None:
    blocks = [machine.random_block() for _ in range(bench.tries(count))]
    for block in blocks:
        machine.execute(block)
    cocotb.start_soon(bench.stream_put(machine.dut, "instr", machine.payloads(blocks), pause))
    await machine.finished(len(blocks))
    assert machine.dut.idle.value
    assert not machine.errors
    assert machine.done == expected_done(blocks)
    machine.compare("after all")


async def one_at_a_time(machine: Machine, count: int) -> None:
    for index in range(bench.tries(count)):
        block = machine.random_block()
        machine.execute(block)
        await bench.stream_put(machine.dut, "instr", machine.payloads([block], index))
        assert len(machine.done) == index
        await machine.finished(index + 1)
        machine.compare(f"instruction {index}, {block}")
        await bench.rise(machine.dut)


async def errors_end_quietly(machine: Machine, elsewhere: dict[str, int] | None = None, row: int = 0) -> None:
    """Run good instructions, a failing one, and good ones that must not finish; after halt, everything works again.

    DRAM has 8192 bytes, and memory answers addresses 4000 to 4400 with errors. elsewhere: fields that send the failing
    instruction through another channel than the good ones; it does not wait for them then. row: bytes of each of its
    rows (default: as in the good instructions). Contiguous rows are one transfer, whose end is known at once.
    """
    dut, piece = machine.dut, machine.cfg.piece_bytes
    row = row or 20 * piece
    good = {"x_size": 20, "y_size": 2, "z_size": 1, "dram_y": 500, "sram_x": 1, "sram_y": 20}
    cases = {
        "end": {"dram_addr": 8192 - 500 - 20 * piece + 1},
        "far": {"dram_addr": 1 << 31},
        "wraps": {"dram_addr": (1 << 32) - 10 * piece},
        "merged": {"dram_addr": 0, "dram_y": row, "y_size": 8192 // row + 1},
        "slverr": {"dram_addr": 4000},
        "decerr": {"dram_addr": 4000},
    }
    if elsewhere and not bench.THOROUGH:  # each channel has the same checks
        cases = {name: cases[name] for name in ("end", "slverr")}
    responses = {"slverr": SLVERR, "decerr": DECERR}
    for case, bad in cases.items():
        for model in machine.models:
            model.errors = (responses.get(case, SLVERR),)
        machine.done.clear()
        machine.errors.clear()
        blocks = [good, good | {"dram_addr": 1000}, good | bad | (elsewhere or {}), *[good | {"dram_addr": 2000}] * 12]
        put = cocotb.start_soon(bench.stream_put(dut, "instr", machine.payloads(blocks)))
        for _ in range(3000):
            await bench.fall(dut)
            if machine.errors:
                break
        code = machine.failed_burst if case in responses else Error.ADDRESS
        assert machine.errors == [code | 2 << 4], f"{case}: {machine.errors}"
        for _ in range(random.randint(1, 6)):
            await bench.rise(dut)
        put.cancel()
        dut.instr__valid.value = 0
        dut.halt.value = 1
        for _ in range(500):
            await bench.fall(dut)
            if dut.idle.value:
                break
        for _ in range(100):
            assert dut.idle.value and machine.calm(), case
            await bench.fall(dut)
        assert machine.done == expected_done(blocks[: len(machine.done) if elsewhere else 2]), case
        assert len(machine.done) <= 2 and len(machine.errors) == 1, case
        await bench.rise(dut)
        dut.halt.value = 0
        await _works_again(machine, good, case)


async def _works_again(machine: Machine, good: dict[str, int], case: str) -> None:
    machine.done.clear()
    machine.settle()
    again = [good | {"dram_addr": 100 * i} for i in range(12)]
    for block in again:
        machine.execute(block)
    await bench.stream_put(machine.dut, "instr", machine.payloads(again))
    await machine.finished(len(again))
    assert machine.dut.idle.value and len(machine.errors) == 1, case
    machine.compare(case)
    await bench.rise(machine.dut)
