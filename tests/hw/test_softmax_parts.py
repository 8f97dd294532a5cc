"""Compare parts of the softmax engine, each alone, with models that use lists."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from amaranth.sim import Simulator

from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import DIVIDE_TURN, FILL_TURN, FIND_TURN, softmax_parts, softmax_span
from celosia.hw.vector_unit.softmax.read_scheduler import ReadScheduler
from celosia.hw.vector_unit.softmax.result_writer import ResultWriter
from celosia.hw.vector_unit.softmax.row_max import RowMax

ENTRIES = Config(block_in=8, block_out=8, softmax=2, vin_depth=64, out_depth=64)
CONFIGS = {
    "entries": ENTRIES,
    "one part more": replace(ENTRIES, softmax=1),
    "pairs": replace(ENTRIES, softmax=4, taps=2, tap_depth=4),
}


def simulate(dut: Any, testbench: Callable[[Any], Awaitable[None]]) -> None:
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()


@pytest.mark.parametrize("name", CONFIGS)
def test_result_writer(name: str) -> None:
    """Entry n of row x goes to dst_base + n * dst_n + x * dst_x, with the bytes of its parts in their order."""
    cfg, rng = CONFIGS[name], random.Random(1)
    dut, parts, span = ResultWriter(cfg), softmax_parts(cfg), softmax_span(cfg)
    parts_per_entry, bits = parts // span, len(dut.addr)

    async def testbench(ctx: Any) -> None:
        written: list[tuple[int, int]] = []
        expected = []
        finished = 0

        async def tick() -> None:
            nonlocal finished
            if ctx.get(dut.write) and not ctx.get(dut.spare):
                written.append((ctx.get(dut.addr), ctx.get(dut.data)))
            finished += ctx.get(dut.finish)
            await ctx.tick()

        for _ in range(8):
            fields = {name: rng.getrandbits(5) for name in ("dst_base", "dst_n", "dst_x")}
            fields |= {"extent_n": rng.randint(1, 5), "extent_x": rng.randint(1, 4)}
            ctx.set(dut.fields, fields)
            ctx.set(dut.accepted, 1)
            await tick()
            ctx.set(dut.accepted, 0)
            reads = -(-fields["extent_n"] // span)
            for x, n, part in product(range(fields["extent_x"]), range(reads), range(parts)):
                last_read = n == reads - 1
                completes_entry = part % parts_per_entry == parts_per_entry - 1
                step = {"part": part, "first": int(n == 0), "last": int(last_read), "whole": int(completes_entry)}
                step["end"] = int(last_read and x == fields["extent_x"] - 1 and part == parts - 1)
                results = [rng.getrandbits(8) for _ in range(cfg.softmax)]
                entry = n * span + part // parts_per_entry
                if part % parts_per_entry == 0:
                    data = []
                data += results
                if completes_entry and entry < fields["extent_n"]:
                    addr = fields["dst_base"] + entry * fields["dst_n"] + x * fields["dst_x"]
                    expected.append((addr % (1 << bits), int.from_bytes(bytes(data), "little")))
                ctx.set(dut.valid, 1)
                ctx.set(dut.step, step)
                ctx.set(dut.results, results)
                await tick()
                ctx.set(dut.valid, 0)
                while rng.random() < 0.2:
                    await tick()
            for _ in range(2):
                await tick()
        assert written == expected and finished == 8

    simulate(dut, testbench)


@pytest.mark.parametrize("name", CONFIGS)
def test_read_scheduler(name: str) -> None:
    """Each generator steps in its own cycle of a beat, and a tile is filled once its maxima are known."""
    cfg, rng = CONFIGS[name], random.Random(2)
    dut, parts = ReadScheduler(cfg), softmax_parts(cfg)
    turns = {"find": FIND_TURN, "fill": parts - 1, "divide": DIVIDE_TURN - 1}
    assert len({FIND_TURN, FILL_TURN, DIVIDE_TURN}) == 3

    async def testbench(ctx: Any) -> None:
        left = dict.fromkeys(turns, 0)  # steps of each generator in its tile
        maxima_found, filled, tiles = 0, 0, 12
        await ctx.tick()
        ctx.set(dut.busy, 1)
        for _ in range(2500):
            for name in turns:
                ctx.set(getattr(dut, name).active, int(left[name] > 0))
                ctx.set(getattr(dut, name).ends, int(left[name] == 1))
            ctx.set(dut.summed, int(rng.random() < 0.02))
            beat, first = ctx.get(dut.beat), filled == 0
            steps = {name: ctx.get(getattr(dut, name).on) for name in turns}
            begin = {name: ctx.get(getattr(dut, name).begin) for name in turns}
            for name, turn in turns.items():
                assert steps[name] == (left[name] > 0 and beat == turn), name
                left[name] -= steps[name]
            assert not (first and (steps["fill"] or steps["divide"]))
            maxima_found += steps["find"] and left["find"] == 0
            assert begin["divide"] == ctx.get(dut.summed)
            if begin["fill"]:
                assert left["fill"] == 0 and maxima_found > filled
                if filled < tiles:
                    filled, left["fill"] = filled + 1, rng.randint(1, 5)
            if begin["find"] and left["find"] == 0 and maxima_found < tiles:
                assert maxima_found == filled
                left["find"] = rng.randint(1, 5)
            if begin["divide"] and left["divide"] == 0 and filled:
                left["divide"] = rng.randint(1, 5)
            await ctx.tick()
            if not first:
                assert ctx.get(dut.beat) == (beat + 1) % parts or begin["fill"]
            if filled == maxima_found == tiles and left["fill"] == 0:
                return
        raise AssertionError("not all tiles were filled")

    simulate(dut, testbench)


@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_row_max(lanes: int) -> None:
    """The unit returns the largest byte of every row, among the bytes inside the row."""
    dut, rng = RowMax(lanes, 4), random.Random(3)

    async def testbench(ctx: Any) -> None:
        expected, results = [], []
        for number in range(60):
            entries = [[rng.randint(-128, 127) for _ in range(lanes)] for _ in range(rng.randint(1, 4))]
            inside = rng.randint(1, lanes)
            counting = [byte for entry in entries[:-1] for byte in entry] + entries[-1][:inside]
            expected.append((number % 16, max(counting)))
            for n, entry in enumerate(entries):
                last = n == len(entries) - 1
                ctx.set(dut.valid, 1)
                ctx.set(dut.entry, entry)
                ctx.set(dut.inside, (1 << (inside if last else lanes)) - 1)
                for port, value in ((dut.first, n == 0), (dut.last, last), (dut.row, number % 16)):
                    ctx.set(port, int(value))
                for _ in range(1 + rng.randint(0, 1)):
                    if ctx.get(dut.done):
                        results.append((ctx.get(dut.number), ctx.get(dut.largest)))
                    await ctx.tick()
                    ctx.set(dut.valid, 0)
        for _ in range(8):
            if ctx.get(dut.done):
                results.append((ctx.get(dut.number), ctx.get(dut.largest)))
            await ctx.tick()
        assert results == expected

    simulate(dut, testbench)
