"""STORE against sim/reference.py, with the memories of axi_model.py and of cocotbext-axi."""

from __future__ import annotations

import logging
import random
from functools import partial
from typing import Any

import bench
import cocotb
import numpy as np
import pytest
from axi_model import WRITE, Checker, Memory, check

from celosia.hw.config import PRESETS, Config
from celosia.hw.isa import Opcode, formats
from celosia.hw.regs import Error

pytestmark = pytest.mark.rtl

BASE = 0x12_3456_7000
SMALL = {"out_depth": 64}
CONFIGS = {
    "tiny": Config.from_dict({**PRESETS["tiny"].to_dict(), **SMALL}),
    "8x8": Config(block_in=8, block_out=8, **SMALL),
    "16x16": Config(**SMALL),
    "8x8 batch 2 bus 16": Config(batch=2, block_in=8, block_out=8, bus_bytes=16, **SMALL),
    "4 to 16": Config(block_in=4, block_out=16, bus_bytes=4, **SMALL),
    "16 to 4": Config(block_in=16, block_out=4, bus_bytes=16, **SMALL),
    "2 to 16": Config(block_in=2, block_out=16, bus_bytes=8, **SMALL),
}


def store_of(cfg: Config) -> Any:
    from celosia.hw.dae_pipeline.store import Store

    return Store(cfg)


# pytest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pause", [0.0, 0.4])
def test_random_blocks(name: str, pause: float) -> None:
    cfg = CONFIGS[name]
    first = "address" if name == "tiny" else "data" if name == "16x16" else None
    params = {"pause": pause, "count": 30, "first": first}
    bench.run(partial(store_of, cfg), __file__, cfg=cfg, params=params, only="random_blocks")


@pytest.mark.parametrize("name", ["tiny", "8x8 batch 2 bus 16"])
def test_behind_cocotbext_axi(name: str) -> None:
    cfg = CONFIGS[name]
    params = {"pause": 0.3, "count": 25, "ram": True}
    bench.run(partial(store_of, cfg), __file__, cfg=cfg, params=params, only="random_blocks")


@pytest.mark.parametrize("name", ["tiny", "16x16"])
def test_each_write_is_there_at_done(name: str) -> None:
    cfg = CONFIGS[name]
    bench.run(partial(store_of, cfg), __file__, cfg=cfg, params={"pause": 0.3, "count": 20}, only="one_at_a_time")


@pytest.mark.parametrize("name", ["tiny", "16x16"])
def test_errors_end_quietly(name: str) -> None:
    cfg = CONFIGS[name]
    bench.run(partial(store_of, cfg), __file__, cfg=cfg, only="errors_end_quietly")


def test_halt_at_any_time() -> None:
    cfg = CONFIGS["8x8"]
    bench.run(partial(store_of, cfg), __file__, cfg=cfg, only="halts")


def test_rate() -> None:
    cfg = CONFIGS["16x16"]
    bench.run(partial(store_of, cfg), __file__, cfg=cfg, only="rate")


# Inside the simulation ---------------------------------------------------------------------------------------


class Machine:
    """Scratchpad out and DRAM, and what DRAM should hold."""

    def __init__(self, dut: Any, cfg: Config, dram_bytes: int) -> None:
        from celosia.sim.reference import State

        self.dut, self.cfg = dut, cfg
        rng = bench.generator()
        self.dram = rng.integers(0, 256, dram_bytes, np.uint8)
        self.found = bytearray(self.dram)
        self.state = State(cfg)
        self.state.out[...] = rng.integers(-128, 128, self.state.out.shape, np.int8)
        self.done: list[int] = []
        self.errors: list[int] = []
        self.checker = Checker(cfg.bus_bytes, BASE, dram_bytes)
        self.ram: Any = None

    async def start(self, pause: float, ram: bool = False, **memory: Any) -> None:
        dut = self.dut
        await bench.start(dut)
        cocotb.start_soon(bench.check_stream(dut, "instr", unless="halt"))
        dut.dma_base.value = BASE
        dut.dma_size.value = len(self.dram)
        cocotb.start_soon(bench.memory(dut, bench.pack(self.state.out), reads=["out"], pause=pause / 2))
        cocotb.start_soon(bench.pulses_get(dut, "done", self.done))
        cocotb.start_soon(bench.pulses_get(dut, "error", self.errors))
        cocotb.start_soon(check(dut, "axi", WRITE, self.checker))
        if ram:
            self._cocotbext(pause)
        else:
            model = Memory(dut, self.found, self.cfg.bus_bytes, "axi", BASE, pause=pause, **memory)
            cocotb.start_soon(model.writes())

    def _cocotbext(self, pause: float) -> None:
        from cocotbext.axi import AxiRamWrite, AxiWriteBus

        logging.getLogger("cocotb").setLevel(logging.WARNING)
        self.ram = AxiRamWrite(AxiWriteBus.from_prefix(self.dut, "axi_"), self.dut.clk, self.dut.rst, size=1 << 40)
        self.ram.write(BASE, self.dram.tobytes())
        for channel in (self.ram.aw_channel, self.ram.w_channel, self.ram.b_channel):
            channel.set_pause_generator(iter(lambda: int(random.random() < pause), None))

    def execute(self, fields: dict[str, int]) -> None:
        from celosia.sim import reference

        word = formats(self.cfg)[Opcode.STORE].encode(**fields)
        reference.store(self.state, self.dram, formats(self.cfg)[Opcode.STORE].decode(word))

    def compare(self, what: str) -> None:
        found = self.ram.read(BASE, len(self.dram)) if self.ram else self.found
        wrong = np.flatnonzero(np.frombuffer(bytes(found), np.uint8) != self.dram)
        assert not len(wrong), f"{what}: {len(wrong)} bytes differ, first {wrong[0]}, last {wrong[-1]}"

    async def finished(self, count: int, limit: int = 50_000) -> None:
        """Wait for `count` pulses of `done`."""
        for _ in range(limit):
            if len(self.done) >= count:
                await bench.fall(self.dut)
                return
            await bench.fall(self.dut)
        raise AssertionError(f"{len(self.done)} of {count} instructions done; errors {self.errors}")


def random_block(cfg: Config, dram_bytes: int) -> dict[str, int]:
    """Fields of a legal STORE within `dram_bytes`: any alignment, gaps between rows, none, or rows that overlap."""
    rnd = random.randint
    size = cfg.piece_bytes
    f = {"post": rnd(0, 7), "wait": rnd(0, 7), "x_size": rnd(1, 256 // size), "y_size": rnd(1, 4), "z_size": rnd(1, 3)}
    row = f["x_size"] * size
    aligned = random.choice((1, min(size, cfg.bus_bytes), size))
    f["dram_y"] = random.choice((row, row, rnd(0, 3 * row) // aligned * aligned, 0))
    f["dram_z"] = random.choice((row * f["y_size"], rnd(0, 6 * row) // aligned * aligned))
    reach = row + (f["y_size"] - 1) * f["dram_y"] + (f["z_size"] - 1) * f["dram_z"]
    f["dram_addr"] = random.choice((dram_bytes - reach, rnd(0, dram_bytes - reach) // aligned * aligned))
    bits = next(field.width for field in formats(cfg)[Opcode.STORE].fields if field.name == "sram_base")
    f |= {name: random.choice((1, rnd(0, (1 << bits) - 1))) for name in ("sram_base", "sram_x", "sram_y", "sram_z")}
    return f


def payload(cfg: Config, index: int, fields: dict[str, int]) -> int:
    return bench.instruction(cfg, Opcode.STORE, index=index, **fields)


def expected_done(cfg: Config, blocks: list[dict[str, int]]) -> list[int]:
    return [block.get("post", 0) | index << 4 for index, block in enumerate(blocks)]


@cocotb.test()
async def random_blocks(dut: Any) -> None:
    cfg, params = bench.config(), bench.params()
    machine = Machine(dut, cfg, 10_001)
    pause = params["pause"]
    memory = {} if params.get("ram") else {"latency": random.choice((1, 7, 40)), "first": params["first"]}
    await machine.start(pause, params.get("ram", False), **memory)
    blocks = [random_block(cfg, len(machine.dram)) for _ in range(params["count"])]
    for block in blocks:
        machine.execute(block)
    cocotb.start_soon(bench.stream_put(dut, "instr", [payload(cfg, i, b) for i, b in enumerate(blocks)], pause))
    await machine.finished(len(blocks))
    assert dut.quiet.value and machine.checker.written_out
    assert not machine.errors
    assert machine.done == expected_done(cfg, blocks)
    machine.compare("after all")


@cocotb.test()
async def one_at_a_time(dut: Any) -> None:
    cfg, params = bench.config(), bench.params()
    machine = Machine(dut, cfg, 5_000)
    await machine.start(params["pause"])
    for index in range(params["count"]):
        block = random_block(cfg, len(machine.dram))
        machine.execute(block)
        await bench.stream_put(dut, "instr", [payload(cfg, index, block)])
        assert len(machine.done) == index
        await machine.finished(index + 1)
        machine.compare(f"instruction {index}, {block}")
        await bench.rise(dut)


@cocotb.test()
async def errors_end_quietly(dut: Any) -> None:
    """A good STORE, then one that fails, then more good ones that must not be done; after halt, all works again."""
    cfg = bench.config()
    piece = cfg.piece_bytes
    machine = Machine(dut, cfg, 8192)
    await machine.start(0.2, latency=30, fails=lambda addr: 4000 <= addr - BASE < 4400)
    good = {"x_size": 20, "y_size": 2, "z_size": 1, "dram_y": 500, "sram_x": 1, "sram_y": 20}
    cases = {
        "end": {"dram_addr": 8192 - 500 - 20 * piece + 1},
        "far": {"dram_addr": 1 << 31},
        "wraps": {"dram_addr": (1 << 32) - 10 * piece},
        "merged": {"dram_addr": 0, "dram_y": 20 * piece, "y_size": 8192 // (20 * piece) + 1},
        "slverr": {"dram_addr": 4000},
    }
    for case, bad in cases.items():
        machine.done.clear()
        machine.errors.clear()
        blocks = [good, good | {"dram_addr": 1000}, good | bad, *[good | {"dram_addr": 2000}] * 12]
        put = cocotb.start_soon(bench.stream_put(dut, "instr", [payload(cfg, i, b) for i, b in enumerate(blocks)]))
        for _ in range(3000):
            await bench.fall(dut)
            if machine.errors:
                break
        code = Error.WRITE if case == "slverr" else Error.ADDRESS
        assert machine.errors == [code | 2 << 4], f"{case}: {machine.errors}"
        for _ in range(random.randint(1, 6)):
            await bench.rise(dut)
        put.cancel()
        dut.instr__valid.value = 0
        dut.halt.value = 1
        for _ in range(500):
            await bench.fall(dut)
            if dut.quiet.value:
                break
        for _ in range(100):
            assert dut.quiet.value and not dut.axi__awvalid.value and not dut.axi__wvalid.value, case
            await bench.fall(dut)
        assert machine.checker.written_out, case
        assert machine.done == expected_done(cfg, blocks[:2]) and len(machine.errors) == 1, case
        await bench.rise(dut)
        dut.halt.value = 0
        machine.done.clear()
        machine.dram[:] = np.frombuffer(bytes(machine.found), np.uint8)  # how much got out is not defined
        again = [good | {"dram_addr": 100 * i} for i in range(12)]
        for block in again:
            machine.execute(block)
        await bench.stream_put(dut, "instr", [payload(cfg, i, b) for i, b in enumerate(again)])
        await machine.finished(len(again))
        assert dut.quiet.value and len(machine.errors) == 1, case
        machine.compare(case)
        await bench.rise(dut)


@cocotb.test()
async def halts(dut: Any) -> None:
    """Halt after a random time: open bursts are completed without writing anything, and all becomes quiet."""
    cfg = bench.config()
    machine = Machine(dut, cfg, 8192)
    await machine.start(0.3, latency=10)
    blocks = [{"x_size": 40, "y_size": 2, "z_size": 1, "dram_y": 500, "sram_x": 1, "sram_y": 20}] * 5
    late = 0
    for _ in range(20):
        put = cocotb.start_soon(bench.stream_put(dut, "instr", [payload(cfg, i, b) for i, b in enumerate(blocks)]))
        await bench.cycles(dut, random.randint(1, 150))
        put.cancel()
        dut.instr__valid.value = 0
        dut.halt.value = 1
        await bench.fall(dut)
        offered = bool(dut.axi__wvalid.value)  # a beat that is offered already stays as it is
        while not dut.quiet.value:
            sent = bool(dut.axi__wvalid.value) and bool(dut.axi__wready.value)
            if sent and not offered:
                assert not int(dut.axi__wstrb.value)
                late += 1
            offered = offered and not sent
            await bench.fall(dut)
        assert machine.checker.written_out
        await bench.rise(dut)
        dut.halt.value = 0
    assert late, "no burst was open at any halt"
    machine.dram[:] = np.frombuffer(bytes(machine.found), np.uint8)
    machine.done.clear()
    machine.execute(blocks[0])
    await bench.stream_put(dut, "instr", [payload(cfg, 0, blocks[0])])
    await machine.finished(1)
    machine.compare("after the halts")
    assert not machine.errors


@cocotb.test()
async def rate(dut: Any) -> None:
    """Beats a cycle, with responses after 40 cycles and 8 outstanding bursts, from the first beat to the last."""
    cfg = bench.config()
    machine = Machine(dut, cfg, 1 << 20)
    await machine.start(0.0, latency=40)
    piece = cfg.piece_bytes
    rows = {"x_size": 7, "y_size": 7, "z_size": 8, "sram_x": 1, "sram_y": 7, "dram_y": 14 * piece}
    cases = {
        "long": [{"x_size": 1000, "y_size": 1, "z_size": 1, "sram_x": 1, "dram_addr": 4096 - 64}],
        "rows of 14 beats": [rows | {"dram_z": 200 * piece, "dram_addr": 8 * i} for i in range(2)],
        "short rows that touch": [{"x_size": 1, "y_size": 500, "z_size": 1, "dram_y": piece, "sram_y": 1}],
        "short instructions": [
            {"x_size": 8, "y_size": 1, "z_size": 1, "sram_x": 1, "dram_addr": i * 256} for i in range(60)
        ],
    }
    for case, blocks in cases.items():
        machine.done.clear()
        put = cocotb.start_soon(bench.stream_put(dut, "instr", [payload(cfg, i, b) for i, b in enumerate(blocks)]))
        beats: list[int] = []
        active = held = 0
        for cycle in range(20_000):
            await bench.fall(dut)
            if dut.write_beat.value:
                beats.append(cycle)
            active += int(dut.active.value)
            held += int(dut.held.value)
            if len(machine.done) == len(blocks):
                break
        span = beats[-1] - beats[0] + 1
        cocotb.log.info("%s: %d beats in %d cycles; active %d, held %d", case, len(beats), span, active, held)
        assert len(beats) / span >= 0.95, f"{case}: {len(beats)} beats in {span} cycles"
        await put
        await bench.rise(dut)
