"""Targets of exported C: LLVM's settings for kernels, and the equal flags of a C compiler."""

from __future__ import annotations

from dataclasses import dataclass

from celosia.compiler.target import MIN_GLIBC, TARGETS, Target, TargetError
from celosia.driver.choices import EXPORT_TARGETS
from celosia.hw.spec.config import did_you_mean


@dataclass(frozen=True)
class ExportTarget:
    """A target of exported C. target: of kernels. gcc, zig: options of a C compiler for it; `gcc` of gcc and clang for
    that processor, `zig` of `zig cc`. hosted: whether it has an operating system and a C library."""

    name: str
    target: Target
    gcc: tuple[str, ...]
    zig: tuple[str, ...]
    hosted: bool = True


_ARMV7, _AARCH64 = TARGETS["armv7"], TARGETS["aarch64"]
_NEON = "-march=armv7-a", "-mfpu=neon", "-mfloat-abi=hard"
_ALL = (
    ExportTarget(
        "x86_64",
        Target(
            16, 16, frozenset(("sse2",)), "x86_64", "x86_64-unknown-linux-gnu", "x86-64"
        ),
        (),
        ("-target", f"x86_64-linux-gnu.{MIN_GLIBC}"),
    ),
    ExportTarget("armv7-linux", _ARMV7, _NEON, _ARMV7.zig),
    ExportTarget("aarch64-linux", _AARCH64, (), _AARCH64.zig),
    ExportTarget(
        "armv7-none",
        Target(16, 16, frozenset(("neon", "strict-align")), "armv7-none", "armv7-unknown-none-eabihf", "cortex-a9"),
        (*_NEON, "-mno-unaligned-access", "-ffreestanding"),
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
_BY_NAME = {target.name: target for target in _ALL}


def find_export_target(name: str) -> ExportTarget:
    """Return the target of that name. TargetError where there is none."""
    if name not in EXPORT_TARGETS:
        suggestion = did_you_mean(name, EXPORT_TARGETS)
        raise TargetError(f"there is no target {name!r}{suggestion}; take {', '.join(EXPORT_TARGETS)}")
    return _BY_NAME[name]
