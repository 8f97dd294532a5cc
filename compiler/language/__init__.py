"""The tile language: kernels in Python, for the accelerator and for the CPU (docs/language.md)."""

from celosia.compiler.language.jit import Kernel, jit, quantised
from celosia.compiler.language.loops import range
from celosia.compiler.language.ops import *  # noqa: F403
from celosia.compiler.language.ops import __all__ as _ops
from celosia.compiler.language.tile import LanguageError, Tile

__all__ = ["Kernel", "LanguageError", "Tile", "jit", "quantised", "range", *_ops]
