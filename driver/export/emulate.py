"""Build exported models with ziglang, to run them under an emulator of their target on a simulated accelerator.

Only tests and benchmarks use this: `build_bridge_program` returns the command for a `bridge.Bridge`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from celosia import tools
from celosia.cache import tool_environment
from celosia.driver.export.build_files import bridge_program
from celosia.driver.export.c_project import Exported, runtime_files, write_project
from celosia.driver.export.targets import ExportTarget

EMULATED_SOURCES = Path(__file__).with_name("emulated")
"""Folder of the C files that an emulated program needs besides the runtime."""
BRIDGE = "device_bridge.c"
"""The device of an emulated program, whose accesses go to a `bridge.Bridge`."""


class BuildToolError(RuntimeError):
    """A tool that builds or runs a program for a target is missing, or the C compiler failed; the message says
    which."""


@dataclass(frozen=True)
class Emulator:
    """An emulator of a target.

    command: the words before the program's name. sources: C and assembly files with the program's start and its stream
    to the Bridge. flags: of the linker. package: Debian packages that have it. files: paths that it needs, too.
    """

    command: tuple[str, ...]
    sources: tuple[str, ...] = ("stream_hosted.c",)
    flags: tuple[str, ...] = ()
    package: str = ""
    files: tuple[str, ...] = ()


_SERIAL = (
    "-nic", "none", "-display", "none", "-monitor", "none",
    "-chardev", "stdio,id=serial,signal=off", "-serial", "chardev:serial",
)  # fmt: skip
"""QEMU options that connect the serial port, and nothing else, to stdin and stdout."""
_BARE_METAL_FLAGS = "-static", "-Wl,-T,program.ld", "-Wl,--gc-sections"
_MEMORY_ORIGINS = {"riscv32-none": 0x8000_0000, "armv7-none": 0x4020_0000}
"""Address at which QEMU loads the program, by bare-metal target."""
EMULATORS = {
    "x86_64": Emulator(()),
    "armv7-linux": Emulator(
        ("qemu-arm-static", "-L", "/usr/arm-linux-gnueabihf"), package="qemu-user-static libc6-armhf-cross",
        files=("/usr/arm-linux-gnueabihf",),
    ),
    "aarch64-linux": Emulator(
        ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"), package="qemu-user-static libc6-arm64-cross",
        files=("/usr/aarch64-linux-gnu",),
    ),
    "riscv32-none": Emulator(
        ("qemu-system-riscv32", "-M", "virt", "-m", "256M", "-bios", "none", *_SERIAL, "-kernel"),
        ("stream_uart.c", "start_riscv32.S"), _BARE_METAL_FLAGS, "qemu-system-misc",
    ),
    "armv7-none": Emulator(
        ("qemu-system-arm", "-M", "virt", "-cpu", "cortex-a15", "-m", "256M", *_SERIAL, "-kernel"),
        ("stream_uart.c", "start_armv7.S"), _BARE_METAL_FLAGS, "qemu-system-arm",
    ),
    "wasm32": Emulator(
        ("node", str(EMULATED_SOURCES / "node.mjs")), (), ("-Wl,--no-entry", "-Wl,--export=main"),
        "nodejs",
    ),
}  # fmt: skip
"""Emulators by name of the target. x86_64 needs none."""


def missing_tools(target: ExportTarget) -> str | None:
    """Return a sentence on the first missing tool that emulating `target` needs, and its package; None if none is
    missing."""
    if "ziglang" in c_compiler(target) and find_spec("ziglang") is None:
        return "could not import 'ziglang', which builds C for other processors; pip install 'celosia[deploy]'"
    emulator = EMULATORS[target.name]
    needed = [tools.tool_with_command(command) for command in emulator.command[:1]]  # none for this processor
    missing = [tool.commands[0] for tool in needed if tools.find(tool) is None]
    missing += [path for path in emulator.files if not Path(path).exists()]
    if missing:
        version_hint = "".join(map(tools.too_old, needed))
        package = f"Debian, Ubuntu: apt-get install {emulator.package}"
        return f"could not find '{missing[0]}', which runs {target.name}{version_hint}; {package}"
    return None


def build_bridge_program(exported: Sequence[Exported], folder: Path) -> list[str]:
    """Write models of one target into `folder` and build one program of all that talks to a `bridge.Bridge`.

    Return the command that runs it. BuildToolError where this machine lacks a tool.
    """
    target = exported[0].target
    emulator = EMULATORS[target.name]
    message = missing_tools(target)
    if message is not None:
        raise BuildToolError(message)
    for model in exported:
        write_project(model, folder)
    (folder / f"{PROGRAM}.c").write_text(bridge_program([model.model for model in exported]), encoding="utf-8")
    if target.name in _MEMORY_ORIGINS:
        text = (EMULATED_SOURCES / "memory.ld").read_text(encoding="utf-8")
        (folder / "program.ld").write_text(
            text.replace("PROGRAM_ORIGIN", hex(_MEMORY_ORIGINS[target.name])), encoding="utf-8"
        )
    sources = [f"{PROGRAM}.c", "celosia.c", *(str(EMULATED_SOURCES / file) for file in (BRIDGE, *emulator.sources))]
    for model in exported:
        sources += [f"{model.model.name}.c", f"{model.model.name}_celosia.c"]
        sources += [file for file in model.files if file.endswith(".o")]
    libraries = ("-lm",) if target.hosted else ()
    compile_c(target, [f"-I{EMULATED_SOURCES}", *emulator.flags, *sources, "-o", PROGRAM, *libraries], folder)
    return [*emulator.command, str(folder / PROGRAM)]


def compile_c(target: ExportTarget, arguments: Sequence[str], folder: Path) -> None:
    """Run the C compiler for `target` with FLAGS and `arguments` in `folder`. BuildToolError where it fails."""
    completed = subprocess.run(
        [*c_compiler(target), *FLAGS, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env=tool_environment(),
    )  # fmt: skip
    if completed.returncode:
        raise BuildToolError(f"the C compiler for {target.name} failed: {completed.stderr.strip()[-600:]}")


def runtime_objects(target: ExportTarget, folder: Path) -> list[bytes]:
    """Compile the C runtime for `target` and return its object files, to measure their code size.

    folder: an empty folder to compile in. Raises BuildToolError.
    """
    files = runtime_files(target)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    sources = [file for file in files if file.endswith(".c")]
    for source in sources:
        compile_c(target, ["-c", source, "-o", f"{source}.o"], folder)
    return [(folder / f"{source}.o").read_bytes() for source in sources]


PROGRAM = "on_bridge"
"""Name of the program that `build_bridge_program` builds."""
FLAGS = "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-I."
"""Options of the C compiler for all targets."""


def c_compiler(target: ExportTarget) -> list[str]:
    """Return the command of a C compiler for `target`: this machine's own if it is its processor, else ziglang."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is not None and target.name == platform.machine():
        return [compiler, *target.gcc]
    return [sys.executable, "-m", "ziglang", "cc", *target.zig, *(() if target.hosted else ("-ffreestanding",))]
