"""The processor that kernels are compiled for: what the choice of loops and instructions depends on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import llvmlite.binding as llvm

from celosia.compiler.dtypes import itemsize


class TargetError(ValueError):
    """A target that there is not; the message names those that there are."""


@dataclass(frozen=True)
class Target:
    """vector_bytes: size of a vector register. registers: how many there are. features: in LLVM's names.

    triple, cpu: LLVM's, and zig: the linker's, of a processor that is not this one, with `machine` what
    `platform.machine()` calls it; "" for this one.
    """

    vector_bytes: int
    registers: int
    features: frozenset[str]
    machine: str = ""
    triple: str = ""
    cpu: str = ""
    zig: tuple[str, ...] = ()

    def lanes(self, dtype: str) -> int:
        """Elements of a vector."""
        return self.vector_bytes // itemsize(dtype)


STREAMS = 8
"""Columns of a tile that has but one row: each is a stream of memory of its own."""
GLIBC = "2.28"
"""The oldest C library that linked kernels run with; that of PYNQ's images is newer."""
TARGETS = {
    # NEON has 16 registers of 16 bytes; a Cortex-A9 has no fused multiply-add and no vector rounding.
    "armv7": Target(
        16, 16, frozenset(("neon",)), "armv7l", "armv7-unknown-linux-gnueabihf", "cortex-a9",
        ("-target", f"arm-linux-gnueabihf.{GLIBC}", "-mcpu=cortex_a9"),
    ),
    "aarch64": Target(
        16, 32, frozenset(("neon", "fp-armv8")), "aarch64", "aarch64-unknown-linux-gnu", "cortex-a53",
        ("-target", f"aarch64-linux-gnu.{GLIBC}", "-mcpu=cortex_a53"),
    ),
}  # fmt: skip
BOARDS = {"pynq-z1": "armv7", "pynq-z2": "armv7", "ultra96": "aarch64", "zcu104": "aarch64"}
"""Boards and the target that their processor is."""


def find_target(name: str) -> Target:
    """The target or board called `name`. TargetError."""
    if name not in TARGETS and name not in BOARDS:
        raise TargetError(
            f"there is no target {name!r}; take {', '.join((*BOARDS, *TARGETS))}, or none for this machine"
        )
    return TARGETS[BOARDS.get(name, name)]


@functools.cache
def this_processor() -> Target:
    names = llvm.get_host_cpu_features()
    features = frozenset(name for name, has in names.items() if has)
    if "avx512f" in features:
        return Target(64, 32, features)
    if "avx2" in features:
        return Target(32, 16, features)
    return Target(16, 16 if "x86" in llvm.get_default_triple() else 32, features)


_current: ContextVar[Target | None] = ContextVar("target", default=None)


def target() -> Target:
    """The processor that is compiled for: this one, but inside `compiling_for`."""
    return _current.get() or this_processor()


@contextmanager
def compiling_for(wanted: Target | None) -> Iterator[None]:
    """What is compiled inside is for `wanted`; None for this processor."""
    token = _current.set(wanted)
    try:
        yield
    finally:
        _current.reset(token)
