"""Activity of the accelerator in each cycle of a run: instructions, the tokens they waited for, scratchpads."""

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
    """Stretches of time of units, in cycles from the start of the run: of `count` instructions from `index` on, all of
    one layer. drawn: its start beside those before it, in whose pipeline it may have started already."""

    unit: Ints
    layer: Ints
    index: Ints
    count: Ints
    drawn: Ints
    end: Ints


@dataclass(frozen=True)
class Waits:
    """Stretches of time in which nothing was under way in `unit`, whose next instruction needed a token of `of`."""

    unit: Ints
    of: Ints
    since: Ints
    until: Ints


@dataclass(frozen=True)
class Occupancy:
    """The share of a scratchpad that holds what will still be read: `share[i]` from cycle `time[i]` to the next one."""

    entries: int
    time: Ints
    share: NDArray[np.float64]


@dataclass(frozen=True)
class Activity:
    """Activity of a run. layers: numbers count on from launch to launch. launches: cycle in which each starts, and the
    last ends. spans: of each layer, the first and last cycle of its own instructions. gap: pauses and waits of so many
    cycles and fewer between instructions are not in bars and waits, since there would be too many."""

    bars: Bars
    waits: Waits
    instructions: int
    gap: int
    scratchpads: dict[str, Occupancy]
    launches: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def activity(program: Program, counters: Sequence[Counters], limit: int = 20_000) -> Activity | None:
    """Return the activity in the launches of a Program; `counters` are those of its first run. None where the device
    did not give the time of each instruction, or there was none.

    limit: bars, from which on instructions that follow each other are drawn as one.
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
    every = Bars(*(np.concatenate(parts) for parts in zip(*(trace.bars() for trace in traces))))
    waits = Waits(*(np.concatenate(parts) for parts in zip(*(trace.waits() for trace in traces))))
    bars, gap = _join_bars(every, limit)
    length = waits.until - waits.since
    gap = max(gap, int(np.sort(length)[-limit - 1])) if np.count_nonzero(length > gap) > limit else gap
    long = length > gap
    waits = Waits(waits.unit[long], waits.of[long], waits.since[long], waits.until[long])
    return Activity(
        bars, waits, len(every.unit), gap, _scratchpad_occupancy(program.config, traces), tuple(starts),
        tuple(span for trace in traces for span in trace.spans()),
    )  # fmt: skip


@dataclass(frozen=True)
class _Trace:
    """A launch that starts in cycle `begin`: its instructions in the order of the program, with their times."""

    begin: int
    stream: list[Instruction]
    unit: Ints
    layer: Ints
    index: Ints
    start: Ints
    drawn: Ints
    end: Ints

    @classmethod
    def of(cls, program: Program, launch: LaunchStep, run: Counters, now: int, layer: int, index: int) -> _Trace:
        """Trace one run of a launch that begins at cycle `now`. layer, index: of its first layer and instruction."""
        code = np.frombuffer(launch_code(program, launch), np.uint8).reshape(-1, instruction_bytes(program.config))
        stream = [
            instruction for instruction in decode(program.config, code) if instruction is not None
        ]  # none is illegal in a program that has run
        start, end = np.zeros((2, len(stream)), np.int64)
        for event in run.events:
            start[event.index], end[event.index] = now + event.start, now + event.end
        unit = np.array([int(instruction.unit) for instruction in stream], np.int64)
        drawn = start.copy()
        for kind in Unit:
            rows = np.flatnonzero(unit == kind)
            before = np.maximum.accumulate(np.concatenate([[now], end[rows]]))[:-1]
            drawn[rows] = np.minimum(np.maximum(start[rows], before), end[rows])
        owner = launch.layer_of.astype(np.int64) + layer
        return cls(now, stream, unit, owner, index + np.arange(len(stream)), start, drawn, end)

    def bars(self) -> tuple[Ints, ...]:
        return self.unit, self.layer, self.index, np.ones_like(self.index), self.drawn, self.end

    def waits(self) -> tuple[Ints, ...]:
        """Intervals in which a unit waits: from the end of its last instruction to the last token that the next one
        takes."""
        arrival, giver = np.full(len(self.unit), -1, np.int64), np.zeros(len(self.unit), np.int64)
        post_masks, waits = (
            np.array([instruction.fields[name] for instruction in self.stream], np.int64) for name in ("post", "wait")
        )
        for of in Unit:
            for unit in Unit:
                posts = np.flatnonzero((self.unit == of) & (post_masks >> unit & 1 == 1))
                takers = np.flatnonzero((self.unit == unit) & (waits >> of & 1 == 1))[: len(posts)]
                token = self.end[posts[: len(takers)]]  # the n-th taken is the n-th given
                later = token > arrival[takers]
                arrival[takers[later]], giver[takers[later]] = token[later], of
        since = np.zeros_like(arrival)
        for unit in Unit:
            rows = np.flatnonzero(self.unit == unit)
            since[rows] = np.maximum.accumulate(np.concatenate([[self.begin], self.end[rows]]))[:-1]
        until = np.minimum(arrival, self.drawn)
        rows = np.flatnonzero(until > since)
        return self.unit[rows], giver[rows], since[rows], until[rows]

    def spans(self) -> list[tuple[int, int]]:
        """Return the first and last cycle of each layer."""
        first = int(self.layer[0])
        count = int(self.layer.max()) + 1 - first
        low, high = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
        np.minimum.at(low, self.layer - first, self.start)
        np.maximum.at(high, self.layer - first, self.end)
        return list(zip(low.tolist(), high.tolist()))


def _join_bars(bars: Bars, limit: int) -> tuple[Bars, int]:
    """Join bars until at most `limit` are left where possible: those of a unit and a layer with the smallest pauses
    first."""
    order = np.lexsort((bars.index, bars.unit))
    unit, layer, index, count, drawn, end = (getattr(bars, name)[order] for name in Bars.__dataclass_fields__)
    pause = np.maximum(drawn[1:] - np.maximum.accumulate(end)[:-1], 0)
    same = (unit[1:] == unit[:-1]) & (layer[1:] == layer[:-1])
    gap = -1
    while len(unit) - np.count_nonzero(same & (pause <= gap)) > limit and gap < pause.max(initial=0):
        gap = 2 * gap + 1 if gap > 0 else gap + 1
    first = np.flatnonzero(np.concatenate([[True], ~(same & (pause <= gap))]))
    joined = Bars(
        unit[first], layer[first], index[first], np.add.reduceat(count, first), drawn[first],
        np.maximum.reduceat(end, first),
    )  # fmt: skip
    return joined, max(gap, 0)


# Scratchpads ------------------------------------------------------------------------------------------------


class _Places:
    """Each place of a scratchpad: since when it holds what it does, and until when that is read."""

    def __init__(self, size: int) -> None:
        self._born, self._last = np.zeros((2, size), np.int64)
        self._held: list[tuple[Ints, Ints, Ints]] = []

    def run(self, touched: Sequence[Touch], start: int, end: int) -> None:
        """Record the accesses of an instruction, reads first, from cycle `start` to `end`."""
        for touch in touched:
            if not touch.write:
                index = touch.piece_numbers(len(self._last))
                self._last[index] = np.maximum(self._last[index], end)
        continued = {touch.operand for touch in touched if not touch.write}
        for touch in touched:
            if touch.write and touch.operand not in continued:  # an accumulation goes on with what is there
                index = touch.piece_numbers(len(self._last))
                self._record_held(self._born[index], self._last[index])
                self._born[index] = self._last[index] = start

    def _record_held(self, born: Ints, last: Ints) -> None:
        read = last > born
        if read.any():
            pairs, count = np.unique(born[read] << 32 | last[read], return_counts=True)
            self._held.append((pairs >> 32, pairs & 0xFFFFFFFF, count))

    def held(self) -> list[tuple[Ints, Ints, Ints]]:
        """Intervals in which places are held, and the number of places."""
        self._record_held(self._born, self._last)
        return self._held


def _scratchpad_occupancy(cfg: Config, traces: Sequence[_Trace]) -> dict[str, Occupancy]:
    """Occupancy of each scratchpad over time."""
    sizes = {name: pad.depth * pad.pieces for name, pad in scratchpads(cfg).items()}
    held: dict[str, list[tuple[Ints, Ints, Ints]]] = {name: [] for name in sizes}
    for trace in traces:  # a launch finds nothing of the one before
        places = {name: _Places(size) for name, size in sizes.items()}
        for instruction, start, end in zip(trace.stream, trace.start.tolist(), trace.end.tolist()):
            touched = touches(cfg, instruction.opcode, instruction.fields)
            for memory in {touch.memory for touch in touched}:
                places[memory].run([touch for touch in touched if touch.memory == memory], start, end)
        for name, accesses in places.items():
            held[name] += accesses.held()
    return {name: _sum_over_time(held[name], pad.depth, sizes[name]) for name, pad in scratchpads(cfg).items()}


def _sum_over_time(held: Sequence[tuple[Ints, Ints, Ints]], entries: int, places: int) -> Occupancy:
    """Sum over time of held amounts, each from a time until another."""
    nothing = np.zeros(0, np.int64)
    since, until, count = (np.concatenate([nothing, *parts]) for parts in zip((nothing,) * 3, *held))
    time, inverse = np.unique(np.concatenate([since, until]), return_inverse=True)
    change = np.bincount(inverse, np.concatenate([count, -count]), len(time))
    return Occupancy(entries, time, np.cumsum(change) / places)
