"""LLVM for a processor: target machine, optimiser, object files, and linking into this process."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm

from celosia.compiler.target import Target, target, this_processor


@functools.cache
def machine(target: Target | None = None) -> Any:
    """Create LLVM's target machine of `target`, by default of this processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    if target is not None:
        features = ",".join(f"+{name}" for name in sorted(target.features))
        return llvm.Target.from_triple(target.triple).create_target_machine(
            cpu=target.cpu, features=features, opt=3, reloc=target.relocation, codemodel="default"
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
    """Return the compiler that links object files into this process."""
    return llvm.create_lljit_compiler(machine(), use_jit_link=False)


@functools.cache
def host() -> str:
    """Describe this processor (triple, name, features): code compiled here needs one with the same text."""
    features = llvm.get_host_cpu_features().flatten()
    tiles = "" if this_processor().has_amx else " without tiles"
    return f"{machine().triple} {llvm.get_host_cpu_name()} {features}{tiles}"


def foreign_target() -> Target | None:
    """Return the current target of compilation where it is not this processor, else None."""
    return target() if target().machine else None


_MASK = re.compile(r"<((?:i1 (?:true|false)(?:, )?)+)>\)")
"""Constant mask at the end of a call."""


def stores_one_lane(text: str) -> bool:
    """Return whether LLVM IR has a masked store with exactly one constant lane, which LLVM 22 miscompiles on x86.

    It becomes a scalar store. If the value was narrowed before, the store has the wider type and overwrites the bytes
    behind.
    """
    stores = (line for line in text.splitlines() if "@llvm.masked.store" in line and "call" in line)
    return any(mask[1].count("true") == 1 for mask in map(_MASK.search, stores) if mask is not None)


def converts_long_unsigned(text: str) -> bool:
    """Return whether LLVM IR converts 64-bit unsigned integers to floats, which LLVM 22 may miscompile.

    Where several of them were shorter signed integers, the SLP vectoriser converts their lower 32 bits:
    float(uint64(int8(-1))) becomes 2**32 - 1.
    """
    return re.search(r"= uitofp (<\d+ x )?i64", text) is not None


def optimise(text: str, level: int = 3, unroll: bool = True) -> tuple[str, bytes]:
    """Optimise and compile a module for the target.

    Returns (LLVM IR, object file). unroll: whether LLVM may unroll loops.
    """
    result, code = _run_passes(text, level, unroll, vectorise=True)
    return _run_passes(text, level, unroll, vectorise=False) if stores_one_lane(result) else (result, code)


def _run_passes(text: str, level: int, unroll: bool, vectorise: bool) -> tuple[str, bytes]:
    """Run LLVM's passes. vectorise: whether LLVM may vectorise loops; the vectors of schedules stay."""
    processor = machine(foreign_target())
    module = llvm.parse_assembly(text)
    module.triple = processor.triple
    module.data_layout = str(processor.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization = vectorise
    options.slp_vectorization = not converts_long_unsigned(text)
    options.loop_unrolling = unroll
    llvm.create_pass_builder(processor, options).getModulePassManager().run(
        module, llvm.create_pass_builder(processor, options)
    )
    return str(module), processor.emit_object(module)


_library_numbers = itertools.count()
"""Numbers that make the names of linked libraries unique in this process."""


def link(symbols: Sequence[str], code: bytes) -> Any:
    """Link an object file into this process. Returns a tracker that maps `symbols` to addresses and owns the code."""
    library = f"{symbols[0]}_{next(_library_numbers)}"
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    for symbol in symbols:
        builder.export_symbol(symbol)
    return builder.link(_jit(), library)
