"""Simulators that are compiled twice: the training run is legal, and a compiler without profiles does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.configs import CONFIGS, VARIED
from thorough import some

from celosia.hw.spec.config import Config
from celosia.hw.verilog import TOP, verilog
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl import build
from celosia.sim.rtl.pgo_training import train
from celosia.sim.rtl.rtlsim import RtlDevice

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "$0" && exit
echo "$*" >> "$0.log"
"""
GXX = 'exec g++ "$@"\n'
COPIER = """while [ "$1" != -o ]; do shift; done
cp PLAIN "$2"
echo > "${2%.*}.gcda"
"""
"""Script of a compiler that copies simulator PLAIN, and leaves a profile."""
SHAM = """while [ "$1" != -o ]; do shift; done
echo > "$2"
"""


@pytest.mark.parametrize("name", some([*CONFIGS, "pynq"], [*VARIED, "pynq"]))
def test_the_training_run_is_legal(name: str) -> None:
    cfg = CONFIGS.get(name) or Config.load(name)
    train(FunctionalDevice(cfg), rounds=10)


def built(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, source: str) -> tuple[Path, list[str]]:
    """Build a trained simulator of `source` with a compiler that runs `script`.

    Return the simulator's path, and the command lines of the compiler.
    """
    compiler, log = folder / "compiler", folder / "compiler.log"
    compiler.write_text(COMPILER + script)
    compiler.chmod(0o755)
    runtime = build.build_runtime(build.find_compiler(), build.verilator_root())
    monkeypatch.setattr(build, "build_runtime", lambda *_: runtime)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CELOSIA_CACHE", str(folder / "cache"))
    monkeypatch.setattr(build, "_uses_training", lambda *_: True)
    path = build.build_library(CONFIGS["4x4"], quiet=True, source=source)
    return path, [line for line in log.read_text().splitlines() if "often.cpp" in line]


@pytest.mark.rtl
@pytest.mark.parametrize("script", some([GXX, COPIER], [COPIER]), ids=["g++", "copier"])
def test_a_trained_simulator_does_the_same(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_before = build.build_library(CONFIGS["4x4"], quiet=True)
    plain = RtlDevice(CONFIGS["4x4"], quiet=True)
    source = verilog(CONFIGS["4x4"], simulation=True)
    path, command_lines = built(tmp_path, monkeypatch, script.replace("PLAIN", str(built_before)), source)
    assert ["-fprofile-generate" in command_lines[0], "-fprofile-use" in command_lines[1], len(command_lines)] == [
        True,
        True,
        2,
    ]
    assert [entry.name for entry in path.parent.iterdir() if entry.is_dir()] == []
    trained = RtlDevice(CONFIGS["4x4"], simulator=path)
    assert train(trained) == train(plain)
    assert (trained.dram == plain.dram).all()


@pytest.mark.rtl
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(SHAM, id="no profile"),
        pytest.param('case "$*" in *-fprofile-generate*) exit 1;; esac\n' + SHAM, id="unknown flag"),
    ],
)
def test_a_compiler_that_keeps_no_profile(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, command_lines = built(
        tmp_path, monkeypatch, script, f"module {TOP}(input clk); endmodule\n"
    )  # this module never runs
    assert path.exists() and ["-fprofile" in line for line in command_lines] == [True, False]
