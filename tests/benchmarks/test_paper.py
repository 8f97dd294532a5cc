"""The page of the papers' charts shows exactly the measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_models import Builder

pytest.importorskip("onnxruntime")
pytest.importorskip("bokeh")

from benchmarks import paper, paper_arm, paper_chart, paper_cpu, paper_machine, paper_search
from benchmarks.cpu import TVM_VARIABLE
from benchmarks.paper_chart import SHORT, Chart
from benchmarks.rows import Request, Row
from benchmarks.workloads import Missing

import celosia
from celosia.compiler.program import CpuStep, Program
from celosia.driver.run.explain import layer_rows, predict_counters
from celosia.driver.workstation.oracle import open_session


@pytest.fixture(autouse=True)
def own_networks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_chart, "MADE", tmp_path_factory.getbasetemp() / "networks")


TINY = dataclasses.replace(SHORT, configs=("tiny",))


def quiet(text: str) -> None:
    pass


def test_latency_hiding_on_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "SHORT", TINY)
    rows = list(paper.rows(Request(short=True, charts=("hiding",)), tmp_path / "paper.html", None))
    (hiding,) = rows  # a run of some charts reports no total time
    assert hiding.key == "paper/hiding/tiny"
    assert hiding.details["off"] > hiding.details["on"] and hiding.details["off_utilization"] < 1
    assert hiding.details["convolutions"] >= hiding.details["least"] > 1
    text = (tmp_path / "paper.html").read_text(encoding="utf-8")
    assert hiding.measured in text and "Latency hiding on tiny" in text and text.count("<section>") == 1


def test_what_hides_nothing_misses() -> None:
    """A planted side without latency hiding that is as fast as the other misses the goal."""
    program = celosia.compile(celosia.models.demo_model_path(), "tiny", check=False)
    rows = layer_rows(program, predict_counters(program))
    row = paper_machine._hiding_row(program, rows, rows, TINY, "tiny")
    assert row.met is False and row.details["convolutions"] == 1


def test_a_variant_with_other_values_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted variant without fusion that computes other values is an error."""
    real = celosia.compile

    def spoiled(model: Any, *args: Any, **options: Any) -> Any:
        for tensor in model.graph.initializer if "without" in options else ():
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(array + array.dtype.type(0.1), tensor.name))
        return real(model, *args, **options)

    monkeypatch.setattr(celosia, "compile", spoiled)
    monkeypatch.setattr(paper_machine, "variants", lambda: {"": {}, "fusion": {"without": "fusion"}})
    with pytest.raises(RuntimeError, match="ds_cnn without fusion"):
        paper_machine._without_on_cpu(paper_machine.floats("ds_cnn"), "ds_cnn", TINY, quiet)


def test_the_convolutions_of_a_network_by_numpy() -> None:
    convolutions = paper_cpu.convolutions(paper_cpu.floats("ds_cnn"))
    assert [convolution.name for convolution in convolutions] == ["64x25x5 depthwise, 3x3", "64x25x5 to 64, 1x1"]
    for convolution in (*convolutions, paper_cpu.TimedConv((1, 3, 9, 9), (4, 3, 3, 3), 2, 1, 1)):
        assert paper_cpu._compared(convolution, 0.0).error < 1e-5


def test_operators_beside_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted wrong outputs of TVM miss, and without TVM the row names what is missing."""
    monkeypatch.setattr(paper_cpu, "floats", lambda name, real=paper_cpu.floats: real("ds_cnn"))
    monkeypatch.setenv(TVM_VARIABLE, "")
    size = dataclasses.replace(TINY, operators=1, seconds=0.0)
    row, _ = paper_cpu.operators(size, None, quiet).rows
    assert "TVM" not in row.details and TVM_VARIABLE in row.measured
    for spoiled in (0, 1):
        monkeypatch.setattr(paper_cpu, "tvm_seconds", lambda path, feed, seconds, by=spoiled: (
            9.0, [array + np.float32(by) for array in open_session(onnx.load(path)).run(None, feed)]
        ))  # fmt: skip
        chart = paper_cpu.operators(size, None, quiet)
        row, _ = chart.rows
        assert row.details["TVM"] > row.details["onnxruntime"] and (row.details["error"] > 0.01) == bool(spoiled)
        assert len(chart.figures) == 2 and (row.met is False or not spoiled)


@pytest.mark.parametrize("lack", ["", "no emulator"])
def test_offload_on_the_board_is_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str) -> None:
    """The board's CPU is estimated at 1.5 s a step; without an emulator the estimate is left out."""

    def seconds(target: str, program: Program, mhz: float, say: Any) -> list[float]:
        if lack:
            raise Missing(lack)
        return [1.5 * isinstance(step, CpuStep) for step in program.steps]

    b = Builder("qdq", np.int8, seed=3)
    b.output(b.conv(b.conv(b.input([1, 4, 6, 6]), 4, (3, 3), pads=(1, 1, 1, 1)), 4, (1, 1)), real=True)
    onnx.save(b.model(), tmp_path / "small.onnx")
    monkeypatch.setattr(paper_machine, "quantised", lambda name, folder: (tmp_path / "small.onnx", name))
    monkeypatch.setattr(paper_machine.arm, "step_seconds", seconds)
    monkeypatch.setattr(paper_machine, "_step_seconds", lambda program, feed, seconds: [1.0] * len(program.steps))
    chart = paper_machine.offload(dataclasses.replace(TINY, network="ds_cnn"), None, quiet)
    whole = chart.rows[-1]
    assert (
        whole.key == "paper/offload/all"
        and whole.details["ratio"] > 0
        and (lack in chart.text)
        and len(chart.figures) == 1
    )
    assert ("over_arm" in whole.details) != bool(lack) and (not lack or lack in whole.measured)
    if not lack:
        steps, left = whole.details["over_arm_alone"] / 0.75, whole.details["over_arm_offloaded"]
        assert steps == whole.details["ratio_alone"] and left > 0.75 and "estimate" in chart.text
        layers = sum(row.details["over_arm_alone"] for row in chart.rows[:-1])
        assert layers <= whole.details["over_arm_alone"]


def test_what_an_emulator_counts_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions are counted between marks only: two blocks, of three and one instruction.

    Blocks before a mark, or between two convolutions, do not count.
    """
    known = "IN: \n0x10:  aa000001  mov\n0x14:  aa000002  mov\n0x18:  aa000003  ret\n\nIN: \n0x20:  aa000004  ret\n"
    run = {name: f"Trace 0: 0x7f [00/{address}/00/00] \n" for name, address in (("a", "10"), ("b", "20"), ("c", "30"))}
    marks = [f"77 close({paper_arm.litert_worker.FIRST_MARK + n}) = -1 errno=9\n" for n in range(4)]
    log = known + run["a"] + "77 close(3) = 0\n" + marks[0] + run["a"] * 3 + run["b"] + run["c"] + marks[1]
    log += run["b"] * 5 + marks[2] + run["b"] * 2 + marks[3] + run["a"]
    first, second = paper_arm.counts(log.splitlines(keepends=True))
    long, short = ("aa000001", "aa000002", "aa000003"), ("aa000004",)
    assert first == {long: 3, short: 1} and second == {short: 2}
    monkeypatch.setenv(paper_arm.LITERT_VARIABLE, "")
    (row,) = paper_arm.operators(TINY, None, quiet).rows
    assert row.met is None and paper_arm.LITERT_VARIABLE in row.measured


def test_configs_and_where_another_front_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = celosia.Config.load("tiny")
    monkeypatch.setattr(celosia, "explore", lambda *args, **options: None)
    for cycles, met in ((50, False), (4, True)):  # the larger of two Configs is slower, or faster
        points = [(100, 50, cfg), (900, cycles, cfg), (1300, 1, cfg)]
        monkeypatch.setattr(paper_search.configs, "measured", lambda found, points=points: points)
        chart = paper_search.designs(TINY, None, quiet)
        (row,) = chart.rows
        assert row.met is met and row.details["times"] == 50 / cycles and len(chart.figures) == 1


def test_a_page_holds_names_as_text() -> None:
    row = Row("paper/x", "<b>what</b>", "", "1 & 2", None, "")
    (section,) = paper.sections(Chart("Title", "Text", rows=[row]))
    assert "&lt;b&gt;what" in section.html and "1 &amp; 2" in section.html


@pytest.mark.thorough
def test_all_charts_in_short(tmp_path: Path) -> None:
    rows = list(paper.rows(Request(short=True), tmp_path / "paper.html", None))
    assert {row.key.split("/")[1] for row in rows} == {*paper.CHARTS, "without", "time"} - {"ablation"}
    assert all(row.command == SHORT.command for row in rows)
