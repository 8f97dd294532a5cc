"""Timing of scratchpad ports that two units share: which of them uses a port in a cycle."""

from __future__ import annotations

from collections import deque

from celosia.sim.timing.work import RegularCycles, Steps, Work


class Port:
    """A port of a scratchpad that two units share: one has priority, and the other gets the free cycles."""

    def __init__(self) -> None:
        self._reserved: deque[RegularCycles] = deque()

    def reserve(self, writes: RegularCycles) -> None:
        """Reserve the port in these cycles for the unit with priority."""
        self._reserved.append(writes)

    def forget(self, cycle: int) -> None:
        """Drop reservations before `cycle`, so that the lists stay short; callers only ask about later cycles."""
        while self._reserved and self._reserved[0].last < cycle:
            self._reserved.popleft()

    def last_step(self, steps: Steps) -> int:
        """Return the cycle in which the last of `steps` uses the port, if each waits for a free cycle.

        A delay moves all later steps: the distances between steps are at least the planned ones.
        """
        if not steps.gap:
            return self.free_cycle(steps.first, steps.steps)
        number, cycle = 0, steps.first  # the step that is placed next, and its cycle
        for cycles in self._reserved:
            if cycles.last < cycle:
                continue
            delay = cycle - steps.cycle(number)
            # Steps before these cycles are not delayed further.
            outputs = max(0, cycles.first - cycle) // (steps.steps_per_output + steps.gap)
            number = min(steps.steps - 1, number + outputs * steps.steps_per_output)
            cycle = steps.cycle(number) + delay
            while cycle <= cycles.last:
                free = self.free_cycle(cycle, 1)
                delay, cycle = delay + free - cycle, free
                if number == steps.steps - 1:
                    return cycle
                number += 1
                cycle = steps.cycle(number) + delay
        return steps.last + cycle - steps.cycle(number)

    def reservation_starts(self, first: int, last: int) -> list[int]:
        """Return the cycles between `first` and `last` in which reservations begin."""
        return [cycles.first for cycles in self._reserved if first < cycles.first < last]

    def free_cycle(self, cycle: int, count: int) -> int:
        """Return the cycle of the `count`-th free cycle from `cycle` on."""
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
        self._reads, self._writes = (Port(), Port()), (Port(), Port())  # a port of each bank

    def reserve_gemm(self, work: Work, reads: RegularCycles, writes: RegularCycles) -> None:
        """Reserve the cycles in which a GEMM writes acc, and those in which it reads acc if it accumulates."""
        if work.shared_reads:
            self._reserve_in_banks(self._reads, work.read_bank, work.read_bank_outputs, reads)
        self._reserve_in_banks(self._writes, work.write_bank, work.write_bank_outputs, writes)

    def _reserve_in_banks(self, ports: tuple[Port, Port], bank: int, bank_entries: int, cycles: RegularCycles) -> None:
        """Reserve the first `bank_entries` of these cycles in `bank`, and the rest in the other bank."""
        ports[bank].reserve(cycles.only_first(bank_entries))
        if bank_entries < cycles.entries:
            ports[1 - bank].reserve(cycles.without_first(bank_entries))

    def forget(self, cycle: int) -> None:
        """Drop reservations before `cycle`, which no later question concerns."""
        for port in (*self._reads, *self._writes):
            port.forget(cycle)

    def last_vector_read(self, work: Work, steps: Steps, output: int = 0) -> int:
        """Return the cycle of the last read of acc by a VECTOR that plans to read at `steps`, after waiting for GEMM.

        output: number of the output to which the first of these steps belongs.
        """
        bank_steps = (work.read_bank_outputs - output) * steps.steps_per_output
        if bank_steps >= steps.steps:
            return self._reads[work.read_bank].last_step(steps)
        if bank_steps <= 0:
            return self._reads[1 - work.read_bank].last_step(steps)
        ports, last, delay = (self._reads[work.read_bank], self._reads[1 - work.read_bank]), steps.last, 0
        for port, part in zip(ports, (steps.only_first(bank_steps), steps.without_first(bank_steps)), strict=True):
            last = port.last_step(part.delayed(delay))
            delay = last - part.last
        return last

    def vector_write_cycle(self, work: Work, output: int, cycle: int) -> int:
        """Return the cycle in which a VECTOR writes its output number `output`, ready in `cycle`, to acc."""
        bank = work.write_bank if output < work.write_bank_outputs else 1 - work.write_bank
        return self._writes[bank].free_cycle(cycle, 1)
