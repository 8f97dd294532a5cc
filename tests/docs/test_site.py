"""The site of docs/: it builds without a warning, and has every page, command and public name."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import celosia
from celosia.driver.cli import cli_doc

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = ("language", "models", "te")


def public_names(module: str) -> list[str]:
    """Return the names of functions and classes that a module of celosia shows to users."""
    members = vars(importlib.import_module(f"celosia.{module}"))
    return [name for name in dir(getattr(celosia, module)) if name[0] != "_" and callable(members.get(name))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return folder


def test_each_page_is_in_the_navigation(site: Path) -> None:
    menu = (site / "index.html").read_text(encoding="utf-8")
    pages = [page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")]
    missing = [str(page) for page in pages if f'href="{page}"' not in menu]
    assert not missing, "add these pages to `nav` of mkdocs.yml"


def test_each_public_name_is_in_the_api_reference(site: Path) -> None:
    ids = set(re.findall(r'id="([\w.]+)"', (site / "api.html").read_text(encoding="utf-8")))
    names = {f"celosia.{name}" for name in celosia.__all__} - {f"celosia.{name}" for name in MODULES}
    names |= {f"celosia.{module}.{name}" for module in ("te",) for name in public_names(module)}
    assert not names - ids


def test_the_search_index_comes_with_the_site(site: Path) -> None:
    """Search reads a script, which a browser loads from a folder without a server, too."""
    assert "superoptimiser" in (site / "search" / "search_index.js").read_text(encoding="utf-8")


def test_the_page_of_commands_is_current() -> None:
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == cli_doc.page(), "python -m celosia.driver.cli.cli_doc"
