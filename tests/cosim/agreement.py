"""Compile a model, run it on a device, and compare its outputs with those of onnxruntime.

onnxruntime runs with session.qdqisint8allowed=1, which turns every QDQ pattern into an integer operator. If it computes
in float nevertheless (Builder.inexact), outputs may differ by one step. Averages may, too, if Builder.rounding asks for
integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from configs import CONFIGS as SMALL_CONFIGS
from numpy.typing import NDArray
from oracle import opened
from small_models import Builder

import celosia
from celosia.compiler.program import Program
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import PRESETS, Config
from celosia.sim.device import Device

Array = NDArray[Any]
_BUFFERS = dict(inp_depth=256, wgt_depth=128, acc_depth=128, vin_depth=128, out_depth=128, par_depth=16)
CONFIGS = {
    "tiny": PRESETS["tiny"],
    "pynq": PRESETS["pynq"],
    "8x8": Config(block_in=8, block_out=8, bus_bytes=16, **_BUFFERS),
    "batch2-8x4": Config(batch=2, block_in=8, block_out=4, **_BUFFERS),
    "4x16": Config(block_in=4, block_out=16, **_BUFFERS),
    "tight": SMALL_CONFIGS["4x4"],
}
ONE_STEP = 1.001
"""Largest difference, in steps, of outputs that onnxruntime computes in float, with the rounding of the comparison."""


def expected(model: onnx.ModelProto, feed: dict[str, Array], save: Path | None = None) -> list[Array]:
    nameless = onnx.ModelProto()  # equal names, which ONNX allows and onnxruntime does not
    nameless.CopyFrom(model)
    for node in nameless.graph.node:
        node.name = ""
    # Pad_Fusion makes pads of poolings that onnxruntime then refuses
    session = opened(nameless, int8=True, save=save, without=["Pad_Fusion"])
    return list(session.run(None, feed))


def feed_of(model: onnx.ModelProto, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    return {name: (rng.standard_normal(shape) * 4).astype(np.float32) for name, shape in shapes.items()}


def steps(actual: Array, reference: Array, scale: float) -> float:
    """Return the largest difference in steps; `scale` is one step of float outputs."""
    assert (actual.shape, actual.dtype) == (reference.shape, reference.dtype)
    gap = float(np.abs(actual.astype(np.float64) - reference.astype(np.float64)).max())
    return gap / scale if actual.dtype == np.float32 else gap


@dataclass
class Agreement:
    """The comparison of a device's outputs with onnxruntime's."""

    program: Program
    bytes: int
    """The bytes of all outputs."""
    different: dict[str, int]
    """Number of bytes that differ, for each output that must be equal and is not."""
    steps: dict[str, float]
    """The largest difference of each other output, in steps."""


def compare(b: Builder, device: Device, wanted: Sequence[Array] | None = None) -> Agreement:
    """Compile the model of `b` for `device`, run it there, and compare every output with onnxruntime's.

    wanted: onnxruntime's outputs, if the caller has them.
    """
    model = b.model()
    feed = feed_of(model)
    wanted = expected(model, feed) if wanted is None else wanted
    program = celosia.compile(model, device.config, rounding=b.rounding)
    outputs = Runtime(program, device).run(feed, trace=False).outputs
    result = Agreement(program, sum(array.nbytes for array in wanted), {}, {})
    for (name, step), array in zip(b.steps.items(), wanted, strict=True):
        if name in b.inexact:
            result.steps[name] = steps(outputs[name], array, step)
        elif count := different(outputs[name], array):
            result.different[name] = count
    return result


def different(actual: Array, reference: Array) -> int:
    """Return the number of bytes that differ."""
    assert (actual.shape, actual.dtype) == (reference.shape, reference.dtype)
    raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (actual, reference)]
    return int(np.count_nonzero(raw[0] != raw[1]))


def check(b: Builder, device: Device) -> Program:
    """Compare, and require equal bytes, or at most one step if onnxruntime computes in float. Return the Program."""
    result = compare(b, device)
    assert not result.different
    assert all(gap <= ONE_STEP for gap in result.steps.values()), result.steps
    return result.program
