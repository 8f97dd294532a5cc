"""Loop nests to machine code: LLVM's optimiser, objects kept on disk, and their linking into this process."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from platformdirs import user_cache_dir

from celosia.compiler.cpu.codegen import render
from celosia.compiler.cpu.kernel import Kernel
from celosia.compiler.expr.loops import Function


@functools.cache
def _machine() -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
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


def optimise(text: str, level: int = 3) -> tuple[str, bytes]:
    """(optimised LLVM IR, object file) of one module, for this processor."""
    machine = _machine()
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization = True
    options.slp_vectorization = True
    options.loop_unrolling = True
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, options)
    )
    return str(module), machine.emit_object(module)


def cache_dir() -> Path:
    """Where objects are kept; CELOSIA_CACHE overrides the user's cache directory."""
    return Path(os.environ.get("CELOSIA_CACHE") or user_cache_dir("celosia")) / "kernels"


def _cached_object(text: str) -> bytes:
    """The object file for LLVM IR, from disk where it is there undamaged."""
    key = hashlib.sha256(f"{llvmlite.__version__}\n{host()}\n{text}".encode()).hexdigest()
    path = cache_dir() / f"{key}.o"
    try:
        data = path.read_bytes()
        if data[:32] == hashlib.sha256(data[32:]).digest():
            return data[32:]
    except OSError:
        pass
    code = optimise(text)[1]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError:
        pass  # without a cache everything still works
    return code


_numbers = itertools.count()  # of libraries that this process has linked


def link(symbol: str, code: bytes) -> Any:
    """A tracker that gives the address of `symbol` of object file `code`, and keeps its code."""
    library = f"{symbol}_{next(_numbers)}"
    builder = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(symbol).add_current_process()
    return builder.link(_jit(), library)


def compile_function(function: Function, features: frozenset[str] | None = None) -> Kernel:
    """Machine code for a loop nest, for this processor. features: those to choose instructions by, see render."""
    text, workspace_bytes = render(function, features)
    return Kernel(
        function.name,
        tuple((t.dtype, t.shape) for t in function.inputs),
        tuple((t.dtype, t.shape) for t in function.outputs),
        workspace_bytes,
        _cached_object(text),
        host(),
        function.in_place,
    )
