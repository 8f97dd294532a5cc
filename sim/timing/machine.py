"""The machine: units, queues and tokens, and the order in which what they do becomes known."""

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
from celosia.sim.timing.demand import IN_ACC, SPREAD, VIN_PORT, Demand, demand
from celosia.sim.timing.fetch import Fetch
from celosia.sim.timing.latency import ASK_TO_ADDRESS, ASK_TO_REQUEST, END_TO_ASK, END_TO_DONE, QUEUE_TO_GATE
from celosia.sim.timing.memory import Channel, Engine, ReadBursts, SharedChannel, Transfers, check_memory
from celosia.sim.timing.ports import Acc, Port
from celosia.sim.timing.work import NEVER, Work


@dataclass(frozen=True)
class Timing:
    """When a stream of instructions ran. cycles: from start to done. start, end: of each instruction, as the RTL's
    trace has them. values: the hardware's counters, by the names of `hw.regs.COUNTERS`."""

    cycles: int
    unit: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    values: dict[str, int]

    def counters(self, trace: bool = False) -> Counters:
        """As a Device returns them; with `trace`, each instruction's event in the order of their ends."""
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


MOST_PASSES, SETTLED = 8, 0.001
"""Where channels share DRAM, a run is computed from the transfers of the pass before. The passes end when its cycles
change by at most the share SETTLED, or after MOST_PASSES."""


def predict(cfg: Config, code: bytes, memory: MemoryModel | str = ZYNQ_HP, address: int = 0) -> Timing:
    """Cycles of the run of the instructions in `code`, which lie at byte `address` of DRAM.

    memory: a MemoryModel or the name of one. ValueError for an illegal instruction, a memory with random stalls, or an
    unknown name; DeviceError for a stream that cannot end.
    """
    model = memory_model(memory)
    check_memory(model)
    wanted = demand(cfg, code)
    if not len(wanted.unit):
        return Timing(0, wanted.unit, wanted.steps, wanted.steps, dict.fromkeys(COUNTERS, 0))
    channels = cfg.ports + 1
    if not model.bytes_per_cycle or channels * cfg.bus_bytes <= model.bytes_per_cycle:
        return Machine(cfg, wanted, [Channel(model) for _ in range(channels)], model, address).run()
    moves: list[Transfers] = [()] * channels
    before = NEVER
    for _ in range(MOST_PASSES):
        shared = [SharedChannel(model, cfg.bus_bytes, moves[:n] + moves[n + 1 :]) for n in range(channels)]
        timing = Machine(cfg, wanted, shared, model, address).run()
        if abs(timing.cycles - before) <= timing.cycles * SETTLED:
            break
        moves, before = [channel.moved for channel in shared], timing.cycles
    return timing


class Semaphore:
    """Tokens from one unit to another: when they came, and when they were taken."""

    def __init__(self, bits: int) -> None:
        self._most = (1 << bits) - 1
        self.posts: deque[int] = deque()  # when the tokens came that have not been taken
        self._takes: deque[int] = deque([-1] * self._most)  # when the places that have not been reserved became free

    def has_room(self) -> bool:
        """Whether it is known when there is room for one more token."""
        return bool(self._takes)

    def take(self, cycle: int) -> None:
        """A token is used in `cycle`, which makes room for another one."""
        self._takes.append(cycle)

    @property
    def room(self) -> int:
        """When there is room for one more token, if `has_room`."""
        return self._takes[0] + 1

    def reserve(self) -> None:
        """Promise a token; only where `has_room`."""
        self._takes.popleft()


_LOAD, _GEMM, _VECTOR, _STORE = map(int, Unit)  # an IntEnum takes its time to compare


class Machine:
    """All parts, and the instructions that go through them.

    Whatever does not depend on the bursts of LOAD that are under way is found first: so the bursts of fetch between
    them are known when they end. But an instruction of VECTOR that uses the accumulators is put off while LOAD may let
    GEMM come in its way.
    """

    def __init__(
        self, cfg: Config, wanted: Demand, channels: Sequence[Channel], memory: MemoryModel, address: int
    ) -> None:
        self._wanted, self._count = wanted, len(wanted.unit)
        *reads, writes = channels
        window = min(MAX_OUTSTANDING_BURSTS, memory.outstanding)
        engines = [ReadBursts(channel, memory.read_latency, window) for channel in reads]
        self._read = engines[0]
        write = Engine(writes, ASK_TO_ADDRESS + 1, memory.write_latency + END_TO_ASK + ASK_TO_ADDRESS + 1, window)
        self._fetch = Fetch(cfg, self._read, wanted.unit.tolist(), address)
        acc = Acc()
        self._ports = [Port() for _ in range(VIN_PORT + 1)]
        self._load, self._gemm, self._vector = Load(cfg, engines, self._ports), Gemm(cfg, acc), Vector(cfg, acc)
        self._held = cfg.residual_cycles - 1
        self._store = Store(write, memory.write_latency)
        self._semaphores = {(a, b): Semaphore(cfg.token_bits) for a in Unit for b in Unit if a != b}
        self._takes, self._posts = self._masks()
        self._queues = self._works()
        self._issued = [deque([-1] * ISSUE_DEPTH, ISSUE_DEPTH) for _ in Unit]  # starts of each unit's last instructions
        self._waited = [0] * len(Unit)
        self._starts, self._ends = [0] * self._count, [0] * self._count
        self._lane_ends = [[0] * self._count for _ in engines]  # of each lane of LOAD, before they were told
        self._awake = 0  # mask of the units whose next instruction may pass its gate
        self._until = NEVER  # when VECTOR's instruction that is put off would be through with acc; NEVER: none is
        self._settled = -1  # the one that need not be put off any more

    def _works(self) -> list[deque[Work]]:
        """The instructions of each unit."""
        w = self._wanted
        columns = [getattr(w, name) for name in Work._fields[1:]]
        queues: list[deque[Work]] = [deque() for _ in Unit]
        for work in map(Work, range(self._count), *(column.tolist() for column in columns)):
            queues[work.unit].append(work)
        return queues

    def run(self) -> Timing:
        """Everything, to its end. DeviceError where it has none."""
        while self._awake or self._stir():
            # One instruction at a time, GEMM's before VECTOR's, which waits where GEMM uses the accumulators.
            lowest = self._awake & -self._awake
            if not self._pass(lowest.bit_length() - 1):
                self._awake &= ~lowest
                if lowest == 1 << _GEMM and self._until < NEVER:  # GEMM has come as far as it can
                    self._awake |= 1 << _VECTOR
        left = sum(map(len, self._queues))
        if left:
            raise DeviceError(f"no unit can proceed after {self._count - left} of {self._count} instructions")
        return self._timing(np.array(self._starts), np.array(self._ends), self._waited)

    def _stir(self) -> bool:
        """Do what comes next on the read channels, or behind it what has been put off; False where nothing does."""
        if self._read_on(self._until):
            return True
        if self._until == NEVER:
            return False
        self._until, self._settled = NEVER, self._queues[_VECTOR][0].number
        self._awake = 1 << _VECTOR
        return True

    def _read_on(self, until: int) -> bool:
        """Do what comes next on the read channels; False where nothing does before cycle `until`."""
        fetch, load = self._fetch, self._load
        self._awake = fetch.words()
        if self._awake:
            return True
        while started := load.start():
            work, start = started
            self._starts[work.number] = start
            self._issued[_LOAD].append(start)
            self._awake = 1 << _LOAD
        if self._awake:
            return True
        first, *others = load.lanes  # fetch shares the port of the first alone
        for number, lane in enumerate(others, 1):
            asks = lane.ask()
            if asks != NEVER:
                lane.open(asks)
                self._close(number)
                return True
        fetch_asks = fetch.next_ask()
        if first.is_open:
            if fetch_asks < NEVER:
                self._read.advance(fetch_asks + ASK_TO_REQUEST)
            if fetch_asks < NEVER and self._read.left:
                fetch.burst(fetch_asks)
            elif until < NEVER and (self._read.end() >= until or first.port & self._queues[_VECTOR][0].port):
                return False
            else:
                self._close(0)
            return True
        load_asks = first.ask()
        if min(fetch_asks, load_asks) >= until:
            return False
        if self._read.fetch_first(fetch_asks, load_asks):
            fetch.burst(fetch_asks)
        else:
            first.open(load_asks)
        return True

    def _close(self, lane: int) -> None:
        """End the instruction whose train is open in that lane of LOAD."""
        work, end = self._load.lanes[lane].close()
        self._lane_ends[lane][work.number] = end
        for told in self._load.end(lane, end):
            self._end(*told)
        self._awake |= 1 << _LOAD

    def _gemm_first(self, work: Work, ready: int) -> bool:
        """Whether GEMM may still come in the way of this instruction of VECTOR without a token from there."""
        self._until = NEVER
        queue = self._queues[_GEMM]
        if work.number == self._settled or not queue or not (work.reads | work.feeds) & IN_ACC:
            return False
        coming = queue[0]
        if coming.number < len(self._fetch.put):
            if coming.wait >> _VECTOR & 1 and not self._semaphores[Unit.VECTOR, Unit.GEMM].posts:
                return False
            if coming.post >> _VECTOR & 1 and not self._semaphores[Unit.GEMM, Unit.VECTOR].has_room():
                return False
        until = self._vector.through(ready, work)
        if self._gemm.free >= until:
            return False
        self._until = until
        return True

    def _pass(self, unit: int) -> bool:
        """Let the next instruction of a unit through its gate, and to its end but for LOAD; False where what it waits
        for is not known yet."""
        queue, fetch = self._queues[unit], self._fetch
        if not queue or queue[0].number >= len(fetch.put) or (unit == _LOAD and self._load.full):
            return False
        work = queue[0]
        taken, given = self._takes[unit][work.wait], self._posts[unit][work.post]
        for semaphore in taken:
            if not semaphore.posts:
                return False
        for semaphore in given:
            if not semaphore.has_room():
                return False
        left = fetch.left[unit]
        head = max(fetch.put[work.number] + QUEUE_TO_GATE, left[-1] + 1 if left else 0)
        allowed = head
        for semaphore in taken:
            allowed = max(allowed, semaphore.posts[0])
        for semaphore in given:
            allowed = max(allowed, semaphore.room)
        ready = max(allowed, self._issued[unit][0] + 1)
        if unit == _VECTOR and self._gemm_first(work, ready + 1):
            return False
        queue.popleft()
        self._waited[unit] += allowed - head
        for semaphore in given:
            semaphore.reserve()
        for semaphore in taken:
            if not semaphore.has_room():
                self._awake |= work.wait
            semaphore.posts.popleft()
            semaphore.take(ready)
        left.append(ready)
        if unit == _LOAD:
            self._load.accept(work, ready + 1)
            return True
        if unit == _GEMM:
            start, end = self._gemm.run(ready + 1, work)
        elif unit == _VECTOR:
            start, end, writes = self._vector.run(ready + 1, work)
            for train in writes if work.port else ():
                self._ports[work.port].take(train)
        else:
            start, end = self._store.run(ready + 1, work)
        self._starts[work.number] = start
        self._issued[unit].append(start)
        self._end(work, end)
        return True

    def _end(self, work: Work, end: int) -> None:
        self._ends[work.number] = end
        for semaphore in self._posts[work.unit][work.post]:
            semaphore.posts.append(end)
        self._awake |= work.post

    def _masks(self) -> tuple[list[list[list[Semaphore]]], list[list[list[Semaphore]]]]:
        """For each unit and mask the semaphores to take from, and those to post to."""
        masks = range(1 << len(Unit))
        takes = [[[self._semaphores[b, a] for b in Unit if b != a and m >> b & 1] for m in masks] for a in Unit]
        posts = [[[self._semaphores[a, b] for b in Unit if b != a and m >> b & 1] for m in masks] for a in Unit]
        return takes, posts

    def _timing(self, start: NDArray[np.int64], end: NDArray[np.int64], waited: Sequence[int]) -> Timing:
        w = self._wanted
        cycles = int(end.max()) + END_TO_DONE
        in_lanes = 1 + (w.weights == SPREAD)
        read = int((w.beats * in_lanes)[w.unit == Unit.LOAD].sum()) + self._fetch.beats
        values = {"cycles": cycles, "read_beats": read, "write_beats": int(w.beats[w.unit == Unit.STORE].sum())}
        for unit in Unit:
            own = w.unit == unit
            busy = int((w.steps * in_lanes + w.finds + self._held * w.outputs * w.residual)[own & (w.alone == 0)].sum())
            alone = own & (w.alone > 0)
            busy += _covered(start[alone], end[alone] - 1)  # to the last write
            busy -= self._vector.beside if unit == Unit.VECTOR else 0
            values[f"{unit.name.lower()}_busy"] = busy
            values[f"{unit.name.lower()}_wait_token"] = waited[unit]
            held = self._vector.held if unit == Unit.VECTOR else 0
            for lane in range(len(self._load.lanes)) if unit in (Unit.LOAD, Unit.STORE) else ():
                mine = own & ((w.lane == lane) | (w.weights == SPREAD))
                until = np.array(self._lane_ends[lane]) if unit == Unit.LOAD else end
                held += max(0, _covered(start[mine], until[mine]) - int(w.steps[mine].sum()))
            values[f"{unit.name.lower()}_wait_memory"] = held
        return Timing(cycles, w.unit, start, end, {name: values[name] for name in COUNTERS})


def _covered(start: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """Cycles in which at least one of some instructions, in order, is under way."""
    if not len(start):
        return 0
    before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
    return int((end - np.maximum(start + 1, before)).clip(0).sum())
