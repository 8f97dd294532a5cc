"""Pack the runner: the part of Celosia that a board needs, as one zip that its Python executes."""

from __future__ import annotations

import ast
import hashlib
import io
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from celosia.hw.sources import DIGEST_FILE, sources_digest

PACKAGE = Path(__file__).parents[2]
"""Folder of the package celosia."""
FOLDERS = ("compiler/program", "driver/board", "driver/remote", "driver/run", "hw", "sim")
"""Folders with modules for a board. `board_modules` leaves out those that need other packages, such as Amaranth."""
INSTALLED = {*sys.stdlib_module_names, "numpy"}
"""Packages that a board has."""
MAIN = """\
import sys
from celosia.driver.remote.bootstrap import HeartbeatOutput
out = HeartbeatOutput(sys.stdout.buffer)  # before numpy is loaded, which takes long on a board
from celosia.driver.remote.serve import main
main(out)
"""
"""The program `__main__.py` of the zip."""


@dataclass(frozen=True)
class File:
    """A file for the board: its name there, and its content."""

    name: str
    data: bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the file in a request to bootstrap.py."""
        return {"name": self.name, "size": len(self.data), "sha256": hashlib.sha256(self.data).hexdigest()}


@cache
def board_modules() -> dict[str, Path]:
    """Return the files of the modules for a board, by module name.

    These are the modules in FOLDERS that import only the standard library, numpy and each other.
    """
    paths = [path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    parents = ("__init__.py", "plain.py", "tools.py", "compiler/__init__.py", "driver/__init__.py")
    module_paths = {_archive_name(path): path for path in sorted([*(PACKAGE / name for name in parents), *paths])}
    needs = {
        name: [module if module in module_paths else module.rpartition(".")[0] for module in _imported_names(path)]
        for name, path in module_paths.items()
    }
    before: dict[str, Path] = {}
    while len(before) != len(module_paths):  # a module that is left out takes those that import it along
        before, module_paths = module_paths, {
            name: path for name, path in module_paths.items()
            if all(module in module_paths or module.partition(".")[0] in INSTALLED for module in needs[name])
        }  # fmt: skip
    return module_paths


def _archive_name(path: Path) -> str:
    """Return the name of the module in the file `path`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("celosia", *parts[: -1 if parts[-1] == "__init__" else None]))


def _imported_names(path: Path) -> Iterator[str]:
    """Yield the names that the module in `path` imports at its top level, each as MODULE.NAME."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            yield from (f"{alias.name}." for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def pack_runner() -> File:
    """Return the runner: a zip of all `board_modules`, named by a digest of its contents."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), MAIN)
        archive.writestr(zipfile.ZipInfo(f"celosia/hw/{DIGEST_FILE}"), sources_digest())
        for path in board_modules().values():
            entry = zipfile.ZipInfo(f"celosia/{path.relative_to(PACKAGE).as_posix()}")  # dated 1980: equal every time
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    data = buffer.getvalue()
    return File(f"runner-{hashlib.sha256(data).hexdigest()[:12]}.pyz", data)
