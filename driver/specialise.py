"""Programs of one model for the shapes of its inputs, compiled when they come for the first time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.dimensions import Shapes, declared, inputs_of, open_inputs
from celosia.compiler.graph.importer import read
from celosia.compiler.graph.specialise import without_free
from celosia.compiler.program import Program
from celosia.driver.runtime import InputError

PROGRAMS_HELD = 16
"""Programs of a model that are kept; the one that was used longest ago goes first."""
Array = NDArray[Any]
Key = tuple[tuple[int, ...], ...]
"""Sizes of the inputs that have open ones."""


class Runs(Protocol):
    """What runs a Program."""

    program: Program

    def __exit__(self, *_: object) -> None: ...


R = TypeVar("R", bound=Runs)


class Specialised(Generic[R]):
    """What runs each Program of `source`, an ONNX model.

    compiling: arguments of `compile` for all of them. make: what runs a Program. held: how many are kept.
    """

    def __init__(
        self, source: str | Path | onnx.ModelProto, compiling: Mapping[str, Any], make: Callable[[Program], R],
        held: int = PROGRAMS_HELD,
    ) -> None:  # fmt: skip
        self.source, self.compiling, self.make, self.held = source, dict(compiling), make, held
        self.name = "model" if isinstance(source, onnx.ModelProto) else Path(source).stem
        self.model = source if isinstance(source, onnx.ModelProto) else read(Path(source))
        self._open = open_inputs(self.model)
        self._free: set[tuple[str, int]] | None = None  # inputs and axes whose sizes need no Program of their own
        self._runtimes: OrderedDict[Key, R] = OrderedDict()
        self._lock = Lock()

    def runtime(self, inputs: Mapping[str, Array]) -> R:
        """What runs inputs of these shapes. InputError where one is missing; ModelError where it cannot be compiled."""
        for name in self._open:
            if name not in inputs:
                value = inputs_of(self.model)[name]
                kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
                raise InputError(f"input {name!r} is missing; it is {kind}{declared(value)}")
        shapes = {name: np.shape(inputs[name]) for name in self._open}
        with self._lock:
            if self._free is None:
                given = without_free(self.model, shapes)
                self._free = {(name, axis) for name, dims in given.items() for axis, n in enumerate(dims) if n is None}
            free = self._free
            key = tuple(
                tuple([-1 if (name, axis) in free else size for axis, size in enumerate(shape)])
                for name, shape in shapes.items()
            )
            if key not in self._runtimes:
                self._runtimes[key] = self._made(dict(zip(shapes, key)))
            self._runtimes.move_to_end(key)
            return self._runtimes[key]

    def _made(self, shapes: Shapes) -> R:
        program = compile_model(self.model, shapes=shapes, **self.compiling)
        program.name = self.name
        while len(self._runtimes) >= self.held:
            self._runtimes.popitem(last=False)[1].__exit__()
        return self.make(program)

    def close(self) -> None:
        """Close what runs them."""
        while self._runtimes:
            self._runtimes.popitem()[1].__exit__()
