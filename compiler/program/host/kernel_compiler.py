"""Access to the compiler at run time, for kernels whose shapes are known only then.

The host runtime must not import the compiler, so `celosia.compiler.cpu` registers itself here; a board has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

Load = Callable[[], ModuleType]
_loads: dict[str, Load] = {}


def provide(compiler: Load, linker: Load) -> None:
    """Register functions that import the kernel compiler and the linker; they raise ModuleNotFoundError without
    LLVM.
    """
    _loads.update(compiler=compiler, linker=linker)
    _module.cache_clear()


@functools.cache
def _module(role: str) -> ModuleType | None:
    """Import a registered module; None on a board, and without LLVM."""
    try:
        return _loads[role]()
    except (KeyError, ModuleNotFoundError):  # on a board; without LLVM
        return None


def kernel_compiler() -> ModuleType | None:
    """Return the module that compiles kernels at run time (cpu/dynamic.py), or None."""
    return _module("compiler")


def kernel_linker() -> ModuleType | None:
    """Return the module that links machine code into this process (cpu/llvm), or None."""
    return _module("linker")
