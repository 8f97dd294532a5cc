"""Loop nests to machine code: LLVM's optimiser, objects kept on disk, and their linking into this process."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from platformdirs import user_cache_dir

from celosia.compiler.cpu import codegen
from celosia.compiler.cpu.codegen import render
from celosia.compiler.cpu.runtime.kernel import Kernel
from celosia.compiler.cpu.target import Target, target
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import Alloc, Function, exprs
from celosia.compiler.expr.nodes import Load, walk
from celosia.compiler.expr.printer import ELIDED


@functools.cache
def _machine(target: Target | None = None) -> Any:
    """LLVM's description of `target`, by default of this processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    if target is not None:
        features = ",".join(f"+{name}" for name in sorted(target.features))
        return llvm.Target.from_triple(target.triple).create_target_machine(
            cpu=target.cpu, features=features, opt=3, reloc="pic", codemodel="default"
        )
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


@functools.cache
def _jit() -> Any:
    return llvm.create_lljit_compiler(_machine(), use_jit_link=False)


@functools.cache
def host() -> str:
    """What machine code made here needs: triple, processor and its features."""
    machine = _machine()
    return f"{machine.triple} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def _other() -> Target | None:
    """The target where it is not this processor."""
    return target() if target().machine else None


def optimise(text: str, level: int = 3, unroll: bool = True) -> tuple[str, bytes]:
    """(optimised LLVM IR, object file) of one module, for the target. unroll: whether LLVM may write out loops."""
    machine = _machine(_other())
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization = True
    options.slp_vectorization = True
    options.loop_unrolling = unroll
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, options)
    )
    return str(module), machine.emit_object(module)


def cache_dir() -> Path:
    """Where objects are kept; CELOSIA_CACHE overrides the user's cache directory."""
    return Path(os.environ.get("CELOSIA_CACHE") or user_cache_dir("celosia")) / "kernels"


def _fills_registers(function: Function) -> bool:
    """Whether tiles take so many registers that loops around them, written out, would have to spill them."""
    tiles = [s.tensor.nbytes for s in statements(function.body) if isinstance(s, Alloc) and s.scope == "local"]
    return max(tiles, default=0) * 4 >= target().registers * target().vector_bytes


@functools.cache
def _sources() -> str:
    """What the code of a loop nest depends on beside the nest: the version of LLVM and the compiler's own sources."""
    folder = Path(codegen.__file__).parent
    text = b"".join(
        path.read_bytes() for each in (folder, folder.parent / "expr") for path in sorted(each.glob("*.py"))
    )
    return f"{llvmlite.__version__} {hashlib.sha256(text).hexdigest()}"


def _cached(loops: str, how: object, make: Callable[[], Kernel]) -> Kernel:
    """The kernel of a loop nest as text, from disk where it is there undamaged. how: what else it depends on."""
    name = hashlib.sha256(f"{_sources()}\n{_other() or host()}\n{how}\n{loops}".encode()).hexdigest()
    path = cache_dir() / f"{name}.kernel"
    try:
        return Kernel.from_bytes(path.read_bytes())
    except (OSError, ValueError):
        pass
    kernel = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(kernel.to_bytes())
        os.replace(file.name, path)
    except OSError:
        pass  # without a cache everything still works
    return kernel


_numbers = itertools.count()  # of libraries that this process has linked


def link(symbols: Sequence[str], code: bytes) -> Any:
    """A tracker that gives the addresses of `symbols` of object file `code`, and keeps its code."""
    library = f"{symbols[0]}_{next(_numbers)}"
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    for symbol in symbols:
        builder.export_symbol(symbol)
    return builder.link(_jit(), library)


MAX_KERNELS = 4096
"""Kernels held by what they compute, before all are dropped."""
_kernels: dict[tuple[object, ...], Kernel] = {}


def compile_function(function: Function, features: frozenset[str] | None = None) -> Kernel:
    """Machine code for a loop nest, for the target; the same Kernel for the same loops.

    features: those to choose instructions by, see render. The code for another processor is an object file to be linked
    with others (`link_library`); its symbol is unique.
    """
    loops = str(function)
    tables = _tables(function) if ELIDED in loops else ""  # else the text says all
    key = loops, tables, function.in_place, features, target()
    kernel = _kernels.get(key)
    if kernel is None:
        how = tables, function.in_place, features and sorted(features)
        kernel = _cached(loops, how, lambda: _compile(function, features))
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
    text, name, other = rendered.text, function.name, _other()
    if other is not None:
        name = f"{function.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        text = text.replace(f'@"{function.name}', f'@"{name}')
    return Kernel(
        name,
        tuple((t.dtype, t.shape) for t in function.inputs),
        tuple((t.dtype, t.shape) for t in function.outputs),
        rendered.workspace_bytes,
        optimise(text, unroll=not _fills_registers(function))[1],
        other.machine if other is not None else host(),
        function.in_place,
        rendered.shared_bytes,
        rendered.phases,
    )


class LinkError(RuntimeError):
    """Kernels that cannot be linked; the message names the tool and the way out."""


def link_library(kernels: Iterable[Kernel], target: Target) -> bytes:
    """One shared object of the kernels' code for `target`, which another processor is. LinkError.

    It needs the C library of a board only where a kernel calls a function of it (sin, pow, ...): what the compiler's
    own runtime holds is linked in.
    """
    if find_spec("ziglang") is None:
        raise LinkError(
            "kernels for another processor are linked with ziglang, which is missing; install it: "
            "pip install 'celosia[deploy]'"
        )
    with tempfile.TemporaryDirectory(prefix="celosia") as folder:
        objects = {f"{kernel.name}.o": kernel.code for kernel in kernels}
        for name, code in objects.items():
            (Path(folder) / name).write_bytes(code)
        (Path(folder) / "objects").write_text("\n".join(objects))
        flags = (*target.zig, "-shared", "-s", "-O2", "-Wl,--gc-sections", "-o", "kernels.so", "@objects", "-lm")
        command = [sys.executable, "-m", "ziglang", "cc", *flags]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
            raise LinkError(f"ziglang could not link the kernels for {target.machine}: {reason}")
        return (Path(folder) / "kernels.so").read_bytes()
