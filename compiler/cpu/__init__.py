"""The CPU backend: ONNX operators through tensor expressions and loops to machine code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celosia.compiler.cpu.function import CpuFunction, compile_op, run
    from celosia.compiler.cpu.llvm import compile_function
    from celosia.compiler.cpu.node import CpuNode, InputType
    from celosia.compiler.cpu.ops import OPS, VIEWS, Unsupported, build
    from celosia.compiler.cpu.runtime.kernel import Kernel
    from celosia.compiler.cpu.types import TYPES

__all__ = [
    "OPS", "TYPES", "VIEWS", "CpuFunction", "CpuNode", "InputType", "Kernel", "Unsupported", "build",
    "compile_function", "compile_op", "run",
]  # fmt: skip

_PLACES = {
    "function": ("CpuFunction", "compile_op", "run"), "node": ("CpuNode", "InputType"), "types": ("TYPES",),
    "runtime.kernel": ("Kernel",), "llvm": ("compile_function",), "ops": ("OPS", "VIEWS", "Unsupported", "build"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a part when it is first used: a board runs kernels and host operators without LLVM."""
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"celosia.compiler.cpu.{module}"), name)
    raise AttributeError(f"module 'celosia.compiler.cpu' has no attribute {name!r}")
