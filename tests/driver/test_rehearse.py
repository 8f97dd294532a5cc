"""`celosia rehearse` deploys to a simulated board with the code that deploys to a real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from driver_models import quantised
from typer.testing import CliRunner

import celosia
from celosia.driver import rehearse as rehearsing
from celosia.driver.cli import app
from celosia.driver.cli.errors import DIFFERS
from celosia.driver.rehearse import rehearse
from celosia.hw.boards.boards import BOARDS
from celosia.hw.spec.config import PRESETS
from celosia.sim.device import DeviceError

STEPS = ["compile", "connect", "deploy", "flash", "run", "compare"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ziglang")
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(quantised(), path)
    return path


def test_the_command_shows_each_step(model: Path) -> None:
    done = CliRunner().invoke(app, ["rehearse", str(model), "--board", "pynq-z2", "--config", "tiny"])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output[done.output.index("Rehearsal for") :].split())
    places = [said.index(f" {step} ") for step in STEPS]
    assert places == sorted(places)
    assert "1 outputs as here" in said and "at 100 MHz" in said and "(simulated)" in said and "PYNQ 3.0" in said
    assert "Not rehearsed: the login by ssh, Vivado" in said and "celosia bitstream project --board pynq-z2" in said


def test_commands_name_the_file_of_a_board(model: Path, tmp_path: Path) -> None:
    board = tmp_path / "own.toml"
    board.write_text(CliRunner().invoke(app, ["boards", "pynq-z2"]).stdout, encoding="utf-8")
    done = CliRunner().invoke(app, ["rehearse", str(model), "--board", str(board), "--config", "tiny"])
    assert done.exit_code == 0, done.output
    said = "".join(done.output[done.output.index("Rehearsal for") :].split())
    assert f"celosiabitstreamproject--board{board}" in said


def test_another_result_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board that computes another result is reported."""
    sound = rehearsing.deploy.run

    def wrong(*args: object, **options: object) -> object:
        result = sound(*args, **options)  # type: ignore[arg-type]
        next(iter(result.outputs.values()))[...] += 1
        return result

    monkeypatch.setattr(rehearsing.deploy, "run", wrong)
    done = CliRunner().invoke(app, ["rehearse", str(model), "--board", "pynq-z2", "--config", "tiny"])
    assert done.exit_code == DIFFERS and "outputs differ from those here: dequantizelinear" in done.output


def test_the_board_is_that_of_the_deployment(model: Path) -> None:
    """A wrong or missing bitstream ends a rehearsal as on a real board."""
    x = {"input_1": np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsing.deploy, "flash", lambda *args: 100.0)
        with pytest.raises(DeviceError, match="no bitstream is loaded"):
            rehearse(model, BOARDS["pynq-z2"], x, PRESETS["tiny"])
    sound = rehearsing.write_bitstream
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rehearsing, "write_bitstream", lambda folder, board, config: sound(folder, board, PRESETS["pynq"])
        )
        with pytest.raises(DeviceError, match="accelerator on the board has Config"):
            rehearse(model, BOARDS["pynq-z2"], x, PRESETS["tiny"])


@pytest.mark.rtl
def test_with_the_rtl_in_its_fpga(model: Path) -> None:
    x = {"input_1": np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)}
    found = rehearse(model, BOARDS["pynq-z2"], x, PRESETS["tiny"], "rtl")
    assert [step.name for step in found.steps] == ["simulator", *STEPS] and not found.different
    assert found.result is not None and found.result.report["cycles"] > 0
    expected = celosia.Runtime(celosia.compile(model, "tiny")).run(x).outputs
    assert {name: value.tobytes() for name, value in found.result.outputs.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
