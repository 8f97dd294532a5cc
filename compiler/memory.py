"""Static memory plan: where in DRAM each buffer lies, with reuse after its last use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `size` bytes in use from step `first` to step `last`, both inclusive."""

    name: str
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Plan:
    """Offset of each buffer, the bytes of the whole arena, and the largest sum of buffers alive at one step."""

    offsets: dict[str, int]
    size: int
    lower_bound: int


def plan(lifetimes: list[Lifetime], alignment: int = 64) -> Plan:
    """Offsets such that no two buffers that are alive at the same step overlap: the largest buffer first, each at the
    lowest offset that fits (the greedy-by-size order of Pisarchyk and Lee, arXiv 2001.03288)."""
    placed: list[tuple[int, int, Lifetime]] = []
    for item in sorted(lifetimes, key=lambda item: (-item.size, item.first, item.name)):
        size = -(-item.size // alignment) * alignment
        offset = 0
        for start, end, other in sorted(placed, key=lambda entry: entry[0]):
            if other.last < item.first or item.last < other.first:
                continue
            if start - offset >= size:
                break
            offset = max(offset, end)
        placed.append((offset, offset + size, item))
    steps = {item.first for item in lifetimes}
    bound = max((sum(i.size for i in lifetimes if i.first <= step <= i.last) for step in steps), default=0)
    return Plan({item.name: start for start, _, item in placed}, max((end for _, end, _ in placed), default=0), bound)
