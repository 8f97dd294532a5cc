"""The accelerator of one Config as Verilog, cached on disk."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

import amaranth
import platformdirs
from amaranth.back import verilog as backend

from celosia.hw.config import Config

TOP = "celosia_top"
"""Name of the top module."""


class VerilogError(RuntimeError):
    """Yosys, which writes the Verilog, is missing or failed; the message is its own, and what to do."""


def cache_folder() -> Path:
    """Where generated files are kept; `CELOSIA_CACHE` names another place."""
    return Path(os.environ.get("CELOSIA_CACHE") or platformdirs.user_cache_dir("celosia"))


@cache
def hardware_digest(cfg: Config) -> str:
    """32 hexadecimal digits that differ where the Config, a file of the hardware or Amaranth's version does."""
    digest = hashlib.sha256(f"{cfg.digest} {amaranth.__version__}".encode())
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"\n{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that nobody ever sees a part of it. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def verilog(cfg: Config) -> str:
    """Verilog of the accelerator of `cfg`; the top module is `celosia_top`. Seconds the first time, then from disk."""
    path = cache_folder() / "verilog" / f"{hardware_digest(cfg)}.v"
    if path.exists():
        return path.read_text(encoding="utf-8")
    from celosia.hw.top import Accelerator

    text = backend.convert(Accelerator(cfg), name=TOP, emit_src=False, strip_internal_attrs=True)
    write_atomically(path, text)
    return text
