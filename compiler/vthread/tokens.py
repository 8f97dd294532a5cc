"""Dependences between units become wait and post bits.

For each instruction the latest instruction of every other unit that it must come after is found from the addresses
(reads after writes, writes after reads, writes after writes, in scratchpads and in DRAM). It takes a token from that
unit only if it does not already know, directly or through others, that the instruction has ended. The program order
satisfies every dependence and never has more tokens under way than a semaphore holds, so that nothing can deadlock.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from celosia.compiler.vthread.footprint import DramAccess, footprint
from celosia.compiler.vthread.pipeline import Instruction, depths
from celosia.hw.config import Config
from celosia.hw.isa import UNIT_OF, Unit

NEVER = -1


class _History:
    """For each entry of one memory, the last instruction of each unit that read it and that wrote it."""

    def __init__(self, size: int) -> None:
        self.read = np.full((len(Unit), size), NEVER, np.int64)
        self.write = np.full((len(Unit), size), NEVER, np.int64)


class _Dram:
    """The same for DRAM, in granules of one piece; only LOAD reads and only STORE writes."""

    def __init__(self, cfg: Config, size: int) -> None:
        self.granule = cfg.piece_bytes
        self.size = size
        self.read = np.full(-(-size // self.granule) + 1, NEVER, np.int64)
        self.write = np.full(-(-size // self.granule) + 1, NEVER, np.int64)

    def rows(self, array: NDArray[np.int64], access: DramAccess) -> NDArray[np.int64]:
        """A view of `array` over the granules of `access`."""
        g = self.granule
        first, count = access.address // g, -(-(access.address % g + access.row) // g)
        shape = (access.z, access.y, count)
        return as_strided(array[first:], shape, tuple(8 * (s // g) for s in (access.z_stride, access.y_stride, g)))


def insert_tokens(cfg: Config, instructions: list[Instruction], tracked_bytes: int) -> None:
    """Set `wait` and `post` of each instruction. DRAM from `tracked_bytes` on holds constants, which nobody writes."""
    histories = {name: _History(depth) for name, depth in depths(cfg).items()}
    dram = _Dram(cfg, tracked_bytes)
    units = len(Unit)
    known = np.full((units, units), NEVER, np.int64)  # known[v, u]: last instruction of u that v knows to have ended
    at_start: list[NDArray[np.int64]] = []
    tokens: dict[tuple[Unit, Unit], list[tuple[int, int]]] = {(u, v): [] for u in Unit for v in Unit}  # (giver, taker)
    capacity = (1 << cfg.token_bits) - 1

    for index, instruction in enumerate(instructions):
        unit = UNIT_OF[instruction.opcode]
        accesses, rows = footprint(cfg, instruction.opcode, instruction.fields)
        needed = np.full(units, NEVER, np.int64)
        for access in accesses:
            history = histories[access.buffer]
            np.maximum(needed, history.write[:, access.first : access.end].max(axis=1), out=needed)
            if access.write:
                np.maximum(needed, history.read[:, access.first : access.end].max(axis=1), out=needed)
        if rows is not None and rows.address < tracked_bytes:
            if rows.write:
                needed[Unit.LOAD] = max(needed[Unit.LOAD], dram.rows(dram.read, rows).max())
            else:
                needed[Unit.STORE] = max(needed[Unit.STORE], dram.rows(dram.write, rows).max())

        wait = 0
        # The latest first: what it knows may make the others unnecessary.
        for other in sorted((u for u in Unit if u != unit), key=lambda u: -needed[u]):
            if needed[other] > known[unit, other]:
                producer, pairs = int(needed[other]), tokens[other, unit]
                if len(pairs) >= capacity and pairs[-capacity][1] > producer:
                    # No room for one more. The token before, which is taken later than `producer`, can come from there.
                    earlier, taker = pairs.pop()
                    instructions[earlier].fields["post"] ^= 1 << unit
                else:
                    wait, taker = wait | 1 << other, index
                pairs.append((producer, taker))
                fields = instructions[producer].fields
                fields["post"] = fields.get("post", 0) | 1 << unit
                known[unit, other] = producer
                np.maximum(known[unit], at_start[producer], out=known[unit])
        instruction.fields["wait"] = wait
        known[unit, unit] = index - 1 if index else NEVER
        at_start.append(known[unit].copy())

        for access in accesses:
            history = histories[access.buffer]
            (history.write if access.write else history.read)[unit, access.first : access.end] = index
        if rows is not None and rows.address < tracked_bytes:
            dram.rows(dram.write if rows.write else dram.read, rows)[...] = index
