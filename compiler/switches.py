"""Parts of the compiler that `compile(without=...)` can leave out, to see what each gains.

The same argument leaves out passes over the graph, by their own names (graph/pipeline.py).
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
"""Name of a part -> what is different without it."""

_left_out: ContextVar[Collection[str]] = ContextVar("left_out", default=())
"""Names of the parts that the current compilation leaves out."""


def is_on(part: str) -> bool:
    """Whether the current compilation has this part of PARTS."""
    assert part in PARTS, part
    return part not in _left_out.get()


@contextmanager
def leaving_out(parts: Collection[str]) -> Iterator[None]:
    """Compile without `parts` inside the context; names of passes among them are ignored here."""
    token = _left_out.set(frozenset(parts))
    try:
        yield
    finally:
        _left_out.reset(token)
