"""Timing of the whole machine: advance units, queues and tokens in the order in which their times become known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.hw.boards.boards import memory_model
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit
from celosia.hw.spec.pipeline import ISSUE_DEPTH, MAX_OUTSTANDING_BURSTS
from celosia.hw.spec.regs import COUNTERS
from celosia.sim.device import Counters, DeviceError, Event
from celosia.sim.timing.compute import Gemm, Vector
from celosia.sim.timing.copies import Load, Store
from celosia.sim.timing.demand import BOTH_PORTS, IN_ACC, VIN_PORT, Demand, demand
from celosia.sim.timing.fetch_timing import Fetch
from celosia.sim.timing.latency import ASK_TO_ADDRESS, ASK_TO_REQUEST, END_TO_ASK, END_TO_DONE, QUEUE_TO_GATE
from celosia.sim.timing.memory_timing import Channel, ReadBursts, SharedChannel, Transfers, WriteBursts, check_memory
from celosia.sim.timing.ports import Acc, Port
from celosia.sim.timing.work import NEVER, Work


@dataclass(frozen=True)
class Timing:
    """The predicted run of a stream of instructions.

    cycles: from start to done. unit, start, end: number of its unit, and cycles as in the RTL's trace, of each
    instruction. values: the hardware's counters, by the names of `hw.spec.regs.COUNTERS`.
    """

    cycles: int
    unit: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    values: dict[str, int]

    def counters(self, trace: bool = False) -> Counters:
        """Return the counters that a Device would return; with `trace`, also all events, in the order of their ends."""
        events: list[Event] = []
        if trace:
            names = [unit.name.lower() for unit in Unit]
            order = np.argsort(self.end, kind="stable")
            columns = (column[order].tolist() for column in (self.unit, self.start, self.end))
            events = [
                Event(names[unit], index, start, end)
                for index, unit, start, end in zip(order.tolist(), *columns, strict=True)
            ]
        return Counters(self.cycles, self.values, events)


MAX_PASSES, CONVERGED = 8, 0.001
"""Passes for channels that share DRAM: each pass computes the run from the transfers of the pass before. They end
when its cycles change by at most the share CONVERGED, or after MAX_PASSES."""


def predict(cfg: Config, code: bytes, memory: MemoryModel | str = ZYNQ_HP, address: int = 0) -> Timing:
    """Predict the run of the instructions in `code`, which lie at byte `address` of DRAM.

    memory: a MemoryModel or the name of one. ValueError for an illegal instruction, a memory with random stalls, or an
    unknown name; DeviceError for a stream that cannot end.
    """
    model = memory_model(memory)
    check_memory(model)
    work_demand = demand(cfg, code)
    if not len(work_demand.unit):
        return Timing(0, work_demand.unit, work_demand.steps, work_demand.steps, dict.fromkeys(COUNTERS, 0))
    channels = cfg.ports + 1
    if not model.bytes_per_cycle or channels * cfg.bus_bytes <= model.bytes_per_cycle:
        return Machine(cfg, work_demand, [Channel(model) for _ in range(channels)], model, address).run()
    moves: list[Transfers] = [()] * channels
    previous_cycles = NEVER
    for _ in range(MAX_PASSES):
        channels_of_pass = [SharedChannel(model, cfg.bus_bytes, moves[:n] + moves[n + 1 :]) for n in range(channels)]
        timing = Machine(cfg, work_demand, channels_of_pass, model, address).run()
        if abs(timing.cycles - previous_cycles) <= timing.cycles * CONVERGED:
            break
        moves, previous_cycles = [channel.transfers for channel in channels_of_pass], timing.cycles
    return timing


class Semaphore:
    """The tokens from one unit to another, of which at most 2^bits - 1 can wait.

    posts: cycles in which the tokens that wait were posted, oldest first.
    """

    def __init__(self, bits: int) -> None:
        self._max_tokens = (1 << bits) - 1
        self.posts: deque[int] = deque()
        self._takes: deque[int] = deque([-1] * self._max_tokens)  # cycles in which the unreserved places became free

    def has_room(self) -> bool:
        """Return whether there is a place for one more token from a cycle on that is known, see `room`."""
        return bool(self._takes)

    def take(self, cycle: int) -> None:
        """Record that a token is taken in `cycle`, which frees a place for another one."""
        self._takes.append(cycle)

    @property
    def room(self) -> int:
        """First cycle with a place for one more token; only where `has_room`."""
        return self._takes[0] + 1

    def reserve(self) -> None:
        """Reserve a place for a token; only where `has_room`."""
        self._takes.popleft()


_LOAD, _GEMM, _VECTOR, _STORE = map(int, Unit)  # as int, since comparing an IntEnum is slow


class Machine:
    """The state of one predicted run: all units, queues and tokens. Call `run` once.

    Everything that does not depend on LOAD's open train of bursts is timed before the train is closed, so that fetch's
    bursts between its own are known by then. An instruction of VECTOR that uses acc is deferred while GEMM, which has
    priority there, may still get work from LOAD before it.
    """

    def __init__(
        self, cfg: Config, work_demand: Demand, channels: Sequence[Channel], memory: MemoryModel, address: int
    ) -> None:
        self._demand, self._count = work_demand, len(work_demand.unit)
        *reads, writes = channels
        window = min(MAX_OUTSTANDING_BURSTS, memory.outstanding)
        engines = [ReadBursts(channel, memory.read_latency, window) for channel in reads]
        self._read = engines[0]
        write = WriteBursts(writes, ASK_TO_ADDRESS + 1, memory.write_latency + END_TO_ASK + ASK_TO_ADDRESS + 1, window)
        self._fetch = Fetch(cfg, self._read, work_demand.unit.tolist(), address)
        acc = Acc()
        self._ports = [Port() for _ in range(VIN_PORT + 1)]
        self._load, self._gemm, self._vector = Load(cfg, engines, self._ports), Gemm(cfg, acc), Vector(cfg, acc)
        self._residual_stall = cfg.residual_cycles - 1
        self._store = Store(write, memory.write_latency)
        self._semaphores = {(a, b): Semaphore(cfg.token_bits) for a in Unit for b in Unit if a != b}
        self._semaphores_to_take, self._semaphores_to_post = self._semaphores_of_masks()
        self._queues = self._queue_instructions()
        self._issued = [deque([-1] * ISSUE_DEPTH, ISSUE_DEPTH) for _ in Unit]  # starts of each unit's last instructions
        self._token_waits = [0] * len(Unit)
        self._starts, self._ends = [0] * self._count, [0] * self._count
        self._channel_ends = [[0] * self._count for _ in engines]  # ends by channel of LOAD, before retirement
        self._runnable = 0  # mask of the units whose next instruction may pass its gate
        self._deferred_until = NEVER  # cycle in which VECTOR's deferred instruction would leave acc; NEVER: none
        self._not_deferred = -1  # number of the instruction that need not be deferred any more

    def _queue_instructions(self) -> list[deque[Work]]:
        """Return the instructions of each unit, in program order."""
        columns = [getattr(self._demand, name) for name in Work._fields[1:]]
        queues: list[deque[Work]] = [deque() for _ in Unit]
        for work in map(Work, range(self._count), *(column.tolist() for column in columns)):
            queues[work.unit].append(work)
        return queues

    def run(self) -> Timing:
        """Run all instructions to their end. DeviceError where no unit can proceed."""
        proceeds = True
        while proceeds:
            while self._runnable:
                # One instruction at a time. Lower units first: GEMM's before VECTOR's, which waits where GEMM uses acc.
                lowest = self._runnable & -self._runnable
                if not self._issue_next(lowest.bit_length() - 1):
                    self._runnable &= ~lowest
                    if lowest == 1 << _GEMM and self._deferred_until < NEVER:  # GEMM has come as far as it can
                        self._runnable |= 1 << _VECTOR
            proceeds = self._advance_reads()
        waiting = sum(map(len, self._queues))
        if waiting:
            raise DeviceError(f"no unit can proceed after {self._count - waiting} of {self._count} instructions")
        return self._make_timing(np.array(self._starts), np.array(self._ends), self._token_waits)

    def _advance_reads(self) -> bool:
        """Advance the read channels by one event, or else release VECTOR's deferred instruction.

        Called where no unit can issue an instruction. False if neither is possible, so that the run has ended.
        """
        if self._advance_reads_until(self._deferred_until):
            return True
        if self._deferred_until == NEVER:
            return False
        self._deferred_until, self._not_deferred = NEVER, self._queues[_VECTOR][0].number
        self._runnable = 1 << _VECTOR
        return True

    def _advance_reads_until(self, until: int) -> bool:
        """Advance fetch and the channels of LOAD by one event; False where there is none before cycle `until`.

        An event puts words into queues, starts instructions of LOAD, or begins or ends a train of bursts.
        """
        fetch, load = self._fetch, self._load
        self._runnable = fetch.queue_words()
        if self._runnable:
            return True
        while started := load.start():
            work, start = started
            self._starts[work.number] = start
            self._issued[_LOAD].append(start)
            self._runnable = 1 << _LOAD
        if self._runnable:
            return True
        first, *other_channels = load.channels  # fetch shares the port of the first alone
        for number, channel in enumerate(other_channels, 1):
            asks = channel.next_ask()
            if asks != NEVER:
                channel.open(asks)
                self._close_train(number)
                return True
        fetch_asks = fetch.next_ask()
        if first.is_open:
            if fetch_asks < NEVER:
                self._read.place_until(fetch_asks + ASK_TO_REQUEST)
            if fetch_asks < NEVER and self._read.bursts_left:
                fetch.read_burst(fetch_asks)
            elif until < NEVER and (self._read.predicted_end() >= until or first.port & self._queues[_VECTOR][0].port):
                return False
            else:
                self._close_train(0)
            return True
        load_asks = first.next_ask()
        if min(fetch_asks, load_asks) >= until:
            return False
        if self._read.fetch_goes_first(fetch_asks, load_asks):
            fetch.read_burst(fetch_asks)
        else:
            first.open(load_asks)
        return True

    def _close_train(self, channel: int) -> None:
        """Place the rest of the open train of a channel of LOAD, and end its instruction in this channel."""
        work, end = self._load.channels[channel].close()
        self._channel_ends[channel][work.number] = end
        for retired in self._load.end(channel, end):
            self._end_instruction(*retired)
        self._runnable |= 1 << _LOAD

    def _defers_to_gemm(self, work: Work, ready: int) -> bool:
        """Return whether GEMM may still use acc before this instruction of VECTOR does, without a token between them.

        If so, the instruction is deferred until GEMM has come as far as it can, since GEMM has priority in acc.
        """
        self._deferred_until = NEVER
        queue = self._queues[_GEMM]
        if work.number == self._not_deferred or not queue or not (work.shared_reads | work.shared_writes) & IN_ACC:
            return False
        gemm_work = queue[0]
        if gemm_work.number < len(self._fetch.queued_at):
            if gemm_work.wait >> _VECTOR & 1 and not self._semaphores[Unit.VECTOR, Unit.GEMM].posts:
                return False
            if gemm_work.post >> _VECTOR & 1 and not self._semaphores[Unit.GEMM, Unit.VECTOR].has_room():
                return False
        until = self._vector.acc_free_after(ready, work)
        if self._gemm.free >= until:
            return False
        self._deferred_until = until
        return True

    def _issue_next(self, unit: int) -> bool:
        """Let the next instruction of a unit pass its gate, and compute its start and end.

        LOAD's follow in `_advance_reads`. False if there is none, or a time that it depends on is not known yet.
        """
        queue, fetch = self._queues[unit], self._fetch
        if not queue or (unit == _LOAD and self._load.full):
            return False
        work = queue[0]
        if work.number >= len(fetch.queued_at):
            return False
        waits, posts = self._semaphores_to_take[unit][work.wait], self._semaphores_to_post[unit][work.post]
        for semaphore in waits:
            if not semaphore.posts:
                return False
        for semaphore in posts:
            if not semaphore.has_room():
                return False
        left_at = fetch.left_at[unit]
        head = max(fetch.queued_at[work.number] + QUEUE_TO_GATE, left_at[-1] + 1 if left_at else 0)
        earliest = head
        for semaphore in waits:
            if semaphore.posts[0] > earliest:
                earliest = semaphore.posts[0]
        for semaphore in posts:
            if semaphore.room > earliest:
                earliest = semaphore.room
        ready = max(earliest, self._issued[unit][0] + 1)
        if unit == _VECTOR and self._defers_to_gemm(work, ready + 1):
            return False
        queue.popleft()
        self._token_waits[unit] += earliest - head
        for semaphore in posts:
            semaphore.reserve()
        for semaphore in waits:
            if not semaphore.has_room():
                self._runnable |= work.wait
            semaphore.posts.popleft()
            semaphore.take(ready)
        left_at.append(ready)
        if unit == _LOAD:
            self._load.accept(work, ready + 1)
            return True
        if unit == _GEMM:
            start, end = self._gemm.run(ready + 1, work)
        elif unit == _VECTOR:
            start, end, writes = self._vector.run(ready + 1, work)
            for cycles in writes if work.port else ():
                self._ports[work.port].reserve(cycles)
        else:
            start, end = self._store.run(ready + 1, work)
        self._starts[work.number] = start
        self._issued[unit].append(start)
        self._end_instruction(work, end)
        return True

    def _end_instruction(self, work: Work, end: int) -> None:
        """Record the end of an instruction, and post its tokens."""
        self._ends[work.number] = end
        for semaphore in self._semaphores_to_post[work.unit][work.post]:
            semaphore.posts.append(end)
        self._runnable |= work.post

    def _semaphores_of_masks(self) -> tuple[list[list[list[Semaphore]]], list[list[list[Semaphore]]]]:
        """Return, for each unit and each mask of other units, the semaphores to take from, and those to post to.

        Looking them up is faster than testing the bits of the masks of each instruction.
        """
        masks = range(1 << len(Unit))
        takes = [[[self._semaphores[b, a] for b in Unit if b != a and m >> b & 1] for m in masks] for a in Unit]
        posts = [[[self._semaphores[a, b] for b in Unit if b != a and m >> b & 1] for m in masks] for a in Unit]
        return takes, posts

    def _make_timing(self, start: NDArray[np.int64], end: NDArray[np.int64], token_waits: Sequence[int]) -> Timing:
        """Compute the Timing and its counters from the starts and ends of all instructions.

        token_waits: cycles that each unit has waited for tokens.
        """
        w = self._demand
        cycles = int(end.max()) + END_TO_DONE
        ports_used = 1 + (w.weight_ports == BOTH_PORTS)
        read = int((w.beats * ports_used)[w.unit == Unit.LOAD].sum()) + self._fetch.beats
        values = {"cycles": cycles, "read_beats": read, "write_beats": int(w.beats[w.unit == Unit.STORE].sum())}
        for unit in Unit:
            of_unit = w.unit == unit
            busy = int(
                (w.steps * ports_used + w.norm_cycles + self._residual_stall * w.outputs * w.residual)[
                    of_unit & (w.softmax_entries == 0)
                ].sum()
            )
            softmaxes = of_unit & (w.softmax_entries > 0)
            busy += _busy_cycles(start[softmaxes], end[softmaxes] - 1)  # to the last write
            busy -= self._vector.overlapped_steps if unit == Unit.VECTOR else 0
            values[f"{unit.name.lower()}_busy"] = busy
            values[f"{unit.name.lower()}_wait_token"] = token_waits[unit]
            memory_waits = self._vector.stalled if unit == Unit.VECTOR else 0
            for channel in range(len(self._load.channels)) if unit in (Unit.LOAD, Unit.STORE) else ():
                of_channel = of_unit & ((w.load_channel == channel) | (w.weight_ports == BOTH_PORTS))
                until = np.array(self._channel_ends[channel]) if unit == Unit.LOAD else end
                memory_waits += max(
                    0, _busy_cycles(start[of_channel], until[of_channel]) - int(w.steps[of_channel].sum())
                )
            values[f"{unit.name.lower()}_wait_memory"] = memory_waits
        return Timing(cycles, w.unit, start, end, {name: values[name] for name in COUNTERS})


def _busy_cycles(start: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """Count the cycles in which at least one instruction is under way.

    start, end: cycles of instructions, in the order of their starts.
    """
    if not len(start):
        return 0
    ended_before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
    return int((end - np.maximum(start + 1, ended_before)).clip(0).sum())
