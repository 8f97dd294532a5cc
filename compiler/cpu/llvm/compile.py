"""Loop nests to machine code, which is kept on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import llvmlite

from celosia.compiler.cpu.llvm.codegen import render
from celosia.compiler.cpu.llvm.machine import host, optimise, other
from celosia.compiler.cpu.runtime.kernel import Kernel
from celosia.compiler.cpu.target import target
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import Alloc, Function, exprs
from celosia.compiler.expr.nodes import Load, walk
from celosia.compiler.expr.printer import ELIDED
from celosia.compiler.files import replacing
from celosia.hw.cache import cache_folder, used


def cache_dir() -> Path:
    """Where objects are kept."""
    return cache_folder() / "kernels"


def _fills_registers(function: Function) -> bool:
    """Whether tiles take so many registers that loops around them, written out, would have to spill them."""
    tiles = [s.tensor.nbytes for s in statements(function.body) if isinstance(s, Alloc) and s.scope == "local"]
    return max(tiles, default=0) * 4 >= target().registers * target().vector_bytes


SOURCES = ("cpu", "cpu/llvm", "cpu/runtime", "cpu/schedule", "expr")
"""Folders of the compiler that loops and their machine code come from."""


@functools.cache
def _sources() -> str:
    """What the code of a loop nest depends on beside the nest: the version of LLVM and the compiler's own sources."""
    folder = Path(__file__).parents[2]
    text = b"".join(path.read_bytes() for each in SOURCES for path in sorted((folder / each).glob("*.py")))
    return f"{llvmlite.__version__} {hashlib.sha256(text).hexdigest()}"


def cached(loops: str, how: object, make: Callable[[], Kernel]) -> Kernel:
    """The kernel of a loop nest as text, from disk where it is there undamaged. how: what else it depends on."""
    name = hashlib.sha256(f"{_sources()}\n{other() or host()}\n{how}\n{loops}".encode()).hexdigest()
    path = cache_dir() / f"{name}.kernel"
    try:
        kernel = Kernel.from_bytes(path.read_bytes())
        used(path)
        return kernel
    except (OSError, ValueError):
        pass
    kernel = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(kernel.to_bytes())
    except OSError:
        pass  # without a cache everything still works
    return kernel


MAX_KERNELS = 4096
"""Kernels held by what they compute, before all are dropped."""
_kernels: dict[tuple[object, ...], Kernel] = {}


def compile_function(function: Function, features: frozenset[str] | None = None, keep: bool = True) -> Kernel:
    """Machine code for a loop nest, for the target; the same Kernel for the same loops.

    features: those to choose instructions by, see render. keep: False for code that is wanted once. The code for
    another processor is an object file to be linked with others (`link_library`); its symbol is unique.
    """
    loops = str(function)
    tables = _tables(function) if ELIDED in loops else ""  # else the text says all
    key = loops, tables, function.in_place, features, target()
    kernel = _kernels.get(key)
    if kernel is None and not keep:
        return _compile(function, features)
    if kernel is None:
        how = tables, function.in_place, features and sorted(features)
        kernel = cached(loops, how, lambda: _compile(function, features))
        if len(_kernels) >= MAX_KERNELS:
            _kernels.clear()
        _kernels[key] = kernel
    return kernel


def _tables(function: Function) -> str:
    """A digest of the constants inside the loops, in the order of their use."""
    reads = (node for s in statements(function.body) for e in exprs(s) for node in walk(e) if isinstance(node, Load))
    found = dict.fromkeys(read.tensor for read in reads if read.tensor.value is not None)
    return hashlib.sha256(b"".join(t.value.tobytes() for t in found if t.value is not None)).hexdigest()


def _compile(function: Function, features: frozenset[str] | None) -> Kernel:
    rendered = render(function, features)
    text, name, processor = rendered.text, function.name, other()
    if processor is not None:
        name = f"{function.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        text = text.replace(f'@"{function.name}', f'@"{name}')
    return Kernel(
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
