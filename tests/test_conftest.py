"""Test the rule that CI skips nothing, with planted skips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
def test_tool(): pytest.skip("no tool")
def test_package(): pytest.importorskip("nosuchpackage")
def test_optional(): pytest.skip("needs 'iverilog'")
def test_instructions(): pytest.skip("this processor has no avx512vnni")
@pytest.mark.xfail
def test_expected(): assert False
def test_passes(): pass
"""


@pytest.mark.parametrize(("ci", "summary"), [("true", "2 failed, 1 passed, 2 skipped, 1 xfailed"), ("", "4 skipped")])
def test_a_skip_fails_in_ci(tmp_path: Path, ci: str, summary: str) -> None:
    (tmp_path / "test_planted.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]
    process = subprocess.run(
        command, env=os.environ | {"CI": ci}, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert summary in process.stdout, process.stdout


def test_seconds_are_summed_by_folder(tmp_path: Path) -> None:
    for name in ("one/test_a.py", "one/two/test_b.py", "one/two/three/test_c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import time\ndef test_it(): time.sleep(0.1)\n")
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), "--durations", "1"]
    process = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False, cwd=tmp_path)
    lines = process.stdout[process.stdout.index("seconds by folder") :].splitlines()[1:]
    assert [line.split() for line in lines[:2]] == [["0.2", "one/two"], ["0.1", "one"]], process.stdout


def test_a_module_that_is_skipped_fails_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text("import pytest\npytest.importorskip('nosuchpackage')\n")
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"CI": "true"}, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode != 0 and "nothing is skipped in CI" in done.stdout, done.stdout
