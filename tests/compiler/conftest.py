"""Verify each loop nest that a test compiles for the CPU.

This file also lets the tests `import expressions` and `import small_models`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from celosia.compiler.cpu.llvm import compile_loops as llvm
from celosia.compiler.cpu.llvm.codegen import Rendered
from celosia.compiler.expr import Function, verify

sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "cosim")]


@pytest.fixture(scope="session", autouse=True)
def verified_loops() -> Iterator[None]:
    """Let the LLVM code generator verify each function before it renders it."""
    render = llvm.render

    def checked(function: Function, features: frozenset[str] | None = None) -> Rendered:
        return render(verify(function), features)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llvm, "render", checked)
        yield
