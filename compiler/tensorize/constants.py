"""The constant part of the accelerator's DRAM."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ALIGN = 64
"""Bytes; addresses of blobs are multiples of it."""


@dataclass
class Constants:
    """The constant part of DRAM under construction, from address `base`; equal blobs are stored once."""

    base: int
    parts: list[NDArray[np.uint8]] = field(default_factory=list)
    size: int = 0
    known: dict[bytes, int] = field(default_factory=dict)

    def place(self, blob: NDArray[np.uint8]) -> int:
        """DRAM address of `blob`, a multiple of ALIGN."""
        key = blob.tobytes()
        if key not in self.known:
            self.known[key] = self.base + self.size
            padded = np.zeros(-(-len(blob) // ALIGN) * ALIGN, np.uint8)
            padded[: len(blob)] = blob
            self.parts.append(padded)
            self.size += len(padded)
        return self.known[key]

    def data(self) -> NDArray[np.uint8]:
        """All bytes, from `base` on."""
        return np.concatenate([*self.parts, np.zeros(0, np.uint8)])
