"""A TOML file of an own board is accepted wherever a board's name is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_flash import bit_bytes, bitstream
from typer.testing import CliRunner

import celosia
from celosia.bitstreams import synthesis
from celosia.bitstreams.synthesis import Usage
from celosia.compiler.program import Program
from celosia.driver.cli import app
from celosia.driver.explore.records import ExploreError
from celosia.hw.boards.board import Board
from celosia.hw.boards.boards import BOARDS, find_board, memory_model, memory_model_text
from celosia.hw.manifest import Manifest

OWN = """
part = "xczu2eg-sfva625-1-e"
config = "tiny"
clock_mhz = 75
device = { lut = 47_232, ff = 94_464, dsp = 240, ram = 150 }
dram = { bits = 16, megatransfers = 2400, refresh_every_ns = 7800, refresh_ns = 350 }
"""
MEMORY = "mine (clock_mhz=75, refresh_period=585, refresh_cycles=27, bytes_per_cycle=64)"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    return path


def call(*line: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in line])
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def test_boards_are_listed_and_printed(own: Path, tmp_path: Path) -> None:
    listed = call("boards")
    assert all(f" {name} " in listed and board.part in listed for name, board in BOARDS.items())
    for name in (*BOARDS, str(own)):
        printed = CliRunner().invoke(app, ["boards", name]).stdout
        (tmp_path / "printed.toml").write_text(printed)
        assert call("boards", tmp_path / "printed.toml") == re.sub(r"\s+", " ", printed)


def test_part_and_lights_of_a_platform(own: Path) -> None:
    """The PYNQ-Z1 shares part and pins with the Arty Z7-20."""
    given = OWN.replace('part = "xczu2eg-sfva625-1-e"', 'platform = "arty_z7.ArtyZ720Platform"')
    own.write_text(given)
    board, same = find_board(own), BOARDS["pynq-z1"]
    assert (board.part, board.lights, board.light_standard) == (same.part, same.lights, same.light_standard)
    own.write_text(f'lights = ["R14"]\n{given}')
    assert find_board(own).lights == ("R14",)
    rfsoc = given.replace("arty_z7.ArtyZ720Platform", "rfsoc4x2.RFSoC4x2Platform")
    own.write_text(rfsoc)
    assert find_board(own).part == "xczu48dr-ffvg1517-2-e" and find_board(own).light_standard == "LVCMOS18"
    for wrong in ("arty_z7.None", "os.System", "arty_z7", "icestick.ICEStickPlatform", "../x.Y", "arty_z7.Resource"):
        own.write_text(given.replace("arty_z7.ArtyZ720Platform", wrong))
        said = call("bitstream", "project", "--board", own, "-o", "out", code=1)
        assert "arty_z7.ArtyZ720Platform" in said or "part cannot be" in said


def test_projects_and_bitstreams(own: Path, tmp_path: Path) -> None:
    said = call("bitstream", "project", "--board", own, "-o", tmp_path / "project")
    assert "project for mine (xczu2eg-sfva625-1-e), Config tiny" in said
    planned = Manifest.load(tmp_path / "project" / "manifest.in.json")
    assert (planned.board, planned.clock_mhz, planned.address) == ("mine", 75, 0xA000_0000)
    assert "set clock_mhz {75}\n" in (tmp_path / "project" / "settings.tcl").read_text()
    assert (tmp_path / "project" / "celosia.xdc").read_text() == ""
    bit = bitstream(tmp_path, find_board(own), part="xczu2eg-sfva625-1-e")
    assert "bitstreams are loaded by the Python package pynq" in call("flash", bit, "--board", own, code=3)
    assert "and zcu104 has xczu7ev-ffvc1156-2-e" in call("flash", bit, "--board", "zcu104", code=1)
    other = own.with_name("other.toml")
    other.write_text(OWN)
    assert "was made for mine, not for other: pins and memory differ" in call("flash", bit, "--board", other, code=1)
    bit.write_bytes(bit_bytes("xczu3eg-sbva484-1-i"))
    assert "and mine has xczu2eg-sfva625-1-e" in call("flash", bit, "--board", own, code=1)


def test_does_it_fit(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthesis, "measure_usage", lambda cfg, device, say: Usage(47_233, 10, 20, 30, 1.0, "Yosys"))
    said = call("bitstream", "report", "--board", own, "--json", "-q", code=6)
    assert '"board": "mine", "device": "xczu2eg"' in said and '"available": 47232' in said
    assert "tiny does not fit xczu2eg: not enough of lut" in said
    assert "delays of xczu2eg, the device of mine, are not known" in call("bitstream", "timing", "--board", own, code=1)


def test_programs_and_memories(own: Path, models: Path, tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="could not import 'ziglang', which links kernels for boards")
    call("compile", models / "quantised.onnx", "--target", own, "-o", tmp_path / "program")
    program = Program.load(tmp_path / "program", trust=True)
    assert program.machine == "aarch64" and program.config.macs_per_cycle == 16
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    line = ("run", models / "quantised.onnx", "--random", "--device", "timed", "--config", "tiny", "--memory", own)
    call(*line, "--report", report)
    assert json.loads(report.read_text())["memory_model"] == MEMORY
    call("report", report, "-o", page)
    assert "75 MHz" in page.read_text()
    tuned = celosia.tune(models / "quantised.onnx", "tiny", trials=2, memory=str(own), records=tmp_path / "records")
    assert tuned.report["cycles"] > 0 and MEMORY in (tmp_path / "records").read_text()
    assert str(own) not in (tmp_path / "records").read_text()


def test_an_exploration_is_of_one_board(own: Path, models: Path, tmp_path: Path) -> None:
    """Measuring processes get the memory of an own board, whose file they may not have."""
    folder, space = tmp_path / "front", tmp_path / "space.toml"
    space.write_text("block_in = 4\nblock_out = [4, 8]\nbatch = 1\ntaps = 0\nforward = false\n")
    line = ("explore", models / "quantised.onnx", "--board", own, "--space", space, "--points", "1", "-o", folder, "-q")
    call(*line, "--jobs", "1")
    found = json.loads((folder / "front.json").read_text())
    assert (found["device"], found["memory"], found["preset"]["name"]) == ("xczu2eg", MEMORY, "tiny")
    assert found["board"].startswith("mine (") and found["board"].endswith(f"{find_board(own).digest})")
    call(*line, "--jobs", "1")
    own.write_text(OWN.replace("47_232", "47_231"))
    assert "holds an exploration of another board" in call(*line, "--jobs", "1", code=1)
    with pytest.raises(ExploreError, match="'ddr9'"):
        celosia.explore(models / "quantised.onnx", board=find_board(own), memory="ddr9", points=1)


def test_a_board_in_python(own: Path) -> None:
    board = find_board(own)
    assert (
        isinstance(board, Board) and find_board(board) is board and memory_model_text(memory_model(str(own))) == MEMORY
    )
