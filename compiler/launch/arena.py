"""The memory of what the CPU's steps hand to each other: one arena, planned when the model is compiled.

Outside of it are constants, inputs, outputs (fresh arrays for each run), and what the host runtime makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from celosia.compiler.launch.memory import Lifetime, plan
from celosia.compiler.program import ArenaPlan, CpuStep, LaunchStep, Step, TensorInfo
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.kernel import CompiledKernel


def plan_arena(
    steps: Sequence[Step], kernels: Sequence[CompiledKernel], tensors: Mapping[str, TensorInfo], outputs: Sequence[str]
) -> ArenaPlan:
    """Plan the offsets of tensors between steps in one arena.

    Tensors that share a buffer, as a view and its source, or an output that a kernel writes over its input, have the
    same offset.
    """
    buffer: dict[str, str] = {}  # tensor -> the first tensor in its memory
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        written, read = _touched(step)
        for name in read:
            if name in buffer:
                last[buffer[name]] = number
        if isinstance(step, CpuStep):
            for out, name in _shared(step, kernels):
                if name in buffer:
                    buffer[out] = buffer[name]
        for name in written:
            if name not in buffer:
                buffer[name] = name
                first[name] = number
            last[buffer[name]] = number
    returned = {buffer[name] for name in outputs if name in buffer}
    lifetimes = [
        Lifetime(name, tensor_bytes(tensors[name]), first[name], last[name]) for name in first if name not in returned
    ]
    arena = plan(lifetimes)
    offsets = {name: arena.offsets[home] for name, home in buffer.items() if home in arena.offsets}
    return ArenaPlan(offsets, arena.size, arena.lower_bound)


def tensor_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor of known shape."""
    return prod(info.shape) * itemsize(info.dtype)


def _touched(step: Step) -> tuple[list[str], list[str]]:
    """List the tensors that a step writes to the arena, and those that it reads."""
    if isinstance(step, LaunchStep):
        return [unpack.value for unpack in step.unpack], [pack.value for pack in step.pack]
    if isinstance(step, CpuStep) and step.kernel is not None:
        return list(step.outputs), list(step.inputs)
    return [], list(step.inputs)


def _shared(step: CpuStep, kernels: Sequence[CompiledKernel]) -> list[tuple[str, str]]:
    """List pairs (output, input) that share one buffer: a view and its source, or what the kernel computes in place."""
    if step.kernel is None:
        return [(step.outputs[0], step.inputs[0])]
    return [(step.outputs[out], step.inputs[number]) for out, number in kernels[step.kernel].in_place]
