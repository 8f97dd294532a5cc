"""Softmax in hardware: its adder and its divider against float32, whole rows against onnxruntime's arithmetic."""

from __future__ import annotations

from functools import partial
from typing import Any

import bench
import cocotb
import numpy as np
import pytest
from numpy.typing import NDArray

from celosia.compiler.numerics.softmax import exponent_room, qlinear_softmax
from celosia.hw.config import Config
from celosia.hw.pipeline import softmax_cycles
from celosia.hw.vector_unit.softmax.engine import Softmax
from celosia.hw.vector_unit.softmax.steps import fields_layout
from celosia.sim.softmax import softmax_rows

f32 = np.float32


def config(block: int, lanes: int, **others: Any) -> Config:
    return Config(block_in=block, block_out=block, softmax=lanes, vin_depth=256, out_depth=256, acc_depth=256, **others)


CONFIGS = {
    "4x4": config(4, 2),
    "8x8": config(8, 8),
    "16x16": config(16, 4),
    "4x4_1": config(4, 1),
}


@pytest.mark.rtl
@pytest.mark.parametrize("name", CONFIGS)
def test_rows(name: str) -> None:
    cfg = CONFIGS[name]
    bench.run(partial(Softmax, cfg), __file__, cfg=cfg, only="equals_reference")


def float_tables(count: int, sx: float, sy: float) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    powers = np.exp((np.arange(256) - 255 + exponent_room(count) / float(f32(sx))) * float(f32(sx))).astype(f32)
    return powers.view(np.uint32), (powers * np.floor(f32(1) / f32(sy))).view(np.uint32)


class Machine:
    """The engine, with memory for vin and for results."""

    def __init__(self, dut: Any, cfg: Config) -> None:
        self.dut, self.cfg = dut, cfg
        self.rng = bench.generator()
        self.vin = self.rng.integers(-128, 128, (cfg.vin_depth, cfg.block_out)).astype(np.int8)
        self.words = bench.pack(self.vin)
        self.written: list[tuple[int, int]] = []

    async def start(self) -> None:
        await bench.start(self.dut, timeout=2_000_000)
        cocotb.start_soon(bench.memory(self.dut, self.words, ["vin"], []))

    async def load(self, powers: NDArray[np.uint32], shares: NDArray[np.uint32]) -> None:
        dut = self.dut
        dut.exp__en.value, dut.exp__mask.value = 1, 1
        for address, word in enumerate(np.concatenate([powers, shares]).tolist()):
            dut.exp__addr.value, dut.exp__data.value = address, word
            await bench.rise(dut)
        dut.exp__en.value = 0

    async def run(self, rows: int, groups: int, left_out: int, limits: tuple[int, int, int]) -> NDArray[np.int8]:
        """Results [rows, lanes]."""
        dut, cfg, rng = self.dut, self.cfg, self.rng
        depth = cfg.vin_depth
        a_x, a_n = int(rng.integers(0, depth)), int(rng.integers(0, depth))
        base = int(rng.integers(0, depth))
        layout = fields_layout(cfg)
        values = {"extent_n": groups, "extent_x": rows, "a_base": base, "a_n": a_n, "a_x": a_x, "imm": left_out}
        to = {name: int(rng.integers(0, 256)) for name in ("dst_base", "dst_n", "dst_x")}
        word = sum((values | to)[name] << layout[name].offset for name, _ in layout)
        dut.fields.value, dut.start.value = word, 1
        dut.zero_point.value, dut.low.value, dut.high.value = limits
        cycles, got = 0, []
        while True:
            await bench.fall(dut)
            if dut.write.value:
                got.append((int(dut.addr.value), int(dut.data.value)))
            ends = bool(dut.finish.value)
            await bench.rise(dut)
            dut.start.value = 0
            if ends:
                break
            cycles += 1
        assert cycles + 1 == softmax_cycles(cfg, rows, groups, left_out), cycles
        bits = layout["dst_base"].width
        wanted = [to["dst_base"] + n * to["dst_n"] + x * to["dst_x"] for x in range(rows) for n in range(groups)]
        assert [address for address, _ in got] == [address % (1 << bits) for address in wanted]
        entries = bench.unpack([word for _, word in got], np.zeros((rows * groups, cfg.block_out), np.int8))
        self.x = np.stack(
            [np.concatenate([self.vin[(base + n * a_n + x * a_x) % depth] for n in range(groups)]) for x in range(rows)]
        )[:, : groups * cfg.block_out - left_out]
        return entries.reshape(rows, -1)


@cocotb.test()
async def equals_reference(dut: Any) -> None:
    cfg = bench.config()
    machine = Machine(dut, cfg)
    await machine.start()
    rng, lanes = machine.rng, cfg.block_out
    for case in range(40):
        rows, groups = int(rng.integers(1, 10 * cfg.softmax)), int(rng.integers(1, 6))
        left_out = int(rng.integers(0, lanes))
        if groups * lanes - left_out == 1:
            continue
        count = groups * lanes - left_out
        sx, sy = float(rng.choice([0.02, 0.05, 0.1, 1 / 127, 0.5])), float(rng.choice([1 / 256, 1 / 127, 1 / 255]))
        powers, shares = float_tables(count, sx, sy)
        zero, low, high = -128 if sy == 1 / 256 else int(rng.integers(-128, 128)), -128, 127
        garbage = case % 4 == 3
        if garbage:
            powers, shares = (rng.integers(0, 1 << 32, 256, dtype=np.uint32) for _ in range(2))
            if case % 8 == 3:
                shares = powers + np.uint32(1 << 23) * rng.integers(0, 9, 256, dtype=np.uint32)
        await machine.load(powers, shares)
        got = await machine.run(rows, groups, left_out, (zero, low, high))
        wanted = softmax_rows(machine.x, powers, shares, zero, low, high)
        if not garbage:
            assert (wanted == qlinear_softmax(machine.x, sx, sy, zero)).all()
        assert (got[:, :count] == wanted).all(), (case, rows, groups, left_out, np.argwhere(got[:, :count] != wanted))
        assert (got[:, count:] == zero).all()
