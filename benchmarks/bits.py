"""Convolutions of 1 and 2 bits over those of bytes, on this processor and, estimated, on two of ARM.

Both are the compiler's own kernels, of ResNet-18's convolutions but the first: sums in int32 of the same operands.
Activations are 0 ... 1 or 0 ... 3, weights -1 and 1 or -2 ... 1; a2w1: activations of 2 bits, weights of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.arm import PROCESSORS, estimate
from benchmarks.rows import Request, Row, judged, skipped
from benchmarks.workloads import Missing
from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import compile_expressions
from celosia.compiler.ops import bit_serial, integer
from celosia.compiler.ops.bit_serial import BitLevels
from celosia.compiler.ops.registry import Node
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import TARGETS, compiling_for
from celosia.compiler.tune.kernel_trial import time_alternating

Array = NDArray[Any]
COMMAND = "python -m benchmarks bits"
LEVELS = {
    "a1w1": (BitLevels(0, 1, 1), BitLevels(-1, 2, 1)),
    "a2w1": (BitLevels(0, 1, 2), BitLevels(-1, 2, 1)),
    "a2w2": (BitLevels(0, 1, 2), BitLevels(-2, 1, 2)),
}
LEAST = 1.0
"""On ARM: times as fast as bytes."""
HERE = "here"
SECONDS = 1.0
"""For each layer."""


@dataclass(frozen=True)
class Layer:
    """A convolution of images [1, channels, size, size]; count: how many the network has of it."""

    channels: int
    size: int
    outputs: int
    kernel: int = 3
    stride: int = 1
    count: int = 1

    def __str__(self) -> str:
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        return f"{self.kernel}x{self.kernel}, {self.channels} to {self.outputs}, {self.size}x{self.size}{stride}"


LAYERS = (
    Layer(64, 56, 64, count=4),
    *(
        each
        for channels, size in ((64, 56), (128, 28), (256, 14))
        for each in (
            Layer(channels, size, 2 * channels, stride=2),
            Layer(channels, size, 2 * channels, 1, 2),
            Layer(2 * channels, size // 2, 2 * channels, count=3),
        )
    ),
)


def kernel(layer: Layer, levels: tuple[BitLevels, BitLevels], by_bits: bool) -> tuple[CompiledKernel, list[Array]]:
    """(a convolution of random operands of these levels for the target, by bits or by bytes; what it takes)."""
    rng, k = np.random.default_rng(layer.channels), layer.kernel
    x = rng.choice(np.array(levels[0].values, np.uint8), (1, layer.channels, layer.size, layer.size))
    w = rng.choice(np.array(levels[1].values, np.int8), (layer.outputs, layer.channels, k, k))
    image, weights = T.placeholder(x.shape, "uint8", "x"), T.placeholder(w.shape, "int8", "w")
    node = Node("ConvInteger", {"pads": [k // 2] * 4, "strides": [layer.stride] * 2}, (image, weights), (None, w))
    zero, none = T.wrap(0, "int32"), integer.ZeroPoint(lambda m: T.wrap(0, "int32"), is_zero=True)
    if by_bits:
        y = bit_serial.convolution(node, image, weights, levels, zero, 0, none, None, lambda acc, m: acc)
    else:
        y = integer.convolution(node, image, weights, zero, none, None, lambda acc, m: acc)
    made, fixed = compile_expressions([y], [image], {weights: w})
    return made, [x, *fixed]


def _here(layer: Layer, seconds: float) -> dict[str, float]:
    """Processor seconds of bytes and of each of LEVELS, by turns. RuntimeError where results differ."""
    made = {"bytes": kernel(layer, LEVELS["a2w2"], False)}
    for name, levels in LEVELS.items():
        made[name] = kernel(layer, levels, True)
        by_bytes, inputs = kernel(layer, levels, False)
        _compare(layer, name, made[name][0](*made[name][1])[0], by_bytes(*inputs)[0])
    runs: list[Callable[[], object]] = [lambda run=run, inputs=inputs: run(*inputs) for run, inputs in made.values()]  # type: ignore[misc]
    return dict(zip(made, time_alternating(runs, seconds)))


def _on_arm(layer: Layer, target: str) -> dict[str, float]:
    """Cycles, estimated, as `_here`. Missing where a tool is."""
    found = {}
    for name, levels in (("bytes", LEVELS["a2w2"]), *LEVELS.items()):
        with compiling_for(TARGETS[target]):
            made, inputs = kernel(layer, levels, name != "bytes")
        by_bytes, own = kernel(layer, levels, False)
        told = estimate(target, made, inputs)
        _compare(layer, f"{name} on {target}", told.outputs[0], by_bytes(*own)[0])
        found[name] = told.cycles
    return found


def _compare(layer: Layer, name: str, found: Array, expected: Array) -> None:
    if not np.array_equal(found, expected):
        raise RuntimeError(f"{layer}, {name}: {np.count_nonzero(found != expected)} of {found.size} sums differ")


def _chosen(target: str) -> dict[str, int]:
    """Count those of LAYERS that the compiler computes by bits."""
    with compiling_for(TARGETS.get(target)):
        return {
            name: sum(
                bit_serial.is_faster(levels, each.channels, each.kernel**2, each.outputs, each.stride**2)
                for each in LAYERS
            )
            for name, levels in LEVELS.items()
        }


def rows(asked: Request) -> Iterator[Row]:
    """A row for each processor (HERE, and TARGETS of ARM; or those that were chosen) and each of LEVELS."""
    for target in asked.models or (HERE, *PROCESSORS):
        found: list[dict[str, float]] = []
        why = ""
        try:
            for layer in LAYERS:
                asked.say(f"{target}: {layer}")
                found.append(_here(layer, asked.seconds or SECONDS) if target == HERE else _on_arm(layer, target))
        except Missing as reason:
            why = str(reason)
        for name in LEVELS:
            yield _row(target, name, found, why)


def _row(target: str, name: str, found: list[dict[str, float]], why: str) -> Row:
    """mean, least, most: of layers; whole: of all their time; taken: how many of them the compiler computes so."""
    where = "this processor" if target == HERE else f"a {PROCESSORS[target]}, estimated"
    key = f"bits/{target}/{name}"
    what = f"ResNet-18's convolutions in {name[1]} x {name[3]} bits over bytes, {where}: times as fast"
    if why:
        return skipped(key, what, COMMAND, why)
    ratios = {str(layer): each["bytes"] / each[name] for layer, each in zip(LAYERS, found)}
    both = [sum(layer.count * each[side] for layer, each in zip(LAYERS, found)) for side in ("bytes", name)]
    details = {
        "whole": both[0] / both[1], "mean": exp(sum(map(log, ratios.values())) / len(ratios)),
        "least": min(ratios.values()), "most": max(ratios.values()), "taken": _chosen(target)[name], "layers": ratios,
    }  # fmt: skip
    return judged(key, what, COMMAND, details, "" if target == HERE else f"least >= {LEAST}")
