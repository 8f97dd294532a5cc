"""Float tensors between quantised ones become bytes under rounding="bytes", in intervals derived from the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from oracle import opened

import celosia
from celosia.driver.accuracy.compare import compare

Arrays = dict[str, NDArray[Any]]
SY, ZY, SR = 0.04, 25, 0.03


def model(behind: str, rng: np.random.Generator, channels: int = 8, outputs: str = "uint8 y") -> onnx.ModelProto:
    """Return a model with a convolution c = Conv(a, w) of bytes, d = Conv(c8, v), the residual r, and operators after
    them."""
    arrays: Arrays = {
        "sx": np.float32(0.02), "zx": np.uint8(117), "sr": np.float32(SR), "zr": np.uint8(100), "sy": np.float32(SY),
        "zy": np.uint8(ZY), "st": np.float32(0.05), "zero": np.int8(0), "sw": np.float32(0.004),
        "three": np.float32(3), "six": np.float32(6), "none": np.float32(0),
        "bias": rng.normal(size=channels).astype(np.float32),
        "w8": rng.integers(-60, 60, (channels, channels, 3, 3)).astype(np.int8),
    }  # fmt: skip
    graph = onnx.parser.parse_graph(f"""g (uint8[1, {channels}, 6, 6] x, uint8[1, {channels}, 6, 6] q) => ({outputs}) {{
        a = DequantizeLinear(x, sx, zx) w = DequantizeLinear(w8, sw, zero) r = DequantizeLinear(q, sr, zr)
        c = Conv<pads=[1, 1, 1, 1]>(a, w, bias) {behind}
    }}""")
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items() if n in used)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


QUANTISE = "y = QuantizeLinear({}, sy, zy)"
FORMS = {
    "HardSwish": "h = HardSwish(c) " + QUANTISE.format("h"),
    "SiLU": "s = Sigmoid(c) h = Mul(c, s) " + QUANTISE.format("h"),
    "LeakyRelu": "h = LeakyRelu<alpha=0.1>(c) " + QUANTISE.format("h"),
    "residual": "h = Add(c, r) " + QUANTISE.format("h"),
    "residual, Relu": "h = Add(r, c) k = Relu(h) " + QUANTISE.format("k"),
    "residual, HardSwish": "h = Add(r, c) k = HardSwish(h) " + QUANTISE.format("k"),
    "moved": "m = Transpose<perm=[0, 1, 3, 2]>(c) h = HardSwish(m) " + QUANTISE.format("h"),
    "gate": "h = Clip(c, none, six) s = HardSigmoid(r) k = Mul(h, s) " + QUANTISE.format("k"),
    "two readers": "h = HardSwish(c) y8 = QuantizeLinear(h, st, zy) f = DequantizeLinear(y8, st, zy) s = Sigmoid(f) "
    "k = Add(h, r) t8 = QuantizeLinear(s, sr, zy) t = DequantizeLinear(t8, sr, zy) e = Mul(k, t) "
    + QUANTISE.format("e"),
    "joined": "h = HardSwish(c) k = Concat<axis=1>(h, r) " + QUANTISE.format("k"),
}
"""Operators between a convolution and the next quantised tensor, as quantisers of inputs alone leave them."""


def feeds(rng: np.random.Generator, channels: int = 8) -> dict[str, NDArray[Any]]:
    return {name: rng.integers(0, 256, (1, channels, 6, 6)).astype(np.uint8) for name in "xq"}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("config", ["tiny", "pynq"])
def test_all_operators_are_on_the_accelerator(name: str, config: str) -> None:
    """All operators run on the accelerator; results are a few steps from onnxruntime's, without a systematic error."""
    rng = np.random.default_rng(len(name))
    channels = 16 if name == "joined" else 8
    proto = model(FORMS[name], rng, channels, "uint8[1, C, H, W] y")
    session, steps = opened(proto, int8=True), []
    program = celosia.compile(proto, config, rounding="bytes")
    on_cpu = [row for row in program.placements if row["place"] == "cpu"]
    assert program.macs_accelerator == program.macs_total > 0 and not on_cpu, on_cpu
    assert program.rounding == "bytes"
    notes = [info.note for step in program.launches for info in step.layers]
    assert any("rounded to bytes between" in note for note in notes)
    with celosia.Runtime(program) as runtime:
        for _ in range(3):
            feed = feeds(rng, channels)
            (expected,) = session.run(None, feed)
            steps.append(runtime.run(feed).outputs["y"].astype(np.int64) - expected)
    largest = 6 if name == "two readers" else 3  # four roundings lie between, two in others
    assert np.abs(steps).max() <= largest and np.abs(steps).mean() < 0.7 and abs(np.mean(steps)) < 0.15


def ends(note: str) -> tuple[float, float]:
    """Return the interval that a layer's remark states."""
    low, high = note.removeprefix("its float result is rounded to bytes between ").split(" and ")
    return float(low), float(high)


def test_intervals_saturate_only_what_saturates_behind() -> None:
    """An interval covers all values that the next operators distinguish.

    Bytes before a HardSwish reach from -3, below which it is 0, to the greatest result; before a Relu they start at 0.
    """
    rng = np.random.default_rng(0)
    program = celosia.compile(model(FORMS["HardSwish"], rng), "tiny", rounding="bytes")
    (note,) = [info.note for step in program.launches for info in step.layers]
    low, high = (
        float(word) for word in note.removeprefix("its float result is rounded to bytes between ").split(" and ")
    )
    assert -3.1 < low < -2.9 and SY * (255 - ZY) - 0.1 < high < SY * (255 - ZY) + 0.3
    program = celosia.compile(model(FORMS["residual"], rng), "tiny", rounding="bytes")
    (note,) = [info.note for step in program.launches for info in step.layers if info.note]
    low, high = (
        float(word) for word in note.removeprefix("its float result is rounded to bytes between ").split(" and ")
    )
    np.testing.assert_allclose([low, high], [-SY * ZY - SR * 155, SY * (255 - ZY) + SR * 100], rtol=1e-2)


def test_one_rounding_where_only_clamps_are_between() -> None:
    """A Relu moves behind the quantisation, so that no bytes are needed before it."""
    rng = np.random.default_rng(1)
    proto = model("h = Relu(c) " + QUANTISE.format("h"), rng)
    program, feed = celosia.compile(proto, "tiny", rounding="bytes"), feeds(rng)
    output, expected = celosia.Runtime(program).run(feed).outputs["y"], opened(proto, int8=True).run(None, feed)[0]
    apart = np.abs(output.astype(np.int64) - expected)  # where the bias, rounded to an integer, moves a sum over a tie
    assert apart.max() <= 1 and apart.mean() < 0.01
    assert not any("between" in info.note for step in program.launches for info in step.layers)


@pytest.mark.parametrize("behind", ["y = HardSwish(c)", "y = Identity(c)", "h = Mul(c, c) s = Exp(c) y = Add(h, s)"])
def test_results_without_an_interval_stay_float(behind: str) -> None:
    rng = np.random.default_rng(2)
    proto = model(behind, rng, outputs="float y")
    program, feed = celosia.compile(proto, "tiny", rounding="bytes"), feeds(rng)
    assert program.macs_accelerator == 0
    expected = opened(proto, int8=True).run(None, feed)[0]
    np.testing.assert_allclose(celosia.Runtime(program).run(feed).outputs["y"], expected, rtol=1e-5, atol=1e-5)


def test_compare_reports_the_distance(tmp_path: Any) -> None:
    """`compare` reports the largest distance of tensors that differ, and does not count them as faults."""
    rng = np.random.default_rng(3)
    path = tmp_path / "model.onnx"
    onnx.save(model(FORMS["residual, HardSwish"], rng), path)
    report = compare(path, feeds(rng), config="tiny", rounding="bytes")
    (row,) = [row for row in report["tensors"] if row["name"] == "y"]
    assert report["different"] == 0 and report["first"] is None
    assert 0 < row["largest"] <= 2 and row["different"] > 0
    assert report["rounded"]["between"] == sum(row["different"] > 0 for row in report["tensors"])


def test_a_product_is_rounded_behind_its_bias() -> None:
    """The bias of a MatMul stays part of the product, whose sum alone is rounded to bytes."""
    rng = np.random.default_rng(5)
    arrays: Arrays = {
        "sx": np.float32(0.02), "zx": np.int8(3), "sw": np.float32(0.004), "none": np.int8(0), "sy": np.float32(SY),
        "w8": rng.integers(-90, 90, (16, 24)).astype(np.int8), "bias": rng.normal(size=24).astype(np.float32),
    }  # fmt: skip
    graph = onnx.parser.parse_graph("""g (int8[1, 5, 16] x) => (int8 y) {
        a = DequantizeLinear(x, sx, zx) w = DequantizeLinear(w8, sw, none) m = MatMul(a, w) c = Add(m, bias)
        s = Sigmoid(c) h = Mul(c, s) y = QuantizeLinear(h, sy, none)
    }""")
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = celosia.compile(source, config="tiny", rounding="bytes")
    assert [(row["op"], row["place"]) for row in program.placements] == [
        ("QGemm", "accelerator"),
        ("Table", "accelerator"),
    ]
    x = rng.integers(-128, 128, (1, 5, 16)).astype(np.int8)
    y = celosia.Runtime(program, device="functional").run({"x": x}).outputs["y"]
    (expected,) = opened(source).run(None, {"x": x})
    assert np.abs(y - expected.astype(int)).max() <= 3 and len(np.unique(expected)) > 20
