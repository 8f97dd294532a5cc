"""The CPU backend: ONNX operators through tensor expressions and loops to machine code."""

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
