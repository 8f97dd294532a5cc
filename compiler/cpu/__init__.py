"""The CPU backend, from ONNX operators to machine code, in the order in which an operator passes the files.

parse           which host operator (HostOp) an ONNX node becomes
schedule/       which operators share a kernel; in which order, with which vectors and threads its loops run
function        how the operators of a kernel become loops and machine code; which constants are computed before
llvm/           which machine code the loops become, and where it is cached
dynamic         when a kernel is compiled at run time, for shapes that are known only then
operators_doc   which operators docs/operators.md lists
"""

from __future__ import annotations

from types import ModuleType

from celosia.compiler.program.host.kernel_compiler import provide


def _dynamic() -> ModuleType:
    """Import the compiler of kernels at run time; LLVM is loaded only when it is needed."""
    from celosia.compiler.cpu import dynamic

    return dynamic


def _llvm() -> ModuleType:
    """Import the linker of kernels."""
    from celosia.compiler.cpu import llvm

    return llvm


provide(compiler=_dynamic, linker=_llvm)
