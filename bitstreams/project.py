"""Write a Vivado project for a board and a Config, and run Vivado on it to make a bitstream."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from celosia.hw.boards.board import NUMBER_LIMITS, Board
from celosia.hw.manifest import Manifest, ManifestError
from celosia.hw.spec.config import Config
from celosia.plain import Sentence, Sentences

if TYPE_CHECKING:
    from amaranth.lib.wiring import Member

COMMAND = ("vivado", "-mode", "batch", "-nojournal", "-notrace", "-source", "build.tcl")
"""Command that runs Vivado in the folder of a project."""
FILES = ("build.tcl", "settings.tcl", "celosia.v", "celosia_top.v", "celosia.xdc", "manifest.in.json")
"""Files of a project."""


OSCILLATOR_MHZ = {"zynq": (600, 1200), "zynqmp": (800, 1600)}
"""Range in MHz of the oscillator of an MMCM in the slowest speed grade, by processor (AMD DS187, DS925)."""
MAX_MULTIPLE = 64
"""Largest factor of an MMCM."""
PUMPED_MHZ = {"zynq": (10, 230), "zynqmp": (13, 320)}
"""Range in MHz of the accelerator's clock with pump = 2, by processor (AMD DS187, DS925). The oscillator of the MMCM
bounds it below; clock nets and DSP blocks at twice the clock bound it above."""


class ProjectError(Sentence, ValueError):
    """Project that cannot be written or run; the message names the folder or the setting, and what to do."""


class ToolError(Sentences, RuntimeError):
    """Vivado is missing or failed; the message says what to install, or where to look."""


def write_project(board: Board, folder: str | Path, cfg: Config | None = None, clock_mhz: int | None = None) -> Path:
    """Write a Vivado project to `folder`, which must be new, empty, or an older project. Returns the folder.

    cfg, clock_mhz: by default those of the board. ProjectError if the project is impossible; nothing is written then.
    """
    cfg, clock = cfg or board.config, board.clock_mhz if clock_mhz is None else clock_mhz
    if 8 * cfg.bus_bytes not in (32, 64, 128) or 8 * cfg.bus_bytes > board.bus_bits:
        raise ProjectError(
            f"Config {cfg.name} has a bus of {8 * cfg.bus_bytes} bits, the memory ports of {board.name} have 32 to "
            f"{board.bus_bits}; choose bus_bytes accordingly"
        )
    slowest, fastest = NUMBER_LIMITS["clock_mhz"]
    if not slowest <= clock <= fastest:
        raise ProjectError(f"a clock of {clock} MHz is not possible on {board.name}; take {slowest} to {fastest}")
    slowest, fastest = PUMPED_MHZ[board.processor]
    if cfg.pump == 2 and not slowest <= clock <= fastest:
        raise ProjectError(
            f"a clock of {clock} MHz with pump = 2, which is {2 * clock} MHz in the array, is not possible on "
            f"{board.name}; take {slowest} to {fastest}"
        )
    target = Path(folder)
    _check_folder(target)
    texts = _file_contents(board, cfg, clock)
    target.mkdir(parents=True, exist_ok=True)
    # All files are written before the first one replaces an older one.
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        for name, text in texts.items():
            (Path(temporary) / name).write_text(text, encoding="utf-8")
        for name in texts:
            os.replace(Path(temporary) / name, target / name)
    return target


def _check_folder(folder: Path) -> None:
    """Raise ProjectError if `folder` is a file, or holds anything but a project."""
    if folder.exists() and not folder.is_dir():
        raise ProjectError(f"{folder} is a file; name a folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / "settings.tcl").exists():
        raise ProjectError(f"folder {folder} holds other files; name a new one")


def _file_contents(board: Board, cfg: Config, clock: int) -> dict[str, str]:
    """Return the content of each of FILES. clock: of the accelerator, in MHz."""
    from celosia.hw.verilog import hardware_digest, verilog

    manifest = Manifest(
        board=board.name, part=board.part, config=cfg.to_dict(), config_digest=cfg.digest,
        hardware_digest=hardware_digest(cfg), clock_mhz=clock, address=board.address,
        celosia=metadata.version("celosia"), tool="Vivado @TOOL@", slack_ns="@SLACK@", bit="@BIT@", hwh="@HWH@",
    )  # fmt: skip
    build = Path(__file__).with_name("build.tcl").read_text(encoding="utf-8")
    address_bits = 32 if board.processor == "zynq" else 40
    accelerator = verilog(cfg, blocks=board.device.blocks)
    texts = (
        build, _settings_tcl(board, cfg, clock),
        wrapper_verilog(cfg, address_bits, _is_direct(board, cfg), _is_pumped(board, cfg)), accelerator,
        constraints_xdc(board),
        manifest.to_json(),
    )  # fmt: skip
    return dict(zip(FILES, texts))


def _settings_tcl(board: Board, cfg: Config, clock: int) -> str:
    """Return settings.tcl: the Tcl variables that build.tcl reads."""
    values = {
        "name": _bitstream_name(board.name, cfg.name), "board_files": board.board_files, "processor": board.processor,
        "part": board.part, "clock_mhz": clock, "bus_bits": 8 * cfg.bus_bytes, "address": f"{board.address:#010x}",
        "lights": " ".join(board.pins()), "ports": "0 1" if cfg.ports == 2 else "0",
        "direct": int(_is_direct(board, cfg)),
        "multiple": mmcm_multiple(clock, board.processor) if _is_pumped(board, cfg) else 0,
    }  # fmt: skip
    return "".join(f"set {name} {{{value}}}\n" for name, value in values.items())


def _is_pumped(board: Board, cfg: Config) -> bool:
    """Return whether the array of `cfg` has a clock of twice the rate on `board`."""
    from celosia.hw.gemm_core.pump import pumps

    return pumps(board.device.blocks, cfg.pump) is not None


def mmcm_multiple(clock_mhz: int, processor: str) -> int:
    """Return the factor by which an MMCM multiplies the processors' clock.

    The MMCM divides by the same factor for the accelerator's clock, and by half of it for the array's clock of twice
    the rate. So the factor is even. It is the largest one, which makes the oscillator as fast as possible.

    >>> mmcm_multiple(100, "zynq"), mmcm_multiple(125, "zynq"), mmcm_multiple(125, "zynqmp")
    (12, 8, 12)
    """
    _, fastest = OSCILLATOR_MHZ[processor]
    return min(MAX_MULTIPLE, fastest // clock_mhz // 2 * 2)


def _is_direct(board: Board, cfg: Config) -> bool:
    """Return whether the accelerator's memory ports connect to the processors' ports without an interconnect.

    That saves LUTs and time. It is possible on a Zynq-7000, whose ports have AXI3 and 64 bits (AMD UG585).
    """
    return board.processor == "zynq" and 8 * cfg.bus_bytes == board.bus_bits


def _bitstream_name(board: str, config: str) -> str:
    """Return the name of the bitstream's files, without extension."""
    return re.sub(r"[^\w.-]", "_", f"{board}-{config}", flags=re.ASCII)


def constraints_xdc(board: Board) -> str:
    """Return the XDC file: pins of the lights. All other constraints come with Vivado's block of the processors."""
    return "".join(
        f"set_property -dict {{PACKAGE_PIN {pin} IOSTANDARD {board.light_standard}}} [get_ports led_{state}]\n"
        for state, pin in board.pins().items()
    )


# Wrapper module for the block design ----------------------------------------------------------------------------------

MEMORY = "PROTOCOL @MEMORY@, MAX_BURST_LENGTH 16, SUPPORTS_NARROW_BURST 0"
"""Parameters of a memory port; @MEMORY@ stands for AXI3 or AXI4."""
BUSES = {"m_axi": MEMORY, "m_axi1": f"{MEMORY}, READ_WRITE_MODE READ_ONLY", "s_axil": "PROTOCOL AXI4LITE"}
"""Parameters of the bus interfaces that Vivado cannot infer from the ports, by interface."""
LEN_BITS = 4
"""Bits of awlen and arlen in AXI3, enough for the accelerator's bursts of at most 16 beats."""
SIGNALS = {
    "clk": ("clock", "CLK", "ASSOCIATED_BUSIF @BUSES@, ASSOCIATED_RESET resetn"),
    "resetn": ("reset", "RST", "POLARITY ACTIVE_LOW"),
    "irq": ("interrupt", "INTERRUPT", "SENSITIVITY LEVEL_HIGH"),
    "fast_clk": ("clock", "CLK", ""),
}  # fmt: skip
"""Signals beside the buses: Vivado's type and role of each, and its parameters; @BUSES@ stands for all buses."""


def wrapper_verilog(cfg: Config, address_bits: int, axi3: bool = False, pumped: bool = False) -> str:
    """Return the Verilog of module `celosia`: the accelerator with ports that Vivado recognises as bus interfaces.

    The reset is active low.

    address_bits: bits of addresses on the memory ports. The accelerator has 40; the highest ones are left out.
    axi3: the memory ports have AXI3: burst lengths of 4 bits, and wid, which is 0.
    pumped: the array has a clock of its own, `fast_clk`, of twice the rate and aligned with `clk`.
    """
    from amaranth.lib.wiring import Out

    ports, connections, wires = [], [".clk(clk)", ".rst(~resetn)"], ""
    if pumped:
        connections += [".fast_clk(fast_clk)", ".fast_rst(1'b0)"]  # nothing in that domain is reset
    buses = _bus_interfaces(cfg)
    for name, (kind, role, parameter) in SIGNALS.items():
        if name == "fast_clk" and not pumped:
            continue
        direction = "output" if name == "irq" else "input "
        attribute = f', X_INTERFACE_PARAMETER = "{parameter.replace("@BUSES@", ":".join(buses))}"' if parameter else ""
        info = f'X_INTERFACE_INFO = "xilinx.com:signal:{kind}:1.0 {name} {role}"'
        ports.append(f"(* {info}{attribute} *)\n    {direction} wire {name}")
    ports += [f"output wire {state}" for state in ("idle", "busy", "error")]
    connections += [f".{name}({name})" for name in ("irq", "idle", "busy", "error")]
    for bus, signals in buses.items():
        parameters = BUSES[bus].replace("@MEMORY@", "AXI3" if axi3 else "AXI4")
        attribute = f', X_INTERFACE_PARAMETER = "{parameters}"'  # only with the first signal of the bus
        narrow_widths = {} if bus == "s_axil" else _narrow_widths(address_bits, axi3)
        for name, member in signals.items():
            width, direction = int(member.shape), "output" if member.flow is Out else "input "
            port_width = narrow_widths.get(name, width)
            is_narrow = port_width < width
            ports.append(
                f'(* X_INTERFACE_INFO = "xilinx.com:interface:aximm:1.0 {bus} {name.upper()}"{attribute} *)\n'
                f"    {direction} wire [{port_width - 1}:0] {bus}_{name}"
            )
            attribute = ""
            connections.append(f".{bus}__{name}({bus}_{'_' if is_narrow else ''}{name})")
            if is_narrow:
                wires += f"    wire [{width - 1}:0] {bus}__{name};\n"
                wires += f"    assign {bus}_{name} = {bus}__{name}[{port_width - 1}:0];\n"
        if axi3 and "awid" in signals:
            ports.append(
                f'(* X_INTERFACE_INFO = "xilinx.com:interface:aximm:1.0 {bus} WID" *)\n'
                f"    output wire [{int(signals['awid'].shape) - 1}:0] {bus}_wid"
            )
            wires += f"    assign {bus}_wid = 0;\n"
    body = ",\n        ".join(connections)
    return (
        "// The accelerator as a module of a Vivado block design.\n"
        f"module celosia (\n    {(',' + chr(10) + '    ').join(ports)}\n);\n{wires}"
        f"    celosia_top core (\n        {body}\n    );\nendmodule\n"
    )


def _narrow_widths(address_bits: int, axi3: bool) -> dict[str, int]:
    """Return the widths of the signals of a memory port that are narrower than the accelerator's, by name."""
    lengths = {"awlen": LEN_BITS, "arlen": LEN_BITS} if axi3 else {}
    return {"awaddr": address_bits, "araddr": address_bits, **lengths}


def _bus_interfaces(cfg: Config) -> dict[str, dict[str, Member]]:
    """Return the signals of each bus interface of the accelerator, by name."""
    from celosia.hw.control import REGISTER_BITS
    from celosia.hw.lib.axi import Axi4, Axi4Read, AxiLite

    second = {"m_axi1": Axi4Read(cfg.bus_bytes)} if cfg.ports == 2 else {}
    signatures = {"m_axi": Axi4(cfg.bus_bytes), **second, "s_axil": AxiLite(REGISTER_BITS).flip()}
    return {
        bus: {str(path[-1]): member for path, member, _ in signature.flatten(signature.create())}
        for bus, signature in signatures.items()
    }


# Vivado ----------------------------------------------------------------------------------------------------------


def build_project(folder: str | Path) -> Manifest:
    """Run Vivado on the project in `folder`, and return the manifest of the bitstream.

    Vivado takes long and prints to the terminal. ProjectError if the folder holds no project, ToolError if Vivado is
    missing or fails.
    """
    path = Path(folder)
    missing = [name for name in FILES if not (path / name).exists()]
    if missing:
        raise ProjectError(
            f"{path} is not a whole project, {missing[0]} is missing; make one: celosia bitstream project"
        )
    planned = Manifest.load(path / "manifest.in.json")
    if shutil.which(COMMAND[0]) is None:
        raise ToolError(
            f"Vivado was not found: install Vivado ML Standard, which is free for {planned.part}, with that device "
            f"family, source its settings64.sh, and run this again; or copy {path} to a machine that has it and run "
            f"there: {' '.join(COMMAND)}"
        )
    vivado = subprocess.run(COMMAND, cwd=path, check=False)
    if vivado.returncode:
        raise ToolError(
            f"Vivado ended with exit code {vivado.returncode}; the reason is above and in {path}/vivado.log"
        )
    bit = path / f"{_bitstream_name(planned.board, Config.from_dict(planned.config).name)}.bit"
    try:
        manifest = Manifest.load(bit.with_suffix(".json"))
        manifest.check_files(bit)
    except ManifestError as error:
        raise ToolError(f"Vivado ended without an error, but {error}") from None
    return manifest
