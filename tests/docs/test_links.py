"""Links on pages work, and files that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("models/*.md")]
LINK = re.compile(r"\]\((?P<path>[^)#:\s]*)(?:#(?P<anchor>[\w-]+))?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
FILE = re.compile(r"`(?P<path>(?:benchmarks|bitstreams|compiler|docs|driver|hw|models|sim|tests)/[\w/.-]*)`")


def dead(page: Path, text: str) -> list[str]:
    """Return the links and file names in `text`, at the place of `page`, whose target does not exist."""
    dead_links = []
    for link in LINK.finditer(CODE.sub("", text)):
        target = (page.parent / link["path"]) if link["path"] else page
        anchor = link["anchor"]
        if not target.exists() or (anchor and not _has(target.read_text(encoding="utf-8"), anchor)):
            dead_links.append(link[0][1:])
    named = {file["path"] for file in FILE.finditer(text) if not re.search("[A-Z]{3}", file["path"])}  # test_UNIT.py
    return dead_links + sorted(path for path in named if not (ROOT / path).exists())


def _has(text: str, anchor: str) -> bool:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return f'id="{anchor}"' in text or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_of_a_page(page: Path) -> None:
    assert not dead(page, page.read_text(encoding="utf-8"))


def test_what_is_dead_is_found() -> None:
    page = ROOT / "README.md"
    assert not dead(
        page, "[a](docs/isa.md) [b](docs/figures.md#resnet18-cycles) [c](https://x.y/z) `hw/spec/isa.py` [d](#try-it)"
    )
    for text in ("[a](docs/no.md)", "[a](docs/figures.md#no)", "`docs/no/`", "`hw/no.py`", "[d](#no)"):
        assert len(dead(page, text)) == 1
