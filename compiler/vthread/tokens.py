"""Dependences between units become wait and post bits.

For each instruction the latest instruction of every other unit that it must come after is found from the addresses
(reads after writes, writes after reads, writes after writes, in scratchpads and in DRAM). It takes a token from that
unit only if it does not already know, directly or through others, that the instruction has ended. The program order
satisfies every dependence and never has more tokens under way than a semaphore holds, so that nothing can deadlock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.pipeline import Unencoded
from celosia.hw.config import Config
from celosia.hw.isa import UNIT_OF, Unit
from celosia.hw.scratchpads import depths
from celosia.sim.touches import Range, Rows, complete, ranges, rows

NEVER = -1
UNITS = range(len(Unit))
UNIT_NUMBER = {opcode: int(unit) for opcode, unit in UNIT_OF.items()}  # an IntEnum takes its time to compare
LOAD, STORE = int(Unit.LOAD), int(Unit.STORE)


class _History:
    """For each entry of one memory, the last instruction of each unit that read it and that wrote it. Units that never
    did are left out.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.logs: dict[tuple[int, bool], NDArray[np.int64]] = {}
        """By unit, and whether it wrote."""
        self.latest: dict[tuple[int, bool], int] = {}
        """Of all entries."""

    def before(self, access: Range, unit: int, needed: list[int]) -> None:
        """Raise `needed` to the last instruction of every other unit that `access` of `unit` must come after."""
        _, first, end, write = access
        for key, latest in self.latest.items():
            other, wrote = key
            if other != unit and (wrote or write) and latest > needed[other]:
                last = int(np.maximum.reduce(self.logs[key][first:end]))
                if last > needed[other]:
                    needed[other] = last

    def note(self, access: Range, unit: int, index: int) -> None:
        key = unit, access.write
        if key not in self.logs:
            self.logs[key] = np.full(self.size, NEVER, np.int64)
        self.logs[key][access.first : access.end] = index
        self.latest[key] = index


class _Dram:
    """The same for DRAM, in granules of one piece; only LOAD reads and only STORE writes."""

    def __init__(self, cfg: Config, size: int) -> None:
        self.granule = cfg.piece_bytes
        self.size = size
        self.read = np.full(-(-size // self.granule) + 1, NEVER, np.int64)
        self.write = np.full(-(-size // self.granule) + 1, NEVER, np.int64)

    def at(self, rows: Rows, written: bool) -> NDArray[np.int64]:
        """The last reads, or writes, of the granules of `rows`."""
        return rows.view(self.write if written else self.read, self.granule)


def insert_tokens(cfg: Config, instructions: list[Unencoded], tracked_bytes: int) -> None:
    """Set `wait` and `post` of each instruction. DRAM from `tracked_bytes` on holds constants, which nobody writes."""
    histories = {name: _History(depth) for name, depth in depths(cfg).items()}
    dram = _Dram(cfg, tracked_bytes)
    known = [[NEVER] * len(UNITS) for _ in UNITS]  # known[v][u]: last instruction of u that v knows to have ended
    at_start: list[list[int]] = []
    tokens: dict[tuple[int, int], list[tuple[int, int]]] = {(u, v): [] for u in UNITS for v in UNITS}  # (giver, taker)
    capacity = (1 << cfg.token_bits) - 1

    for index, instruction in enumerate(instructions):
        unit = UNIT_NUMBER[instruction.opcode]
        fields = complete(cfg, instruction.opcode, instruction.fields)
        accesses, moved = ranges(cfg, instruction.opcode, fields), rows(cfg, instruction.opcode, fields)
        needed = list(known[unit])
        for access in accesses:
            histories[access.memory].before(access, unit, needed)
        if moved is not None and moved.address < tracked_bytes:
            rival = LOAD if moved.write else STORE
            needed[rival] = max(needed[rival], int(dram.at(moved, not moved.write).max()))

        wait = 0
        # The latest first: what it knows may make the others unnecessary.
        for other in sorted([u for u in UNITS if needed[u] > known[unit][u]], key=lambda u: -needed[u]):
            if needed[other] > known[unit][other]:
                producer, pairs = needed[other], tokens[other, unit]
                if len(pairs) >= capacity and pairs[-capacity][1] > producer:
                    # No room for one more. The token before, which is taken later than `producer`, can come from there.
                    earlier, taker = pairs.pop()
                    instructions[earlier].fields["post"] ^= 1 << unit
                else:
                    wait, taker = wait | 1 << other, index
                pairs.append((producer, taker))
                fields = instructions[producer].fields
                fields["post"] = fields.get("post", 0) | 1 << unit
                known[unit][other] = producer
                known[unit] = list(map(max, known[unit], at_start[producer]))
        instruction.fields["wait"] = wait
        known[unit][unit] = index
        at_start.append(list(known[unit]))

        for access in accesses:
            histories[access.memory].note(access, unit, index)
        if moved is not None and moved.address < tracked_bytes:
            dram.at(moved, moved.write)[...] = index
