"""The CPU backend, from ONNX operators to machine code, in the order in which an operator passes the files.

parse           which host operator an ONNX node is
schedule/       in which order and with which vectors and threads the loops of compiler/ops run
function        which operators make one kernel, and which constants are folded
llvm/           which machine code the loops become
dynamic         when a kernel is compiled at run time, for shapes that are known only then
operators_doc   which operators docs/operators.md lists
"""

from __future__ import annotations

from types import ModuleType

from celosia.compiler.program.host.kernel_compiler import provide


def _dynamic() -> ModuleType:
    from celosia.compiler.cpu import dynamic

    return dynamic


def _llvm() -> ModuleType:
    from celosia.compiler.cpu import llvm

    return llvm


provide(compiler=_dynamic, linker=_llvm)
