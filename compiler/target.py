"""The processor that kernels are compiled for: what the choice of loops and instructions depends on."""

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
    """A target that there is not; the message names those that there are."""


@dataclass(frozen=True)
class Target:
    """vector_bytes: size of a vector register. registers: how many there are. features: in LLVM's names.

    abreast: vectors that element-wise loops compute side by side, for a processor that waits for each result.

    cache_bytes: of the second-level cache, as far as one core may fill it.

    triple, cpu: LLVM's, and zig: the linker's, of a processor that is not this one, with `machine` what
    `platform.machine()` calls it; "" for this one. relocation: LLVM's, of its objects.
    """

    vector_bytes: int
    registers: int
    features: frozenset[str]
    machine: str = ""
    triple: str = ""
    cpu: str = ""
    zig: tuple[str, ...] = ()
    cache_bytes: int = 1 << 20
    abreast: int = 1
    relocation: str = "pic"

    def lanes(self, dtype: str) -> int:
        """Elements of a vector."""
        return self.vector_bytes // itemsize(dtype)

    @property
    def halves(self) -> int:
        """Vectors of half the size that one register holds."""
        return 2 if "neon" in self.features and "fp-armv8" not in self.features else 1

    @property
    def tiles(self) -> bool:
        """Whether products of bytes have tiles (llvm/amx.py)."""
        return self.features >= TILES


TILES = frozenset(("amx-tile", "amx-int8"))
"""Features of Intel's AMX."""


def dot_instructions(has: frozenset[str]) -> tuple[str, tuple[int, ...]]:
    """(how dot4 is done, see llvm/dot.py; numbers of lanes that one instruction takes, widest first)."""
    if "avx512vnni" in has:
        return "vnni", (16, 8, 4) if "avx512vl" in has else (16,)
    if "avxvnni" in has:
        return "vnni", (8, 4)
    if "avx2" in has:
        return "pairs", (16, 8, 4) if "avx512bw" in has else (8, 4)
    if "neon" in has:
        return next((kind for kind in ("i8mm", "dotprod") if kind in has), "neon"), (4,)
    return "bytes", ()


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def tiles_permitted() -> bool:
    """Whether this process may use tiles: Linux wants to be asked, once for all threads."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


TILE_ROWS, TILE_STEPS, TILE_COLUMNS = range(8, 17), 16, 6
"""AMX tiles: rows that pay, steps of four bytes in a tile, and most tiles of accumulators."""
STREAMS = 8
"""Columns of a tile that has but one row: each is a stream of memory of its own."""
GLIBC = "2.28"
"""The oldest C library that linked kernels run with; that of PYNQ's images is newer."""
TARGETS = {
    # NEON has 16 registers of 16 bytes; a Cortex-A9 has no fused multiply-add and no vector rounding.
    "armv7": Target(
        16, 16, frozenset(("neon",)), "armv7l", "armv7-unknown-linux-gnueabihf", "cortex-a9",
        ("-target", f"arm-linux-gnueabihf.{GLIBC}", "-mcpu=cortex_a9"), abreast=2,
    ),
    "aarch64": Target(
        16, 32, frozenset(("neon", "fp-armv8")), "aarch64", "aarch64-unknown-linux-gnu", "cortex-a53",
        ("-target", f"aarch64-linux-gnu.{GLIBC}", "-mcpu=cortex_a53"), abreast=2,
    ),
}  # fmt: skip


def find_target(name: str) -> Target:
    """The target called `name`, or that of the processor of a board, by its name or its .toml file. TargetError,
    BoardError."""
    if name in TARGETS:
        return TARGETS[name]
    if name not in BOARDS and not is_board_file(name):
        known = (*BOARDS, *TARGETS)
        raise TargetError(
            f"there is no target {name!r}{did_you_mean(name, known)}; take {', '.join(known)}, a board's .toml file, "
            "or none for this machine"
        )
    machine = find_board(name).machine
    return next(each for each in TARGETS.values() if each.machine == machine)


SIMULATED = Target(
    16, 16, frozenset(("sse2",)), "x86_64", "x86_64-unknown-linux-gnu", "x86-64", ("-target", "x86_64-linux-gnu.2.28")
)
"""Processor of boards that are simulated on this machine (driver/rehearse.py)."""


def target_for(machine: str) -> Target | None:
    """The target for processors that `platform.machine()` calls so; None where there is none."""
    return next((each for each in (*TARGETS.values(), SIMULATED) if each.machine == machine), None)


@functools.cache
def this_processor() -> Target:
    """The one that this process runs on."""
    names = llvm.get_host_cpu_features()
    features = frozenset(name for name, has in names.items() if has)
    if features >= TILES and not tiles_permitted():
        features -= TILES
    if "avx512f" in features:
        width, registers = 64, 32
    elif "avx2" in features:
        width, registers = 32, 16
    else:
        width, registers = 16, 16 if "x86" in llvm.get_default_triple() else 32
    return Target(width, registers, features, cache_bytes=_cache_bytes() or Target.cache_bytes)


def _cache_bytes() -> int:
    """Bytes of this processor's second-level cache; 0 where Linux does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 0


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
