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
from celosia.compiler.language.tile import ArrayArgument, KernelRun, LanguageError, dtype_name, is_in_kernel, stores
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.kernel import address_of
from celosia.compiler.program.host.thread_team import default_threads
from celosia.compiler.program.model import html_table
from celosia.hw.spec.config import Config
from celosia.sim.device import Device
from celosia.sim.devices import SIMULATORS, open_simulator

TARGETS = ("accelerator", "cpu")
"""Values of the argument `target` of `jit`."""
INTERPRET_VARIABLE = b"CELOSIA_INTERPRET"
"""Environment variable. Where it is set, and not to 0, kernels run in numpy."""
BUILTINS = {"range": traced_loops.range, "abs": ops.abs, **ops.IN_KERNELS}
"""Functions that replace Python's of the same name in a kernel."""
MAX_VARIANTS = 1024
"""Limit of the compiled variants of a kernel."""

_getenv = ctypes.pythonapi["getenv"]
"""C's getenv; os.environ.get would take as long as the rest of a kernel's call."""
_getenv.argtypes, _getenv.restype = [ctypes.c_char_p], ctypes.c_char_p

Grid = Any
"""Number of programs along one to three axes: a number, a tuple, or a function of the arguments that returns them."""
Variant = Any
"""A kernel compiled for one set of types and shapes: a function of (arguments, device, addresses of arrays) that runs
the kernel and returns the report of the run."""
_type_and_layout = attrgetter("dtype", "shape", "flags.num")
"""Function that returns all of an array that the code of a variant depends on, except its address."""


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
    """Result of a call `kernel[grid](...)`.

    report: facts about the run, by name: "target", "seconds", and for the accelerator "device", "config", "cycles",
    "instructions", "bytes_stored", "counters".
    """

    report: dict[str, Any] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """Return a row for each key of the report."""
        return html_table([], [(name, str(value)) for name, value in self.report.items() if name != "counters"])


class Kernel:
    """A function over tiles. `kernel[grid](*arguments)` runs it for every program of the grid.

    It writes its output arrays in place. Inside another kernel it is called like a function.

    constants: names of the parameters that are constexprs; is_constant: the same for each parameter. at: file and line
    of the function. global_numbers: global variables with numbers or strings that the function reads. variants:
    compiled code by the types, shapes and constexprs of a call. devices: open simulators by name. on_cpu: the same
    function for the CPU, for calls inside an operator of a model.
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
        return f"<p>{escape(repr(self))}</p>{about}{html_table(['parameter', 'kind'], kinds)}"

    def __getitem__(self, grid: Grid) -> Callable[..., Launched]:
        return partial(self.launch, grid)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Trace the function as part of another kernel. Raises LanguageError outside of kernels."""
        if not is_in_kernel():
            raise LanguageError(
                f"{self.name} is called without a grid; write {self.name}[grid](...), where grid says how many "
                "programs run, as (1,) does"
            )
        return self.function_for_tiles()(*args, **named)

    @cached_property
    def machine(self) -> Config:
        """Config of the accelerator."""
        return Config.load(self.config)

    def device(self, device: Any) -> Device:
        """Return the Device to run on: `device` itself, or the simulator "functional", "timed" or "rtl".

        A simulator is opened once and stays open. Raises LanguageError for another name, or a Device of another Config.
        """
        if isinstance(device, Device):
            if device.config.digest != self.machine.digest:
                own_name, device_name = self.machine.name, device.config.name
                raise LanguageError(f"the kernel is for the Config {own_name}, and the device is a {device_name}")
            return device
        if device not in self.devices:
            if device not in SIMULATORS:
                raise LanguageError(f"there is no device {device!r}; take {', '.join(SIMULATORS)}, or a Device")
            self.devices[device] = open_simulator(device, self.machine)
        return self.devices[device]

    def launch(self, grid: Grid, /, *args: Any, **named: Any) -> Launched:
        """Run the kernel for all programs of `grid`. Raises LanguageError for what language or target cannot do.

        named: keyword arguments of the kernel, and `device`, on which a kernel for the accelerator runs.
        """
        device = named.pop("device", "functional") if named else "functional"
        if (mode := getattr(_local, "mode", None)) is not None:
            return self._launch_in_operator(mode, grid, args, named)
        variant, arguments, addresses = self.variant(grid, args, named)
        return Launched(variant(arguments, device, addresses))

    def _launch_in_operator(self, mode: str, grid: Grid, args: tuple[Any, ...], named: dict[str, Any]) -> Launched:
        """Record, interpret or run a call inside an operator of a model, as `mode` of `redirect_launches` says."""
        values = self._bind_arguments(args, named)
        grid, arrays = self._resolve_grid(grid, values), [v.array if type(v) is QuantisedArray else v for v in values]
        if mode == "capture":
            _local.launches.append(RecordedCall(self, grid, values, arrays))
        elif mode == "interpret":
            self._interpret(grid, values, arrays)
        else:
            self.on_cpu = self.on_cpu or Kernel(self.function, "cpu", None, self.threads)
            with redirect_launches(None):
                return self.on_cpu.launch(grid, *values)
        return Launched()

    def variant(
        self, grid: Grid, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Variant, list[Any], list[int]]:
        """Return (the function that runs the kernel on such arguments, the arguments, addresses of arrays).

        The variant is compiled when it is first needed. Its key has everything on which its code depends: grid, types
        and shapes, constexprs, which arrays are the same, and global numbers. Floats are passed as arrays of one
        element; an argument without memory has a unique negative address.
        """
        values = args if not named and len(args) == len(self.names) else self._bind_arguments(args, named)
        grid = grid if type(grid) is tuple else self._resolve_grid(grid, values)
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
                key += _type_and_layout(value)
                addresses.append(address_of(value))
            elif constant or kind is int or not isinstance(value, (float, np.floating)):
                key += kind, value
                addresses.append(-1 - len(addresses))
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
            variant = self.variants[known] = self._compile_variant(self._resolve_grid(grid, values), values)
        return variant, arrays, addresses

    def _refuse_argument(self, name: str, value: Any) -> NoReturn:
        """Raise LanguageError for the argument `name`, whose type no kernel takes."""
        way = "a tuple" if name in self.constants else f"an array of numpy's, as np.array({name})"
        raise LanguageError(f"{self.at}: {name} of {self.name} is a {type(value).__name__}; give {way}")

    def _require_hashable(self, values: tuple[Any, ...]) -> None:
        """Raise LanguageError for an argument that cannot be part of a variant's key."""
        for name, value in zip(self.names, values):
            value = value.array if isinstance(value, QuantisedArray) else value
            if not isinstance(value, (np.ndarray, Hashable)):
                self._refuse_argument(name, value)

    def _bind_arguments(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the value of each parameter, in order, without Triton's hints. Raises LanguageError."""
        named = {name: value for name, value in named.items() if name in self.names or name not in IGNORED_HINTS}
        try:
            bound = inspect.signature(self.function).bind(*args, **named)
        except TypeError as error:
            raise LanguageError(f"{self.at}: {self.name}: {error}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def _resolve_grid(self, grid: Grid, values: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the grid as a tuple of one to three numbers. Raises LanguageError."""
        if callable(grid):
            grid = grid(dict(zip(self.names, values)))
        grid = grid if isinstance(grid, tuple) else (grid,)
        if not 1 <= len(grid) <= 3 or not all(isinstance(n, (int, np.integer)) and n >= 1 for n in grid):
            raise LanguageError(
                f"{self.at}: a grid is one to three positive numbers, and that of {self.name} is {grid}"
            )
        return tuple(map(int, grid))

    def _compile_variant(self, grid: tuple[int, ...], values: tuple[Any, ...]) -> Variant:
        """Compile the kernel for these types and shapes, or wrap the interpreter."""
        if is_interpreting():
            return lambda arrays, device, addresses: self._interpret(grid, values, arrays)
        run, positions = self.trace(grid, values)
        for array in {store.array for store in stores(run.top)}:
            if array.data is not None and not array.data.flags.writeable:
                raise LanguageError(f"{self.at}: {array.name}, which {self.name} writes, is read-only; give it a copy")
        if self.target == "cpu":
            return _CpuVariant(self, CpuKernel(self.name, run), positions)
        from celosia.compiler.language.accelerator import AcceleratorVariant

        return AcceleratorVariant(self, run, positions)

    def function_for_tiles(self) -> FunctionType:
        """Return a copy of the function in which range, abs, min and max are those of the language."""
        f = self.function
        copy = FunctionType(f.__code__, {**BUILTINS, **f.__globals__}, f.__name__, f.__defaults__, f.__closure__)
        copy.__kwdefaults__ = f.__kwdefaults__
        return copy

    def trace(self, grid: tuple[int, ...], values: tuple[Any, ...]) -> tuple[KernelRun, dict[ArrayArgument, int]]:
        """Trace the kernel. Returns the run, whose `top` has all statements, and each array's argument position."""
        positions: dict[ArrayArgument, int] = {}
        with KernelRun(grid) as run:
            self.function_for_tiles()(*self._wrap_arguments(values, positions))
            if run.scope is not run.top:
                raise LanguageError(f"{run.scope.at}: a cl.range is left with `break` or `return`; mask instead")
        return run, positions

    def _wrap_arguments(self, values: tuple[Any, ...], positions: dict[ArrayArgument, int]) -> list[Any]:
        """Return the values with which the function is traced: ArrayArguments, tiles for floats, and constexprs.

        Equal arrays become one ArrayArgument. positions: receives the position of the argument that each array is.
        """
        values_passed: list[Any] = []
        known: dict[tuple[Any, ...], ArrayArgument] = {}
        for position, (name, value) in enumerate(zip(self.names, values)):
            quantised = isinstance(value, QuantisedArray)
            zero, data = (value.zero_point, value.array) if quantised else (0, value)
            if name not in self.constants and isinstance(data, np.ndarray):
                self._check_layout(name, data)
                key = data.ctypes.data, data.shape, data.dtype, zero, quantised
                array = known.get(key) or ArrayArgument(name, data.shape, dtype_name(data.dtype), zero, quantised, data)
                if data.size:
                    known[key] = array
                positions.setdefault(array, position)
                values_passed.append(array)
            elif name not in self.constants and isinstance(value, (float, np.floating)):
                array = ArrayArgument(name, (1,), "float32", data=np.array([value], np.float32))
                positions[array] = position
                values_passed.append(ops.load(array))
            elif name not in self.constants and hasattr(data, "__array__") and not isinstance(data, np.generic):
                self._refuse_argument(name, data)
            else:
                values_passed.append(value.item() if isinstance(value, np.generic) else value)
        return values_passed

    def _check_layout(self, name: str, data: NDArray[Any]) -> None:
        """Raise LanguageError where an array is not native, aligned and C-contiguous."""
        if not data.dtype.isnative or not data.flags.aligned:
            raise LanguageError(
                f"{self.at}: {name} has bytes in another order, or between addresses; give a copy of it"
            )
        if not data.flags.c_contiguous:
            raise LanguageError(f"{self.at}: {name} is not C-contiguous; give {self.name} np.ascontiguousarray({name})")

    def _interpret(self, grid: tuple[int, ...], values: tuple[Any, ...], arrays: list[Any]) -> dict[str, Any]:
        """Run the kernel in numpy, program by program, and return the report.

        values: the arguments with which the variant was made, for their zero points and types; arrays: those of this
        call.
        """
        started = time.perf_counter()
        values = tuple(
            QuantisedArray(current, traced_value.zero_point) if isinstance(traced_value, QuantisedArray)
            else current[0] if isinstance(current, np.ndarray) and not isinstance(traced_value, np.ndarray) else current
            for traced_value, current in zip(values, arrays)
        )  # fmt: skip
        for ids in np.ndindex(*grid):
            with KernelRun(grid, ids, value_of):
                self.function_for_tiles()(*self._wrap_arguments(values, {}))
        return {"target": "interpreter", "seconds": time.perf_counter() - started}


_local = threading.local()
"""State of `redirect_launches` in this thread: `mode`, and `launches`, the recorded calls."""


@dataclass(frozen=True)
class RecordedCall:
    """A call of a kernel that was recorded instead of run.

    values: the value of each parameter. arrays: the same, with QuantisedArrays replaced by their arrays.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    values: tuple[Any, ...]
    arrays: list[Any]


@contextmanager
def redirect_launches(mode: str | None) -> Iterator[list[RecordedCall]]:
    """Change what calls of kernels do in the body of the `with` statement; operators of models need it.

    mode: "capture" records the calls in the list that is yielded, "interpret" runs them in numpy, "cpu" runs them on
    the CPU, and None runs each on its own target.
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

    def __init__(self, kernel: Kernel, lowered: CpuKernel, positions: dict[ArrayArgument, int]) -> None:
        """Compile the loops. Raises LanguageError where the kernel stores nothing.

        positions: of each array among the kernel's arguments.
        """
        if not lowered.written:
            raise LanguageError(f"{kernel.at}: {kernel.name} stores nothing; cl.store writes what it computes")
        self.kernel = compile_function(lowered.function)
        ordered = sorted(lowered.arrays, key=lambda array: array in lowered.written)
        self.order = [positions[array] for array in ordered]
        self.sizes = [array.size * itemsize(array.dtype) for array in ordered]
        self.written = [i for i, array in enumerate(ordered) if array in lowered.written]
        self.threads = kernel.threads or default_threads()
        self.owner = kernel
        self.checked: list[int] = []

    def __call__(self, arrays: list[Any], device: Any, addresses: list[int]) -> dict[str, Any]:
        """Run on these addresses, which are checked where they differ from the last call's."""
        addresses = [addresses[n] for n in self.order]
        if addresses != self.checked:
            self._check_overlaps(addresses)
            self.checked = addresses
        started = time.perf_counter()
        self.kernel.run_at(addresses, self.threads)
        return {"target": "cpu", "seconds": time.perf_counter() - started}

    def _check_overlaps(self, addresses: list[int]) -> None:
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
    """Return whether a parameter's annotation is cl.constexpr, which is a string under postponed annotations."""
    return annotation is ops.constexpr or (isinstance(annotation, str) and annotation.endswith("constexpr"))


@overload
def jit(*, target: str = ..., config: Any = ..., threads: int | None = ...) -> Callable[[Any], Kernel]: ...


@overload
def jit(function: Any, *, target: str = ..., config: Any = ..., threads: int | None = ...) -> Kernel: ...


def jit(function: Any = None, *, target: str = "accelerator", config: Any = "pynq", threads: int | None = None) -> Any:
    """Decorate a function over tiles as a Kernel.

    target: "accelerator" or "cpu". config: the accelerator's Config: an object, a file, or the name of a preset.
    threads: number of threads on the CPU; None for all.
    """
    if function is None:
        return lambda f: Kernel(f, target, config, threads)
    return Kernel(function, target, config, threads)
