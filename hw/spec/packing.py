"""Layout of packed weights in DRAM: weights of 4, 2 or 1 bits that LOAD expands to int8 by codebooks.

A codebook block is the weights of 32 neighbouring input channels of one output channel. The weights of a block share
one of 16 codebooks. A pack holds one or several neighbouring pieces of wgt, so many that no block is cut:

    head      the codebook's number of each block, 4 bits each
    weights   in the order of the pieces, 2, 4 or 8 in a byte, the first one in the lowest bits

LOAD writes the codebooks to the scratchpad book. Its entry CODEBOOK_ENTRIES * codebook + n holds the int8 weights that
nibble n of packed weights stands for. Standard library only.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from celosia.hw.spec.config import Config

CODEBOOK_BLOCK = 32
"""Weights of a codebook block, which share a codebook."""
CODEBOOKS = 16
"""Codebooks in the scratchpad book; the head of a pack names one in 4 bits for each block, the low nibble first."""
NIBBLE_BITS = 4
"""Bits that index a codebook at once: one weight of 4 bits, two of 2 bits or four of 1 bit."""
CODEBOOK_ENTRIES = 1 << NIBBLE_BITS
"""Entries of book that one codebook takes: one for each value of a nibble."""


class Packing(NamedTuple):
    """Sizes of a pack of weights.

    bits : bits of a weight in DRAM: 4, 2 or 1.
    pieces : pieces of wgt in a pack.
    weights : weights in a pack.
    run : consecutive weights of one piece that belong to the same codebook block.
    head_bytes : bytes of the head, which may be longer than its numbers of codebooks.
    chunk_bytes : bytes that LOAD expands at once, those of a beat of the bus.
    """

    bits: int
    pieces: int
    weights: int
    run: int
    head_bytes: int
    chunk_bytes: int

    @property
    def blocks(self) -> int:
        """Codebook blocks in a pack: as many as runs in a piece, as a block takes one run of each piece."""
        return self.weights // self.pieces // self.run

    @property
    def pack_bytes(self) -> int:
        """Bytes of a pack in DRAM, with its head."""
        return self.head_bytes + self.weight_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of a pack behind its head."""
        return self.weights * self.bits // 8

    @property
    def expansion(self) -> int:
        """Bytes of wgt that one byte of packed weights becomes."""
        return 8 // self.bits

    @property
    def piece_bytes(self) -> int:
        """Bytes of a pack divided by its pieces: the size in DRAM of an element of LOAD."""
        return self.pack_bytes // self.pieces

    @property
    def shift(self) -> int:
        """Exponent in `piece_bytes` = (1 + 2^stretch) * 2^shift, by which LOAD multiplies without a multiplier."""
        return (self.head_bytes // self.pieces).bit_length() - 1

    @property
    def stretch(self) -> int:
        """Exponent in `piece_bytes` = (1 + 2^stretch) * 2^shift; see `shift`."""
        return (self.weight_bytes // self.head_bytes).bit_length() - 1

    @property
    def chunk_counts(self) -> tuple[int, int]:
        """Number of chunks in the head of a pack, and in its weights."""
        return self.head_bytes // self.chunk_bytes, self.weight_bytes // self.chunk_bytes

    @property
    def chunk_blocks(self) -> int:
        """Codebook blocks whose weights lie in one chunk."""
        return max(1, self.expansion * self.chunk_bytes // self.run)


@cache
def packing(cfg: Config) -> Packing:
    """Return the layout of packed weights for `cfg`, which must have less than 8 weight_bits.

    >>> packing(Config(weight_bits=4)).pack_bytes, packing(Config(weight_bits=4)).pieces  # 512 weights
    (264, 2)
    """
    pieces = max(1, CODEBOOK_BLOCK // cfg.group)
    weights = pieces * cfg.block_out * cfg.group
    head_bytes = max(cfg.bus_bytes, pieces, weights // CODEBOOK_BLOCK // 2)
    return Packing(cfg.weight_bits, pieces, weights, min(CODEBOOK_BLOCK, cfg.group), head_bytes, cfg.bus_bytes)


def nibble_weights(cfg: Config) -> int:
    """Return the number of weights that a nibble of packed weights holds.

    >>> nibble_weights(Config(weight_bits=4)), nibble_weights(Config(weight_bits=1))
    (1, 4)
    """
    return NIBBLE_BITS // cfg.weight_bits
