"""Target processors: vector registers, caches and features, on which loops and instructions depend."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm

from celosia.compiler.program.dtypes import itemsize
from celosia.hw.boards.boards import BOARDS, find_board, is_board_file
from celosia.hw.spec.config import did_you_mean
from celosia.plain import Sentence


class TargetError(Sentence, ValueError):
    """Raised for an unknown target; the message names those that exist."""


@dataclass(frozen=True)
class Target:
    """A processor that kernels are compiled for.

    vector_bytes: size of a vector register. registers: number of vector registers. features: in LLVM's names.
    machine: its name in `platform.machine()`. triple, cpu: in LLVM's names. zig: options of the linker. These four are
    "" or () for the processor of this machine.
    cache_bytes: share of the second-level cache that one core may fill. interleave: vectors that an element-wise loop
    computes at once, to hide latency on in-order processors. relocation: LLVM's relocation model of object files.
    """

    vector_bytes: int
    registers: int
    features: frozenset[str]
    machine: str = ""
    triple: str = ""
    cpu: str = ""
    zig: tuple[str, ...] = ()
    cache_bytes: int = 1 << 20
    interleave: int = 1
    relocation: str = "pic"

    def lanes(self, dtype: str) -> int:
        """Return the number of elements of this type in a vector register."""
        return self.vector_bytes // itemsize(dtype)

    @property
    def half_vectors(self) -> int:
        """Number of vectors of half the size that one register holds: 2 on a 32-bit ARM, else 1."""
        return 2 if "neon" in self.features and "fp-armv8" not in self.features else 1

    @property
    def has_amx(self) -> bool:
        """Whether products of bytes can use AMX tiles (llvm/byte_products.py)."""
        return self.features >= AMX_FEATURES


AMX_FEATURES = frozenset(("amx-tile", "amx-int8"))
"""Features of processors with Intel's AMX, in LLVM's names."""


def dot_instructions(features: frozenset[str]) -> tuple[str, tuple[int, ...]]:
    """Return how dot4, a sum of four products of bytes, is computed, and the lanes of its instructions.

    The lanes that one instruction can have are in order, the most first; () if there is no such instruction.
    """
    if "avx512vnni" in features:
        return "vnni", (16, 8, 4) if "avx512vl" in features else (16,)
    if "avxvnni" in features:
        return "vnni", (8, 4)
    if "avx2" in features:
        return "pairs", (16, 8, 4) if "avx512bw" in features else (8, 4)
    if "neon" in features:
        return next((kind for kind in ("i8mm", "dotprod") if kind in features), "neon"), (4,)
    return "bytes", ()


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux: number of the system call, its code ARCH_REQ_XCOMP_PERM, and the component of AMX's tile registers."""


@functools.cache
def request_amx() -> bool:
    """Request permission to use AMX tiles from Linux, once per process, and return whether it was granted."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


TILE_ROWS, TILE_STEPS, TILE_COLUMNS = range(8, 17), 16, 6
"""AMX tiles: numbers of rows for which they are used, reduction steps (of four bytes) in a tile, limit of accumulator
tiles."""
MAX_STREAMS = 8
"""Limit of the columns of a tile with one row: each column is a memory stream of its own."""
MIN_GLIBC = "2.28"
"""The oldest C library that linked kernels run with; that of PYNQ's images is newer."""
TARGETS = {
    # NEON has 16 registers of 16 bytes; a Cortex-A9 has no fused multiply-add and no vector rounding.
    "armv7": Target(
        16, 16, frozenset(("neon",)), "armv7l", "armv7-unknown-linux-gnueabihf", "cortex-a9",
        ("-target", f"arm-linux-gnueabihf.{MIN_GLIBC}", "-mcpu=cortex_a9"), interleave=2,
    ),
    "aarch64": Target(
        16, 32, frozenset(("neon", "fp-armv8")), "aarch64", "aarch64-unknown-linux-gnu", "cortex-a53",
        ("-target", f"aarch64-linux-gnu.{MIN_GLIBC}", "-mcpu=cortex_a53"), interleave=2,
    ),
}  # fmt: skip
"""Targets by the names that users give."""


def find_target(name: str) -> Target:
    """Return the target called `name`, or that of a board's processor, by the board's name or .toml file.

    Raises TargetError, BoardError.
    """
    if name in TARGETS:
        return TARGETS[name]
    if name not in BOARDS and not is_board_file(name):
        known = (*BOARDS, *TARGETS)
        raise TargetError(
            f"there is no target {name!r}{did_you_mean(name, known)}; take {', '.join(known)}, a board's .toml file, "
            "or none for this machine"
        )
    machine = find_board(name).machine
    return next(candidate for candidate in TARGETS.values() if candidate.machine == machine)


SIMULATED_TARGET = Target(
    16, 16, frozenset(("sse2",)), "x86_64", "x86_64-unknown-linux-gnu", "x86-64", ("-target", "x86_64-linux-gnu.2.28")
)
"""Processor of boards that are simulated on this machine (driver/rehearse.py)."""


def target_for(machine: str) -> Target | None:
    """Return the target for processors with this `platform.machine()`; None if there is none."""
    return next(
        (candidate for candidate in (*TARGETS.values(), SIMULATED_TARGET) if candidate.machine == machine), None
    )


@functools.cache
def this_processor() -> Target:
    """Detect the processor that this process runs on."""
    names = llvm.get_host_cpu_features()
    features = frozenset(name for name, has in names.items() if has)
    if features >= AMX_FEATURES and not request_amx():
        features -= AMX_FEATURES
    if "avx512f" in features:
        width, registers = 64, 32
    elif "avx2" in features:
        width, registers = 32, 16
    else:
        width, registers = 16, 16 if "x86" in llvm.get_default_triple() else 32
    return Target(width, registers, features, cache_bytes=_cache_bytes() or Target.cache_bytes)


def _cache_bytes() -> int:
    """Return the size in bytes of this processor's second-level cache; 0 if Linux does not tell."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 0


_current: ContextVar[Target | None] = ContextVar("target", default=None)
"""The target set by `compiling_for`; None for this machine's processor."""


def target() -> Target:
    """Return the processor that kernels are compiled for: this one, unless inside `compiling_for`."""
    return _current.get() or this_processor()


@contextmanager
def compiling_for(processor: Target | None) -> Iterator[None]:
    """Compile kernels inside the context for `processor`; None for this machine's."""
    token = _current.set(processor)
    try:
        yield
    finally:
        _current.reset(token)
