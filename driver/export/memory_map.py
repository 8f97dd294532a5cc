"""Location of each tensor of a Program in an exported model, fixed when it is exported."""

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
"""Bytes that tensors are aligned to: a line of the cache."""


class NotExportable(Sentence, ValueError):
    """A model that cannot be exported; the message names the operator or tensor, and the way out."""


@dataclass(frozen=True)
class Location:
    """Location of a tensor. area: "in" or "out", the caller's tensor number `at`; "memory" or "constants", from byte
    `at` on."""

    area: str
    at: int


@dataclass
class Places:
    """The place of each tensor that a run reads or writes. memory_bytes: of the instance's own, workspace of kernels
    included, which begins at `workspace`; constants: those that are read, as they lie."""

    of: dict[str, Location] = field(default_factory=dict)
    memory_bytes: int = 0
    workspace: int = 0
    constants: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __getitem__(self, name: str) -> Location:
        return self.of[name]


def align(size: int, unit: int = ALIGN) -> int:
    """Round `size` up to a multiple of `unit`."""
    return -(-size // unit) * unit


def nbytes(tensor: TensorInfo) -> int:
    """Bytes of a tensor of known shape."""
    return int(np.prod(tensor.shape, dtype=np.int64)) * itemsize(tensor.dtype)


def assign_places(program: Program) -> Places:
    """Assign a location to each tensor of `program`. NotExportable for what C cannot hold."""
    require_exportable(program)
    places = Places()
    for number, tensor in enumerate(program.inputs):
        places.of[tensor.name] = Location("in", number)
    for number, tensor in enumerate(program.outputs):  # one that is an input or a constant, too, is copied at the end
        if tensor.name not in program.constants:
            places.of.setdefault(tensor.name, Location("out", number))
    for name, offset in program.arena.offsets.items():
        places.of.setdefault(name, Location("memory", offset))
    _place_constants(program, places)
    size = align(program.arena.size)
    for step in program.steps:
        for name in _written_tensors(step):
            if name not in places.of:
                places.of[name], size = Location("memory", size), size + align(nbytes(program.tensors[name]))
        if isinstance(step, CpuStep) and step.kernel is None:
            _place_view(places, step, {tensor.name for tensor in program.outputs})
    places.workspace = size
    places.memory_bytes = size + align(max((kernel.workspace_bytes for kernel in program.kernels), default=0))
    return places


def _place_view(places: Places, step: CpuStep, outputs: set[str]) -> None:
    """Place a view where its tensor lies; one that is returned is copied there."""
    if step.outputs[0] not in outputs:
        places.of[step.outputs[0]] = places[step.inputs[0]]


def _place_constants(program: Program, places: Places) -> None:
    """Place the constants that the CPU's steps read, one after the other."""
    parts: list[NDArray[np.uint8]] = []
    size = 0
    for name in dict.fromkeys(_tensors_read(program)):
        if name in program.constants and name not in places.of:
            data = _as_bytes(program.constants[name])
            places.of[name] = Location("constants", size)
            parts.append(np.concatenate([data, np.zeros(align(len(data)) - len(data), np.uint8)]))
            size += len(parts[-1])
    places.constants = np.concatenate(parts) if parts else places.constants


def _as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _tensors_read(program: Program) -> Iterator[str]:
    """Names of all tensors that steps read, and of those that are returned."""
    for step in program.steps:
        names = tuple(pack.value for pack in step.pack) if isinstance(step, LaunchStep) else step.inputs
        yield from filter(None, names)
    yield from (tensor.name for tensor in program.outputs)


def _written_tensors(step: object) -> tuple[str, ...]:
    """Names of the tensors that the step writes; views write none."""
    if isinstance(step, LaunchStep):
        return tuple(unpack.value for unpack in step.unpack)
    return step.outputs if isinstance(step, CpuStep) and step.kernel is not None else ()


def require_exportable(program: Program) -> None:
    """Raise NotExportable where a step runs in Python, or C has no type for an input or output."""
    for step in program.steps:
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
