"""Decide where each tensor of an exported model lies, and reject models that C cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import CpuStep, HostStep, LaunchStep, Program, TensorInfo
from celosia.compiler.program.dtypes import itemsize
from celosia.plain import Sentence

ALIGN = 64
"""Alignment of tensors in bytes: a cache line."""


class NotExportable(Sentence, ValueError):
    """A model that cannot be exported; the message names the operator or tensor, and the way out."""


@dataclass(frozen=True)
class Location:
    """Location of a tensor.

    area: "in" or "out" for the caller's tensor number `at`; "memory" or "constants" for bytes from `at` on.
    """

    area: str
    at: int


@dataclass
class MemoryMap:
    """Location of each tensor that a run reads or writes.

    locations: by name. memory_bytes: size of an instance's memory, including the workspace of kernels, which begins at
    byte `workspace`. constants: bytes of the constants that steps read.
    """

    locations: dict[str, Location] = field(default_factory=dict)
    memory_bytes: int = 0
    workspace: int = 0
    constants: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __getitem__(self, name: str) -> Location:
        return self.locations[name]


def align(size: int, unit: int = ALIGN) -> int:
    """Round `size` up to a multiple of `unit`."""
    return -(-size // unit) * unit


def nbytes(tensor: TensorInfo) -> int:
    """Return the bytes of a tensor of known shape."""
    return int(np.prod(tensor.shape, dtype=np.int64)) * itemsize(tensor.dtype)


def assign_locations(program: Program) -> MemoryMap:
    """Assign a location to each tensor of `program`. NotExportable for what C cannot hold."""
    require_exportable(program)
    memory_map = MemoryMap()
    for number, tensor in enumerate(program.inputs):
        memory_map.locations[tensor.name] = Location("in", number)
    for number, tensor in enumerate(
        program.outputs
    ):  # an output that is also an input or a constant is copied at the end
        if tensor.name not in program.constants:
            memory_map.locations.setdefault(tensor.name, Location("out", number))
    for name, offset in program.arena.offsets.items():
        memory_map.locations.setdefault(name, Location("memory", offset))
    _place_constants(program, memory_map)
    size = align(program.arena.size)
    for step in program.steps:
        for name in _written_tensors(step):
            if name not in memory_map.locations:
                memory_map.locations[name], size = Location("memory", size), size + align(nbytes(program.tensors[name]))
        if isinstance(step, CpuStep) and step.kernel is None:
            _place_view(memory_map, step, {tensor.name for tensor in program.outputs})
    memory_map.workspace = size
    memory_map.memory_bytes = size + align(max((kernel.workspace_bytes for kernel in program.kernels), default=0))
    return memory_map


def _place_view(memory_map: MemoryMap, step: CpuStep, outputs: set[str]) -> None:
    """Give the result of a view step (reshape) the location of its input; an output is copied instead."""
    if step.outputs[0] not in outputs:
        memory_map.locations[step.outputs[0]] = memory_map[step.inputs[0]]


def _place_constants(program: Program, memory_map: MemoryMap) -> None:
    """Locate the constants that steps read one after the other, and join their bytes."""
    padded: list[NDArray[np.uint8]] = []
    size = 0
    for name in dict.fromkeys(_tensors_read(program)):
        if name in program.constants and name not in memory_map.locations:
            data = _as_bytes(program.constants[name])
            memory_map.locations[name] = Location("constants", size)
            padded.append(np.concatenate([data, np.zeros(align(len(data)) - len(data), np.uint8)]))
            size += len(padded[-1])
    memory_map.constants = np.concatenate(padded) if padded else memory_map.constants


def _as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array in C order."""
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _tensors_read(program: Program) -> Iterator[str]:
    """Yield the names of all tensors that steps read, and of the outputs."""
    for step in program.steps:
        names = tuple(pack.value for pack in step.pack) if isinstance(step, LaunchStep) else step.inputs
        yield from filter(None, names)
    yield from (tensor.name for tensor in program.outputs)


def _written_tensors(step: object) -> tuple[str, ...]:
    """Return the names of the tensors that a step writes; a view writes none."""
    if isinstance(step, LaunchStep):
        return tuple(unpack.value for unpack in step.unpack)
    return step.outputs if isinstance(step, CpuStep) and step.kernel is not None else ()


def require_exportable(program: Program) -> None:
    """Raise NotExportable where a step runs in Python, or C has no type for an input or output."""
    for step in program.steps:
        if isinstance(step, HostStep) and step.bodies:
            raise NotExportable(
                f"{step.op.label} cannot be exported, for the exported runtime has no control flow; fix the input that "
                "decides it by --set or --shape, export the model without it from your framework, or run it "
                "with `celosia deploy` on a board that has Python"
            )
        if isinstance(step, HostStep):
            raise NotExportable(
                f"{step.op.label} cannot be exported: numpy computes it, as operators without loops of their own "
                "and those of unknown shapes; replace it, give shapes with --shape, or run the model with `celosia "
                "deploy` on a board that has Python"
            )
    for tensor in (*program.inputs, *program.outputs):
        label = f"tensor {tensor.name!r} ({program.shape_text(tensor)})"
        if tensor.kind != "tensor" or tensor.dtype not in C_TYPES:
            kind = tensor.kind if tensor.kind != "tensor" else tensor.dtype
            raise NotExportable(f"{label} cannot be exported: C has no {kind}; give the model tensors of numbers alone")
        if -1 in tensor.shape:
            raise NotExportable(
                f"{label} cannot be exported: its size is only known when it runs; "
                f"fix it with --shape {tensor.name}=..."
            )


C_TYPES = {
    "bool": "uint8_t", "int8": "int8_t", "uint8": "uint8_t", "int16": "int16_t", "uint16": "uint16_t",
    "int32": "int32_t", "uint32": "uint32_t", "int64": "int64_t", "uint64": "uint64_t", "float16": "uint16_t",
    "bfloat16": "uint16_t", "float32": "float", "float64": "double",
}  # fmt: skip
"""C's type of an element; floats of 16 bits are their bits."""
