"""Checker of programs: finds reads of unwritten entries, addresses outside a buffer, and races between units.

A race is an access to what another unit writes (or a write to what another unit reads) that no chain of tokens puts in
order. Each unit has a vector clock: for every other unit, the last of its instructions that is known to have ended.
Whatever order the simulator happens to execute in, each pair of accesses without an order between them is found.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, Unit
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.device import DeviceError
from celosia.sim.functional.access import Index, rows, touches
from celosia.sim.functional.reference import Fields

UNITS = len(Unit)


class CheckError(DeviceError):
    """A program that relies on behaviour that the machine does not guarantee; the message names instruction, buffer and
    entry."""


class Accesses:
    """Log of one buffer: the last instruction of each unit that read, and that wrote, each of its elements.

    name: the buffer. size: its elements. unit: what messages call an element (entry, piece, byte). must_be_written:
    whether reading an element that was never written is an error. reads, writes: [units, size], numbers of instructions
    plus one; 0 for never.
    """

    def __init__(self, name: str, size: int, unit: str, must_be_written: bool) -> None:
        self.name, self.size, self.unit, self.must_be_written = name, size, unit, must_be_written
        self.reads = np.zeros((UNITS, size), np.int32)
        self.writes = np.zeros((UNITS, size), np.int32)

    def check_read(self, index: Index, unit: Unit, number: int, clock: list[int]) -> None:
        """Check and record that instruction `number` of `unit` reads the elements `index`. Raises CheckError.

        clock: the vector clock of `unit`: for each unit, its last instruction that is known to have ended, plus one.
        """
        self._require_order(index, unit, number, clock, self.writes, "reads", "writes")
        if self.must_be_written:
            unwritten = np.asarray(~self.writes[:, index].any(axis=0))
            if unwritten.any():
                element = self._describe_first(index, unwritten)
                raise CheckError(f"instruction {number} ({unit.name}) reads {element}, which was never written")
        self.reads[unit, index] = number + 1

    def check_write(self, index: Index, unit: Unit, number: int, clock: list[int]) -> None:
        """Check and record a write, as `check_read` does a read."""
        self._require_order(index, unit, number, clock, self.writes, "writes", "writes")
        self._require_order(index, unit, number, clock, self.reads, "writes", "reads")
        self.writes[unit, index] = number + 1

    def _require_order(
        self, index: Index, unit: Unit, number: int, clock: list[int], log: NDArray[np.int32], verb: str, other: str
    ) -> None:
        """Raise CheckError if another unit's last access to an element is not ordered before this one by tokens.

        log: times of the accesses to check against. verb, other: words of the message for both accesses.
        """
        for rival in Unit:
            if rival == unit:
                continue
            late = log[rival, index] > clock[rival]
            if late.any():
                culprit, element = int(log[rival, index][late][0]) - 1, self._describe_first(index, late)
                raise CheckError(
                    f"instruction {number} ({unit.name}) {verb} {element}, which instruction {culprit} "
                    f"({rival.name}) {other}; no token orders the two"
                )

    def _describe_first(self, index: Index, selected: NDArray[np.bool_]) -> str:
        """Return the first of the selected elements as messages name it, such as "acc entry 5"."""
        return f"{self.name} {self.unit} {int(index[selected][0])}"


class Checker:
    """Checker of one run: call `execute` for each instruction in the order in which they run.

    buffers, dram: the log of each scratchpad, and of DRAM. clocks: the vector clock of each unit. tokens: for each pair
    of units (from, to), the clocks that the tokens between them carry, oldest first.
    """

    def __init__(self, cfg: Config, dram_bytes: int) -> None:
        self.cfg = cfg
        self.buffers = {
            name: Accesses(name, pad.depth * pad.pieces, "piece" if pad.in_pieces else "entry", True)
            for name, pad in scratchpads(cfg).items()
        }
        self.dram = Accesses("DRAM", dram_bytes, "byte", False)
        self.clocks = [[0] * UNITS for _ in Unit]
        self.tokens: dict[tuple[Unit, Unit], deque[list[int]]] = {(a, b): deque() for a in Unit for b in Unit}

    def execute(self, number: int, unit: Unit, opcode: Opcode, f: Fields) -> None:
        """Check instruction `number`, which runs on `unit` now. Raises CheckError."""
        clock = self.clocks[unit]
        for other in Unit:
            if f["wait"] >> other & 1:
                posted = self.tokens[other, unit].popleft()
                clock[:] = map(max, clock, posted)
        self._check_accesses(number, unit, opcode, f, clock)
        clock[unit] = number + 1
        for other in Unit:
            if f["post"] >> other & 1:
                self.tokens[unit, other].append(list(clock))

    def _check_accesses(self, number: int, unit: Unit, opcode: Opcode, f: Fields, clock: list[int]) -> None:
        """Check and record all accesses of an instruction to scratchpads and DRAM."""
        dram = rows(self.cfg, opcode, f)
        if dram is not None and not dram.write:
            self.dram.check_read(dram.byte_addresses(self.dram.size), unit, number, clock)
        for touch in touches(self.cfg, opcode, f):
            accesses = self.buffers[touch.memory]
            if not touch.is_inside(accesses.size):
                raise CheckError(
                    f"instruction {number} ({unit.name}): {touch.operand} leaves {touch.memory}, which ends at "
                    f"{accesses.size // touch.pieces - 1}"
                )
            check = accesses.check_write if touch.write else accesses.check_read
            check(touch.piece_numbers(accesses.size), unit, number, clock)
        if dram is not None and dram.write:  # bytes outside are left to the execution, which reports them
            self.dram.check_write(dram.byte_addresses(self.dram.size), unit, number, clock)
