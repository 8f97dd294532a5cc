"""The page docs/boards.md: its example makes a project, its tables are complete, and its errors are real."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from celosia.driver.cli import app
from celosia.hw.boards.board import PROCESSORS, Board
from celosia.hw.boards.boards import BOARDS, find_board
from celosia.hw.boards.fpga import Device
from celosia.hw.boards.memory import Dram
from celosia.hw.manifest import Manifest

PAGE = (Path(__file__).parents[2] / "docs" / "boards.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (block,) = re.findall(r"```toml\n# zedboard\.toml\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    path = Path("zedboard.toml")
    path.write_text(block)
    return path


def test_the_example_is_a_project(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example makes a project; the accelerator's Verilog, which takes half a minute, is left out."""
    monkeypatch.setattr("celosia.hw.verilog.verilog", lambda *_, **__: "")
    result = CliRunner().invoke(app, ["bitstream", "project", "--board", str(example), "-o", "build/zedboard", "-q"])
    assert result.exit_code == 0, result.output
    planned = Manifest.load("build/zedboard/manifest.in.json")
    assert (planned.board, planned.part, planned.clock_mhz) == ("zedboard", "xc7z020clg484-1", 100)
    pins = dict(re.findall(r"PACKAGE_PIN (\w+) .*led_(\w+)", Path("build/zedboard/celosia.xdc").read_text()))
    assert pins == {"T22": "busy", "T21": "error", "U22": "idle"}
    assert "set name {zedboard-pynq}\n" in Path("build/zedboard/settings.tcl").read_text()
    assert find_board(example).device == BOARDS["pynq-z2"].device  # its [device] is what Celosia knows


def test_each_field_is_in_the_table() -> None:
    documented = set(re.findall(r"^\| `([\w.]+)` \|", PAGE.partition("### Each field")[2], re.MULTILINE))
    board_fields = {field.name for field in dataclasses.fields(Board)} - {"device", "dram"}
    device = {f"device.{field.name}" for field in dataclasses.fields(Device)} - {"device.name", "device.synth"}
    assert {"platform"} | board_fields | device | {
        f"dram.{field.name}" for field in dataclasses.fields(Dram)
    } == documented


def test_each_board_is_in_the_table() -> None:
    for name, board in BOARDS.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1]]
        words_of_row = f"{board.part} `{board.config.name}` {board.clock_mhz} MHz {board.dram.bits} bits"
        assert all(word in row for word in words_of_row.split(" ")) and f"{board.dram.megatransfers:,} MT/s" in row
        assert f"| {len(board.lights) or 'none'} |" in row
    for processor in PROCESSORS.values():
        assert f"0x{processor.address:08X}" in PAGE


@pytest.mark.parametrize("text", re.findall(r"^celosia: error: (.*)$", PAGE, re.MULTILINE))
def test_its_sentences_are_said(example: Path, text: str) -> None:
    if "clock_mhz cannot" in text:
        example.write_text(example.read_text().replace("clock_mhz = 100", "clock_mhz = 1000"))
    if "clok" in text:
        example.write_text(example.read_text().replace("clock_mhz", "clok_mhz"))
    board = "kv620" if "kv620" in text else str(example)
    result = CliRunner().invoke(app, ["bitstream", "project", "--board", board, "-o", "out"])
    assert result.exit_code == 1 and text.removesuffix("...") in result.stderr and not Path("out").exists()
