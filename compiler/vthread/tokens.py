"""Insert tokens: turn dependences between units into wait and post bits.

The addresses of an instruction determine the latest instruction of every other unit that it must wait for (reads after
writes, writes after reads, writes after writes, in scratchpads and in DRAM). It takes a token from that unit only if it
does not already know, directly or through others, that this instruction has ended. An instruction with
`waits_for_compute` also waits for the latest of GEMM and VECTOR. The program order satisfies every dependence and never
has more tokens under way than a semaphore holds, so that nothing can deadlock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Opcode, Unit
from celosia.hw.spec.scratchpads import depths
from celosia.sim.functional.access import DramRows, Range, all_ranges, all_rows, columns

NEVER = -1
"""In place of an instruction's number: no instruction."""
UNITS = range(len(Unit))
"""Numbers of the units."""
UNIT_NUMBER = {opcode: int(unit) for opcode, unit in UNIT_OF.items()}  # plain ints, since comparing an IntEnum is slow
LOAD, STORE = int(Unit.LOAD), int(Unit.STORE)
COMPUTE = int(Unit.GEMM), int(Unit.VECTOR)
"""Numbers of the units that compute."""


Needs = list[int]
"""For each unit, the number of its last instruction that an instruction must come after, or NEVER."""


class _Log:
    """For each entry of one memory, the last instruction of `unit` that read it, or the last that wrote it.

    latest: the last instruction in all of it.
    """

    def __init__(self, unit: int, size: int) -> None:
        self.unit = unit
        self.entries = np.full(size, NEVER, np.int64)
        self.latest = NEVER


class _History:
    """Reads and writes of one scratchpad so far.

    logs: by unit and whether they are writes; only those that exist. rivals: for reads (False) or writes (True) of a
    unit, the logs of other units that these must wait for.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.logs: dict[tuple[int, bool], _Log] = {}
        self.rivals: dict[tuple[int, bool], list[_Log]] = {}

    def raise_needed(self, access: Range, unit: int, needed: list[int]) -> None:
        """Raise each `needed[other unit]` to the last of its instructions that `access` by `unit` must wait for."""
        _, first, end, write = access
        for log in self.rivals.get((unit, write), ()):
            if log.latest > needed[log.unit]:
                last = int(np.maximum.reduce(log.entries[first:end]))
                if last > needed[log.unit]:
                    needed[log.unit] = last

    def log_access(self, access: Range, unit: int, index: int) -> None:
        """Log an access by instruction `index` of `unit`."""
        _, first, end, write = access
        log = self.logs.get((unit, write)) or self._start_log(unit, write)
        log.entries[first:end] = index
        log.latest = index

    def _start_log(self, unit: int, write: bool) -> _Log:
        """Create the log of a unit's reads or writes, and add it to the rivals of accesses that must wait for these."""
        log = self.logs[unit, write] = _Log(unit, self.size)
        for other in UNITS:
            for writes in (False, True):
                if (other != unit or unit == LOAD) and (write or writes):
                    self.rivals.setdefault((other, writes), []).append(log)
        return log


class _Dram:
    """Reads and writes of DRAM so far, in granules of one piece. Only LOAD reads and only STORE writes.

    read, write: the last instruction that read or wrote each granule.
    """

    def __init__(self, cfg: Config, size: int) -> None:
        self.granule = cfg.piece_bytes
        self.size = size
        self.read = np.full(-(-size // self.granule) + 1, NEVER, np.int64)
        self.write = np.full(-(-size // self.granule) + 1, NEVER, np.int64)

    def log_of(self, rows: DramRows, written: bool) -> NDArray[np.int64]:
        """Return a view of the last reads, or writes, of the granules of `rows`."""
        return rows.view(self.write if written else self.read, self.granule)


def _list_accesses(cfg: Config, instructions: list[StreamInstruction]) -> list[tuple[list[Range], DramRows | None]]:
    """Return the scratchpad ranges and DRAM rows that each instruction reads or writes, in order of the stream."""
    numbers: dict[Opcode, list[int]] = {}
    for number, instruction in enumerate(instructions):
        numbers.setdefault(instruction.opcode, []).append(number)
    accesses: dict[int, tuple[list[Range], DramRows | None]] = {}
    for opcode, of_opcode in numbers.items():
        fields = columns(cfg, opcode, [instructions[number].fields for number in of_opcode])
        accesses.update(zip(of_opcode, zip(all_ranges(cfg, opcode, fields), all_rows(cfg, opcode, fields))))
    return [accesses[number] for number in range(len(instructions))]


def find_needs(
    cfg: Config, instructions: list[StreamInstruction], tracked_bytes: int,
    stores: dict[int, NDArray[np.int64]] | None = None,
) -> list[Needs]:  # fmt: skip
    """Return what each instruction needs: those before it that access the same and that one of both writes.

    A unit executes its own instructions in order; its own entry counts only for a LOAD that overwrites another's data.
    tracked_bytes: DRAM from there on is never written. stores: gets, for each LOAD of activations, the last STORE of
    each granule that it reads, [planes, rows, granules of a row].
    """
    histories = {name: _History(depth) for name, depth in depths(cfg).items()}
    dram = _Dram(cfg, tracked_bytes)
    latest = [NEVER] * len(UNITS)
    result: list[Needs] = []
    for index, (instruction, (accesses, moved)) in enumerate(zip(instructions, _list_accesses(cfg, instructions))):
        unit = UNIT_NUMBER[instruction.opcode]
        needed = [NEVER] * len(UNITS)
        if instruction.waits_for_compute:
            for other in COMPUTE:
                needed[other] = latest[other]
        for access in accesses:
            histories[access.memory].raise_needed(access, unit, needed)
        if moved is not None and moved.address < tracked_bytes:
            rival = LOAD if moved.write else STORE
            rivals = dram.log_of(moved, not moved.write)
            needed[rival] = max(needed[rival], int(np.maximum.reduce(rivals, axis=None)))
            if stores is not None and not moved.write:
                stores[index] = rivals.copy()
            dram.log_of(moved, moved.write)[...] = index
        result.append(needed)
        latest[unit] = index
        for access in accesses:
            histories[access.memory].log_access(access, unit, index)
    return result


def insert_tokens(
    cfg: Config, instructions: list[StreamInstruction], tracked_bytes: int, needs: list[Needs] | None = None
) -> None:
    """Set `wait` and `post` of each instruction, in place.

    tracked_bytes: DRAM from there on is never written. needs: those of the instructions, if they are known.
    """
    known = [[NEVER] * len(UNITS) for _ in UNITS]  # known[v][u]: last instruction of u that v knows to have ended
    at_start: list[list[int]] = []  # at_start[i]: what unit of instruction i knew when it started
    tokens: dict[tuple[int, int], list[tuple[int, int]]] = {
        (u, v): [] for u in UNITS for v in UNITS
    }  # (giver, taker) -> pairs of instructions (that posts, that waits)
    capacity = (1 << cfg.token_bits) - 1

    for index, needed in enumerate(find_needs(cfg, instructions, tracked_bytes) if needs is None else needs):
        instruction = instructions[index]
        unit = UNIT_NUMBER[instruction.opcode]
        known_here, wait = known[unit], 0
        # The latest first: its token may imply the others.
        behind = [other for other in UNITS if other != unit and needed[other] > known_here[other]]
        for other in sorted(behind, key=needed.__getitem__, reverse=True):
            if needed[other] > known[unit][other]:
                producer, pairs = needed[other], tokens[other, unit]
                if len(pairs) >= capacity and pairs[-capacity][1] > producer:
                    # The semaphore is full. The token before is taken later than `producer`, which can post it instead.
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
