"""A file is one idea: long ones say in their first line why all of it is in one file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "bitstreams", "compiler", "driver", "hw", "sim")
LONGEST = 450
"""Lines of a file that needs no reason."""


def too_long(root: Path) -> Iterator[str]:
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
        if len(rest) >= LONGEST and "in one file" not in first:
            yield f"{path.relative_to(root)}: {len(rest) + 1} lines"


def test_long_files_have_a_reason() -> None:
    assert not list(too_long(ROOT))


def test_a_planted_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    for name, first in (
        ("a", "Cycles."),
        ("b", "Cycles, in one file as all share queues."),
        ("c", "Short."),
    ):
        lines = ['"""' + first + '"""', *["x = 1"] * (1 if name == "c" else LONGEST)]
        (tmp_path / "sim" / f"{name}.py").write_text("\n".join(lines))
    assert list(too_long(tmp_path)) == ["sim/a.py: 451 lines"]
