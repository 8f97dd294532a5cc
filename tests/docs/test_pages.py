"""The Python blocks of a page run, in order; what they print is the text block after them.

CELOSIA_UPDATE_DOCS=1 writes what they print into the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<text>.*?)```\n)?", re.DOTALL)


@pytest.mark.parametrize("page", ["expressions.md", "quantize.md", "shapes.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    path = DOCS / page
    source = path.read_text(encoding="utf-8")
    names: dict[str, Any] = {}

    def run(m: re.Match[str]) -> str:
        line = source[: m.start()].count("\n") + 2
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + m["code"], str(path), "exec"), names)
        said = "".join(f"{text.rstrip()}\n" for text in printed.getvalue().splitlines())
        return f"```python\n{m['code']}```\n" + (f"\n```text\n{said}```\n" if said or m["text"] is not None else "")

    done = BLOCK.sub(run, source)
    if os.environ.get("CELOSIA_UPDATE_DOCS"):
        path.write_text(done, encoding="utf-8")
    assert done == path.read_text(encoding="utf-8")
