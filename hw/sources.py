"""What the hardware is made of, as a number: the same in a bitstream and in the driver that is to use it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # novm: boards may have an older Python, and do not check types

NO_HARDWARE = ("config_doc.py", "fpga.py", "isa_doc.py", "manifest.py", "sources.py")
"""Files that the Verilog does not depend on."""
KEPT = "sources.txt"
"""Holds the digest where the sources are not, as on a board."""


def _files(folder: Traversable, within: str = "") -> Iterator[tuple[str, bytes]]:
    """Names and contents of the hardware's sources, those of folders as well."""
    for path in folder.iterdir():
        if path.name.endswith(".py") and path.name not in NO_HARDWARE:
            yield within + path.name, path.read_bytes()
        elif path.is_dir():
            yield from _files(path, f"{within}{path.name}/")


@cache
def sources_digest() -> str:
    """32 hexadecimal digits that differ where a file of the hardware does."""
    folder = resources.files("celosia.hw")
    if (folder / KEPT).is_file():
        return (folder / KEPT).read_text(encoding="ascii")
    files = dict(_files(folder))
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"\n{name}\n".encode() + data)
    return digest.hexdigest()[:32]


def sources_identity() -> int:
    """The first 32 bits of the digest, held in register `sources`."""
    return int(sources_digest()[:8], 16)
