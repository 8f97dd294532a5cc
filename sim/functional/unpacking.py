"""Expand packed weights as LOAD does on their way to wgt (`hw/spec/packing.py` describes their layout in DRAM)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.packing import CODEBOOK_ENTRIES, NIBBLE_BITS, packing


def unpack_numbers(data: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Split each byte into numbers of `bits` bits, the lowest bits first: [..., bytes] -> [..., 8 / bits * bytes].

    >>> unpack_numbers(np.array([0x2B], np.uint8), 4).tolist(), unpack_numbers(np.array([0x2B], np.uint8), 2).tolist()
    ([11, 2], [3, 2, 2, 0])
    """
    parts: NDArray[np.uint8] = data[..., None] >> np.arange(0, 8, bits).astype(np.uint8) & np.uint8((1 << bits) - 1)
    return parts.reshape(*data.shape[:-1], -1)


def expand_packs(cfg: Config, data: NDArray[np.uint8], book: NDArray[Any]) -> NDArray[Any]:
    """Expand packed weights [..., bytes] uint8 to pieces of wgt [..., pieces, block_out * group].

    The bytes are whole packs. A pack has a head, which names a codebook for each codebook block, and then the weights
    of its pieces, in nibbles (4 bits, 1 to 4 weights).

    book: contents of the scratchpad, [CODEBOOKS * CODEBOOK_ENTRIES, weights of a nibble]. Row CODEBOOK_ENTRIES *
    codebook + nibble holds the weights that the nibble stands for. The result has its dtype.
    """
    layout = packing(cfg)
    packs = data.reshape(*data.shape[:-1], -1, layout.pack_bytes)
    heads = unpack_numbers(packs[..., : layout.head_bytes], NIBBLE_BITS)[..., : layout.blocks].astype(np.intp)
    nibbles = unpack_numbers(packs[..., layout.head_bytes :], NIBBLE_BITS)
    # Both index [..., packs, pieces of a pack, codebook blocks, nibbles of a block in a piece].
    by_block = nibbles.reshape(*packs.shape[:-1], layout.pieces, layout.blocks, -1)
    values: NDArray[Any] = book[by_block + CODEBOOK_ENTRIES * heads[..., None, :, None]]
    return values.reshape(*data.shape[:-1], -1, cfg.block_out * cfg.group)
