"""Progress of a tuning of layers or kernels."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Counts of trials of a tuning that is running.

    trials: limit of their number. measured: those that ran now. known: those that were in the records. failed: those
    without a cost. left_out: excluded devices by name, with the reason. started: time.perf_counter() at the beginning.
    """

    trials: int
    measured: int = 0
    known: int = 0
    failed: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> int:
        """Trials that count against the limit."""
        return self.measured + self.known

    @property
    def rate(self) -> float:
        """Measured trials a second."""
        return self.measured / max(1e-9, time.perf_counter() - self.started)
