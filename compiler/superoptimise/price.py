"""Price of a model: with an accelerator, predicted cycles of its launches and an estimate for the CPU; without one, the
measured time of its kernels.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.graph.cost import host_cycles
from celosia.compiler.graph.select import Partition
from celosia.compiler.launch.image import Image
from celosia.compiler.program import CpuStep, Program
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel import CompiledKernel, aligned_empty
from celosia.compiler.target import target
from celosia.compiler.tune.kernel_trial import time_alternating
from celosia.compiler.tune.layer_trial import TIMED
from celosia.compiler.tune.network import Network


@dataclass(frozen=True)
class Price:
    """Price of a model.

    cycles: of all launches. host: for operators on the CPU, roughly in the same cycles; in measured nanoseconds where
    `measured`, and `cycles` is 0 then.
    """

    cycles: float
    host: float
    measured: bool = False

    @property
    def total(self) -> float:
        """The number by which prices are compared."""
        return self.cycles + self.host

    def reduced_by(self, gain: float) -> Price:
        """Return the price after a step that saves `gain`, of which it is not known where it saves."""
        if self.measured:
            return replace(self, host=self.host - gain)
        return replace(self, cycles=self.cycles - gain)

    def __str__(self) -> str:
        return f"{self.host / 1e6:,.3f} ms" if self.measured else f"{self.cycles:,.0f} cycles"


PriceModel = Callable[[onnx.ModelProto], Price]
"""Returns the price of an ONNX model."""


class Awaited(Protocol):
    """A price that a helper process is finding out."""

    def ready(self) -> bool:
        """Return whether the price is there, or no helper is left that could find it."""
        ...

    def price(self) -> Price | None:
        """Return the price, once `ready`; UNMEASURED where the helper gave no answer, None where no helper took the
        job.
        """
        ...


class Pricing(NamedTuple):
    """How a search prices models.

    whole: price of a model. part: price of a part of a model; a rougher one will do. measured_gain: time that the
    second of two models saves, measured in alternation; None where prices are predicted cycles. tuned: cycles of a
    model after tuning its schedules; None where the search shall not tune. elsewhere: starts to price a part in a
    helper process; None without helpers. helpers: their number.
    """

    whole: PriceModel
    part: PriceModel
    measured_gain: Callable[[onnx.ModelProto, onnx.ModelProto], float] | None = None
    tuned: Callable[[onnx.ModelProto], float] | None = None
    elsewhere: Callable[[onnx.ModelProto], Awaited] | None = None
    helpers: int = 0


INFEASIBLE, UNMEASURED = Price(inf, inf), Price(inf, inf)
"""Prices of a model that does not compile, and of one that a helper failed to price."""


def price_of(network: Network, image: Image, selection: Partition) -> Price:
    """Return the price of a compiled model. image: of the network's launches. selection: which operators the CPU
    computes.
    """
    cycles = network.cycles(image, TIMED) if network.launches else 0
    return Price(cycles, sum(host_cycles(node, selection.cpu) for node in selection.cpu))


# Measured time on the CPU --------------------------------------------------------------------------------------------

KERNEL_SECONDS = 0.01
"""Seconds for which a kernel is timed."""
KERNEL_SAMPLES = 5
"""Least number of timed runs of a kernel; the fastest one counts."""
REPEATED_FACTOR = 3
"""Factor on KERNEL_SECONDS and KERNEL_SAMPLES where kernels of two Programs are timed in alternation."""
HOST_STEP_NANOSECONDS = 20_000
"""Rough time of a step that is no kernel."""
MAX_COPIES = 64
"""Limit of the copies of a kernel's constants that its runs alternate between."""
_KERNEL_TIMES: dict[str, float] = {}
"""Nanoseconds of each kernel that was timed, by the key that `_kernels` gives it."""


def is_large(size: int) -> bool:
    """Return whether so many bytes of constants do not stay in the second-level cache from one run of a model to the
    next.
    """
    return size > target().cache_bytes


def nanoseconds(program: Program, large: bool) -> float:
    """Return the time of one run of all steps of `program`, which has no launches. large: whether the model, or the one
    it is a part of, `is_large`.
    """
    kernels = _kernels(program, large)
    for key, (kernel, fixed, _) in kernels.items():
        if key not in _KERNEL_TIMES:
            _KERNEL_TIMES[key] = (
                time_alternating([_runner(kernel, fixed, large)], KERNEL_SECONDS, KERNEL_SAMPLES)[0] * 1e9
            )
    others = sum(not isinstance(step, CpuStep) for step in program.steps)
    return sum(_KERNEL_TIMES[key] * count for key, (_, _, count) in kernels.items()) + others * HOST_STEP_NANOSECONDS


def gain(before: Program, after: Program, large: bool) -> float:
    """Return the nanoseconds that `after` saves: kernels that only one of both has are timed again in alternation.
    Otherwise the model with the luckiest measurements would win.
    """
    first, second = _kernels(before, large), _kernels(after, large)
    counts = Counter({key: count for key, (_, _, count) in first.items()})
    counts.subtract({key: count for key, (_, _, count) in second.items()})
    changed = [key for key, count in counts.items() if count]
    runs = [_runner(*{**first, **second}[key][:2], large) for key in changed]
    times = (
        time_alternating(runs, REPEATED_FACTOR * KERNEL_SECONDS * len(runs), REPEATED_FACTOR * KERNEL_SAMPLES)
        if runs
        else []
    )
    return sum(counts[key] * time for key, time in zip(changed, times)) * 1e9


def _kernels(program: Program, large: bool) -> dict[str, tuple[CompiledKernel, list[bool], int]]:
    """Collect the different kernels of a Program: kernel, which inputs are constants, and number of runs, by a digest
    of these loops and types.
    """
    kernels: dict[str, tuple[CompiledKernel, list[bool], int]] = {}
    for step in program.steps:
        if isinstance(step, CpuStep) and step.kernel is not None:
            kernel, fixed = program.kernels[step.kernel], [name in program.constants for name in step.inputs if name]
            loops = kernel.loops.replace(kernel.name, "kernel")
            text = f"{loops} {kernel.inputs} {kernel.outputs} {fixed} {large}"
            key = hashlib.sha256(text.encode()).hexdigest()
            kernels[key] = kernel, fixed, 1 + (kernels[key][2] if key in kernels else 0)
    return kernels


def _runner(kernel: CompiledKernel, fixed: list[bool], large: bool) -> Callable[[], None]:
    """Return a function that runs a kernel once. With `large`, runs take turns with copies of the constants, so that
    these are not in the cache.
    """
    rng = np.random.default_rng(0)
    inputs = [_random_array(rng, dtype, shape) for dtype, shape in kernel.inputs]
    outputs = [aligned_empty(numpy_dtype(dtype), shape) for dtype, shape in kernel.outputs]
    constant_bytes = sum(array.nbytes for array, is_constant in zip(inputs, fixed) if is_constant)
    count = min(MAX_COPIES, 2 + target().cache_bytes // max(1, constant_bytes)) if large else 1
    copies = itertools.cycle(
        [[_copy(array) if is_constant else array for array, is_constant in zip(inputs, fixed)] for _ in range(count)]
    )
    return lambda: kernel.run(next(copies), outputs)


def _copy(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Copy an array to aligned memory."""
    copy = aligned_empty(array.dtype, array.shape)
    copy[...] = array
    return copy


def _random_array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Fill an array with normal floats, or with 0 and 1 for integers, as these may be indices."""
    array = aligned_empty(numpy_dtype(dtype), shape)
    array[...] = rng.standard_normal(shape) if array.dtype.kind == "f" else rng.integers(0, 2, shape)
    return array
