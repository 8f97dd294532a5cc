"""Expand packed weights as LOAD does on their way to wgt (`hw/spec/packing.py` describes their layout in DRAM)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.packing import CODEBOOK_ENTRIES, NIBBLE_BITS, packing


def numbers(data: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Unpack [..., bytes] uint8 to [..., 8 / bits * bytes]: the numbers of `bits` bits in each byte, the lowest ones
    first.

    >>> numbers(np.array([0x2B], np.uint8), 4).tolist(), numbers(np.array([0x2B], np.uint8), 2).tolist()
    ([11, 2], [3, 2, 2, 0])
    """
    parts: NDArray[np.uint8] = data[..., None] >> np.arange(0, 8, bits).astype(np.uint8) & np.uint8((1 << bits) - 1)
    return parts.reshape(*data.shape[:-1], -1)


def expand(cfg: Config, data: NDArray[np.uint8], book: NDArray[Any]) -> NDArray[Any]:
    """Expand whole packs in data [..., bytes] uint8 to entries of wgt [..., entries, block_out * block_in].

    book: [entries, weights of half a byte], of the type of the result.
    """
    p = packing(cfg)
    packs = data.reshape(*data.shape[:-1], -1, p.pack_bytes)
    heads = numbers(packs[..., : p.head_bytes], NIBBLE_BITS)[..., : p.blocks].astype(np.intp)
    nibbles = numbers(packs[..., p.head_bytes :], NIBBLE_BITS)
    places = nibbles.reshape(*packs.shape[:-1], p.entries, p.blocks, -1) + CODEBOOK_ENTRIES * heads[..., None, :, None]
    values: NDArray[Any] = book[places]
    return values.reshape(*data.shape[:-1], -1, cfg.block_out * cfg.block_in)
