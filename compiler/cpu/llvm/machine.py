"""LLVM for a processor: its optimiser, object files, and their linking into this process."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm

from celosia.compiler.cpu.target import Target, target, this_processor


@functools.cache
def machine(target: Target | None = None) -> Any:
    """LLVM's description of `target`, by default of this processor."""
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
    return llvm.create_lljit_compiler(machine(), use_jit_link=False)


@functools.cache
def host() -> str:
    """What machine code made here needs: triple, processor and its features."""
    features = llvm.get_host_cpu_features().flatten()
    tiles = "" if this_processor().has_amx else " without tiles"
    return f"{machine().triple} {llvm.get_host_cpu_name()} {features}{tiles}"


def other() -> Target | None:
    """The target where it is not this processor."""
    return target() if target().machine else None


_MASK = re.compile(r"<((?:i1 (?:true|false)(?:, )?)+)>\)")


def stores_one_lane(text: str) -> bool:
    """Whether a masked store of LLVM IR has one lane, in a mask that is known. LLVM 22 makes a scalar store of it on
    x86, and where the value was narrowed before, one as wide as it had been: bytes behind it are overwritten."""
    stores = (line for line in text.splitlines() if "@llvm.masked.store" in line and "call" in line)
    return any(mask[1].count("true") == 1 for mask in map(_MASK.search, stores) if mask is not None)


def converts_long_unsigned(text: str) -> bool:
    """Whether LLVM IR makes floats of 64-bit unsigned integers. Where several of these were shorter signed integers,
    the SLP vectoriser of LLVM 22 converts their lower 32 bits: float(uint64(int8(-1))) becomes 2**32 - 1."""
    return re.search(r"= uitofp (<\d+ x )?i64", text) is not None


def optimise(text: str, level: int = 3, unroll: bool = True) -> tuple[str, bytes]:
    """(optimised LLVM IR, object file) of one module, for the target. unroll: whether LLVM may write out loops."""
    result, code = _optimised(text, level, unroll, vectorise=True)
    return _optimised(text, level, unroll, vectorise=False) if stores_one_lane(result) else (result, code)


def _optimised(text: str, level: int, unroll: bool, vectorise: bool) -> tuple[str, bytes]:
    """vectorise: whether LLVM may make vectors of loops; those that our schedules make stay."""
    processor = machine(other())
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


_numbers = itertools.count()  # of libraries that this process has linked


def link(symbols: Sequence[str], code: bytes) -> Any:
    """A tracker that gives the addresses of `symbols` of object file `code`, and keeps its code."""
    library = f"{symbols[0]}_{next(_numbers)}"
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    for symbol in symbols:
        builder.export_symbol(symbol)
    return builder.link(_jit(), library)
