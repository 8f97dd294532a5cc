"""An instruction reads and writes what `touches` says, and nothing else, on the reference."""

from __future__ import annotations

import numpy as np
import pytest
from configs import CONFIGS
from programs import random_program
from thorough import paired

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Opcode
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.functional import reference
from celosia.sim.functional.access import all_ranges, all_rows, columns, complete_fields, ranges, rows, touches
from celosia.sim.functional.reference import Fields, State


def touched(cfg: Config, opcode: Opcode, f: Fields, write: bool) -> dict[str, set[int]]:
    """Return the pieces that an instruction reads (or writes, if `write`), by scratchpad."""
    pieces_by_name: dict[str, set[int]] = {name: set() for name in scratchpads(cfg)}
    for touch in touches(cfg, opcode, f):
        if touch.write == write:
            pad = scratchpads(cfg)[touch.memory]
            pieces_by_name[touch.memory] |= set(touch.piece_numbers(pad.depth * pad.pieces).tolist())
    return pieces_by_name


def pieces(state: State) -> dict[str, np.ndarray]:
    """Return views of the bytes of each piece, [pieces, bytes], by scratchpad."""
    views = {}
    for name, pad in scratchpads(state.cfg).items():
        views[name] = getattr(state, name).reshape(pad.depth * pad.pieces, -1).view(np.uint8)
    return views


@pytest.mark.parametrize(("name", "seed"), paired(CONFIGS, range(3)))
def test_an_instruction_depends_on_what_it_reads_and_changes_what_it_writes(name: str, seed: int) -> None:
    """Results do not depend on anything that the instruction does not read, and nothing else changes.

    The reference runs each instruction on two states that are random except for the data that it reads.
    """
    cfg, rng = CONFIGS[name], np.random.default_rng(seed)
    program = random_program(cfg, seed, count=40, rich=True, wrap=0.2)
    size = len(program.image)
    for instruction in program.instructions:
        opcode, f = instruction.opcode, complete_fields(cfg, instruction.opcode, instruction.fields)
        read, written, moved = touched(cfg, opcode, f, False), touched(cfg, opcode, f, True), rows(cfg, opcode, f)
        first, second = State(cfg), State(cfg)
        first.randomise(rng), second.randomise(rng)
        for pad, index in read.items():
            pieces(second)[pad][list(index)] = pieces(first)[pad][list(index)]
        drams = [rng.integers(0, 256, size, np.uint8) for _ in range(2)]
        dram_bytes = moved.byte_addresses(size) if moved else np.zeros(0, np.int64)
        if moved and not moved.write:
            drams[1][dram_bytes] = drams[0][dram_bytes]
        before = {pad: array.copy() for pad, array in pieces(first).items()}, drams[0].copy()
        for state, dram in ((first, drams[0]), (second, drams[1])):
            reference.execute(state, dram, instruction.word(cfg))
        for pad, array in pieces(first).items():
            changed = set(np.flatnonzero((array != before[0][pad]).any(axis=1)).tolist())
            assert changed <= written[pad], (opcode, pad)
            index = list(written[pad])
            assert np.array_equal(array[index], pieces(second)[pad][index]), (opcode, pad)
        changed_bytes = set(np.flatnonzero(drams[0] != before[1]).tolist())
        assert changed_bytes <= (set(dram_bytes.tolist()) if moved and moved.write else set())
        if moved and moved.write:
            assert np.array_equal(drams[0][dram_bytes], drams[1][dram_bytes])


@pytest.mark.parametrize("name", CONFIGS)
def test_ranges_hold_what_is_touched(name: str) -> None:
    cfg = CONFIGS[name]
    for instruction in random_program(cfg, 5, count=60, rich=True, wrap=0.0).instructions:
        opcode, f = instruction.opcode, complete_fields(cfg, instruction.opcode, instruction.fields)
        all_of_instruction = ranges(cfg, opcode, f)
        for write in (False, True):
            for memory, index in touched(cfg, opcode, f, write).items():
                pad = scratchpads(cfg)[memory]
                of_memory = [
                    touched_range
                    for touched_range in all_of_instruction
                    if touched_range.memory == memory and (touched_range.write or not write)
                ]
                if index and max(touched_range.end for touched_range in of_memory) <= pad.depth:
                    inside = {e for touched_range in of_memory for e in range(touched_range.first, touched_range.end)}
                    assert {piece // pad.pieces for piece in index} <= inside
                    assert min(inside) == min(touched_range.first for touched_range in of_memory)


@pytest.mark.parametrize("name", CONFIGS)
def test_many_instructions_touch_what_each_of_them_does(name: str) -> None:
    cfg = CONFIGS[name]
    program = random_program(cfg, 6, count=80, rich=True, wrap=0.2).instructions
    for opcode in UNIT_OF:
        raw_fields = [instruction.fields for instruction in program if instruction.opcode == opcode]
        fields, together = [complete_fields(cfg, opcode, f) for f in raw_fields], columns(cfg, opcode, raw_fields)
        touched = [set[tuple[str, int, int, bool]]() for _ in fields]
        for part in all_ranges(cfg, opcode, together):
            for number, first, end in zip(*(column.tolist() for column in part[1:4]), strict=True):
                touched[number].add((part.memory, first, end, part.write))
        for f, of_instruction in zip(fields, touched, strict=True):
            written = {accessed[:3] for accessed in of_instruction if accessed[3]}
            read_only = {accessed for accessed in of_instruction if accessed[:3] not in written}
            assert read_only | {(*accessed, True) for accessed in written} == set(ranges(cfg, opcode, f))
        assert raw_fields
        assert all_rows(cfg, opcode, together) == [rows(cfg, opcode, f) for f in fields]


def test_rows_are_seen_as_granules() -> None:
    cfg = CONFIGS["4x4"]
    f = complete_fields(cfg, Opcode.STORE, dict(dram_addr=64, x_size=3, y_size=2, dram_y=32, z_size=2, dram_z=128))
    moved = rows(cfg, Opcode.STORE, f)
    assert moved is not None and moved.write and moved.end == 64 + 128 + 32 + 3 * cfg.piece_bytes
    assert moved.view(np.arange(256)).ravel().tolist() == moved.byte_addresses(256).tolist()
    assert moved.view(np.arange(64), 4).tolist() == [[[16, 17, 18], [24, 25, 26]], [[48, 49, 50], [56, 57, 58]]]
    with pytest.raises(ValueError, match=r"byte 236.*58 granules of 4"):
        moved.view(np.arange(58), 4)


def test_gemm_and_vector_touch_no_dram() -> None:
    for opcode in UNIT_OF:
        f = complete_fields(CONFIGS["4x4"], opcode, {})
        assert (rows(CONFIGS["4x4"], opcode, f) is None) == (opcode in (Opcode.GEMM, Opcode.VECTOR))
