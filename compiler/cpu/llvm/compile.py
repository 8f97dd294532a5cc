"""Loop nests to machine code, which is kept on disk."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite
from numpy.typing import NDArray

from celosia.cache import cache_folder, is_own, make_folder, mark_used
from celosia.compiler.cpu.llvm.codegen import render
from celosia.compiler.cpu.llvm.machine import host, optimise, other
from celosia.compiler.cpu.target import target
from celosia.compiler.expr.clamp_indices import clamp_accesses
from celosia.compiler.expr.loops import Alloc, Function, exprs
from celosia.compiler.expr.nodes import Load
from celosia.compiler.expr.parser import parse
from celosia.compiler.expr.printer import ELIDED, TABLE_LIMIT
from celosia.compiler.expr.regions import statements
from celosia.compiler.expr.walk import walk
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.safe_files import replacing


def _fills_registers(function: Function) -> bool:
    """Whether tiles take so many registers that loops around them, written out, would have to spill them."""
    tiles = [s.tensor.nbytes for s in statements(function.body) if isinstance(s, Alloc) and s.scope == "local"]
    return max(tiles, default=0) * 4 >= target().registers * target().vector_bytes


SOURCES = ("cpu", "cpu/llvm", "cpu/schedule", "expr", "program/host")
"""Folders of the compiler that loops and their machine code come from."""


@functools.cache
def _sources() -> str:
    """What the code of a loop nest depends on beside the nest: the version of LLVM and the compiler's own sources."""
    folder = Path(__file__).parents[2]
    text = b"".join(path.read_bytes() for each in SOURCES for path in sorted((folder / each).glob("*.py")))
    return f"{llvmlite.__version__} {hashlib.sha256(text).hexdigest()}"


def _place(loops: str, how: object) -> Path:
    """The file of a loop nest's kernel."""
    name = hashlib.sha256(f"{_sources()}\n{other() or host()}\n{how}\n{loops}".encode()).hexdigest()
    return cache_folder() / "kernels" / f"{name}.kernel"


def _found(path: Path) -> CompiledKernel | None:
    """The kernel in a file of the cache, where it is there undamaged, and no other user has written it."""
    if not is_own(path):
        return None
    try:
        kernel = CompiledKernel.from_bytes(path.read_bytes())
        mark_used(path)
        return kernel
    except (OSError, ValueError):
        return None


def cached(loops: str, how: object, make: Callable[[], CompiledKernel]) -> CompiledKernel:
    """The kernel of a loop nest as text, from disk where it is there undamaged. how: what else it depends on."""
    path = _place(loops, how)
    kernel = _found(path)
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
"""Kernels held by what they compute, before all are dropped."""
_kernels: dict[tuple[object, ...], CompiledKernel] = {}


def compile_function(function: Function, features: frozenset[str] | None = None, keep: bool = True) -> CompiledKernel:
    """Machine code for a loop nest, for the target; the same CompiledKernel for the same loops.

    features: those to choose instructions by, see render. keep: False for code that is wanted once. The code for
    another processor is an object file to be linked with others (`link_library`); its symbol is unique.
    """
    loops = str(function)
    tables = _tables(function) if ELIDED in loops else ()
    how = _how(tables, function.in_place, features)
    key = loops, how, target()
    kernel = _kernels.get(key)
    if kernel is None and not keep:
        return _compile(function, features)
    if kernel is None:
        made = cached(loops, how, lambda: _compile(function, features))
        kernel = _remembered(key, replace(made, loops=loops, tables=tables))
    return kernel


def from_loops(given: CompiledKernel, trusted: bool = False) -> CompiledKernel:
    """`given`, which is loops, with machine code for the target. Not `trusted`, its loops are checked, and every index
    that is not certainly inside its tensor is kept there (expr/clamp_indices.py).

    Loops that this compiler has written itself are known by their text, where their kernel is in the cache: nothing is
    compiled then. ValueError where they are no loops, break a rule, or are not those of the kernel.
    """
    own = _how(given.tables, given.in_place)
    key, known = (given.loops, own, target()), _kernels.get((given.loops, own, target()))
    if known is None:
        how = *own, "as written" if trusted else "guarded"
        found = _found(_place(given.loops, own))
        if found is None:
            key = given.loops, how, target()
            found = _kernels.get(key) or cached(given.loops, how, lambda: _compile(_parsed(given, trusted), None))
        known = _remembered(key, replace(found, loops=given.loops, tables=given.tables))
    if (known.inputs, known.outputs) != (given.inputs, given.outputs):
        raise ValueError(f"the loops of kernel {given.name} take or make other tensors than it says")
    return known


def _parsed(given: CompiledKernel, trusted: bool) -> Function:
    names = re.findall(rf"^\s*constant ([\w.]+): .*{re.escape(ELIDED)}$", given.loops, re.MULTILINE)
    function = replace(
        parse(given.loops, constants=dict(zip(names, given.tables, strict=True))), in_place=given.in_place
    )
    return function if trusted else clamp_accesses(function)


def _remembered(key: tuple[object, ...], kernel: CompiledKernel) -> CompiledKernel:
    if len(_kernels) >= MAX_KERNELS:
        _kernels.clear()
    _kernels[key] = kernel
    return kernel


def _how(
    tables: tuple[NDArray[Any], ...], in_place: object, features: frozenset[str] | None = None
) -> tuple[object, ...]:  # fmt: skip
    """What a kernel depends on beside the text of its loops."""
    digest = hashlib.sha256(b"".join(table.tobytes() for table in tables)).hexdigest() if tables else ""
    return digest, in_place, None if features is None else tuple(sorted(features))


def _tables(function: Function) -> tuple[NDArray[Any], ...]:
    """The constants inside the loops that their text leaves out, in its order."""
    reads = (node for s in statements(function.body) for e in exprs(s) for node in walk(e) if isinstance(node, Load))
    found = dict.fromkeys(read.tensor for read in reads if read.tensor.value is not None)
    return tuple(t.value for t in found if t.value is not None and t.size > TABLE_LIMIT)


def _compile(function: Function, features: frozenset[str] | None) -> CompiledKernel:
    rendered = render(function, features)
    text, name, processor = rendered.text, function.name, other()
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
