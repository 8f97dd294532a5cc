"""`celosia quantize --smooth` keeps the float model's results, and int8 loses less if a few channels are large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.decoders import DecoderNetwork
from numpy.typing import NDArray
from typer.testing import CliRunner

import celosia
from celosia.driver.cli import app
from celosia.driver.quantize.quantize import QuantizeError
from celosia.driver.quantize.smooth import smooth

Array = NDArray[Any]
LARGE = 50
WIDTH = 32

ENCODER = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 8, 32] x) => (float[1, 8, 32] y, float[1, 8, 32] kept)
{
    n = LayerNormalization<axis = -1>(x, gamma, beta)
    q = MatMul(n, wq)
    k = MatMul(n, wk)
    qk = Add(q, k)
    rows = Reshape(qk, two)
    up = Gemm<transB = 1>(rows, wu, bu)
    active = Relu(up)
    down = MatMul(active, wd)
    gate = Sigmoid(down)
    third = MatMul(rows, wu)
    gated = Mul(gate, third)
    narrow = MatMul(gated, wd)
    back = Reshape(narrow, three)
    m = LayerNormalization<axis = -1>(back, gamma, beta)
    p = MatMul(m, wq)
    y = Add(p, m)
    kept = LayerNormalization<axis = -1>(back, gamma)
    unused = MatMul(kept, wq)
}"""
"""Places: n, active, gated. None are: rows, made of two products; m, read by a sum; kept, which comes out."""


def encoder(larger: float = LARGE) -> onnx.ModelProto:
    """Return an encoder in which three channels of the norms are larger, and the weights that read them smaller."""
    random, model = np.random.default_rng(0), onnx.parser.parse_model(ENCODER)
    large = np.where(np.arange(WIDTH) % 11 == 3, larger, 1)
    arrays = {
        "gamma": large * random.uniform(0.5, 1.5, WIDTH), "beta": 0.1 * large, "bu": random.normal(size=WIDTH),
        "wu": random.normal(size=(WIDTH, WIDTH)) / 6, "wd": random.normal(size=(WIDTH, WIDTH)) / 6,
        **{name: random.normal(size=(WIDTH, WIDTH)) / large[:, None] / 6 for name in ("wq", "wk")},
    }  # fmt: skip
    constants = {name: array.astype(np.float32) for name, array in arrays.items()}
    constants |= {"two": np.array([-1, WIDTH]), "three": np.array([1, 8, WIDTH])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def samples(count: int = 4) -> list[dict[str, Array]]:
    return [{"x": np.random.default_rng(k).normal(size=(1, 8, WIDTH)).astype(np.float32)} for k in range(count)]


@pytest.mark.parametrize("alpha", [0.5, "auto"])
def test_floats_stay_what_they_are(alpha: float | str) -> None:
    """Smoothing by powers of two keeps the float outputs bit by bit; shared constants stay unchanged."""
    from oracle import opened

    model, changed = encoder(), encoder()
    found = smooth(changed, samples(), alpha, symmetric=True, per_channel=True)
    assert found["places"] == 3 and "n" in {each["tensor"] for each in found["changed"]}
    assert changed.SerializeToString() != model.SerializeToString()
    for sample in samples():
        for a, b in zip(*(opened(each, optimised=False).run(None, sample) for each in (model, changed))):
            np.testing.assert_array_equal(a, b)


def test_factors_are_the_formulas() -> None:
    """Factors equal the formula's, computed independently, up to the rounding to a power of two."""
    from oracle import opened

    model, changed, given = encoder(), encoder(), samples()
    asked = encoder()
    asked.graph.output.append(onnx.ValueInfoProto(name="n"))
    on, alpha = opened(asked, optimised=False), 0.6
    largest = np.max([np.abs(on.run(["n"], sample)[0]).max((0, 1)) for sample in given], axis=0)
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    heaviest = np.maximum(*(np.abs(arrays[name]).max(1) for name in ("wq", "wk")))
    expected = np.log2(largest**alpha / heaviest ** (1 - alpha))
    smooth(changed, given, alpha, symmetric=True, per_channel=True)
    norm = changed.graph.node[0]
    gamma = next(each for each in changed.graph.initializer if each.name == norm.input[1])
    found = np.log2(arrays["gamma"] / onnx.numpy_helper.to_array(gamma))
    np.testing.assert_allclose(found, np.rint(found), atol=1e-6)
    offset = found - expected  # the median is taken off
    assert np.abs(offset - np.median(offset)).max() <= 1


def test_what_is_alike_is_left_alone() -> None:
    model = encoder(larger=1)
    before = model.SerializeToString()
    assert not smooth(model, samples(), "auto", symmetric=True, per_channel=True)["changed"]
    assert model.SerializeToString() == before


@pytest.mark.parametrize("operators", ["products", "all"])
def test_an_encoder_loses_less(tmp_path: Path, operators: str) -> None:
    source, made, options = tmp_path / "float.onnx", tmp_path / "int8.onnx", {"operators": operators, "config": "tiny"}
    onnx.save(encoder(), source)
    given: dict[str, Any] = {"x": np.stack([sample["x"] for sample in samples(8)])}
    report = celosia.quantize(source, given, made, smooth="auto", **options)
    without, smoothed = (report[key][0]["sqnr_db"] for key in ("outputs_without_smoothing", "outputs"))
    assert smoothed > without + 3
    plain = celosia.quantize(source, given, made, **options)
    assert plain["outputs"] == report["outputs_without_smoothing"] and plain["smooth"] is None


def test_a_decoder_in_bytes_loses_less(tmp_path: Path) -> None:
    """A decoder in bytes loses less with smoothing, with masks, norms without offset, gates and rotary positions."""
    network = DecoderNetwork(heads=2, groups=1, inner=16, wide=32, layers=1, vocabulary=20, most=32, rotary=True)
    model = network.model()
    norms = {node.input[1] for node in model.graph.node if node.op_type == network.norm}
    read = {node.output[0] for node in model.graph.node if node.op_type == network.norm}
    rows = {node.input[1] for node in model.graph.node if node.op_type == "MatMul" and node.input[0] in read}
    for tensor in model.graph.initializer:
        if tensor.name in norms | rows:
            array = np.array(onnx.numpy_helper.to_array(tensor))
            array[5] *= LARGE if tensor.name in norms else 1 / LARGE
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, tmp_path / "float.onnx")
    np.savez(tmp_path / "samples.npz", input_ids=np.random.default_rng(0).integers(0, 20, (6, 12)))
    line = ["quantize", "float.onnx", "--calibration", "samples.npz", "--operators", "all", "--smooth", "auto"]
    line = [str(tmp_path / part) if part.endswith((".onnx", ".npz")) else part for part in line]
    report = tmp_path / "report.json"
    done = CliRunner().invoke(app, [*line, "-o", str(tmp_path / "int8.onnx"), "--report", str(report)])
    assert done.exit_code == 0, done.output
    assert "The same without smoothing" in done.stdout and "3 of 4 places" in done.stdout
    found = json.loads(report.read_text())
    logits = [next(row for row in found[key] if row["name"] == "logits") for key in
              ("outputs_without_smoothing", "outputs")]  # fmt: skip
    assert logits[1]["sqnr_db"] > logits[0]["sqnr_db"] + 3


def test_bad_input(tmp_path: Path) -> None:
    text = "g (float[1, 4] x) => (float[1, 4] y) <float[4, 4] w = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}>"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text} {{y = MatMul(x, w)}}')
    onnx.save(model, tmp_path / "float.onnx")
    given = {"x": np.ones((4, 4), np.float32)}
    with pytest.raises(QuantizeError, match=r"nothing to smooth.*--smooth"):
        celosia.quantize(tmp_path / "float.onnx", given, tmp_path / "int8.onnx", smooth="auto")
    for wrong in ("much", 2, "nan"):
        with pytest.raises(ValueError, match=rf"auto.*0 to 1.*{wrong!r}"):
            celosia.quantize(tmp_path / "float.onnx", given, tmp_path / "int8.onnx", smooth=wrong)
    line = ["quantize", str(tmp_path / "float.onnx"), "--calibration", "x.npz", "-o", str(tmp_path / "o.onnx")]
    done = CliRunner().invoke(app, [*line, "--smooth", "2"])
    assert done.exit_code == 2 and "number from 0 to 1" in done.output
    assert not (tmp_path / "int8.onnx").exists()
