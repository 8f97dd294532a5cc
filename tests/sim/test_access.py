"""What instructions touch, beside the reference: what it reads and writes when it runs, and nothing else."""

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
    """Pieces by the name of their scratchpad."""
    found: dict[str, set[int]] = {name: set() for name in scratchpads(cfg)}
    for touch in touches(cfg, opcode, f):
        if touch.write == write:
            pad = scratchpads(cfg)[touch.memory]
            found[touch.memory] |= set(touch.piece_numbers(pad.depth * pad.pieces).tolist())
    return found


def pieces(state: State) -> dict[str, np.ndarray]:
    """The bytes of each piece of each scratchpad, [pieces, bytes]; a view."""
    found = {}
    for name, pad in scratchpads(state.cfg).items():
        found[name] = getattr(state, name).reshape(pad.depth * pad.pieces, -1).view(np.uint8)
    return found


@pytest.mark.parametrize(("name", "seed"), paired(CONFIGS, range(3)))
def test_an_instruction_depends_on_what_it_reads_and_changes_what_it_writes(name: str, seed: int) -> None:
    """All that is not read is random, twice: what is written is the same; nothing else is changed."""
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
        of_dram = moved.byte_addresses(size) if moved else np.zeros(0, np.int64)
        if moved and not moved.write:
            drams[1][of_dram] = drams[0][of_dram]
        before = {pad: array.copy() for pad, array in pieces(first).items()}, drams[0].copy()
        for state, dram in ((first, drams[0]), (second, drams[1])):
            reference.execute(state, dram, instruction.word(cfg))
        for pad, array in pieces(first).items():
            changed = set(np.flatnonzero((array != before[0][pad]).any(axis=1)).tolist())
            assert changed <= written[pad], (opcode, pad)
            index = list(written[pad])
            assert np.array_equal(array[index], pieces(second)[pad][index]), (opcode, pad)
        changed_bytes = set(np.flatnonzero(drams[0] != before[1]).tolist())
        assert changed_bytes <= (set(of_dram.tolist()) if moved and moved.write else set())
        if moved and moved.write:
            assert np.array_equal(drams[0][of_dram], drams[1][of_dram])


@pytest.mark.parametrize("name", CONFIGS)
def test_ranges_hold_what_is_touched(name: str) -> None:
    cfg = CONFIGS[name]
    for instruction in random_program(cfg, 5, count=60, rich=True, wrap=0.0).instructions:
        opcode, f = instruction.opcode, complete_fields(cfg, instruction.opcode, instruction.fields)
        found = ranges(cfg, opcode, f)
        for write in (False, True):
            for memory, index in touched(cfg, opcode, f, write).items():
                pad = scratchpads(cfg)[memory]
                own = [each for each in found if each.memory == memory and (each.write or not write)]
                if index and max(each.end for each in own) <= pad.depth:
                    inside = {e for each in own for e in range(each.first, each.end)}
                    assert {piece // pad.pieces for piece in index} <= inside
                    assert min(inside) == min(each.first for each in own)


@pytest.mark.parametrize("name", CONFIGS)
def test_many_instructions_touch_what_each_of_them_does(name: str) -> None:
    cfg = CONFIGS[name]
    program = random_program(cfg, 6, count=80, rich=True, wrap=0.2).instructions
    for opcode in UNIT_OF:
        own = [instruction.fields for instruction in program if instruction.opcode == opcode]
        each, together = [complete_fields(cfg, opcode, f) for f in own], columns(cfg, opcode, own)
        assert own and all_ranges(cfg, opcode, together) == [ranges(cfg, opcode, f) for f in each]
        assert all_rows(cfg, opcode, together) == [rows(cfg, opcode, f) for f in each]


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
