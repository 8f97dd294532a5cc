"""Types that the models of the units share: an instruction with its demand, and cycles in which entries move."""

from __future__ import annotations

from typing import NamedTuple

NEVER = 1 << 62
"""Stands for a cycle that is never reached, or not known yet."""


class Work(NamedTuple):
    """One instruction: its number in the stream, and its row of the columns of `demand.Demand`."""

    number: int
    unit: int
    wait: int
    post: int
    steps: int
    lead: int
    trail: int
    padding: int
    padding_stall: int
    rows: int
    bursts: int
    beats: int
    load_channel: int
    weight_ports: int
    outputs: int
    residual: int
    softmax_entries: int
    like_last_softmax: int
    behind_softmax: int
    norm_cycles: int
    shared_reads: int
    shared_writes: int
    port: int
    read_bank: int
    read_bank_outputs: int
    write_bank: int
    write_bank_outputs: int


class RegularCycles(NamedTuple):
    """Cycles of entries at regular intervals: `entries` of them, the first in cycle `first`, then one each `period`."""

    first: int
    period: int
    entries: int

    @property
    def last(self) -> int:
        """Cycle of the last entry."""
        return self.first + (self.entries - 1) * self.period

    def without_first(self, entries: int) -> RegularCycles:
        """Return the cycles without those of the first `entries` entries."""
        return RegularCycles(self.first + entries * self.period, self.period, self.entries - entries)

    def only_first(self, entries: int) -> RegularCycles:
        """Return the cycles of the first `entries` entries."""
        return RegularCycles(self.first, self.period, entries)

    def delayed(self, cycles: int) -> RegularCycles:
        """Return the cycles if all entries move `cycles` cycles later."""
        return RegularCycles(self.first + cycles, self.period, self.entries)


class Steps(NamedTuple):
    """Cycles of the steps of a VECTOR: one a cycle from cycle `first` on, with a pause after each output.

    steps: number of steps. steps_per_output: steps of one output. gap: cycles of the pause.
    """

    first: int
    steps: int
    steps_per_output: int
    gap: int

    def cycle(self, step: int) -> int:
        """Return the cycle of step number `step`."""
        return self.first + step + step // self.steps_per_output * self.gap

    @property
    def last(self) -> int:
        """Cycle of the last step."""
        return self.cycle(self.steps - 1)

    def only_first(self, steps: int) -> Steps:
        """Return the first `steps` steps."""
        return Steps(self.first, steps, self.steps_per_output, self.gap)

    def without_first(self, steps: int) -> Steps:
        """Return the steps without the first `steps`, which must be whole outputs."""
        return Steps(self.cycle(steps), self.steps - steps, self.steps_per_output, self.gap)

    def delayed(self, cycles: int) -> Steps:
        """Return the same steps, `cycles` cycles later."""
        return Steps(self.first + cycles, self.steps, self.steps_per_output, self.gap)
