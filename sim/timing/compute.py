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
from celosia.sim.timing.work import NEVER, RegularCycles, Steps, Work


class Gemm:
    """Timing of GEMM: one tile operation a cycle, without a pause between instructions."""

    def __init__(self, cfg: Config, acc: Acc) -> None:
        self._stages = GEMM_STAGES + array_stages(cfg)
        self._acc = acc
        self.free = 0  # cycle from which the next instruction may start

    def run(self, ready: int, work: Work) -> tuple[int, int]:
        """Time an instruction that is ready in cycle `ready`, and return its start and end cycles.

        Its reads and writes of acc are reserved, and VECTOR waits for them.
        """
        start = max(ready, self.free)
        self.free = start + work.steps
        end = self.free + self._stages
        steps_per_output = work.steps // work.outputs
        writes = RegularCycles(
            end - WRITE_TO_END - (work.outputs - 1) * steps_per_output, steps_per_output, work.outputs
        )
        self._acc.reserve_gemm(work, writes.delayed(-READ_TO_WRITE), writes)
        return start, end


class SoftmaxTiming:
    """Timing of softmaxes in their engine. Fields are cycles of the last softmax.

    _start: its start. _ends: the end of the softmax before it, and its own end. _filling, _filled: when the adders
    begin to take its last tile, and when they have taken all of it. max_found: when the largest byte of each of its
    rows is known.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._tile, self.parts = cfg, tile_rows(cfg), softmax_parts(cfg)
        self._start = self._filling = self._filled = self.max_found = 0
        self._ends = deque([0] * VECTOR_IN_FLIGHT, VECTOR_IN_FLIGHT)

    def overlap_start(self, ready: int) -> int:
        """Return the start cycle of a softmax with the fields of the last one if both overlap, else NEVER.

        ready: first possible cycle of its start.
        """
        start = max(max(ready, self._start + 1, self._ends[0]) + SOFTMAX_OFFER_CYCLES, self.max_found)
        return start if start < self._ends[1] - 1 else NEVER

    def run(self, start: int, rows: int, entries: int, overlaps: bool) -> int:
        """Run a softmax of `rows` rows of `entries` entries each, and return the cycle of its end.

        overlaps: whether it overlaps the last one in the engine.
        """
        cfg, parts, earlier_tiles = self._cfg, self.parts, (rows - 1) // self._tile
        row_beats = softmax_beats(cfg, entries)
        beats, tile_cycles = min(rows, self._tile) * row_beats, self._tile * row_beats * parts
        if overlaps:
            first_read = max(start + ACCEPT_TO_READ, self._filling)
            first_read += (FIND_TURN - (first_read - self._filled)) % parts
            self.max_found = first_read + (beats - 1) * parts + 1
            fills = max(first_read - FIND_TURN + beats * parts, self._filled)
        else:
            self.max_found = fills = start + ACCEPT_TO_READ + beats
        self._start = start
        self._filling = fills + earlier_tiles * tile_cycles
        self._filled = self._filling + tile_cycles
        if earlier_tiles:  # the largest bytes of the last tile are found while the tile before it is added up
            beats = (rows - earlier_tiles * self._tile) * row_beats
            self.max_found = self._filling - tile_cycles + FIND_TURN + (beats - 1) * parts + 1
        self._ends.append(fills + softmax_tail_cycles(cfg, rows, entries))
        return self._ends[-1]

    def writes(self, rows: int, entries: int, last: int) -> RegularCycles:
        """Return the cycles in which entries are written, the last one in cycle `last`.

        Where entries are read in pairs, rows of an odd length have one cycle more.
        """
        span = softmax_span(self._cfg)
        cycles = RegularCycles(0, self.parts // span, rows * softmax_beats(self._cfg, entries) * span)
        return cycles.delayed(last - cycles.last)

    def last_reads(self, rows: int, entries: int) -> RegularCycles:
        """Return the cycles in which the rows of the last softmax are read for the last time."""
        cycles = RegularCycles(0, softmax_beats(self._cfg, entries) * self.parts, rows)
        return cycles.delayed(self._ends[-1] - READ_TO_DONE - cycles.last)


class StepPart(NamedTuple):
    """Steps of a VECTOR that no other wait interrupts.

    steps: their cycles if GEMM did not use acc. last: the cycle of the last one, as GEMM uses acc.
    """

    steps: Steps
    last: int


class Vector:
    """Timing of VECTOR: one step, which takes an entry of A, in each cycle.

    A step waits before it enters the pipeline: while GEMM uses acc, or until a residual in several parts is read.
    Nothing waits inside the pipeline. At most two instructions are under way. An instruction waits for the end of the
    one before if that writes acc or what this one reads, or if this one is a norm or a softmax.

    While a softmax runs, three kinds of instructions may start: a softmax with equal fields; where the softmax writes
    inp, an instruction from acc to out; and one from acc to vin that writes each row after its last read. All of them
    end after it.
    """

    def __init__(self, cfg: Config, acc: Acc) -> None:
        self._free, self._acc = 0, acc  # cycle from which the next instruction may start
        if cfg.softmax:
            self._softmax = SoftmaxTiming(cfg)
        self._next = 0  # cycle from which its first step may be taken
        self._last_start = 0  # start of the last instruction
        # Cycles from which at most one softmax, and from which no softmax, is under way.
        self._one_softmax_left = self._softmax_done = 0
        self._softmax_to_inp = False  # whether the last softmax writes inp
        self._last_row_reads = RegularCycles(0, 0, 0)  # last reads of each row of the last softmax
        self._row_entries = 0  # entries of such a row
        self._written = deque([-1] * VECTOR_IN_FLIGHT, VECTOR_IN_FLIGHT)  # cycles of the last instructions' last writes
        self._last_writes = 0  # shared scratchpads that the last instruction writes
        self.stalled = 0  # cycles in which steps waited for GEMM
        self.overlapped_steps = 0  # steps taken during a softmax
        self._to_acc = read_stages(cfg)  # cycles from a step to its read of acc
        self._to_write = VECTOR_STAGES + self._to_acc  # cycles from an output's last step to its write
        self._gap = cfg.residual_cycles - 1  # cycles behind an entry with a residual in which no step is taken

    def run(self, ready: int, work: Work) -> tuple[int, int, list[RegularCycles]]:
        """Time the next instruction in program order. Return its start and end cycles, and the cycles of its writes.

        ready: first possible cycle of its start. The writes are one RegularCycles for each part that waits for a
        softmax on its own, else a single one. The machine reserves a port that VECTOR shares with LOAD for them.
        """
        if work.softmax_entries:
            return self._run_softmax(ready, work)
        start, follows = self._start_cycle(ready, work)
        self._last_writes = work.shared_writes
        parts = list(self._step_parts(start, follows, work))
        self._acc.forget(start + 1)
        steps, last = parts[-1]
        write_cycles = [self._write_cycles(part.steps, part.last) for part in parts]
        if work.shared_writes & IN_ACC:
            last, last_write = self._write_acc(work, steps, last - steps.last)
            write_cycles = [write_cycles[0].delayed(last_write - write_cycles[0].last)]
        self.stalled += last - self._unhindered_steps(self._first_step_cycle(start, work), work).last
        self.overlapped_steps += sum(min(steps.steps, max(0, self._softmax_done - steps.first)) for steps, _ in parts)
        self._last_start, self._free, self._next = start, last, last + 1 + steps.gap
        end = max(write_cycles[-1].last, self._softmax_done, self._written[-1] + 1)
        self._written.append(end)
        return start, end + WRITE_TO_END, write_cycles

    def _run_softmax(self, ready: int, work: Work) -> tuple[int, int, list[RegularCycles]]:
        """Return the start and end cycles of a softmax, and the cycles of its writes.

        It overlaps the instruction before only if that is a softmax with equal fields.
        """
        overlap_start = self._softmax.overlap_start(ready) if work.like_last_softmax else NEVER
        overlaps = overlap_start < NEVER
        start = overlap_start if overlaps else self._start_cycle(ready, work)[0]
        rows = work.outputs // work.softmax_entries
        done_at = self._softmax.run(start, rows, work.softmax_entries, overlaps)
        self._one_softmax_left, self._softmax_done = self._softmax_done if overlaps else start + 1, done_at
        self._softmax_to_inp, self._last_writes, self._free, self._next = work.port == INP_PORT, 0, start, start + 1
        self._last_start, self._row_entries = start, work.softmax_entries
        self._last_row_reads = self._softmax.last_reads(rows, work.softmax_entries)
        writes = self._softmax.writes(rows, work.softmax_entries, done_at - 1)
        return start, writes.last + WRITE_TO_END, [writes]

    def _start_cycle(self, ready: int, work: Work) -> tuple[int, bool]:
        """Return the start cycle of an instruction, and whether it writes vin behind the rows of a softmax."""
        waits_for_last = work.softmax_entries | work.norm_cycles | self._last_writes & (IN_ACC | work.shared_reads)
        may_overlap = self._softmax_to_inp and work.shared_reads == IN_ACC and not work.shared_writes | work.port
        after_softmax = self._one_softmax_left if may_overlap else self._softmax_done
        start = max(ready, self._free, self._written[-1 if waits_for_last else 0] + 1)
        if work.behind_softmax:
            softmax_ready = max(self._one_softmax_left, self._softmax.max_found)
            follow_start = max(start, max(ready, self._last_start + 1, softmax_ready) + 1)
            if follow_start <= after_softmax:
                return follow_start, True
        return max(start, after_softmax), False

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
        """Return the cycles of all steps of an instruction from cycle `first` on, as if GEMM did not use acc."""
        return Steps(first, work.steps, work.steps // work.outputs, self._gap * work.residual)

    def _step_parts(self, start: int, follows: bool, work: Work) -> Iterator[StepPart]:
        """Yield the steps of an instruction in parts, each of which waits for a softmax on its own.

        start: cycle of its start. follows: whether it writes vin behind the rows of a softmax; else there is one part.
        """
        all_steps, output = self._unhindered_steps(self._first_step_cycle(start, work), work), 0
        next_step, steps_per_output, gap = all_steps.first, all_steps.steps_per_output, all_steps.gap
        for count, free in self._output_waits(start, work) if follows else [(work.outputs, 0)]:
            steps = Steps(max(next_step, free), count * steps_per_output, steps_per_output, gap)
            last = steps.last
            if work.shared_reads & IN_ACC:
                last = self._acc.last_vector_read(work, steps.delayed(self._to_acc), output) - self._to_acc
            yield StepPart(steps, last)
            next_step, output = last + 1, output + count

    def _output_waits(self, start: int, work: Work) -> Iterator[tuple[int, int]]:
        """Yield (number of outputs, first cycle in which they may be computed) for an instruction behind a softmax.

        First come the outputs in front of the rows of the softmax in vin, then those that overwrite each row, which
        wait for its last read, and then those behind the rows.
        """
        remaining, rows = work.outputs, self._last_row_reads
        first_counted = start + 2  # the hardware counts the outputs that may be written, which takes a cycle
        parts = [
            (work.behind_softmax - 1, 0),
            *((self._row_entries, rows.first + n * rows.period + 1) for n in range(rows.entries)),
        ]
        for count, free in (*parts, (remaining, self._softmax_done + 1)):
            if min(count, remaining):
                yield min(count, remaining), max(free, first_counted)
            remaining -= min(count, remaining)

    def _write_cycles(self, steps: Steps, last: int) -> RegularCycles:
        """Return the cycles in which outputs are written, if the last of `steps` is issued in cycle `last`.

        For acc these are arrivals at the write queue. Each output has `steps_per_output` steps, with `gap` idle cycles
        behind them.
        """
        writes = RegularCycles(0, steps.steps_per_output + steps.gap, steps.steps // steps.steps_per_output)
        return writes.delayed(last + self._to_write + steps.gap - writes.last)

    def _write_acc(self, work: Work, steps: Steps, delay: int) -> tuple[int, int]:
        """Return the cycles of the last step and of the last write of an instruction that writes acc.

        At most WRITEBACK_DEPTH of its outputs are under way. delay: cycles by which other waits delay its steps.
        """
        written = deque([-1], WRITEBACK_DEPTH)
        step_cycle = steps.first + delay - steps.gap - 1  # the last step of an output
        for output in range(work.outputs):
            step_cycle += steps.steps_per_output + steps.gap
            if len(written) == WRITEBACK_DEPTH:
                step_cycle = max(step_cycle, written[0] + WRITE_TO_ROOM + steps.steps_per_output - 1)
            arrives = step_cycle + self._to_write + steps.gap
            written.append(self._acc.vector_write_cycle(work, output, max(arrives + ARRIVAL_TO_WRITE, written[-1] + 1)))
        return step_cycle, written[-1]
