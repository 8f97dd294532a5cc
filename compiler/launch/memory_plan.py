"""Plan static memory: place buffers, in device memory or on the CPU, so that they are reused after their last use."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from celosia.compiler.program import (
    ArenaPlan,
    CpuStep,
    HostStep,
    LaunchStep,
    Step,
    TensorInfo,
    with_inner_steps,
)
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.switches import is_on

MAX_ATTEMPTS = 10
"""Placements that are tried for each order of buffers, if they leave gaps."""


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `size` bytes that is in use from step `first` to step `last`, both inclusive."""

    buffer: Hashable
    size: int
    first: int
    last: int


def plan_memory(lifetimes: list[Lifetime], alignment: int = 64) -> ArenaPlan:
    """Return offsets at which no two buffers that are alive at the same step overlap.

    Each buffer takes the lowest offset that fits, in an order of _PRIORITIES (Pisarchyk and Lee, arXiv 2001.03288). If
    that leaves gaps, the buffer that ends highest goes to the front and all are placed again, up to MAX_ATTEMPTS times
    for each order; the smallest arena wins.
    """
    if not is_on("memory"):
        ends = list(accumulate((_round_up(item.size, alignment) for item in lifetimes), initial=0))
        offsets = {item.buffer: start for item, start in zip(lifetimes, ends)}
        return ArenaPlan(offsets, ends[-1], lower_bound(lifetimes))
    smallest = lower_bound(lifetimes, alignment)
    best: Places = {}
    for key in _PRIORITIES:
        order = sorted(lifetimes, key=key)
        for _ in range(MAX_ATTEMPTS):
            places = _place(order, alignment)
            best = min(best or places, places, key=_arena_size)
            if _arena_size(best) <= smallest:
                break
            highest = max(order, key=lambda item: places[item.buffer][1])
            order = [highest, *(item for item in order if item is not highest)]
    return ArenaPlan({buffer: start for buffer, (start, _) in best.items()}, _arena_size(best), lower_bound(lifetimes))


_PRIORITIES: tuple[Callable[[Lifetime], Any], ...] = (
    lambda item: (-item.size, item.first),
    lambda item: (-item.size * (item.last - item.first + 1), item.first),
    lambda item: (item.first - item.last, -item.size),
    lambda item: (item.first, -item.size),
)
"""Sort keys of the orders in which buffers are placed: by size, by size times lifetime, by lifetime, by first use."""


def lower_bound(lifetimes: Iterable[Lifetime], alignment: int = 1) -> int:
    """Return the largest sum of bytes of the buffers that are alive at one step: no plan takes less."""
    change: dict[int, int] = {}
    for item in lifetimes:
        change[item.first] = change.get(item.first, 0) + _round_up(item.size, alignment)
        change[item.last + 1] = change.get(item.last + 1, 0) - _round_up(item.size, alignment)
    return max(accumulate(change[step] for step in sorted(change)), default=0)


Places = dict[Hashable, tuple[int, int]]
"""Buffer -> (first byte, byte after its last)."""


def _place(order: Iterable[Lifetime], alignment: int) -> Places:
    """Place buffers one by one, each at the lowest offset where it overlaps with no buffer that is alive meanwhile."""
    placed: list[tuple[int, int, Lifetime]] = []  # by offset
    for item in order:
        offset = 0
        for start, end, other in placed:
            if other.last < item.first or item.last < other.first:
                continue
            if start - offset >= item.size:
                break
            offset = max(offset, _round_up(end, alignment))
        insort(placed, (offset, offset + item.size, item), key=lambda entry: entry[0])
    return {item.buffer: (start, end) for start, end, item in placed}


def _arena_size(places: Places) -> int:
    """Return the end of the highest buffer: the size of the arena."""
    return max((end for _, end in places.values()), default=0)


def _round_up(size: int, alignment: int) -> int:
    """Round a size up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def plan_arena(
    steps: Sequence[Step], kernels: Sequence[CompiledKernel], tensors: Mapping[str, TensorInfo], outputs: Sequence[str]
) -> ArenaPlan:
    """Plan the offsets of the CPU's tensors in one arena.

    Tensors in one buffer have the same offset: a view and its source, and an output that a kernel writes over its
    input. Tensors that the Program or a subgraph returns are not in the arena. What a subgraph reads of outer tensors
    stays until the step that runs it has ended.
    """
    inner_bodies = [body for step in with_inner_steps(steps) if isinstance(step, HostStep) for body in step.bodies]
    outputs = [*outputs, *(name for body in inner_bodies for name in body.outputs)]
    buffer_of: dict[str, str] = {}  # tensor -> the first tensor in its memory
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, step in enumerate(with_inner_steps(steps)):
        written, read = _written_and_read(step)
        for name in read:
            if name in buffer_of:
                last[buffer_of[name]] = number
        if isinstance(step, CpuStep):
            for out, name in _shared_buffers(step, kernels):
                if name in buffer_of:
                    buffer_of[out] = buffer_of[name]
        for name in written:
            if name not in buffer_of:
                buffer_of[name] = name
                first[name] = number
            last[buffer_of[name]] = number
    returned = {buffer_of[name] for name in outputs if name in buffer_of}
    lifetimes = [
        Lifetime(name, tensor_bytes(tensors[name]), first[name], last[name]) for name in first if name not in returned
    ]
    arena = plan_memory(lifetimes)
    offsets = {name: arena.offsets[buffer] for name, buffer in buffer_of.items() if buffer in arena.offsets}
    return ArenaPlan(offsets, arena.size, arena.lower_bound)


def tensor_bytes(info: TensorInfo) -> int:
    """Return the bytes of a tensor of known shape."""
    return prod(info.shape) * itemsize(info.dtype)


def _written_and_read(step: Step) -> tuple[list[str], list[str]]:
    """Return the names of the tensors that a step writes to the arena, and of those that it reads."""
    if isinstance(step, LaunchStep):
        return [unpack.value for unpack in step.unpack], [pack.value for pack in step.pack]
    if isinstance(step, CpuStep) and step.kernel is not None:
        return list(step.outputs), list(step.inputs)
    return [], list(step.inputs)


def _shared_buffers(step: CpuStep, kernels: Sequence[CompiledKernel]) -> list[tuple[str, str]]:
    """Return pairs (output, input) in one buffer: a view and its source, or tensors that a kernel computes in place."""
    if step.kernel is None:
        return [(step.outputs[0], step.inputs[0])]
    return [(step.outputs[out], step.inputs[number]) for out, number in kernels[step.kernel].in_place]
