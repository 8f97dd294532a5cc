"""Access to the compiler at run time, for kernels whose shapes are known only then.

The host runtime must not import the compiler, because a board has none. So `celosia.compiler.cpu` registers functions
here that import it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

ImportModule = Callable[[], ModuleType]
_imports: dict[str, ImportModule] = {}
"""Role ("compiler" or "linker") -> function that imports its module."""


def provide(compiler: ImportModule, linker: ImportModule) -> None:
    """Register functions that import the kernel compiler and the linker.

    They raise ModuleNotFoundError where LLVM is missing.
    """
    _imports.update(compiler=compiler, linker=linker)
    _module.cache_clear()


@functools.cache
def _module(role: str) -> ModuleType | None:
    """Import the module that is registered for a role; None on a board, and without LLVM."""
    try:
        return _imports[role]()
    except (KeyError, ModuleNotFoundError):  # on a board; without LLVM
        return None


def kernel_compiler() -> ModuleType | None:
    """Return the module that compiles kernels at run time (cpu/kernels.py); None on a board, and without LLVM."""
    return _module("compiler")


def kernel_linker() -> ModuleType | None:
    """Return the module that links machine code into this process (cpu/llvm); None on a board, and without LLVM."""
    return _module("linker")
