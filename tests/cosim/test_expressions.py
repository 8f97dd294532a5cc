"""Scheduled expressions give the same bytes on the RTL, and virtual threads need fewer cycles."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import TINY, convolution, int8, matmul, matmul_arrays, parameters, scheduled
from simulators import rtl_device

from celosia.compiler import expr as T
from celosia.compiler.tensorize.render import render
from celosia.driver.te.kernels import run
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl.rtlsim import RtlDevice

pytestmark = pytest.mark.rtl


@pytest.fixture(scope="module")
def device() -> RtlDevice:
    return rtl_device(TINY)


def cycles(device: RtlDevice, function: T.Function, *arrays: np.ndarray) -> int:
    """Run a function on the RTL, compare its outputs with the functional simulator's, and return the cycles."""
    kernel = render(TINY, function)
    expected, _ = run(kernel, FunctionalDevice(TINY, checking=True), *arrays)
    outputs, counters = run(kernel, device, *arrays)
    np.testing.assert_array_equal(outputs[0], expected[0])
    assert counters.cycles is not None
    return counters.cycles


def test_virtual_threads_hide_loads(device: RtlDevice) -> None:
    taken = []
    for threads in (1, 2, 4):
        inputs, acc, y = matmul(TINY, 64, 64, 64)
        function = T.lower(scheduled(TINY, inputs, acc, y, 32, 1, 8, threads), inputs)
        taken.append(cycles(device, function, *matmul_arrays(TINY, 64, 64, 64)))
    assert taken[1] < 0.8 * taken[0] and taken[2] < taken[1]


def test_convolution(device: RtlDevice) -> None:
    inputs, plan = convolution(TINY, (2, 2), (9, 9), 3, 2, 1, [1, 3, 5, 1])
    arrays = *(int8(*t.shape) for t in inputs[:2]), parameters(TINY, 8)
    cycles(device, T.lower(plan, inputs), *arrays)
