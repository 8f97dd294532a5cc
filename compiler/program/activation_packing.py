"""Packing of activations into the accelerator's DRAM layout, and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config

Bytes = NDArray[np.uint8]


def pack_activation(cfg: Config, values: NDArray[np.int8], groups: int) -> Bytes:
    """Pack [images, channels, height, width] int8 as [images/batch][groups][height][width][batch][group] bytes.

    groups: channel groups of the storage, of cfg.group channels each. Missing images and channels become zeros.
    """
    images, channels, height, width = values.shape
    batches = -(-images // cfg.batch)
    if cfg.batch == 1 and channels == groups * cfg.group:
        padded = values
    else:
        padded = np.zeros((batches * cfg.batch, groups * cfg.group, height, width), np.int8)
        padded[:images, :channels] = values
    tiles = padded.reshape(batches, cfg.batch, groups, cfg.group, height, width).transpose(0, 2, 4, 5, 1, 3)
    return np.ascontiguousarray(tiles).view(np.uint8).reshape(-1)


def unpack_activation(
    cfg: Config, data: Bytes, shape: tuple[int, int, int, int], groups: int, offset: int = 0
) -> NDArray[np.int8]:
    """Unpack an activation [images, channels, height, width] int8, the inverse of `pack_activation`.

    data: bytes of a storage of `groups` channel groups. shape: of the activation, which begins `offset` groups into it.
    """
    images, channels, height, width = shape
    batches = -(-images // cfg.batch)
    tiles = data.view(np.int8).reshape(batches, groups, height, width, cfg.batch, cfg.group)
    used = tiles[:, offset : offset - (-channels // cfg.group)]
    values = used.transpose(0, 4, 1, 5, 2, 3).reshape(batches * cfg.batch, -1, height, width)
    return np.ascontiguousarray(values[:images, :channels])
