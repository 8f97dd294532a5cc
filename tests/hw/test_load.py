"""Compare LOAD with sim/functional/reference.py, behind the memories of axi_model.py and of cocotbext-axi."""

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
from axi_model import READ, Checker, Memory, check
from configs import COVERING, COVERING_PAIR
from copy_bench import BASE
from thorough import some, tries

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, buffers, formats
from celosia.hw.spec.packing import CODEBOOK_ENTRIES, CODEBOOKS, packing
from celosia.hw.spec.regs import Error
from celosia.hw.spec.scratchpads import scratchpads

pytestmark = pytest.mark.rtl

SMALL = {"inp_depth": 64, "wgt_depth": 16, "acc_depth": 64, "vin_depth": 64, "out_depth": 64, "par_depth": 8}
CONFIGS = COVERING | {
    "16x16": Config(**SMALL),
    "8x8 batch 2 bus 16": Config(batch=2, block_in=8, block_out=8, bus_bytes=16, lut_count=1, **SMALL),
    "4 to 16": Config(block_in=4, block_out=16, bus_bytes=4, **SMALL),
    "16 to 4": Config(block_in=16, block_out=4, bus_bytes=16, **SMALL),
    "taps 1 bus 16": Config(block_in=4, block_out=8, bus_bytes=16, taps=1, tap_depth=8, **SMALL),
    "8x4 batch 2 bus 16, two ports": Config(
        batch=2, block_in=8, block_out=4, bus_bytes=16, ports=2, taps=3, tap_depth=8, forward=True, **SMALL
    ),
    "8x8 batch 2 bus 4, spread": Config(batch=2, block_in=8, block_out=8, bus_bytes=4, ports=2, **SMALL),
    # Packed weights: units with factors of several channels, of one, of a part of one, and several units of factors.
    "tiny, packed weights": Config(block_in=4, block_out=4, weight_bits=4, **SMALL),
    "16x16, packed weights": Config(weight_bits=4, int32=False, **SMALL),
    "32x16, packed weights": Config(block_in=32, weight_bits=2, **SMALL),
    "16x16 bus 4, two ports, packed weights": Config(bus_bytes=4, weight_bits=4, ports=2, **SMALL),
    "32x8, packed weights": Config(block_in=32, block_out=8, weight_bits=1, **SMALL),
    "64x16 bus 64, packed weights": Config(block_in=64, block_out=16, bus_bytes=64, weight_bits=4, **SMALL),
}
ONE_PORT, TWO_PORTS = COVERING_PAIR

PORTS = ("m_axi", "m_axi1")


def bench_of(cfg: Config) -> Any:
    """Return LOAD with a ReadMux for each port to memory, so that it has AXI ports."""
    from amaranth import Module
    from amaranth.lib import wiring
    from amaranth.lib.wiring import Out

    from celosia.hw.dae_pipeline.load import Load
    from celosia.hw.dae_pipeline.readmux import ReadMux
    from celosia.hw.lib.axi import Axi4Read

    class Bench(wiring.Component):
        def __init__(self) -> None:
            self.load = Load(cfg)
            members = {name: m for name, m in self.load.signature.members.items() if name != "buses"}
            ports = {name: Out(Axi4Read(cfg.bus_bytes)) for name in PORTS[: cfg.ports]}
            super().__init__({**members, **ports, "read_beat": Out(cfg.ports)})

        def elaborate(self, platform: object) -> Module:
            m = Module()
            m.submodules.load = self.load
            for number, bus in enumerate(self.load.buses):
                m.submodules[f"mux{number}"] = mux = ReadMux(cfg.bus_bytes)
                wiring.connect(m, bus, mux.load)
                wiring.connect(m, mux.axi, wiring.flipped(getattr(self, PORTS[number])))
                m.d.comb += self.read_beat[number].eq(mux.read_beat)
            for name in self.signature.members:
                if name not in (*PORTS, "read_beat"):
                    inner, outer = getattr(self.load, name), getattr(self, name)
                    if isinstance(self.signature.members[name], wiring.Member) and self.signature.members[name].is_port:
                        m.d.comb += outer.eq(inner) if self.signature.members[name].flow is Out else inner.eq(outer)
                    else:
                        wiring.connect(m, inner, wiring.flipped(outer))
            return m

    return Bench()


# pytest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(CONFIGS, COVERING_PAIR))
def test_load(name: str) -> None:
    cfg = CONFIGS[name]
    only = ["random_blocks", "one_at_a_time"]
    if name != TWO_PORTS or bench.THOROUGH:
        only += ["behind_cocotbext_axi", "errors_end_quietly"]
    if cfg.ports == 2:
        only += ["errors_of_the_second_port", "ends_in_order"] + ["both_at_full_rate"] * cfg.int32
    if scratchpads(cfg)["wgt"].spread:
        only.append("written_again")
    if name == ONE_PORT:
        only.append("rate")
    bench.run(partial(bench_of, cfg), __file__, cfg=cfg, only=only)


# Inside the simulation ---------------------------------------------------------------------------------------


class Load(copy_bench.Machine):
    """LOAD with models of the scratchpads that it writes."""

    opcode, failed_burst = Opcode.LOAD, Error.READ

    def __init__(self, dut: Any, cfg: Config, dram_bytes: int) -> None:
        super().__init__(dut, cfg, dram_bytes)
        self.words: dict[str, list[int]] = {}
        for buffer in buffers(cfg):
            if buffer == Buffer.BOOK:  # it is inside LOAD and empty at first; expanded weights show its content
                continue
            array = self.array(buffer.name.lower())
            array.view(np.uint8)[...] = self.rng.integers(0, 256, array.view(np.uint8).shape, np.uint8)
            self.words[buffer.name.lower()] = bench.pack(array)

    def array(self, name: str) -> Any:
        """Return the model's content of a scratchpad; for `tap`, only the taps that the hardware stores."""
        array = getattr(self.state, name)
        if array.dtype == np.float32:
            return array.view(np.uint32)  # arbitrary bits, some of which are NaN as floats
        if name != "tap":
            return array
        from celosia.hw.spec.scratchpads import scratchpads

        return array.reshape(len(array), -1)[:, : scratchpads(self.cfg)["tap"].width // 8]

    async def start(self, pause: float, ram: bool = False, **memory: Any) -> None:
        await super().start(pause)
        cocotb.start_soon(self._scratchpads(pause))
        data = bytearray(self.dram)
        for port in PORTS[: self.cfg.ports]:
            cocotb.start_soon(check(self.dut, port, READ, Checker(self.cfg.bus_bytes, BASE, len(self.dram))))
            if ram:
                self._cocotbext(port, pause)
            else:
                model = Memory(self.dut, data, self.cfg.bus_bytes, port, base=BASE, pause=pause, **memory)
                cocotb.start_soon(model.reads())
                self.models.append(model)
        if self.cfg.weight_bits < 8:
            await self._fill_book()

    async def _fill_book(self) -> None:
        """Load zeros into the codebooks, as in the model; no reset clears them."""
        block = {"buffer": Buffer.BOOK, "x_size": CODEBOOKS * CODEBOOK_ENTRIES, "y_size": 1, "z_size": 1, "sram_x": 1}
        self.execute(block)
        await bench.stream_put(self.dut, "instr", self.payloads([block]))
        await self.finished(1)
        self.done.clear()
        await bench.rise(self.dut)

    async def _scratchpads(self, pause: float) -> None:
        """Simulate all write ports in one coroutine, for speed.

        Only ports of scratchpads that VECTOR or GEMM write, too, can stall LOAD.
        """
        names = {**self.words, **({"near_wgt": self.words["wgt"]} if scratchpads(self.cfg)["wgt"].spread else {})}
        ports = [
            [getattr(self.dut, f"{name}__{part}") for part in ("en", "addr", "mask", "data", "ready")] + [words]
            for name, words in names.items()
        ]
        near = ports[-1][0] if "near_wgt" in names else None
        half = scratchpads(self.cfg)["wgt"].width // (2 * self.cfg.inp_pieces)
        for port in ports:
            port[4].value = 1
        stalled = ("acc", "inp", "vin") if self.cfg.forward else ("acc",)
        stalling = [bench.driver(getattr(self.dut, f"{name}__ready")) for name in stalled]
        while True:
            if pause:
                for set_ready in stalling:
                    set_ready(int(random.random() >= pause))
            await bench.fall(self.dut)
            for en, addr, mask, data, ready, words in ports:
                if bench.value(en) and bench.value(ready):
                    written, grain = bench.value(data), len(data) // len(mask)
                    if words is self.words["acc"] and grain == 8:  # int8 values are widened to int32
                        written = bench.widened(written, len(mask))
                        grain = 32
                    bits = bench.spread(bench.value(mask), grain)
                    if en is near:  # the scratchpad takes only the lower halves of pieces
                        bits &= sum(((1 << half) - 1) << 2 * half * piece for piece in range(self.cfg.inp_pieces))
                    place = bench.value(addr)
                    words[place] = words[place] & ~bits | written & bits
            await bench.rise(self.dut)

    def _cocotbext(self, port: str, pause: float) -> None:
        from cocotbext.axi import AxiRamRead, AxiReadBus

        logging.getLogger("cocotb").setLevel(logging.WARNING)
        ram = AxiRamRead(AxiReadBus.from_prefix(self.dut, f"{port}_"), self.dut.clk, self.dut.rst, size=1 << 40)
        ram.write(BASE, self.dram.tobytes())
        for channel in (ram.ar_channel, ram.r_channel):
            channel.set_pause_generator(copy_bench.pausing(pause))

    def compare(self, case: str) -> None:
        for name, words in self.words.items():
            expected = self.array(name)
            actual = bench.unpack(words, expected)
            wrong = np.argwhere(actual != expected)
            if len(wrong):
                index = tuple(wrong[0])
                raise AssertionError(f"{case}: {name}{list(index)} is {actual[index]}, expected {expected[index]}")

    def settle(self) -> None:
        for name, words in self.words.items():
            array = self.array(name)
            array[...] = bench.unpack(words, array)

    def calm(self) -> bool:
        signals = [f"{port}__{name}" for port in PORTS[: self.cfg.ports] for name in ("arvalid", "rvalid")]
        return not any(getattr(self.dut, name).value for name in signals)

    def random_block(self) -> dict[str, int]:
        return random_block(self.cfg, len(self.dram))


def element_bytes(cfg: Config, fields: dict[str, int]) -> int:
    from celosia.sim.functional import reference

    return reference.element_bytes(cfg, Buffer(fields["buffer"]), bool(fields["widen"]), bool(fields.get("expand")))


def random_block(cfg: Config, dram_bytes: int) -> dict[str, int]:
    """Draw the fields of a legal LOAD within `dram_bytes`: any alignment and padding, rows with or without gaps."""
    rnd = random.randint
    buffer = random.choice([*buffers(cfg), *([Buffer.WGT] * len(buffers(cfg)) * (cfg.weight_bits < 8))])
    f = {
        "buffer": buffer,
        "widen": int(buffer == Buffer.ACC and (not cfg.int32 or rnd(0, 1))),
        "post": 2 * rnd(0, 7),
        "wait": 2 * rnd(0, 7),
    }
    if scratchpads(cfg)["wgt"].spread:
        f["spread"] = int(buffer == Buffer.WGT and rnd(0, 1))
    step = 1
    if cfg.weight_bits < 8:
        f["expand"] = int(buffer == Buffer.WGT and not f.get("spread") and random.random() < 0.8)
        step = packing(cfg).pieces if f["expand"] else 1
    size = element_bytes(cfg, f)
    large = max(1, 256 // size)
    f |= {"x_size": rnd(1, 2 * large), "y_size": rnd(1, min(3, 1 + large)), "z_size": rnd(1, min(3, 1 + large))}
    f["x_size"] = -(-f["x_size"] // step) * step
    row = f["x_size"] * size
    aligned = random.choice((1, 2, min(size, cfg.bus_bytes), size))
    f["dram_y"] = random.choice((row, row, rnd(0, 3 * row) // aligned * aligned, 0))
    f["dram_z"] = random.choice((row * f["y_size"], rnd(0, 6 * row) // aligned * aligned))
    if random.random() < 0.2:  # rows from the last one to the first
        f["dram_y"] = -f["dram_y"] & 0xFFFFFFFF
        start = (f["y_size"] - 1) * (-f["dram_y"] & 0xFFFFFFFF)
        reach = row + (f["z_size"] - 1) * f["dram_z"] + start
    else:
        start = 0
        reach = row + (f["y_size"] - 1) * f["dram_y"] + (f["z_size"] - 1) * f["dram_z"]
    f["dram_addr"] = start + rnd(0, dram_bytes - reach) // aligned * aligned
    if random.random() < 0.1:
        f["dram_addr"] = start + dram_bytes - reach
    bits = next(field.width for field in formats(cfg)[Opcode.LOAD].fields if field.name == "sram_base")
    f |= {name: random.choice((1, rnd(0, (1 << bits) - 1))) for name in ("sram_base", "sram_x", "sram_y", "sram_z")}
    for side in ("pad_top", "pad_bottom", "pad_left", "pad_right"):
        f[side] = random.choice((0, 0, 1, 2))
    f["pad_value"] = rnd(-128, 127)
    return f


@cocotb.test()
@cocotb.parametrize(pause=[0.0, 0.4])
async def random_blocks(dut: Any, pause: float) -> None:
    machine = Load(dut, bench.config(), 10_000)
    await machine.start(pause, latency=random.choice((1, 7, 40)))
    await copy_bench.random_blocks(machine, 30, pause)


@cocotb.test()
async def behind_cocotbext_axi(dut: Any) -> None:
    machine = Load(dut, bench.config(), 10_000)
    await machine.start(0.3, ram=True)
    await copy_bench.random_blocks(machine, 25, 0.3)


@cocotb.test()
async def one_at_a_time(dut: Any) -> None:
    """When an instruction is done, its writes are done."""
    machine = Load(dut, bench.config(), 10_000)
    await machine.start(0.3)
    await copy_bench.one_at_a_time(machine, 25)


async def failing(dut: Any) -> Load:
    """Return LOAD with a memory that answers some addresses with errors, for `copy_bench.errors_end_quietly`."""
    machine = Load(dut, bench.config(), 8192)
    await machine.start(0.2, latency=30, fails=lambda addr: 4000 <= addr - BASE < 4400)
    return machine


@cocotb.test()
async def errors_end_quietly(dut: Any) -> None:
    await copy_bench.errors_end_quietly(await failing(dut))


@cocotb.test()
async def errors_of_the_second_port(dut: Any) -> None:
    """Errors come through the second port, while good instructions use the first."""
    cfg = bench.config()
    entry = scratchpads(cfg)["wgt"].piece_bytes
    weights = {"buffer": Buffer.WGT, "x_size": -(-20 * cfg.piece_bytes // entry)}
    await copy_bench.errors_end_quietly(await failing(dut), weights, weights["x_size"] * entry)


@cocotb.test()
@cocotb.parametrize(late=[0, 1])
async def ends_in_order(dut: Any, late: int) -> None:
    """Short instructions of one channel end behind long ones of the other channel, more than its queue of ends holds.

    late: the port whose memory is slow.
    """
    machine = Load(dut, bench.config(), 10_000)
    await machine.start(0.0, latency=5)
    machine.models[late].latency = 500
    channel_buffers = (Buffer.INP, Buffer.WGT)
    row = {"x_size": 1, "y_size": 1, "z_size": 1, "sram_x": 1}
    blocks = []
    for number in range(tries(120)):
        blocks.append(row | {"buffer": channel_buffers[(number % 40 == 0) == late], "post": 2 * random.randint(0, 7)})
        blocks[-1] |= {"sram_base": random.randrange(8), "dram_addr": 64 * random.randrange(100)}
        machine.execute(blocks[-1])
    cocotb.start_soon(bench.stream_put(dut, "instr", machine.payloads(blocks)))
    await bench.cycles(dut, 450)
    assert not machine.done and dut.instr__valid.value and not dut.instr__ready.value
    await machine.finished(len(blocks))
    assert machine.done == copy_bench.expected_done(blocks) and dut.idle.value and not machine.errors
    machine.compare("after all")


@cocotb.test()
@cocotb.parametrize(late=[0, 1])
async def written_again(dut: Any, late: int) -> None:
    """Several spread LOADs write data and padding to the same few entries; the last write in program order remains.

    late: the port whose memory is slow, so that its channel is behind the other one.
    """
    cfg, rnd = bench.config(), random.randint
    machine = Load(dut, cfg, 10_000)
    await machine.start(0.2, latency=5)
    machine.models[late].latency = 100
    row = {"buffer": Buffer.WGT, "spread": 1, "dram_y": 500, "dram_z": 1500}
    blocks = []
    for _ in range(tries(60)):
        fields = {name: rnd(1, 2) for name in ("x_size", "y_size", "z_size")}
        fields |= {name: rnd(0, 2) for name in ("sram_x", "sram_y", "sram_z", "pad_left", "pad_right", "pad_top")}
        fields |= {"sram_base": rnd(0, 3), "dram_addr": rnd(0, 7000), "pad_value": rnd(-128, 127)}
        blocks.append(row | fields)
        machine.execute(blocks[-1])
    cocotb.start_soon(bench.stream_put(dut, "instr", machine.payloads(blocks)))
    await machine.finished(len(blocks))
    assert machine.done == copy_bench.expected_done(blocks) and not machine.errors
    machine.compare("after all")


@cocotb.test()
async def both_at_full_rate(dut: Any) -> None:
    cfg = bench.config()
    machine = Load(dut, cfg, 1 << 16)
    await machine.start(0.0, latency=40)
    beats = 1024
    blocks = [
        {"buffer": buffer, "x_size": beats * cfg.bus_bytes // size, "y_size": 1, "z_size": 1, "sram_x": 1}
        for buffer, size in ((Buffer.ACC, 4 * cfg.piece_bytes), (Buffer.WGT, scratchpads(cfg)["wgt"].piece_bytes))
    ]
    for block in blocks:
        machine.execute(block)
    cocotb.start_soon(bench.stream_put(dut, "instr", machine.payloads(blocks)))
    beats_of_channels, active = [0, 0], [0, 0]
    for _ in range(beats + 60):
        await bench.fall(dut)
        for lane in range(2):
            beats_of_channels[lane] += bench.value(dut.read_beat) >> lane & 1
            active[lane] += bench.value(dut.active) >> lane & 1
    assert beats_of_channels == [beats, beats] and machine.done == copy_bench.expected_done(blocks)
    assert active == [beats, beats], active
    machine.compare("after all")


@cocotb.test()
async def rate(dut: Any) -> None:
    """LOAD moves nearly a beat a cycle, from the first to the last, with 40 cycles of latency and 8 open bursts."""
    cfg = bench.config()
    machine = Load(dut, cfg, 1 << 20)
    await machine.start(0.0, latency=40)
    piece = cfg.piece_bytes
    wgt = {"buffer": Buffer.WGT, "y_size": 1, "z_size": 1, "sram_x": 1}
    short = {"x_size": 256 // scratchpads(cfg)["wgt"].piece_bytes}
    row = {"x_size": 128 // piece, "y_size": 1, "z_size": 1, "sram_x": 1}
    rows = {"x_size": 7, "y_size": 7, "z_size": 8, "sram_x": 1, "sram_y": 7, "dram_y": 14 * piece}
    padded = {"pad_left": 1, "pad_right": 1, "pad_top": 1, "pad_bottom": 1}
    cases = {
        "long": [wgt | {"x_size": 60, "dram_addr": 4096 - 64}],
        "rows of 14 beats": [rows | {"dram_z": 200 * piece, "dram_addr": 8 * i} for i in range(2)],
        "short rows that touch": [rows | {"x_size": 1, "y_size": 500, "z_size": 1, "dram_y": piece}],
        "short instructions": [(row, wgt | short)[i % 2] | {"dram_addr": i * 256} for i in range(60)],
        "padded rows": [
            rows | padded | {"x_size": 56, "y_size": 8, "z_size": 1, "dram_y": 56 * piece, "dram_addr": i * 16384}
            for i in range(4)
        ],
    }  # fmt: skip
    for case, blocks in cases.items():
        machine.done.clear()
        put = cocotb.start_soon(bench.stream_put(dut, "instr", machine.payloads(blocks)))
        beats: list[int] = []
        active = held = 0
        for cycle in range(20_000):
            await bench.fall(dut)
            if dut.read_beat.value:
                beats.append(cycle)
            active += bench.value(dut.active)
            held += bench.value(dut.stalled)
            if len(machine.done) == len(blocks):
                break
        span = beats[-1] - beats[0] + 1
        cocotb.log.info("%s: %d beats in %d cycles; active %d, held %d", case, len(beats), span, active, held)
        assert active >= len(beats) - 2 * sum(block["y_size"] * block["z_size"] for block in blocks)
        assert (
            (0 if case == "padded rows" else 40) < held <= cycle + 1 - active
        )  # memory's latency before the first beat
        # The writes of padding take their cycles, too.
        data = 56 * 8 * piece // cfg.bus_bytes
        floor = 0.98 * data / (data + 58 * 10 - 56 * 8) if case == "padded rows" else 0.95
        assert len(beats) / span >= floor, f"{case}: {len(beats)} beats in {span} cycles"
        await put
        await bench.rise(dut)
