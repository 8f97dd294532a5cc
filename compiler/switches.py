"""Parts of the compiler that can be left out, to see what each is good for: `without` in the arguments of `compile`.

Passes over the graph are left out by their own names (graph/pipeline.py), and these parts by theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PARTS = {
    "fusion": "every operator on the CPU is a kernel of its own",
    "memory": "every tensor has memory of its own, in DRAM and on the CPU",
    "blocks": "no results stay on chip from one layer to the next",
    "beside": "what leaves gemm idle comes behind convolutions that it does not need, not beside them",
}
"""By name, what it is like without it."""

_left_out: ContextVar[Collection[str]] = ContextVar("left_out", default=())


def is_on(part: str) -> bool:
    """Whether what is compiled now has this part."""
    assert part in PARTS, part
    return part not in _left_out.get()


@contextmanager
def leaving_out(parts: Collection[str]) -> Iterator[None]:
    """Compile without `parts`."""
    token = _left_out.set(frozenset(parts))
    try:
        yield
    finally:
        _left_out.reset(token)
