"""At which addresses of DRAM the constants of a Program lie; the bytes of each are those of tensorize/pack.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.tensorize.pack import ALIGN


@dataclass
class Constants:
    """The part of DRAM that holds constants, under construction; equal blobs are stored once.

    Blobs lie in the order in which `place` gets them: that of their first use, as image.py lowers layers in order.
    base: the first address. parts: padded blobs in order. size: bytes so far. known: blob -> its address.
    """

    base: int
    parts: list[NDArray[np.uint8]] = field(default_factory=list)
    size: int = 0
    known: dict[bytes, int] = field(default_factory=dict)

    def place(self, blob: NDArray[np.uint8]) -> int:
        """Add `blob` unless an equal one is there, and return its DRAM address, a multiple of ALIGN."""
        key = blob.tobytes()
        if key not in self.known:
            self.known[key] = self.base + self.size
            padded = np.zeros(-(-len(blob) // ALIGN) * ALIGN, np.uint8)
            padded[: len(blob)] = blob
            self.parts.append(padded)
            self.size += len(padded)
        return self.known[key]

    def data(self) -> NDArray[np.uint8]:
        """Return all bytes, from address `base` on."""
        return np.concatenate([*self.parts, np.zeros(0, np.uint8)])
