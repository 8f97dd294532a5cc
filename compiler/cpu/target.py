"""What of the processor the choice of loops depends on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import llvmlite.binding as llvm

from celosia.compiler.expr.nodes import itemsize


@dataclass(frozen=True)
class Target:
    """vector_bytes: size of a vector register. registers: how many there are."""

    vector_bytes: int
    registers: int

    def lanes(self, dtype: str) -> int:
        """Elements of a vector."""
        return self.vector_bytes // itemsize(dtype)


@functools.cache
def target() -> Target:
    """This processor."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return Target(64, 32)
    if features.get("avx2"):
        return Target(32, 16)
    return Target(16, 16 if "x86" in llvm.get_default_triple() else 32)
