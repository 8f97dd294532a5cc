"""Prepare a Program for runs on this machine: its kernels, its memory, and the form of its inputs."""

from __future__ import annotations

import platform
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import InputError, Program, ProgramError, TensorInfo
from celosia.compiler.program.dtypes import itemsize, numpy_dtype
from celosia.compiler.program.host.kernel import CompiledKernel, host, load_library
from celosia.compiler.program.host.kernel_compiler import kernel_linker
from celosia.compiler.program.host.op import HostError, check_size
from celosia.compiler.program.safe_files import reading


def with_kernels(program: Program) -> Program:
    """Return the Program with kernels that run here: compiled from their loops, or from a trusted shared object.

    ProgramError for a Program with machine code of another processor, or from a source that is not trusted.
    """
    if not program.machine:
        if all(kernel.code and kernel.host == host() for kernel in program.kernels):
            return program
        return replace(program, kernels=_compile_kernels(program))
    if platform.machine() != program.machine:
        raise ProgramError(
            f"the program was compiled for {program.machine} processors, and this one is {platform.machine()}; run it "
            "on its board (--device ssh://USER@BOARD), or here with --rebuild-kernels, which compiles its kernels again"
        )
    if program.kernels and not program.trusted:
        raise ProgramError(
            "the program has machine code, which may do anything with your rights; where you know who made it, give "
            "--trust, or --digest with its SHA-256 (Program.load takes trust and digest); --rebuild-kernels compiles "
            "its kernels here, of loops that are checked"
        )
    if program.kernels:
        try:
            library = load_library(program.library)
            for kernel in program.kernels:
                kernel.bind(library)
        except (OSError, AttributeError) as error:
            raise ProgramError(f"the program's kernels cannot be loaded: {error}") from None
    return program


def require_memory(program: Program, threads: int) -> None:
    """Raise ProgramError where a run needs more memory than this machine has."""
    workspace = max((kernel.workspace_for(threads) for kernel in program.kernels), default=0)
    constants = sum(array.nbytes for array in program.constants.values())
    tensors = (*program.inputs, *program.outputs, *program.kept)
    input_bytes = sum(prod(t.shape) * itemsize(t.dtype) for t in tensors if t.kind == "tensor" and -1 not in t.shape)
    try:
        dram = program.dram_size if program.launches else 0
        check_size(
            program.arena.size + constants + workspace + input_bytes + dram, f"a run of Program {program.name!r}"
        )
    except HostError as error:
        raise ProgramError(str(error)) from None


def _compile_kernels(program: Program) -> list[CompiledKernel]:
    """Compile the loops of the Program's kernels for this machine. ProgramError without LLVM, or for invalid loops."""
    llvm = kernel_linker()
    if llvm is None:
        raise ProgramError(
            "the program's kernels are compiled where they run, and here is no LLVM: install llvmlite, or compile the "
            "model with --target for this machine"
        )
    kernels = []
    for number, kernel in enumerate(program.kernels):
        with reading(f"kernel {number}", ProgramError, "of the program cannot be compiled of its loops"):
            kernels.append(llvm.from_loops(kernel, program.trusted))
    return kernels


def arena_views(program: Program) -> dict[str, NDArray[Any]]:
    """Allocate the arena of a Program. Return its tensors as arrays in that memory, by name."""
    memory = np.empty(program.arena.size + 64, np.uint8)  # 64: to align its start
    start = -memory.ctypes.data % 64
    arrays = {}
    for name, offset in program.arena.offsets.items():
        info = program.tensors[name]
        arrays[name] = np.ndarray(info.shape, numpy_dtype(info.dtype), memory.data, start + offset)
    return arrays


def fit_to_tensor(tensor: TensorInfo, value: Any, label: str, batched: bool = False) -> NDArray[Any]:
    """Return `value` as a contiguous array of this machine's byte order. InputError where it does not fit `tensor`.

    label: its type and shape, for the message. batched: its first axis may count any number of samples.
    """
    array = np.asarray(value)
    if not tensor.shape and array.size == 1:
        array = array.reshape(())  # onnxruntime takes [1], too, where a model declares a scalar
    shape = (-1, *tensor.shape[1:]) if batched else tensor.shape
    has_shape = array.ndim == len(shape) and all(size in (n, -1) for n, size in zip(array.shape, shape))
    if array.dtype.name != tensor.dtype or not has_shape:
        raise InputError(f"input {tensor.name!r} must be {label}, not {array.dtype}{list(array.shape)}")
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def as_contiguous(value: Any) -> Any:
    """Return an array with contiguous memory, which kernels need; other values, such as lists, as they are."""
    return np.asarray(value, order="C") if isinstance(value, np.ndarray) else value


def to_stored_bytes(array: NDArray[Any]) -> NDArray[np.int8]:
    """Convert bytes to the accelerator's form: uint8 with its top bit flipped."""
    return (array ^ 0x80).view(np.int8) if array.dtype == np.uint8 else array
