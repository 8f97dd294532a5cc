"""Sums that leave the accelerator as they are, byte by byte: grouped products, their proofs, and planted faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from .layers import CONFIGS, Network

from celosia.compiler.layer import UNSCALED, Activation, Conv, Window

SUMS = ["tiny", "pynq", "4x4-tight", "batch2", "4x8", "16x4", "batch2-8x4", "packed-4x8", "packed-32x8"]


def sums(config: str, images: int, groups: int, size: int, blocks: int, count: int, pixels: int = 1) -> Network:
    """A product by blocks: `groups` of `size` channels, `blocks` output blocks each."""
    rng, cfg = np.random.default_rng(images), replace(CONFIGS[config], sums=True)
    x = Activation.alone(cfg, "x", images, groups * size, 1, pixels)
    channels = groups * blocks * cfg.block_out
    y = Activation.alone(cfg, "y", images, count * channels, 1, pixels)
    weights = rng.integers(-8, 8, (channels, size, 1, 1)).astype(np.int8)
    layer = Conv("sums", x, y, weights, UNSCALED, Window((1, 1)), groups, sum_bytes=count)
    return Network(cfg, [[layer]], {x: rng.integers(-128, 128, (images, groups * size, 1, pixels)).astype(np.int8)})


@pytest.mark.parametrize("config", SUMS)
@pytest.mark.parametrize("case", [(1, 3, 16, 2, 2), (5, 4, 32, 1, 3), (2, 1, 64, 5, 4, 3)], ids=str)
def test_sums_leave_byte_by_byte(config: str, case: tuple[int, ...]) -> None:
    sums(config, *case).check(checking=True)
