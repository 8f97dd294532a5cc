"""Validation of a Program from a file before it runs: valid checksums do not make its contents safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    Step,
    TensorInfo,
    matrix_counts,
)
from celosia.hw.spec.isa import instruction_bytes

ALIGNMENT = 64
"""Bytes to which buffers in the arena are aligned."""
MAX_DRAM_BYTES = 1 << 32
"""Limit of the accelerator's memory: addresses in instructions have 32 bits."""
MAX_ELEMENTS = 1 << 48
"""Limit of the elements of a tensor."""
Types = dict[str, tuple[str, tuple[int, ...]] | None]
"""Tensor -> (element type, shape), or None where they are known only at run time."""


def check(program: Contents) -> None:
    """Raise ProgramError where a name, number, size or address in `program` cannot be right."""
    for tensor in (*program.inputs, *program.outputs, *program.kept, *program.tensors.values()):
        _check_tensor(tensor)
    _check_batch(program)
    _check_memory(program)
    for row in program.placements:
        is_valid = row.keys() >= {"name", "op", "place", "reason"} and row["place"] in ("accelerator", "cpu", "free")
        _require(is_valid, f"a placement is {str(row)[:60]}")
    known: Types = {name: (array.dtype.name, array.shape) for name, array in program.constants.items()}
    known |= {tensor.name: _type_of_info(tensor) for tensor in program.inputs}
    _check_steps(program, program.steps, known)
    _require_known(known, (tensor.name for tensor in (*program.outputs, *program.kept)), "output")


def _check_steps(program: Contents, steps: Sequence[Step], known: Types) -> None:
    """Check steps in order; add the types of their outputs to `known`, those of the tensors that exist before them."""
    for position, step in enumerate(steps):
        try:
            known |= _STEPS[type(step)](program, step, known)
        except ProgramError as error:
            raise ProgramError(f"step {position}: {error}") from None


def _require(condition: bool, message: str) -> None:
    """Raise ProgramError with `message` where the condition does not hold."""
    if not condition:
        raise ProgramError(message)


def _require_known(known: Mapping[str, Any], names: Iterable[str], role: str) -> None:
    """Raise ProgramError for the first of `names` that is not in `known`: no earlier step makes it."""
    for name in names:
        _require(name in known, f"{role} {name!r} is made by nothing")


def _check_tensor(tensor: TensorInfo) -> None:
    """Check the kind, element type and shape of a tensor."""
    _require(tensor.kind in ("tensor", "sequence", "optional"), f"tensor {tensor.name!r} is a {tensor.kind!r}")
    _require(tensor.dtype in ONNX_TYPES.values(), f"tensor {tensor.name!r} has elements {tensor.dtype!r}")
    is_valid = all(size >= -1 for size in tensor.shape) and prod(map(abs, tensor.shape)) <= MAX_ELEMENTS
    _require(is_valid, f"tensor {tensor.name!r} has shape {list(tensor.shape)}")


def _check_batch(program: Contents) -> None:
    """Check that all batched inputs and the outputs have the same batch size."""
    if program.batched:
        tensors = [tensor for tensor in program.inputs if tensor.name in program.batched]
        _require(len(tensors) == len(set(program.batched)), "an input that counts samples is none")
        sizes = {tensor.shape[:1] for tensor in (*tensors, *program.outputs) if tensor.kind == "tensor"} - {(-1,)}
        is_valid = len(sizes) == 1 and min(sizes.pop() or (0,)) > 0
        _require(is_valid, "inputs and outputs count different numbers of samples")


def _type_of_info(tensor: TensorInfo) -> tuple[str, tuple[int, ...]] | None:
    """Return (element type, shape) of a tensor; None for sequences, and where a size is known only at run time."""
    return (tensor.dtype, tensor.shape) if tensor.kind == "tensor" and -1 not in tensor.shape else None


def _fixed_type(program: Contents, name: str) -> tuple[str, tuple[int, ...]]:
    """Return (element type, shape) of a tensor. Raises ProgramError where they are known only at run time."""
    type_ = _type_of_info(program.tensors[name]) if name in program.tensors else None
    if type_ is None:
        raise ProgramError(f"tensor {name!r} has no fixed type and shape")
    return type_


def _check_memory(program: Contents) -> None:
    """Check that the image fits the DRAM, and each buffer the arena."""
    end = program.image_address + len(program.image)
    _require(
        program.image_address >= 0 and end <= program.dram_size <= MAX_DRAM_BYTES, f"{program.dram_size} bytes of DRAM"
    )
    arena = program.arena
    needed = 0
    for name, offset in arena.offsets.items():
        dtype, shape = _fixed_type(program, name)
        size = prod(shape) * itemsize(dtype)
        needed += size + ALIGNMENT
        inside = offset >= 0 and offset % ALIGNMENT == 0 and offset + size <= arena.size
        _require(inside, f"tensor {name!r} lies at {offset} of an arena of {arena.size} bytes")
    _require(0 <= arena.size <= needed, f"an arena of {arena.size} bytes for {len(arena.offsets)} tensors")


# Steps ------------------------------------------------------------------------------------------------------------


def _check_cpu_step(program: Contents, step: CpuStep, known: Types) -> Types:
    """Check that a kernel's signature fits its tensors, or that a view keeps type and size.

    known: types of the tensors that exist before the step. Returns the outputs' types.
    """
    _require_known(known, step.inputs, "input")
    results: Types = {name: _fixed_type(program, name) for name in step.outputs}
    if step.kernel is None:
        _require(len(step.inputs) == len(step.outputs) == 1, "a view has one input and one output")
        before, after = known[step.inputs[0]], _fixed_type(program, step.outputs[0])
        is_view = before is not None and before[0] == after[0] and prod(before[1]) == prod(after[1])
        _require(is_view, f"output {step.outputs[0]!r} is no view of {step.inputs[0]!r}")
        return results
    _require(0 <= step.kernel < len(program.kernels), f"there is no kernel {step.kernel}")
    kernel = program.kernels[step.kernel]
    signature = tuple(known[name] for name in step.inputs), tuple(results[name] for name in step.outputs)
    _require(signature == (kernel.inputs, kernel.outputs), f"kernel {step.kernel} does not fit its inputs and outputs")
    return results


def _check_host_step(program: Contents, step: HostStep, known: Types) -> Types:
    """Check the inputs and outputs of a host operator. Returns the outputs' types as far as they are known."""
    read = filter(None, (*step.inputs, *step.op.inputs))  # "" is an input left out
    _require_known(known, read, "input")
    _require(len(step.outputs) == len(step.op.outputs), f"operator {step.op.op} has {len(step.op.outputs)} outputs")
    for body in step.bodies:
        inner_known = known | {name: _declared_type(program, name) for name in body.inputs}
        _check_steps(program, body.steps, inner_known)
        _require_known(inner_known, body.outputs, "output")
        _require(len(body.types) == len(body.outputs), f"a subgraph of {step.op.op} has {len(body.outputs)} outputs")
        for dtype, shape in body.types:
            _check_tensor(TensorInfo("", dtype, shape))
    is_complete = not any(bodies(step.op)) and _BODIES.get((step.op.domain, step.op.op), set()) == {
        body.attribute for body in step.bodies
    }
    _require(is_complete, f"operator {step.op.op} has subgraphs {[body.attribute for body in step.bodies]}")
    return {name: _declared_type(program, name) for name in step.outputs}


_BODIES = {("", "If"): {"then_branch", "else_branch"}, ("", "Loop"): {"body"}, ("", "Scan"): {"body"}}
"""(domain, operator) -> the names of the subgraphs that it runs."""


def _declared_type(program: Contents, name: str) -> tuple[str, tuple[int, ...]] | None:
    """Return (element type, shape) of a tensor; None where the Program leaves them to each run."""
    return _type_of_info(program.tensors[name]) if name in program.tensors else None


def _check_launch(program: Contents, step: LaunchStep, known: Types) -> Types:
    """Check instructions, layers, and the tensors that are packed and unpacked. Returns the outputs' types."""
    size = instruction_bytes(program.config)
    start, end = program.image_address, program.image_address + len(program.image)
    inside = start <= step.address and step.count >= 0 and step.address + step.count * size <= end
    _require(inside, f"{step.count} instructions at {step.address}")
    layers = step.layer_of
    is_valid = len(layers) == step.count and (not step.count or (layers.min() >= 0 and layers.max() < len(step.layers)))
    _require(bool(is_valid), "instructions belong to layers that there are not")
    loop_numbers = [part.loops for layer in step.layers for part in layer.parts]
    _require(all(0 <= loop < len(program.loops) for loop in loop_numbers), "layers run loops that there are not")
    for pack in step.pack:
        _require_known(known, (pack.value,), "input")
        kind = known[pack.value]
        _require(kind is not None and kind[0] in ("int8", "uint8"), f"tensor {pack.value!r} holds no bytes")
        _check_form(pack.form, kind[1] if kind else (), pack.value)
        _require(
            0 < pack.groups <= MAX_DRAM_BYTES and 0 <= pack.address < MAX_DRAM_BYTES,
            f"tensor {pack.value!r} has no place",
        )
        _check_cache(program, pack, kind[1] if kind else ())
    for unpack in step.unpack:
        dtype, shape = _fixed_type(program, unpack.value)
        is_valid = dtype in ("int8", "uint8") and unpack.form.fold in ("", *MATRICES)
        _require(is_valid, f"tensor {unpack.value!r} holds no bytes of the accelerator")
        _check_form(unpack.form, shape, unpack.value)
        channels = (unpack.offset * program.config.group) + unpack.form.dims[1]
        inside = unpack.offset >= 0 and channels <= unpack.groups * program.config.group <= MAX_DRAM_BYTES
        _require(inside and 0 <= unpack.address < MAX_DRAM_BYTES, f"tensor {unpack.value!r} has no place")
    return {unpack.value: _fixed_type(program, unpack.value) for unpack in step.unpack}


def _check_cache(program: Contents, pack: Pack, shape: tuple[int, ...]) -> None:
    """Check that a tensor which continues a key-value cache begins with the rows of an input."""
    if pack.cache:
        cached_shape = next((tensor.shape for tensor in program.inputs if tensor.name == pack.cache), ())
        has_rows = (
            len(cached_shape) > 1
            and cached_shape[:-2] == shape[:-2]
            and cached_shape[-1] == shape[-1]
            and cached_shape[-2] >= 0
        )
        is_valid = has_rows and pack.form.fold in BY_ROWS and program.config.batch == 1
        _require(is_valid, f"tensor {pack.value!r} does not begin with the rows of {pack.cache!r}")


def _check_form(form: FormInfo, shape: tuple[int, ...], name: str) -> None:
    """Check that FormInfo.arrange of tensor `name` of this shape gives the dimensions of the form, within DRAM."""
    message = f"tensor {name!r} cannot be arranged as {form}"
    sizes = (*form.kernel, *form.strides, *form.dilations)
    is_valid = form.fold in ("", "x", "xy", *MATRICES) and min(*sizes, 1) > 0 and min(*form.pads, *form.dims) >= 0
    _require(is_valid and -128 <= form.pad <= 127 and prod(form.dims) <= MAX_DRAM_BYTES, message)
    if not form.fold:
        return _require(prod(form.dims) == prod(shape), message)
    if form.fold in MATRICES:
        count, columns, rows = matrix_counts(form.fold, shape)
        is_inside = (
            count > 0 and form.dims[1] % count == 0 and columns <= form.dims[1] // count and rows <= form.dims[3]
        )
        return _require(is_inside and form.dims[0] == form.dims[2] == 1, message)
    if len(shape) == 3:
        shape = (*shape[:2], 1, shape[2])
    _require(len(shape) == 4, message)
    taps, positions = 1, 1
    for axis in (0, 1):
        folded = axis == 1 or form.fold == "xy"
        kernel, stride = (form.kernel[axis], form.strides[axis]) if folded else (1, 1)
        padded_size = shape[2 + axis] + (form.pads[axis] + form.pads[axis + 2] if folded else 0)
        taps *= kernel
        positions *= (padded_size - (kernel - 1) * form.dilations[axis] - 1) // stride + 1
    return _require(positions > 0 and prod(shape[:2]) * taps * positions == prod(form.dims), message)


_STEPS: dict[type, Callable[[Contents, Any, Types], Types]] = {
    CpuStep: _check_cpu_step,
    HostStep: _check_host_step,
    LaunchStep: _check_launch,
}
"""Type of a step -> function that checks it and returns the types of its outputs."""
