"""Timing of LOAD and STORE: rows are listed, requested from memory, and moved to or from a scratchpad step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import (
    EXPAND_STAGES,
    ISSUE_DEPTH,
    MAX_BURST,
    MAX_IN_FLIGHT,
    MAX_UNANSWERED,
    MAX_UNRETIRED,
    PREFETCH_ROWS,
    READ_BUFFER_BEATS,
    ROW_FIFO_DEPTH,
)
from celosia.sim.timing.demand import BOTH_PORTS, ONE_PORT
from celosia.sim.timing.latency import (
    BEAT_TO_STEP,
    BEGIN_TO_ASK,
    RESPONSE_TO_END,
    START_TO_STEP,
    STEP_TO_END,
    UNIT_TO_BEAT,
)
from celosia.sim.timing.memory_timing import ReadBursts, WriteBursts
from celosia.sim.timing.ports import Port
from celosia.sim.timing.work import NEVER, Work


class BufferDrain(NamedTuple):
    """Cycles in which the writer takes the beats of one instruction from the engine's buffer.

    beats_before: beats of all instructions before it.
    """

    beats_before: int
    beats: int
    first_cycle: int
    last_cycle: int


class RowLister:
    """Front end of LOAD and STORE: accepts instructions, and lists their rows for the engine that requests bursts.

    One instruction may wait while the rows of the one before are listed. The row queue has a limited depth, so that
    listing waits for the engine.
    """

    def __init__(self, engine: WriteBursts | ReadBursts) -> None:
        self._engine = engine
        self._begun = 0  # cycle in which the listing of the last instruction's rows began
        self._listed = 0  # cycle in which the listing ended
        self._last_asks = deque([-1] * PREFETCH_ROWS, PREFETCH_ROWS)  # cycles of the last requests for the last rows
        self._data_starts = deque(
            [-1] * MAX_IN_FLIGHT, MAX_IN_FLIGHT
        )  # cycles in which the last instructions' data began

    def next_start(self, ready: int, waiting: int = 0) -> int:
        """Return the start cycle of the next instruction, `ready` or later.

        waiting: instructions that have started before it, and whose end is not known yet.
        """
        return max(ready, self._begun + 1, self._data_starts[waiting] + 1)

    def begin(self, start: int) -> None:
        """Begin to list the rows of the instruction that starts in cycle `start`."""
        self._begun = max(start + 1, self._listed)

    @property
    def first_ask(self) -> int:
        """First cycle in which the first burst of the instruction whose rows are being listed may be requested."""
        return self._begun + BEGIN_TO_ASK

    def end(self, data_start: int, rows: int, first: int, last: int, data_last: int) -> None:
        """Record the end of an instruction of `rows` rows, from which the end of their listing follows.

        data_start, data_last: cycles of the first and last step at the scratchpad. first, last: cycles of the first and
        last beat of its train.
        """
        self._data_starts.append(data_start)
        listed = self._begun + rows
        if rows > ROW_FIFO_DEPTH:
            listed = max(listed, data_last + 1 - (ROW_FIFO_DEPTH + 1) * (data_last - data_start) // rows)
        last_ask, row_cycles = self._engine.last_ask, (last - first) // rows
        prefetch_ask = self._last_asks[rows - 1] if rows <= PREFETCH_ROWS else last_ask - PREFETCH_ROWS * row_cycles
        self._listed = max(listed, prefetch_ask + 1)
        for rows_left in range(min(rows, PREFETCH_ROWS) - 1, -1, -1):
            self._last_asks.append(last_ask - rows_left * row_cycles)


class LoadChannel:
    """One channel of LOAD: rows of DRAM go through the engine to the writer, with READ_BUFFER_BEATS between them.

    An instruction starts (`start`) once there is a place for it, begins its train of bursts (`open`), and ends with it
    (`close`). Bursts of fetch may come between those of an open train. step_to_end: cycles from the last write to the
    scratchpad to the end.
    """

    def __init__(self, engine: ReadBursts, ports: list[Port], step_to_end: int) -> None:
        self._engine, self._lister, self._ports, self._step_to_end = engine, RowLister(engine), ports, step_to_end
        self._last = 0  # the writer's last step
        self._beats = 0  # beats of all instructions so far
        self._drains = deque([BufferDrain(0, 0, 0, 0)], 2 * MAX_IN_FLIGHT)  # those of the last instructions
        self._started: deque[tuple[Work, int]] = deque()  # instructions that have started, and when
        self._first = 0  # beat of the train that is open
        self.is_open = False  # whether a train has begun and not ended

    @property
    def port(self) -> int:
        """Scratchpad port that VECTOR and the instruction with the open train share."""
        return self._started[0][0].port

    @property
    def full(self) -> bool:
        """Whether the start of one more instruction cannot be computed yet."""
        return len(self._started) == 2

    def next_start(self, ready: int) -> int:
        """Return the start cycle of the next instruction, `ready` or later."""
        return self._lister.next_start(ready, len(self._started))

    def start(self, work: Work, start: int) -> None:
        """Start an instruction in cycle `start`."""
        self._started.append((work, start))
        if len(self._started) == 1:
            self._lister.begin(start)

    def next_ask(self) -> int:
        """Return the cycle in which the first burst of the next train is requested; NEVER without an instruction."""
        if not self._started:
            return NEVER
        work, _ = self._started[0]
        return max(
            self._lister.first_ask, self._engine.next_ask, self._room_at(min(work.beats // work.bursts, MAX_BURST))
        )

    def open(self, ask: int) -> None:
        """Begin the train of the oldest instruction; its first burst is requested in cycle `ask`."""
        work, _ = self._started[0]
        self._first = self._engine.begin_train(ask, work.bursts, work.beats)
        self.is_open = True

    def close(self) -> tuple[Work, int]:
        """Place the rest of the open train. Return its instruction, and the cycle of its end here."""
        self._engine.finish_train()
        work, start = self._started.popleft()
        steps, lead, trail, beats, bursts = work.steps, work.lead, work.trail, work.beats, work.bursts
        first, last = self._first, self._engine.ends[-1]
        data_start = max(start + 1, self._last - 1)
        begin = max(start + START_TO_STEP, self._last + 1)
        end = self._last_step(work, begin, first + BEAT_TO_STEP, last + BEAT_TO_STEP)
        self._delay_last_burst(end - trail * (1 + work.padding_stall), steps - lead - trail, work.rows, bursts, beats)
        self._drains.append(BufferDrain(self._beats, beats, first + 2, max(last, end - trail - 2)))
        self._beats += beats
        self._last = end
        self._lister.end(data_start, work.rows, first, last, end)
        if self._started:
            self._lister.begin(self._started[0][1])
        self.is_open = False
        return work, end + self._step_to_end

    def _last_step(self, work: Work, begin: int, first: int, last: int) -> int:
        """Return the cycle of the writer's last step. A step waits while it has no data, or while the port is in use.

        begin: first possible cycle of the first step. first, last: cycles of the first and last data. The writer takes
        `lead` steps of padding, then data, then `trail` steps of padding, which take two cycles where padding stalls.
        """
        pad_cycles = 1 + work.padding_stall
        lead, trail = work.lead * pad_cycles, work.trail * pad_cycles
        cycles = work.steps + work.padding * work.padding_stall
        data = cycles - lead - trail
        # Each wait is (a cycle, the cycles that the writer needs at least from then on).
        waits = [(begin, cycles), (first, cycles - lead), *self._arrivals(work.bursts, data, trail)]
        if not work.port:
            return max(map(sum, waits)) - 1
        # A step asks for the port a cycle after it is taken.
        port = self._ports[work.port]
        port.forget(begin + 1)
        for start in port.reservation_starts(first + 1, last + 1):
            arrived = data * (start - 1 - first) // (last - first + 1)
            waits.append((start - 1, work.steps - work.lead - arrived))
        return max(port.free_cycle(cycle + 1, cycles_left) for cycle, cycles_left in waits) - 1

    def _arrivals(self, bursts: int, data: int, trail: int) -> list[tuple[int, int]]:
        """Return (cycle, cycles left for the writer) for the first and for the last beat of each burst remembered.

        data: cycles of the writer for data, spread evenly over the bursts. trail: its cycles of padding behind them.
        """
        engine = self._engine
        firsts, ends = list(engine.firsts)[-bursts:], list(engine.ends)[-bursts:]
        count, all_cycles = len(ends), data + trail
        written = [data * number // bursts for number in range(bursts - count, bursts + 1)]
        return [
            *((beat + BEAT_TO_STEP, all_cycles - written_before) for beat, written_before in zip(firsts, written)),
            *((beat + BEAT_TO_STEP, all_cycles + 1 - written_after) for beat, written_after in zip(ends, written[1:])),
        ]

    def _room_at(self, beats: int) -> int:
        """Return the first cycle in which the engine's buffer has room for a burst of `beats` beats.

        The model assumes that the writer empties the buffer at an even rate within an instruction.
        """
        needed = self._beats + beats - READ_BUFFER_BEATS
        if needed <= 0:
            return 0
        for before, count, begin, end in reversed(self._drains):
            if before < needed or not before:
                return begin + (end - begin) * max(0, needed - before) // max(1, count) + 2
        return 0

    def _delay_last_burst(self, end: int, steps: int, rows: int, bursts: int, beats: int) -> None:
        """Delay the engine's last burst until its buffer has room, where the writer is slower than memory.

        end, steps: cycle of the writer's last step for data, and the number of these steps. rows, bursts, beats: those
        of the instruction.
        """
        ahead = min(READ_BUFFER_BEATS, ROW_FIFO_DEPTH * beats // rows)
        if beats > ahead:
            engine, burst = self._engine, beats // bursts
            last = end - steps * ahead // beats + engine.lead + burst
            if last > engine.ends[-1]:
                engine.delay(last - engine.ends[-1])
                engine.channel.next = max(engine.channel.next, last + 1)


class Load:
    """LOAD: hands instructions in order to channels that work in parallel, and retires them in that order.

    An instruction passes its gate (`accept`) and starts once its channel has a place for it.
    """

    def __init__(self, cfg: Config, engines: Sequence[ReadBursts], ports: list[Port]) -> None:
        self.channels = [LoadChannel(engine, ports, STEP_TO_END) for engine in engines[:-1]]
        # Weights come through the last channel, and packed ones are expanded there.
        expand_stages = EXPAND_STAGES if cfg.weight_bits < 8 else 0
        self.channels.append(LoadChannel(engines[-1], ports, STEP_TO_END + expand_stages))
        self._issued: deque[tuple[Work, int]] = deque()  # instructions behind the gate, and when they may start
        self._free = 0  # cycle from which the next instruction may start
        self._unretired: deque[Work] = deque()  # instructions that have started and not retired
        self._ended: list[deque[int]] = [deque() for _ in engines]  # ends that wait to retire, by channel
        self._retired = deque([-1] * MAX_UNRETIRED, MAX_UNRETIRED)  # cycles in which the last instructions retired
        self._weight_ports = ONE_PORT  # through how many ports the last weights came; after a reset: one

    @property
    def full(self) -> bool:
        """Whether one more instruction would have to wait for a start that cannot be computed yet."""
        return len(self._issued) >= ISSUE_DEPTH

    def accept(self, work: Work, ready: int) -> None:
        """Queue an instruction that has passed its gate; it can start in cycle `ready` or later."""
        self._issued.append((work, ready))

    def start(self) -> tuple[Work, int] | None:
        """Start the next instruction in its channels. Return it and its start cycle.

        None where no start is possible, or its cycle is not known yet.
        """
        waiting = len(self._unretired)
        if not self._issued or waiting == MAX_UNRETIRED:
            return None
        work, ready = self._issued[0]
        # A change between weights from one port and from both waits until all instructions have ended.
        channels, changes_ports = self._channels_of(work), work.weight_ports not in (0, self._weight_ports)
        if changes_ports and waiting:
            return None
        for channel in channels:
            if channel.full:
                return None
        self._issued.popleft()
        start = max(ready, self._free, self._retired[-1] if changes_ports else self._retired[waiting])
        for channel in channels:  # a later start in one channel is possible in the others
            start = channel.next_start(start)
        for channel in channels:
            channel.start(work, start)
        self._weight_ports = work.weight_ports or self._weight_ports
        self._free = start + 1
        self._unretired.append(work)
        return work, start

    def end(self, channel: int, end: int) -> list[tuple[Work, int]]:
        """Record that the oldest instruction of a channel ends in cycle `end`.

        Returns the instructions that retire by this, in program order, with the cycles in which they do.
        """
        self._ended[channel].append(end)
        retired = []
        while self._unretired and all(ended := self._ends_of(self._unretired[0])):
            work = self._unretired.popleft()
            self._retired.append(max(*(ends.popleft() for ends in ended), self._retired[-1] + 1))
            retired.append((work, self._retired[-1]))
        return retired

    def _channels_of(self, work: Work) -> list[LoadChannel]:
        """Return the channels that execute an instruction: both for spread weights, else one."""
        return self.channels if work.weight_ports == BOTH_PORTS else [self.channels[work.load_channel]]

    def _ends_of(self, work: Work) -> list[deque[int]]:
        """Return, for each of `_channels_of`, the ends that wait to retire."""
        return self._ended if work.weight_ports == BOTH_PORTS else [self._ended[work.load_channel]]


class Store:
    """STORE: reads units from `out`, packs them into beats, and waits for responses.

    write_latency: cycles from the last beat of a burst to its response.
    """

    def __init__(self, engine: WriteBursts, write_latency: int) -> None:
        self._engine, self._lister, self._write_latency = engine, RowLister(engine), write_latency
        self._last = 0  # cycle in which the reader read its last unit
        self._ends = deque([-1] * MAX_UNANSWERED, MAX_UNANSWERED)  # ends of the last instructions

    def run(self, ready: int, work: Work) -> tuple[int, int]:
        """Return the start and end cycles of an instruction that is ready in cycle `ready`."""
        steps, beats = work.steps, work.beats
        start = max(self._lister.next_start(ready), self._ends[0])
        self._lister.begin(start)
        units = -(-steps // beats)  # units in a beat
        first_beat_read = max(start + START_TO_STEP, self._last + 1) + units - 1  # cycle in which its units are read
        channel = self._engine.channel
        # Reading units goes on while memory refreshes, as far as the packer has room.
        hidden = 0 if units == 1 else channel.refreshes(first_beat_read, first_beat_read + steps, 2 * units + 1)
        slots = max(beats, steps - hidden)
        ask = max(self._lister.first_ask, first_beat_read + UNIT_TO_BEAT - self._engine.lead)
        first, last = self._engine.send_train(ask, work.bursts, slots - units + 1, beats, units - 1)
        self._lister.end(max(start + 1, self._last), work.rows, first, last, last)
        self._last = last - UNIT_TO_BEAT
        end = last + self._write_latency + RESPONSE_TO_END
        self._ends.append(end)
        return start, end
