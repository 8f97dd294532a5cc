"""GEMM and VECTOR: what comes out of their pipelines when, and who waits for the accumulators."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import (
    FIND_TURN,
    ROWS_READ,
    ROWS_TAKEN,
    SOFTMAX_OFFER_CYCLES,
    VECTOR_IN_FLIGHT,
    VECTOR_STAGES,
    WRITEBACK_DEPTH,
    array_stages,
    read_stages,
    softmax_behind,
    softmax_parts,
    softmax_span,
    softmax_spans,
    tile_rows,
)  # fmt: skip
from celosia.sim.timing.demand import IN_ACC, INP_PORT
from celosia.sim.timing.latency import ARRIVAL_TO_WRITE, GEMM_STAGES, READ_TO_WRITE, WRITE_TO_END, WRITE_TO_ROOM
from celosia.sim.timing.ports import Acc
from celosia.sim.timing.work import NEVER, Steps, Train, Work


class Gemm:
    """One tile operation a cycle, across instructions."""

    def __init__(self, cfg: Config, acc: Acc) -> None:
        self._stages = GEMM_STAGES + array_stages(cfg)
        self._acc = acc
        self.free = 0  # when the next instruction may start

    def run(self, ready: int, work: Work) -> tuple[int, int]:
        """Start and end of an instruction that is there in cycle `ready`."""
        start = max(ready, self.free)
        self.free = start + work.steps
        end = self.free + self._stages
        each = work.steps // work.outputs
        writes = Train(end - WRITE_TO_END - (work.outputs - 1) * each, each, work.outputs)
        self._acc.gemm(work, writes._replace(first=writes.first - READ_TO_WRITE), writes)
        return start, end


class Rows:
    """Softmaxes in their engine: what it keeps of the last one, cycles all.

    _start, _ends: of it, when it starts, and of it and the one before, when they end. _filling: when the last of its
    tiles goes to the adders, _filled: when that has gone. found: when no largest byte is left to be found.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._tile, self.parts = cfg, tile_rows(cfg), softmax_parts(cfg)
        self._start = self._filling = self._filled = self.found = 0
        self._ends = deque([0] * VECTOR_IN_FLIGHT, VECTOR_IN_FLIGHT)

    def along(self, ready: int) -> int:
        """When one that is like the last one, and there in cycle `ready`, goes along with it; NEVER: it does not."""
        start = max(max(ready, self._start + 1, self._ends[0]) + SOFTMAX_OFFER_CYCLES, self.found)
        return start if start < self._ends[1] - 1 else NEVER

    def run(self, start: int, rows: int, entries: int, along: bool) -> int:
        """When one of so many rows, of so many entries each, ends. along: with the last one."""
        cfg, parts, others = self._cfg, self.parts, (rows - 1) // self._tile
        spans = softmax_spans(cfg, entries)
        beats, each = min(rows, self._tile) * spans, self._tile * spans * parts
        if along:
            first = max(start + ROWS_TAKEN, self._filling)
            first += (FIND_TURN - (first - self._filled)) % parts
            self.found = first + (beats - 1) * parts + 1
            fills = max(first - FIND_TURN + beats * parts, self._filled)
        else:
            self.found = fills = start + ROWS_TAKEN + beats
        self._start, self._filling, self._filled = start, fills + others * each, fills + (others + 1) * each
        if others:  # the last tile's beside the one before it
            beats = (rows - others * self._tile) * spans
            self.found = self._filling - each + FIND_TURN + (beats - 1) * parts + 1
        self._ends.append(fills + softmax_behind(cfg, rows, entries))
        return self._ends[-1]

    def writes(self, rows: int, entries: int, last: int) -> Train:
        """When entries are written, the last one in cycle `last`; where they are read in pairs, spare ones, too."""
        span = softmax_span(self._cfg)
        train = Train(0, self.parts // span, rows * softmax_spans(self._cfg, entries) * span)
        return train._replace(first=last - train.last)

    def read(self, rows: int, entries: int) -> Train:
        """When each row of the last one has been read for the last time."""
        train = Train(0, softmax_spans(self._cfg, entries) * self.parts, rows)
        return train._replace(first=self._ends[-1] - ROWS_READ - train.last)


class Taken(NamedTuple):
    """Steps of VECTOR as they would be taken if GEMM was not there, and the cycle in which the last one is taken."""

    steps: Steps
    last: int


class Vector:
    """One entry of A a cycle, each in its stages for as many cycles as there are: what may stand in its way, GEMM at
    the accumulators or a residual in several parts, is waited for before its step is taken.

    Two instructions at most are under way, and one only where it writes acc, or what the next one reads, or where the
    next one is a norm. Softmaxes are alone, but for one that is alike, or what goes from acc to OUT beside the last one
    of those to INP, or to vin behind its rows: these are told done behind it.
    """

    def __init__(self, cfg: Config, acc: Acc) -> None:
        self._free, self._acc = 0, acc  # when the next instruction may start
        if cfg.softmax:
            self._rows = Rows(cfg)
        self._next = 0  # when its first step may be taken
        self._began = 0  # when the last one started
        self._rows_last = self._rows_done = 0  # when a single softmax is left, and when none is
        self._rows_to_inp = False
        self._rows_read, self._row = Train(0, 0, 0), 0  # when its rows are read no more, and the entries of one
        self._written = deque([-1] * VECTOR_IN_FLIGHT, VECTOR_IN_FLIGHT)
        self._feeds = 0  # what the last instruction writes
        self.held = 0  # cycles lost to GEMM
        self.beside = 0  # steps taken beside a softmax
        self._to_acc = read_stages(cfg)
        self._to_write = VECTOR_STAGES + self._to_acc
        self._gap = cfg.residual_cycles - 1  # cycles behind an entry with a residual in which no step is taken

    def run(self, ready: int, work: Work) -> tuple[int, int, list[Train]]:
        """Start and end, and when entries are written."""
        if work.alone:
            return self._softmax(ready, work)
        start, follows = self._start(ready, work)
        self._feeds = work.feeds
        taken = list(self._taken(start, follows, work))
        self._acc.forget(start + 1)
        steps, last = taken[-1]
        trains = [self._writes(each.steps, each.last) for each in taken]
        if work.feeds & IN_ACC:
            last, landed = self._land(work, steps, last - steps.last)
            trains = [trains[0]._replace(first=trains[0].first + landed - trains[0].last)]
        self.held += last - self._steps(self._first(start, work), work).last
        self.beside += sum(min(each.steps, max(0, self._rows_done - each.first)) for each, _ in taken)
        self._began, self._free, self._next = start, last, last + 1 + steps.gap
        told = max(trains[-1].last, self._rows_done, self._written[-1] + 1)
        self._written.append(told)
        return start, told + WRITE_TO_END, trains

    def _softmax(self, ready: int, work: Work) -> tuple[int, int, list[Train]]:
        """Start, end and writes of one that is alone, but for one like it: anything else waits as behind one that
        writes acc."""
        along = self._rows.along(ready) if work.alike else NEVER
        start = along if along < NEVER else self._start(ready, work)[0]
        rows = work.outputs // work.alone
        done = self._rows.run(start, rows, work.alone, along < NEVER)
        self._rows_last, self._rows_done = self._rows_done if along < NEVER else start + 1, done
        self._rows_to_inp, self._feeds, self._free, self._next = work.port == INP_PORT, 0, start, start + 1
        self._began, self._row, self._rows_read = start, work.alone, self._rows.read(rows, work.alone)
        writes = self._rows.writes(rows, work.alone, done - 1)
        return start, writes.last + WRITE_TO_END, [writes]

    def _start(self, ready: int, work: Work) -> tuple[int, bool]:
        """And whether it writes vin behind the rows of a softmax."""
        waits = work.alone | work.finds | self._feeds & (IN_ACC | work.reads)
        beside = self._rows_to_inp and work.reads == IN_ACC and not work.feeds | work.port
        rows = self._rows_last if beside else self._rows_done
        start = max(ready, self._free, self._written[-1 if waits else 0] + 1)
        if work.trails:
            behind = max(start, max(ready, self._began + 1, self._rows_last, self._rows.found) + 1)
            if behind <= rows:
                return behind, True
        return max(start, rows), False

    def through(self, ready: int, work: Work) -> int:
        """About when the next instruction would be through with acc, if GEMM did no more than is known; 0 if it does
        not use it."""
        *_, (steps, last) = self._taken(*self._start(ready, work), work)
        if work.feeds & IN_ACC:
            return self._land(work, steps, last - steps.last)[1]
        return last + self._to_acc if work.reads & IN_ACC else 0

    def _first(self, start: int, work: Work) -> int:
        """When the first step of one that starts then may be taken, or stands there to be."""
        return max(start + 1 + work.finds, self._next)

    def _steps(self, first: int, work: Work) -> Steps:
        """When steps are taken if GEMM is not there."""
        return Steps(first, work.steps, work.steps // work.outputs, self._gap * work.residual)

    def _taken(self, start: int, follows: bool, work: Work) -> Iterator[Taken]:
        """The steps of one that starts then, in parts: those of entries for each of which it waits."""
        whole, output = self._steps(self._first(start, work), work), 0
        next_one = whole.first
        for count, free in self._waits(start, work) if follows else [(work.outputs, 0)]:
            steps = whole._replace(first=max(next_one, free), steps=count * whole.each)
            last = steps.last
            if work.reads & IN_ACC:
                last = self._acc.vector_reads(work, steps.later(self._to_acc), output) - self._to_acc
            yield Taken(steps, last)
            next_one, output = last + 1, output + count

    def _waits(self, start: int, work: Work) -> Iterator[tuple[int, int]]:
        """Beside a softmax, how many outputs may be computed from which cycle on: those in front of its rows, those of
        each row once that is read no more, and others behind it."""
        left, rows = work.outputs, self._rows_read
        counted = start + 2  # it takes a cycle to count them
        parts = [(work.trails - 1, 0), *((self._row, rows.first + n * rows.period + 1) for n in range(rows.entries))]
        for count, free in (*parts, (left, self._rows_done + 1)):
            if min(count, left):
                yield min(count, left), max(free, counted)
            left -= min(count, left)

    def _writes(self, steps: Steps, last: int) -> Train:
        """When entries come to the last stage, if the last step is taken then."""
        writes = Train(0, steps.each + steps.gap, steps.steps // steps.each)
        return writes._replace(first=last + self._to_write + steps.gap - writes.last)

    def _land(self, work: Work, steps: Steps, late: int) -> tuple[int, int]:
        """When the last step is taken and the last entry is written, of an instruction that writes acc, if steps are
        so many cycles late otherwise: no more than WRITEBACK_DEPTH entries are under way."""
        written = deque([-1], WRITEBACK_DEPTH)
        taken = steps.first + late - steps.gap - 1  # the last step of an output
        for output in range(work.outputs):
            taken += steps.each + steps.gap
            if len(written) == WRITEBACK_DEPTH:
                taken = max(taken, written[0] + WRITE_TO_ROOM + steps.each - 1)
            arrives = taken + self._to_write + steps.gap
            written.append(self._acc.vector_write(work, output, max(arrives + ARRIVAL_TO_WRITE, written[-1] + 1)))
        return taken, written[-1]
