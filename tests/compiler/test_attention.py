"""Attention on the accelerator, with its products of two activations, gives onnxruntime's bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from benchmarks.encoders import Encoder, quantised, sample
from thorough import paired, some

import celosia
from celosia.compiler.program.model import FormInfo
from celosia.driver.quantize.quantize import quantize
from celosia.hw.spec.config import PRESETS, Config

from ..configs import ROOM
from ..oracle import opened

ENCODERS = {
    "of a whole block": (Encoder(16, 2, 16, 48), "pynq", True),
    "unsigned": (Encoder(32, 2, 16, 32, layers=2), "pynq", False),
    "ragged, nameless": (Encoder(21, 3, 16, 40, named=False), "pynq", False),
    "one token": (Encoder(1, 2, 16, 32, turned=True), "pynq", True),
    "one head": (Encoder(17, 1, 32, 16, turned=True), "pynq", False),
    "a mask, no bias": (Encoder(18, 2, 16, 32, masked=True, bias=False), "pynq", True),
    "two sequences": (Encoder(12, 2, 16, 32, batch=2), "pynq", False),
    "small blocks": (Encoder(6, 3, 4, 10, turned=True), "tiny", False),
    "heads that are no whole groups": (Encoder(9, 2, 6, 20), "tiny", False),
}
QUICK = [
    ("unsigned", False), ("ragged, nameless", True), ("a mask, no bias", False), ("small blocks", True),
]  # fmt: skip
"""Encoders of `make test`, with QDQ or without; test_softmax.py takes others, with softmax on the accelerator."""


@pytest.mark.parametrize(("name", "qdq"), some([(name, qdq) for name in ENCODERS for qdq in (True, False)], QUICK))
def test_encoders_are_onnxruntimes(name: str, qdq: bool, tmp_path: Path) -> None:
    encoder, config, signed = ENCODERS[name]
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed, qdq)
    program = celosia.compile(path, config=config)
    x = sample(encoder.shape, 7)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "functional").run({"x": x})
    np.testing.assert_array_equal(result.outputs["y"], expected)
    program.save(tmp_path / "encoder.celosia")
    again = celosia.Runtime(celosia.Program.load(tmp_path / "encoder.celosia"), "functional").run({"x": x})
    np.testing.assert_array_equal(again.outputs["y"], expected)


RECTANGULAR = {
    "4x8": Config(block_in=4, block_out=8, **ROOM),
    "4x16": Config(block_in=4, block_out=16, **ROOM),
    "8x4": Config(block_in=8, block_out=4, **ROOM),
    "16x4": Config(block_in=16, block_out=4, bus_bytes=4, **ROOM),
    "16x8, spread": Config(block_in=16, block_out=8, bus_bytes=4, ports=2, **ROOM),
    "8x4, softmax": Config(block_in=8, block_out=4, forward=True, softmax=1, **ROOM),
    "wide": PRESETS["wide"],
}


@pytest.mark.parametrize(("config", "name"), paired(RECTANGULAR, ENCODERS))
def test_arrays_that_are_not_square(config: str, name: str, tmp_path: Path) -> None:
    """All products run on the accelerator, whether or not their columns fill entries of inp and have zero points."""
    encoder, _, signed = ENCODERS[name]
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed, True)
    program = celosia.compile(path, config=RECTANGULAR[config])
    assert program.macs_accelerator == program.macs_total
    x = sample(encoder.shape, 7)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "functional").run({"x": x})
    np.testing.assert_array_equal(result.outputs["y"], expected)


@pytest.mark.parametrize("zero", [128, 131])
def test_operands_of_the_host_whose_columns_fill_no_block(zero: int) -> None:
    """The host arranges both operands. It may complement their bits only if zeros still fill the entries of wgt."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (uint8[1, 2, 5, 4] a, uint8[1, 2, 4, 6] b) => (uint8[1, 2, 5, 6] y)
        <float s = {{0.02}}, float t = {{0.05}}, uint8 none = {{0}}, uint8 z = {{{zero}}}>
        {{ y = QLinearMatMul(a, s, none, b, s, z, t, z) }}"""
    model = onnx.parser.parse_model(text)
    program = celosia.compile(model, config=RECTANGULAR["8x4"], place={"*": "accelerator"})
    assert program.macs_accelerator == program.macs_total
    rng = np.random.default_rng(1)
    feed = {"a": rng.integers(0, 256, (1, 2, 5, 4), np.uint8), "b": rng.integers(0, 256, (1, 2, 4, 6), np.uint8)}
    (expected,) = opened(model, int8=True).run(None, feed)
    np.testing.assert_array_equal(celosia.Runtime(program, "functional").run(feed).outputs["y"], expected)


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("config", "signed"),
    some(
        [("16x8, spread", True), ("8x4", False), ("4x8", False), ("8x4, softmax", True)],
        [("16x8, spread", True), ("4x8", False), ("8x4, softmax", True)],
    ),
)
def test_rectangular_arrays_on_the_rtl(config: str, signed: bool, tmp_path: Path) -> None:
    """LOAD brings pieces of entries of wgt, from several channel groups, and pads the last entry."""
    encoder = Encoder(11, 2, 8, 12)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed)
    program = celosia.compile(path, config=RECTANGULAR[config])
    x = sample(encoder.shape, 3)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "rtl").run({"x": x})
    np.testing.assert_array_equal(result.outputs["y"], expected)
    timed = celosia.Runtime(program, "timed").run({"x": x}).report["cycles"]
    assert timed == pytest.approx(result.report["cycles"], rel=0.05)


@pytest.mark.rtl
def test_attention_on_the_rtl(tmp_path: Path) -> None:
    """The RTL pads entries of wgt, and loads entries that the layer before has stored."""
    encoder = Encoder(10, 3, 4, 12)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed=False)
    program = celosia.compile(path, config="tiny")
    x = sample(encoder.shape, 3)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "rtl").run({"x": x})
    np.testing.assert_array_equal(result.outputs["y"], expected)
    timed = celosia.Runtime(program, "timed").run({"x": x}).report["cycles"]
    assert timed == pytest.approx(result.report["cycles"], rel=0.05)


def test_all_products_are_the_accelerators(tmp_path: Path) -> None:
    """The accelerator computes all products; heads and transposed keys are views.

    Only V is copied through the host, which computes the softmax.
    """
    encoder = Encoder(32, 4, 16, 64)
    program = celosia.compile(quantised(encoder.model(), encoder.shape, tmp_path, signed=True), config="pynq")
    places = Counter((row["op"], row["place"]) for row in program.placements)
    assert places["QLinearMatMul", "accelerator"] == 8
    assert places["Reshape", "free"] == places["Transpose", "free"] == 4
    layers = [layer for launch in program.launches for layer in launch.layers]
    assert sum(layer.op == "ActivationProduct" for layer in layers) == 2 * encoder.heads
    tokens, channels = encoder.tokens, encoder.channels
    products = 2 * tokens * channels * (2 * channels + encoder.wide + tokens)
    assert sum(layer.macs for layer in layers) == products
    assert len(program.launches) == 3


@pytest.mark.parametrize(("tokens", "launches"), some([(32, 3), (21, 4)], [(21, 4)]))
def test_what_celosia_quantises(tokens: int, launches: int, tmp_path: Path) -> None:
    """An encoder that `quantize` has quantised runs on the accelerator, with biases in its products."""
    encoder = Encoder(tokens, 2, 16, 48)
    onnx.save(encoder.model(), tmp_path / "float.onnx")
    samples = np.concatenate([sample(encoder.shape, seed) for seed in range(3)])
    report = quantize(tmp_path / "float.onnx", {"x": samples}, tmp_path / "int8.onnx")
    assert report["accelerator"]["macs_accelerator"] == report["accelerator"]["macs_total"]
    program = celosia.compile(tmp_path / "int8.onnx")
    assert len(program.launches) == launches
    x = sample(encoder.shape, 7)
    (expected,) = opened(tmp_path / "int8.onnx", int8=True).run(None, {"x": x})
    np.testing.assert_array_equal(celosia.Runtime(program, "functional").run({"x": x}).outputs["y"], expected)


@pytest.mark.parametrize(
    ("config", "reason"),
    [(Config(batch=2, block_in=4, block_out=4), "batch = 1"), (Config(block_in=4, block_out=4), "")],
)
def test_why_products_stay_on_the_cpu(config: Config, reason: str, tmp_path: Path) -> None:
    encoder = Encoder(16, 2, 16, 32)
    program = celosia.compile(quantised(encoder.model(), encoder.shape, tmp_path, signed=True), config=config)
    reasons = [row["reason"] for row in program.placements if (row["op"], row["place"]) == ("QLinearMatMul", "cpu")]
    assert len(reasons) == (2 if reason else 0)
    assert all(reason in each for each in reasons)


PRODUCTS = """
<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
g (uint8[1, 2, 5, 8] a, uint8[1, 2, 8, {columns}] b, uint8[1, 2, 1, 1] c) => (uint8[{dims}] y)
<float s = {{0.02}}, float t = {{0.2}}, uint8 z = {{120}}, uint8 u = {{131}}, int64[3] flat = {{1, 5, {all}}}>
{{ p = QLinearMatMul(a, s, z, b, s, u, t, z)
   {rest} }}
"""
USES = {
    "heads of whole groups": (
        8, "q = Transpose<perm = [0, 2, 1, 3]>(p) r = Reshape(q, flat) y = SIGMOID(r, t, z, s, u)",
    ),
    "heads with channels between them": (
        6, "q = Transpose<perm = [0, 2, 1, 3]>(p) r = Reshape(q, flat) y = SIGMOID(r, t, z, s, u)",
    ),
    "heads side by side": (6, "q = Transpose<perm = [0, 2, 1, 3]>(p) y = SIGMOID(q, t, z, s, u)"),
    "columns for rows": (5, "q = Transpose<perm = [0, 1, 3, 2]>(p) y = SIGMOID(q, t, z, s, u)"),
    "a factor for each head": (8, "y = com.microsoft.QLinearMul(p, t, z, c, t, z, t, u)"),
    "twice": (8, "q = SIGMOID(p, t, z, s, u) r = com.microsoft.QLinearAdd(q, s, u, p, t, z, t, z) y = Identity(r)"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "config"), paired(USES, ["tiny", "pynq"]))
def test_what_reads_products(name: str, config: str) -> None:
    """Elementwise operators read products, and views of them, without a copy."""
    columns, rest = USES[name]
    dims = {"heads side by side": "1, 5, 2, 6", "columns for rows": "1, 2, 5, 5"}.get(name, f"1, 2, 5, {columns}")
    dims = f"1, 5, {2 * columns}" if "flat" in rest else dims
    text = PRODUCTS.format(columns=columns, all=2 * columns, dims=dims, rest=rest)
    model = onnx.parser.parse_model(text.replace("SIGMOID", "com.microsoft.QLinearSigmoid"))
    random = np.random.default_rng(1)
    shapes = {"a": (1, 2, 5, 8), "b": (1, 2, 8, columns), "c": (1, 2, 1, 1)}
    feed = {key: random.integers(0, 256, shape).astype(np.uint8) for key, shape in shapes.items()}
    feed = {value.name: feed[value.name] for value in model.graph.input}
    (expected,) = opened(model).run(None, feed)
    program = celosia.compile(model, config=config)
    assert ("QLinearMatMul", "accelerator") in {(row["op"], row["place"]) for row in program.placements}
    np.testing.assert_array_equal(celosia.Runtime(program, "functional").run(feed).outputs["y"], expected)


SHAPES = {
    "rows": ((2, 5, 7), lambda x: x.transpose(0, 2, 1)),
    "columns": ((2, 7, 5), lambda x: x),
    "heads": ((5, 2, 7), lambda x: x.transpose(1, 2, 0)),
}
"""The shape of two matrices of five rows and seven columns, and how they become [matrix, column, row]."""


@pytest.mark.parametrize("fold", SHAPES)
@pytest.mark.parametrize("inverted", [False, True])
def test_matrices_are_arranged_and_restored(fold: str, inverted: bool) -> None:
    shape, moved = SHAPES[fold]
    x = np.arange(70, dtype=np.int8).reshape(shape)
    form = FormInfo((1, 2 * 8, 1, 6), fold, pad=-9, inverted=inverted)
    arranged = form.arrange(x)
    assert arranged.shape == form.dims
    arranged = ~arranged if inverted else arranged
    matrices = arranged.reshape(2, 8, 6)
    np.testing.assert_array_equal(matrices[:, :7, :5], moved(x))
    assert (matrices[:, 7:] == -9).all()
    np.testing.assert_array_equal(form.restore(arranged, shape), x)
