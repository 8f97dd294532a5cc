"""Compiled kernels: machine code that is called on numpy arrays."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import struct
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel_compiler import kernel_linker
from celosia.compiler.program.host.thread_team import CallList, KernelCall, team

Array = NDArray[Any]
MAGIC = b"celosia2"
"""First bytes of a saved kernel; the digit is the version of its calling convention."""
Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""(element type, shape) of each array."""


def host() -> str:
    """Return target triple, processor name and features for which kernels are compiled here; "" without LLVM."""
    llvm = kernel_linker()
    return "" if llvm is None else str(llvm.host())


def load_library(data: bytes) -> ctypes.CDLL:
    """Load a shared object, given as bytes. Raises OSError where it is not for this machine."""
    with tempfile.NamedTemporaryFile(
        suffix=".so"
    ) as file:  # a new name: dlopen would return a library of the same name
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


def aligned_empty(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Allocate an array that begins at a cache line: vectors that span two lines take twice as long to load.

    >>> aligned_empty(np.dtype("float32"), (3, 5)).ctypes.data % 64
    0
    """
    size = dtype.itemsize * prod(shape)
    memory = np.empty(size + 64, np.uint8)
    return np.ndarray(shape, dtype, memory, -address_of(memory) % 64)


MIN_ALIGNED_BYTES = 1 << 15
"""Bytes of an array from which it is aligned: for smaller ones, in the first-level cache, that takes longer than it
saves."""


def new_output(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Allocate an array for a kernel to write, aligned if it is large."""
    return aligned_empty(dtype, shape) if dtype.itemsize * prod(shape) >= MIN_ALIGNED_BYTES else np.empty(shape, dtype)


def align(array: Array) -> Array:
    """Return `array` where it is small or begins at a cache line, else an aligned copy."""
    if array.nbytes < MIN_ALIGNED_BYTES or array.dtype.hasobject or address_of(array) % 64 == 0:
        return array
    copy = aligned_empty(array.dtype, array.shape)
    copy[...] = array
    return copy


_local = threading.local()
"""Workspace of each thread."""
_HEAD = object.__basicsize__
"""Bytes of the head of a Python object, after which numpy stores the address of the elements."""
_pointer_at = ctypes.c_void_p.from_address
"""Looked up once, because attributes of ctypes types are slow to find."""


def address_of(array: Array) -> int:
    """Return the address of an array's elements: in numpy's C API the first field after the object's head.

    `array.ctypes.data` is equal and takes ten times as long, which small kernels would notice.
    """
    return _pointer_at(id(array) + _HEAD).value or 0


def _workspace(size: int) -> int:
    """Return the address of `size` bytes, aligned to 64, for the kernel that this thread runs next; 0 for size 0."""
    if size == 0:
        return 0
    buffer: Array | None = getattr(_local, "workspace", None)
    if buffer is None or buffer.size < size + 64:
        _local.workspace = buffer = np.empty(size + 64, np.uint8)
    return -(-buffer.ctypes.data // 64) * 64


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled loop nest as machine code. Call it with the input arrays; it returns the list of outputs.

    `run` writes into existing arrays instead; `call` prepares a call for a CallList. `to_bytes` and `from_bytes`
    transfer the machine code. Results do not depend on the number of threads.

    name: of its function. inputs, outputs: element types and shapes. workspace_bytes: memory for intermediates that one
    thread needs; shared_bytes: the part of it that all threads share. code: relocatable machine code. host: the machine
    that it is for, as `host()` returns it. phases: for each phase, whether threads share it.
    """

    name: str
    inputs: Signature
    outputs: Signature
    workspace_bytes: int
    code: bytes = field(repr=False)
    host: str = field(repr=False)
    in_place: tuple[tuple[int, int], ...] = ()
    """Pairs (output, input) of positions: the kernel reads this input from the memory of this output, into which `run`
    copies it first where it lies elsewhere."""
    shared_bytes: int = 0
    phases: tuple[bool, ...] = ()
    loops: str = field(default="", repr=False)
    """Source text, from which it can be compiled again; `tables` has the values of constants that the text omits."""
    tables: tuple[Array, ...] = field(default=(), repr=False, compare=False)

    def __call__(self, *inputs: Array, threads: int = 1) -> list[Array]:
        outputs = [new_output(dtype, shape) for dtype, shape in self._types[len(self.inputs) :]]
        self.run(inputs, outputs, threads)
        return outputs

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array], threads: int = 1) -> None:
        """Compute `outputs`, existing arrays, on up to `threads` threads.

        outputs: C-contiguous; they overlap no other array, except for the inputs that `in_place` names. Raises
        ValueError where number, type or shape of an array differ from the kernel's.
        """
        arrays = self._check_arrays(inputs, outputs)
        addresses = [*map(address_of, arrays)]
        for output, input_position in self.in_place:
            target = len(self.inputs) + output
            if addresses[target] != addresses[input_position]:
                ctypes.memmove(addresses[target], addresses[input_position], arrays[target].nbytes)
        self.run_at(addresses, threads)

    def run_at(self, addresses: Sequence[int], threads: int = 1) -> None:
        """Run on these addresses of inputs and outputs, without checks."""
        workspace = _workspace(self.workspace_for(threads)) if self.workspace_bytes else 0
        if threads == 1 or not self.phases:
            self._entry(self._arguments.pack(*addresses, workspace))
        else:
            CallList([self._call(addresses, workspace)], team(self.library), threads).run()

    def call(self, arrays: Sequence[Array | None], workspace: int) -> KernelCall:
        """Prepare a call for a CallList: check inputs and outputs once, and take their addresses.

        arrays: inputs, then outputs; their memory must stay where it is. None where the address is filled in later; it
        is 0 until then. workspace: address of `workspace_for` bytes. Raises ValueError as `run` does, and where an
        input that is computed in place lies elsewhere.
        """
        for array, (dtype, shape) in zip(arrays, self._types):
            if array is not None and (array.dtype, array.shape) != (dtype, shape):
                raise ValueError(f"{self.name}: an array is {array.dtype}{array.shape}, not {dtype}{shape}")
            if array is not None and not array.flags.c_contiguous:
                raise ValueError(f"{self.name}: an array is not C-contiguous")
        addresses = [0 if array is None else address_of(array) for array in arrays]
        if not all(
            addresses[input_position] == addresses[len(self.inputs) + output] != 0
            for output, input_position in self.in_place
        ):
            raise ValueError(f"{self.name}: an input that is computed in place lies elsewhere")
        return self._call(addresses, workspace)

    def _call(self, addresses: Sequence[int], workspace: int) -> KernelCall:
        """Return a call with these addresses, without checks."""
        linked = self._linked
        phases = tuple((linked[name], divided) for name, divided in zip(self._part_names, self.phases))
        return KernelCall(linked[self.name], phases, (*addresses, workspace))

    def workspace_for(self, threads: int) -> int:
        """Return the bytes of workspace for this number of threads; it begins at a multiple of 64."""
        return self.workspace_bytes + (self.workspace_bytes - self.shared_bytes) * (threads - 1)

    def _check_arrays(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
        """Return inputs and outputs, checked, with inputs copied where they are not C-contiguous. Raises ValueError."""
        if len(inputs) != len(self.inputs) or len(outputs) != len(self.outputs):
            raise ValueError(
                f"{self.name}: {len(inputs)} inputs and {len(outputs)} outputs given, "
                f"{len(self.inputs)} and {len(self.outputs)} expected"
            )
        arrays: list[Array] = []  # the caller keeps them alive until the kernel has returned
        for array, (dtype, shape) in zip((*inputs, *outputs), self._types):
            if type(array) is not np.ndarray:
                array = np.asarray(array)
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(f"{self.name}: array {len(arrays)} is {array.dtype}{array.shape}, not {dtype}{shape}")
            if not array.flags.c_contiguous:
                if len(arrays) >= len(self.inputs):
                    raise ValueError(f"{self.name}: output {len(arrays) - len(self.inputs)} is not C-contiguous")
                array = np.ascontiguousarray(array)
            arrays.append(array)
        return arrays

    @functools.cached_property
    def _types(self) -> tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]:
        """numpy type and shape of each input, then of each output."""
        return tuple((numpy_dtype(dtype), shape) for dtype, shape in (*self.inputs, *self.outputs))

    @functools.cached_property
    def _linked(self) -> Any:
        """Addresses of the functions by name; the first use links the machine code into this process.

        Raises RuntimeError where it was compiled for another machine.
        """
        if self.host != host():
            made_for = " ".join(self.host.split()[:2])
            raise RuntimeError(f"kernel {self.name} was made for {made_for}; compile the model again on this machine")
        llvm = kernel_linker()
        assert llvm is not None  # or this would not be the host that it was made for
        return llvm.link([self.name, *self._part_names], self.code)  # the result owns the code

    def bind(self, library: ctypes.CDLL) -> None:
        """Take the functions from a shared object instead of `code`. Raises AttributeError where it lacks one."""
        names = [self.name, *self._part_names]
        self.__dict__["_linked"] = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names}
        self.__dict__["library"] = library  # keeps the code alive

    @functools.cached_property
    def library(self) -> ctypes.CDLL | None:
        """Shared object that contains the code; None for code that was compiled here."""
        return None

    @functools.cached_property
    def _entry(self) -> Any:
        """Function that does all of the work on one thread.

        It is declared with one argument, the address of the argument list: it does not read the other two, the number
        of the thread and that of all threads, whose conversion in ctypes would take longer than all else.
        """
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._linked[self.name])

    @functools.cached_property
    def _arguments(self) -> struct.Struct:
        """Layout of the argument list: addresses of the arrays and of the workspace."""
        return struct.Struct(f"{len(self.inputs) + len(self.outputs) + 1}Q")

    @property
    def _part_names(self) -> list[str]:
        """Names of the functions that do one thread's part of each phase."""
        return [f"{self.name}.{number}" for number in range(len(self.phases))]

    def to_bytes(self) -> bytes:
        """Serialise the machine code with its SHA-256; `from_bytes` reads it on a processor of the same kind."""
        head = {
            "name": self.name, "inputs": self.inputs, "outputs": self.outputs,
            "workspace_bytes": self.workspace_bytes, "host": self.host, "in_place": self.in_place,
            "shared_bytes": self.shared_bytes, "phases": self.phases,
        }  # fmt: skip
        text = json.dumps(head).encode()
        payload = struct.pack("<I", len(text)) + text + self.code
        return MAGIC + hashlib.sha256(payload).digest() + payload

    @classmethod
    def from_bytes(cls, data: bytes) -> CompiledKernel:
        """Read a kernel that `to_bytes` wrote. Raises ValueError where `data` is damaged or something else."""
        payload = data[40:]
        if data[:8] != MAGIC or data[8:40] != hashlib.sha256(payload).digest():
            raise ValueError("not a kernel, or a damaged one")
        (size,) = struct.unpack_from("<I", payload)
        head = json.loads(payload[4 : 4 + size])

        def signature(rows: list[Any]) -> Signature:
            return tuple((dtype, tuple(shape)) for dtype, shape in rows)

        return cls(
            head["name"], signature(head["inputs"]), signature(head["outputs"]), head["workspace_bytes"],
            payload[4 + size :], head["host"], tuple((output, position) for output, position in head["in_place"]),
            head["shared_bytes"], tuple(head["phases"]),
        )  # fmt: skip
