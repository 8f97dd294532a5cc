"""Processors that models can be exported for: LLVM's settings for kernels, and matching flags of C compilers."""

from __future__ import annotations

from dataclasses import dataclass

from celosia.compiler.target import MIN_GLIBC, TARGETS, Target, TargetError
from celosia.driver.choices import EXPORT_TARGETS
from celosia.hw.spec.config import did_you_mean


@dataclass(frozen=True)
class ExportTarget:
    """A processor and system to export for.

    target: LLVM's settings for kernels. gcc: options of gcc and clang for it. zig: options of `zig cc`. hosted: it has
    an operating system and a C library.
    """

    name: str
    target: Target
    gcc: tuple[str, ...]
    zig: tuple[str, ...]
    hosted: bool = True


_ARMV7, _AARCH64 = TARGETS["armv7"], TARGETS["aarch64"]
_NEON_FLAGS = "-march=armv7-a", "-mfpu=neon", "-mfloat-abi=hard"
_EXPORT_TARGETS = (
    ExportTarget(
        "x86_64",
        Target(
            16, 16, frozenset(("sse2",)), "x86_64", "x86_64-unknown-linux-gnu", "x86-64"
        ),
        (),
        ("-target", f"x86_64-linux-gnu.{MIN_GLIBC}"),
    ),
    ExportTarget("armv7-linux", _ARMV7, _NEON_FLAGS, _ARMV7.zig),
    ExportTarget("aarch64-linux", _AARCH64, (), _AARCH64.zig),
    ExportTarget(
        "armv7-none",
        Target(16, 16, frozenset(("neon", "strict-align")), "armv7-none", "armv7-unknown-none-eabihf", "cortex-a9"),
        (*_NEON_FLAGS, "-mno-unaligned-access", "-ffreestanding"),
        ("-target", "arm-freestanding-eabihf", "-mcpu=cortex_a9+strict_align"),
        hosted=False,
    ),
    ExportTarget(
        "riscv32-none",  # rv32imac: floats in software
        Target(16, 4, frozenset(("m", "a", "c")), "riscv32-none", "riscv32-unknown-none-elf", "generic-rv32"),
        ("-march=rv32imac", "-mabi=ilp32", "-mcmodel=medany", "-ffreestanding"),
        ("-target", "riscv32-freestanding-none", "-mcpu=generic_rv32+m+a+c", "-mcmodel=medany"),
        hosted=False,
    ),
    ExportTarget(
        "wasm32",
        Target(16, 16, frozenset(("simd128",)), "wasm32", "wasm32-unknown-unknown", "generic", relocation="static"),
        ("-ffreestanding", "-msimd128"),
        ("-target", "wasm32-freestanding", "-mcpu=generic+simd128"),
        hosted=False,
    ),
)  # fmt: skip
_TARGET_OF_NAME = {target.name: target for target in _EXPORT_TARGETS}


def find_export_target(name: str) -> ExportTarget:
    """Return the target of that name. TargetError where there is none."""
    if name not in EXPORT_TARGETS:
        suggestion = did_you_mean(name, EXPORT_TARGETS)
        raise TargetError(f"there is no target {name!r}{suggestion}; take {', '.join(EXPORT_TARGETS)}")
    return _TARGET_OF_NAME[name]
