"""Check a Program from a file before it runs: a file with sound checksums may still hold anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

from celosia.compiler.program.dtypes import ONNX_TYPES, itemsize
from celosia.compiler.program.host.op import bodies
from celosia.compiler.program.model import (
    BY_ROWS,
    MATRICES,
    Contents,
    CpuStep,
    FormInfo,
    HostStep,
    LaunchStep,
    Pack,
    ProgramError,
    TensorInfo,
    matrix_counts,
)
from celosia.hw.spec.isa import instruction_bytes

ALIGNMENT = 64
MOST_DRAM = 1 << 32
"""Addresses of instructions have 32 bits."""
MOST_ELEMENTS = 1 << 48
Types = dict[str, tuple[str, tuple[int, ...]] | None]
"""(element type, shape) by tensor; None where it is known at run time only."""


def check(program: Contents) -> None:
    """ProgramError where a name, number, size or address in `program` cannot be right."""
    for tensor in (*program.inputs, *program.outputs, *program.kept, *program.tensors.values()):
        _tensor(tensor)
    _batch(program)
    _memory(program)
    for row in program.placements:
        sound = row.keys() >= {"name", "op", "place", "reason"} and row["place"] in ("accelerator", "cpu", "free")
        _require(sound, f"a placement is {str(row)[:60]}")
    known: Types = {name: (array.dtype.name, array.shape) for name, array in program.constants.items()}
    known |= {tensor.name: _of_info(tensor) for tensor in program.inputs}
    for number, step in enumerate(program.steps):
        try:
            made = _STEPS[type(step)](program, step, known)
        except ProgramError as error:
            raise ProgramError(f"step {number}: {error}") from None
        known |= made
    _names(known, (tensor.name for tensor in (*program.outputs, *program.kept)), "output")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)


def _names(known: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    for name in names:
        _require(name in known, f"{what} {name!r} is made by nothing")


def _tensor(tensor: TensorInfo) -> None:
    _require(tensor.kind in ("tensor", "sequence", "optional"), f"tensor {tensor.name!r} is a {tensor.kind!r}")
    _require(tensor.dtype in ONNX_TYPES.values(), f"tensor {tensor.name!r} has elements {tensor.dtype!r}")
    sound = all(size >= -1 for size in tensor.shape) and prod(map(abs, tensor.shape)) <= MOST_ELEMENTS
    _require(sound, f"tensor {tensor.name!r} has shape {list(tensor.shape)}")


def _batch(program: Contents) -> None:
    """All that counts samples counts as many."""
    if program.batched:
        tensors = [tensor for tensor in program.inputs if tensor.name in program.batched]
        _require(len(tensors) == len(set(program.batched)), "an input that counts samples is none")
        sizes = {tensor.shape[:1] for tensor in (*tensors, *program.outputs) if tensor.kind == "tensor"} - {(-1,)}
        sound = len(sizes) == 1 and min(sizes.pop() or (0,)) > 0
        _require(sound, "inputs and outputs count different numbers of samples")


def _of_info(tensor: TensorInfo) -> tuple[str, tuple[int, ...]] | None:
    return (tensor.dtype, tensor.shape) if tensor.kind == "tensor" and -1 not in tensor.shape else None


def _of(program: Contents, name: str) -> tuple[str, tuple[int, ...]]:
    found = _of_info(program.tensors[name]) if name in program.tensors else None
    if found is None:
        raise ProgramError(f"tensor {name!r} has no fixed type and shape")
    return found


def _memory(program: Contents) -> None:
    end = program.image_address + len(program.image)
    _require(program.image_address >= 0 and end <= program.dram_size <= MOST_DRAM, f"{program.dram_size} bytes of DRAM")
    arena = program.arena
    needed = 0
    for name, offset in arena.offsets.items():
        dtype, shape = _of(program, name)
        size = prod(shape) * itemsize(dtype)
        needed += size + ALIGNMENT
        inside = offset >= 0 and offset % ALIGNMENT == 0 and offset + size <= arena.size
        _require(inside, f"tensor {name!r} lies at {offset} of an arena of {arena.size} bytes")
    _require(0 <= arena.size <= needed, f"an arena of {arena.size} bytes for {len(arena.offsets)} tensors")


# Steps ------------------------------------------------------------------------------------------------------------


def _cpu(program: Contents, step: CpuStep, known: Types) -> Types:
    _names(known, step.inputs, "input")
    made: Types = {name: _of(program, name) for name in step.outputs}
    if step.kernel is None:
        _require(len(step.inputs) == len(step.outputs) == 1, "a view has one input and one output")
        before, after = known[step.inputs[0]], _of(program, step.outputs[0])
        sound = before is not None and before[0] == after[0] and prod(before[1]) == prod(after[1])
        _require(sound, f"output {step.outputs[0]!r} is no view of {step.inputs[0]!r}")
        return made
    _require(0 <= step.kernel < len(program.kernels), f"there is no kernel {step.kernel}")
    kernel = program.kernels[step.kernel]
    given = tuple(known[name] for name in step.inputs), tuple(made[name] for name in step.outputs)
    _require(given == (kernel.inputs, kernel.outputs), f"kernel {step.kernel} does not fit its inputs and outputs")
    return made


def _host(program: Contents, step: HostStep, known: Types) -> Types:
    read = [name for name in step.op.inputs if name] + [name for body in bodies(step.op) for name in body.captured]
    _names(known, filter(None, (*step.inputs, *read)), "input")  # "" is an input left out
    _require(len(step.outputs) == len(step.op.outputs), f"operator {step.op.op} has {len(step.op.outputs)} outputs")
    return {name: _of_info(program.tensors[name]) if name in program.tensors else None for name in step.outputs}


def _launch(program: Contents, step: LaunchStep, known: Types) -> Types:
    size = instruction_bytes(program.config)
    start, end = program.image_address, program.image_address + len(program.image)
    inside = start <= step.address and step.count >= 0 and step.address + step.count * size <= end
    _require(inside, f"{step.count} instructions at {step.address}")
    layers = step.layer_of
    sound = len(layers) == step.count and (not step.count or (layers.min() >= 0 and layers.max() < len(step.layers)))
    _require(bool(sound), "instructions belong to layers that there are not")
    numbers = [part.loops for layer in step.layers for part in layer.parts]
    _require(all(0 <= number < len(program.loops) for number in numbers), "layers run loops that there are not")
    for pack in step.pack:
        _names(known, (pack.value,), "input")
        kind = known[pack.value]
        _require(kind is not None and kind[0] in ("int8", "uint8"), f"tensor {pack.value!r} holds no bytes")
        _form(pack.form, kind[1] if kind else (), pack.value)
        _require(0 < pack.groups <= MOST_DRAM and 0 <= pack.address < MOST_DRAM, f"tensor {pack.value!r} has no place")
        _cache(program, pack, kind[1] if kind else ())
    for unpack in step.unpack:
        dtype, shape = _of(program, unpack.value)
        sound = dtype in ("int8", "uint8") and unpack.form.fold in ("", *MATRICES)
        _require(sound, f"tensor {unpack.value!r} holds no bytes of the accelerator")
        _form(unpack.form, shape, unpack.value)
        channels = (unpack.offset * program.config.group) + unpack.form.dims[1]
        inside = unpack.offset >= 0 and channels <= unpack.groups * program.config.group <= MOST_DRAM
        _require(inside and 0 <= unpack.address < MOST_DRAM, f"tensor {unpack.value!r} has no place")
    return {unpack.value: _of(program, unpack.value) for unpack in step.unpack}


def _cache(program: Contents, pack: Pack, shape: tuple[int, ...]) -> None:
    """The first rows of a tensor of this shape, which memory keeps from run to run, are the first of an input."""
    if pack.cache:
        of = next((each.shape for each in program.inputs if each.name == pack.cache), ())
        rows = len(of) > 1 and of[:-2] == shape[:-2] and of[-1] == shape[-1] and of[-2] >= 0
        sound = rows and pack.form.fold in BY_ROWS and program.config.batch == 1
        _require(sound, f"tensor {pack.value!r} does not begin with the rows of {pack.cache!r}")


def _form(form: FormInfo, shape: tuple[int, ...], name: str) -> None:
    """What FormInfo.arrange makes of a tensor of this shape is what the step says, and no more than DRAM holds."""
    message = f"tensor {name!r} cannot be arranged as {form}"
    sizes = (*form.kernel, *form.strides, *form.dilations)
    sound = form.fold in ("", "x", "xy", *MATRICES) and min(*sizes, 1) > 0 and min(*form.pads, *form.dims) >= 0
    _require(sound and -128 <= form.pad <= 127 and prod(form.dims) <= MOST_DRAM, message)
    if not form.fold:
        return _require(prod(form.dims) == prod(shape), message)
    if form.fold in MATRICES:
        count, columns, rows = matrix_counts(form.fold, shape)
        fits = count > 0 and form.dims[1] % count == 0 and columns <= form.dims[1] // count and rows <= form.dims[3]
        return _require(fits and form.dims[0] == form.dims[2] == 1, message)
    if len(shape) == 3:
        shape = (*shape[:2], 1, shape[2])
    _require(len(shape) == 4, message)
    taps, places = 1, 1
    for axis in (0, 1):
        folded = axis == 1 or form.fold == "xy"
        kernel, stride = (form.kernel[axis], form.strides[axis]) if folded else (1, 1)
        room = shape[2 + axis] + (form.pads[axis] + form.pads[axis + 2] if folded else 0)
        taps *= kernel
        places *= (room - (kernel - 1) * form.dilations[axis] - 1) // stride + 1
    return _require(places > 0 and prod(shape[:2]) * taps * places == prod(form.dims), message)


_STEPS: dict[type, Callable[[Contents, Any, Types], Types]] = {CpuStep: _cpu, HostStep: _host, LaunchStep: _launch}
