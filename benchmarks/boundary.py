"""Rows of `boundary`: the cycles of the smallest launch, and of one more layer in it, by the timing model.

The network is a chain of 1x1 convolutions of one pixel whose channels are one group: each layer computes for a few
cycles, so that all others are the cost of its boundary. Inside a block the pixel stays on chip; with `--without blocks`
it goes through memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

import celosia
from benchmarks.gain import cycles
from benchmarks.networks import NetBuilder
from benchmarks.rows import Request, Row, judged
from celosia.driver.quantize.quantize import quantize
from celosia.hw.spec.config import Config

LENGTHS = 2, 10
"""Layers of the two networks whose difference is the cost of a layer."""


def rows(asked: Request) -> Iterator[Row]:
    """A row for layers in blocks, and one for layers that exchange the pixel through memory."""
    config, memory = asked.preset, asked.memory
    for without in ((), ("blocks",)):
        name = "boundary/" + ("memory" if without else "block")
        asked.say(f"{name}: compiling")
        with tempfile.TemporaryDirectory() as folder:
            few, many = (
                cycles(
                    celosia.compile(_chain(Path(folder), config, length), config, check=False, without=without), memory
                )
                for length in LENGTHS
            )
        layer = (many - few) / (LENGTHS[1] - LENGTHS[0])
        details = {"launch": few - LENGTHS[0] * layer, "layer": layer, "config": config}
        what = f"cycles of a launch on {config} without its layers, and of each layer of one pixel"
        yield judged(name, what, f"python -m benchmarks boundary --config {config}", details, "")


def _chain(folder: Path, config: str, length: int) -> Path:
    """Write a quantised chain of `length` convolutions of one pixel; returns its path."""
    channels = Config.load(config).group
    net = NetBuilder(f"chain_{length}", (1, channels, 1, 1))
    x = "input"
    for _ in range(length):
        x = net.conv(x, channels)
    source, path = folder / f"float_{length}.onnx", folder / f"chain_{length}.onnx"
    onnx.save(net.ending({x: [1, channels, 1, 1]}), source)
    samples = np.random.default_rng(0).standard_normal((8, channels, 1, 1)).astype(np.float32)
    quantize(source, {"input": samples}, path)
    return path
