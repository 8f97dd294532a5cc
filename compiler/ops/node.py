"""Nodes of a CPU kernel, and the types of their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def is_mapped(array: Array | None) -> bool:
    """Return whether the elements lie in a memory-mapped file; such arrays are not repacked, which would copy them.

    None, which stands for an input that is not constant, gives False.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(getattr(base, "obj", base), mmap)


@dataclass(frozen=True)
class InputType:
    """Shape and element type of an input of a CPU function, and its value where it is constant."""

    shape: tuple[int, ...]
    dtype: str
    value: Array | None = None

    @classmethod
    def of(cls, array: Array) -> InputType:
        """Create the type of a constant."""
        return cls(array.shape, array.dtype.name, array)


@dataclass(frozen=True)
class CpuNode:
    """One operator of a CpuFunction.

    op: its name in OPS. inputs, outputs: names of tensors; "" for an optional one that is left out. name: of the node
    in the model, for errors.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def input_type(value: Array | InputType | tuple[tuple[int, ...], str]) -> InputType:
    """Convert an array (a constant) or a pair (shape, element type) to an InputType."""
    if isinstance(value, np.ndarray):
        return InputType.of(value)
    return value if isinstance(value, InputType) else InputType(tuple(value[0]), value[1])
