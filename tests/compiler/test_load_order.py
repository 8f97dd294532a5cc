"""LOADs are ordered as expected, and any stream computes the same after the pass (`executed` is independent)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler.vthread.encode import encode
from celosia.compiler.vthread.load_order import _cut_fields, order_loads
from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.compiler.vthread.verify import verify
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, element_bytes
from celosia.sim.functional.access import complete_fields

from .test_tokens import ARENA, parse

SIZES = dict(inp_depth=256, wgt_depth=256, acc_depth=256, vin_depth=256, out_depth=256, par_depth=8)
CFG = Config(block_in=4, block_out=4, **SIZES)
CONFIGS = {"4x4": CFG, "two ports": replace(CFG, ports=2), "batch": replace(CFG, batch=2)}


def ordered(text: str, cfg: Config = CFG) -> list[str]:
    """Return the instructions of `text` in their new order: a LOAD or STORE as scratchpad, first entry and count."""
    stream, needs = order_loads(cfg, [parse(line) for line in text.strip().splitlines()], ARENA)
    insert_tokens(cfg, stream, ARENA, needs)
    verify(cfg, encode(cfg, stream), 2 * ARENA + 4096, (0, ARENA))
    return [_words(instruction) for instruction in stream]


def _words(instruction: StreamInstruction) -> str:
    fields = instruction.fields
    if instruction.opcode == Opcode.LOAD:
        return f"load {Buffer(fields['buffer']).name.lower()} {fields['sram_base']} {fields['x_size']}"
    return instruction.opcode.name.lower()


WAITS = """
load inp 0 16
load vin 0 4
vector vin 0 0 4
store 0 4 0
load vin 8 4 0
vector vin 8 8 4
store 8 4 256
"""
"""The second LOAD reads what the first STORE writes."""


def test_a_later_load_moves_before_one_that_waits_for_a_store() -> None:
    assert ordered(WAITS + "load wgt 0 4\ngemm 0 0 0 1") [1:6] == [
        "load vin 0 4", "vector", "store", "load wgt 0 4", "load vin 8 4"
    ]  # fmt: skip


def test_nothing_moves_where_nothing_waits() -> None:
    text = "load inp 0 4\nload wgt 0 4\ngemm 0 0 0 1\nload inp 8 4\nload wgt 8 4\ngemm 8 8 8 1"
    stream = [parse(line) for line in text.splitlines()]
    result, needs = order_loads(CFG, list(stream), ARENA)
    assert [id(i) for i in result] == [id(i) for i in stream] and needs is not None


def test_a_load_stays_behind_what_reads_its_scratchpad() -> None:
    text = WAITS + "load vin 8 4\nvector vin 8 0 4"  # it overwrites what the second VECTOR reads
    assert [line for line in ordered(text) if line.startswith("load vin")] == [
        "load vin 0 4", "load vin 8 4", "load vin 8 4"
    ]  # fmt: skip


def test_a_load_stays_behind_the_store_that_it_reads() -> None:
    text = WAITS + "load inp 32 4 256\nload wgt 0 4\ngemm 32 0 0 1"
    lines = ordered(text)
    assert lines.index("load inp 32 4") > max(n for n, line in enumerate(lines) if line == "store")


def test_a_load_longer_than_the_wait_is_cut() -> None:
    lines = ordered(WAITS + "load wgt 0 200\ngemm 0 0 0 1")
    loads = [line.split() for line in lines if line.startswith("load wgt")]
    assert len(loads) > 1 and lines.index(" ".join(loads[0])) < lines.index("load vin 8 4")
    assert sum(int(count) for *_, count in loads) == 200
    assert [int(first) for *_, first, _ in loads] == [sum(int(c) for *_, c in loads[:n]) for n in range(len(loads))]


def test_a_load_that_fits_the_wait_but_for_its_fetch_is_cut_before_its_last_row() -> None:
    """An instruction's fetch takes many cycles on a narrow bus."""
    cfg = replace(CFG, bus_bytes=4, weight_bits=8)
    for count in range(2, 90):
        stream = [parse(line) for line in f"{WAITS}load wgt 0 {count}\ngemm 0 0 0 1".strip().splitlines()]
        loads = [i for i in order_loads(cfg, stream, ARENA)[0] if i.fields.get("buffer") == Buffer.WGT]
        assert sum(load.fields["x_size"] for load in loads) == count and all(load.fields["x_size"] for load in loads)


def test_rows_that_are_complete_early_are_loaded_early() -> None:
    text = "\n".join(f"load vin 0 64\nvector vin 0 {64 * n} 64\nstore {64 * n} 64 {256 * n}" for n in range(3))
    loads = [
        line
        for line in ordered(f"{text}\nload wgt 0 1\nload inp 0 192 0\ngemm 0 0 0 192")
        if line.startswith("load inp")
    ]
    assert len(loads) > 1 and sum(int(line.split()[-1]) for line in loads) == 192


def test_no_load_passes_one_that_waits_for_all_computation() -> None:
    stream = [parse(line) for line in f"{WAITS}load wgt 0 4\nload wgt 8 4\ngemm 0 8 0 1".strip().splitlines()]
    stream[7].waits_for_compute = True
    result, _ = order_loads(CFG, list(stream), ARENA)
    assert [id(i) for i in result] == [id(i) for i in stream]


# Random streams --------------------------------------------------------------------------------------------------


@st.composite
def streams(draw: st.DrawFn) -> list[StreamInstruction]:
    """Draw instructions that load, compute and store; some LOADs bring blocks of rows with padding."""
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    stream = []
    for _ in range(number(3, 14)):
        kind = draw(st.sampled_from(["load", "load", "load", "vector", "store", "gemm"]))
        first, count, place = 8 * number(0, 7), number(1, 40), 64 * number(0, 12)
        if kind == "load":
            buffer = draw(st.sampled_from(["inp", "wgt", "vin"]))
            stream.append(parse(f"load {buffer} {first} {count}" + (f" {place}" if number(0, 1) else "")))
            if buffer != "wgt" and number(0, 2) == 0:
                stream[-1].fields |= _block(number(1, 4), number(1, 4), number(1, 6), number(0, 1), number(0, 2))
        else:
            words = {"vector": f"vin {first} {8 * number(0, 7)} {count}", "store": f"{first} {count} {place}",
                     "gemm": f"{first} {8 * number(0, 7)} {8 * number(0, 7)} {count}"}[kind]  # fmt: skip
            stream.append(parse(f"{kind} {words}"))
    return stream


def _block(z: int, y: int, x: int, top: int, left: int) -> dict[str, int]:
    """Return the fields of a LOAD of `z` planes of `y` rows of `x` elements, with padding."""
    row, plane = x + left, (x + left) * (y + top + 1)
    return dict(x_size=x, y_size=y, z_size=z, dram_y=64, dram_z=256, sram_y=row, sram_z=plane, pad_top=top,
                pad_bottom=1, pad_left=left)  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=tries(60), deadline=None)
@given(block=st.tuples(*map(st.integers, (1, 1, 2, 0, 0), (3, 4, 6, 2, 2))), part=st.integers(1, 5))
def test_the_parts_of_a_load_write_what_it_writes(name: str, block: tuple[int, ...], part: int) -> None:
    cfg, stream = CONFIGS[name], [parse("load vin 3 4 64")]
    stream[0].fields |= _block(*block)
    rows = max(size for size in (1, *block[:3])) if block[0] == block[1] == 1 else next(n for n in block[:2] if n > 1)
    if rows > 1:
        first, rest = _cut_fields(cfg, stream[0].fields, 1 + part % (rows - 1) if rows > 2 else 1)
        parts = [replace(stream[0], fields=fields) for fields in (first, rest)]
        assert executed(cfg, parts) == executed(cfg, stream)


def executed(cfg: Config, stream: list[StreamInstruction]) -> dict[Any, Any]:
    """Execute instructions in program order on symbolic terms; return the contents of scratchpads and DRAM.

    A LOAD copies byte by byte.
    """
    memory: dict[Any, Any] = {}
    for instruction in stream:
        f, opcode = complete_fields(cfg, instruction.opcode, instruction.fields), instruction.opcode
        if opcode in (Opcode.LOAD, Opcode.STORE):
            load = opcode == Opcode.LOAD
            pad = Buffer(f["buffer"]).name if load else "OUT"
            size = element_bytes(cfg, Buffer(f["buffer"])) if load else cfg.piece_bytes
            top, bottom, left, right = (f.get(f"pad_{side}", 0) for side in ("top", "bottom", "left", "right"))
            for z in range(f["z_size"]):
                for y in range(f["y_size"] + top + bottom):
                    for x in range(f["x_size"] + left + right):
                        entry = f["sram_base"] + z * f["sram_z"] + y * f["sram_y"] + x * f["sram_x"]
                        inside = top <= y < top + f["y_size"] and left <= x < left + f["x_size"]
                        byte = f["dram_addr"] + z * f["dram_z"] + (y - top) * f["dram_y"] + (x - left) * size
                        for b in range(size):
                            places = (pad, entry, b), ("DRAM", byte + b)
                            if load:
                                memory[places[0]] = memory.get(places[1], places[1]) if inside else "padding"
                            else:
                                memory[places[1]] = memory.get(places[0], places[0])
            continue
        for x in range(f["extent_x"]):
            names = (("INP", "inp"), ("WGT", "wgt")) if opcode == Opcode.GEMM else (("VIN", "a"),)
            target = ("ACC", "acc") if opcode == Opcode.GEMM else ("OUT", "dst")
            entries = [(pad, f[f"{name}_base"] + x * f[f"{name}_x"]) for pad, name in names]
            read = hash(tuple(memory.get((*entry, b), (*entry, b)) for entry in entries for b in range(32)))
            for b in range(32):
                memory[target[0], f[f"{target[1]}_base"] + x * f[f"{target[1]}_x"], b] = (opcode.name, read, b)
    return memory


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=tries(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(stream=streams())
def test_random_streams_compute_the_same(name: str, stream: list[StreamInstruction]) -> None:
    cfg = CONFIGS[name]
    before = executed(cfg, stream)
    result, needs = order_loads(cfg, [replace(i, fields=dict(i.fields)) for i in stream], ARENA)
    assert executed(cfg, result) == before
    insert_tokens(cfg, result, ARENA, needs)
    tokens = [(i.fields["wait"], i.fields.pop("post", 0)) for i in result]
    insert_tokens(cfg, result, ARENA)
    assert tokens == [(i.fields["wait"], i.fields.get("post", 0)) for i in result]
