"""Timing of scratchpad ports that two parties share."""

from __future__ import annotations

from collections import deque

from celosia.sim.timing.work import Steps, Train, Work


class Port:
    """A port of a scratchpad that two parties share: the second party gets the cycles that the first one leaves."""

    def __init__(self) -> None:
        self._reserved: deque[Train] = deque()

    def reserve(self, writes: Train) -> None:
        """Reserve the port for the first party in these cycles."""
        self._reserved.append(writes)

    def forget(self, cycle: int) -> None:
        """Drop reservations before `cycle`, which nobody asks for any more."""
        while self._reserved and self._reserved[0].last < cycle:
            self._reserved.popleft()

    def last_step(self, steps: Steps) -> int:
        """Cycle of the last of some steps that use the port, each at least as far behind the one before as planned."""
        if not steps.gap:
            return self.free_cycle(steps.first, steps.steps)
        number, cycle = 0, steps.first
        for train in self._reserved:
            if train.last < cycle:
                continue
            # Steps before the train are not delayed.
            late = cycle - steps.cycle(number)
            outputs = max(0, train.first - cycle) // (steps.each + steps.gap)
            number = min(steps.steps - 1, number + outputs * steps.each)
            cycle = steps.cycle(number) + late
            while cycle <= train.last:
                free = self.free_cycle(cycle, 1)
                late, cycle = late + free - cycle, free
                if number == steps.steps - 1:
                    return cycle
                number += 1
                cycle = steps.cycle(number) + late
        return steps.last + cycle - steps.cycle(number)

    def starts(self, first: int, last: int) -> list[int]:
        """Cycles between `first` and `last` in which the first party begins to use the port."""
        return [train.first for train in self._reserved if first < train.first < last]

    def free_cycle(self, cycle: int, count: int) -> int:
        """Cycle of the `count`-th free slot for the second party from `cycle` on."""
        for first, period, entries in self._reserved:
            end = first + (entries - 1) * period
            if end < cycle or cycle + count <= first:
                continue
            if cycle < first:
                count -= first - cycle
                cycle = first
            # From `first` on, every `period`-th cycle is reserved.
            passed = -(-(cycle - first) // period)
            free = (entries - 1) * (period - 1) - (cycle - first - passed)
            if count <= free:
                turns, rest = divmod(cycle - first - passed + count - 1, period - 1)
                return first + turns * period + 1 + rest
            count -= free
            cycle = end + 1
        return cycle + count - 1


class Acc:
    """The accumulators: two banks, each with a read port and a write port, on which GEMM has priority over VECTOR."""

    def __init__(self) -> None:
        self._reads, self._writes = (Port(), Port()), (Port(), Port())

    def reserve_gemm(self, work: Work, reads: Train, writes: Train) -> None:
        """Reserve the writes of an instruction of GEMM, and its reads if it accumulates."""
        if work.shared_reads:
            self._reserve_in_banks(self._reads, work.read_bank, work.read_bank_outputs, reads)
        self._reserve_in_banks(self._writes, work.write_bank, work.write_bank_outputs, writes)

    def _reserve_in_banks(self, ports: tuple[Port, Port], bank: int, here: int, train: Train) -> None:
        """Reserve the first `here` entries of a train in `bank`, and the rest in the other bank."""
        ports[bank].reserve(train._replace(entries=here))
        if here < train.entries:
            ports[1 - bank].reserve(train.after(here))

    def forget(self, cycle: int) -> None:
        """Drop reservations before `cycle`, which nobody asks for any more."""
        for port in (*self._reads, *self._writes):
            port.forget(cycle)

    def last_vector_read(self, work: Work, steps: Steps, output: int = 0) -> int:
        """Return the cycle of VECTOR's last read of acc, from number `output` on, if it would read at `steps`."""
        here = min(steps.steps, max(0, work.read_bank_outputs - output) * steps.each)
        ports, last, late = (self._reads[work.read_bank], self._reads[1 - work.read_bank]), steps.last, 0
        for port, part in zip(ports, (steps.only(here), steps.after(here)), strict=True):
            if part.steps:
                last = port.last_step(part.later(late))
                late = last - part.last
        return last

    def vector_write_cycle(self, work: Work, output: int, cycle: int) -> int:
        """Return the cycle in which VECTOR writes output number `output` to acc, which is ready in `cycle`."""
        bank = work.write_bank if output < work.write_bank_outputs else 1 - work.write_bank
        return self._writes[bank].free_cycle(cycle, 1)
