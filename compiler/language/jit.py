"""@cl.jit: a kernel that is compiled when it is first called with new types and shapes."""

from __future__ import annotations

import ctypes
import inspect
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from operator import attrgetter
from types import FunctionType
from typing import Any, NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.language import ops, traced_loops
from celosia.compiler.language.cpu import CpuKernel
from celosia.compiler.language.interpreter import value_of
from celosia.compiler.language.language_errors import LanguageError
from celosia.compiler.language.tile import ArrayArgument, KernelRun, dtype_name, in_program, stores
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.kernel import address_of
from celosia.compiler.program.host.thread_team import default_threads
from celosia.compiler.program.html import table
from celosia.hw.spec.config import Config
from celosia.sim.device import Device
from celosia.sim.devices import SIMULATORS, open_simulator

TARGETS = ("accelerator", "cpu")
INTERPRET_VARIABLE = b"CELOSIA_INTERPRET"
BUILTINS = {"range": traced_loops.range, "abs": ops.abs, **ops.IN_KERNELS}
"""Functions that replace Python's of the same name in a kernel."""
MAX_VARIANTS = 1024
"""Limit of the compiled variants of a kernel."""

_getenv = ctypes.pythonapi["getenv"]  # os.environ.get takes as long as the rest of a call
_getenv.argtypes, _getenv.restype = [ctypes.c_char_p], ctypes.c_char_p

Grid = Any
Variant = Any
"""Runs a kernel: called with arguments, device and addresses of arrays, it returns a report."""
_layout = attrgetter("dtype", "shape", "flags.num")


def is_interpreting() -> bool:
    """Return whether kernels run in numpy, because CELOSIA_INTERPRET is set."""
    return _getenv(INTERPRET_VARIABLE) not in (None, b"", b"0")


@dataclass(frozen=True)
class QuantisedArray:
    """An int8 array with its zero point, which kernels read as x.zero_point."""

    array: NDArray[Any]
    zero_point: int = 0


def quantised(array: NDArray[Any], zero_point: int = 0) -> QuantisedArray:
    """Create an argument of a kernel: `array`, whose values mean (value - zero_point) times a scale.

    `dot` subtracts the zero point of its operands; other functions use the values unchanged. On the accelerator the
    second operand of a product is weights, which are part of the program; a `quantised` one, such as keys, is read when
    the program runs.
    """
    return QuantisedArray(array, zero_point)


@dataclass
class Launched:
    """Result of a call.

    report: "target", "seconds", and for the accelerator "device", "config", "cycles", "instructions", "bytes_stored",
    "counters".
    """

    report: dict[str, Any] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """Return a row for each key of the report."""
        return table([], [(name, str(value)) for name, value in self.report.items() if name != "counters"])


class Kernel:
    """A function over tiles. `kernel[grid](*arguments)` runs it for every program of the grid and writes arrays in
    place.

    Inside another kernel it is called like a function.
    """

    def __init__(self, function: FunctionType, target: str, config: Any, threads: int | None) -> None:
        """Collect parameters, constexprs and the global numbers that the function reads. Raises LanguageError."""
        if target not in TARGETS:
            raise LanguageError(f"there is no target {target!r} for {function.__name__}; take {' or '.join(TARGETS)}")
        self.function, self.target, self.config, self.threads = function, target, config, threads
        self.name = function.__name__
        self.parameters = inspect.signature(function).parameters
        self.names = tuple(self.parameters)
        self.constants = frozenset(n for n, p in self.parameters.items() if _is_constexpr(p.annotation))
        self.is_constant = tuple(name in self.constants for name in self.names)
        code = function.__code__
        self.at = f"{code.co_filename}:{code.co_firstlineno}"
        self.global_numbers = tuple(
            n for n in code.co_names if isinstance(function.__globals__.get(n), (bool, int, float, str))
        )
        self.variants: dict[Any, Any] = {}
        self.devices: dict[str, Device] = {}
        self.on_cpu: Kernel | None = None
        self.__doc__ = function.__doc__

    def __repr__(self) -> str:
        return f"<Kernel {self.name}({', '.join(self.names)}) for the {self.target}, {self.at}>"

    def _repr_html_(self) -> str:
        """Return its parameters and docstring, for notebooks."""
        kinds = [(name, "constant" if name in self.constants else "array or scalar") for name in self.names]
        about = f"<p>{escape(inspect.getdoc(self) or '')}</p>"
        return f"<p>{escape(repr(self))}</p>{about}{table(['parameter', 'kind'], kinds)}"

    def __getitem__(self, grid: Grid) -> Callable[..., Launched]:
        return partial(self.launch, grid)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Trace the function as part of another kernel. Raises LanguageError outside of kernels."""
        if not in_program():
            raise LanguageError(
                f"{self.name} is called without a grid; write {self.name}[grid](...), where grid says how many "
                "programs run, as (1,) does"
            )
        return self.traced_function()(*args, **named)

    @cached_property
    def machine(self) -> Config:
        """Config of the accelerator."""
        return Config.load(self.config)

    def device(self, device: Any) -> Device:
        """Return a Device, or open the simulator "functional", "timed" or "rtl", which stays open.

        Raises LanguageError.
        """
        if isinstance(device, Device):
            if device.config.digest != self.machine.digest:
                here, there = self.machine.name, device.config.name
                raise LanguageError(f"the kernel is for the Config {here}, and the device is a {there}")
            return device
        if device not in self.devices:
            if device not in SIMULATORS:
                raise LanguageError(f"there is no device {device!r}; take {', '.join(SIMULATORS)}, or a Device")
            self.devices[device] = open_simulator(device, self.machine)
        return self.devices[device]

    def launch(self, grid: Grid, /, *args: Any, **named: Any) -> Launched:
        """Run the kernel once. Raises LanguageError for what the language or the target cannot do."""
        device = named.pop("device", "functional") if named else "functional"
        if (mode := getattr(_local, "mode", None)) is not None:
            return self._launch_in_operator(mode, grid, args, named)
        variant, arrays, places = self.variant(grid, args, named)
        return Launched(variant(arrays, device, places))

    def _launch_in_operator(self, mode: str, grid: Grid, args: tuple[Any, ...], named: dict[str, Any]) -> Launched:
        """Handle a call inside an operator of a model, see `launching`."""
        values = self._bind(args, named)
        grid, arrays = self._grid(grid, values), [v.array if type(v) is QuantisedArray else v for v in values]
        if mode == "capture":
            _local.launches.append(RecordedCall(self, grid, values, arrays))
        elif mode == "interpret":
            self._interpret(grid, values, arrays)
        else:
            self.on_cpu = self.on_cpu or Kernel(self.function, "cpu", None, self.threads)
            with launching(None):
                return self.on_cpu.launch(grid, *values)
        return Launched()

    def variant(
        self, grid: Grid, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Variant, list[Any], list[int]]:
        """Return (the function that runs the kernel on such arguments, the arguments, addresses of arrays).

        It is compiled when it is first needed.
        """
        values = args if not named and len(args) == len(self.names) else self._bind(args, named)
        grid = grid if type(grid) is tuple else self._grid(grid, values)
        key: list[Any] = [grid, _getenv(INTERPRET_VARIABLE)]
        arrays: list[Any] = []
        addresses: list[int] = []
        for value, constant in zip(values, self.is_constant):
            kind = type(value)
            if kind is QuantisedArray:
                key.append(value.zero_point)
                value = value.array
                kind = type(value)
            if kind is np.ndarray:
                key += _layout(value)
                addresses.append(address_of(value))
            elif constant or kind is int or not isinstance(value, (float, np.floating)):
                key += kind, value
                addresses.append(-1 - len(addresses))  # nowhere, and not where another is
            else:
                value = np.array([value], np.float32)
                addresses.append(address_of(value))
            arrays.append(value)
        if len(set(addresses)) < len(addresses):
            key.append(tuple(map(addresses.index, addresses)))
        if self.global_numbers:
            key += map(self.function.__globals__.get, self.global_numbers)
        known = tuple(key)
        try:
            variant = self.variants.get(known)
        except TypeError:  # it cannot be hashed
            self._require_hashable(values)
            raise
        if variant is None:
            if len(self.variants) >= MAX_VARIANTS:
                self.variants.clear()
            variant = self.variants[known] = self._variant(self._grid(grid, values), values)
        return variant, arrays, addresses

    def _refuse(self, name: str, value: Any) -> NoReturn:
        way = "a tuple" if name in self.constants else f"an array of numpy's, as np.array({name})"
        raise LanguageError(f"{self.at}: {name} of {self.name} is a {type(value).__name__}; give {way}")

    def _require_hashable(self, values: tuple[Any, ...]) -> None:
        """Raise LanguageError for an argument that cannot be part of a variant's key."""
        for name, value in zip(self.names, values):
            value = value.array if isinstance(value, QuantisedArray) else value
            if not isinstance(value, (np.ndarray, Hashable)):
                self._refuse(name, value)

    def _bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Bind arguments to parameters, ignoring Triton's hints. Raises LanguageError."""
        named = {name: value for name, value in named.items() if name in self.names or name not in IGNORED_HINTS}
        try:
            bound = inspect.signature(self.function).bind(*args, **named)
        except TypeError as error:
            raise LanguageError(f"{self.at}: {self.name}: {error}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def _grid(self, grid: Grid, values: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the grid as a tuple of one to three numbers. Raises LanguageError."""
        if callable(grid):
            grid = grid(dict(zip(self.names, values)))
        grid = grid if isinstance(grid, tuple) else (grid,)
        if not 1 <= len(grid) <= 3 or not all(isinstance(n, (int, np.integer)) and n >= 1 for n in grid):
            raise LanguageError(
                f"{self.at}: a grid is one to three positive numbers, and that of {self.name} is {grid}"
            )
        return tuple(map(int, grid))

    def _variant(self, grid: tuple[int, ...], values: tuple[Any, ...]) -> Variant:
        """Compile the kernel for these types and shapes, or wrap the interpreter."""
        if is_interpreting():
            return lambda arrays, device, places: self._interpret(grid, values, arrays)
        traced_function, given = self.trace(grid, values)
        for array in {each.array for each in stores(traced_function.top)}:
            if array.data is not None and not array.data.flags.writeable:
                raise LanguageError(f"{self.at}: {array.name}, which {self.name} writes, is read-only; give it a copy")
        if self.target == "cpu":
            return _CpuVariant(self, CpuKernel(self.name, traced_function), given)
        from celosia.compiler.language.accelerator import AcceleratorVariant

        return AcceleratorVariant(self, traced_function, given)

    def traced_function(self) -> FunctionType:
        """Return the function with Python's range, abs, min and max replaced by the language's."""
        f = self.function
        copy = FunctionType(f.__code__, {**BUILTINS, **f.__globals__}, f.__name__, f.__defaults__, f.__closure__)
        copy.__kwdefaults__ = f.__kwdefaults__
        return copy

    def trace(self, grid: tuple[int, ...], values: tuple[Any, ...]) -> tuple[KernelRun, dict[ArrayArgument, int]]:
        """Trace the kernel. Returns its program, and the position of the argument that each array is."""
        argument_of: dict[ArrayArgument, int] = {}
        with KernelRun(grid) as traced_function:
            self.traced_function()(*self._arguments(values, argument_of))
            if traced_function.scope is not traced_function.top:
                raise LanguageError(
                    f"{traced_function.scope.at}: a cl.range is left with `break` or `return`; mask instead"
                )
        return traced_function, argument_of

    def _arguments(self, values: tuple[Any, ...], argument_of: dict[ArrayArgument, int]) -> list[Any]:
        """Return the values with which the function is traced: arrays, tiles of floats, and constexprs."""
        values_passed: list[Any] = []
        same: dict[tuple[Any, ...], ArrayArgument] = {}
        for position, (name, value) in enumerate(zip(self.names, values)):
            quantised = isinstance(value, QuantisedArray)
            zero, data = (value.zero_point, value.array) if quantised else (0, value)
            if name not in self.constants and isinstance(data, np.ndarray):
                self._check(name, data)
                key = data.ctypes.data, data.shape, data.dtype, zero, quantised
                array = same.get(key) or ArrayArgument(name, data.shape, dtype_name(data.dtype), zero, quantised, data)
                if data.size:
                    same[key] = array
                argument_of.setdefault(array, position)
                values_passed.append(array)
            elif name not in self.constants and isinstance(value, (float, np.floating)):
                array = ArrayArgument(name, (1,), "float32", data=np.array([value], np.float32))
                argument_of[array] = position
                values_passed.append(ops.load(array))
            elif name not in self.constants and hasattr(data, "__array__") and not isinstance(data, np.generic):
                self._refuse(name, data)
            else:
                values_passed.append(value.item() if isinstance(value, np.generic) else value)
        return values_passed

    def _check(self, name: str, data: NDArray[Any]) -> None:
        """Raise LanguageError where an array is not native, aligned and C-contiguous."""
        if not data.dtype.isnative or not data.flags.aligned:
            raise LanguageError(
                f"{self.at}: {name} has bytes in another order, or between addresses; give a copy of it"
            )
        if not data.flags.c_contiguous:
            raise LanguageError(f"{self.at}: {name} is not C-contiguous; give {self.name} np.ascontiguousarray({name})")

    def _interpret(self, grid: tuple[int, ...], values: tuple[Any, ...], arrays: list[Any]) -> dict[str, Any]:
        """Run the kernel in numpy, program by program."""
        started = time.perf_counter()
        values = tuple(
            QuantisedArray(current, traced_value.zero_point) if isinstance(traced_value, QuantisedArray)
            else current[0] if isinstance(current, np.ndarray) and not isinstance(traced_value, np.ndarray) else current
            for traced_value, current in zip(values, arrays)
        )  # fmt: skip
        for ids in np.ndindex(*grid):
            with KernelRun(grid, ids, value_of):
                self.traced_function()(*self._arguments(values, {}))
        return {"target": "interpreter", "seconds": time.perf_counter() - started}


_local = threading.local()


@dataclass(frozen=True)
class RecordedCall:
    """A call that was recorded and not run."""

    kernel: Kernel
    grid: tuple[int, ...]
    values: tuple[Any, ...]
    arrays: list[Any]


@contextmanager
def launching(mode: str | None) -> Iterator[list[RecordedCall]]:
    """Record the kernels that are called inside ("capture"), interpret them ("interpret"), or run them on the CPU
    ("cpu").
    """
    before = getattr(_local, "mode", None)
    _local.mode, _local.launches = mode, []
    try:
        yield _local.launches
    finally:
        _local.mode = before


IGNORED_HINTS = ("num_warps", "num_stages", "num_ctas")
"""Hints of Triton that have no effect here."""


class _CpuVariant:
    """Machine code of a kernel for one set of types and shapes."""

    def __init__(self, kernel: Kernel, lowered: CpuKernel, argument_of: dict[ArrayArgument, int]) -> None:
        """Compile the loops. Raises LanguageError where the kernel stores nothing."""
        if not lowered.written:
            raise LanguageError(f"{kernel.at}: {kernel.name} stores nothing; cl.store writes what it computes")
        self.kernel = compile_function(lowered.function)
        ordered = sorted(lowered.arrays, key=lambda array: array in lowered.written)
        self.order = [argument_of[array] for array in ordered]
        self.sizes = [array.size * itemsize(array.dtype) for array in ordered]
        self.written = [i for i, array in enumerate(ordered) if array in lowered.written]
        self.threads = kernel.threads or default_threads()
        self.owner = kernel
        self.checked: list[int] = []

    def __call__(self, arrays: list[Any], device: Any, addresses: list[int]) -> dict[str, Any]:
        """Run on these addresses, which are checked where they differ from the last call's."""
        addresses = [addresses[n] for n in self.order]
        if addresses != self.checked:
            self._check(addresses)
            self.checked = addresses
        started = time.perf_counter()
        self.kernel.run_at(addresses, self.threads)
        return {"target": "cpu", "seconds": time.perf_counter() - started}

    def _check(self, addresses: list[int]) -> None:
        """Raise LanguageError where written memory is shared with another array."""
        for i in self.written:
            first, end = addresses[i], addresses[i] + self.sizes[i]
            for j, other_start in enumerate(addresses):
                if other_start < end and first < other_start + self.sizes[j] and j != i:
                    names = [self.owner.names[self.order[k]] for k in (i, j)]
                    raise LanguageError(
                        f"{self.owner.at}: {names[0]}, which the kernel writes, shares memory with {names[1]}; copy one"
                    )


def _is_constexpr(annotation: Any) -> bool:
    return annotation is ops.constexpr or (isinstance(annotation, str) and annotation.endswith("constexpr"))


@overload
def jit(*, target: str = ..., config: Any = ..., threads: int | None = ...) -> Callable[[Any], Kernel]: ...


@overload
def jit(function: Any, *, target: str = ..., config: Any = ..., threads: int | None = ...) -> Kernel: ...


def jit(function: Any = None, *, target: str = "accelerator", config: Any = "pynq", threads: int | None = None) -> Any:
    """Make a kernel of a function over tiles, for the "accelerator" of a Config or the "cpu", on so many threads."""
    if function is None:
        return lambda f: Kernel(f, target, config, threads)
    return Kernel(function, target, config, threads)
