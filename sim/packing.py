"""Packed weights, expanded as LOAD does on their way to wgt (`hw/packing.py` says how they lie in DRAM)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.packing import QUOTIENTS, packing


def numbers(data: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """[..., 8 / bits * bytes] of [..., bytes] uint8: the numbers of so many bits in each byte, the lowest ones first.

    >>> numbers(np.array([0x2B], np.uint8), 4).tolist(), numbers(np.array([0x2B], np.uint8), 2).tolist()
    ([11, 2], [3, 2, 2, 0])
    """
    parts: NDArray[np.uint8] = data[..., None] >> np.arange(0, 8, bits, np.uint8) & np.uint8((1 << bits) - 1)
    return parts.reshape(*data.shape[:-1], -1)


def expand(cfg: Config, data: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Entries of wgt [..., entries, block_out * block_in] int8, of whole packs in data [..., bytes] uint8.

    Each weight is q * k modulo 256, of one of QUOTIENTS and a factor k from 1 to 16.
    """
    p = packing(cfg)
    packs = data.reshape(*data.shape[:-1], -1, p.pack_bytes)
    factors = numbers(packs[..., : p.factor_bytes], 4)[..., : p.groups].astype(np.int16) + 1
    weights = np.array(QUOTIENTS[p.bits], np.int16)[numbers(packs[..., p.factor_bytes :], p.bits)]
    runs = weights.reshape(*packs.shape[:-1], p.entries, p.groups, p.run) * factors[..., None, :, None]
    return runs.astype(np.int8).reshape(*data.shape[:-1], -1, cfg.block_out * cfg.block_in)
