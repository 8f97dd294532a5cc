"""The notebook of docs/ runs in a kernel, and its results are short HTML."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("onnxruntime")

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
LONGEST = 20_000
"""Maximum number of characters of HTML or text that a cell shows."""


SMALLER = f"""
import sys
from pathlib import Path

sys.path.append({str(Path(__file__).parents[1])!r})
from demo_block import save_demo_block

model = save_demo_block(Path())
"""
"""A cell that lets the cells below it search with the first block of the demo model."""


class _Balanced(HTMLParser):
    """Fail if a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("br", "img", "meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the code cells of the notebook after they ran."""
    notebook = nbformat.read(NOTEBOOK, 4)
    (searching,) = [n for n, cell in enumerate(notebook.cells) if "celosia.tune(" in cell.source]
    notebook.cells.insert(searching, nbformat.v4.new_code_cell(SMALLER))  # searches take long
    folder = tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[Any], text: str) -> tuple[str, str]:
    """Return HTML and plain text of the result of the cell that contains `text`."""
    (cell,) = [cell for cell in cells if text in cell.source]
    (result,) = [output for output in cell.outputs if output.output_type == "execute_result"]
    return result.data.get("text/html", ""), result.data["text/plain"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("celosia.compile(", ["conv 3x3"]), ("celosia.Runtime(", ["layers", "cycles"]),
        ("celosia.evaluate(", ["top-1", "Samples whose output differs", ": 0 of 20"]),
        ("celosia.compare(", ["tensors compared", "0 differ"]), ("celosia.tune(", ["regret", "cycles"]),
        ("celosia.explore(", ["Config", "LUT"]), ("@cl.jit(", ["parameter", "BLOCK"]),
    ],
)  # fmt: skip
def test_a_result_shows_short_html(cells: list[Any], call: str, words: list[str]) -> None:
    html, plain = shown(cells, call)
    assert 0 < len(html) <= LONGEST and len(plain) <= 1000
    if "<iframe" not in html:
        parser = _Balanced()
        parser.feed(html)
        assert parser.open == []
    assert all(word in html for word in words if "<iframe" not in html), html


def test_progress_goes_when_a_cell_ends(cells: list[Any]) -> None:
    """A long cell shows its progress in one output, which is empty in the end."""
    (cell,) = [cell for cell in cells if "celosia.tune(" in cell.source]
    displays = [output for output in cell.outputs if output.output_type == "display_data"]
    assert [output.data.get("text/html", "") for output in displays] == [""]


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in nbformat.read(NOTEBOOK, 4).cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)
