"""Programs of one model for different shapes of its inputs, compiled when these shapes first come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.importing.dimensions import Shapes, declared_shape, input_values, open_axes, open_inputs
from celosia.compiler.graph.importing.external_data import has_files
from celosia.compiler.graph.importing.importer import read_mapped
from celosia.compiler.graph.importing.specialise import open_free_sizes
from celosia.compiler.program import InputError, Program

PROGRAMS_HELD = 16
"""Programs of a model that are kept; the one that was used longest ago goes first."""
Array = NDArray[Any]
Key = tuple[tuple[int, ...], ...]
"""Shapes of the inputs that have open sizes, with -1 where a Program leaves one open."""


class OpenModel:
    """A model whose inputs may have open sizes. open: those inputs."""

    def __init__(self, source: str | Path | onnx.ModelProto) -> None:
        self.proto = source if isinstance(source, onnx.ModelProto) else read_mapped(source)
        self.source = source if has_files(self.proto) else self.proto
        """Source to compile: the file again, where large constants lie beside it."""
        self.name = "model" if isinstance(source, onnx.ModelProto) else Path(source).stem
        self.inputs = list(input_values(self.proto))
        self.open = open_inputs(self.proto)
        self._labels = open_axes(self.proto)
        self._free: list[tuple[str, int]] | None = None  # inputs and axes whose sizes need no Program of their own

    def shapes(self, arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
        """Shapes to compile for, to run these inputs. InputError where one is missing; ModelError."""
        for name in self.open:
            if name not in arrays:
                value = input_values(self.proto)[name]
                kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
                raise InputError(f"input {name!r} is missing; it is {kind}{declared_shape(value)}")
        shapes = {name: np.shape(arrays[name]) for name in self.open}
        if self._free is None:
            fixed_shapes = open_free_sizes(self.source, shapes)
            self._free = [
                (name, axis) for name, dims in fixed_shapes.items() for axis, n in enumerate(dims) if n is None
            ]
        sizes: dict[str, tuple[int, str]] = {}
        for name, axis in self._free:
            label = self._labels[name, axis]
            size, first = sizes.setdefault(label, (shapes[name][axis], name))
            if size != shapes[name][axis]:
                raise InputError(
                    f"{label} is {size} in input {first!r} and {shapes[name][axis]} in {name!r}, dimension {axis}; "
                    "give equal sizes"
                )
        free = self._free
        return {
            name: tuple([-1 if (name, axis) in free else size for axis, size in enumerate(shape)])
            for name, shape in shapes.items()
        }


def fill_open_sizes(shape: Sequence[int | None], sizes: Sequence[int | None] | None) -> tuple[int | None, ...]:
    """Return `shape` with `sizes` where it leaves them open."""
    if sizes is None or len(sizes) != len(shape):
        return tuple(shape)
    return tuple(fixed if size == -1 else size for size, fixed in zip(shape, sizes))


class Runs(Protocol):
    """Runner of one Program."""

    program: Program

    def __exit__(self, *_: object) -> None: ...


R = TypeVar("R", bound=Runs)


class Specialised(Generic[R]):
    """Runners of all Programs of a model, by the shapes of its inputs.

    compiling: arguments of `compile` for all of them; `shapes` among these give sizes that could stay open. make: what
    runs a Program. held: how many are kept.
    """

    def __init__(
        self, source: str | Path | onnx.ModelProto, compiling: Mapping[str, Any], make: Callable[[Program], R],
        held: int = PROGRAMS_HELD,
    ) -> None:  # fmt: skip
        self.model, self.compiling, self.make, self.held = OpenModel(source), dict(compiling), make, held
        self.fixed_shapes: Shapes = self.compiling.pop("shapes", None) or {}
        self._runtimes: OrderedDict[Key, R] = OrderedDict()
        self._lock = Lock()

    def runtime(self, inputs: Mapping[str, Array]) -> R:
        """Return the runner for inputs of these shapes. InputError where one is missing; ModelError where it cannot be
        compiled."""
        with self._lock:
            shapes = self.model.shapes(inputs)
            key = tuple(shapes.values())
            if key not in self._runtimes:
                self._runtimes[key] = self._compile_and_open(shapes)
            self._runtimes.move_to_end(key)
            return self._runtimes[key]

    def _compile_and_open(self, shapes: Shapes) -> R:
        """Compile the model for `shapes` and open a runner; close the oldest runners where too many are open."""
        shapes = {name: fill_open_sizes(shape, self.fixed_shapes.get(name)) for name, shape in shapes.items()}
        program = compile_model(self.model.source, shapes=shapes, **self.compiling)
        program.name = self.model.name
        while len(self._runtimes) >= self.held:
            self._runtimes.popitem(last=False)[1].__exit__()
        return self.make(program)

    @property
    def ready(self) -> int:
        """Number of Programs compiled so far."""
        return len(self._runtimes)

    def close(self) -> None:
        """Close all runners."""
        while self._runtimes:
            self._runtimes.popitem()[1].__exit__()
