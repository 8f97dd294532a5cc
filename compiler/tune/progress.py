"""Progress of a tuning, whatever it tunes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Progress:
    """trials: the most there may be. measured: trials that were run now; known: those that were in the records; failed:
    those without a result. left_out: devices by name, with the reason. started: time.perf_counter()."""

    trials: int
    measured: int = 0
    known: int = 0
    failed: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> int:
        """Trials that count against `trials`."""
        return self.measured + self.known

    @property
    def rate(self) -> float:
        """Trials a second that were measured."""
        return self.measured / max(1e-9, time.perf_counter() - self.started)
