"""The compiler, for what can only be compiled or linked when a Program runs.

It stands above this floor, so that whoever has one provides it, as `celosia.compiler.cpu` does; a board has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

Load = Callable[[], ModuleType]
_loads: dict[str, Load] = {}


def provide(makes: Load, links: Load) -> None:
    """makes, links: load what the functions below give when they are first asked. ModuleNotFoundError without LLVM."""
    _loads.update(makes=makes, links=links)
    _module.cache_clear()


@functools.cache
def _module(which: str) -> ModuleType | None:
    try:
        return _loads[which]()
    except (KeyError, ModuleNotFoundError):  # on a board; without LLVM
        return None


def makes_kernels() -> ModuleType | None:
    """What makes kernels when a Program runs (cpu/dynamic.py)."""
    return _module("makes")


def links_kernels() -> ModuleType | None:
    """What links machine code into this process (cpu/llvm)."""
    return _module("links")
