"""Few values that the elements of a tensor have: what bits they take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_BITS = 2
"""Most bits of levels: products of more bits are those of bytes."""


@dataclass(frozen=True)
class BitLevels:
    """low + step * u, where 0 <= u < 2**bits; step is a power of two.

    >>> BitLevels.of([-1, 1]), BitLevels.of([0, 3])
    (BitLevels(low=-1, step=2, bits=1), BitLevels(low=0, step=1, bits=2))
    """

    low: int
    step: int
    bits: int

    @staticmethod
    def of(values: Any) -> BitLevels | None:
        """The fewest that hold these integers; None where they take more than MOST_BITS."""
        found = np.unique(np.asarray(values))
        if not found.size or found.size > 1 << MOST_BITS:
            return None
        numbers = [int(value) - int(found[0]) for value in found]
        apart = reduce(gcd, numbers)
        step = max(apart & -apart, 1)
        bits = max((numbers[-1] // step).bit_length(), 1)
        return BitLevels(int(found[0]), step, bits) if bits <= MOST_BITS else None

    @property
    def values(self) -> list[int]:
        """All of them, the least first."""
        return [self.low + self.step * u for u in range(1 << self.bits)]

    def place(self, value: int) -> int:
        """u of `value`. ValueError where it is none of them."""
        return self.values.index(value)

    def bit(self, values: NDArray[Any], place: int) -> NDArray[Any]:
        """Bit `place` of u of each."""
        return (values.astype(np.int64) - self.low) // self.step >> place & 1

    def joined(self, *others: BitLevels | int) -> BitLevels | None:
        """Those of both."""
        more = (each if isinstance(each, int) else each.values for each in others)
        return BitLevels.of(np.concatenate([self.values, *map(np.atleast_1d, more)]))
