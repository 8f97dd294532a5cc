"""LOAD and STORE: rows listed, asked for, and taken or given unit by unit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

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
from celosia.sim.timing.demand import ALONE, SPREAD
from celosia.sim.timing.latency import (
    BEAT_TO_STEP,
    BEGIN_TO_ASK,
    RESPONSE_TO_END,
    START_TO_STEP,
    STEP_TO_END,
    UNIT_TO_BEAT,
)
from celosia.sim.timing.memory import Engine, ReadBursts
from celosia.sim.timing.ports import Port
from celosia.sim.timing.work import NEVER, Work


class Listing:
    """The side of LOAD and STORE that accepts instructions and lists their rows for an engine. One instruction may wait
    while the rows of the one before are listed."""

    def __init__(self, engine: Engine | ReadBursts) -> None:
        self._engine = engine
        self._begun = 0  # when the last instruction left the place where it waits
        self._listed = 0  # when its last row had been listed
        self._asked = deque([-1] * PREFETCH_ROWS, PREFETCH_ROWS)  # when the last bursts of the last rows were asked for
        self._jobs = deque([-1] * MAX_IN_FLIGHT, MAX_IN_FLIGHT)  # when the last instructions' data began

    def start(self, ready: int, waiting: int = 0) -> int:
        """When the next instruction starts, of which as many wait before it that have not begun."""
        return max(ready, self._begun + 1, self._jobs[waiting] + 1)

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
        if rows > ROW_FIFO_DEPTH:
            listed = max(listed, data_last + 1 - (ROW_FIFO_DEPTH + 1) * (data_last - job) // rows)
        asked, each = self._engine.asked, (last - first) // rows
        ahead = self._asked[rows - 1] if rows <= PREFETCH_ROWS else asked - PREFETCH_ROWS * each
        self._listed = max(listed, ahead + 1)
        for left in range(min(rows, PREFETCH_ROWS) - 1, -1, -1):
            self._asked.append(asked - left * each)


class Lane:
    """Rows of DRAM through the engine to the writer, with ROOM beats between them.

    An instruction starts once there is a place for it, begins its train (`open`), between whose bursts those of fetch
    may come, and ends (`close`).
    """

    def __init__(self, engine: ReadBursts, ports: list[Port], step_to_end: int) -> None:
        self._engine, self._listing, self._ports, self._step_to_end = engine, Listing(engine), ports, step_to_end
        self._last = 0  # the writer's last step
        self._beats = 0  # of all instructions so far
        # How the writer took the last instructions' beats out of the engine: (beats before, beats, from, to).
        self._taken: deque[tuple[int, int, int, int]] = deque([(0, 0, 0, 0)], 2 * MAX_IN_FLIGHT)
        self._started: deque[tuple[Work, int]] = deque()  # instructions that have started, and when
        self._first = 0  # beat of the train that is open
        self.is_open = False  # whether a train has begun and not ended

    @property
    def port(self) -> int:
        """The port that the instruction whose train is open shares with VECTOR."""
        return self._started[0][0].port

    @property
    def full(self) -> bool:
        """Whether it is not known when one more instruction may start."""
        return len(self._started) == 2

    def free(self, ready: int) -> int:
        """When the next instruction can start, in cycle `ready` or later."""
        return self._listing.start(ready, len(self._started))

    def start(self, work: Work, start: int) -> None:
        """Start an instruction in that cycle."""
        self._started.append((work, start))
        if len(self._started) == 1:
            self._listing.begin(start)

    def ask(self) -> int:
        """When the first burst of the next train is asked for."""
        if not self._started:
            return NEVER
        work, _ = self._started[0]
        return max(self._listing.ask, self._engine.next_ask, self._room(min(work.beats // work.bursts, MAX_BURST)))

    def open(self, ask: int) -> None:
        """Begin the train of the instruction that has begun, its first burst asked for in cycle `ask`."""
        work, _ = self._started[0]
        self._first = self._engine.begin(ask, work.bursts, work.beats)
        self.is_open = True

    def close(self) -> tuple[Work, int]:
        """End the train that is open. Return its instruction and that one's end."""
        self._engine.finish()
        work, start = self._started.popleft()
        steps, lead, trail, beats, bursts = work.steps, work.lead, work.trail, work.beats, work.bursts
        first, last = self._first, self._engine.ends[-1]
        job = max(start + 1, self._last - 1)
        begin = max(start + START_TO_STEP, self._last + 1)
        end = self._written(work, begin, first + BEAT_TO_STEP, last + BEAT_TO_STEP)
        self._hold_back(end - trail * (1 + work.stall), steps - lead - trail, work.rows, bursts, beats)
        self._taken.append((self._beats, beats, first + 2, max(last, end - trail - 2)))
        self._beats += beats
        self._last = end
        self._listing.end(job, work.rows, first, last, end)
        if self._started:
            self._listing.begin(self._started[0][1])
        self.is_open = False
        return work, end + self._step_to_end

    def _written(self, work: Work, begin: int, first: int, last: int) -> int:
        """The writer's last step, where it may take the first one in cycle `begin`, data in cycle `first` and the last
        of it in `last`. A step that finds no data waits for it, one that finds the port taken waits, too.

        Where padding stalls, the step is the one in the cycle before it is written."""
        lead, trail, stalled = (pads * (1 + work.stall) for pads in (work.lead, work.trail, work.padding))
        cycles = work.steps - work.padding + stalled
        data = cycles - lead - trail
        waits = [(begin, cycles), (first, cycles - lead), *self._arrivals(work.bursts, data, trail)]
        if not work.port:
            return max(cycle + left - 1 for cycle, left in waits)
        # A step is in front of the port in the next cycle.
        port = self._ports[work.port]
        port.forget(begin + 1)
        for start in port.starts(first + 1, last + 1):
            arrived = data * (start - 1 - first) // (last - first + 1)
            waits.append((start - 1, work.steps - work.lead - arrived))
        return max(port.left(cycle + 1, left) for cycle, left in waits) - 1

    def _arrivals(self, bursts: int, data: int, trail: int) -> Iterator[tuple[int, int]]:
        """When the first and last beat of each remembered burst may be written, and the writer's cycles from then on.
        Those of `data` are spread evenly over the bursts, and `trail` follows them."""
        engine = self._engine
        count = min(bursts, len(engine.ends))
        for number in range(bursts - count, bursts):
            place = number - bursts
            yield engine.firsts[place] + BEAT_TO_STEP, data - data * number // bursts + trail
            yield engine.ends[place] + BEAT_TO_STEP, 1 + data - data * (number + 1) // bursts + trail

    def _room(self, beats: int) -> int:
        """When the engine has room for a burst of `beats`."""
        wanted = self._beats + beats - READ_BUFFER_BEATS
        for before, count, begin, end in reversed(self._taken):
            if before < wanted or not before:
                return begin + (end - begin) * max(0, wanted - before) // max(1, count) + 2 if wanted > 0 else 0
        return 0

    def _hold_back(self, end: int, steps: int, rows: int, bursts: int, beats: int) -> None:
        """Where the writer is slower than memory, the engine asks for its last burst when that has room."""
        ahead = min(READ_BUFFER_BEATS, ROW_FIFO_DEPTH * beats // rows)
        if beats > ahead:
            engine, burst = self._engine, beats // bursts
            last = end - steps * ahead // beats + engine.lead + burst
            if last > engine.ends[-1]:
                engine.delay(last - engine.ends[-1])
                engine.channel.next = max(engine.channel.next, last + 1)


class Load:
    """Hands instructions in order to lanes that work side by side, and tells their ends in that order.

    An instruction passes its gate (`accept`) and starts once its lane has a place for it.
    """

    def __init__(self, cfg: Config, engines: Sequence[ReadBursts], ports: list[Port]) -> None:
        expands = [cfg.weight_bits < 8 and engine is engines[-1] for engine in engines]
        self.lanes = [Lane(e, ports, STEP_TO_END + EXPAND_STAGES * late) for e, late in zip(engines, expands)]
        self._issued: deque[tuple[Work, int]] = deque()  # instructions behind the gate, and when they may start
        self._free = 0  # when the next one may start
        self._untold: deque[Work] = deque()  # those that have started, and whose end is not known
        self._ended: list[deque[int]] = [deque() for _ in engines]  # of each lane, when the first of those ended
        self._told = deque([-1] * MAX_UNRETIRED, MAX_UNRETIRED)  # the last ends
        self._way = ALONE  # in which weights came last: that of the RTL's register after its reset

    @property
    def full(self) -> bool:
        """Whether one more instruction would have to wait for the start of one that is not known."""
        return len(self._issued) >= ISSUE_DEPTH

    def accept(self, work: Work, ready: int) -> None:
        """An instruction has passed its gate, and is there in cycle `ready`."""
        self._issued.append((work, ready))

    def start(self) -> tuple[Work, int] | None:
        """The next instruction to start, and when; None where that is not known."""
        waiting = len(self._untold)
        if not self._issued or waiting == MAX_UNRETIRED:
            return None
        work, ready = self._issued[0]
        lanes, changes = self._lanes_of(work), work.weights not in (0, self._way)
        if any(lane.full for lane in lanes) or (changes and waiting):  # which waits until all have ended
            return None
        self._issued.popleft()
        ready = max(ready, self._free, self._told[-1] if changes else self._told[waiting])
        start = max(lane.free(ready) for lane in lanes)
        for lane in lanes:
            lane.start(work, start)
        self._way = work.weights or self._way
        self._free = start + 1
        self._untold.append(work)
        return work, start

    def end(self, lane: int, end: int) -> list[tuple[Work, int]]:
        """The oldest instruction of a lane is at its end: the instructions whose ends can now be told, and when."""
        self._ended[lane].append(end)
        told = []
        while self._untold and all(ended := self._ends_of(self._untold[0])):
            work = self._untold.popleft()
            self._told.append(max(*(ends.popleft() for ends in ended), self._told[-1] + 1))
            told.append((work, self._told[-1]))
        return told

    def _lanes_of(self, work: Work) -> list[Lane]:
        return self.lanes if work.weights == SPREAD else [self.lanes[work.lane]]

    def _ends_of(self, work: Work) -> list[deque[int]]:
        return self._ended if work.weights == SPREAD else [self._ended[work.lane]]


class Store:
    """Units from `out`, packed into beats, and their responses."""

    def __init__(self, engine: Engine, response: int) -> None:
        self._engine, self._listing, self._response = engine, Listing(engine), response
        self._last = 0  # the reader's last unit
        self._ends = deque([-1] * MAX_UNANSWERED, MAX_UNANSWERED)

    def run(self, ready: int, work: Work) -> tuple[int, int]:
        """Start and end of an instruction that is there in cycle `ready`."""
        steps, beats = work.steps, work.beats
        start = max(self._listing.start(ready), self._ends[0])
        self._listing.begin(start)
        units = -(-steps // beats)  # of a beat
        unit = max(start + START_TO_STEP, self._last + 1) + units - 1
        channel = self._engine.channel
        hidden = 0 if units == 1 else channel.refreshes(unit, unit + steps, 2 * units + 1)
        slots = max(beats, steps - hidden)
        ask = max(self._listing.ask, unit + UNIT_TO_BEAT - self._engine.lead)
        first, last = self._engine.train(ask, work.bursts, slots - units + 1, beats, units - 1)
        self._listing.end(max(start + 1, self._last), work.rows, first, last, last)
        self._last = last - UNIT_TO_BEAT
        end = last + self._response + RESPONSE_TO_END
        self._ends.append(end)
        return start, end
