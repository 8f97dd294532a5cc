"""GEMM and VECTOR: what comes out of their pipelines when, and who waits for the accumulators."""

from __future__ import annotations

from collections import deque

from celosia.hw.config import Config
from celosia.hw.pipeline import ADD_STAGES, READ_STAGES, TAP_STAGES, UNDER_WAY, VECTOR_STAGES, array_stages
from celosia.sim.demand import IN_ACC
from celosia.sim.timing.latency import GEMM_STAGES, READ_TO_WRITE, WRITE_TO_END
from celosia.sim.timing.ports import Acc
from celosia.sim.timing.work import Train, Work


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


class Stalls:
    """When what is in front of rescale_add moves on: in every cycle, but for those in which a residual is added to the
    entry before, one part after the other.

    A move is a cycle in which it does, by its number. An entry reaches rescale_add a fixed number of moves after its
    read, and holds up the next one.
    """

    def __init__(self, cycles: int) -> None:
        self._cycles = cycles  # for which an entry holds up the next move
        self._past = 0  # cycles lost before the first move of any train
        self._trains: deque[Train] = deque()  # of entries with a residual, by the moves that they hold up

    def lose(self, cycles: int) -> None:
        """All moves that are to come are later."""
        self._past += cycles

    def hold(self, train: Train) -> None:
        """Entries with a residual come at these moves, and hold up those behind them."""
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


class Vector:
    """One entry of A a cycle; two instructions at most, and one only where it writes what the next one reads."""

    def __init__(self, cfg: Config, acc: Acc) -> None:
        self._free, self._acc = 0, acc
        self._written = deque([-1] * UNDER_WAY, UNDER_WAY)
        self._feeds = 0  # what the last instruction writes
        self.held = 0  # cycles lost to GEMM
        self._to_acc = TAP_STAGES if cfg.taps else READ_STAGES  # from an entry's read to that of its accumulator
        self._to_add = VECTOR_STAGES - ADD_STAGES + self._to_acc
        self._stall = cfg.residual_cycles - 1
        self._stalls = Stalls(self._stall)

    def run(self, ready: int, work: Work) -> tuple[int, int, Train]:
        """Start and end, and when entries are written."""
        start = self._start(ready, work)
        self._feeds = work.feeds
        stalls = self._stalls
        first = stalls.move(start + 1)
        each = work.steps // work.outputs
        adds = Train(first + each - 1 + self._to_add, each, work.outputs)
        if work.residual:
            stalls.hold(adds)
        self._free = stalls.cycle(first + work.steps - 1)
        period = each + (self._stall if work.residual else 0)
        writes = Train(stalls.cycle(adds.first) + ADD_STAGES, period, work.outputs)
        # Behind the last entry of the instruction before, in any case.
        late = max(self._late(work, start + 1, first, writes), self._written[-1] + 1 - writes.last)
        if late > 0:
            stalls.lose(late)
            writes = writes._replace(first=writes.first + late)
        self._written.append(writes.last)
        return start, writes.last + WRITE_TO_END, writes

    def _start(self, ready: int, work: Work) -> int:
        return max(ready, self._free, self._written[-1 if self._feeds & work.reads else 0] + 1)

    def through(self, ready: int, work: Work) -> int:
        """About when the next instruction would be through with acc, if GEMM did no more than is known; 0 if it does
        not use it."""
        start, acc, last = self._start(ready, work) + 1, self._acc, 0
        each = work.steps // work.outputs
        stalls = self._stall * work.outputs * work.residual
        if work.reads & IN_ACC:
            reads = Train(start + self._to_acc, 1, work.steps)
            last = reads.last + acc.vector_reads(work, [reads], lambda entries: 0) + stalls
        if work.feeds & IN_ACC:
            writes = Train(start + each + self._to_add + ADD_STAGES, each, work.outputs)
            last = max(last, writes.last + acc.vector_writes(work, writes) + stalls)
        return last

    def _late(self, work: Work, now: int, first: int, writes: Train) -> int:
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

    def _reads(self, work: Work, first: int, steps: int) -> list[Train]:
        """When the first reads of acc are wanted: faster before the first residual holds up those behind it."""
        begin, end = (self._stalls.cycle(first + self._to_acc + step) for step in (0, steps - 1))
        each = work.steps // work.outputs
        period = (each + self._stall) // each
        if not work.residual or period == 1:
            period = max(1, (end - begin) // max(1, steps - 1))
            return [Train(end - (steps - 1) * period, period, steps)]
        fast = max(0, min(steps - 1, ((steps - 1) * period - (end - begin)) // (period - 1)))
        slow = steps - fast
        return [Train(begin, 1, fast), Train(end - (slow - 1) * period, period, slow)]
