"""The Python blocks of a page run in order, and print the text block behind them.

CELOSIA_UPDATE_DOCS=1 writes the output into the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NEEDS = {"pytorch.md": ("torch", "torchao"), "superoptimiser.md": ("z3",)}
DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<text>.*?)```\n)?", re.DOTALL)


@pytest.mark.parametrize(
    "page",
    ["expressions.md", "language.md", "quantize.md", "shapes.md", "pytorch.md", "explore.md", "superoptimiser.md"],
)
def test_the_code_of_a_page_runs(page: str) -> None:
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package, reason=f"{package} is not installed: `make torch` or the extra superoptimise")
    path = DOCS / page
    source = path.read_text(encoding="utf-8")
    names: dict[str, Any] = {}

    def run(m: re.Match[str]) -> str:
        line = source[: m.start()].count("\n") + 2
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + m["code"], str(path), "exec"), names)
        output = "".join(f"{text.rstrip()}\n" for text in printed.getvalue().splitlines())
        return f"```python\n{m['code']}```\n" + (f"\n```text\n{output}```\n" if output or m["text"] is not None else "")

    updated = BLOCK.sub(run, source)
    if os.environ.get("CELOSIA_UPDATE_DOCS"):
        path.write_text(updated, encoding="utf-8")
    assert updated == path.read_text(encoding="utf-8")


# A page of commands -----------------------------------------------------------------------------------------------

STEP = re.compile(
    r"```python\n# (?P<file>\S+\.py)\n(?P<script>.*?)```"
    r"|```sh\n(?P<command>.*?)```\n(?:\n```text\n(?P<text>.*?)```\n)?",
    re.DOTALL,
)


def like(text: str, printed: str) -> bool:
    """Return True if `printed` is `text`, where `...` matches anything and several spaces count as one."""
    pattern = ".*?".join(re.escape(part) for part in _single_spaced(text).split("..."))
    return re.fullmatch(pattern, _single_spaced(printed), re.DOTALL) is not None


def _single_spaced(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


@pytest.mark.rtl
def test_the_tutorial_runs(tmp_path: Path) -> None:
    """Each command of the tutorial runs in the reader's folder, in order, and prints the text behind it."""
    pytest.importorskip("onnxruntime")
    tools, folder = tmp_path / "bin", tmp_path / "stripes"
    tools.mkdir()
    folder.mkdir()
    for name, call in (("celosia", "-m celosia.driver.cli "), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {call}"$@"\n')
        (tools / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "COLUMNS": "160"}
    source = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    steps = list(STEP.finditer(source))
    assert len(steps) == 11
    for step in steps:
        if step["file"]:
            (folder / step["file"]).write_text(step["script"], encoding="utf-8")
            continue
        process = subprocess.run(
            step["command"], shell=True, cwd=folder, env=environment, capture_output=True, text=True
        )
        assert process.returncode == 0, f"{step['command']}{process.stderr}"
        assert len(step["command"].splitlines()) == 1
        if step["text"] is not None:
            assert like(step["text"], process.stdout), (
                f"{step['command']} prints\n{process.stdout}\nand not\n{step['text']}"
            )
    with np.load(folder / "tensors.npz") as tensors:
        assert len(tensors.files) == 7


def test_what_is_printed_must_be_the_text() -> None:
    assert like("a ... c\n...", "a b  \nd c\nmore\n") and like("x", "x  \n")
    assert not like("a ... c", "a b") and not like("a", "ab") and not like("a.c ...", "abc d")
