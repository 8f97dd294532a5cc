"""Compile Programs of one model for different shapes of its inputs, each when its shapes first occur."""

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
from celosia.compiler.graph.external_data import has_files
from celosia.compiler.graph.importer import read_without_large_constants, with_free_sizes_open, with_inputs_set
from celosia.compiler.graph.importing.dimensions import Shapes, declared_shape, input_values, open_axes, open_inputs
from celosia.compiler.graph.importing.set_inputs import InputValues
from celosia.compiler.program import InputError, Program

PROGRAMS_HELD = 16
"""Number of Programs of a model that stay open; the least recently used one is closed first."""
Array = NDArray[Any]
Key = tuple[tuple[int, ...], ...]
"""Shapes of the inputs that have open sizes, with -1 where a Program leaves one open."""


class OpenModel:
    """A model whose inputs may have open sizes.

    source: a file or a model. name: of the model. inputs: names of all inputs. open: names of the inputs that have open
    sizes. values: of inputs that become constants.
    """

    def __init__(self, source: str | Path | onnx.ModelProto, values: InputValues | None = None) -> None:
        self.name = "model" if isinstance(source, onnx.ModelProto) else Path(source).stem
        source = with_inputs_set(source, values)
        self.proto = source if isinstance(source, onnx.ModelProto) else read_without_large_constants(source)
        self.source = source if has_files(self.proto) else self.proto
        """Argument for `compile`: the path if large constants lie in files beside it, else the parsed model."""
        self.inputs = list(input_values(self.proto))
        self.open = open_inputs(self.proto)
        self._labels = open_axes(self.proto)
        self._free: list[tuple[str, int]] | None = None  # inputs and axes whose sizes need no Program of their own

    def shapes(self, arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
        """Return the shapes to compile for so that these inputs can run, -1 for sizes that the Program can leave open.

        InputError where an input is missing, or sizes that must be equal differ; ModelError.
        """
        for name in self.open:
            if name not in arrays:
                value = input_values(self.proto)[name]
                kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
                raise InputError(f"input {name!r} is missing; it is {kind}{declared_shape(value)}")
        shapes = {name: np.shape(arrays[name]) for name in self.open}
        if self._free is None:
            fixed_shapes = with_free_sizes_open(self.source, shapes)
            self._free = [
                (name, axis) for name, dims in fixed_shapes.items() for axis, n in enumerate(dims) if n is None
            ]
        sizes: dict[str, tuple[int, str]] = {}
        for name, axis in self._free:
            label = self._labels[name, axis]
            size, other = sizes.setdefault(label, (shapes[name][axis], name))
            if size != shapes[name][axis]:
                raise InputError(
                    f"{label} is {size} in input {other!r} and {shapes[name][axis]} in {name!r}, dimension {axis}; "
                    "give equal sizes"
                )
        free = self._free
        return {
            name: tuple([-1 if (name, axis) in free else size for axis, size in enumerate(shape)])
            for name, shape in shapes.items()
        }


def fill_open_sizes(shape: Sequence[int | None], sizes: Sequence[int | None] | None) -> tuple[int | None, ...]:
    """Return `shape` with its open sizes (-1) replaced by those of `sizes`, if these are given and as many."""
    if sizes is None or len(sizes) != len(shape):
        return tuple(shape)
    return tuple(given_size if size == -1 else size for size, given_size in zip(shape, sizes))


class ProgramRunner(Protocol):
    """A context that runs one Program, such as a runtime."""

    program: Program

    def __exit__(self, *_: object) -> None: ...


R = TypeVar("R", bound=ProgramRunner)


class Specialised(Generic[R]):
    """Runners of all Programs of a model, by the shapes of its inputs.

    compiling: arguments of `compile` for all of them; its `shapes` fix sizes that a Program could leave open.
    open_runner: opens the runner of a Program. held: how many stay open.
    """

    def __init__(
        self, source: str | Path | onnx.ModelProto, compiling: Mapping[str, Any], open_runner: Callable[[Program], R],
        held: int = PROGRAMS_HELD,
    ) -> None:  # fmt: skip
        self.compiling, self.held = dict(compiling), held
        self.model = OpenModel(source, self.compiling.pop("set", None))
        self._open_runner = open_runner
        self.fixed_shapes: Shapes = self.compiling.pop("shapes", None) or {}
        self._runtimes: OrderedDict[Key, R] = OrderedDict()
        self._lock = Lock()

    def runtime(self, inputs: Mapping[str, Array]) -> R:
        """Return the runner for inputs of these shapes; compile its Program now if there is none yet.

        InputError where an input is missing; ModelError where the model cannot be compiled for them.
        """
        with self._lock:
            shapes = self.model.shapes(inputs)
            key = tuple(shapes.values())
            if key not in self._runtimes:
                self._runtimes[key] = self._compile_and_open(shapes)
            self._runtimes.move_to_end(key)
            return self._runtimes[key]

    def _compile_and_open(self, shapes: Shapes) -> R:
        """Compile the model for `shapes` and open a runner; close the least recently used if there are too many."""
        shapes = {name: fill_open_sizes(shape, self.fixed_shapes.get(name)) for name, shape in shapes.items()}
        program = compile_model(self.model.source, shapes=shapes, **self.compiling)
        program.name = self.model.name
        while len(self._runtimes) >= self.held:
            self._runtimes.popitem(last=False)[1].__exit__()
        return self._open_runner(program)

    @property
    def ready(self) -> int:
        """Number of runners that are open."""
        return len(self._runtimes)

    def close(self) -> None:
        """Close all runners."""
        while self._runtimes:
            self._runtimes.popitem()[1].__exit__()
