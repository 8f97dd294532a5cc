"""Price of a model: cycles of its launches by the timing model, and an estimate of what is left to the CPU; of
one for the CPU alone, what its kernels take there (measured.py)."""

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
from celosia.compiler.tune.kernels.kernel_trial import time_alternating
from celosia.compiler.tune.layer_trial import TIMED
from celosia.compiler.tune.network import Network


@dataclass(frozen=True)
class Price:
    """cycles: of all launches. host: of operators on the CPU, in the same cycles, roughly; where it is measured,
    nanoseconds of this processor."""

    cycles: float
    host: float
    measured: bool = False

    @property
    def total(self) -> float:
        """The sum, which a search compares."""
        return self.cycles + self.host

    def less(self, gain: float) -> Price:
        """After a step that saves so much, wherever it does."""
        if self.measured:
            return replace(self, host=self.host - gain)
        return replace(self, cycles=self.cycles - gain)

    def __str__(self) -> str:
        return f"{self.host / 1e6:,.3f} ms" if self.measured else f"{self.cycles:,.0f} cycles"


PriceModel = Callable[[onnx.ModelProto], Price]


class Awaited(Protocol):
    """A price that others find out."""

    def ready(self) -> bool:
        """Whether it is there, or nobody is left who could find it."""
        ...

    def price(self) -> Price | None:
        """The price; UNMEASURED where whoever looked for it gave no answer, None where nobody did. Of one that is
        ready."""
        ...


class Pricing(NamedTuple):
    """whole: of a model. part: of a part of one, where less will do. anew: what the second of two models, or of two
    parts, saves when both are measured anew, by turns; None where nothing is measured. tuned: of a model whose
    schedules are searched for first; None where they shall not be. elsewhere: begins to price a part somewhere else, as
    `part` does here, while this process goes on; None where nobody else does. helpers: how many do."""

    whole: PriceModel
    part: PriceModel
    anew: Callable[[onnx.ModelProto, onnx.ModelProto], float] | None = None
    tuned: Callable[[onnx.ModelProto], float] | None = None
    elsewhere: Callable[[onnx.ModelProto], Awaited] | None = None
    helpers: int = 0


INFEASIBLE, UNMEASURED = Price(inf, inf), Price(inf, inf)
"""Prices of a model that does not compile, and of one of which nobody knows whether it does."""


def price_of(network: Network, image: Image, selection: Partition) -> Price:
    """Price of a model whose operators are placed by `selection`. image: of the network's launches."""
    cycles = network.cycles(image, TIMED) if network.launches else 0
    return Price(cycles, sum(host_cycles(node, selection.cpu) for node in selection.cpu))


SECONDS = 0.01
"""For which a kernel is timed."""
SAMPLES = 5
"""Runs at least; the fastest counts."""
ROUNDS = 3
"""Times as long for what is timed anew, beside another Program."""
OTHER_NANOSECONDS = 20_000
"""Time of a step that is no kernel, roughly."""
MOST_COPIES = 64
_KNOWN: dict[str, float] = {}
"""Nanoseconds of each kernel, by what it was made of and which of its inputs are constants."""


def is_large(size: int) -> bool:
    """Whether constants of so many bytes do not stay in the second cache from one run to the next."""
    return size > target().cache_bytes


def nanoseconds(program: Program, large: bool) -> float:
    """Time of a run of all steps of `program`, none of which is a launch. large: it is, or is a part of, a model whose
    constants come from beyond the second cache."""
    kernels = _kernels(program, large)
    for key, (kernel, fixed, _) in kernels.items():
        if key not in _KNOWN:
            _KNOWN[key] = time_alternating([_runner(kernel, fixed, large)], SECONDS, SAMPLES)[0] * 1e9
    others = sum(not isinstance(step, CpuStep) for step in program.steps)
    return sum(_KNOWN[key] * count for key, (_, _, count) in kernels.items()) + others * OTHER_NANOSECONDS


def gain(before: Program, after: Program, large: bool) -> float:
    """Nanoseconds that `after` saves: kernels that only one of them has, timed anew and by turns. Who has taken the
    fastest of many has taken the luckiest times, too."""
    first, second = _kernels(before, large), _kernels(after, large)
    counts = Counter({key: count for key, (_, _, count) in first.items()})
    counts.subtract({key: count for key, (_, _, count) in second.items()})
    changed = [key for key, count in counts.items() if count]
    runs = [_runner(*{**first, **second}[key][:2], large) for key in changed]
    times = time_alternating(runs, ROUNDS * SECONDS * len(runs), ROUNDS * SAMPLES) if runs else []
    return sum(counts[key] * time for key, time in zip(changed, times)) * 1e9


def _kernels(program: Program, large: bool) -> dict[str, tuple[CompiledKernel, list[bool], int]]:
    """Each kernel, which of its inputs are constants, and how often it runs."""
    found: dict[str, tuple[CompiledKernel, list[bool], int]] = {}
    for step in program.steps:
        if isinstance(step, CpuStep) and step.kernel is not None:
            kernel, fixed = program.kernels[step.kernel], [name in program.constants for name in step.inputs if name]
            loops = kernel.loops.replace(kernel.name, "kernel")
            text = f"{loops} {kernel.inputs} {kernel.outputs} {fixed} {large}"
            key = hashlib.sha256(text.encode()).hexdigest()
            found[key] = kernel, fixed, 1 + (found[key][2] if key in found else 0)
    return found


def _runner(kernel: CompiledKernel, fixed: list[bool], large: bool) -> Callable[[], None]:
    """A function that runs a kernel once, each time on other constants where the model is large."""
    rng = np.random.default_rng(0)
    given = [_random(rng, dtype, shape) for dtype, shape in kernel.inputs]
    outputs = [aligned_empty(numpy_dtype(dtype), shape) for dtype, shape in kernel.outputs]
    held = sum(array.nbytes for array, constant in zip(given, fixed) if constant)
    count = min(MOST_COPIES, 2 + target().cache_bytes // max(1, held)) if large else 1
    copies = itertools.cycle(
        [[_copy(array) if constant else array for array, constant in zip(given, fixed)] for _ in range(count)]
    )
    return lambda: kernel.run(next(copies), outputs)


def _copy(array: NDArray[np.generic]) -> NDArray[np.generic]:
    made = aligned_empty(array.dtype, array.shape)
    made[...] = array
    return made


def _random(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Around 0, or 0 and 1 of whole numbers, which are places everywhere."""
    made = aligned_empty(numpy_dtype(dtype), shape)
    made[...] = rng.standard_normal(shape) if made.dtype.kind == "f" else rng.integers(0, 2, shape)
    return made
