"""Loops to machine code, by way of LLVM."""

from celosia.compiler.cpu.llvm.compile import compile_function, from_loops
from celosia.compiler.cpu.llvm.library import LinkError, link_library
from celosia.compiler.cpu.llvm.machine import host, link
from celosia.compiler.cpu.llvm.team import link_team

__all__ = ["LinkError", "compile_function", "from_loops", "host", "link", "link_library", "link_team"]
