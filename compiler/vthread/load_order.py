"""Order the LOADs of a launch so that none waits for a STORE while another one could run.

LOAD executes its instructions in order. One that waits for a result of the layer before it blocks the weights, tables
and operands of later layers. This pass simulates the units roughly and fills the cycles in which LOAD would wait:

    STORE a             STORE a
    LOAD a       ->     LOAD weights of the next layer
    LOAD weights        LOAD a

- A later LOAD that can run during the wait moves before the LOAD that waits.
- If it is longer than the wait, its first rows move, as a LOAD of their own.
- The first rows of the waiting LOAD itself become a LOAD of their own if they are complete before the others.

While a LOAD waits for GEMM or VECTOR to release a scratchpad, only complete LOADs move, and only those that fit: the
compute units then have work, and more instructions would cost more than they save.

Only LOADs move, each to an earlier position and over instructions that access nothing of what it accesses. The program
order therefore satisfies every dependence as before, and `insert_tokens` treats the result like any other stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.encode import encode
from celosia.compiler.vthread.needs import LOAD, NEVER, STORE, Needs, find_needs
from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.boards.memory import ZYNQ_HP
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Unit, element_bytes, instruction_bytes, load_channels
from celosia.hw.spec.pipeline import VECTOR_STAGES
from celosia.sim.timing import latency
from celosia.sim.timing.demand import demand

MEMORY = ZYNQ_HP
"""The memory that the simulation assumes."""
READ_LATENCY = latency.START_TO_ASK + latency.ASK_TO_ADDRESS + MEMORY.read_latency
"""Cycles from the start of a LOAD to its first beat."""
READ_END = latency.BEAT_TO_STEP + latency.STEP_TO_END
"""Cycles from the last beat of a LOAD to its end."""
END_CYCLES = {
    Unit.GEMM: latency.GEMM_STAGES + latency.READ_TO_WRITE + latency.WRITE_TO_END + latency.QUEUE_TO_GATE,
    Unit.VECTOR: VECTOR_STAGES + latency.WRITE_TO_END,
    Unit.STORE: latency.START_TO_STEP + latency.UNIT_TO_BEAT + MEMORY.write_latency + latency.RESPONSE_TO_END,
}
"""Cycles from the last step of an instruction to its end, start-up included."""
LOOKAHEAD = 24
"""LOADs behind a waiting one among which one is looked for that can run."""
MIN_WAIT = 24
"""Cycles of a wait from which on other LOADs move, and least beats of a part of a LOAD: an instruction more costs its
fetch."""
TOLERANCE = 8
"""Cycles by which a LOAD may be longer than the wait for a STORE that it fills."""
CUTTABLE = (Buffer.INP, Buffer.VIN, Buffer.ACC, Buffer.WGT)
"""Scratchpads whose LOADs may be cut in parts."""


def order_loads(
    cfg: Config, instructions: list[StreamInstruction], tracked_bytes: int
) -> tuple[list[StreamInstruction], list[Needs] | None]:
    """Return the stream with its LOADs in a better order, some of them in parts, for `insert_tokens`.

    Also returns what each instruction needs (`find_needs`) if the stream stays as it is; else None. tracked_bytes: DRAM
    from there on is never written.
    """
    if cfg.ports > 1:  # the simulation does not know how two ports share the memory
        return instructions, None
    scheduler = _LoadScheduler(cfg, instructions, tracked_bytes)
    ordered = scheduler.run()
    return ordered, (None if scheduler.has_changed else scheduler.needs)


@dataclass
class _Load:
    """A LOAD, or what is left of one whose first rows have been placed.

    number: of its instruction in the original stream. needs: see `find_needs`. rows: for each row of its outermost
    dimension, the last STORE that writes it; None if it cannot be cut. beats: cycles of its transfer. port: its channel
    of LOAD.
    """

    number: int
    instruction: StreamInstruction
    needs: Needs
    rows: NDArray[np.int64] | None
    beats: int
    port: int

    def cut(self, cfg: Config, count: int) -> tuple[_Load, _Load]:
        """Cut this LOAD behind its first `count` rows."""
        assert self.rows is not None
        first_beats = -(-self.beats * count // len(self.rows))
        first_fields, rest_fields = _cut_fields(cfg, self.instruction.fields, count)
        return (
            self._part(first_fields, self.rows[:count], first_beats),
            self._part(rest_fields, self.rows[count:], self.beats - first_beats),
        )

    def _part(self, fields: dict[str, int], rows: NDArray[np.int64], beats: int) -> _Load:
        """Return the part of this LOAD with other fields, which reads only `rows`."""
        needs = [*self.needs]
        needs[STORE] = min(needs[STORE], int(rows.max()))
        return replace(
            self, instruction=replace(self.instruction, fields=fields), needs=needs, rows=rows, beats=beats
        )  # fmt: skip


PADS = {"z": ("", ""), "y": ("pad_top", "pad_bottom"), "x": ("pad_left", "pad_right")}
"""Dimension of a LOAD -> the fields of its padding before and after."""


def _outermost(fields: dict[str, int]) -> str:
    """Return the outermost dimension of a LOAD whose size is not 1."""
    return next((name for name in "zy" if fields.get(f"{name}_size", 1) > 1), "x")


def _cut_fields(cfg: Config, fields: dict[str, int], count: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the fields of a LOAD of the first `count` rows of the outermost dimension, and of one of the other
    rows."""
    axis = _outermost(fields)
    before, after = PADS[axis]
    step = fields.get(f"dram_{axis}", 0)
    if axis == "x":
        step = element_bytes(cfg, Buffer(fields["buffer"]), bool(fields.get("widen")))
    written = count + fields.get(before, 0)
    first, rest = dict(fields), dict(fields)
    first[f"{axis}_size"] = count
    rest[f"{axis}_size"] -= count
    rest["dram_addr"] += count * step
    rest["sram_base"] = rest.get("sram_base", 0) + written * fields.get(f"sram_{axis}", 0)
    first.pop(after, None)
    rest.pop(before, None)
    return first, rest


class _LoadScheduler:
    """Simulates a stream in program order, and moves its LOADs.

    needs: of each instruction. end: cycle in which it ends; of a LOAD in parts, that of the last part so far. free:
    cycle in which each unit can start its next instruction; LOAD counts by port. pending: LOADs that have not been
    placed, by number. numbers: of all LOADs, in order. has_changed: whether a LOAD has moved.
    """

    def __init__(self, cfg: Config, instructions: list[StreamInstruction], tracked_bytes: int) -> None:
        self.cfg, self.instructions = cfg, instructions
        work = demand(cfg, encode(cfg, instructions).tobytes())
        self.units: list[int] = work.unit.tolist()
        self.steps: list[int] = np.maximum(work.steps, work.beats).tolist()
        self.fetch = max(1, instruction_bytes(cfg) // cfg.bus_bytes)
        rows: dict[int, NDArray[np.int64]] = {}
        self.needs = find_needs(cfg, instructions, tracked_bytes, rows)
        self.end = [0] * len(instructions)
        self.free = [0] * len(Unit)
        self.port_free = [0] * cfg.ports
        self.result: list[StreamInstruction] = []
        self.has_changed = False
        second_port = load_channels(cfg)[1] if cfg.ports > 1 else ()
        self.pending = {
            number: _Load(
                number, instruction, self.needs[number], _rows_to_cut(instruction.fields, rows.get(number)),
                self.steps[number], int(instruction.fields["buffer"] in second_port),
            )
            for number, (unit, instruction) in enumerate(zip(self.units, instructions)) if unit == LOAD
        }  # fmt: skip
        self.numbers = list(self.pending)

    def run(self) -> list[StreamInstruction]:
        """Return the instructions in their new order."""
        for number, instruction in enumerate(self.instructions):
            if self.units[number] != LOAD:
                self._run(number)
                self.result.append(instruction)
            elif (load := self.pending.pop(number, None)) is not None:
                self._place_in_order(load)
        return self.result

    def _run(self, number: int) -> None:
        """Simulate an instruction that is no LOAD."""
        unit = self.units[number]
        self.free[unit] = max(self.free[unit], self._ready(self.needs[number])) + self.steps[number]
        self.end[number] = self.free[unit] + END_CYCLES[Unit(unit)]

    def _ready(self, needs: Needs) -> int:
        """Return the cycle in which all that an instruction needs has ended."""
        end = self.end
        return max([end[need] for need in needs if need >= 0], default=0)

    def _place(self, load: _Load) -> None:
        """Append a LOAD to the result, and simulate it."""
        start = max(self.port_free[load.port], self._ready(load.needs) + READ_LATENCY)
        self.port_free[load.port] = start + load.beats + self.fetch
        self.end[load.number] = max(self.end[load.number], start + load.beats + READ_END)
        self.result.append(load.instruction)

    def _wait(self, load: _Load) -> int:
        """Return the cycles for which the port of `load` would be idle if it came next."""
        return self._ready(load.needs) + READ_LATENCY - self.port_free[load.port]

    def _place_in_order(self, load: _Load) -> None:
        """Place the LOAD whose turn it is, and before it others that can run while it waits."""
        while self._wait(load) >= MIN_WAIT and not load.instruction.waits_for_compute:
            store = load.needs[STORE]
            waits_for_store = store >= 0 and self.end[store] == self._ready(load.needs)
            if waits_for_store and (count := self._rows_complete_early(load)):
                first, load = load.cut(self.cfg, count)
                self._place_moved(first)
            elif (other := self._find_filler(load, waits_for_store)) is not None:
                self._place_moved(other)
            else:
                break
        self._place(load)

    def _place_moved(self, load: _Load) -> None:
        """Place a LOAD that has moved, or a part of one."""
        self._place(load)
        self.has_changed = True

    def _rows_complete_early(self, load: _Load) -> int:
        """Return how many first rows of a waiting LOAD are worth a LOAD of their own; 0 if none are."""
        if load.rows is None:
            return 0
        ends = np.maximum.accumulate([self.end[store] if store >= 0 else 0 for store in load.rows.tolist()])
        least = -(-MIN_WAIT * len(ends) // load.beats)
        early = int(np.count_nonzero(ends + MIN_WAIT <= ends[-1]))
        if early < least:
            return 0
        return int(np.searchsorted(ends, ends[least - 1], "right"))  # with the rows that end together with these

    def _find_filler(self, waiting: _Load, waits_for_store: bool) -> _Load | None:
        """Return a later LOAD, or its first rows, that can run before `waiting`; None if there is none.

        It is pending no more, but for the rest of one that is cut.
        """
        wait = self._wait(waiting)
        for load in self._movable(waiting):
            if self._ready(load.needs) + READ_LATENCY > self.port_free[load.port] + TOLERANCE:
                continue
            if load.beats + self.fetch <= wait + TOLERANCE * waits_for_store:
                return self.pending.pop(load.number)
            if load.rows is not None and waits_for_store:
                count = min(len(load.rows) * wait // load.beats, len(load.rows) - 1)
                if count * load.beats >= MIN_WAIT * len(load.rows):
                    first, self.pending[load.number] = load.cut(self.cfg, count)
                    return first
        return None

    def _movable(self, waiting: _Load) -> Iterator[_Load]:
        """Yield the LOADs behind `waiting` that may move before it."""
        behind, seen = bisect_right(self.numbers, waiting.number), 0
        for number in islice(self.numbers, behind, None):
            load = self.pending.get(number)
            if load is None:
                continue
            seen += 1
            if seen > LOOKAHEAD or load.instruction.waits_for_compute:
                return
            if load.instruction.fields.get("expand") or load.instruction.fields["buffer"] == Buffer.BOOK:
                continue  # packed weights find their codebooks by the order of LOADs
            if max(load.needs) < waiting.number:
                yield load


def _rows_to_cut(fields: dict[str, int], stores: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Return for each row of a LOAD's outermost dimension the last STORE that writes it; None if it cannot be cut.

    stores: the last STORE of each granule, [planes, rows, granules of a row]; None for constants.
    """
    axis = _outermost(fields)
    size = fields[f"{axis}_size"]
    if size == 1 or fields["buffer"] not in CUTTABLE or fields.get("expand"):
        return None
    if stores is None:
        return np.full(size, NEVER, np.int64)
    by_row = np.moveaxis(stores, "zyx".index(axis), 0)
    if len(by_row) % size:
        return None  # an element is no whole number of granules
    rows: NDArray[np.int64] = by_row.reshape(size, -1).max(axis=1)
    return rows
