"""Static memory plan: where each buffer lies, in DRAM or on the CPU, with reuse after its last use."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from celosia.compiler.program import ArenaPlan, CpuStep, LaunchStep, Step, TensorInfo
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.switches import is_on

ATTEMPTS = 10
"""How often buffers are placed anew where that leaves gaps."""


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `size` bytes in use from step `first` to step `last`, both inclusive."""

    buffer: Hashable
    size: int
    first: int
    last: int


def plan(lifetimes: list[Lifetime], alignment: int = 64) -> ArenaPlan:
    """Offsets such that no two buffers that are alive at the same step overlap.

    Each buffer takes the lowest offset that fits, in the order of _FIRST (Pisarchyk and Lee, arXiv 2001.03288). Where
    that leaves gaps, the buffer that ends highest goes to the front and all are placed again, up to ATTEMPTS times for
    each order; the smallest arena wins.
    """
    if not is_on("memory"):
        ends = list(accumulate((_aligned(item.size, alignment) for item in lifetimes), initial=0))
        offsets = {item.buffer: start for item, start in zip(lifetimes, ends)}
        return ArenaPlan(offsets, ends[-1], lower_bound(lifetimes))
    least = lower_bound(lifetimes, alignment)
    best: Places = {}
    for key in _FIRST:
        order = sorted(lifetimes, key=key)
        for _ in range(ATTEMPTS):
            places = _place(order, alignment)
            best = min(best or places, places, key=_end)
            if _end(best) <= least:
                break
            top = max(order, key=lambda item: places[item.buffer][1])
            order = [top, *(item for item in order if item is not top)]
    return ArenaPlan({buffer: start for buffer, (start, _) in best.items()}, _end(best), lower_bound(lifetimes))


_FIRST: tuple[Callable[[Lifetime], Any], ...] = (
    lambda item: (-item.size, item.first),
    lambda item: (-item.size * (item.last - item.first + 1), item.first),
    lambda item: (item.first - item.last, -item.size),
    lambda item: (item.first, -item.size),
)
"""Orders in which buffers are placed: the largest, the largest times how long it lives, the one that lives longest,
the first in use."""


def lower_bound(lifetimes: Iterable[Lifetime], alignment: int = 1) -> int:
    """Bytes of the buffers alive at the same step, at the step where they are most."""
    change: dict[int, int] = {}
    for item in lifetimes:
        change[item.first] = change.get(item.first, 0) + _aligned(item.size, alignment)
        change[item.last + 1] = change.get(item.last + 1, 0) - _aligned(item.size, alignment)
    return max(accumulate(change[step] for step in sorted(change)), default=0)


Places = dict[Hashable, tuple[int, int]]
"""First byte of each buffer, and the one after its last."""


def _place(order: Iterable[Lifetime], alignment: int) -> Places:
    """Place buffers one by one, each at the lowest offset where no buffer that lives at the same time lies."""
    placed: list[tuple[int, int, Lifetime]] = []  # by offset
    for item in order:
        offset = 0
        for start, end, other in placed:
            if other.last < item.first or item.last < other.first:
                continue
            if start - offset >= item.size:
                break
            offset = max(offset, _aligned(end, alignment))
        insort(placed, (offset, offset + item.size, item), key=lambda entry: entry[0])
    return {item.buffer: (start, end) for start, end, item in placed}


def _end(places: Places) -> int:
    return max((end for _, end in places.values()), default=0)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


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
