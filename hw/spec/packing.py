"""Layout in DRAM of weights of few bits, which LOAD expands to int8 by codebooks, one of BOOKS for each group of them.

A pack holds neighbouring entries of wgt: its head, which says the codebook of each of their groups, then the weights in
their order, two, four or eight in a byte, the first one in its lowest bits. A group is 32 neighbouring input channels
of one output channel: half an entry's channel, or those of several entries, which a pack has together.

Codebooks are what LOAD writes to book: entry NIBBLES * codebook + n holds what n, half a byte of weights, stands for.
Standard library only.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from celosia.hw.spec.config import Config

GROUP = 32
"""Weights that share a codebook."""
BOOKS = 16
"""Codebooks; a head has the numbers of a pack's, in four bits each, the first one in the lower half of a byte."""
NIBBLE_BITS = 4
"""Bits that are looked up at once: a weight, or two or four of them."""
NIBBLES = 1 << NIBBLE_BITS
"""Entries of book for a codebook."""


class Packing(NamedTuple):
    """Layout of packed weights. bits: of a weight. entries: of wgt in a pack. run: of an entry's weights, in their
    order, those that share a codebook. head_bytes: in front of a pack; those beyond its groups do not count. unit:
    bytes of the bus, which come at once."""

    bits: int
    entries: int
    weights: int
    run: int
    head_bytes: int
    unit: int

    @property
    def groups(self) -> int:
        """Number of groups of a pack: one for each run of an entry's weights."""
        return self.weights // self.entries // self.run

    @property
    def pack_bytes(self) -> int:
        """Bytes of a pack in DRAM."""
        return self.head_bytes + self.weight_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights behind the head."""
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
        return (self.head_bytes // self.entries).bit_length() - 1

    @property
    def stretch(self) -> int:
        """See `shift`."""
        return (self.weight_bytes // self.head_bytes).bit_length() - 1

    @property
    def units(self) -> tuple[int, int]:
        """Number of (units of the head, units of weights) in a pack."""
        return self.head_bytes // self.unit, self.weight_bytes // self.unit

    @property
    def unit_groups(self) -> int:
        """Groups of which a unit has weights."""
        return max(1, self.times * self.unit // self.run)


@cache
def packing(cfg: Config) -> Packing:
    """Packing of `cfg`, whose weight_bits are less than 8.

    >>> packing(Config(weight_bits=4)).pack_bytes, packing(Config(weight_bits=4)).entries  # 512 weights
    (264, 2)
    """
    entries = max(1, GROUP // cfg.block_in)
    weights = entries * cfg.block_out * cfg.block_in
    head_bytes = max(cfg.bus_bytes, entries, weights // GROUP // 2)
    return Packing(cfg.weight_bits, entries, weights, min(GROUP, cfg.block_in), head_bytes, cfg.bus_bytes)


def nibble_weights(cfg: Config) -> int:
    """Weights that half a byte of a pack holds.

    >>> nibble_weights(Config(weight_bits=4)), nibble_weights(Config(weight_bits=1))
    (1, 4)
    """
    return NIBBLE_BITS // cfg.weight_bits
