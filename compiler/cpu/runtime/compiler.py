"""The compiler, for what can only be compiled or linked when a Program runs; a board has none.

It is loaded by its name: what runs on a board imports nothing of it.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"celosia.compiler.cpu.{name}")
    except ModuleNotFoundError:  # of that module itself, or of LLVM
        return None


def makes_kernels() -> ModuleType | None:
    """What makes kernels when a Program runs."""
    return _module("dynamic")


def links_kernels() -> ModuleType | None:
    """What links machine code into this process."""
    return _module("llvm")
