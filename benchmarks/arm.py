"""Estimate the cycles of a kernel on an ARM processor: qemu counts how often each block of its machine code runs, and
llvm-mca says how many cycles the processor's pipelines need for one. Caches and branches are not in it.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.workloads import Missing
from celosia.compiler.program import CpuStep, Program
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import TARGETS
from celosia.driver.export import emulate
from celosia.driver.export.targets import find_export_target

Array = NDArray[Any]
PROCESSORS = {"armv7": "Cortex-A9", "aarch64": "Cortex-A53"}
"""By what kernels are compiled for (target.py)."""
TOOLS = ("llvm-mca", "llvm-mc")
CALLER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
void KERNEL(void **, int64_t, int64_t);
static uint32_t number(FILE *f) { uint32_t n; if (fread(&n, 4, 1, f) != 1) exit(3); return n; }
int main(int argc, char **argv) {
    FILE *in = fopen("given", "rb"), *out = fopen("made", "wb");
    uint32_t count = number(in), sizes[32];
    void *p[32] = {0};
    for (uint32_t i = 0; i < count; i++) {
        sizes[i] = number(in);
        p[i] = aligned_alloc(64, (sizes[i] / 64 + 1) * 64);
        if (sizes[i] && fread(p[i], sizes[i], 1, in) != 1) return 3;
    }
    if (argc > 1 && argv[1][0] == 'r') KERNEL(p, 0, 1);
    for (uint32_t i = 0; i < count; i++) fwrite(p[i], 1, sizes[i], out);
    return fclose(out);
}
"""
ITERATIONS = 50
"""Of a block, which llvm-mca simulates."""
SMALL = 1e-4
"""Blocks with a smaller share of the instructions take a cycle for each."""
INSTRUCTION = re.compile(r"^0x(\w+):\s+([0-9a-f]{8})\s")

SEVERAL = re.compile(r"^\t(v?)(ldm|stm|push|pop)(?:i[ab]|d[ab])?\t(?:(\w+)!?, )?\{(.*)\}$", re.MULTILINE)


@dataclass(frozen=True)
class Estimate:
    """instructions: that the kernel runs. cycles: what llvm-mca makes of them. outputs: of the kernel, as a check."""

    instructions: int
    cycles: float
    outputs: list[Array]


def missing(target: str) -> str | None:
    """Say what estimates for `target`, one of PROCESSORS, lack here; None for nothing."""
    lack = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lack:
        return f"could not find {lack[0]}, which knows processors' pipelines; Debian, Ubuntu: apt-get install llvm"
    return emulate.missing_tools(find_export_target(f"{target}-linux"))


def estimate(target: str, kernel: CompiledKernel, inputs: Sequence[Array]) -> Estimate:
    """Estimate one call of `kernel`, compiled for `target`, on one thread. Missing where a tool is."""
    if lack := missing(target):
        raise Missing(lack)
    machine = find_export_target(f"{target}-linux")
    with tempfile.TemporaryDirectory(prefix="celosia") as temporary:
        folder = Path(temporary)
        (folder / "call.c").write_text(CALLER, encoding="utf-8")
        (folder / "kernel.o").write_bytes(kernel.code)
        emulate.compile_c(machine, [f"-DKERNEL={kernel.name}", "call.c", "kernel.o", "-lm", "-o", "call"], folder)
        made = [np.zeros(shape, numpy_dtype(dtype)) for dtype, shape in kernel.outputs]
        arrays = [*inputs, *made, np.zeros(kernel.workspace_bytes, np.uint8)]
        with (folder / "given").open("wb") as file:
            file.write(struct.pack("<I", len(arrays)))
            for array in arrays:
                file.write(struct.pack("<I", array.nbytes) + array.tobytes())
        before, _ = _profile(machine.name, folder, "load")
        after, code = _profile(machine.name, folder, "run")
        at, data = sum(array.nbytes for array in inputs), (folder / "made").read_bytes()
    for number, array in enumerate(made):
        made[number] = np.frombuffer(data, array.dtype, array.size, at).reshape(array.shape)
        at += array.nbytes
    return made_of(target, code.times(after - before), made)


def step_seconds(target: str, program: Program, mhz: float, say: Callable[[str], None]) -> list[float]:
    """Seconds of each step of `program`, compiled for `target`, on one core of so many MHz; 0 for launches, and for
    what is no kernel. Missing where a tool is."""
    known: dict[str, float] = {}
    found = []
    for number, step in enumerate(program.steps):
        kernel = None if not isinstance(step, CpuStep) or step.kernel is None else program.kernels[step.kernel]
        if kernel is not None and kernel.loops not in known:
            say(f"step {number + 1} of {len(program.steps)} on a {PROCESSORS[target]}, emulated")
            names = [name for name in step.inputs if name]  # type: ignore[union-attr]
            given = [np.zeros(shape, numpy_dtype(dtype)) for dtype, shape in kernel.inputs]
            inputs = [program.constants.get(name, array) for name, array in zip(names, given, strict=True)]
            known[kernel.loops] = estimate(target, kernel, inputs).cycles / (mhz * 1e6)
        found.append(0.0 if kernel is None else known[kernel.loops])
    return found


Code = tuple[str, ...]
"""Instructions of a block, as hexadecimal words."""


def made_of(target: str, times: Mapping[Code, int], outputs: list[Array]) -> Estimate:
    """The estimate for `target` of blocks that ran so many times."""
    return Estimate(sum(len(block) * n for block, n in times.items()), _cycles(target, times), outputs)


class LoggedBlocks:
    """Blocks of instructions that the emulator has logged."""

    def __init__(self) -> None:
        self._words: dict[int, list[str]] = {}
        self._first: int | None = None

    def take(self, line: str) -> int | None:
        """The address of the block that runs, if the line says so."""
        if line.startswith("Trace"):  # Trace 0: 0x7f7e1a7be240 [0000000000001001/0000005508adda64/00000001/00080200]
            return int(line.split("/", 2)[1], 16)
        if line.startswith("IN:"):
            self._first = None
        elif found := INSTRUCTION.match(line):
            self._first = address = int(found[1], 16) if self._first is None else self._first
            if address == int(found[1], 16):
                self._words[address] = []
            self._words[address].append(found[2])
        return None

    def times(self, ran: Mapping[int, int]) -> dict[Code, int]:
        """How often each ran, of addresses; those of ARM's C library are in Thumb, and left out."""
        found: Counter[Code] = Counter()
        for address, words in self._words.items():
            if count := ran.get(address, 0):
                found[tuple(words)] += count
        return dict(found)


def _profile(machine: str, folder: Path, what: str) -> tuple[Counter[int], LoggedBlocks]:
    """(how often each block ran, by address; the blocks)."""
    command = emulate.EMULATORS[machine].command
    log = ("-d", "in_asm,exec,nochain", "-D", "log")
    subprocess.run([*command, *log, "./call", what], cwd=folder, check=True, capture_output=True)
    counts: Counter[int] = Counter()
    blocks = LoggedBlocks()
    with (folder / "log").open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            if (address := blocks.take(line)) is not None:
                counts[address] += 1
    return counts, blocks


def _cycles(target: str, times: Mapping[Code, int]) -> float:
    total = sum(len(block) * n for block, n in times.items())
    large = [block for block, n in times.items() if len(block) * n >= SMALL * total]
    rest = total - sum(len(block) * times[block] for block in large)
    text = "\n".join(
        f"# LLVM-MCA-BEGIN {n}\n{_assembly(target, block)}\n# LLVM-MCA-END" for n, block in enumerate(large)
    )
    processor = TARGETS[target]
    options = [f"-mtriple={processor.triple}", f"-mcpu={processor.cpu}", f"-iterations={ITERATIONS}"]
    said = _said("llvm-mca", [*options, "-mattr=+neon", "-instruction-info=false", "-resource-pressure=false"], text)
    cycles = [int(found) / ITERATIONS for found in re.findall(r"Total Cycles:\s+(\d+)", said)]
    return rest + sum(times[block] * each for block, each in zip(large, cycles, strict=True))


def _assembly(target: str, block: Code) -> str:
    memory = [f"0x{word[k : k + 2]}" for word in block for k in (6, 4, 2, 0)]
    processor = TARGETS[target]
    options = ["--disassemble", f"-triple={processor.triple}", f"-mcpu={processor.cpu}", "-mattr=+neon"]
    return SEVERAL.sub(_one_by_one, _said("llvm-mc", options, " ".join(memory)))


def _one_by_one(found: re.Match[str]) -> str:
    """Loads and stores of several registers, whose times llvm-mca does not know for a Cortex-A9, as several of one
    register or, of vectors, of up to four."""
    loads, registers, base = found[2] in ("ldm", "pop"), found[4].split(", "), found[3] or "sp"
    if found[1]:
        parts = [registers[k : k + 4] for k in range(0, len(registers), 4)]
        return "\n".join(f"\tv{'ld' if loads else 'st'}1.64\t{{{', '.join(part)}}}, [{base}]" for part in parts)
    return "\n".join(f"\t{'ldr' if loads else 'str'}\t{register}, [{base}]" for register in registers)


def _said(tool: str, options: Sequence[str], text: str) -> str:
    done = subprocess.run([tool, *options], input=text, capture_output=True, text=True, check=False)
    if done.returncode or "warning: invalid instruction" in done.stderr:
        raise RuntimeError(f"{tool}: {done.stderr.strip()[:300]}")
    return done.stdout
