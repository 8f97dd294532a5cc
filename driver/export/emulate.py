"""Build exported models with ziglang and run them under an emulator of their target, on a simulator of the
accelerator."""

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

EMULATED = Path(__file__).with_name("emulated")
BRIDGE = "device_bridge.c"


class ToolMissing(RuntimeError):
    """A tool that builds or runs a program for a target is missing; the message says which, and where it comes from."""


@dataclass(frozen=True)
class Emulator:
    """An emulator of a target. command: what goes before the program's name. sources: of the stream, and of what begins
    the program. flags: of the linker. package: Debian's, which has it. files: that it needs, too."""

    command: tuple[str, ...]
    sources: tuple[str, ...] = ("stream_hosted.c",)
    flags: tuple[str, ...] = ()
    package: str = ""
    files: tuple[str, ...] = ()


_SERIAL = (
    "-nic",
    "none",
    "-display",
    "none",
    "-monitor",
    "none",
    "-chardev",
    "stdio,id=serial,signal=off",
    "-serial",
    "chardev:serial",
)
_BARE = "-static", "-Wl,-T,program.ld", "-Wl,--gc-sections"
_ORIGINS = {"riscv32-none": 0x8000_0000, "armv7-none": 0x4020_0000}
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
        ("stream_uart.c", "start_riscv32.S"), _BARE, "qemu-system-misc",
    ),
    "armv7-none": Emulator(
        ("qemu-system-arm", "-M", "virt", "-cpu", "cortex-a15", "-m", "256M", *_SERIAL, "-kernel"),
        ("stream_uart.c", "start_armv7.S"), _BARE, "qemu-system-arm",
    ),
    "wasm32": Emulator(
        ("node", str(EMULATED / "node.mjs")), (), ("-Wl,--no-entry", "-Wl,--export=main"),
        "nodejs",
    ),
}  # fmt: skip


def missing_tools(target: ExportTarget) -> str | None:
    """Name the missing tools that emulating `target` needs, and where they come from; None for nothing."""
    if "ziglang" in c_compiler(target) and find_spec("ziglang") is None:
        return "could not import 'ziglang', which builds C for other processors; pip install 'celosia[deploy]'"
    emulator = EMULATORS[target.name]
    needed = [tools.tool_with_command(command) for command in emulator.command[:1]]  # nothing for this processor
    lacking = [tool.commands[0] for tool in needed if tools.find(tool) is None]
    lacking += [path for path in emulator.files if not Path(path).exists()]
    if lacking:
        old = "".join(map(tools.too_old, needed))
        package = f"Debian, Ubuntu: apt-get install {emulator.package}"
        return f"could not find '{lacking[0]}', which runs {target.name}{old}; {package}"
    return None


def build_bridge_program(exported: Sequence[Exported], folder: Path) -> list[str]:
    """Writes models of one target into `folder`, builds one program of them, on a bridge, and returns the command that
    runs it. ToolMissing where this machine lacks something."""
    target = exported[0].target
    emulator = EMULATORS[target.name]
    lack = missing_tools(target)
    if lack is not None:
        raise ToolMissing(lack)
    for model in exported:
        write_project(model, folder)
    (folder / f"{PROGRAM}.c").write_text(bridge_program([model.model for model in exported]), encoding="utf-8")
    if target.name in _ORIGINS:
        text = (EMULATED / "memory.ld").read_text(encoding="utf-8")
        (folder / "program.ld").write_text(text.replace("PROGRAM_ORIGIN", hex(_ORIGINS[target.name])), encoding="utf-8")
    sources = [f"{PROGRAM}.c", "celosia.c", *(str(EMULATED / file) for file in (BRIDGE, *emulator.sources))]
    for model in exported:
        sources += [f"{model.model.name}.c", f"{model.model.name}_celosia.c"]
        sources += [file for file in model.files if file.endswith(".o")]
    last = ("-lm",) if target.hosted else ()
    compile_c(target, [f"-I{EMULATED}", *emulator.flags, *sources, "-o", PROGRAM, *last], folder)
    return [*emulator.command, str(folder / PROGRAM)]


def compile_c(target: ExportTarget, arguments: Sequence[str], folder: Path) -> None:
    """Run the C compiler for `target` in `folder`. ToolMissing where it fails."""
    completed = subprocess.run(
        [*c_compiler(target), *FLAGS, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env=tool_environment(),
    )  # fmt: skip
    if completed.returncode:
        raise ToolMissing(f"the C compiler for {target.name} failed: {completed.stderr.strip()[-600:]}")


def runtime_objects(target: ExportTarget, folder: Path) -> list[bytes]:
    """Build the runtime as objects for `target`, with its devices; `folder` is scratch space. ToolMissing."""
    files = runtime_files(target)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    sources = [file for file in files if file.endswith(".c")]
    for source in sources:
        compile_c(target, ["-c", source, "-o", f"{source}.o"], folder)
    return [(folder / f"{source}.o").read_bytes() for source in sources]


PROGRAM = "on_bridge"
FLAGS = "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-I."


def c_compiler(target: ExportTarget) -> list[str]:
    """Command of a C compiler for `target`: this machine's own, or ziglang."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is not None and target.name == platform.machine():
        return [compiler, *target.gcc]
    return [sys.executable, "-m", "ziglang", "cc", *target.zig, *(() if target.hosted else ("-ffreestanding",))]
