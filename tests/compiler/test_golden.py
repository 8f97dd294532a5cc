"""Golden hashes of compiled small models: a refactoring changes none of them.

golden.json has one line for each model and column. A column is a Config together with a processor for which the CPU's
part is compiled; in the last columns the CPU does everything. Each line holds three digests: of the launches
(instruction words, layers, packed and unpacked tensors), of the constants of both parts, and of the loop nests of CPU
kernels.

After a change that moves them on purpose, write the file anew and say in the commit which lines changed and why:

PYTHONPATH=src:tests python -m tests.compiler.test_golden
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from thorough import some

import celosia
from celosia.compiler.cpu import kernels
from celosia.compiler.cpu.llvm.compile_loops import compile_function
from celosia.compiler.expr.loops import Function
from celosia.compiler.program import CpuStep, LaunchStep, Program
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import TARGETS, Target, target
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import instruction_bytes

from .golden_models import CORRECT, MODELS

PATH = Path(__file__).with_name("golden.json")
PARTS = "launches", "constants", "loops"
AVX2 = Target(32, 16, frozenset(("sse2", "avx", "avx2", "fma")))
AVX512 = Target(64, 32, AVX2.features | {"avx512f", "avx512bw", "avx512vl", "avx512vnni"})


class Column(NamedTuple):
    """A Config and a processor for which models are compiled. cfg: None leaves every operator to the CPU."""

    cfg: Config | None
    processor: Target


COLUMNS = {
    "tiny": Column(PRESETS["tiny"], AVX2),
    "pynq": Column(PRESETS["pynq"], TARGETS["armv7"]),
    "rectangular": Column(replace(PRESETS["tiny"], name="", block_in=8, block_out=4, batch=2), TARGETS["aarch64"]),
    "rows, packed": Column(
        replace(PRESETS["pynq"], name="", softmax=4, norm=8, ports=2, weight_bits=4), TARGETS["aarch64"]
    ),
    "cpu": Column(None, AVX2),
    "cpu with dot products": Column(None, AVX512),
}
CASES = [(name, column) for name in MODELS for column in COLUMNS]


def stub(loops: Function) -> CompiledKernel:
    """Return the kernel of `loops` without machine code if it is for one of the columns' processors."""
    if target() in {column.processor for column in COLUMNS.values()}:
        signature = (tuple((t.dtype, t.shape) for t in tensors) for tensors in (loops.inputs, loops.outputs))
        return CompiledKernel(loops.name, *signature, 0, b"", "", loops.in_place, loops=str(loops))
    return compile_function(loops)  # this kernel computes constants during compilation


@contextmanager
def without_machine_code() -> Iterator[None]:
    """Let kernels end as loop nests: code generation by LLVM would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_function", stub)
        yield


def compiled(name: str, column: str) -> Program:
    """Return the Program of a model for a column."""
    cfg, processor = COLUMNS[column]
    with without_machine_code():
        return celosia.compile(
            MODELS[name](), cfg or "tiny", accelerator=cfg is not None, target=processor, check=False,
            rounding="correct" if name in CORRECT else "onnxruntime",
        )  # fmt: skip


def digest(values: Iterable[object]) -> str:
    """Return the first 16 digits of the SHA-256 of texts and arrays."""
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            sha.update(f"{value.dtype.str} {value.shape} ".encode() + value.tobytes())
        else:
            sha.update(f"{value}\n".encode())
    return sha.hexdigest()[:16]


def launches(program: Program) -> Iterator[object]:
    """Return the digest of instruction words and of the host's copies around each launch."""
    for step in program.steps:
        if isinstance(step, LaunchStep):
            start = step.address - program.image_address
            yield step.address, step.count
            yield program.image[start : start + step.count * instruction_bytes(program.config)]
            yield np.asarray(step.layer_of)
            yield from map(astuple, (*step.pack, *step.unpack))
            for layer in step.layers:
                yield layer.name, layer.op, layer.nodes, layer.macs, layer.bytes_loaded, layer.bytes_stored
    yield program.dram_size
    for row in program.placements:
        yield row["name"], row["op"], row["place"]


def constants(program: Program) -> Iterator[object]:
    """Return the digest of the accelerator's weights, parameters and tables, and of the CPU's constants by name."""
    first = next((step.address for step in program.steps if isinstance(step, LaunchStep)), program.dram_size)
    yield program.image[: first - program.image_address]
    for name in sorted(program.constants):
        yield name
        yield program.constants[name]


def loops(program: Program) -> Iterator[object]:
    """Return the digest of the CPU's steps in their order, with the loop nest of each kernel."""
    for step in program.steps:
        if not isinstance(step, LaunchStep):
            yield type(step).__name__, [node.op for node in step.nodes], step.inputs, step.outputs
            if isinstance(step, CpuStep) and step.kernel is not None:
                kernel = program.kernels[step.kernel]
                yield kernel.loops, kernel.in_place


def hashes(program: Program) -> str:
    """Return the digests of PARTS."""
    return " ".join(digest(part(program)) for part in (launches, constants, loops))


def golden() -> dict[str, str]:
    """Return the digests in golden.json, by model and column."""
    digests: dict[str, str] = json.loads(PATH.read_text(encoding="utf-8"))
    return digests


def key(name: str, column: str) -> str:
    """Return the name of a line of golden.json."""
    return f"{name}: {column}"


ROWS = {name for name in MODELS if any(word in name for word in ("attention", "norm", "softmax"))}
"""Models with something for the Config that computes rows."""
TURNS = ("tiny", "rows, packed", "cpu"), ("pynq", "rectangular", "cpu with dot products")
KEPT = [
    (name, column)
    for number, name in enumerate(MODELS)
    for column in COLUMNS
    if column in TURNS[number % 2] or (column == "rows, packed" and name in ROWS)
]
"""Cases: each model with every other column, by turns."""


@pytest.mark.parametrize(("name", "column"), some(CASES, KEPT))
def test_golden(name: str, column: str) -> None:
    moved = _moved(golden()[key(name, column)].split(), compiled(name, column))
    assert not moved, f"{key(name, column)}: other {' and '.join(moved)} than in {PATH.name}"


def test_the_file_has_a_line_for_each_case() -> None:
    assert list(golden()) == [key(*case) for case in CASES]


def test_a_planted_change_of_each_part_is_found() -> None:
    program = compiled("perceptron", "tiny")
    expected = hashes(program).split()
    (launch,) = program.launches
    for part, place in (("launches", launch.address - program.image_address), ("constants", 0)):
        image = program.image.copy()
        image[place] ^= 1
        assert _moved(expected, replace(program, image=image)) == [part]
    first, *others = program.kernels
    changed = replace(program, kernels=[replace(first, loops=first.loops + " "), *others])
    assert _moved(expected, changed) == ["loops"]


def _moved(wanted: list[str], program: Program) -> list[str]:
    """Return the names of the digests that differ from `wanted`."""
    return [part for part, a, b in zip(PARTS, wanted, hashes(program).split(), strict=True) if a != b]


def main() -> None:
    """Write golden.json anew."""
    lines = {key(*case): hashes(compiled(*case)) for case in CASES}
    PATH.write_text(json.dumps(lines, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
