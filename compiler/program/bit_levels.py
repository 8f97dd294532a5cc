"""Few-bit codes of tensors whose elements have only two to four distinct values, for bit-serial kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_LEVEL_BITS = 2
"""Limit of the bits of a code; with more bits, products of bytes are faster."""


@dataclass(frozen=True)
class BitLevels:
    """Evenly spaced values low + step * u, where 0 <= u < 2**bits.

    step is a power of two, so that kernels get the bits of u by shifts (ops/bit_serial.py).

    >>> BitLevels.of([-1, 1]), BitLevels.of([0, 3])
    (BitLevels(low=-1, step=2, bits=1), BitLevels(low=0, step=1, bits=2))
    """

    low: int
    step: int
    bits: int

    @staticmethod
    def of(values: Any) -> BitLevels | None:
        """Return the levels with the fewest bits that contain the integers `values`; None where they need too many."""
        distinct = np.unique(np.asarray(values))
        if not distinct.size or distinct.size > 1 << MAX_LEVEL_BITS:
            return None
        offsets = [int(value) - int(distinct[0]) for value in distinct]
        distance = reduce(gcd, offsets)
        step = max(distance & -distance, 1)
        bits = max((offsets[-1] // step).bit_length(), 1)
        return BitLevels(int(distinct[0]), step, bits) if bits <= MAX_LEVEL_BITS else None

    @property
    def values(self) -> list[int]:
        """All levels in ascending order."""
        return [self.low + self.step * u for u in range(1 << self.bits)]

    def place(self, value: int) -> int:
        """Return the code u of `value`. Raises ValueError where it is no level."""
        return self.values.index(value)

    def bit(self, values: NDArray[Any], position: int) -> NDArray[Any]:
        """Return bit `position` of the code of each value."""
        return (values.astype(np.int64) - self.low) // self.step >> position & 1

    def joined(self, *others: BitLevels | int) -> BitLevels | None:
        """Return the levels that contain these and all of `others`, levels or single values; None as for `of`."""
        more = (other if isinstance(other, int) else other.values for other in others)
        return BitLevels.of(np.concatenate([self.values, *map(np.atleast_1d, more)]))
