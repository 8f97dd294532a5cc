"""Run a kernel of the accelerator, which `compiler.tensorize.render` has made of a scheduled function, on a Device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.tensorize.render import AcceleratorKernel
from celosia.sim.device import Counters, Device

Array = NDArray[Any]
TIMEOUT_CYCLES = 1 << 32
"""Cycles after which a run is given up."""


def run(kernel: AcceleratorKernel, device: Device, *inputs: Array) -> tuple[list[Array], Counters]:
    """Write inputs, constants and code to the device, run, and read the outputs.

    Returns (outputs, counters of the run). ValueError where the device or an array does not fit the kernel.
    """
    if device.config.digest != kernel.cfg.digest:
        raise ValueError(f"{kernel.name} was rendered for Config {kernel.cfg.name}, the device is {device.config.name}")
    if len(inputs) != len(kernel.inputs):
        raise ValueError(f"{kernel.name}: {len(inputs)} arrays given, {len(kernel.inputs)} expected")
    device.allocate(kernel.size)
    for tensor, array in zip(kernel.inputs, inputs):
        if array.shape != tensor.shape or array.dtype.name != tensor.dtype:
            raise ValueError(f"{tensor.name}: {array.dtype}{array.shape} given, {tensor.dtype}{tensor.shape} expected")
        device.write(kernel.addresses[tensor], _bytes(array))
    for address, array in kernel.constants.items():
        device.write(address, _bytes(array))
    device.write(kernel.code_address, kernel.code.reshape(-1))
    counters = device.run(kernel.code_address, len(kernel.code), TIMEOUT_CYCLES)
    outputs: list[Array] = []
    for tensor in kernel.outputs:
        data = device.read(kernel.addresses[tensor], tensor.nbytes)
        outputs.append(data.view(np.dtype(tensor.dtype)).reshape(tensor.shape))
    return outputs, counters


def _bytes(array: Array) -> NDArray[np.uint8]:
    """Return the bytes of an array in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
