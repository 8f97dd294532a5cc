"""Packed weights, expanded as LOAD does on their way to wgt (`hw/packing.py` says how they lie in DRAM)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.packing import packing


def _nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., 2 * bytes] of [..., bytes]: of each byte the lower half, then the upper one."""
    halves: NDArray[np.uint8] = np.stack([data & 15, data >> 4], axis=-1)
    return halves.reshape(*data.shape[:-1], -1)


def expand(cfg: Config, data: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Entries of wgt [..., entries, block_out * block_in] int8, of whole packs in data [..., bytes] uint8.

    Each weight is q * k modulo 256, of q from -8 to 7 and a factor k from 1 to 16.
    """
    p = packing(cfg)
    packs = data.reshape(*data.shape[:-1], -1, p.pack_bytes)
    factors = _nibbles(packs[..., : p.factor_bytes])[..., : p.groups].astype(np.int16) + 1
    weights = (_nibbles(packs[..., p.factor_bytes :]).astype(np.int16) ^ 8) - 8
    runs = weights.reshape(*packs.shape[:-1], p.entries, p.groups, p.run) * factors[..., None, :, None]
    return runs.astype(np.int8).reshape(*data.shape[:-1], -1, cfg.block_out * cfg.block_in)
