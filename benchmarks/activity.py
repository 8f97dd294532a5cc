"""python -m benchmarks.activity [--wave FILE] [--write]

Counts how many bits of registers toggle in a cycle, for each part of the accelerator where its unit works and where it
does not, while the RTL simulator runs the demo's ResNet-8 on preset `tiny` (tests/hw/test_compiled.py, with a waveform:
minutes). `--write` keeps it in bitstreams/activity.json, by which the estimate of power goes. `--wave` reads a waveform
of another of those tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.figures import commit
from benchmarks.toggles import Toggles, toggles
from celosia.bitstreams import power
from celosia.compiler.program.safe_files import write_text
from celosia.hw.spec.config import PRESETS
from celosia.hw.verilog import TOP, verilog

ROOT = Path(__file__).parents[1]
CONFIG = "tiny"
TEST = "tests/hw/test_compiled.py::test_demo_model[tiny]"
WAVE = ROOT / "build" / "hw" / "runs" / "hw-test_compiled.py-test_demo_model-tiny" / "dump.vcd"
COMMAND = "python -m benchmarks.activity --write"
CLOCK = ("$rootio", "clk")
BUSY = 1
"""Of hw/top.py, State: a unit works."""
OWN = re.compile(r"(?:issue_)?(load|gemm|vector|store)")
PARTS = {
    "fetch": "fetch", "tokens": "fetch", "readmux": "load", "readmux1": "load", "control": "control", "acc": "gemm",
    "inp": "gemm", "wgt": "gemm", "vin": "vector", "par": "vector", "tap": "vector", "out": "store",
}  # fmt: skip
"""Parts of hw/top.py that are no unit, each with the one with which it is counted; scratchpads with who reads them."""

GROWS = {"array": "macs_per_cycle", "vector": "lanes"}
"""What the registers of parts grow with; those of others hardly do."""
Name = tuple[str, ...]


def registers(text: str, top: str) -> dict[Name, int]:
    """Bits of the registers in Verilog of hw/verilog.py by scopes and name, memories left out; the outermost scope is
    `top`.

    >>> registers("module \\\\t.a (x);\\n  reg [3:0] b;\\n  reg \\\\c$1 ;\\n  reg [7:0] memory [3:0];\\nendmodule", "t")
    {('top', 'a', 'b'): 4, ('top', 'a', 'c$1'): 1}
    """
    found = {}
    module: Name = ()
    for line in text.splitlines():
        if named := re.match(r"module \\?(\S+?) ?\(", line):
            module = ("top", *named[1].removeprefix(top).split(".")[1:])
        elif register := re.match(r"  reg (?:\[(\d+):0\] )?\\?([^\s;]+) ?(?: = .*)?;", line):
            found[(*module, register[2])] = int(register[1] or 0) + 1
    return found


def part_of(name: Name) -> str:
    """Name the part of the accelerator with which a register is counted."""
    if len(name) == 2:
        return "control"
    if name[1:3] == ("gemm", "array"):
        return "array"
    own = OWN.match(name[1])
    return own[1] if own else PARTS.get(name[1], "control")


def counted(wave: Path, text: str) -> dict[str, Toggles]:
    """Toggles of each part in the cycles of runs; one without a unit works in all of them. WaveError."""
    states = {unit: ("$rootio", f"trace__{unit}__state") for unit in power.UNITS}
    busy, known = ("$rootio", "busy"), registers(text, TOP)

    def works(unit: str) -> Callable[[Mapping[Name, int]], bool]:
        return lambda values: values[states[unit]] == BUSY

    with wave.open(encoding="ascii") as lines:
        return toggles(
            lines, lambda name: part_of(name) if name in known else None, CLOCK,
            {part: works(unit) for part, unit in power.UNIT_OF.items()}, (*states.values(), busy),
            lambda values: values[busy] == 1,
        )  # fmt: skip


def grown(part: str, measured: str) -> dict[str, float]:
    """Bits of a part's registers, and how many more for one more of what they grow with: by two presets' Verilog."""
    small, large = (
        sum(bits for name, bits in registers(_verilog(preset), TOP).items() if part_of(name) == part)
        for preset in (measured, "pynq")
    )
    per = GROWS.get(part)
    if per is None:
        return {"bits": small}
    one, other = (getattr(PRESETS[preset], per) for preset in (measured, "pynq"))
    each = round((large - small) / (other - one), 1)
    return {"bits": round(small - each * one), "each": each}


@cache
def _verilog(preset: str) -> str:
    return verilog(PRESETS[preset], simulation=True)


def measured() -> Path:
    """The waveform of TEST, made now."""
    environment = os.environ | {"CELOSIA_TEST_SECONDS": "3600"}
    command = [sys.executable, "-m", "pytest", TEST, "--waves", "-q"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return WAVE


def row(part: str, found: Toggles) -> dict[str, Any]:
    """Make the entry of a part in activity.json."""
    working = round(found.rate(True), 4)
    waiting = round(found.rate(False), 4) if part in power.UNIT_OF else working
    cycles = {"working": found.working_cycles, "waiting": found.waiting_cycles}
    per = {"per": GROWS[part]} if part in GROWS else {}
    return {**grown(part, CONFIG), **per, "working": working, "waiting": waiting, "cycles": cycles}


def main(arguments: Sequence[str]) -> None:
    """Prints what is counted, and keeps it where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activity", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--wave", type=Path, help="read this waveform of `tiny`")
    parser.add_argument("--write", action="store_true", help="keep it in bitstreams/activity.json")
    options = parser.parse_args(arguments)
    found = counted(options.wave or measured(), _verilog(CONFIG))
    rows = {part: row(part, each) for part, each in sorted(found.items())}
    for part, each in rows.items():
        print(f"{part:8} {found[part].bits:6,} bits: {each['working']:.4f} working, {each['waiting']:.4f} waiting")
    if options.write:
        about = {"config": CONFIG, "model": "the demo's ResNet-8, images of 8 x 8 at random", "command": COMMAND}
        about |= {"commit": commit(("hw",), ROOT)}
        write_text(power.ACTIVITY_FILE, json.dumps(about | {"parts": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
