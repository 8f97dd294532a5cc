"""The CPU backend, from ONNX operators to machine code, in the order in which an operator passes the files.

parse           which host operator (HostOp) an ONNX node becomes
kernels         which operators share a kernel; how they become loops and machine code; which constants are computed
                before; when a kernel is compiled at run time, for shapes that are known only then
schedule/       in which order, with which vectors and threads the loops of a kernel run
llvm/           which machine code the loops become, and where it is cached
operators_doc   which operators docs/operators.md lists
"""

from __future__ import annotations

from types import ModuleType

from celosia.compiler.program.host.kernel_compiler import provide


def _dynamic() -> ModuleType:
    """Import the compiler of kernels at run time; LLVM is loaded only when it is needed."""
    from celosia.compiler.cpu import kernels

    return kernels


def _llvm() -> ModuleType:
    """Import the linker of kernels."""
    from celosia.compiler.cpu import llvm

    return llvm


provide(compiler=_dynamic, linker=_llvm)
