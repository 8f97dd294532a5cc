"""Find the instructions that each instruction must come after, from the addresses that it accesses.

These are reads after writes, writes after reads, and writes after writes, in scratchpads and in DRAM. `tokens` and
`load_order` use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Opcode, Unit
from celosia.hw.spec.scratchpads import depths
from celosia.sim.functional.access import Columns, DramRows, all_ranges, all_rows, columns
from celosia.sim.functional.decode import OpcodeColumns

NEVER = -1
"""In place of an instruction's number: no instruction."""
UNITS = range(len(Unit))
"""Numbers of the units."""
UNIT_NUMBER = {opcode: int(unit) for opcode, unit in UNIT_OF.items()}  # plain ints, since comparing an IntEnum is slow
LOAD, STORE = int(Unit.LOAD), int(Unit.STORE)
COMPUTE = int(Unit.GEMM), int(Unit.VECTOR)
"""Numbers of the units that compute."""
MAX_ACCESSES = 2048
"""Accesses to a scratchpad that are logged together: with more, their ranges cut it into more segments."""
MAX_PAIRS = 1 << 17
"""Pairs of an access and a segment that are handled together, if there are several accesses, which limits memory."""

Ints = NDArray[np.int64]
Needs = list[int]
"""For each unit, the number of its last instruction that an instruction must come after, or NEVER."""


def find_needs(
    cfg: Config, instructions: list[StreamInstruction], tracked_bytes: int,
    stores: dict[int, Ints] | None = None, decoded: Mapping[Opcode, OpcodeColumns] | None = None,
) -> list[Needs]:  # fmt: skip
    """Return what each instruction needs: those before it that access the same and that one of both writes.

    A unit executes its own instructions in order; its own entry counts only for a LOAD that overwrites another's data.
    tracked_bytes: DRAM from there on is never written. stores: gets, for each LOAD of activations, the last STORE of
    each granule that it reads, [planes, rows, granules of a row]. decoded: the columns of the instructions, if known.
    """
    accesses: dict[str, list[_Accesses]] = {}
    moves: list[tuple[int, DramRows]] = []
    numbers_of: dict[Opcode, Ints] = {}
    for opcode, (numbers, fields) in _columns_by_opcode(cfg, instructions, decoded).items():
        numbers_of[opcode] = numbers
        for part in all_ranges(cfg, opcode, fields):
            logs = np.full(len(part.numbers), 2 * UNIT_NUMBER[opcode] + part.write)
            accesses.setdefault(part.memory, []).append(_Accesses(numbers[part.numbers], logs, part.first, part.end))
        if opcode in (Opcode.LOAD, Opcode.STORE):
            rows_of = all_rows(cfg, opcode, fields)
            moves += [(number, rows) for number, rows in zip(numbers.tolist(), rows_of) if rows is not None]
    needed = np.full((len(instructions), len(UNITS)), NEVER, np.int64)
    _raise_for_compute(instructions, numbers_of, needed)
    for memory, parts in accesses.items():
        _History(depths(cfg)[memory]).raise_needed(_in_order(parts, depths(cfg)[memory]), needed)
    _raise_for_dram(cfg, sorted(moves), tracked_bytes, needed, stores)
    return needed.tolist()


def _columns_by_opcode(
    cfg: Config, instructions: list[StreamInstruction], decoded: Mapping[Opcode, OpcodeColumns] | None
) -> dict[Opcode, tuple[Ints, Columns]]:
    """Return, for each opcode that occurs, the numbers of its instructions and their fields as columns."""
    if decoded is not None:
        return {opcode: (part.numbers, part.fields) for opcode, part in decoded.items() if len(part.numbers)}
    numbers_of: dict[Opcode, list[int]] = {}
    for number, instruction in enumerate(instructions):
        numbers_of.setdefault(instruction.opcode, []).append(number)
    return {
        opcode: (np.array(numbers), columns(cfg, opcode, [instructions[number].fields for number in numbers]))
        for opcode, numbers in numbers_of.items()
    }


def _raise_for_compute(instructions: list[StreamInstruction], numbers_of: Mapping[Opcode, Ints], needed: Ints) -> None:
    """Let instructions with `waits_for_compute` need the last instruction of GEMM and VECTOR before them."""
    waiting = np.array([number for number, i in enumerate(instructions) if i.waits_for_compute], np.int64)
    for opcode, numbers in numbers_of.items():
        if (unit := UNIT_NUMBER[opcode]) in COMPUTE:
            before = np.searchsorted(numbers, waiting)
            needed[waiting, unit] = np.append(NEVER, numbers)[before]


def _raise_for_dram(
    cfg: Config, moves: Sequence[tuple[int, DramRows]], tracked_bytes: int, needed: Ints,
    stores: dict[int, Ints] | None,
) -> None:  # fmt: skip
    """Let each LOAD need the last STORE to what it reads, and each STORE the last LOAD of what it overwrites.

    moves: numbers and rows of all LOADs and STOREs, in order. The last ones are kept for granules of one piece.
    """
    granule = cfg.piece_bytes
    read, written = (np.full(-(-tracked_bytes // granule) + 1, NEVER, np.int64) for _ in range(2))
    for number, rows in moves:
        if rows.address >= tracked_bytes:
            continue
        rivals = rows.view(read if rows.write else written, granule)
        needed[number, LOAD if rows.write else STORE] = np.maximum.reduce(rivals, axis=None)
        if stores is not None and not rows.write:
            stores[number] = rivals.copy()
        rows.view(written if rows.write else read, granule)[...] = number


# Scratchpads ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Accesses:
    """Accesses to one scratchpad: numbers of the instructions, logs that they belong to, and ranges of entries.

    A log has the reads of one unit (2 * its number), or its writes (2 * its number + 1).
    """

    number: Ints
    log: Ints
    first: Ints
    end: Ints

    def part(self, begin: int, count: int) -> _Accesses:
        """Return `count` accesses from number `begin` on."""
        part = slice(begin, begin + count)
        return _Accesses(self.number[part], self.log[part], self.first[part], self.end[part])


def _in_order(parts: Sequence[_Accesses], depth: int) -> _Accesses:
    """Merge accesses in the order of their instructions; ranges end where the scratchpad of `depth` entries does."""
    number, log, first, end = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("number", "log", "first", "end")
    )
    order = np.argsort(number, kind="stable")
    order = order[first[order] < depth]  # wrong programs may access what does not exist
    return _Accesses(number[order], log[order], first[order], np.minimum(end, depth)[order])


class _History:
    """For each entry of one scratchpad, the last instruction of each log (see `_Accesses`) that accessed it.

    Many accesses are logged at a time. Their ranges cut the scratchpad into segments that no range crosses. For each
    segment, a running maximum over the accesses that touch it is the last one before each of them.
    """

    def __init__(self, size: int) -> None:
        self._last = np.full((2 * len(UNITS), size), NEVER, np.int64)

    def raise_needed(self, accesses: _Accesses, needed: Ints) -> None:
        """Log accesses, which are in order, and raise needed[instruction, unit] to what each must wait for."""
        done, count, total = 0, MAX_ACCESSES, len(accesses.number)
        while done < total:
            part = accesses.part(done, count)
            if self._raise_by_segment(part, needed, MAX_PAIRS if count > 1 else None):
                done, count = done + count, MAX_ACCESSES
            else:
                count //= 2

    def _raise_by_segment(self, accesses: _Accesses, needed: Ints, max_pairs: int | None) -> bool:
        """Do the work of `raise_needed`, unless there are more than `max_pairs` pairs of an access and a segment that
        it touches; return whether it was done.
        """
        bounds = np.unique(np.concatenate([accesses.first, accesses.end]))
        first = np.searchsorted(bounds, accesses.first)
        counts = np.searchsorted(bounds, accesses.end) - first
        pairs = int(counts.sum())
        if max_pairs is not None and pairs > max_pairs:
            return False
        begins = np.cumsum(counts) - counts
        segment = np.arange(pairs) - np.repeat(begins - first, counts)
        by_segment = np.argsort(segment.astype(np.uint16 if len(bounds) < 1 << 16 else np.int64), kind="stable")
        segment, access = segment[by_segment], np.repeat(np.arange(len(counts)), counts)[by_segment]
        number, log = accesses.number[access], accesses.log[access]
        is_first = np.append(True, segment[1:] != segment[:-1])
        is_last = np.append(is_first[1:], True)
        offset = segment * (len(needed) + 1)  # so that a running maximum begins anew with each segment
        unit, writes = np.divmod(accesses.log, 2)
        present = set(accesses.log.tolist())
        for rival, (rival_unit, rival_writes) in enumerate(np.ndindex(len(UNITS), 2)):
            may_wait = ((unit != rival_unit) | (unit == LOAD)) & ((writes == 1) | bool(rival_writes))
            if rival not in present and not may_wait.any():
                continue
            last = self._last[rival, bounds[0] : bounds[-1]]
            last_before = np.maximum.reduceat(last, bounds[:-1] - bounds[0])
            own = np.where(log == rival, number, NEVER)
            before = np.append(NEVER, own[:-1])
            before[is_first] = last_before[segment[is_first]]
            before = np.maximum.accumulate(before + offset) - offset
            if may_wait.any():
                in_access_order = np.empty_like(before)
                in_access_order[by_segment] = before
                latest = np.maximum.reduceat(in_access_order, begins)
                np.maximum.at(needed[:, rival_unit], accesses.number[may_wait], latest[may_wait])
            if rival in present:
                new = np.full(len(bounds) - 1, NEVER)
                new[segment[is_last]] = np.maximum(before, own)[is_last]
                new[new <= last_before] = NEVER  # no new access to this segment
                np.maximum(last, np.repeat(new, np.diff(bounds)), out=last)
        return True
