"""The Python blocks of a page run in order, and print the text block behind them.

CELOSIA_UPDATE_DOCS=1 writes the output into the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_block import save_demo_block
from thorough import some
from torch_registry import one_registry
from typer.testing import CliRunner

import celosia
from celosia.driver.cli import app
from celosia.hw.spec.config import PRESETS

PAGES = ("expressions.md", "language.md", "quantize.md", "shapes.md", "pytorch.md", "explore.md", "superoptimiser.md")
NEEDS = {"pytorch.md": ("torch", "torchao"), "superoptimiser.md": ("z3",)}
DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<text>.*?)```\n)?", re.DOTALL)


def explore_a_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the page explore the first block of the demo model."""
    monkeypatch.setattr(celosia.models, "demo_model_path", partial(save_demo_block, folder))


def compile_without_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without blocks, whose search takes the compiler longer than all else."""
    for name in ("tiny", "pynq"):
        monkeypatch.setitem(PRESETS, name, replace(PRESETS[name], forward=False))


REDUCED = {"explore.md": explore_a_block, "pytorch.md": compile_without_blocks}
"""Functions that let a page compute less, and print the same."""


@pytest.mark.parametrize(
    ("page", "reduced"),
    some(
        [*((page, True) for page in PAGES), *((page, False) for page in REDUCED)],
        [(page, True) for page in PAGES],
    ),
)
def test_the_code_of_a_page_runs(page: str, reduced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's code prints what the page says. reduced: on less, where that is the same (REDUCED)."""
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package, reason=f"{package} is not installed: `make torch` or the extra superoptimise")
    if reduced and page in REDUCED:
        REDUCED[page](tmp_path, monkeypatch)
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

    with one_registry() if "torch" in NEEDS.get(page, ()) else contextlib.nullcontext():
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


def printed(command: str) -> str:
    """Run a command of the tutorial in this process if it is Python or Celosia, else in a shell; return its output."""
    words = shlex.split(command)
    if words[0] == "celosia":
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, f"{command}{result.output}"
        return result.stdout
    if words[0] == "python":
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            runpy.run_path(words[1], run_name="__main__")
        return output.getvalue()
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


@pytest.mark.rtl
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of the tutorial runs in the reader's folder, in order, and prints the text behind it."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    source = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    steps = list(STEP.finditer(source))
    assert len(steps) == 11
    for step in steps:
        if step["file"]:
            Path(step["file"]).write_text(step["script"], encoding="utf-8")
            continue
        assert len(step["command"].splitlines()) == 1
        output = printed(step["command"])
        if step["text"] is not None:
            assert like(step["text"], output), f"{step['command']} prints\n{output}\nand not\n{step['text']}"
    with np.load("tensors.npz") as tensors:
        assert len(tensors.files) == 7


def test_what_is_printed_must_be_the_text() -> None:
    assert like("a ... c\n...", "a b  \nd c\nmore\n") and like("x", "x  \n")
    assert not like("a ... c", "a b") and not like("a", "ab") and not like("a.c ...", "abc d")
