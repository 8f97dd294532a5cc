"""Price of a model: with an accelerator, predicted cycles of its launches and an estimate for the CPU; without one, the
measured time of its kernels.

Neighbourhoods estimates what a step of the search saves: it prices the changed operations and those next to them,
before and after, as small models. Cycles depend on shapes and not on weights, so that a block which a network has ten
times is priced once. The search prices the whole model later, when its turn comes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from celosia.compiler.graph.cost import host_cycles
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.select import Partition
from celosia.compiler.launch.image import Image
from celosia.compiler.program import CpuStep, Program
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel import CompiledKernel, aligned_empty
from celosia.compiler.superoptimise.graph import ONNX, ByteMap, BytesGraph, GraphOp, OriginalForm
from celosia.compiler.superoptimise.operators.definition import Unwritable
from celosia.compiler.superoptimise.operators.windows import Averaging
from celosia.compiler.superoptimise.writing import AlgebraWriter
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


NOISE = 0.03
"""Relative difference of two measured times that is taken for noise."""
POOLINGS = ("largest", "average")
"""Operators that convolutions of parallel branches overlap with."""


@dataclass
class Neighbourhoods:
    """Estimates savings of steps, and remembers the prices of parts of models.

    model: the original, whose opsets the parts get. pricing: how parts are priced. prices: of parts by `likeness`.
    measured: savings between two parts, where times were measured again. under_way: parts that helpers are pricing.
    """

    model: onnx.ModelProto
    pricing: Pricing
    prices: dict[str, Price] = field(default_factory=dict)
    measured: dict[tuple[str, str], float] = field(default_factory=dict)
    under_way: dict[str, Awaited] = field(default_factory=dict)

    def begin_weighing(self, before: BytesGraph, after: BytesGraph) -> Callable[[], bool]:
        """Let helpers price what `gain` will need. Returns a function that tells whether `gain` need not wait for
        them.
        """
        if self.pricing.elsewhere is None:
            return lambda: True
        keys = []
        for part in self._parts(before, after) or ():
            keys.append(key := likeness(part))
            if key not in self.prices and key not in self.under_way:
                try:
                    self.under_way[key] = self.pricing.elsewhere(self._model(part))
                except Unwritable:
                    self.prices[key] = INFEASIBLE
        return lambda: all(key not in self.under_way or self.under_way[key].ready() for key in keys)

    def gain(self, before: BytesGraph, after: BytesGraph) -> float | None:
        """Estimate the cycles or nanoseconds that the step from `before` to `after` saves; negative for a loss. None
        where it cannot be told; minus infinity where helpers could not price a part.
        """
        parts = self._parts(before, after)
        if parts is None:
            return None
        old, new = map(self._price_part, parts)
        if old is UNMEASURED or new is UNMEASURED:
            return -inf
        if old is INFEASIBLE:
            return None
        saved = old.total - new.total
        return self._measure_again(parts[0], parts[1]) if old.measured and saved > NOISE * old.total else saved

    def _parts(self, before: BytesGraph, after: BytesGraph) -> list[BytesGraph] | None:
        """Cut the neighbourhood of the difference out of both graphs. None where a tensor at its edge has no shape."""
        common = set(before.operations) & set(after.operations)
        changed = [
            [operation for operation in graph.operations if operation not in common] for graph in (before, after)
        ]
        adjacent = {
            operation for graph, operations in zip((before, after), changed)
            for operation in _adjacent_operations(graph, operations) if operation in common
        }  # fmt: skip
        parts = []
        for graph, operations in zip((before, after), changed):
            inside = adjacent.union(operations)
            part = _cut_out(graph, [operation for operation in graph.operations if operation in inside])
            if part is None:
                return None
            parts.append(part)
        return parts

    def _measure_again(self, before: BytesGraph, after: BytesGraph) -> float:
        """Measure both sides of a step in alternation, as the known times may be from different moments. A saving
        within NOISE counts as 0.
        """
        keys = likeness(before), likeness(after)
        if keys not in self.measured and self.pricing.measured_gain is not None:
            saved = self.pricing.measured_gain(self._model(before), self._model(after))
            self.measured[keys] = saved if saved > NOISE * self.prices[keys[0]].total else 0
        return self.measured.get(keys, 0)

    def _price_part(self, part: BytesGraph) -> Price:
        """Return the price of a part: the remembered one, the one from a helper, or a new one."""
        key = likeness(part)
        if key in self.under_way and self.under_way[key].ready():
            price = self.under_way.pop(key).price()
            if price is UNMEASURED:
                return price
            if price is not None:
                self.prices[key] = price
        if key not in self.prices:
            try:
                self.prices[key] = self.pricing.part(self._model(part))
            except (Unwritable, ModelError):
                self.prices[key] = INFEASIBLE
        return self.prices[key]

    def _model(self, part: BytesGraph) -> onnx.ModelProto:
        """Write a part as an ONNX model, with the opsets and functions of the original."""

        def info(name: str) -> onnx.ValueInfoProto:
            """Return name, type and shape of a tensor as ONNX has them."""
            kind = part.kinds[name]
            return helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype)), kind.shape
            )

        graph = helper.make_graph([], "part", list(map(info, part.inputs)), list(map(info, part.outputs)))
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=self.model.opset_import)
        model.ir_version = self.model.ir_version
        model.functions.extend(self.model.functions)
        return AlgebraWriter(part, model).write()


def likeness(part: BytesGraph) -> str:
    """Return a digest that is equal for graphs with the same operators on tensors of the same shapes, whatever their
    weights, scales and names.
    """
    numbers = {name: f"input {number} {part.kinds[name]}" for number, name in enumerate(part.inputs)}
    constants = {name: f"{array.dtype} {array.shape}" for name, array in part.constants.items()}
    lines = []
    for operation in part.operations:
        inputs = [numbers.get(name) or constants.get(name, "none") for name in operation.inputs]
        attributes = [(name, _without_scales(operation, value)) for name, value in operation.attributes]
        lines.append(f"{operation.op} {inputs} {attributes}")
        if isinstance(operation.note, OriginalForm):
            lines[-1] += f" {operation.note.operator} {operation.note.qdq} {operation.note.biased}"
        digest = hashlib.sha256(lines[-1].encode()).hexdigest()[:24]
        numbers |= {name: f"{digest}.{place}" for place, name in enumerate(operation.outputs)}
    lines = sorted(lines) + sorted(f"output {numbers.get(name)}" for name in part.outputs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _without_scales(operation: GraphOp, value: Any) -> Any:
    """Return the value of an attribute without scales and names of tensors, on which no price depends."""
    if isinstance(value, ByteMap):
        return (
            value.operator,
            value.attributes,
            value.dtype,
            value.qdq,
            [quantisation == value.result for quantisation in value.operands],
        )
    if isinstance(value, Averaging):
        return value.dtype, value.qdq
    if operation.op == ONNX:
        node = onnx.NodeProto.FromString(value)
        return node.domain, node.op_type, [attribute.SerializeToString() for attribute in node.attribute]
    return value


def _adjacent_operations(graph: BytesGraph, operations: Iterable[GraphOp]) -> set[GraphOp]:
    """Return the operations that read results of `operations` or make their operands. A product comes with its
    requantisation. A pooling comes with the branches parallel to it, whose convolutions overlap with it.
    """
    adjacent: set[GraphOp] = set()
    for operation in operations:
        adjacent.update(reader for name in operation.outputs for reader in graph.readers.get(name, []))
        if operation.op in POOLINGS:
            behind = _dependent_operations(graph, [operation], set())
            adjacent |= _dependent_operations(graph, graph.readers.get(operation.inputs[0], []), behind)
        adjacent.update(graph.makers[name] for name in operation.inputs if name in graph.makers)
    for operation in [*adjacent, *operations]:
        if operation.op == "requantise" and operation.inputs[0] in graph.makers:
            adjacent.add(graph.makers[operation.inputs[0]])
        elif operation.op in ("convolve", "multiply"):
            adjacent.update(graph.readers.get(operation.outputs[0], []))
    return adjacent


def _dependent_operations(graph: BytesGraph, operations: Iterable[GraphOp], excluded: set[GraphOp]) -> set[GraphOp]:
    """Return `operations` and all that depend on their results, stopping at those in `excluded`."""
    dependent, waiting = set[GraphOp](), list(operations)
    while waiting:
        operation = waiting.pop()
        if operation not in dependent and operation not in excluded:
            dependent.add(operation)
            waiting += (reader for name in operation.outputs for reader in graph.readers.get(name, []))
    return dependent


def _cut_out(graph: BytesGraph, operations: list[GraphOp]) -> BytesGraph | None:
    """Return these operations as a graph of their own; None where a tensor at its edge has no shape."""
    written = {name for operation in operations for name in operation.outputs if name}
    read = dict.fromkeys(
        name for operation in operations for name in operation.inputs if name and name not in graph.constants
    )
    inside = set(map(id, operations))
    inputs = [name for name in read if name not in written]
    outputs = [
        name for name in written
        if name in graph.outputs or any(id(reader) not in inside for reader in graph.readers.get(name, []))
    ]  # fmt: skip
    if not outputs or any(graph.kinds.get(name) is None or not graph.kinds[name].shape for name in (*inputs, *outputs)):
        return None
    return replace(graph, operations=tuple(operations), inputs=tuple(inputs), outputs=tuple(sorted(outputs)))
