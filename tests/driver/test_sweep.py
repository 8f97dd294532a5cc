"""`celosia sweep` and `configs` report exact cycles and documented sizes, and refuse wrong fields."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import celosia
from celosia.bitstreams import area, synthesis
from celosia.bitstreams.synthesis import Usage, multipliers
from celosia.driver import cli
from celosia.driver.explore.sweep import page, parse_settings, sweep
from celosia.hw.spec.config import PRESETS, Config, ConfigError


def call(*line: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, [str(word) for word in line])
    return result.exit_code, result.stdout, result.stderr


def test_rows_have_the_cycles_of_a_run(models: Path) -> None:
    rows = sweep(models / "quantised.onnx", {"bus_bytes": [4, 16], "forward": [False, True]}, "tiny")
    assert [row["set"] for row in rows] == [
        {"bus_bytes": bus, "forward": forward} for bus in (4, 16) for forward in (False, True)
    ]
    given = {"input_1": np.load(models / "x.npy")}
    for row in rows:
        program = celosia.compile(models / "quantised.onnx", replace(PRESETS["tiny"], **row["set"]))
        assert row["cycles"] == celosia.Runtime(program, "timed").run(given).report["cycles"]
    assert rows[0]["cycles"] > rows[2]["cycles"]  # a bus of four times the width


def test_a_config_that_cannot_be_has_its_reason_in_its_row(models: Path) -> None:
    rows = sweep(models / "quantised.onnx", {"bus_bytes": [8, 12]}, "tiny")
    assert rows[0]["cycles"] and rows[0]["error"] is None
    assert rows[1]["cycles"] is None and rows[1]["error"] == "bus_bytes must be a power of two, not 12"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["depth=4"], "unknown Config field 'depth' (did you mean 'wgt_depth'?); known are acc_depth"),
        (["name=4"], "unknown Config field 'name'"),
        (["taps"], "'taps' sets no field; write it as inp_depth=1024,4096"),
        (["taps="], "'taps=' sets no field"),
        (["taps=1.5"], "taps cannot be '1.5': it takes whole numbers, or true and false"),
        (["taps=1", "taps=2"], "taps is set twice; give all of its values at once, as taps=...,..."),
    ],
)
def test_wrong_settings(given: list[str], message: str, models: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_settings(given)
    code, _, err = call("sweep", models / "quantised.onnx", *(word for each in given for word in ("--set", each)))
    assert code == 1 and message in err and "Traceback" not in err


def test_a_sweep_in_which_nothing_runs_has_failed(models: Path, tmp_path: Path) -> None:
    line = "sweep", models / "quantised.onnx", "--config", "tiny", "--report", tmp_path / "s.json"
    code, out, err = call(*line, "--set", "bus_bytes=12,20", "--html", tmp_path / "s.html")
    assert code == 1 and "none of the 2 Configs runs quantised.onnx; the first: bus_bytes must be a power" in err
    assert "20" in out and len(json.loads((tmp_path / "s.json").read_text())) == 2 and (tmp_path / "s.html").exists()
    assert call(*line, "--set", "bus_bytes=8,12")[0] == 0
    code, _, err = call("sweep", models / "floats.onnx", "--config", "tiny", "--set", "bus_bytes=8")
    assert code == 1 and "nothing of floats runs on the accelerator; make an int8 model" in " ".join(err.split())


def test_a_sweep_that_would_never_end_is_refused() -> None:
    depths = [1 << n for n in range(4, 19)]
    with pytest.raises(ConfigError, match=r"225 Configs.*200"):
        sweep("model.onnx", {"inp_depth": depths, "wgt_depth": depths})


def test_the_command_writes_a_page_that_needs_no_other(models: Path, tmp_path: Path) -> None:
    code, out, err = call(
        "sweep", models / "quantised.onnx", "--config", "tiny", "--set", "inp_depth=256,1024", "--set", "bus_bytes=4,8",
        "--html", tmp_path / "s.html", "--report", tmp_path / "s.json", "--memory", "pynq-z2",
    )  # fmt: skip
    assert code == 0, err
    assert "pynq-z2" in out and "fewest cycles" in out and "Config 4 of 4" in err
    rows = json.loads((tmp_path / "s.json").read_text())
    assert len(rows) == 4 and all(f"{row['cycles']:,}" in out for row in rows)
    text = (tmp_path / "s.html").read_text()
    assert not re.search(r"""(src|href)=(?!"data:)|url\(|@import""", text)
    assert all(f">{name}</text>" in text for name in ("cycles", "inp_depth"))  # beside the axes
    assert text.count("<circle") == 4 and text.count("<polyline") == 2


class _Points(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.heights: list[float] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "circle":
            self.heights.append(float(dict(attrs)["cy"] or ""))


def test_the_plot_shows_cycles_in_proportion_and_escapes_names() -> None:
    def row(depth: int, cycles: int | None, error: str | None = None) -> dict[str, Any]:
        return {"set": {"inp_depth": depth}, "cycles": cycles, "utilization": None, "dsp": None, "bytes": None,
                "lut": None, "ff": 1234, "ram": 2.5, "counted": False, "extrapolated": False,
                "error": error}  # fmt: skip

    text = page("<model>", [row(16, 400), row(32, 200), row(64, 100), row(128, None, "a < b")]).html()
    cells = re.sub(r"<s>.*?</s>", "", text)
    assert '<td class="bar">~1,200 <b>1%</b></td><td>-</td><td class="bar">2.5 <b>2%</b></td>' in cells
    assert "<model>" not in text and "&lt;model&gt;" in text and "a &lt; b" in text
    parser = _Points()
    parser.feed(text)
    top, middle, low = parser.heights
    assert (low - top) == pytest.approx(1.5 * (middle - top), abs=0.2)
    assert page("none", [row(16, None, "no")]).html().count("<svg") == 0


def test_multipliers_are_those_that_yosys_counted() -> None:
    """The numbers of multipliers equal Yosys's in docs/bitstreams.md; load and store need up to two more."""
    plain = Config()
    counted = {
        plain: 194, replace(plain, taps=3): 218, replace(plain, forward=True): 194,
        replace(plain, residual_cycles=2): 178,
        PRESETS["pynq"]: 202, PRESETS["tiny"]: 26, PRESETS["ultra96"]: 330, Config(block_in=32, bus_bytes=16): 322,
        Config(block_in=32, block_out=32, bus_bytes=16): 642,
    }  # fmt: skip
    for cfg, dsp in counted.items():
        assert 0 <= dsp - multipliers(cfg) <= 2


def test_resources_are_exact_estimated_or_counted(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "empty"))
    line = "sweep", models / "quantised.onnx", "--config", "tiny", "--set", "taps=0,3", "--set", "batch=1,16"
    code, out, err = call(*line, "--report", tmp_path / "s.json")
    assert code == 0, err
    off = area.shipped_model().error
    assert f"at most {off['lut']:.1%} and {off['ff']:.1%} off" in " ".join(out.split())
    rows = json.loads((tmp_path / "s.json").read_text())
    assert [row["ram"] for row in rows[::2]] == [9.0, 10.5] and [row["dsp"] for row in rows[::2]] == [22, 28]
    assert not any(row["counted"] for row in rows)
    plain, taps = rows[:2], rows[2:]
    assert all(5000 < a[key] < b[key] for a, b in zip(plain, taps) for key in ("lut", "ff"))  # taps take some of both
    assert [row["extrapolated"] for row in rows] == [False, True] * 2  # no Config of such a batch was synthesised
    assert f"~{round(rows[0]['lut'], -2):,} " in out and f"~{round(rows[1]['lut'], -2):,}?" in out
    known = Usage(lut=16_001, ff=9_002, dsp=28, ram=10.5, seconds=1.0, tool="Yosys")
    monkeypatch.setattr(synthesis, "cached_usage", lambda cfg, device: known if cfg.taps else None)
    found = sweep(models / "quantised.onnx", {"taps": [0, 3]}, "tiny")
    assert [row["counted"] for row in found] == [False, True] and found[1]["lut"] == 16_001
    _, out, _ = call(*line)
    assert "16,001" in out and "~16,0" not in out


def test_presets_are_listed_and_one_is_printed(tmp_path: Path) -> None:
    code, out, _ = call("configs")
    assert code == 0 and all(name in out for name in PRESETS)
    code, out, _ = call("configs", "ultra96")
    assert code == 0
    (tmp_path / "mine.toml").write_text(out)
    assert Config.load(tmp_path / "mine.toml") == PRESETS["ultra96"]
    code, _, err = call("configs", "nobody")
    assert code == 1 and "no preset is called 'nobody'" in err
