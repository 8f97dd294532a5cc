"""Link kernels for another processor into one shared object."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from celosia.cache import tool_environment
from celosia.compiler.cpu.llvm.compile_loops import cached
from celosia.compiler.cpu.llvm.team_code import team_object
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import Target, compiling_for
from celosia.plain import Sentences


class LinkError(Sentences, RuntimeError):
    """Kernels that cannot be linked; the message names the tool and what to do."""


FLAGS = ("-shared", "-s", "-O2", "-Wl,--gc-sections", "-o", "kernels.so", "@objects", "-lm")


def link_library(kernels: Iterable[CompiledKernel], target: Target) -> bytes:
    """Link the code of kernels and the team's code to a shared object for `target`, another processor.

    Raises LinkError.

    The result is cached on disk. It needs the board's C library only where a kernel calls one of its functions (sin,
    pow, ...), as the compiler's runtime is linked in.
    """
    if find_spec("ziglang") is None:
        raise LinkError(
            "kernels for another processor are linked with ziglang, which is missing; install it: "
            "pip install 'celosia[deploy]'"
        )
    objects = {f"{kernel.name}.o": kernel.code for kernel in kernels}
    with compiling_for(target):
        objects["team.o"] = team_object()
        digests = [(name, hashlib.sha256(code).hexdigest()) for name, code in objects.items()]
        how = metadata.version("ziglang"), target.zig, FLAGS
        return cached(
            repr(digests), how, lambda: CompiledKernel("library", (), (), 0, _link_objects(objects, target), "")
        ).code


def _link_objects(objects: dict[str, bytes], target: Target) -> bytes:
    """Link object files with zig in a temporary folder. Raises LinkError."""
    with tempfile.TemporaryDirectory(prefix="celosia") as folder:
        for name, code in objects.items():
            (Path(folder) / name).write_bytes(code)
        (Path(folder) / "objects").write_text("\n".join(objects))
        command = [sys.executable, "-m", "ziglang", "cc", *target.zig, *FLAGS]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=tool_environment())
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
            raise LinkError(f"ziglang could not link the kernels for {target.machine}: {reason}")
        return (Path(folder) / "kernels.so").read_bytes()
