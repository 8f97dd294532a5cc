"""Compare scratchpads with a list of words; a read of an entry while it is written has undefined bits."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import bench
import cocotb
import pytest

from celosia.hw.dae_pipeline.scratchpad import (
    AccScratchpad,
    HalvedScratchpad,
    Scratchpad,
    WindowScratchpad,
    WriteArbiter,
)
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import scratchpads

pytestmark = pytest.mark.rtl


def shared(width: int, grain: int, parts: int) -> Any:
    """Return a scratchpad of 16 entries behind an arbiter."""
    from amaranth import Module
    from amaranth.lib import wiring

    class Shared(wiring.Component):
        def __init__(self) -> None:
            self.arbiter, self.pad = WriteArbiter(4, width, grain, parts), Scratchpad(16, width, grain)
            members = {name: self.arbiter.signature.members[name] for name in ("vector", "load")}
            super().__init__({**members, "read": self.pad.signature.members["read"]})

        def elaborate(self, platform: object) -> Module:
            m = Module()
            m.submodules.arbiter, m.submodules.pad = self.arbiter, self.pad
            wiring.connect(m, self.arbiter.write, self.pad.write)
            for name, inner in (("vector", self.arbiter), ("load", self.arbiter), ("read", self.pad)):
                wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(inner, name))
            return m

    return Shared()


CASES: dict[str, tuple[Any, ...]] = {
    "pad_masks_none": (Scratchpad, 8, 128, 128),
    "pad_masks_quarters": (Scratchpad, 4, 256, 64),
    "pad_masks_bytes": (Scratchpad, 16, 64, 8),
    "pad_of_words": (Scratchpad, 32, 32, 32),
    "window3": (WindowScratchpad, 16, 32, 8, 3),
    "window5": (WindowScratchpad, 32, 32, 32, 5),
    "window1": (WindowScratchpad, 8, 32, 16, 1),
    "window16": (WindowScratchpad, 16, 32, 16, 16),
    "window2": (WindowScratchpad, 16, 32, 8, 2),
    "halved": (HalvedScratchpad, 16, 64, 8),
    "halved_pieces": (HalvedScratchpad, 8, 64, 8, 2),
    "halved_four_pieces": (HalvedScratchpad, 8, 128, 16, 4),
    "acc": (AccScratchpad, Config(block_in=4, block_out=4, acc_depth=16)),
    "acc_batch2": (AccScratchpad, Config(batch=2, block_in=4, block_out=8, acc_depth=32, int32=False)),
    "arbiter_bytes": (shared, 64, 8, 1),
    "arbiter_parts4": (shared, 64, 16, 4),
    "arbiter_parts2": (shared, 64, 8, 2),
    "arbiter_whole": (shared, 64, 64, 1),
}
"""Class or function of each case and its arguments; those of scratchpads are depth, width, grain, and the entries of a
window or the pieces of an entry."""


def cases_of(*makes: Any) -> list[str]:
    """Return the names of the cases of these kinds."""
    return [name for name, (make, *_) in CASES.items() if make in makes]


def all_cases() -> Any:
    return bench.side_by_side(lambda make, *arguments: make(*arguments), CASES)


def test_scratchpads() -> None:
    bench.run(partial(all_cases), __file__)


def put(dut, port, en, **values):
    getattr(dut, f"{port}__en").value = en
    for name, value in values.items():
        getattr(dut, f"{port}__{name}").value = value


def get(dut, port, name):
    return int(getattr(dut, f"{port}__{name}").value)


def random_write(depth, width, grain):
    mask = random.choice([0, (1 << width // grain) - 1, random.getrandbits(width // grain)])
    return {"addr": random.randrange(depth), "mask": mask, "data": random.getrandbits(width)}


def written(words, write, grain):
    old, mask = words[write["addr"]], bench.spread(write["mask"], grain)
    words[write["addr"]] = old & ~mask | write["data"] & mask


class ReadResult:
    """The expected output of a reader: `data`, with arbitrary values of the bits `unknown`."""

    def __init__(self, data, unknown):
        self.data, self.unknown = data, unknown

    def check(self, word):
        """Check the known bits of `found`. Return True if undefined bits differ from the old value."""
        assert word & ~self.unknown == self.data & ~self.unknown
        return word != self.data


def overwrites(addr, write, grain):
    """Return the bits of the entry at `addr` that `write` changes; `write` may be None."""
    return bench.spread(write["mask"], grain) if write and write["addr"] == addr else 0


@cocotb.test()
@cocotb.parametrize(case=cases_of(Scratchpad, WindowScratchpad))
async def one_writer_one_reader(dut, case):
    _, depth, width, grain, window = (*CASES[case], 1)[:5]
    await bench.start(dut)
    dut = bench.Part(dut, case)
    words, shown, garbage = [0] * depth, None, 0
    for index in range(2 * depth + bench.tries(2000)):
        fill = {"addr": index % depth, "mask": (1 << width // grain) - 1, "data": random.getrandbits(width)}
        write = fill if index < depth else random_write(depth, width, grain)
        writes, reads = index < depth or random.random() < 0.7, index >= depth and random.random() < 0.6
        addr = random.choice([write["addr"], random.randrange(depth)])
        put(dut, "write", writes, **write)
        put(dut, "read", reads, addr=addr)
        await bench.fall(dut)
        assert get(dut, "write", "ready") == get(dut, "read", "ready") == 1
        garbage += shown is not None and shown.check(get(dut, "read", "data"))
        if reads:
            entries = [(addr + i) % depth for i in range(window)]
            lost = [overwrites(entry, write if writes else None, grain) for entry in entries]
            shown = ReadResult(
                sum(words[entry] << i * width for i, entry in enumerate(entries)),
                sum(bits << i * width for i, bits in enumerate(lost)),
            )
        if writes:
            written(words, write, grain)
        await bench.rise(dut)
    assert garbage, "the simulation is kinder than silicon: all collisions gave the old value"


@cocotb.test()
@cocotb.parametrize(case=cases_of(HalvedScratchpad))
async def two_writers_of_halves(dut, case):
    """The port `near` writes lower halves of pieces, while `write` writes whole entries or upper halves."""
    _, depth, width, grain, pieces = (*CASES[case], 1)[:5]
    half = width // (2 * pieces)
    lower = sum(((1 << half) - 1) << 2 * half * piece for piece in range(pieces))
    await bench.start(dut)
    dut = bench.Part(dut, case)
    words, shown = [0] * depth, None
    for index in range(2 * depth + bench.tries(2000)):
        fill = {"addr": index % depth, "mask": (1 << width // grain) - 1, "data": random.getrandbits(width)}
        write, near = fill if index < depth else random_write(depth, width, grain), random_write(depth, width, grain)
        nears, reads = index >= depth and random.random() < 0.5, index >= depth and random.random() < 0.6
        writes = index < depth or random.random() < 0.7
        addr = random.randrange(depth)
        put(dut, "write", writes, **write)
        put(dut, "near", nears, **near)
        put(dut, "read", reads, addr=addr)
        await bench.fall(dut)
        assert get(dut, "write", "ready") == get(dut, "near", "ready") == get(dut, "read", "ready") == 1
        if shown is not None:
            shown.check(get(dut, "read", "data"))
        changes = [(write, ~lower if nears else -1)] * writes + [(near, lower)] * nears
        if reads:
            unknown = 0
            for change, bits in changes:
                unknown |= overwrites(addr, change, grain) & bits
            shown = ReadResult(words[addr], unknown)
        for change, bits in changes:
            mask = bench.spread(change["mask"], grain) & bits
            words[change["addr"]] = words[change["addr"]] & ~mask | change["data"] & mask
        await bench.rise(dut)


@cocotb.test()
@cocotb.parametrize(case=cases_of(AccScratchpad))
async def writers_and_readers(dut, case):
    _, cfg = CASES[case]
    width, depth = scratchpads(cfg)["acc"].width, cfg.acc_depth
    pad = scratchpads(cfg)["acc"]
    readers, writers = [f"{unit}_read" for unit in pad.readers], [f"{unit}_write" for unit in pad.writers]
    await bench.start(dut)
    dut = bench.Part(dut, case)
    words = [0] * depth
    for addr in range(depth):
        words[addr] = random.getrandbits(width)
        put(dut, "gemm_write", 1, addr=addr, mask=(1 << cfg.lanes) - 1, data=words[addr])
        await bench.rise(dut)
    shown: dict[str, ReadResult] = {}
    refused = dict.fromkeys(readers + writers, 0)
    for _ in range(bench.tries(2000)):
        read = {port: random.randrange(depth) for port in readers if random.random() < 0.6}
        write = {port: random_write(depth, width, 32) for port in writers if random.random() < 0.6}
        for port in readers:
            put(dut, port, port in read, addr=read.get(port, random.randrange(depth)))
        for port in writers:
            fields = dict(write.get(port, random_write(depth, width, 32)))
            if port == "load_write" and not cfg.int32:  # int8 values are widened to int32
                fields["data"] = random.getrandbits(8 * cfg.lanes)
                if port in write:
                    write[port]["data"] = bench.widened(fields["data"], cfg.lanes)
            put(dut, port, port in write, **fields)
        await bench.fall(dut)
        for port, data in shown.items():
            data.check(get(dut, port, "data"))
        shown.clear()  # the output is valid for one cycle only
        for accesses in (read, {port: fields["addr"] for port, fields in write.items()}):
            banks = set()
            for port, addr in accesses.items():  # in order of priority
                bank = addr >= depth // 2
                ready = get(dut, port, "ready")
                assert ready == (bank not in banks), port
                refused[port] += not ready
                banks.add(bank)
        accepted = [fields for port, fields in write.items() if get(dut, port, "ready")]
        for port, addr in read.items():
            if get(dut, port, "ready"):
                shown[port] = ReadResult(words[addr], sum(overwrites(addr, fields, 32) for fields in accepted))
        for port, fields in write.items():
            if get(dut, port, "ready"):
                written(words, fields, 32)
        await bench.rise(dut)
    assert refused["gemm_read"] == refused["gemm_write"] == 0
    assert all(refused[port] for port in (*readers[1:], *writers[1:]))


@cocotb.test()
@cocotb.parametrize(case=cases_of(shared))
async def vector_goes_first(dut, case):
    _, width, grain, parts = CASES[case]
    part = width // parts
    await bench.start(dut)
    dut = bench.Part(dut, case)
    words, shown, refused = [0] * 16, None, 0
    rounds = bench.tries(4000)
    for index in range(rounds):
        fill = {"addr": index % 16, "mask": (1 << width // grain) - 1, "data": random.getrandbits(width)}
        load = fill if index < 16 else random_write(16, width, grain)
        vector_write = {
            "addr": random.randrange(16 * parts),
            "mask": random.randrange(2),
            "data": random.getrandbits(part),
        }
        vector_writes, load_writes = index >= 16 and random.random() < 0.5, index < 16 or random.random() < 0.5
        addr, reads = random.randrange(16), index >= 16
        put(dut, "vector", vector_writes, **vector_write)
        put(dut, "load", load_writes, **load)
        put(dut, "read", reads, addr=addr)
        await bench.fall(dut)
        if shown is not None:
            shown.check(get(dut, "read", "data"))
        assert get(dut, "vector", "ready") == 1 and get(dut, "load", "ready") == (not vector_writes)
        refused += vector_writes and load_writes
        entry, number = divmod(vector_write["addr"], parts)
        placed = {"addr": entry, "mask": vector_write["mask"] << number, "data": vector_write["data"] << number * part}
        accepted, size = (placed, part) if vector_writes else (load if load_writes else None, grain)
        shown = ReadResult(words[addr], overwrites(addr, accepted, size)) if reads else None
        if accepted:
            written(words, accepted, size)
        await bench.rise(dut)
    assert refused > rounds / 5
