"""Run kernels for other processors under qemu: a C program loads their shared object and calls them on input bytes."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import TARGETS

QEMU = {"armv7": "qemu-arm-static", "aarch64": "qemu-aarch64-static"}
LIBRARIES = {"armv7": "/usr/arm-linux-gnueabihf", "aarch64": "/usr/aarch64-linux-gnu"}
CALLER = r"""
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static uint32_t number(FILE *f) { uint32_t n; if (fread(&n, 4, 1, f) != 1) exit(3); return n; }
int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) { puts(dlerror()); return 1; }
    FILE *in = fopen(argv[2], "rb"), *out = fopen(argv[3], "wb");
    for (uint32_t calls = number(in); calls--;) {
        char name[64];
        if (fread(name, 64, 1, in) != 1) return 3;
        uint32_t count = number(in), sizes[32];
        void *p[32] = {0};
        for (uint32_t i = 0; i < count; i++) {
            sizes[i] = number(in);
            p[i] = aligned_alloc(64, (sizes[i] / 64 + 1) * 64);
            if (sizes[i] && fread(p[i], sizes[i], 1, in) != 1) return 3;
        }
        void (*run)(void **, int64_t, int64_t) = (void (*)(void **, int64_t, int64_t))dlsym(library, name);
        void *stamp = dlsym(library, "celosia_stamp");
        if (!run || !stamp) { puts(dlerror()); return 2; }
        struct { uint64_t count; void *records[4]; struct timespec now; } list = {2, {run, p, stamp, &list.now}, {0}};
        ((void (*)(void *, int64_t, int64_t))dlsym(library, "celosia_run"))(&list, 0, 1);
        if (list.now.tv_sec == 0) { puts("the clock was not read"); return 2; }
        for (uint32_t i = 0; i < count; i++) fwrite(p[i], 1, sizes[i], out);
    }
    return fclose(out);
}
"""


def require(target: str) -> None:
    """Skip the test if the cross linker, qemu, or the target's C library is missing."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("could not import 'ziglang', which links kernels for boards; pip install 'celosia[deploy]'")
    if shutil.which(QEMU[target]) is None or not Path(LIBRARIES[target]).exists():
        pytest.skip(
            f"could not find '{QEMU[target]}' and the C library in {LIBRARIES[target]}, which run kernels for boards; "
            "Debian, Ubuntu: apt-get install qemu-user-static libc6-armhf-cross libc6-arm64-cross"
        )


@functools.cache
def caller(target: str) -> Path:
    """Compile the C program that calls kernels on `target`, and return its path."""
    folder = Path(tempfile.mkdtemp(prefix="celosia-emulated"))
    (folder / "call.c").write_text(CALLER)
    command = [sys.executable, "-m", "ziglang", "cc", *TARGETS[target].zig, "-O1", "call.c", "-o", "call", "-ldl"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "call"


def call(
    target: str,
    library: bytes,
    calls: Sequence[tuple[CompiledKernel, Sequence[NDArray[Any]]]],
    folder: Path,
    *flags: str,
) -> list[list[NDArray[Any]]]:
    """Call each (kernel, inputs) under qemu, and return the outputs of each call.

    library: the shared object with all kernels. flags: options of the emulator.
    """
    (folder / "kernels.so").write_bytes(library)
    with (folder / "calls").open("wb") as file:
        file.write(struct.pack("<I", len(calls)))
        for kernel, inputs in calls:
            outputs_before = [np.full(shape, 77, numpy_dtype(dtype)) for dtype, shape in kernel.outputs]
            workspace = np.zeros(kernel.workspace_bytes, np.uint8)
            file.write(kernel.name.encode().ljust(64, b"\0") + struct.pack("<I", len(inputs) + len(outputs_before) + 1))
            for array in (*inputs, *outputs_before, workspace):
                file.write(struct.pack("<I", array.nbytes) + array.tobytes())
    qemu = [QEMU[target], "-L", LIBRARIES[target], *flags, str(caller(target)), "./kernels.so", "calls", "results"]
    process = subprocess.run(qemu, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, f"{process.stdout}{process.stderr} ({process.returncode})"
    data, offset, results = (folder / "results").read_bytes(), 0, []
    for kernel, inputs in calls:
        offset += sum(array.nbytes for array in inputs)
        outputs = []
        for dtype, shape in kernel.outputs:
            element_type = numpy_dtype(dtype)
            count = int(np.prod(shape))
            outputs.append(np.frombuffer(data, element_type, count, offset).reshape(shape))
            offset += count * element_type.itemsize
        offset += kernel.workspace_bytes
        results.append(outputs)
    return results


def instructions(
    target: str, library: bytes, kernel: CompiledKernel, inputs: Sequence[NDArray[Any]], folder: Path
) -> int:
    """Return the number of instructions of a process that calls the kernel once."""
    log = folder / "instructions"
    call(target, library, [(kernel, inputs)], folder, "-singlestep", "-d", "exec,nochain", "-D", str(log))
    with log.open("rb") as lines:
        return sum(1 for _ in lines)
