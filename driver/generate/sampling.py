"""Sample the next token from its logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import InputError


@dataclass
class Sampler:
    """Chooses the next token from logits.

    temperature: 0 takes the likeliest token, 1 draws by the model's own probabilities. top: draw among so many of the
    likeliest tokens only, 0 for all. Equal seeds give equal tokens. ValueError for negative arguments.
    """

    temperature: float = 0.0
    top: int = 0
    seed: int = 0
    _random: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < np.inf:
            raise ValueError(f"a temperature is 0 or more, not {self.temperature}")
        if self.top < 0:
            raise ValueError(f"top is 0 for all tokens, or how many, not {self.top}")
        self._random = np.random.default_rng(self.seed)

    def __call__(self, logits: NDArray[Any]) -> int:
        """Draw a token from float logits [vocabulary]. InputError where they are no numbers.

        >>> Sampler()(np.array([0.5, 2.0, 1.0]))
        1
        """
        if not self.temperature:
            return int(np.argmax(logits))
        scaled = np.asarray(logits, np.float64) / self.temperature
        if 0 < self.top < len(scaled):
            threshold = np.partition(scaled, -self.top)[-self.top]
            scaled = np.where(scaled >= threshold, scaled, -np.inf)
        if not np.isfinite(scaled.max()):
            raise InputError("the model's logits are no numbers, of which none can be drawn")
        probabilities = np.exp(scaled - scaled.max())
        return int(self._random.choice(len(probabilities), p=probabilities / probabilities.sum()))
