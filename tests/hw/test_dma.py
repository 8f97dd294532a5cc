"""Test the read engine and the read mux, and plant faults for the AXI checker."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import bench
import cocotb
import pytest
from axi_model import READ, Checker, Memory, Sample, check

from celosia.hw.spec.regs import Error

BASE = 0xFE_0000_1000

# The checker, without hardware -------------------------------------------------------------------------------

GOOD_AR: Sample = {
    "arid": 0, "araddr": 0x1000, "arlen": 15, "arsize": 3, "arburst": 1, "arcache": 3, "arprot": 0, "arvalid": 1,
    "arready": 1, "rlast": 0, "rvalid": 0, "rready": 1,
}  # fmt: skip


def write_samples(length: int, beats: int) -> list[Sample]:
    """Return samples of a write burst of `length + 1` beats, of which `beats` are sent, the last one with WLAST."""
    idle = {
        "awid": 0, "awaddr": 0x1000, "awlen": length, "awsize": 3, "awburst": 1, "awcache": 3, "awprot": 0,
        "awvalid": 0, "awready": 1,
        "wdata": 0, "wstrb": 255, "wlast": 0, "wvalid": 0, "wready": 1, "bvalid": 0, "bready": 1,
    }  # fmt: skip
    return [idle | {"awvalid": 1}, *(idle | {"wvalid": 1, "wlast": int(i == beats - 1)} for i in range(beats))]


def test_checker_accepts_what_is_legal() -> None:
    checker = Checker(8, 0x1000, 0x1001)
    for sample in (GOOD_AR, GOOD_AR | {"araddr": 0x1F80}, GOOD_AR | {"araddr": 0x2000, "arlen": 0}):
        checker.step(sample)
    assert checker.bursts == 3
    checker = Checker(8)
    for sample in write_samples(3, 4):
        checker.step(sample)
    assert checker.written_out


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"arlen": 16}, "over 16 beats"),
        ({"araddr": 0x1F88}, "crosses 4 KB"),
        ({"araddr": 0x1004}, "not aligned"),
        ({"araddr": 0x0F80}, "outside"),
        ({"araddr": 0x2000, "arlen": 1}, "outside"),
        ({"arsize": 2}, "size 2"),
        ({"arburst": 0}, "not INCR"),
        ({"arid": 1}, "ID 1"),
        ({"arcache": 0}, "cache 0b0000"),
        ({"arprot": 1}, "protection 0b001"),
    ],
)
def test_checker_finds_bad_bursts(fault: Sample, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        Checker(8, 0x1000, 0x1001).step(GOOD_AR | fault)


@pytest.mark.parametrize("change", [{"araddr": 0x1080}, {"arvalid": 0}, {"arlen": 3}])
def test_checker_finds_changes_before_ready(change: Sample) -> None:
    checker = Checker(8)
    checker.step(GOOD_AR | {"arready": 0})
    with pytest.raises(AssertionError, match="before ready"):
        checker.step(GOOD_AR | change)


@pytest.mark.parametrize(("length", "beats"), [(3, 3), (3, 5), (0, 17)])
def test_checker_counts_write_data(length: int, beats: int) -> None:
    checker = Checker(8)
    with pytest.raises(AssertionError, match="WLAST"):
        for sample in write_samples(length, beats):
            checker.step(sample)


# The engines -------------------------------------------------------------------------------------------------


def two_readers(bus_bytes: int, outstanding: int = 8, room: int = 32) -> Any:
    """Return two read engines, like those of fetch and LOAD, behind one mux."""
    from amaranth import Module
    from amaranth.lib import wiring
    from amaranth.lib.wiring import In, Out

    from celosia.hw.dae_pipeline.dma import ReadEngine
    from celosia.hw.dae_pipeline.readmux import ReadMux
    from celosia.hw.lib.axi import Axi4Read

    class Bench(wiring.Component):
        def __init__(self) -> None:
            self.engines = {
                name: ReadEngine(bus_bytes, outstanding=outstanding, room=room) for name in ("fetch", "load")
            }
            members: dict[str, Any] = {"m_axi": Out(Axi4Read(bus_bytes)), "idle": Out(1)}
            for name, engine in self.engines.items():
                members[f"{name}_row"] = engine.signature.members["row"]
                members[f"{name}_beat"] = engine.signature.members["beat"]
            super().__init__(members | {"dma_base": In(40), "dma_size": In(32), "halt": In(1)})

        def elaborate(self, platform: object) -> Module:
            m = Module()
            m.submodules.mux = mux = ReadMux(bus_bytes)
            wiring.connect(m, mux.axi, wiring.flipped(self.m_axi))
            for name, engine in self.engines.items():
                m.submodules[name] = engine
                wiring.connect(m, engine.bus, getattr(mux, name))
                wiring.connect(m, engine.row, wiring.flipped(getattr(self, f"{name}_row")))
                wiring.connect(m, engine.beat, wiring.flipped(getattr(self, f"{name}_beat")))
                for port in ("dma_base", "dma_size", "halt"):
                    m.d.comb += getattr(engine, port).eq(getattr(self, port))
            engines = list(self.engines.values())
            m.d.comb += self.idle.eq(engines[0].idle & engines[1].idle & mux.idle)
            return m

    return Bench()


CASES = {"bus4": (4,), "bus8": (8,), "bus128": (128,), "large_room": (8, 32, 512)}
"""Arguments of `two_readers`, by name of the case."""


def all_cases() -> Any:
    return bench.side_by_side(two_readers, CASES)


@pytest.mark.rtl
def test_readers() -> None:
    bench.run(partial(all_cases), __file__)


def row(offset: int, size: int) -> int:
    return offset | size << 32


def beats_of(data: bytes, bus: int, offset: int, size: int, limit: int) -> list[int]:
    """Return the payloads of the beats of a row; a refused row gives one beat with an error."""
    if offset + size > limit:
        return [Error.ADDRESS << 8 * bus | 1 << 8 * bus + 4]
    first, stop = offset // bus, (offset + size - 1) // bus + 1
    words = [int.from_bytes(data[i * bus : (i + 1) * bus], "little") for i in range(first, stop)]
    return [*words[:-1], words[-1] | 1 << 8 * bus + 4]


async def begin(dut: Any, case: str, **memory: Any) -> tuple[Any, bytearray, Checker]:
    """Start the readers of a case. Return the component, the content of memory, and the checker of the bus."""
    size, bus = 20_000, CASES[case][0]
    data = bytearray(random.randbytes(size + bus))
    await bench.start(dut)
    dut = bench.Part(dut, case)
    for name in ("fetch_row", "load_row", "fetch_beat", "load_beat"):
        cocotb.start_soon(bench.check_stream(dut, name, unless="halt"))
    dut.dma_base.value, dut.dma_size.value = BASE, size
    checker = Checker(bus, BASE, size)
    cocotb.start_soon(check(dut, "m_axi", READ, checker))
    cocotb.start_soon(Memory(dut, data, bus, base=BASE, **memory).reads())
    return dut, data, checker


@cocotb.test()
@cocotb.parametrize(case=["bus4", "bus8", "bus128"], pause=[0.0, 0.4])
async def rows(dut: Any, case: str, pause: float) -> None:
    """Both users read random rows; the last row of each is refused."""
    bus = CASES[case][0]
    dut, data, _ = await begin(dut, case, pause=pause, latency=random.choice((1, 20)))
    size = int(dut.dma_size.value) or 20_000

    async def user(name: str) -> None:
        requests = [(random.randrange(size - 1), random.choice((1, 8, bus, random.randint(1, 600)))) for _ in range(25)]
        requests = [(offset, min(length, size - offset)) for offset, length in requests]
        requests += [(size - 5, 5), (size - 4, 5)]
        expected = [beat for offset, length in requests for beat in beats_of(data, bus, offset, length, size)]
        cocotb.start_soon(bench.stream_put(dut, f"{name}_row", [row(*pair) for pair in (*requests, (0, 4))], pause))
        beats = await bench.stream_get(dut, f"{name}_beat", len(expected), pause)
        mask = (1 << 8 * bus + 5) - 1
        data_mask = (1 << 8 * bus) - 1
        beats[-1] &= ~data_mask  # a refused row's data is undefined
        assert [value & mask for value in beats] == expected, name

    tasks = [cocotb.start_soon(user(name)) for name in ("fetch", "load")]
    for task in tasks:
        await task
    for _ in range(50):
        await bench.fall(dut)
        assert not dut.fetch_beat__valid.value and not dut.load_beat__valid.value
    assert not dut.fetch_row__ready.value, "a row was accepted after a refused one"


@cocotb.test()
async def shares(dut: Any) -> None:
    """If both users request all the time, each gets half of the beats, and the bus is always busy."""
    dut, _, _ = await begin(dut, "large_room", latency=20, outstanding=4)
    counts = {"fetch": 0, "load": 0}
    for name in counts:
        cocotb.start_soon(bench.stream_put(dut, f"{name}_row", [row(0, 4096)] * 20))
        getattr(dut, f"{name}_beat__ready").value = 1
    beats = 0
    for _ in range(1000):
        await bench.fall(dut)
        beats += int(dut.m_axi__rvalid.value) & int(dut.m_axi__rready.value)
        for name in counts:
            counts[name] += int(getattr(dut, f"{name}_beat__valid").value)
    assert min(counts.values()) > 400, counts
    assert beats > 950, beats


@cocotb.test()
async def halts(dut: Any) -> None:
    """After a halt at a random time, everything becomes idle, and the next run gets only its own beats."""
    dut, data, checker = await begin(dut, "bus8", latency=20, pause=0.2)
    for _ in range(bench.tries(15)):
        requests = [(random.randrange(10_000), random.randint(1, 500)) for _ in range(10)]
        tasks = []
        for name in ("fetch", "load"):
            tasks.append(cocotb.start_soon(bench.stream_put(dut, f"{name}_row", [row(*pair) for pair in requests])))
            tasks.append(cocotb.start_soon(bench.stream_get(dut, f"{name}_beat", 1000, 0.1)))
        await bench.cycles(dut, random.randint(1, 120))
        dut.halt.value = 1
        for task in tasks:
            task.cancel()
        dut.fetch_row__valid.value = dut.load_row__valid.value = 0
        dut.fetch_beat__ready.value = dut.load_beat__ready.value = 0
        for _ in range(400):
            await bench.fall(dut)
            if dut.idle.value:
                break
        assert dut.idle.value
        bursts = checker.bursts
        await bench.cycles(dut, 30)
        assert checker.bursts == bursts
        dut.halt.value = 0
        await bench.rise(dut)
        for name in ("fetch", "load"):
            expected = beats_of(data, 8, 123, 200, 20_000)
            cocotb.start_soon(bench.stream_put(dut, f"{name}_row", [row(123, 200)]))
            assert await bench.stream_get(dut, f"{name}_beat", len(expected)) == expected
