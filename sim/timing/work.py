"""Instructions as the machine model sees them, and the cycles in which their entries come."""

from __future__ import annotations

from typing import NamedTuple

NEVER = 1 << 62
"""A cycle that no run comes to."""


class Work(NamedTuple):
    """The number of an instruction, and its demand (see `demand.Demand`)."""

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


class Train(NamedTuple):
    """Entries at regular intervals: the first in cycle `first`, `entries` in all, each `period` later."""

    first: int
    period: int
    entries: int

    @property
    def last(self) -> int:
        """Cycle of the last entry."""
        return self.first + (self.entries - 1) * self.period

    def after(self, entries: int) -> Train:
        """Return the train without its first entries."""
        return Train(self.first + entries * self.period, self.period, self.entries - entries)


class Steps(NamedTuple):
    """Steps of VECTOR: the first in cycle `first`, one a cycle, but for `gap` cycles behind every `each` of them."""

    first: int
    steps: int
    each: int
    gap: int

    def cycle(self, step: int) -> int:
        """Cycle in which a step is taken."""
        return self.first + step + step // self.each * self.gap

    @property
    def last(self) -> int:
        """Cycle in which the last step is taken."""
        return self.cycle(self.steps - 1)

    def only(self, steps: int) -> Steps:
        """Return the first `steps` steps."""
        return self._replace(steps=steps)

    def after(self, steps: int) -> Steps:
        """Return the steps without the first `steps`, which are whole outputs."""
        return self._replace(first=self.cycle(steps), steps=self.steps - steps)

    def later(self, cycles: int) -> Steps:
        """Return the steps delayed by `cycles`."""
        return self._replace(first=self.first + cycles)
