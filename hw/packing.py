"""How weights of few bits lie in DRAM, which LOAD expands to int8: w = q * k, with a factor k for each group of them.

A pack holds neighbouring entries of wgt: the factors of all their groups, then the weights in their order, two, four
or eight in a byte, the first one in its lowest bits. A group is 32 neighbouring input channels of one output channel:
half an entry's channel, or those of several entries, which a pack has together. Standard library only.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from celosia.hw.config import Config

GROUP = 32
"""Weights that share a factor."""
QUOTIENTS = {4: (*range(8), *range(-8, 0)), 2: (0, 1, -2, -1), 1: (1, -1)}
"""By bits, what each number q of them counts."""
FACTORS = 16
"""Factors are 1 to this; a pack has them less one, in four bits each, the first one in the lower half of a byte."""


class Packing(NamedTuple):
    """bits: of a weight. entries: of wgt in a pack. run: of an entry's weights, in their order, those that share a
    factor. factor_bytes: in front of a pack; those beyond its groups do not count. unit: bytes of the bus, which come
    at once.
    """

    bits: int
    entries: int
    weights: int
    run: int
    factor_bytes: int
    unit: int

    @property
    def groups(self) -> int:
        """Factors of a pack: one for each run of an entry's weights."""
        return self.weights // self.entries // self.run

    @property
    def pack_bytes(self) -> int:
        """Bytes of a pack in DRAM."""
        return self.factor_bytes + self.weight_bytes

    @property
    def weight_bytes(self) -> int:
        """Those behind the factors."""
        return self.weights * self.bits // 8

    @property
    def times(self) -> int:
        """Bytes of wgt that a byte of a pack becomes."""
        return 8 // self.bits

    @property
    def entry_bytes(self) -> int:
        """An entry's share of them."""
        return self.pack_bytes // self.entries

    @property
    def shift(self) -> int:
        """An entry's bytes are (1 + 2^stretch) * 2^shift."""
        return (self.factor_bytes // self.entries).bit_length() - 1

    @property
    def stretch(self) -> int:
        """See `shift`."""
        return (self.weight_bytes // self.factor_bytes).bit_length() - 1

    @property
    def units(self) -> tuple[int, int]:
        """(Units of factors, units of weights) in a pack."""
        return self.factor_bytes // self.unit, self.weight_bytes // self.unit

    @property
    def unit_factors(self) -> int:
        """Factors that a unit of weights has."""
        return max(1, self.times * self.unit // self.run)


@cache
def packing(cfg: Config) -> Packing:
    """That of `cfg`, whose weight_bits are less than 8.

    >>> packing(Config(weight_bits=4)).pack_bytes, packing(Config(weight_bits=4)).entries  # 512 weights
    (264, 2)
    """
    entries = max(1, GROUP // cfg.block_in)
    weights = entries * cfg.block_out * cfg.block_in
    factor_bytes = max(cfg.bus_bytes, entries, weights // GROUP // 2)
    return Packing(cfg.weight_bits, entries, weights, min(GROUP, cfg.block_in), factor_bytes, cfg.bus_bytes)
