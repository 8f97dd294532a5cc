"""The docstring of each folder's `__init__.py` is a map: it describes each file and subfolder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOPS = ("hw", "sim", "compiler", "driver", "bitstreams")
MAPS = sorted(path for top in TOPS for path in (ROOT / top).rglob("__init__.py"))


def unmapped(folder: Path, text: str) -> Iterator[str]:
    """Yield the files of Python and the subfolders of `folder` that its map `text` does not name."""
    for path in sorted(folder.iterdir()):
        name = path.stem if path.suffix == ".py" else f"{path.name}/" if (path / "__init__.py").exists() else ""
        if name and not name.startswith("__") and not re.search(rf"\b{re.escape(name)}(?!\w)", text):
            yield name


@pytest.mark.parametrize("path", MAPS, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_each_file_is_in_the_map_of_its_folder(path: Path) -> None:
    assert not [*unmapped(path.parent, ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")]


def test_a_file_that_is_missing_in_a_map_is_found(tmp_path: Path) -> None:
    (tmp_path / "lower.py").touch()
    assert [*unmapped(tmp_path, "lower   which layers there are")] == []
    assert [*unmapped(tmp_path, "lowering   which layers there are")] == ["lower"]
