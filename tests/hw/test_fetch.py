"""Compare fetch with the instruction set's own decoder and rules, behind a memory with random delays."""

from __future__ import annotations

import random
from functools import partial

import bench
import cocotb
import pytest
from configs import COVERING, COVERING_PAIR
from thorough import some, tries

from celosia.hw.dae_pipeline.fetch import Fetch
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Opcode, Unit, formats, instruction_bytes, opcode_of
from celosia.hw.spec.legality import why_illegal
from celosia.hw.spec.regs import Error

CONFIGS = COVERING | {
    "bus128": Config(block_in=4, block_out=8, bus_bytes=128, queue_depth=4),
    "wide": Config(block_in=4, block_out=8, bus_bytes=8, queue_depth=4, acc_depth=1 << 20, vin_depth=1 << 20),
}
BASE, START = 0x12_3456_7000, 3 << 10
NAMES = [unit.name.lower() for unit in Unit]


def test_configs_have_several_instruction_sizes() -> None:
    assert {instruction_bytes(cfg) for cfg in CONFIGS.values()} == {64, 128}


@pytest.mark.rtl
@pytest.mark.parametrize("name", some(CONFIGS, [COVERING_PAIR[0], "bus128"]))
def test_fetch(name: str) -> None:
    cfg = CONFIGS[name]
    everywhere = ["hands_out_in_order", "stops_at_what_is_illegal", "stops_at_bus_error"]
    bench.run(partial(Fetch, cfg), __file__, cfg=cfg, only=() if name in ("4x4", COVERING_PAIR[0]) else everywhere)


def random_word(cfg: Config, opcode: Opcode | None = None) -> int:
    """Draw an instruction with random fields; fields that the legality rules mention are mostly legal."""
    opcode = opcode or random.choice(list(Opcode))
    values = {}
    for field in formats(cfg)[opcode].fields:
        if field.name == "opcode":
            continue
        value = random.choice([0, random.getrandbits(field.width), random.getrandbits(min(3, field.width))])
        if field.name.startswith("extent") or field.name.endswith("size"):
            value = random.getrandbits(field.width) if random.random() < 0.99 else 0
        if field.name in ("wait", "post") and random.random() < 0.9:
            value &= ~(1 << UNIT_OF[opcode])
        values[field.name] = value - (1 << field.width) if field.signed and value >> field.width - 1 else value
    top = random.getrandbits(8 * instruction_bytes(cfg)) >> formats(cfg)[opcode].width << formats(cfg)[opcode].width
    return formats(cfg)[opcode].encode(**values) | top


def legal_word(cfg: Config) -> int:
    while True:
        word = random_word(cfg)
        if why_illegal(cfg, word) is None:
            return word


async def memory(dut: bench.Dut, words: list[int], pause: float = 0.0, latency: int = 0, bad: int = -1) -> None:
    """Answer bursts from the instructions at START, in order, after `latency` cycles; byte `bad` gives an error."""
    cfg = bench.config()
    size = instruction_bytes(cfg)
    content = b"".join(word.to_bytes(size, "little") for word in words) + bytes(cfg.bus_bytes)
    bursts: list[tuple[int, int, int]] = []
    cycle = 0
    dut.bus__request__ready.value = 1
    while True:
        dut.bus__response__valid.value = 0
        if bursts and cycle >= bursts[0][0] and random.random() >= pause:
            due, addr, left = bursts.pop(0)
            offset = addr - BASE - START
            data = int.from_bytes(content[offset : offset + cfg.bus_bytes], "little")
            error, last = offset <= bad < offset + cfg.bus_bytes, left == 0
            dut.bus__response__payload.value = data | error << 8 * cfg.bus_bytes | last << 8 * cfg.bus_bytes + 1
            dut.bus__response__valid.value = 1
            if not last:
                bursts.insert(0, (due, addr + cfg.bus_bytes, left - 1))
        await bench.fall(dut)
        assert dut.bus__response__ready.value, "fetch holds up the read channel"
        if dut.bus__request__valid.value and dut.bus__request__ready.value:
            request = bench.value(dut.bus__request__payload)
            addr, length = request & (1 << 40) - 1, request >> 40
            end = addr + (length + 1) * cfg.bus_bytes
            assert addr // 4096 == (end - 1) // 4096 and addr % cfg.bus_bytes == 0
            assert addr >= BASE + START and end <= BASE + START + len(content), "reads beyond the instructions"
            bursts.append((cycle + latency, addr, length))
        await bench.rise(dut)
        dut.bus__request__ready.value = int(random.random() >= pause)
        cycle += 1


async def begin(dut: bench.Dut, count: int) -> None:
    await bench.start(dut, streams=["bus__request", *(f"queues__{name}" for name in NAMES)])
    dut.dma_base.value = BASE
    dut.dma_size.value = START + count * instruction_bytes(bench.config())
    dut.instr_addr.value = START
    dut.instr_count.value = count
    dut.run.value = 1


def expected(cfg: Config, words: list[int]) -> dict[str, list[int]]:
    """Return the payloads that each unit must receive."""
    queues: dict[str, list[int]] = {name: [] for name in NAMES}
    for index, word in enumerate(words):
        opcode = opcode_of(word)
        assert opcode is not None
        fields = word & (1 << formats(cfg)[opcode].width) - 1
        queues[UNIT_OF[opcode].name.lower()].append(index | fields << bench.INDEX_BITS)
    return queues


async def collect(dut: bench.Dut, name: str, into: list[int], pause: float = 0.0) -> None:
    while True:
        into += await bench.stream_get(dut, f"queues__{name}", 1, pause)


@cocotb.test()
@cocotb.parametrize(pause=[0.0, 0.4])
async def hands_out_in_order(dut: bench.Dut, pause: float) -> None:
    cfg = bench.config()
    words = [legal_word(cfg) for _ in range(60)]
    await begin(dut, len(words))
    cocotb.start_soon(memory(dut, words, pause, latency=random.choice([0, 30])))
    errors: list[int] = []
    cocotb.start_soon(bench.pulses_get(dut, "error", errors))
    takers = {
        name: cocotb.start_soon(bench.stream_get(dut, f"queues__{name}", len(items), pause))
        for name, items in expected(cfg, words).items()
    }
    for name, items in expected(cfg, words).items():
        assert await takers[name] == items, name
    await bench.fall(dut)
    assert dut.finished.value and dut.idle.value and not errors


@cocotb.test()
async def stops_at_what_is_illegal(dut: bench.Dut) -> None:
    cfg = bench.config()
    for attempt in range(tries(30)):
        candidates = [random_word(cfg, random.choice(list(Opcode))) for _ in range(40)]
        broken = [i for i, word in enumerate(candidates) if why_illegal(cfg, word)]
        # One illegal word of a random kind among legal ones.
        bad = candidates[random.choice(broken)] if broken and attempt % 5 else random.getrandbits(300) << 3
        words = [legal_word(cfg) for _ in range(random.randrange(6))]
        position = len(words)
        words += [bad, legal_word(cfg)]
        if attempt == 0:
            await begin(dut, len(words))
        else:
            dut.rst.value = 1
            dut.run.value = dut.halt.value = 0
            await bench.rise(dut)
            dut.rst.value = 0
            dut.dma_size.value = START + len(words) * instruction_bytes(cfg)
            dut.instr_count.value = len(words)
            await bench.rise(dut)
            dut.run.value = 1
        tasks = [cocotb.start_soon(memory(dut, words))]
        taken: dict[str, list[int]] = {name: [] for name in NAMES}
        tasks += [cocotb.start_soon(collect(dut, name, into)) for name, into in taken.items()]
        for _ in range(300):
            await bench.fall(dut)
            if dut.error__valid.value:
                break
        assert bench.value(dut.error__payload) == Error.ILLEGAL_INSTRUCTION | position << 4, why_illegal(cfg, bad)
        await bench.rise(dut)
        dut.halt.value = 1
        for _ in range(60):
            await bench.fall(dut)
            assert not dut.error__valid.value and not dut.finished.value
        assert dut.idle.value
        assert taken == expected(cfg, words[:position])
        for task in tasks:
            task.cancel()
        await bench.rise(dut)


async def first_error(dut: bench.Dut) -> tuple[Error, int]:
    for _ in range(2000):
        await bench.fall(dut)
        if dut.error__valid.value:
            payload = bench.value(dut.error__payload)
            await bench.rise(dut)
            return Error(payload & 15), payload >> 4
    raise AssertionError("no error")


@cocotb.test()
async def stops_at_limit(dut: bench.Dut) -> None:
    cfg = bench.config()
    words = [legal_word(cfg) for _ in range(10)]
    await begin(dut, len(words))
    dut.dma_size.value = START + 9 * instruction_bytes(cfg) + 63
    assert await first_error(dut) == (Error.ADDRESS, 9)
    dut.halt.value = 1
    for _ in range(100):
        await bench.fall(dut)
        assert not dut.bus__request__valid.value and not dut.error__valid.value


@cocotb.test()
async def numbers_are_as_wide_as_the_count(dut: bench.Dut) -> None:
    await begin(dut, 0)
    dut.dma_size.value = dut.instr_count.value = (1 << 32) - 1
    number = ((1 << 32) - 1 - START) // instruction_bytes(bench.config())
    assert await first_error(dut) == (Error.ADDRESS, number)


@cocotb.test()
async def stops_at_bus_error(dut: bench.Dut) -> None:
    cfg = bench.config()
    words = [legal_word(cfg) for _ in range(10)]
    await begin(dut, len(words))
    bad = 5 * instruction_bytes(cfg) + 1
    first = bad // cfg.bus_bytes * cfg.bus_bytes // instruction_bytes(cfg)  # instruction in the failing beat
    cocotb.start_soon(memory(dut, words, bad=bad))
    taken: dict[str, list[int]] = {name: [] for name in NAMES}
    for name, into in taken.items():
        cocotb.start_soon(collect(dut, name, into))
    assert await first_error(dut) == (Error.READ, first)
    dut.halt.value = 1
    await bench.cycles(dut, 100)
    assert taken == expected(cfg, words[:first])
    assert dut.idle.value and not dut.finished.value


@cocotb.test()
async def halts(dut: bench.Dut) -> None:
    """After `halt`, fetch makes no new request, and receives the answers to earlier ones."""
    cfg = bench.config()
    words = [legal_word(cfg) for _ in range(100)]
    await begin(dut, len(words))
    cocotb.start_soon(memory(dut, words, latency=50))
    await bench.cycles(dut, 20)
    await bench.fall(dut)
    assert not dut.idle.value
    await bench.rise(dut)
    dut.halt.value = 1
    await bench.cycles(dut, 5)
    for _ in range(150):
        await bench.fall(dut)
        assert not dut.bus__request__valid.value
    assert dut.idle.value


@cocotb.test()
async def full_rate(dut: bench.Dut) -> None:
    """An instruction takes at most 10 cycles: 64 bytes at 8 a cycle, with 40 cycles of latency."""
    cfg = bench.config()
    words = [legal_word(cfg) for _ in range(50)]
    await begin(dut, len(words))
    cocotb.start_soon(memory(dut, words, latency=40))
    for name in NAMES:
        cocotb.start_soon(collect(dut, name, []))
    cycle = 0
    while not dut.finished.value:
        await bench.fall(dut)
        cycle += 1
    assert cycle <= 60 + 10 * len(words), f"{cycle} cycles"
    dut._log.info(f"{(cycle - 50) / len(words):.1f} cycles an instruction")
