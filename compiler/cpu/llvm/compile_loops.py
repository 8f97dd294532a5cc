"""Compile loop nests to machine code, with a cache in memory and on disk."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llvmlite
from numpy.typing import NDArray

from celosia.cache import cache_folder, is_own, make_folder, mark_used, tool_environment
from celosia.compiler.cpu.llvm.codegen import render
from celosia.compiler.cpu.llvm.machine import foreign_target, host, optimise
from celosia.compiler.cpu.llvm.team_code import team_object
from celosia.compiler.expr.loop_text import ELIDED_VALUES, TABLE_LIMIT, parse
from celosia.compiler.expr.loops import Alloc, Function, exprs, statements
from celosia.compiler.expr.nodes import Load, walk
from celosia.compiler.expr.verify import clamp_accesses
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.safe_files import replacing
from celosia.compiler.target import Target, compiling_for, target
from celosia.plain import Sentences


def _fills_registers(function: Function) -> bool:
    """Return whether register tiles take so many registers that LLVM must not unroll loops around them.

    Unrolled, values would not fit and be spilled. A tile is the largest "local" tensor.
    """
    tiles = [s.tensor.nbytes for s in statements(function.body) if isinstance(s, Alloc) and s.scope == "local"]
    return max(tiles, default=0) * 4 >= target().registers * target().vector_bytes


SOURCES = ("cpu", "cpu/llvm", "cpu/schedule", "expr", "program/host")
"""Folders of the compiler whose sources determine the machine code of a loop nest."""


@functools.cache
def _source_digest() -> str:
    """Return the version of LLVM and a digest of the compiler's sources, on which all machine code depends."""
    folder = Path(__file__).parents[2]
    text = b"".join(path.read_bytes() for subfolder in SOURCES for path in sorted((folder / subfolder).glob("*.py")))
    return f"{llvmlite.__version__} {hashlib.sha256(text).hexdigest()}"


def _cache_path(loops: str, key: object) -> Path:
    """Return the cache file of a loop nest. key: everything else on which its machine code depends."""
    name = hashlib.sha256(f"{_source_digest()}\n{foreign_target() or host()}\n{key}\n{loops}".encode()).hexdigest()
    return cache_folder() / "kernels" / f"{name}.kernel"


def _read_cache(path: Path) -> CompiledKernel | None:
    """Read a kernel from the cache; None where it is missing, damaged, or written by another user."""
    if not is_own(path):
        return None
    try:
        kernel = CompiledKernel.from_bytes(path.read_bytes())
        mark_used(path)
        return kernel
    except (OSError, ValueError):
        return None


def read_or_compile(loops: str, key: object, make: Callable[[], CompiledKernel]) -> CompiledKernel:
    """Return the kernel of a loop nest from the cache on disk; else compile it by `make` and write it there.

    loops: text of the nest. key: everything else on which its machine code depends.
    """
    path = _cache_path(loops, key)
    kernel = _read_cache(path)
    if kernel is not None:
        return kernel
    kernel = make()
    try:
        make_folder(path.parent)
        with replacing(path) as temporary:
            temporary.write_bytes(kernel.to_bytes())
        path.chmod(0o600)
    except OSError:
        pass  # without a cache everything still works
    return kernel


MAX_KERNELS = 4096
"""Limit of the kernels in memory; beyond it all are dropped."""
_kernels: dict[tuple[object, ...], CompiledKernel] = {}
"""Kernels in memory, by loops, dependencies and target."""


def compile_function(function: Function, features: frozenset[str] | None = None, keep: bool = True) -> CompiledKernel:
    """Compile a loop nest for the target; equal loops give the same CompiledKernel.

    features: of the processor, by default those of the target. keep: whether to cache the kernel; False for code that
    is used only once. Code for another processor is an object file for `link_library`, with a unique symbol.
    """
    loops = str(function)
    tables = _large_constants(function) if ELIDED_VALUES in loops else ()
    dependencies = _cache_key(tables, function.in_place, features)
    key = loops, dependencies, target()
    kernel = _kernels.get(key)
    if kernel is None and not keep:
        return _compile(function, features)
    if kernel is None:
        compiled = read_or_compile(loops, dependencies, lambda: _compile(function, features))
        kernel = _remember(key, replace(compiled, loops=loops, tables=tables))
    return kernel


def from_loops(source: CompiledKernel, trusted: bool = False) -> CompiledKernel:
    """Compile `source`, a kernel from a Program's file that has only the text of its loops, for the target.

    Unless trusted, the loops are verified and their indices clamped (expr/verify.py). Loops that this compiler
    has written itself are in the cache under their text, and nothing is compiled. Raises ValueError where the text is
    no loop nest, breaks a rule, or does not fit the kernel's signature.
    """
    dependencies = _cache_key(source.tables, source.in_place)
    key: tuple[object, ...] = source.loops, dependencies, target()
    kernel = _kernels.get(key)
    if kernel is None:
        guarded_dependencies = *dependencies, "as written" if trusted else "guarded"
        compiled = _read_cache(_cache_path(source.loops, dependencies))
        if compiled is None:
            key = source.loops, guarded_dependencies, target()
            compiled = _kernels.get(key) or read_or_compile(
                source.loops, guarded_dependencies, lambda: _compile(_parse_loops(source, trusted), None)
            )
        kernel = _remember(key, replace(compiled, loops=source.loops, tables=source.tables))
    if (kernel.inputs, kernel.outputs) != (source.inputs, source.outputs):
        raise ValueError(f"the loops of kernel {source.name} take or make other tensors than it says")
    return kernel


def _parse_loops(source: CompiledKernel, trusted: bool) -> Function:
    """Parse the loops of a kernel with its tables and in-place pairs; unless trusted, verify and clamp them."""
    names = re.findall(rf"^\s*constant ([\w.]+): .*{re.escape(ELIDED_VALUES)}$", source.loops, re.MULTILINE)
    function = replace(
        parse(source.loops, constants=dict(zip(names, source.tables, strict=True))), in_place=source.in_place
    )
    return function if trusted else clamp_accesses(function)


def _remember(key: tuple[object, ...], kernel: CompiledKernel) -> CompiledKernel:
    """Add a kernel to those in memory, and return it."""
    if len(_kernels) >= MAX_KERNELS:
        _kernels.clear()
    _kernels[key] = kernel
    return kernel


def _cache_key(
    tables: tuple[NDArray[Any], ...], in_place: object, features: frozenset[str] | None = None
) -> tuple[object, ...]:  # fmt: skip
    """Return what a kernel depends on besides the text of its loops: constants, in-place pairs, features."""
    digest = hashlib.sha256(b"".join(table.tobytes() for table in tables)).hexdigest() if tables else ""
    return digest, in_place, None if features is None else tuple(sorted(features))


def _large_constants(function: Function) -> tuple[NDArray[Any], ...]:
    """Return the constants whose values the text of the loops omits, in their order in the text.

    The cache's key and a Program's file hold them beside the text.
    """
    reads = (node for s in statements(function.body) for e in exprs(s) for node in walk(e) if isinstance(node, Load))
    tensors = dict.fromkeys(read.tensor for read in reads if read.tensor.value is not None)
    return tuple(t.value for t in tensors if t.value is not None and t.size > TABLE_LIMIT)


def _compile(function: Function, features: frozenset[str] | None) -> CompiledKernel:
    """Compile a function with LLVM. For another processor its symbols get a digest, as many kernels share a library."""
    rendered = render(function, features)
    text, name, processor = rendered.text, function.name, foreign_target()
    if processor is not None:
        name = f"{function.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        text = text.replace(f'@"{function.name}', f'@"{name}')
    return CompiledKernel(
        name,
        tuple((t.dtype, t.shape) for t in function.inputs),
        tuple((t.dtype, t.shape) for t in function.outputs),
        rendered.workspace_bytes,
        optimise(text, unroll=not _fills_registers(function))[1],
        processor.machine if processor is not None else host(),
        function.in_place,
        rendered.shared_bytes,
        rendered.phases,
    )


class LinkError(Sentences, RuntimeError):
    """Kernels that cannot be linked; the message names the tool and what to do."""


LINK_FLAGS = ("-shared", "-s", "-O2", "-Wl,--gc-sections", "-o", "kernels.so", "@objects", "-lm")
"""Arguments of zig's C compiler; the file `objects` lists the object files."""


def link_library(kernels: Iterable[CompiledKernel], target: Target) -> bytes:
    """Link the code of kernels and the team's code to a shared object for `target`, another processor.

    Raises LinkError. The result is cached on disk. It needs the board's C library only where a kernel calls one of its
    functions (sin, pow, ...), as the compiler's runtime is linked in.
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
        dependencies = metadata.version("ziglang"), target.zig, LINK_FLAGS

        def make() -> CompiledKernel:
            return CompiledKernel("library", (), (), 0, _link_objects(objects, target), "")

        return read_or_compile(repr(digests), dependencies, make).code


def _link_objects(objects: dict[str, bytes], target: Target) -> bytes:
    """Link object files with zig in a temporary folder. Raises LinkError."""
    with tempfile.TemporaryDirectory(prefix="celosia") as folder:
        for name, code in objects.items():
            (Path(folder) / name).write_bytes(code)
        (Path(folder) / "objects").write_text("\n".join(objects))
        command = [sys.executable, "-m", "ziglang", "cc", *target.zig, *LINK_FLAGS]
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, env=tool_environment()
        )  # fmt: skip
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else result.stderr.strip()[-200:]
            raise LinkError(f"ziglang could not link the kernels for {target.machine}: {reason}")
        return (Path(folder) / "kernels.so").read_bytes()
