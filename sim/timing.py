"""The machine's clock without its arithmetic: when each instruction of an encoded stream starts and ends.

    timing = predict(cfg, code)         # code: the words of a launch, as they lie in DRAM
    timing.cycles, timing.start, timing.end

Nothing here looks at data. What an instruction asks for (steps, rows, bursts, beats) comes from `demand.py`. What the
order of instructions, queues, tokens and the memory make of it is computed here, one instruction after the other, each
unit keeping what it still needs to know of the ones before. Copies are trains of bursts in closed form, so that
the time this takes does not depend on how much they move.

Cycles count from the write of `control` that starts the run, as those of the RTL's events do. The constants below are
the hardware's pipeline stages; tests/sim/test_timing.py compares them with the declarations in hw/ and, where there is
none, measures them on the RTL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.isa import Unit, instruction_bytes
from celosia.hw.regs import COUNTERS
from celosia.sim.demand import IN_ACC, MAX_BURST, VIN_PORT, Demand, demand
from celosia.sim.device import Counters, DeviceError, Event
from celosia.sim.memory import ZYNQ_HP, MemoryModel, memory_model

# Declared in hw/, which is in Amaranth and cannot be imported here.
OUTSTANDING = 8
"""Bursts that the engine of LOAD or STORE has under way at once (dma.py)."""
ROOM = 128
"""Beats that the read engine holds (dma.py, ReadEngine)."""
PLACES = 2 * OUTSTANDING
"""Rows listed whose bytes have not all passed yet (load.py, store.py)."""
AHEAD = 3
"""Rows listed whose last burst has not been asked for: two in a queue, one being split (load.py, store.py)."""
IN_FLIGHT = 8
"""Instructions of a lane of LOAD, or of STORE, whose data is awaited (load.py, store.py)."""
RESPONSES = 2 * IN_FLIGHT
"""Instructions of STORE whose responses are awaited (store.py)."""
UNTOLD = 16
"""Instructions of LOAD, where it has two lanes, whose end has not been told (load.py)."""
ISSUE = 2
"""Instructions between a gate and its unit (top.py)."""
UNDER_WAY = 2
"""Instructions in the vector unit (vector.py)."""
VECTOR_STAGES, ADD_STAGES = 20, 6
"""From the read of an accumulator to the entry's write, and how many of them come after what a residual waits for
(vector.py, `stages`)."""
READ_STAGES, TAP_STAGES = 1, 3
"""From an entry's step to the read of its accumulator, where the Config has no taps, and where it has."""

# Cycles from one event to another, by the registers between them.
FIRST_ASK = 4
"""Write of `control` -> first burst of fetch asked for: start, clear, run, limits checked, length of the burst."""
ASK_TO_ADDRESS_FETCH = 2
"""Fetch asks -> memory has the address: registers of fetch and of the read channel's arbiter."""
ASK_TO_ADDRESS = 1
"""An engine of LOAD or STORE asks for a burst -> memory has the address: the register in front of AXI."""
ASK_TO_ASK_FETCH = 2
"""Fetch asks -> asks again: the register of its request."""
BEAT_TO_WORD = 2
"""Last beat of an instruction -> its word is there: fetch's buffer, the word put together."""
WORD_TO_QUEUE = 1
"""A word is there -> it may go to its queue: checked."""
QUEUE_TO_GATE = 2
"""An instruction goes to its queue, an empty one -> it is at its gate: memory, the register behind it."""
END_TO_ASK = 1
"""Last beat of a burst (response, of STORE) -> the engine may ask for another in its place."""
START_TO_ASK = 4
"""LOAD or STORE starts -> its first burst is asked for: waiting block, listed row, queue, splitter."""
BEGIN_TO_ASK = START_TO_ASK - 1
START_TO_STEP = 3
"""LOAD or STORE starts -> its first step: job queue, walker, and LOAD's plan or STORE's read."""
BEAT_TO_STEP = 5
"""A beat arrives -> LOAD writes its first unit: buffer of two stages, queues in front of the aligner and behind it."""
STEP_TO_END = 3
"""LOAD's last step -> end: register in front of the port, `done`."""
GEMM_STAGES = 7
"""GEMM's last step -> end beside the adder tree: operands, products, sums, accumulator read, add and write, `done`."""
WRITE_TO_END = 2
"""The write of GEMM's or VECTOR's last entry -> end: `done`."""
READ_TO_WRITE = 4
"""GEMM reads an accumulator -> it writes the sum (gemm.py)."""
UNIT_TO_BEAT = 2
"""STORE's reader has a unit -> its beat is offered to memory: the queue in front of the packer, the packer."""
RESPONSE_TO_END = 2
"""The response to STORE's last burst -> end: the engine's answer, `done`."""
END_TO_DONE = 1
"""The last end of an instruction -> the run is done: control's register of what is quiet."""

NEVER = 1 << 62


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
    return _Machine(cfg, wanted, model, address).run()


def check_memory(memory: MemoryModel) -> None:
    """ValueError for a memory that `predict` does not model."""
    if memory.stall or memory.jitter or memory.freeze_after is not None:
        raise ValueError(f"the timing model has no memory that pauses at random or freezes, so not {memory}")
    if memory.refresh_period and memory.refresh_cycles >= memory.refresh_period:
        raise ValueError(f"{memory} refreshes all the time; refresh_cycles must be below refresh_period")


class _Channel:
    """One direction of the memory: a beat a cycle at most, none while it refreshes.

    A slot is a cycle in which a beat may move. next: the first cycle that no beat has taken yet. ends: the last beats
    of as many bursts as memory accepts before one has ended; a further one waits for the first of them.
    """

    def __init__(self, cfg: Config, memory: MemoryModel) -> None:
        self._period, self._refresh = memory.refresh_period, memory.refresh_cycles
        self._open = self._period - self._refresh
        # Where the DRAM is slower than the bus, a beat takes several cycles.
        self.beat = max(1.0, cfg.bus_bytes / memory.bytes_per_cycle) if memory.bytes_per_cycle else 1.0
        # And where it has less than both directions can move, a beat that way takes this many slots of the other way.
        both = memory.bytes_per_cycle / cfg.bus_bytes if memory.bytes_per_cycle else 2.0
        self.shared = self.beat * min(1.0, max(0.0, 2.0 - both))
        self.next = 0
        self.ends = deque([-NEVER] * memory.outstanding, memory.outstanding)

    def after(self, cycle: int, slots: int) -> int:
        """The cycle of the slot that is `slots` after the first one from `cycle` on."""
        if not self._period:
            return cycle + slots
        turn, within = divmod(cycle, self._period)
        turns, rest = divmod(max(0, within - self._refresh) + slots, self._open)
        return (turn + turns) * self._period + self._refresh + rest

    def refresh_after(self, cycle: int) -> int:
        """The next cycle in which a refresh begins."""
        return cycle // self._period * self._period + self._period if self._period else NEVER


class _Engine:
    """The bursts of LOAD or of STORE on their channel.

    lead: cycles from asking for a burst to its first beat at the earliest. turn: from the last beat of a burst to the
    first of the one that takes its place among those outstanding.
    """

    def __init__(self, channel: _Channel, lead: int, turn: int, outstanding: int) -> None:
        self.channel, self.lead, self.turn = channel, lead, turn
        self.outstanding = outstanding
        self._bursts, self.burst = 0, MAX_BURST  # of the last train: how many, and slots of each
        self.ends = deque([-NEVER] * (outstanding + 1), outstanding + 1)  # last beats of the last bursts
        self.disturbed: deque[tuple[int, int]] = deque()  # when the other direction took how many slots
        self.asked = -NEVER  # when the last burst was asked for

    def train(self, ask: int, bursts: int, slots: int, early: int = 0) -> tuple[int, int]:
        """Send `bursts` bursts, which take `slots` in all, the first asked for in cycle `ask` or later.

        early: slots by which a burst that has waited for its turn is shorter, since its first beat is there already.
        Returns the cycles of the first and of the last beat.
        """
        channel = self.channel
        ask = max(ask, self.next_ask)
        first = channel.after(max(ask + self.lead, channel.next, channel.ends[0] + self.turn - 1), 0)
        if bursts > 1 and not self.waits(bursts, slots):
            last = channel.after(first, slots - 1)
            self._fill(bursts, first, last)
            channel.ends.extend(list(self.ends)[-bursts:])
        elif bursts <= 2 * self.outstanding:
            last = self._each(first, bursts, slots, early)
        else:
            last = self._bunches(first, bursts, slots, early)
        channel.next = last + 1
        self._bursts, self.burst = bursts, slots // bursts
        self.asked = max(ask + bursts - 1, self.ends[0] + END_TO_ASK)
        return first, last

    @property
    def next_ask(self) -> int:
        """When the next burst may be asked for at the earliest."""
        return max(self.asked + 1, self.ends[1] + END_TO_ASK)

    def waits(self, bursts: int, slots: int) -> bool:
        """Whether the channel is idle in such a train because so many bursts may be outstanding and no more."""
        return (self.outstanding - 1) * slots < (self.turn - 1) * bursts

    def delay(self, cycles: int) -> None:
        """The last train's bursts that are remembered came later by `cycles`."""
        for number in range(-min(self._bursts, len(self.ends)), 0):
            self.ends[number] += cycles
        self.asked = max(self.asked, self.ends[0] + END_TO_ASK)

    def disturb(self, first: int) -> None:
        """What the other direction did since cycle `first`, before the last beat, makes that one later."""
        while self.disturbed and self.disturbed[0][0] <= self.ends[-1]:
            begin, slots = self.disturbed.popleft()
            if begin >= first:
                self.delay(slots)
                self.channel.next += slots

    def _fill(self, bursts: int, first: int, last: int) -> None:
        """Spread the ends of the last bursts evenly."""
        ends, span = self.ends, last - first + 1
        for left in range(min(bursts, self.outstanding + 1) - 1, -1, -1):
            ends.append(last - span * left // bursts)

    def _each(self, first: int, bursts: int, slots: int, early: int) -> int:
        """Bursts one by one, the first beat in cycle `first`; returns the last beat's."""
        ends, taken, turn, after = self.ends, self.channel.ends, self.turn, self.channel.after
        done, start, end = 0, first, first - 1
        for number in range(1, bursts + 1):
            through = slots * number // bursts
            end = after(start, through - done - 1 - (early if start > end + 1 else 0))
            done = through
            ends.append(end)
            taken.append(end)
            start = max(end + 1, ends[1] + turn, taken[0] + turn - 1)
        return end

    def _bunches(self, first: int, bursts: int, slots: int, early: int) -> int:
        """As `_each`, for trains in which memory waits for requests: as many bursts as may be outstanding come at once,
        and after a round trip the next ones. Only those that a refresh meets are looked at."""
        window = self.outstanding
        left, of_bunch = bursts - window, slots * window // bursts
        last = self._each(first, window, of_bunch, early)
        period = self.turn - 1 + -(-slots // bursts) - early
        while left > 0:
            clear = max(0, min(left // window, (self.channel.refresh_after(self.ends[1]) - last - 1) // period))
            if clear:
                for _ in range(window + 1):
                    self.ends.append(self.ends[0] + clear * period)
                last = self.ends[-1]
                left -= clear * window
            count = min(left, window)
            if count:
                start = max(last + 1, self.ends[1] + self.turn)
                last = self._each(start, count, max(count, of_bunch * count // window), early)
                left -= count
        return last


class _Fetch:
    """Reads instructions ahead and puts them into the queues, in order.

    left[u]: when each instruction of unit u left its queue, as far as known; whoever learns it appends to it. A queue
    that is full holds up everything behind it.
    """

    def __init__(self, cfg: Config, memory: MemoryModel, load: _Engine, units: list[int], address: int) -> None:
        size = instruction_bytes(cfg)
        self._load, self._channel, self._lead = load, load.channel, ASK_TO_ADDRESS_FETCH + memory.read_latency
        self._turn = 1 + memory.read_latency
        self._parts = max(1, size // cfg.bus_bytes)  # beats of a word
        self._words = max(1, cfg.bus_bytes // size)  # words of a beat
        self._longest = min(MAX_BURST, 2 * self._parts)
        self._room = 4 * self._longest
        self.beats = -(-len(units) * size // cfg.bus_bytes)
        self._place = address // cfg.bus_bytes % self._longest
        self._promised = 0  # beats asked for
        self._ask = FIRST_ASK - ASK_TO_ASK_FETCH
        self._arrived: deque[tuple[int, int]] = deque()  # bursts not used up: beats through each, cycle of its last one
        self._joined: list[int] = []  # when each word was there
        self._valid: list[int] = []  # and when it had been checked
        self.put: list[int] = []  # and when it went to its queue
        self._units, self._depth, self._queued = units, cfg.queue_depth, [0] * len(Unit)
        self.left: list[list[int]] = [[] for _ in Unit]

    def words(self) -> int:
        """Put all words that are there into their queues, as far as room is known. Returns the mask of the units whose
        queue was empty."""
        mask = 0
        while self._word():
            unit = self._units[len(self.put) - 1]
            if self._queued[unit] == len(self.left[unit]) + 1:
                mask |= 1 << unit
        return mask

    def _word(self) -> bool:
        """Put the next word into its queue; False where it has not arrived, or room is not known."""
        number = len(self.put)
        if number == len(self._units):
            return False
        if number == len(self._valid):
            through = (number // self._words + 1) * self._parts
            if self._promised < through:
                return False
            while self._arrived[0][0] < through:
                self._arrived.popleft()
            beats, last = self._arrived[0]
            # A word is checked after the one before has gone to its queue, and put together once that one is checked.
            before = self._valid[-1] - WORD_TO_QUEUE + self._parts if number else 0
            self._joined.append(max(before, last - (beats - through) + BEAT_TO_WORD))
            self._valid.append(max(self._joined[-1], self.put[-1] + 1 if number else 0) + WORD_TO_QUEUE)
        unit = self._units[number]
        full = self._queued[unit] - self._depth
        if full >= len(self.left[unit]):
            return False
        self.put.append(max(self._valid[number], self.left[unit][full] + 1) if full >= 0 else self._valid[number])
        self._queued[unit] += 1
        return True

    def next_ask(self) -> int:
        """When the next burst is asked for: as soon as the buffer has room for the longest one. NEVER if unknown."""
        if self._promised == self.beats:
            return NEVER
        gone = self._promised + self._longest - self._room
        ask = self._ask + ASK_TO_ASK_FETCH
        if gone <= 0:
            return ask
        word = -(-gone // self._parts) * self._words - 1
        return max(ask, self._joined[word]) if word < len(self._joined) else NEVER

    def burst(self, ask: int) -> None:
        """Read a burst. Where LOAD is still asking for a train, the bursts that it has outstanding come first, and
        those that follow are later by this one."""
        beats = min(self.beats - self._promised, self._longest - (self._place + self._promised) % self._longest)
        channel, load = self._channel, self._load
        slots = round(beats * channel.beat)
        self._ask = ask
        self._promised += beats
        first = ask + self._lead
        if ask < load.asked:  # between bursts of a train
            queued = ask + ASK_TO_ADDRESS_FETCH + load.outstanding * load.burst
            first = channel.after(max(first, min(channel.next, queued)), 0)
            channel.next = channel.after(max(first, channel.next), slots)
            load.delay(slots)
        else:
            first = channel.after(max(first, channel.next, channel.ends[0] + self._turn), 0)
            channel.next = channel.after(first, slots)
        last = channel.after(first, slots - 1)
        channel.ends.append(last)
        self._arrived.append((self._promised, last))


class _Train(NamedTuple):
    """Entries that come one after the other: the first in cycle `first`, `entries` in all, each `period` later."""

    first: int
    period: int
    entries: int

    @property
    def last(self) -> int:
        return self.first + (self.entries - 1) * self.period

    def after(self, entries: int) -> _Train:
        """Without its first entries."""
        return _Train(self.first + entries * self.period, self.period, self.entries - entries)

    def only(self, entries: int) -> _Train:
        """Its first entries."""
        return self._replace(entries=entries)

    def through(self, cycle: int) -> int:
        """How many come until `cycle`."""
        return max(0, min(self.entries, (cycle - self.first) // self.period + 1))


class _Stalls:
    """When what is in front of rescale_add moves on: in every cycle, but for those in which a residual is added to the
    entry before, one part after the other.

    A move is a cycle in which it does, by its number. An entry reaches rescale_add a fixed number of moves after its
    read, and holds up the next one.
    """

    def __init__(self, cycles: int) -> None:
        self._cycles = cycles  # for which an entry holds up the next move
        self._past = 0  # cycles lost before the first move of any train
        self._trains: deque[_Train] = deque()  # of entries with a residual, by the moves that they hold up

    def lose(self, cycles: int) -> None:
        """All moves that are to come are later."""
        self._past += cycles

    def hold(self, train: _Train) -> None:
        if self._cycles:
            self._trains.append(train)

    def cycle(self, move: int) -> int:
        """When `move` is."""
        return move + self._past + self._cycles * sum(train.through(move) for train in self._trains)

    def move(self, cycle: int) -> int:
        """The first move in `cycle` or later; no one asks for an earlier one after that."""
        low = high = cycle - self._past
        if self._trains:
            low -= self._cycles * sum(train.entries for train in self._trains)
        while low < high:
            middle = (low + high) // 2
            if self.cycle(middle) < cycle:
                low = middle + 1
            else:
                high = middle
        while self._trains and self._trains[0].last < low:
            self._past += self._cycles * self._trains.popleft().entries
        return low


class _Acc:
    """The accumulators: two banks, each with a read port and a write port that are GEMM's before they are VECTOR's."""

    def __init__(self) -> None:
        self._reads, self._writes = (_Port(), _Port()), (_Port(), _Port())

    def gemm(self, work: _Work, reads: _Train, writes: _Train) -> None:
        if work.reads:
            self._take(self._reads, work.read_bank, work.read_here, reads)
        self._take(self._writes, work.write_bank, work.write_here, writes)

    def _take(self, ports: tuple[_Port, _Port], bank: int, here: int, train: _Train) -> None:
        ports[bank].take(train._replace(entries=here))
        if here < train.entries:
            ports[1 - bank].take(train.after(here))

    def forget(self, cycle: int) -> None:
        for port in (*self._reads, *self._writes):
            port.forget(cycle)

    def vector_reads(self, work: _Work, trains: list[_Train], stalls: Callable[[int], int]) -> int:
        """By how much the last of VECTOR's reads is later than it wants to be; see `_Port.served`."""
        here = work.read_here * (work.steps // work.outputs)
        return self._late(self._reads, work.read_bank, here, trains, stalls)

    def vector_writes(self, work: _Work, train: _Train) -> int:
        return self._late(self._writes, work.write_bank, work.write_here, [train], lambda entries: 0)

    def _late(
        self, ports: tuple[_Port, _Port], bank: int, here: int, trains: list[_Train], stalls: Callable[[int], int]
    ) -> int:
        late = 0
        for train in trains:
            before = max(0, min(here, train.entries))
            for port, part in ((ports[bank], train.only(before)), (ports[1 - bank], train.after(before))):
                if part.entries:
                    wanted = part._replace(first=part.first + late)
                    late += port.served(wanted, stalls) - wanted.last
            here -= train.entries
        return late


class _Gemm:
    """One tile operation a cycle, across instructions."""

    def __init__(self, cfg: Config, acc: _Acc) -> None:
        self._stages = GEMM_STAGES + cfg.block_in.bit_length() - 1
        self._acc = acc
        self.free = 0  # when the next instruction may start

    def run(self, ready: int, work: _Work) -> tuple[int, int]:
        start = max(ready, self.free)
        self.free = start + work.steps
        end = self.free + self._stages
        each = work.steps // work.outputs
        writes = _Train(end - WRITE_TO_END - (work.outputs - 1) * each, each, work.outputs)
        self._acc.gemm(work, writes._replace(first=writes.first - READ_TO_WRITE), writes)
        return start, end


class _Vector:
    """One entry of A a cycle; two instructions at most, and one only where it writes what the next one reads."""

    def __init__(self, cfg: Config, acc: _Acc) -> None:
        self._free, self._acc = 0, acc
        self._written = deque([-1] * UNDER_WAY, UNDER_WAY)
        self._feeds = 0  # what the last instruction writes
        self.held = 0  # cycles lost to GEMM
        self._to_acc = TAP_STAGES if cfg.taps else READ_STAGES  # from an entry's read to that of its accumulator
        self._to_add = VECTOR_STAGES - ADD_STAGES + self._to_acc
        self._stall = cfg.residual_cycles - 1
        self._stalls = _Stalls(self._stall)

    def run(self, ready: int, work: _Work) -> tuple[int, int, _Train]:
        """Start and end, and when entries are written."""
        start = self._start(ready, work)
        self._feeds = work.feeds
        stalls = self._stalls
        first = stalls.move(start + 1)
        each = work.steps // work.outputs
        adds = _Train(first + each - 1 + self._to_add, each, work.outputs)
        if work.residual:
            stalls.hold(adds)
        self._free = stalls.cycle(first + work.steps - 1)
        period = each + (self._stall if work.residual else 0)
        writes = _Train(stalls.cycle(adds.first) + ADD_STAGES, period, work.outputs)
        # Behind the last entry of the instruction before, in any case.
        late = max(self._late(work, start + 1, first, writes), self._written[-1] + 1 - writes.last)
        if late > 0:
            stalls.lose(late)
            writes = writes._replace(first=writes.first + late)
        self._written.append(writes.last)
        return start, writes.last + WRITE_TO_END, writes

    def _start(self, ready: int, work: _Work) -> int:
        return max(ready, self._free, self._written[-1 if self._feeds & work.reads else 0] + 1)

    def through(self, ready: int, work: _Work) -> int:
        """About when the next instruction would be through with acc, if GEMM did no more than is known; 0 if it does
        not use it."""
        start, acc, last = self._start(ready, work) + 1, self._acc, 0
        each = work.steps // work.outputs
        stalls = self._stall * work.outputs * work.residual
        if work.reads & IN_ACC:
            reads = _Train(start + self._to_acc, 1, work.steps)
            last = reads.last + acc.vector_reads(work, [reads], lambda entries: 0) + stalls
        if work.feeds & IN_ACC:
            writes = _Train(start + each + self._to_add + ADD_STAGES, each, work.outputs)
            last = max(last, writes.last + acc.vector_writes(work, writes) + stalls)
        return last

    def _late(self, work: _Work, now: int, first: int, writes: _Train) -> int:
        """By how many cycles the last entry is later than without GEMM. first: the move of the first read."""
        late, acc = 0, self._acc
        acc.forget(now)
        if work.reads & IN_ACC:
            stall = self._stall if work.residual else 0
            each = work.steps // work.outputs
            ahead = -(-(self._to_add - self._to_acc) // each)  # outputs read before the first one holds up others

            def stalls(entries: int) -> int:
                return stall * max(0, entries // each - ahead)

            late = acc.vector_reads(work, self._reads(work, first, work.steps), stalls)
            if late and work.steps > self._to_acc:  # some are between the two reads
                before = self._reads(work, first, work.steps - self._to_acc)
                free = max(self._free, before[-1].last + acc.vector_reads(work, before, stalls))
                self.held += free - self._free
                self._free = free
        if work.feeds & IN_ACC:
            wanted = writes._replace(first=writes.first + late)
            waits = acc.vector_writes(work, wanted)
            late += waits
            self._free += waits
            self.held += waits
        return late

    def _reads(self, work: _Work, first: int, steps: int) -> list[_Train]:
        """When the first reads of acc are wanted: faster before the first residual holds up those behind it."""
        begin, end = (self._stalls.cycle(first + self._to_acc + step) for step in (0, steps - 1))
        each = work.steps // work.outputs
        period = (each + self._stall) // each
        if not work.residual or period == 1:
            period = max(1, (end - begin) // max(1, steps - 1))
            return [_Train(end - (steps - 1) * period, period, steps)]
        fast = max(0, min(steps - 1, ((steps - 1) * period - (end - begin)) // (period - 1)))
        slow = steps - fast
        return [_Train(begin, 1, fast), _Train(end - (slow - 1) * period, period, slow)]


class _Port:
    """A port of a scratchpad that two parties share: the second has the cycles that the first leaves."""

    def __init__(self) -> None:
        self._taken: deque[_Train] = deque()

    def take(self, writes: _Train) -> None:
        self._taken.append(writes)

    def forget(self, cycle: int) -> None:
        """No one asks for a cycle before `cycle` any more."""
        while self._taken and self._taken[0].last < cycle:
            self._taken.popleft()

    def served(self, wanted: _Train, stalls: Callable[[int], int] = lambda entries: 0) -> int:
        """When the last entry has its turn that wants it at these times, if each waits for the one before.

        stalls: cycles that as many entries in a row lose elsewhere.
        """
        last = self.left(wanted.last, 1)
        if self._taken:
            for start in (wanted.first, *self.starts(wanted.first, wanted.last)):
                entries = wanted.entries - wanted.through(start - 1)
                alone = self.left(start, 1) + entries - 1 + stalls(entries)
                last = max(last, alone, self.left(start, entries))
        return last

    def starts(self, first: int, last: int) -> list[int]:
        """When the first party begins to use it, between these cycles."""
        return [train.first for train in self._taken if first < train.first < last]

    def left(self, cycle: int, count: int) -> int:
        """The cycle that is the `count`-th left to the second party from `cycle` on."""
        for first, period, taken in self._taken:
            end = first + (taken - 1) * period
            if end < cycle or cycle + count <= first:
                continue
            if cycle < first:
                count -= first - cycle
                cycle = first
            # Of the cycles from `first` on, every one that is a multiple of `period` behind it is taken.
            gone = -(-(cycle - first) // period)
            free = (taken - 1) * (period - 1) - (cycle - first - gone)
            if count <= free:
                turns, rest = divmod(cycle - first - gone + count - 1, period - 1)
                return first + turns * period + 1 + rest
            count -= free
            cycle = end + 1
        return cycle + count - 1


class _Listing:
    """The side of LOAD and STORE that accepts instructions and lists their rows for an engine. One instruction may wait
    while the rows of the one before are listed."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._begun = 0  # when the last instruction left the place where it waits
        self._listed = 0  # when its last row had been listed
        self._asked = deque([-1] * AHEAD, AHEAD)  # when the last bursts of the last rows were asked for
        self._jobs = deque([-1] * IN_FLIGHT, IN_FLIGHT)  # when the last instructions' data began

    def start(self, ready: int, waiting: int = 0) -> int:
        """When the next instruction starts, of which as many wait before it that have not begun."""
        return max(ready, self._begun, self._jobs[waiting] + 1)

    def begin(self, start: int) -> None:
        """The rows of the instruction that started in cycle `start` are next."""
        self._begun = max(start + 1, self._listed)

    @property
    def ask(self) -> int:
        """When the first burst of the instruction that has begun may be asked for."""
        return self._begun + BEGIN_TO_ASK

    def end(self, job: int, rows: int, first: int, last: int, data_last: int) -> None:
        """first, last: beats of the train; data_last: the last step of the data's side."""
        self._jobs.append(job)
        listed = self._begun + rows
        if rows > PLACES:
            listed = max(listed, data_last + 1 - (PLACES + 1) * (data_last - job) // rows)
        asked, each = self._engine.asked, (last - first) // rows
        ahead = self._asked[rows - 1] if rows <= AHEAD else asked - AHEAD * each
        self._listed = max(listed, ahead + 1)
        for left in range(min(rows, AHEAD) - 1, -1, -1):
            self._asked.append(asked - left * each)


class _Lane:
    """Rows of DRAM through the engine to the writer, with ROOM beats between them.

    An instruction starts once there is a place for it, has its train sent (`open`), between whose bursts those of fetch
    may come, and ends (`close`).
    """

    def __init__(self, engine: _Engine, ports: list[_Port]) -> None:
        self._engine, self._listing, self._ports = engine, _Listing(engine), ports
        self._last = 0  # the writer's last step
        self._beats = 0  # of all instructions so far
        # How the writer took the last instructions' beats out of the engine: (beats before, beats, from, to).
        self._taken: deque[tuple[int, int, int, int]] = deque([(0, 0, 0, 0)], 2 * IN_FLIGHT)
        self._started: deque[tuple[_Work, int]] = deque()  # instructions that have started, and when
        self._first = 0  # beat of the train that is open
        self.turns = -1  # bursts of fetch that may still come between those of the open train; -1: none is open

    @property
    def port(self) -> int:
        """The port that the instruction whose train is open shares with VECTOR."""
        return self._started[0][0].port

    @property
    def full(self) -> bool:
        """Whether it is not known when one more instruction may start."""
        return len(self._started) == 2

    def start(self, work: _Work, ready: int) -> int:
        """Start an instruction in cycle `ready` or later; returns when."""
        start = self._listing.start(ready, len(self._started))
        self._started.append((work, start))
        if len(self._started) == 1:
            self._listing.begin(start)
        return start

    def ask(self) -> int:
        """When the first burst of the next train is asked for."""
        if not self._started:
            return NEVER
        work, _ = self._started[0]
        return max(self._listing.ask, self._engine.next_ask, self._room(min(work.beats // work.bursts, MAX_BURST)))

    def open(self, ask: int) -> None:
        work, _ = self._started[0]
        self._first, _ = self._engine.train(ask, work.bursts, round(work.beats * self._engine.channel.beat))
        self._engine.disturb(self._first)
        self.turns = work.bursts

    def close(self) -> tuple[_Work, int]:
        """The instruction whose train was open, and its end."""
        work, start = self._started.popleft()
        steps, lead, trail, beats, bursts = work.steps, work.lead, work.trail, work.beats, work.bursts
        first, last = self._first, self._engine.ends[-1]
        job = max(start + 1, self._last - 1)
        begin = max(start + START_TO_STEP, self._last + 1)
        end = self._written(work, begin, first + BEAT_TO_STEP, last + BEAT_TO_STEP)
        self._hold_back(end - trail, steps - lead - trail, work.rows, bursts, beats)
        self._taken.append((self._beats, beats, first + 2, max(last, end - trail - 2)))
        self._beats += beats
        self._last = end
        self._listing.end(job, work.rows, first, last, end)
        if self._started:
            self._listing.begin(self._started[0][1])
        self.turns = -1
        return work, end + STEP_TO_END

    def _written(self, work: _Work, begin: int, first: int, last: int) -> int:
        """The writer's last step, where it may take the first one in cycle `begin`, data in cycle `first` and the last
        of it in `last`. A step that finds no data waits for it, one that finds the port taken waits, too."""
        data = work.steps - work.lead - work.trail
        behind = self._behind(data, work.bursts, work.beats)
        waits = [(begin, work.steps), (first, work.steps - work.lead), (last, 1 + work.trail + behind)]
        if not work.port:
            return max(cycle + left - 1 for cycle, left in waits)
        # A step is in front of the port in the next cycle.
        port = self._ports[work.port]
        port.forget(begin + 1)
        for start in port.starts(first + 1, last + 1):
            arrived = data * (start - 1 - first) // (last - first + 1)
            waits.append((start - 1, work.steps - work.lead - arrived))
        return max(port.left(cycle + 1, left) for cycle, left in waits) - 1

    def _behind(self, steps: int, bursts: int, beats: int) -> int:
        """Steps by which the writer is behind when the last bunch of a train has come, as far as it began with that."""
        if steps <= beats:
            return 0
        bunch = (bursts - 1) % self._engine.outstanding + 1 if self._engine.waits(bursts, beats) else 1
        return (steps - beats) * bunch // bursts

    def _room(self, beats: int) -> int:
        """When the engine has room for a burst of `beats`."""
        wanted = self._beats + beats - ROOM
        for before, count, begin, end in reversed(self._taken):
            if before < wanted or not before:
                return begin + (end - begin) * max(0, wanted - before) // max(1, count) + 2 if wanted > 0 else 0
        return 0

    def _hold_back(self, end: int, steps: int, rows: int, bursts: int, beats: int) -> None:
        """Where the writer is slower than memory, the engine asks for its last burst when that has room."""
        ahead = min(ROOM, PLACES * beats // rows)
        if beats > ahead:
            engine, burst = self._engine, beats // bursts
            last = end - steps * ahead // beats + engine.lead + burst
            if last > engine.ends[-1]:
                engine.delay(last - engine.ends[-1])
                engine.channel.next = max(engine.channel.next, last + 1)


class _Load:
    """Hands instructions in order to lanes that work side by side, and tells their ends in that order.

    An instruction passes its gate (`accept`) and starts once its lane has a place for it.
    """

    def __init__(self, engines: Sequence[_Engine], ports: list[_Port]) -> None:
        self.lanes = [_Lane(engine, ports) for engine in engines]
        self._issued: deque[tuple[_Work, int]] = deque()  # instructions behind the gate, and when they may start
        self._free = 0  # when the next one may start
        self._untold: deque[_Work] = deque()  # those that have started, and whose end is not known
        self._ended: list[deque[int]] = [deque() for _ in engines]  # of each lane, when the first of those ended
        self._told = deque([-1] * UNTOLD, UNTOLD)  # the last ends

    @property
    def full(self) -> bool:
        """Whether one more instruction would have to wait for the start of one that is not known."""
        return len(self._issued) >= ISSUE

    def accept(self, work: _Work, ready: int) -> None:
        self._issued.append((work, ready))

    def start(self) -> tuple[_Work, int] | None:
        """The next instruction to start, and when; None where that is not known."""
        waiting = len(self._untold)
        if not self._issued or waiting == UNTOLD or self.lanes[self._issued[0][0].lane].full:
            return None
        work, ready = self._issued.popleft()
        start = self.lanes[work.lane].start(work, max(ready, self._free, self._told[waiting]))
        self._free = start + 1
        self._untold.append(work)
        return work, start

    def end(self, lane: int, end: int) -> list[tuple[_Work, int]]:
        """The oldest instruction of a lane is at its end: the instructions whose ends can now be told, and when."""
        self._ended[lane].append(end)
        told = []
        while self._untold and self._ended[self._untold[0].lane]:
            work = self._untold.popleft()
            self._told.append(max(self._ended[work.lane].popleft(), self._told[-1] + 1))
            told.append((work, self._told[-1]))
        return told


class _Store:
    """Units from `out`, packed into beats, and their responses."""

    def __init__(self, engine: _Engine, reads: _Engine, response: int) -> None:
        self._engine, self._listing, self._response, self._reads = engine, _Listing(engine), response, reads
        self._last = 0  # the reader's last unit
        self._ends = deque([-1] * RESPONSES, RESPONSES)

    def run(self, ready: int, work: _Work) -> tuple[int, int]:
        steps, beats = work.steps, work.beats
        start = max(self._listing.start(ready), self._ends[0])
        self._listing.begin(start)
        units = -(-steps // beats)  # of a beat
        unit = max(start + START_TO_STEP, self._last + 1) + units - 1
        slots = max(round(beats * self._engine.channel.beat) + self._share(unit, beats), steps)
        ask = max(self._listing.ask, unit + UNIT_TO_BEAT - self._engine.lead)
        first, last = self._engine.train(ask, work.bursts, slots - units + 1, units - 1)
        self._listing.end(max(start + 1, self._last), work.rows, first, last, last)
        self._last = last - UNIT_TO_BEAT
        end = last + self._response + RESPONSE_TO_END
        self._ends.append(end)
        return start, end

    def _share(self, begin: int, beats: int) -> int:
        """Slots that LOAD takes from a STORE of `beats`, and that from LOAD, if they share the DRAM's time."""
        taken = round(beats * self._engine.channel.shared)
        if taken:
            self._reads.disturbed.append((begin, taken))
        return taken


class _Semaphore:
    """Tokens from one unit to another: when they came, and when they were taken."""

    def __init__(self, bits: int) -> None:
        self._most = (1 << bits) - 1
        self.posts: deque[int] = deque()  # when the tokens came that have not been taken
        self._takes: deque[int] = deque([-1] * self._most)  # when the places that have not been reserved became free

    def has_room(self) -> bool:
        return bool(self._takes)

    def take(self, cycle: int) -> None:
        self._takes.append(cycle)

    @property
    def room(self) -> int:
        """When there is room for one more token, if `has_room`."""
        return self._takes[0] + 1

    def reserve(self) -> None:
        self._takes.popleft()


class _Work(NamedTuple):
    """One instruction: its number and its demand."""

    number: int
    unit: int
    wait: int
    post: int
    steps: int
    lead: int
    trail: int
    rows: int
    bursts: int
    beats: int
    lane: int
    outputs: int
    residual: int
    reads: int
    feeds: int
    port: int
    read_bank: int
    read_here: int
    write_bank: int
    write_here: int


_LOAD, _GEMM, _VECTOR, _STORE = map(int, Unit)  # an IntEnum takes its time to compare


class _Machine:
    """All parts, and the instructions that go through them.

    Whatever does not depend on the bursts of LOAD that are under way is found first: so the bursts of fetch between
    them are known when they end. But an instruction of VECTOR that uses the accumulators is put off while LOAD may let
    GEMM come in its way.
    """

    def __init__(self, cfg: Config, wanted: Demand, memory: MemoryModel, address: int) -> None:
        self._wanted, self._count = wanted, len(wanted.unit)
        reads, writes = [_Channel(cfg, memory) for _ in range(cfg.ports)], _Channel(cfg, memory)
        window = min(OUTSTANDING, memory.outstanding)
        lead = ASK_TO_ADDRESS + memory.read_latency
        engines = [_Engine(channel, lead, END_TO_ASK + lead, window) for channel in reads]
        self._read = engines[0]
        write = _Engine(writes, ASK_TO_ADDRESS + 1, memory.write_latency + END_TO_ASK + ASK_TO_ADDRESS + 1, window)
        self._fetch = _Fetch(cfg, memory, self._read, wanted.unit.tolist(), address)
        acc = _Acc()
        self._ports = [_Port() for _ in range(VIN_PORT + 1)]
        self._load, self._gemm, self._vector = _Load(engines, self._ports), _Gemm(cfg, acc), _Vector(cfg, acc)
        self._held = cfg.residual_cycles - 1
        self._store = _Store(write, self._read, memory.write_latency)
        self._semaphores = {(a, b): _Semaphore(cfg.token_bits) for a in Unit for b in Unit if a != b}
        self._takes, self._posts = self._masks()
        self._queues = self._works()
        self._issued = [deque([-1] * ISSUE, ISSUE) for _ in Unit]  # when the last instructions of each unit started
        self._waited = [0] * len(Unit)
        self._starts, self._ends = [0] * self._count, [0] * self._count
        self._lane_ends = [0] * self._count  # of LOAD, before they were told
        self._awake = 0  # mask of the units whose next instruction may pass its gate
        self._until = NEVER  # when VECTOR's instruction that is put off would be through with acc; NEVER: none is
        self._settled = -1  # the one that need not be put off any more

    def _works(self) -> list[deque[_Work]]:
        """The instructions of each unit."""
        w = self._wanted
        columns = [getattr(w, name) for name in _Work._fields[1:]]
        queues: list[deque[_Work]] = [deque() for _ in Unit]
        for work in map(_Work, range(self._count), *(column.tolist() for column in columns)):
            queues[work.unit].append(work)
        return queues

    def run(self) -> Timing:
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
        for lane in others:
            asks = lane.ask()
            if asks != NEVER:
                lane.open(asks)
                self._close(lane)
                return True
        fetch_asks = fetch.next_ask()
        if first.turns >= 0:
            if first.turns and fetch_asks < self._read.asked:
                first.turns -= 1
                fetch.burst(fetch_asks)
            elif until < NEVER and (self._read.ends[-1] >= until or first.port & self._queues[_VECTOR][0].port):
                return False
            else:
                self._close(first)
            return True
        load_asks = first.ask()
        if min(fetch_asks, load_asks) >= until:
            return False
        if fetch_asks < load_asks:
            fetch.burst(fetch_asks)
        else:
            first.open(load_asks)
        return True

    def _close(self, lane: _Lane) -> None:
        """End the instruction whose train is open in a lane of LOAD."""
        work, end = lane.close()
        self._lane_ends[work.number] = end
        for told in self._load.end(work.lane, end):
            self._end(*told)
        self._awake |= 1 << _LOAD

    def _gemm_first(self, work: _Work, ready: int) -> bool:
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
            if work.port:
                self._ports[work.port].take(writes)
        else:
            start, end = self._store.run(ready + 1, work)
        self._starts[work.number] = start
        self._issued[unit].append(start)
        self._end(work, end)
        return True

    def _end(self, work: _Work, end: int) -> None:
        self._ends[work.number] = end
        for semaphore in self._posts[work.unit][work.post]:
            semaphore.posts.append(end)
        self._awake |= work.post

    def _masks(self) -> tuple[list[list[list[_Semaphore]]], list[list[list[_Semaphore]]]]:
        """For each unit and mask the semaphores to take from, and those to post to."""
        masks = range(1 << len(Unit))
        takes = [[[self._semaphores[b, a] for b in Unit if b != a and m >> b & 1] for m in masks] for a in Unit]
        posts = [[[self._semaphores[a, b] for b in Unit if b != a and m >> b & 1] for m in masks] for a in Unit]
        return takes, posts

    def _timing(self, start: NDArray[np.int64], end: NDArray[np.int64], waited: Sequence[int]) -> Timing:
        w = self._wanted
        cycles = int(end.max()) + END_TO_DONE
        until = np.where(w.unit == Unit.LOAD, self._lane_ends, end)
        read = int(w.beats[w.unit == Unit.LOAD].sum()) + self._fetch.beats
        values = {"cycles": cycles, "read_beats": read, "write_beats": int(w.beats[w.unit == Unit.STORE].sum())}
        for unit in Unit:
            own = w.unit == unit
            busy = int((w.steps + self._held * w.outputs * w.residual)[own].sum())
            values[f"{unit.name.lower()}_busy"] = busy
            values[f"{unit.name.lower()}_wait_token"] = waited[unit]
            held = self._vector.held if unit == Unit.VECTOR else 0
            for lane in range(len(self._load.lanes)) if unit in (Unit.LOAD, Unit.STORE) else ():
                mine = own & (w.lane == lane)
                held += max(0, _covered(start[mine], until[mine]) - int(w.steps[mine].sum()))
            values[f"{unit.name.lower()}_wait_memory"] = held
        return Timing(cycles, w.unit, start, end, {name: values[name] for name in COUNTERS})


def _covered(start: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """Cycles in which at least one of some instructions, in order, is under way."""
    if not len(start):
        return 0
    before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
    return int((end - np.maximum(start + 1, before)).clip(0).sum())
