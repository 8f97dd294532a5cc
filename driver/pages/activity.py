"""Compute the activity of the accelerator over the cycles of a run: instructions, waits for tokens, scratchpad use.

`run_figures.py` draws it as the timeline of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import LaunchStep, Program
from celosia.driver.run.explain import launch_code
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit, instruction_bytes
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.device import Counters
from celosia.sim.functional.access import Touch, touches
from celosia.sim.functional.decode import Instruction, decode

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Bars:
    """Bars of a timeline, one element of each array a bar; times are cycles from the start of the run.

    unit: that works. layer: number of the layer. index, count: the first instruction, and their number. drawn: the
    first cycle of the bar: the start, but not before the end of the unit's instruction before, as instructions overlap
    in its pipeline. end: the last cycle.
    """

    unit: Ints
    layer: Ints
    index: Ints
    count: Ints
    drawn: Ints
    end: Ints


@dataclass(frozen=True)
class Waits:
    """Intervals, from cycle `since` until cycle `until`, in which `unit` was idle and waited for a token of unit
    `of`."""

    unit: Ints
    of: Ints
    since: Ints
    until: Ints


@dataclass(frozen=True)
class Occupancy:
    """Use of a scratchpad over time.

    entries: its depth. share: from cycle `time[i]` to the next one, the share `share[i]` of it holds data that an
    instruction will still read.
    """

    entries: int
    time: Ints
    share: NDArray[np.float64]


@dataclass(frozen=True)
class Activity:
    """Activity of a run. Layers and instructions are numbered from launch to launch.

    instructions: their number. gap: pauses and waits of at most so many cycles are left out, to have fewer bars.
    scratchpads: use by name. launches: the cycle in which each starts, and in which the last ends. spans: first and
    last cycle of each layer's instructions.
    """

    bars: Bars
    waits: Waits
    instructions: int
    gap: int
    scratchpads: dict[str, Occupancy]
    launches: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def activity(program: Program, counters: Sequence[Counters], limit: int = 20_000) -> Activity | None:
    """Return the activity in the launches of a Program.

    counters: of each launch in the first run. limit: the most bars; beyond that, instructions that follow each other
    are joined. None without launches, or where the device has not recorded the time of each instruction.
    """
    runs = list(zip(program.launches, counters))
    if not runs or len(runs) < len(program.launches) or not all(run.cycles and run.events for _, run in runs):
        return None
    traces = []
    starts = [0]
    first_layer = first_index = 0
    for launch, run in runs:
        traces.append(_Trace.of(program, launch, run, starts[-1], first_layer, first_index))
        starts.append(starts[-1] + (run.cycles or 0))
        first_layer += len(launch.layers)
        first_index += launch.count
    all_bars = Bars(*(np.concatenate(parts) for parts in zip(*(trace.bars() for trace in traces))))
    waits = Waits(*(np.concatenate(parts) for parts in zip(*(trace.waits() for trace in traces))))
    bars, gap = _join_bars(all_bars, limit)
    lengths = waits.until - waits.since
    gap = max(gap, int(np.sort(lengths)[-limit - 1])) if np.count_nonzero(lengths > gap) > limit else gap
    is_long = lengths > gap
    waits = Waits(waits.unit[is_long], waits.of[is_long], waits.since[is_long], waits.until[is_long])
    return Activity(
        bars, waits, len(all_bars.unit), gap, _scratchpad_occupancy(program.config, traces), tuple(starts),
        tuple(span for trace in traces for span in trace.spans()),
    )  # fmt: skip


@dataclass(frozen=True)
class _Trace:
    """Instructions of a launch in program order, with their times.

    begin: cycle in which the launch starts. stream: the instructions. unit, layer, index, start, drawn, end: of each
    instruction, as in Bars.
    """

    begin: int
    stream: list[Instruction]
    unit: Ints
    layer: Ints
    index: Ints
    start: Ints
    drawn: Ints
    end: Ints

    @classmethod
    def of(
        cls, program: Program, launch: LaunchStep, run: Counters, begin: int, first_layer: int, first_index: int
    ) -> _Trace:
        """Return the trace of one run of a launch that starts in cycle `begin`.

        first_layer, first_index: numbers of its first layer and instruction.
        """
        code = np.frombuffer(launch_code(program, launch), np.uint8).reshape(-1, instruction_bytes(program.config))
        decoded = decode(program.config, code)
        stream = [instruction for instruction in decoded if instruction is not None]  # a Program has no illegal ones
        start, end = np.zeros((2, len(stream)), np.int64)
        for event in run.events:
            start[event.index], end[event.index] = begin + event.start, begin + event.end
        unit = np.array([int(instruction.unit) for instruction in stream], np.int64)
        drawn = start.copy()
        for each_unit in Unit:
            indices = np.flatnonzero(unit == each_unit)
            previous_end = np.maximum.accumulate(np.concatenate([[begin], end[indices]]))[:-1]
            drawn[indices] = np.minimum(np.maximum(start[indices], previous_end), end[indices])
        layers = launch.layer_of.astype(np.int64) + first_layer
        return cls(begin, stream, unit, layers, first_index + np.arange(len(stream)), start, drawn, end)

    def bars(self) -> tuple[Ints, ...]:
        """Return the fields of Bars, with one bar for each instruction."""
        return self.unit, self.layer, self.index, np.ones_like(self.index), self.drawn, self.end

    def waits(self) -> tuple[Ints, ...]:
        """Return the fields of Waits.

        A unit waits from the end of its last instruction until the last token that the next instruction takes. The n-th
        token that a unit takes from another is the n-th that this one gives.
        """
        arrival, givers = np.full(len(self.unit), -1, np.int64), np.zeros(len(self.unit), np.int64)
        post_masks, wait_masks = (
            np.array([instruction.fields[name] for instruction in self.stream], np.int64) for name in ("post", "wait")
        )
        for giver_unit in Unit:
            for unit in Unit:
                posting = np.flatnonzero((self.unit == giver_unit) & (post_masks >> unit & 1 == 1))
                taking = np.flatnonzero((self.unit == unit) & (wait_masks >> giver_unit & 1 == 1))[: len(posting)]
                token_times = self.end[posting[: len(taking)]]
                later = token_times > arrival[taking]
                arrival[taking[later]], givers[taking[later]] = token_times[later], giver_unit
        since = np.zeros_like(arrival)
        for unit in Unit:
            rows = np.flatnonzero(self.unit == unit)
            since[rows] = np.maximum.accumulate(np.concatenate([[self.begin], self.end[rows]]))[:-1]
        until = np.minimum(arrival, self.drawn)
        rows = np.flatnonzero(until > since)
        return self.unit[rows], givers[rows], since[rows], until[rows]

    def spans(self) -> list[tuple[int, int]]:
        """Return the first and last cycle of each layer."""
        first = int(self.layer[0])
        count = int(self.layer.max()) + 1 - first
        low, high = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
        np.minimum.at(low, self.layer - first, self.start)
        np.maximum.at(high, self.layer - first, self.end)
        return list(zip(low.tolist(), high.tolist()))


def _join_bars(bars: Bars, limit: int) -> tuple[Bars, int]:
    """Join neighbouring bars of a unit and layer until at most `limit` are left, if possible. Return (bars, gap).

    The page of a long run would be too large with a bar for each instruction. gap: the longest pause, in cycles, that
    was joined over; 0 for none. It doubles until few enough bars are left.
    """
    order = np.lexsort((bars.index, bars.unit))
    unit, layer, index, count, drawn, end = (getattr(bars, name)[order] for name in Bars.__dataclass_fields__)
    pause = np.maximum(drawn[1:] - np.maximum.accumulate(end)[:-1], 0)
    is_same_layer = (unit[1:] == unit[:-1]) & (layer[1:] == layer[:-1])
    gap = -1
    while len(unit) - np.count_nonzero(is_same_layer & (pause <= gap)) > limit and gap < pause.max(initial=0):
        gap = 2 * gap + 1 if gap > 0 else gap + 1
    first = np.flatnonzero(np.concatenate([[True], ~(is_same_layer & (pause <= gap))]))
    joined = Bars(
        unit[first], layer[first], index[first], np.add.reduceat(count, first), drawn[first],
        np.maximum.reduceat(end, first),
    )  # fmt: skip
    return joined, max(gap, 0)


# Scratchpads ------------------------------------------------------------------------------------------------


class _PieceHistory:
    """History of the pieces of a scratchpad: when each was written, and when its content was read last."""

    def __init__(self, size: int) -> None:
        self._written_at, self._last_read_at = np.zeros((2, size), np.int64)
        self._intervals: list[tuple[Ints, Ints, Ints]] = []

    def record_accesses(self, touched: Sequence[Touch], start: int, end: int) -> None:
        """Record the accesses of an instruction, reads first, from cycle `start` to `end`."""
        for touch in touched:
            if not touch.write:
                index = touch.piece_numbers(len(self._last_read_at))
                self._last_read_at[index] = np.maximum(self._last_read_at[index], end)
        continued = {touch.operand for touch in touched if not touch.write}
        for touch in touched:
            if touch.write and touch.operand not in continued:  # an accumulation keeps its content
                index = touch.piece_numbers(len(self._last_read_at))
                self._record_intervals(self._written_at[index], self._last_read_at[index])
                self._written_at[index] = self._last_read_at[index] = start

    def _record_intervals(self, written: Ints, last_read: Ints) -> None:
        """Record the intervals from write to last read of some pieces, equal ones counted; unread pieces have none."""
        was_read = last_read > written
        if was_read.any():
            pairs, count = np.unique(written[was_read] << 32 | last_read[was_read], return_counts=True)
            self._intervals.append((pairs >> 32, pairs & 0xFFFFFFFF, count))

    def intervals(self) -> list[tuple[Ints, Ints, Ints]]:
        """Return (first cycles, last cycles, numbers of pieces) of the intervals in which pieces hold data."""
        self._record_intervals(self._written_at, self._last_read_at)
        return self._intervals


def _scratchpad_occupancy(cfg: Config, traces: Sequence[_Trace]) -> dict[str, Occupancy]:
    """Return the Occupancy of each scratchpad, by name."""
    sizes = {name: pad.depth * pad.pieces for name, pad in scratchpads(cfg).items()}
    intervals: dict[str, list[tuple[Ints, Ints, Ints]]] = {name: [] for name in sizes}
    for trace in traces:  # scratchpads hold no data from launch to launch
        histories = {name: _PieceHistory(size) for name, size in sizes.items()}
        for instruction, start, end in zip(trace.stream, trace.start.tolist(), trace.end.tolist()):
            touched = touches(cfg, instruction.opcode, instruction.fields)
            for memory in {touch.memory for touch in touched}:
                histories[memory].record_accesses([touch for touch in touched if touch.memory == memory], start, end)
        for name, history in histories.items():
            intervals[name] += history.intervals()
    return {name: _sum_over_time(intervals[name], pad.depth, sizes[name]) for name, pad in scratchpads(cfg).items()}


def _sum_over_time(intervals: Sequence[tuple[Ints, Ints, Ints]], entries: int, pieces: int) -> Occupancy:
    """Add up intervals (first cycles, last cycles, numbers of pieces) to the Occupancy of a scratchpad of `pieces`
    pieces."""
    nothing = np.zeros(0, np.int64)
    since, until, count = (np.concatenate([nothing, *parts]) for parts in zip((nothing,) * 3, *intervals))
    time, inverse = np.unique(np.concatenate([since, until]), return_inverse=True)
    change = np.bincount(inverse, np.concatenate([count, -count]), len(time))
    return Occupancy(entries, time, np.cumsum(change) / pieces)
