"""Ports of scratchpads that two parties share."""

from __future__ import annotations

from collections import deque

from celosia.sim.timing.work import Steps, Train, Work


class Port:
    """A port of a scratchpad that two parties share: the second has the cycles that the first leaves."""

    def __init__(self) -> None:
        self._taken: deque[Train] = deque()

    def take(self, writes: Train) -> None:
        """The first party uses it at these times."""
        self._taken.append(writes)

    def forget(self, cycle: int) -> None:
        """No one asks for a cycle before `cycle` any more."""
        while self._taken and self._taken[0].last < cycle:
            self._taken.popleft()

    def stepped(self, steps: Steps) -> int:
        """Cycle of the last of some steps that use the port, each at least as far behind the one before as planned."""
        if not steps.gap:
            return self.left(steps.first, steps.steps)
        number, cycle = 0, steps.first
        for train in self._taken:
            if train.last < cycle:
                continue
            # Those in front of the train are not held up.
            late = cycle - steps.cycle(number)
            outputs = max(0, train.first - cycle) // (steps.each + steps.gap)
            number = min(steps.steps - 1, number + outputs * steps.each)
            cycle = steps.cycle(number) + late
            while cycle <= train.last:
                free = self.left(cycle, 1)
                late, cycle = late + free - cycle, free
                if number == steps.steps - 1:
                    return cycle
                number += 1
                cycle = steps.cycle(number) + late
        return steps.last + cycle - steps.cycle(number)

    def starts(self, first: int, last: int) -> list[int]:
        """Cycles between `first` and `last` in which the first party begins to use the port."""
        return [train.first for train in self._taken if first < train.first < last]

    def left(self, cycle: int, count: int) -> int:
        """The cycle that is the `count`-th left to the second party from `cycle` on."""
        for first, period, entries in self._taken:
            end = first + (entries - 1) * period
            if end < cycle or cycle + count <= first:
                continue
            if cycle < first:
                count -= first - cycle
                cycle = first
            # Of the cycles from `first` on, every one that is a multiple of `period` behind it is taken.
            gone = -(-(cycle - first) // period)
            free = (entries - 1) * (period - 1) - (cycle - first - gone)
            if count <= free:
                turns, rest = divmod(cycle - first - gone + count - 1, period - 1)
                return first + turns * period + 1 + rest
            count -= free
            cycle = end + 1
        return cycle + count - 1


class Acc:
    """The accumulators: two banks, each with a read port and a write port that are GEMM's before they are VECTOR's."""

    def __init__(self) -> None:
        self._reads, self._writes = (Port(), Port()), (Port(), Port())

    def gemm(self, work: Work, reads: Train, writes: Train) -> None:
        """GEMM reads, where it adds, and writes the outputs of an instruction at these times."""
        if work.reads:
            self._take(self._reads, work.read_bank, work.read_here, reads)
        self._take(self._writes, work.write_bank, work.write_here, writes)

    def _take(self, ports: tuple[Port, Port], bank: int, here: int, train: Train) -> None:
        ports[bank].take(train._replace(entries=here))
        if here < train.entries:
            ports[1 - bank].take(train.after(here))

    def forget(self, cycle: int) -> None:
        """No one asks for a cycle before `cycle` any more."""
        for port in (*self._reads, *self._writes):
            port.forget(cycle)

    def vector_reads(self, work: Work, steps: Steps, output: int = 0) -> int:
        """Cycle of VECTOR's last read of acc from an output on, if its reads want to be at `steps`."""
        here = min(steps.steps, max(0, work.read_here - output) * steps.each)
        ports, last, late = (self._reads[work.read_bank], self._reads[1 - work.read_bank]), steps.last, 0
        for port, part in zip(ports, (steps.only(here), steps.after(here)), strict=True):
            if part.steps:
                last = port.stepped(part.later(late))
                late = last - part.last
        return last

    def vector_write(self, work: Work, output: int, cycle: int) -> int:
        """Cycle in which VECTOR writes an output that is ready in `cycle`."""
        bank = work.write_bank if output < work.write_here else 1 - work.write_bank
        return self._writes[bank].left(cycle, 1)
