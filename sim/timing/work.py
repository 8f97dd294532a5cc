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
    stall: int
    rows: int
    bursts: int
    beats: int
    lane: int
    weights: int
    outputs: int
    residual: int
    alone: int
    alike: int
    trails: int
    finds: int
    reads: int
    feeds: int
    port: int
    read_bank: int
    read_here: int
    write_bank: int
    write_here: int


class Train(NamedTuple):
    """Entries that come one after the other: the first in cycle `first`, `entries` in all, each `period` later."""

    first: int
    period: int
    entries: int

    @property
    def last(self) -> int:
        """Cycle of the last entry."""
        return self.first + (self.entries - 1) * self.period

    def after(self, entries: int) -> Train:
        """Without its first entries."""
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
        """The first of them."""
        return self._replace(steps=steps)

    def after(self, steps: int) -> Steps:
        """Without the first of them, whole outputs."""
        return self._replace(first=self.cycle(steps), steps=self.steps - steps)

    def later(self, cycles: int) -> Steps:
        """All so much later."""
        return self._replace(first=self.first + cycles)
