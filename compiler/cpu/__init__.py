"""The CPU backend: the tensor expressions of ONNX operators (compiler/ops) to loops and machine code."""

from __future__ import annotations

from types import ModuleType

from celosia.compiler.program.host.compiler import provide


def _dynamic() -> ModuleType:
    from celosia.compiler.cpu import dynamic

    return dynamic


def _llvm() -> ModuleType:
    from celosia.compiler.cpu import llvm

    return llvm


provide(makes=_dynamic, links=_llvm)
