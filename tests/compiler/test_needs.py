"""`find_needs` gives each instruction the needs that a comparison of all pairs of instructions gives."""

from __future__ import annotations

import pytest
from configs import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import random_program
from thorough import tries

from celosia.compiler.vthread import needs
from celosia.compiler.vthread.needs import find_needs
from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Unit
from celosia.hw.spec.scratchpads import depths
from celosia.sim.functional.access import complete_fields, ranges, rows

ARENA = 4096


def needs_of_pairs(cfg: Config, stream: list[StreamInstruction]) -> list[list[int]]:
    """Compare each instruction with all before it, entry by entry and byte by byte."""
    result: list[list[int]] = []
    touched: list[list[tuple[object, set[int], bool]]] = []
    for number, instruction in enumerate(stream):
        f = complete_fields(cfg, instruction.opcode, instruction.fields)
        here: list[tuple[object, set[int], bool]] = [
            (r.memory, set(range(r.first, min(r.end, depths(cfg)[r.memory]))), r.write)
            for r in ranges(cfg, instruction.opcode, f)
        ]
        moved = rows(cfg, instruction.opcode, f)
        if moved is not None and moved.address < ARENA:
            here.append(("dram", {a // cfg.piece_bytes for a in moved.byte_addresses(1 << 32)}, moved.write))
        unit, needed = UNIT_OF[instruction.opcode], [-1] * len(Unit)
        for before in range(number):
            other = UNIT_OF[stream[before].opcode]
            waits = instruction.waits_for_compute and other in (Unit.GEMM, Unit.VECTOR)
            for memory, entries, write in here:
                for memory_before, entries_before, write_before in touched[before]:
                    counts = other != unit or (unit == Unit.LOAD and memory != "dram")
                    if counts and memory == memory_before and (write or write_before):
                        waits |= not entries.isdisjoint(entries_before)
            if waits:
                needed[other] = before
        result.append(needed)
        touched.append(here)
    return result


def is_inside(cfg: Config, instruction: StreamInstruction) -> bool:
    """Return whether an instruction wraps around in no memory, as those of the compiler, and moves whole granules."""
    f = complete_fields(cfg, instruction.opcode, instruction.fields)
    moved = rows(cfg, instruction.opcode, f)
    granules = moved is None or not any(n % cfg.piece_bytes for n in (moved.address, moved.y_stride, moved.z_stride))
    in_dram = moved is None or moved.end <= ARENA or moved.address >= ARENA
    return (
        granules
        and in_dram
        and all(r.first < r.end <= depths(cfg)[r.memory] for r in ranges(cfg, instruction.opcode, f))
    )


@pytest.mark.parametrize("name", ["4x4", "batch2"])
@pytest.mark.parametrize("limits", [(2048, 1 << 17), (16, 40), (1, 1)])
@settings(max_examples=tries(8), deadline=None)
@given(seed=st.integers(0, 1 << 20), waiting=st.sets(st.integers(0, 39)))
def test_needs_are_those_of_all_pairs(name: str, limits: tuple[int, int], seed: int, waiting: set[int]) -> None:
    """The limits cut a stream into parts of other sizes, which must not matter."""
    cfg = CONFIGS[name]
    program = random_program(cfg, seed, count=60, tokens=False, rich=True, wrap=0.0).instructions
    inside = [i for i in program if is_inside(cfg, StreamInstruction(i.opcode, dict(i.fields)))]
    stream = [StreamInstruction(i.opcode, dict(i.fields), 0, n in waiting) for n, i in enumerate(inside)]
    assert len(stream) > 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needs, "MAX_ACCESSES", limits[0])
        patch.setattr(needs, "MAX_PAIRS", limits[1])
        assert find_needs(cfg, stream, ARENA) == needs_of_pairs(cfg, stream)
