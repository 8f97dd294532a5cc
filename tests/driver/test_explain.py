"""Reports by layer: cycles add up, shares stay within 100%; tests of bounds, estimates and the timeline."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Builder
from thorough import paired, tries

import celosia
from celosia.driver.pages.chrome_trace import chrome_trace
from celosia.driver.run import explain
from celosia.driver.show import run_summary as show
from celosia.driver.show.text_table import console
from celosia.hw.spec.config import PRESETS, Config

SMALL = Config(block_in=8, block_out=4, inp_depth=256, wgt_depth=64, acc_depth=128, vin_depth=128, out_depth=64)
CONFIGS = [PRESETS["tiny"], PRESETS["pynq"], SMALL, replace(PRESETS["tiny"], ports=2, residual_cycles=1)]


def network(names: str = "own") -> onnx.ModelProto:
    """Return a model of a block with a depthwise convolution and a residual, pooling, and a product."""
    b = Builder("qdq", np.int8, seed=2)
    b.node_names = names
    x = b.conv(b.input([1, 3, 16, 16]), 16, (3, 3), pads=(1, 1, 1, 1))
    y = b.conv(b.conv(x, 32, (1, 1)), 32, (3, 3), pads=(1, 1, 1, 1), group=32)
    x = b.binary("Add", b.conv(y, 16, (1, 1)), x)
    x = b.conv(x, 24, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    b.output(b.matmul(b.flatten(b.global_average(x)), 10))
    return b.model()


def image(model: onnx.ModelProto) -> dict[str, Any]:
    value = model.graph.input[0]
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    array = np.random.default_rng(0).integers(-100, 100, shape)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return {value.name: array.astype(dtype)}


def check_rows(report: dict[str, Any]) -> None:
    rows = report["layers"]
    assert rows and abs(sum(row["cycles"] for row in rows) - report["cycles"]) < 100
    for row in rows:
        assert 0 <= row["utilization"] <= 1 and row["what"]
        assert (row["bound"] is None) == (row["cycles"] == 0) == (row["advice"] is None)
        for unit in row["units"].values():
            assert min(unit.values()) >= 0
            assert abs(sum(unit.values()) - row["cycles"]) <= 1  # each is rounded
        if row["bound"] in explain.UNITS:
            unit = row["units"][row["bound"]]
            assert (unit["busy"] + unit["held"]) / row["cycles"] >= explain.BOUND - 0.03


@pytest.mark.parametrize(("cfg", "names"), paired(CONFIGS, ["own", "none", "same"]))
def test_shares_stay_within_the_cycles_and_the_estimate_is_the_timed_run(cfg: Config, names: str) -> None:
    model = network(names)
    program = celosia.compile(model, cfg)
    report = celosia.Runtime(program, "timed").run(image(model)).report
    check_rows(report)
    guess = explain.estimate(program)
    assert guess["layers"] == report["layers"] and guess["cycles"] == report["cycles"]
    products = sum(row["utilization"] * row["cycles"] for row in report["layers"]) * cfg.macs_per_cycle
    assert products <= report["macs_accelerator"] * 1.001
    if not cfg.taps:  # with taps, the vector unit multiplies the rest
        assert products == pytest.approx(report["macs_accelerator"], rel=0.02)


@pytest.mark.rtl
def test_the_rtl_tells_the_same() -> None:
    model = network()
    program = celosia.compile(model, "tiny")
    with celosia.Runtime(program, "rtl", quiet=True) as runtime:
        report = runtime.run(image(model)).report
    check_rows(report)
    bounds = [row["bound"] for row in explain.estimate(program)["layers"]]
    same = sum(row["bound"] == bound for row, bound in zip(report["layers"], bounds))
    assert same >= len(bounds) - 1


def convolution(channels: int, outputs: int, size: int, kernel: int) -> onnx.ModelProto:
    b = Builder("qdq", np.int8, seed=4)
    pad = kernel // 2
    x = b.conv(b.input([1, 16, size, size]), channels, (1, 1))  # so that the host arranges nothing for the next one
    b.output(b.conv(x, outputs, (kernel, kernel), pads=(pad,) * 4))
    return b.model()


def test_what_bounds_a_layer_follows_the_hardware() -> None:
    plain = replace(PRESETS["pynq"], forward=False)  # without blocks, whose search takes long
    b = Builder("qdq", np.int8, seed=4)
    b.output(b.matmul(b.input([1, 512]), 512))
    product = explain.estimate(celosia.compile(b.model(), plain))["layers"][-1]
    assert product["bound"] == "load"  # each weight is used once
    assert "bus_bytes" in product["advice"]
    wide = explain.estimate(celosia.compile(convolution(64, 64, 16, 3), plain))["layers"][-1]
    assert wide["bound"] == "gemm" and wide["utilization"] > 0.85 and "near the speed" in wide["advice"]
    odd = explain.estimate(celosia.compile(convolution(24, 20, 16, 5), plain))["layers"][-1]
    assert odd["bound"] == "gemm" and odd["utilization"] < 0.65 and "channels fill" in odd["advice"]
    narrow = replace(plain, bus_bytes=4)
    moved = explain.estimate(celosia.compile(convolution(16, 16, 32, 1), narrow))["layers"][-1]
    assert moved["bound"] in ("load", "store")


@st.composite
def intervals(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Draw (since, until, amount) of consecutive intervals, and the edges of layers."""
    now, drawn = 0, []
    for _ in range(draw(st.integers(0, 6))):
        since = now + draw(st.integers(0, 5))
        now = since + draw(st.integers(0, 9))
        drawn.append((since, now, draw(st.integers(0, now - since))))
    inner = draw(st.lists(st.integers(0, now + 3), max_size=4))
    return drawn, sorted([0, *inner, max([now, *inner]) + 1])


@settings(max_examples=tries(150), deadline=None)
@given(intervals())
def test_amounts_are_spread_as_cycle_by_cycle(drawn: tuple[list[tuple[int, int, int]], list[int]]) -> None:
    made, edges = drawn
    expected = np.zeros(len(edges) - 1)
    for since, until, amount in made:
        for cycle in range(since, until):
            expected[np.searchsorted(edges, cycle, "right") - 1] += amount / (until - since)
    columns = [np.array(column, float) for column in zip(*made)] or [np.zeros(0)] * 3
    spread = explain._Spread(columns[0], columns[1], np.array(edges, float))
    np.testing.assert_allclose(spread.add_up(columns[2]), expected, atol=1e-9)


def test_layers_say_what_they_are() -> None:
    program = celosia.compile(network(), Config(block_in=4, block_out=4))
    descriptions = [layer.what for launch in program.launches for layer in launch.layers]
    assert descriptions[0] == "conv 3x3, 3→16, folded by the host"
    assert "depthwise conv 3x3, 32" in descriptions and "conv 1x1, 32→16 + add" in descriptions
    assert "conv 3x3 stride 2, 16→24" in descriptions
    assert (
        any(text.startswith("sum pool 8x8, 24 channels") for text in descriptions)
        and descriptions[-1] == "product 24→10"
    )


def test_tables_without_a_clock_name_no_cycles(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    report = celosia.Runtime(celosia.compile(model, "tiny")).run(image(model)).report
    assert show.advice_on_layers(report) is None
    console().print(show.layers(report))
    message = capsys.readouterr().out
    assert "bound by" not in message and "conv 3x3" in message


def test_steps_of_the_cpu_are_in_the_timeline() -> None:
    b = Builder("qdq", np.int8, seed=1)
    b.output(b.conv(b.input([1, 3, 8, 8]), 8, (3, 3)), real=True)  # the CPU quantises, and dequantises
    model = b.model()
    program = celosia.compile(model, "tiny")
    result = celosia.Runtime(program, "timed").run(image(model))
    assert len(result.step_seconds) == len(program.steps)
    made = chrome_trace(program, result.counters, result.step_seconds, "zynq-hp", 200)
    rows = {row["args"]["name"]: row["tid"] for row in made["traceEvents"] if row["ph"] == "M"}
    host = [row for row in made["traceEvents"] if row["ph"] == "X" and row["tid"] == rows["CPU"]]
    units = [row for row in made["traceEvents"] if row["ph"] == "X" and row["tid"] != rows["CPU"]]
    assert [row["name"] for row in host] == ["QuantizeLinear", "DequantizeLinear"]
    first, last = host
    assert first["ts"] == 0 and first["dur"] == pytest.approx(result.step_seconds[0] * 1e6)
    begin, end = min(row["ts"] for row in units), max(row["ts"] + row["dur"] for row in units)
    assert first["dur"] - 0.01 <= begin and end <= last["ts"] + 0.01
    assert last["ts"] - first["dur"] == pytest.approx(result.report["cycles"] / 200)


def test_advice_for_layers_that_wait_is_to_tune() -> None:
    """The advice for waiting layers is to tune: more samples at once give no unit more work between two waits."""
    cfg = PRESETS["tiny"]
    time = SimpleNamespace(busy=np.array([3.0, 9.0, 4.0, 1.0]))
    message = explain._layer_advice(cfg, SimpleNamespace(macs=1, what=""), time, "latency")  # type: ignore[arg-type]
    assert message is not None and "gemm works most: `celosia tune`" in message and "batch" not in message
