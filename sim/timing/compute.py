"""Timing of GEMM and VECTOR: their pipelines, and their waits for the accumulators."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import (
    FIND_TURN,
    SOFTMAX_OFFER_CYCLES,
    VECTOR_IN_FLIGHT,
    VECTOR_STAGES,
    WRITEBACK_DEPTH,
    array_stages,
    read_stages,
    softmax_parts,
    softmax_span,
    tile_rows,
)
from celosia.sim.timing.demand import IN_ACC, INP_PORT
from celosia.sim.timing.engine_cycles import ACCEPT_TO_READ, READ_TO_DONE, softmax_beats, softmax_tail_cycles
from celosia.sim.timing.latency import ARRIVAL_TO_WRITE, GEMM_STAGES, READ_TO_WRITE, WRITE_TO_END, WRITE_TO_ROOM
from celosia.sim.timing.ports import Acc
from celosia.sim.timing.work import NEVER, Steps, Train, Work


class Gemm:
    """Timing of GEMM: one tile operation a cycle, across instructions."""

    def __init__(self, cfg: Config, acc: Acc) -> None:
        self._stages = GEMM_STAGES + array_stages(cfg)
        self._acc = acc
        self.free = 0  # cycle from which the next instruction may start

    def run(self, ready: int, work: Work) -> tuple[int, int]:
        """Return the start and end cycles of an instruction that is ready in cycle `ready`."""
        start = max(ready, self.free)
        self.free = start + work.steps
        end = self.free + self._stages
        steps_per_output = work.steps // work.outputs
        writes = Train(end - WRITE_TO_END - (work.outputs - 1) * steps_per_output, steps_per_output, work.outputs)
        self._acc.reserve_gemm(work, writes._replace(first=writes.first - READ_TO_WRITE), writes)
        return start, end


class SoftmaxTiming:
    """Timing of softmaxes in their engine. Fields describe the last softmax, in cycles.

    _start: its start. _ends: its end and the end of the one before. _filling, _filled: when the last of its tiles
    begins to go to the adders, and when all of it has gone. max_found: when the largest byte of each of its rows is
    known.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._tile, self.parts = cfg, tile_rows(cfg), softmax_parts(cfg)
        self._start = self._filling = self._filled = self.max_found = 0
        self._ends = deque([0] * VECTOR_IN_FLIGHT, VECTOR_IN_FLIGHT)

    def overlap_start(self, ready: int) -> int:
        """Start cycle of a softmax like the last one, ready in cycle `ready`, if both overlap in the engine; else
        NEVER."""
        start = max(max(ready, self._start + 1, self._ends[0]) + SOFTMAX_OFFER_CYCLES, self.max_found)
        return start if start < self._ends[1] - 1 else NEVER

    def run(self, start: int, rows: int, entries: int, overlaps: bool) -> int:
        """Run a softmax of `rows` rows of `entries` entries and return its end. overlaps: whether the last one is still
        under way."""
        cfg, parts, earlier_tiles = self._cfg, self.parts, (rows - 1) // self._tile
        spans = softmax_beats(cfg, entries)
        beats, tile_cycles = min(rows, self._tile) * spans, self._tile * spans * parts
        if overlaps:
            first = max(start + ACCEPT_TO_READ, self._filling)
            first += (FIND_TURN - (first - self._filled)) % parts
            self.max_found = first + (beats - 1) * parts + 1
            fills = max(first - FIND_TURN + beats * parts, self._filled)
        else:
            self.max_found = fills = start + ACCEPT_TO_READ + beats
        self._start = start
        self._filling = fills + earlier_tiles * tile_cycles
        self._filled = self._filling + tile_cycles
        if earlier_tiles:  # the last tile's beside the one before it
            beats = (rows - earlier_tiles * self._tile) * spans
            self.max_found = self._filling - tile_cycles + FIND_TURN + (beats - 1) * parts + 1
        self._ends.append(fills + softmax_tail_cycles(cfg, rows, entries))
        return self._ends[-1]

    def writes(self, rows: int, entries: int, last: int) -> Train:
        """Cycles in which entries are written, the last one in cycle `last`; where they are read in pairs, spare ones,
        too."""
        span = softmax_span(self._cfg)
        train = Train(0, self.parts // span, rows * softmax_beats(self._cfg, entries) * span)
        return train._replace(first=last - train.last)

    def last_reads(self, rows: int, entries: int) -> Train:
        """Cycles in which each row of the last softmax is read for the last time."""
        train = Train(0, softmax_beats(self._cfg, entries) * self.parts, rows)
        return train._replace(first=self._ends[-1] - READ_TO_DONE - train.last)


class StepPart(NamedTuple):
    """Steps of VECTOR that are taken in a row: their cycles if GEMM did not use acc, and the cycle of the last one if
    it does."""

    steps: Steps
    last: int


class Vector:
    """Timing of VECTOR: one entry of A a cycle. A step waits before it is taken until GEMM has left the accumulators,
    or until a residual in several parts is read. Nothing waits inside the pipeline.

    At most two instructions are under way. One only is under way where it writes acc, where it writes what the next one
    reads, or where the next one is a norm. A softmax runs alone, with two exceptions. A like softmax may overlap it. An
    instruction from acc to OUT may run during the last softmax to INP, and one from acc to vin may follow behind its
    rows. Both end after it.
    """

    def __init__(self, cfg: Config, acc: Acc) -> None:
        self._free, self._acc = 0, acc  # cycle from which the next instruction may start
        if cfg.softmax:
            self._rows = SoftmaxTiming(cfg)
        self._next = 0  # cycle from which its first step may be taken
        self._last_start = 0  # start of the last instruction
        self._rows_last = self._rows_done = 0  # cycles from which at most one softmax, and none, is under way
        self._rows_to_inp = False
        self._last_row_reads = Train(0, 0, 0)  # last reads of each row of the last softmax
        self._row_entries = 0  # entries of such a row
        self._written = deque([-1] * VECTOR_IN_FLIGHT, VECTOR_IN_FLIGHT)
        self._last_writes = 0  # shared scratchpads that the last instruction writes
        self.stalled = 0  # cycles lost to GEMM
        self.overlapped_steps = 0  # steps taken beside a softmax
        self._to_acc = read_stages(cfg)
        self._to_write = VECTOR_STAGES + self._to_acc
        self._gap = cfg.residual_cycles - 1  # cycles behind an entry with a residual in which no step is taken

    def run(self, ready: int, work: Work) -> tuple[int, int, list[Train]]:
        """Return the start and end cycles of an instruction, and the cycles in which entries are written."""
        if work.softmax_entries:
            return self._run_softmax(ready, work)
        start, follows = self._start_cycle(ready, work)
        self._last_writes = work.shared_writes
        parts = list(self._step_parts(start, follows, work))
        self._acc.forget(start + 1)
        steps, last = parts[-1]
        trains = [self._write_cycles(part.steps, part.last) for part in parts]
        if work.shared_writes & IN_ACC:
            last, landed = self._write_acc(work, steps, last - steps.last)
            trains = [trains[0]._replace(first=trains[0].first + landed - trains[0].last)]
        self.stalled += last - self._unhindered_steps(self._first_step_cycle(start, work), work).last
        self.overlapped_steps += sum(min(steps.steps, max(0, self._rows_done - steps.first)) for steps, _ in parts)
        self._last_start, self._free, self._next = start, last, last + 1 + steps.gap
        end = max(trains[-1].last, self._rows_done, self._written[-1] + 1)
        self._written.append(end)
        return start, end + WRITE_TO_END, trains

    def _run_softmax(self, ready: int, work: Work) -> tuple[int, int, list[Train]]:
        """Return the start, end and writes of a softmax. Only a like softmax may overlap it; all other instructions
        wait as behind one that writes acc."""
        overlapped = self._rows.overlap_start(ready) if work.like_last_softmax else NEVER
        start = overlapped if overlapped < NEVER else self._start_cycle(ready, work)[0]
        rows = work.outputs // work.softmax_entries
        done_at = self._rows.run(start, rows, work.softmax_entries, overlapped < NEVER)
        self._rows_last, self._rows_done = self._rows_done if overlapped < NEVER else start + 1, done_at
        self._rows_to_inp, self._last_writes, self._free, self._next = work.port == INP_PORT, 0, start, start + 1
        self._last_start, self._row_entries, self._last_row_reads = (
            start,
            work.softmax_entries,
            self._rows.last_reads(rows, work.softmax_entries),
        )
        writes = self._rows.writes(rows, work.softmax_entries, done_at - 1)
        return start, writes.last + WRITE_TO_END, [writes]

    def _start_cycle(self, ready: int, work: Work) -> tuple[int, bool]:
        """Return the start cycle of an instruction, and whether it writes vin behind the rows of a softmax."""
        waits = work.softmax_entries | work.norm_cycles | self._last_writes & (IN_ACC | work.shared_reads)
        may_overlap = self._rows_to_inp and work.shared_reads == IN_ACC and not work.shared_writes | work.port
        rows = self._rows_last if may_overlap else self._rows_done
        start = max(ready, self._free, self._written[-1 if waits else 0] + 1)
        if work.behind_softmax:
            follow_start = max(start, max(ready, self._last_start + 1, self._rows_last, self._rows.max_found) + 1)
            if follow_start <= rows:
                return follow_start, True
        return max(start, rows), False

    def acc_free_after(self, ready: int, work: Work) -> int:
        """Return the cycle after which the instruction no longer uses acc, if GEMM does no more than is known by now.

        0 if the instruction does not use acc.
        """
        *_, (steps, last) = self._step_parts(*self._start_cycle(ready, work), work)
        if work.shared_writes & IN_ACC:
            return self._write_acc(work, steps, last - steps.last)[1]
        return last + self._to_acc if work.shared_reads & IN_ACC else 0

    def _first_step_cycle(self, start: int, work: Work) -> int:
        """Return the first cycle in which a step of an instruction that starts in cycle `start` may be taken."""
        return max(start + 1 + work.norm_cycles, self._next)

    def _unhindered_steps(self, first: int, work: Work) -> Steps:
        """Return the cycles of all steps from cycle `first` on, as if GEMM did not use acc."""
        return Steps(first, work.steps, work.steps // work.outputs, self._gap * work.residual)

    def _step_parts(self, start: int, follows: bool, work: Work) -> Iterator[StepPart]:
        """Yield the steps of an instruction that starts in cycle `start`, in parts: one for each group of outputs that
        waits."""
        all_steps, output = self._unhindered_steps(self._first_step_cycle(start, work), work), 0
        next_one = all_steps.first
        for count, free in self._output_waits(start, work) if follows else [(work.outputs, 0)]:
            steps = all_steps._replace(first=max(next_one, free), steps=count * all_steps.each)
            last = steps.last
            if work.shared_reads & IN_ACC:
                last = self._acc.last_vector_read(work, steps.later(self._to_acc), output) - self._to_acc
            yield StepPart(steps, last)
            next_one, output = last + 1, output + count

    def _output_waits(self, start: int, work: Work) -> Iterator[tuple[int, int]]:
        """Yield (number of outputs, first cycle in which they may be computed) for an instruction during a softmax: the
        outputs in front of its rows, those over each row once it is read no more, and the outputs behind them."""
        left, rows = work.outputs, self._last_row_reads
        counted = start + 2  # counting takes a cycle
        parts = [
            (work.behind_softmax - 1, 0),
            *((self._row_entries, rows.first + n * rows.period + 1) for n in range(rows.entries)),
        ]
        for count, free in (*parts, (left, self._rows_done + 1)):
            if min(count, left):
                yield min(count, left), max(free, counted)
            left -= min(count, left)

    def _write_cycles(self, steps: Steps, last: int) -> Train:
        """Return the cycles in which entries reach the last stage, if the last step is taken in cycle `last`."""
        writes = Train(0, steps.each + steps.gap, steps.steps // steps.each)
        return writes._replace(first=last + self._to_write + steps.gap - writes.last)

    def _write_acc(self, work: Work, steps: Steps, late: int) -> tuple[int, int]:
        """Return the cycles of the last step and of the last write of an instruction that writes acc. late: cycles by
        which other waits delay its steps. No more than WRITEBACK_DEPTH entries are under way."""
        written = deque([-1], WRITEBACK_DEPTH)
        step_cycle = steps.first + late - steps.gap - 1  # the last step of an output
        for output in range(work.outputs):
            step_cycle += steps.each + steps.gap
            if len(written) == WRITEBACK_DEPTH:
                step_cycle = max(step_cycle, written[0] + WRITE_TO_ROOM + steps.each - 1)
            arrives = step_cycle + self._to_write + steps.gap
            written.append(self._acc.vector_write_cycle(work, output, max(arrives + ARRIVAL_TO_WRITE, written[-1] + 1)))
        return step_cycle, written[-1]
