"""Compare STORE with sim/functional/reference.py, behind the memories of axi_model.py and of cocotbext-axi."""

from __future__ import annotations

import logging
import random
from functools import partial
from typing import Any

import bench
import cocotb
import copy_bench
import numpy as np
import pytest
from axi_model import WRITE, Memory, check
from configs import COVERING, COVERING_PAIR
from copy_bench import BASE
from thorough import some, tries

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, formats
from celosia.hw.spec.regs import Error

pytestmark = pytest.mark.rtl

CONFIGS = COVERING | {
    "8x8 batch 2 bus 16": Config(batch=2, block_in=8, block_out=8, bus_bytes=16, out_depth=64),
    "4 to 16": Config(block_in=4, block_out=16, bus_bytes=4, out_depth=64),
    "16 to 4": Config(block_in=16, block_out=4, bus_bytes=16, out_depth=64),
    "16x16": Config(out_depth=64),
}


def store_of(cfg: Config) -> Any:
    from celosia.hw.dae_pipeline.store import Store

    return Store(cfg)


# pytest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(CONFIGS, COVERING_PAIR))
def test_store(name: str) -> None:
    cfg = CONFIGS[name]
    only = ["random_blocks", "one_at_a_time"]
    if name == COVERING_PAIR[0] or bench.THOROUGH:
        only += ["behind_cocotbext_axi", "errors_end_quietly", "halts"]
    if name in (COVERING_PAIR[0], "8x8 batch 2 bus 16", "16x16"):
        only.append("rate")
    bench.run(partial(store_of, cfg), __file__, cfg=cfg, only=only)


# Inside the simulation ---------------------------------------------------------------------------------------


class Machine(copy_bench.Machine):
    """STORE with models of scratchpad out and of DRAM."""

    opcode, failed_burst = Opcode.STORE, Error.WRITE

    def __init__(self, dut: Any, cfg: Config, dram_bytes: int) -> None:
        super().__init__(dut, cfg, dram_bytes)
        self.written = bytearray(self.dram)
        self.state.out[...] = self.rng.integers(-128, 128, self.state.out.shape, np.int8)
        self.ram: Any = None

    async def start(self, pause: float, ram: bool = False, **memory: Any) -> None:
        await super().start(pause)
        cocotb.start_soon(bench.memory(self.dut, bench.pack(self.state.out), reads=["out"], pause=pause / 2))
        cocotb.start_soon(check(self.dut, "axi", WRITE, self.checker))
        if ram:
            self._cocotbext(pause)
        else:
            model = Memory(self.dut, self.written, self.cfg.bus_bytes, "axi", BASE, pause=pause, **memory)
            cocotb.start_soon(model.writes())
            self.models.append(model)

    def _cocotbext(self, pause: float) -> None:
        from cocotbext.axi import AxiRamWrite, AxiWriteBus

        logging.getLogger("cocotb").setLevel(logging.WARNING)
        self.ram = AxiRamWrite(AxiWriteBus.from_prefix(self.dut, "axi_"), self.dut.clk, self.dut.rst, size=1 << 40)
        self.ram.write(BASE, self.dram.tobytes())
        for channel in (self.ram.aw_channel, self.ram.w_channel, self.ram.b_channel):
            channel.set_pause_generator(copy_bench.pausing(pause))

    def compare(self, case: str) -> None:
        written = self.ram.read(BASE, len(self.dram)) if self.ram else self.written
        wrong = np.flatnonzero(np.frombuffer(bytes(written), np.uint8) != self.dram)
        assert not len(wrong), f"{case}: {len(wrong)} bytes differ, first {wrong[0]}, last {wrong[-1]}"

    def settle(self) -> None:
        self.dram[:] = np.frombuffer(bytes(self.written), np.uint8)

    def calm(self) -> bool:
        return not self.dut.axi__awvalid.value and not self.dut.axi__wvalid.value and self.checker.written_out

    def random_block(self) -> dict[str, int]:
        return random_block(self.cfg, len(self.dram))


def random_block(cfg: Config, dram_bytes: int) -> dict[str, int]:
    """Draw the fields of a legal STORE within `dram_bytes`: any alignment; rows with gaps, without, or overlapping."""
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


@cocotb.test()
@cocotb.parametrize((("pause", "first"), [(0.4, "address"), (0.0, "data"), (0.0, None)]))
async def random_blocks(dut: Any, pause: float, first: str | None) -> None:
    """Run random STOREs. first: the channel that memory accepts before the other one."""
    machine = Machine(dut, bench.config(), 10_001)
    await machine.start(pause, latency=random.choice((1, 7, 40)), first=first)
    await copy_bench.random_blocks(machine, 30, pause)
    assert machine.checker.written_out


@cocotb.test()
async def behind_cocotbext_axi(dut: Any) -> None:
    machine = Machine(dut, bench.config(), 10_001)
    await machine.start(0.3, ram=True)
    await copy_bench.random_blocks(machine, 25, 0.3)
    assert machine.checker.written_out


@cocotb.test()
async def one_at_a_time(dut: Any) -> None:
    """When an instruction is done, its writes are done."""
    machine = Machine(dut, bench.config(), 5_000)
    await machine.start(0.3)
    await copy_bench.one_at_a_time(machine, 20)


@cocotb.test()
async def errors_end_quietly(dut: Any) -> None:
    machine = Machine(dut, bench.config(), 8192)
    await machine.start(0.2, latency=30, fails=lambda addr: 4000 <= addr - BASE < 4400)
    await copy_bench.errors_end_quietly(machine)


@cocotb.test()
async def halts(dut: Any) -> None:
    """After a halt at a random time, STORE completes open bursts without writing bytes, and becomes idle."""
    cfg = bench.config()
    machine = Machine(dut, cfg, 8192)
    await machine.start(0.3, latency=10)
    blocks = [{"x_size": 40, "y_size": 2, "z_size": 1, "dram_y": 500, "sram_x": 1, "sram_y": 20}] * 5
    late = 0
    for _ in range(tries(20)):
        put = cocotb.start_soon(bench.stream_put(dut, "instr", machine.payloads(blocks)))
        await bench.cycles(dut, random.randint(1, 150))
        put.cancel()
        dut.instr__valid.value = 0
        dut.halt.value = 1
        await bench.fall(dut)
        offered = bool(bench.value(dut.axi__wvalid))  # a beat that was offered before the halt must not change
        while not dut.idle.value:
            sent = bool(bench.value(dut.axi__wvalid)) and bool(bench.value(dut.axi__wready))
            if sent and not offered:
                assert not bench.value(dut.axi__wstrb)
                late += 1
            offered = offered and not sent
            await bench.fall(dut)
        assert machine.checker.written_out
        await bench.rise(dut)
        dut.halt.value = 0
    assert late, "no burst was open at any halt"
    machine.settle()
    machine.done.clear()
    machine.execute(blocks[0])
    await bench.stream_put(dut, "instr", machine.payloads(blocks[:1]))
    await machine.finished(1)
    machine.compare("after the halts")
    assert not machine.errors


@cocotb.test()
async def rate(dut: Any) -> None:
    """STORE moves nearly a beat a cycle, from the first to the last, with responses after 40 cycles, 8 open bursts."""
    cfg = bench.config()
    machine = Machine(dut, cfg, 1 << 20)
    await machine.start(0.0, latency=40)
    piece = cfg.piece_bytes
    rows = {"x_size": 7, "y_size": 7, "z_size": 8, "sram_x": 1, "sram_y": 7, "dram_y": 14 * piece}
    cases = {
        "long": [{"x_size": 500, "y_size": 1, "z_size": 1, "sram_x": 1, "dram_addr": 4096 - 64}],
        "rows of 14 beats": [rows | {"dram_z": 200 * piece, "dram_addr": 8 * i} for i in range(2)],
        "short rows that touch": [{"x_size": 1, "y_size": 500, "z_size": 1, "dram_y": piece, "sram_y": 1}],
        "short instructions": [
            {"x_size": 8, "y_size": 1, "z_size": 1, "sram_x": 1, "dram_addr": i * 256} for i in range(60)
        ],
    }
    for case, blocks in cases.items():
        machine.done.clear()
        put = cocotb.start_soon(bench.stream_put(dut, "instr", machine.payloads(blocks)))
        beats: list[int] = []
        active = held = bursts = answers = 0
        for cycle in range(20_000):
            await bench.fall(dut)
            bursts += int(dut.axi__awvalid.value and dut.axi__awready.value)
            answers += bench.value(dut.write_answer)
            if dut.write_beat.value:
                beats.append(cycle)
            active += bench.value(dut.active)
            held += bench.value(dut.stalled)
            if len(machine.done) == len(blocks):
                break
        span = beats[-1] - beats[0] + 1
        cocotb.log.info("%s: %d beats in %d cycles; active %d, held %d", case, len(beats), span, active, held)
        assert answers == bursts > 0
        assert 0 < held <= cycle + 1 - active
        assert len(beats) / span >= 0.95, f"{case}: {len(beats)} beats in {span} cycles"
        await put
        await bench.rise(dut)
