"""`celosia quantize` converts a float network to int8, whose Program gives onnxruntime's bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program.safe_files import OutputError
from celosia.driver.cli import app
from celosia.driver.cli.errors import NO_TOOL, WRONG_INPUT
from celosia.driver.data.calibration import CalibrationError
from celosia.driver.quantize.quantize import MissingLibrary, QuantizeError

Array = NDArray[Any]


def network(batch: int | str = "batch", opset: int = 17, normalise: bool = False) -> onnx.ModelProto:
    """Return a network with convolutions, a residual, pooling and a classifier.

    It maps `image` [batch, 3, 16, 16] to `logits` [batch, 10].
    """
    rng = np.random.default_rng(0)
    constants = {
        "w1": rng.normal(0, 0.2, (8, 3, 3, 3)), "b1": rng.normal(0, 0.1, 8), "w2": rng.normal(0, 0.1, (8, 8, 3, 3)),
        "w3": rng.normal(0, 0.4, (10, 8)), "b3": np.zeros(10), "scale": rng.uniform(0.5, 2, 8), "bias": np.zeros(8),
        "mean": rng.normal(0, 0.1, 8), "var": rng.uniform(0.5, 2, 8),
    }  # fmt: skip
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "w1", "b1"], ["c1"], "conv1", pads=[1] * 4),
        node("BatchNormalization", ["c1", "scale", "bias", "mean", "var"], ["n1"], "norm1")
        if normalise
        else node("Identity", ["c1"], ["n1"], "norm1"),
        node("Relu", ["n1"], ["r1"], "relu1"),
        node("Conv", ["r1", "w2"], ["c2"], "conv2", pads=[1] * 4),
        node("Add", ["r1", "c2"], ["sum"], "add"),
        node("Relu", ["sum"], ["r2"], "relu2"),
        node("GlobalAveragePool", ["r2"], ["pooled"], "pool"),
        node("Flatten", ["pooled"], ["features"], "flatten"),
        node("Gemm", ["features", "w3", "b3"], ["logits"], "dense", transB=1),
    ]
    used = {name for each in nodes for name in each.input}
    graph = helper.make_graph(
        nodes, "network", [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, 16, 16])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 10])],
        [numpy_helper.from_array(a.astype(np.float32), name) for name, a in constants.items() if name in used],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def images(count: int = 8) -> Array:
    return np.random.default_rng(1).normal(size=(count, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(network(), tmp_path / "float.onnx")
    return tmp_path / "float.onnx"


def assert_exact(path: Path, inputs: Array) -> None:
    """Assert that the Program's outputs equal onnxruntime's bytes, computed in integers."""
    from oracle import opened

    session = opened(path, int8=True)
    program = celosia.compile(path, "tiny")
    assert program.macs_accelerator == program.macs_total > 0
    runtime = celosia.Runtime(program)
    for image in inputs:
        got = runtime.run({"image": image[None]}).outputs["logits"]
        np.testing.assert_array_equal(got, session.run(None, {"image": image[None]})[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_channel": False, "method": "percentile"},
        {"activations": "uint8", "method": "entropy"},
        {"symmetric": True},
    ],
    ids=["default", "per-tensor", "uint8", "symmetric"],
)
def test_the_result_is_exact_on_the_accelerator(tmp_path: Path, model: Path, options: dict[str, Any]) -> None:
    report = celosia.quantize(model, {"image": images()}, tmp_path / "int8.onnx", config="tiny", **options)
    assert_exact(tmp_path / "int8.onnx", images(3))
    quantised = onnx.load(tmp_path / "int8.onnx")
    scales = [numpy_helper.to_array(t) for t in quantised.graph.initializer if t.name == "w1_scale"]
    assert scales[0].size == (1 if "per_channel" in options else 8)
    kinds = {t.data_type for t in quantised.graph.initializer if t.name.endswith("zero_point") and "image" in t.name}
    assert kinds == {TensorProto.UINT8 if options.get("activations") else TensorProto.INT8}
    zeros = [numpy_helper.to_array(t) for t in quantised.graph.initializer if t.name.endswith("zero_point")]
    assert any(each.any() for each in zeros) != options.get("symmetric", False)
    assert report["accelerator"]["macs_accelerator"] == report["accelerator"]["macs_total"]


def test_what_runs_is_quantised_too(tmp_path: Path) -> None:
    """A model in the style of old exporters is quantised: sizes of -1, constants as inputs, two opsets, a wrong
    declaration."""
    old = network(opset=13)
    old.ir_version = 3
    old.opset_import.insert(0, helper.make_opsetid("ai.onnx", 11))
    old.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    old.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    for tensor in old.graph.initializer:
        old.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    old.graph.value_info.append(helper.make_tensor_value_info("w1", TensorProto.FLOAT, [9]))
    old.graph.value_info.append(helper.make_tensor_value_info("r1", TensorProto.FLOAT, [1, 8, 99, 16]))
    onnx.save(old, tmp_path / "float.onnx")
    report = celosia.quantize(tmp_path / "float.onnx", {"image": images()}, tmp_path / "int8.onnx", config="tiny")
    assert report["outputs"][0]["sqnr_db"] > 20
    ran = celosia.Runtime(tmp_path / "float.onnx", config="tiny").run({"image": images(2)}).outputs["logits"]
    assert ran.shape == (2, 10)


def test_the_report_measures(tmp_path: Path, model: Path) -> None:
    """The report compares both models under onnxruntime, on samples that were not used for calibration."""
    from oracle import opened

    samples = images(20)
    report = celosia.quantize(model, {"image": samples}, tmp_path / "int8.onnx", config="tiny")
    assert (report["samples_calibration"], report["samples_measured"], report["held_out"]) == (16, 4, True)
    found = []
    for path in (model, tmp_path / "int8.onnx"):
        session = opened(path, int8=True)
        found.append(np.concatenate([session.run(None, {"image": x[None]})[0] for x in samples[4::5]]).astype(float))
    error = np.abs(found[0] - found[1])
    [row] = report["outputs"]
    assert row["max_abs"] == pytest.approx(error.max()) and row["mean_abs"] == pytest.approx(error.mean())
    assert row["sqnr_db"] == pytest.approx(10 * np.log10((found[0] ** 2).sum() / (error**2).sum()))
    assert row["sqnr_db"] > 25
    assert row["top1_agreement"] == np.mean(found[0].argmax(1) == found[1].argmax(1))
    names = {each["name"]: each["quantised"] for each in report["operators"]}
    assert names["conv1"] and names["conv2"] and names["dense"]


def test_a_poor_result_says_which_layer_and_what_to_try(tmp_path: Path, model: Path) -> None:
    """The report names the layer with a large error and advice: here one channel has weights 1000 times larger."""
    proto = onnx.load(model)
    (weights,) = (tensor for tensor in proto.graph.initializer if tensor.name == "w2")
    array = numpy_helper.to_array(weights).copy()
    array[0] *= 1000
    array[1:] *= 3
    weights.CopyFrom(numpy_helper.from_array(array, "w2"))
    (head,) = (tensor for tensor in proto.graph.initializer if tensor.name == "w3")
    silent = numpy_helper.to_array(head).copy()
    silent[:, 0] = 0  # which says nothing of the large channel
    head.CopyFrom(numpy_helper.from_array(silent, "w3"))
    onnx.save(proto, tmp_path / "bad.onnx")
    np.savez(tmp_path / "c.npz", image=images(40))
    line = ["quantize", str(tmp_path / "bad.onnx"), "--calibration", str(tmp_path / "c.npz"), "--per-tensor"]
    line += ["-o", str(tmp_path / "o.onnx"), "--config", "tiny", "--report", str(tmp_path / "r.json")]
    result = CliRunner().invoke(app, line)
    report = json.loads((tmp_path / "r.json").read_text())
    assert result.exit_code == 0 and report["outputs"][0]["sqnr_db"] < 20
    told = " ".join(result.stdout.split())
    assert "The int8 model is far from the float one" in told
    assert "1. leave --per-tensor out" in told and "32 are few" in told and "--method percentile" in told
    assert "docs/pytorch.md" in told and f"--exclude {report['losing'][0]['name']}" in told
    line[1] = str(model)
    assert "is far from" not in CliRunner().invoke(app, line).stdout
    good = json.loads((tmp_path / "r.json").read_text())
    assert good["advice"] == [] == good["losing"]


def test_an_excluded_operator_stays_float(tmp_path: Path, model: Path) -> None:
    report = celosia.quantize(model, {"image": images()}, tmp_path / "out.onnx", exclude=["conv2"], config="tiny")
    row = next(each for each in report["operators"] if each["name"] == "conv2")
    assert not row["quantised"] and "excluded" in row["reason"]
    assert report["accelerator"]["macs_accelerator"] < report["accelerator"]["macs_total"]


def test_an_old_opset_and_a_normalisation(tmp_path: Path) -> None:
    """A model of an old opset is upgraded for per-channel scales, and a batch normalisation is folded."""
    onnx.save(network(batch=1, opset=11, normalise=True), tmp_path / "float.onnx")
    report = celosia.quantize(tmp_path / "float.onnx", {"image": images()}, tmp_path / "int8.onnx", config="tiny")
    assert "BatchNormalization" not in {row["op"] for row in report["operators"]}
    assert_exact(tmp_path / "int8.onnx", images(2))


# Samples --------------------------------------------------------------------------------------------------------


def test_a_bias_of_two_convolutions(tmp_path: Path) -> None:
    """A bias of two convolutions gets a new name. onnxruntime's quantiser names the copy of `b` `b2`, which may
    exist."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y)
        <float[2, 2, 1, 1] w = {1, 0.5, -0.5, 1}, float[2, 2, 1, 1] v = {0.5, 1, 1, 0}, float[2] b = {0.5, -0.25}>
        {
            a = Conv (x, w, b)
            b2 = Conv (x, v, b)
            negative = Neg (b2)
            y = Add (a, negative)
        }
    """)
    onnx.save(model, tmp_path / "float.onnx")
    samples = np.random.default_rng(0).normal(size=(8, 2, 4, 4)).astype(np.float32)
    report = celosia.quantize(tmp_path / "float.onnx", {"x": samples}, tmp_path / "int8.onnx", config="tiny")
    assert report["accelerator"]["macs_accelerator"] == 2 * 4 * 16
    assert report["outputs"][0]["sqnr_db"] > 25


def test_a_sum_of_several_tensors(tmp_path: Path) -> None:
    """A Sum is quantised as several Adds, unless it is excluded. onnxruntime's quantiser leaves it in floats."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y)
        <float[2, 2, 1, 1] w = {1, 0.5, -0.5, 1}, float[2, 2, 1, 1] v = {0.5, 1, 1, 0}>
        {
            a = Conv (x, w)
            b = Conv (x, v)
            [total] y = Sum (a, b, x)
        }
    """)
    onnx.save(model, tmp_path / "float.onnx")
    samples = np.random.default_rng(0).normal(size=(8, 2, 4, 4)).astype(np.float32)
    report = celosia.quantize(tmp_path / "float.onnx", {"x": samples}, tmp_path / "int8.onnx", config="tiny")
    assert report["outputs"][0]["sqnr_db"] > 25
    assert {row["op"] for row in report["accelerator"]["cpu"]} <= {"QuantizeLinear", "DequantizeLinear"}
    celosia.quantize(tmp_path / "float.onnx", {"x": samples}, tmp_path / "float_sum.onnx", exclude=["total"])
    assert "Sum" in [node.op_type for node in onnx.load(tmp_path / "float_sum.onnx").graph.node]


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("constants", ["initializers", "nodes"])
def test_products_of_the_inputs_of_recurrent_layers(op: str, constants: str, tmp_path: Path) -> None:
    """One MatMul for all steps of a recurrent layer runs on the accelerator, if the option asks for it."""
    rng = np.random.default_rng(0)
    gates, hidden, inputs = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], 8, 24
    arrays = {"w": (2, gates * hidden, inputs), "r": (2, gates * hidden, hidden), "b": (2, 2 * gates * hidden)}
    weights = {name: (rng.standard_normal(shape) / 4).astype(np.float32) for name, shape in arrays.items()}
    nodes = [helper.make_node(op, ["x", "w", "r", "b"], ["y"], "layer", hidden_size=hidden, direction="bidirectional")]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [12, 1, inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [12, 2, 1, hidden])],
    )  # fmt: skip
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    if constants == "initializers":
        graph.initializer.extend(tensors)
    else:
        nodes = [*(helper.make_node("Constant", [], [t.name], value=t) for t in tensors), *nodes]
        del graph.node[:]
        graph.node.extend(nodes)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "float.onnx")
    samples = {"x": rng.standard_normal((8, 12, 1, inputs)).astype(np.float32)}
    quantised = tmp_path / "int8.onnx"
    report = celosia.quantize(tmp_path / "float.onnx", samples, quantised, config="tiny", recurrent=True)
    assert report["outputs"][0]["sqnr_db"] > 25
    share = report["accelerator"]
    assert share["macs_accelerator"] == 12 * weights["w"].size
    assert share["macs_total"] == 12 * (weights["w"].size + weights["r"].size)
    row = celosia.compare(quantised, {"x": samples["x"][0]}, config="tiny")
    assert row["different"] == 0
    with pytest.raises(QuantizeError, match="no operator"):
        celosia.quantize(tmp_path / "float.onnx", samples, quantised, config="tiny")
    with pytest.raises(QuantizeError, match="no operator"):
        celosia.quantize(tmp_path / "float.onnx", samples, quantised, config="tiny", recurrent=True, exclude=["layer"])


@pytest.mark.parametrize("sizes", [(12,), (6, 6)])
def test_a_normalisation_that_no_convolution_takes_in(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """A BatchNormalization behind a Relu becomes a depthwise convolution, but where it is excluded."""
    rng, shape = np.random.default_rng(0), [1, 8, *sizes]
    arrays = {
        "w": rng.normal(0, 0.4, (8, 8, *(1,) * len(sizes))), "scale": rng.uniform(-2, 2, 8),
        "bias": rng.normal(0, 1, 8), "mean": rng.normal(0, 0.3, 8), "var": rng.uniform(0.1, 2, 8),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "first"), helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("BatchNormalization", ["r", "scale", "bias", "mean", "var"], ["n"], "norm"),
        helper.make_node("Relu", ["n"], ["a"]), helper.make_node("Conv", ["a", "w"], ["d"], "second"),
        helper.make_node("Add", ["d", "n"], ["y"], "sum"),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "float.onnx")
    samples = {"x": rng.standard_normal((8, *shape)).astype(np.float32)}
    report = celosia.quantize(tmp_path / "float.onnx", samples, tmp_path / "int8.onnx", config="tiny")
    assert report["outputs"][0]["sqnr_db"] > 25
    assert {row["op"] for row in report["accelerator"]["cpu"]} <= {"QuantizeLinear", "DequantizeLinear"}
    assert celosia.compare(tmp_path / "int8.onnx", {"x": samples["x"][0]}, config="tiny")["different"] == 0
    celosia.quantize(tmp_path / "float.onnx", samples, tmp_path / "float_norm.onnx", exclude=["norm"], config="tiny")
    kinds = [node.op_type for node in onnx.load(tmp_path / "float_norm.onnx").graph.node]
    assert "BatchNormalization" in kinds


@pytest.mark.parametrize(
    ("attributes", "becomes_conv"),
    [
        ("kernel_shape = [2, 2], strides = [2, 2]", True), ("kernel_shape = [3, 2], pads = [1, 0, 1, 1], "
        "count_include_pad = 1", True), ("kernel_shape = [3, 3], pads = [1, 1, 1, 1]", False),
        ("kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1", False),
        ('kernel_shape = [3, 3], auto_pad = "SAME_UPPER"', False),
    ],
)  # fmt: skip
def test_averages_become_convolutions(attributes: str, becomes_conv: bool, tmp_path: Path) -> None:
    """A convolution is exact on the accelerator; averages of windows that are cut off stay averages."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[1, 4, 9, 9] x) => (float[1, 4, N, M] y)
        <float[4, 4, 1, 1] w = {{1, 0.5, 0, 0, 0, 1, 0, 0, 0, 0, -1, 0, 0, 0.25, 0, 1}}>
        {{
            c = Conv (x, w)
            y = AveragePool <{attributes}> (c)
        }}
    """)
    onnx.save(model, tmp_path / "float.onnx")
    samples = np.random.default_rng(0).normal(size=(8, 4, 9, 9)).astype(np.float32)
    report = celosia.quantize(tmp_path / "float.onnx", {"x": samples}, tmp_path / "int8.onnx", config="tiny")
    kinds = [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]
    assert ("AveragePool" not in kinds) == becomes_conv and report["outputs"][0]["sqnr_db"] > 25
    if becomes_conv:
        assert {row["op"] for row in report["accelerator"]["cpu"]} <= {"QuantizeLinear", "DequantizeLinear"}
        assert celosia.compare(tmp_path / "int8.onnx", {"x": samples[:1]}, config="tiny")["different"] == 0


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceSum"])
@pytest.mark.parametrize("sizes", ["20", "6, 7"])
@pytest.mark.parametrize("keep", [0, 1])
def test_means_and_sums_of_pixels(op: str, sizes: str, keep: int, tmp_path: Path) -> None:
    """Squeeze-and-excitation of sequences and images, whose mean or sum is a reduction, is exact on the accelerator."""
    rank = 2 + sizes.count(",") + 1
    spatial, ones = list(range(2, rank)), ", 1" * (rank - 2)
    pooled = "p" if keep else "u"
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[1, 4, {sizes}] x) => (float[1, 4, {sizes}] y)
        <float[4, 4{ones}] w = {{1, 0.5, 0, 0, 0, 1, 0, 0, 0, 0, -1, 0, 0, 0.25, 0, 1}},
         int64[{rank - 2}] axes = {{{", ".join(map(str, spatial))}}}, int64[{rank}] size = {{1, 4{ones}}}>
        {{
            c = Conv (x, w)
            p = {op} <keepdims = {keep}> (c, axes)
            u = Reshape (p, size)
            d = Conv ({pooled}, w)
            s = Sigmoid (d)
            y = Mul (c, s)
        }}
    """)
    onnx.save(model, tmp_path / "float.onnx")
    samples = np.random.default_rng(0).normal(size=(8, 4, *map(int, sizes.split(",")))).astype(np.float32)
    report = celosia.quantize(tmp_path / "float.onnx", {"x": samples}, tmp_path / "int8.onnx", config="tiny")
    assert report["outputs"][0]["sqnr_db"] > 25
    assert {row["op"] for row in report["accelerator"]["cpu"]} <= {"QuantizeLinear", "DequantizeLinear"}
    assert celosia.compare(tmp_path / "int8.onnx", {"x": samples[:1]}, config="tiny")["different"] == 0


def test_a_normalisation_of_rows_and_a_mean_of_channels(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[3, 4] x, float[1, 4, 5, 5] z) => (float[3, 4] y, float[1, 1, 5, 5] m)
        <float[4, 4] w = {1, 0.5, 0, 0, 0, 1, 0, 0, 0, 0, -1, 0, 0, 0.25, 0, 1}, int64[1] axes = {-3},
         float[4] a = {1, 2, -1, 0.5}, float[4] b = {0, 1, 0.5, -1}, float[4] v = {1, 2, 1, 0.25},
         float[4, 4, 1, 1] k = {1, 0.5, 0, 0, 0, 1, 0, 0, 0, 0, -1, 0, 0, 0.25, 0, 1}>
        {
            h = MatMul (x, w)
            r = Relu (h)
            n = BatchNormalization (r, a, b, b, v)
            y = MatMul (n, w)
            c = Conv (z, k)
            m = ReduceMean (c, axes)
        }
    """)
    onnx.save(model, tmp_path / "float.onnx")
    rng = np.random.default_rng(0)
    samples = {
        name: rng.normal(size=(8, *dims)).astype(np.float32) for name, dims in (("x", (3, 4)), ("z", (1, 4, 5, 5)))
    }
    report = celosia.quantize(tmp_path / "float.onnx", samples, tmp_path / "int8.onnx", config="tiny")
    assert all(row["sqnr_db"] > 25 for row in report["outputs"])
    assert {row["op"] for row in report["accelerator"]["cpu"]} <= {"QuantizeLinear", "DequantizeLinear", "Reshape"}
    feed = {name: array[0] for name, array in samples.items()}
    assert celosia.compare(tmp_path / "int8.onnx", feed, config="tiny")["different"] == 0


def test_the_difference_of_two_tensors(tmp_path: Path) -> None:
    """onnxruntime has no quantised Sub; a sum with the negated tensor is exact on the accelerator."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y)
        <float[2, 2, 1, 1] w = {1, 0.5, -0.5, 1}, float[2, 2, 1, 1] v = {0.5, 1, 1, 0}>
        {
            a = Conv (x, w)
            b = Conv (x, v)
            [difference] d = Sub (a, b)
            e = Abs (d)
            y = Conv (e, v)
        }
    """)
    onnx.save(model, tmp_path / "float.onnx")
    samples = np.random.default_rng(0).normal(size=(8, 2, 4, 4)).astype(np.float32)
    report = celosia.quantize(tmp_path / "float.onnx", {"x": samples}, tmp_path / "int8.onnx", config="tiny")
    assert report["outputs"][0]["sqnr_db"] > 25
    assert {row["op"] for row in report["accelerator"]["cpu"]} <= {"QuantizeLinear", "DequantizeLinear"}
    assert celosia.compare(tmp_path / "int8.onnx", {"x": samples[:1]}, config="tiny")["different"] == 0


def test_a_tensor_whose_rank_onnxruntime_does_not_know(tmp_path: Path) -> None:
    """The result of a Scaler, whose shape onnxruntime does not infer, is not taken for a scalar."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
        g (float[1, 4] x) => (float[1, 4] y)
        <float[4, 4] w = {1, 0.5, 0, 0, 0, 1, 0, 0, 0, 0, -1, 0, 0, 0.25, 0, 1}>
        {
            scaled = ai.onnx.ml.Scaler <offset = [0.5, 0.5, 0.5, 0.5], scale = [2.0, 2.0, 2.0, 2.0]> (x)
            y = MatMul (scaled, w)
        }
    """)
    onnx.save(model, tmp_path / "float.onnx")
    samples = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    report = celosia.quantize(tmp_path / "float.onnx", {"x": samples}, tmp_path / "int8.onnx", config="tiny")
    assert report["outputs"][0]["sqnr_db"] > 25
    assert report["accelerator"]["macs_accelerator"] == 16


@pytest.mark.parametrize("shape, beta", [((10,), 2.0), ((1, 10), 1.0), ((), 0.5), ((6, 10), 1.0)])
def test_a_bias_of_any_shape_and_factor(shape: tuple[int, ...], beta: float, tmp_path: Path) -> None:
    """A Gemm's bias of any shape and factor is quantised; onnxruntime's quantiser only knows constant rows."""
    rng = np.random.default_rng(0)
    graph = onnx.parser.parse_graph(f"g (float[6, 8] x) => (float[6, 10] y) {{ y = Gemm<beta = {beta}>(x, w, b) }}")
    for name, array in {"w": rng.normal(size=(8, 10)), "b": rng.normal(size=shape) + 2}.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "f.onnx")
    samples = {"x": rng.normal(size=(4, 6, 8)).astype(np.float32)}
    report = celosia.quantize(tmp_path / "f.onnx", samples, tmp_path / "i.onnx", config="tiny")
    assert report["outputs"][0]["sqnr_db"] > 30
    assert report["accelerator"]["macs_accelerator"] == 6 * 8 * 10


def test_folders_and_archives_are_the_same_samples(tmp_path: Path, model: Path) -> None:
    """Samples as .npy with or without batch axis, as .npz or as one archive give the same model."""
    (tmp_path / "folder").mkdir()
    for k, image in enumerate(images(3)):
        if k == 2:
            np.savez(tmp_path / "folder" / f"{k}.npz", image=image[None])
        else:
            np.save(tmp_path / "folder" / f"{k}.npy", image if k else image[None])
    (tmp_path / "folder" / "README.txt").write_text("not a sample")
    np.savez(tmp_path / "rows.npz", image=images(3))
    results = []
    for name in ("folder", "rows.npz"):
        celosia.quantize(model, tmp_path / name, tmp_path / "out.onnx", config="tiny")
        results.append((tmp_path / "out.onnx").read_bytes())
    assert results[0] == results[1]


def test_images(tmp_path: Path, model: Path) -> None:
    """Pictures become arrays by the documented formula."""
    from PIL import Image

    (tmp_path / "pictures").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    for k, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / "pictures" / f"{k}.png")
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    arrays = (pixels.astype(np.float32) / 255 - np.float32(mean)) / np.float32(std)
    results = []
    for source in (tmp_path / "pictures", {"image": arrays.transpose(0, 3, 1, 2)}):
        celosia.quantize(model, source, tmp_path / "out.onnx", mean=mean, std=std, config="tiny")
        results.append((tmp_path / "out.onnx").read_bytes())
    assert results[0] == results[1]


def test_a_folder_for_each_class_is_as_good_as_one(tmp_path: Path, model: Path) -> None:
    """Folders of classes and archives with labels, as `celosia eval --data` takes them, are samples, too."""
    for name, folder in (("flat", "."), ("classes", "cat"), ("classes", "dog")):
        (tmp_path / name / folder).mkdir(parents=True)
    for k, image in enumerate(images(4)):
        np.save(tmp_path / "flat" / f"{k}.npy", image)
        np.save(tmp_path / "classes" / ("cat" if k < 2 else "dog") / f"{k}.npy", image)
    np.savez(tmp_path / "labelled.npz", image=images(4), labels=np.arange(4))
    results = []
    for name in ("flat", "classes", "labelled.npz"):
        celosia.quantize(model, tmp_path / name, tmp_path / "out.onnx", config="tiny")
        results.append((tmp_path / "out.onnx").read_bytes())
    assert results[0] == results[1] == results[2]


def test_what_is_done_to_images_is_said_once(tmp_path: Path, model: Path) -> None:
    from PIL import Image

    (tmp_path / "pictures").mkdir()
    for k in range(3):
        Image.fromarray(np.full((12, 20), 40 * k, np.uint8)).save(tmp_path / "pictures" / f"{k}.png")
    line = ["quantize", str(model), "--calibration", str(tmp_path / "pictures"), "-o", str(tmp_path / "out.onnx")]
    result = CliRunner().invoke(app, [*line, "--config", "tiny"])
    told = " ".join(result.stderr.split())
    assert result.exit_code == 0, told
    assert "0.png is resized to 16x16 from 20x12, which changes its proportions, and grey" in told
    assert told.count(".png") == 1
    assert ".png" not in CliRunner().invoke(app, [*line, "--quiet"]).stderr
    for k in range(3):
        Image.fromarray(np.full((16, 16, 3), 40 * k, np.uint8)).save(tmp_path / "pictures" / f"{k}.png")
    assert ".png" not in CliRunner().invoke(app, line).stderr


def test_an_image_in_a_folder_of_its_class_is_called_with_it(tmp_path: Path, model: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(np.full((12, 20, 3), 40, np.uint8)).save(tmp_path / "pictures" / name / "0.png")
    told: list[str] = []
    celosia.quantize(model, tmp_path / "pictures", tmp_path / "out.onnx", config="tiny", told=told.append)
    assert {each.split(" is resized")[0] for each in told} == {str(Path("cat", "0.png")), str(Path("dog", "0.png"))}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"picture": images()}, "no array 'image'"),
        ({"image": images(), "other": images()}, "no such input"),
        ({"image": images().astype(np.float64)}, r"image\[0\] is float64, the model takes float32"),
        ({"image": images()[:, :, :8]}, r"float32\[1, 3, 8, 16\], the model takes float32\[\?, 3, 16, 16\]"),
        ({"image": images(0)}, "no samples"),
        ({"image": np.float32(1)}, "no samples"),
        ({"image": np.where(np.arange(16) == 3, np.nan, images()).astype(np.float32)}, r"image\[0\] holds NaN"),
        ({"image": np.where(np.arange(8)[:, None, None, None] == 3, np.inf, images()).astype("f")}, r"image\[3\]"),
    ],
)
def test_samples_that_do_not_fit(tmp_path: Path, model: Path, arrays: dict[str, Array], words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        celosia.quantize(model, arrays, tmp_path / "out.onnx", config="tiny")
    assert not (tmp_path / "out.onnx").exists()


def test_sources_that_are_none(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.npz").write_bytes(b"PK\3\4 nothing")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"no picture")
    (tmp_path / "mixed").mkdir()
    np.save(tmp_path / "mixed" / "a.npy", images(1))
    np.save(tmp_path / "mixed" / "b.npy", np.repeat(images(1), 2, 0))
    np.save(tmp_path / "one.npy", images())
    for name, words in (
        ("empty", "holds no samples"), ("nowhere", "there is no"), ("broken.npz", "not an .npz"), ("one.npy", "single"),
        ("pictures", "cannot read the image"), ("mixed", r"b\.npy.*the model takes float32\[1, 3, 16, 16\]"),
    ):  # fmt: skip
        with pytest.raises(CalibrationError, match=words) as info:
            celosia.quantize(model, tmp_path / name, tmp_path / "out.onnx", config="tiny")
        assert "\n" not in str(info.value)


# Models that are refused ------------------------------------------------------------------------------------------


def shapeless(proto: onnx.ModelProto) -> None:
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")


def untyped(proto: onnx.ModelProto) -> None:
    proto.graph.output[0].ClearField("type")


def out_of_order(proto: onnx.ModelProto) -> None:
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def nameless(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        node.name = ""
    proto.graph.name = ""


@pytest.mark.parametrize("habit", [shapeless, untyped, out_of_order, nameless], ids=lambda habit: str(habit.__name__))
def test_models_as_exporters_leave_them(tmp_path: Path, habit: Callable[[onnx.ModelProto], None]) -> None:
    """A model with an exporter's habits is quantised to the same bytes as a plain one."""
    proto = network()
    habit(proto)
    onnx.save(proto, tmp_path / "float.onnx")
    onnx.save(network(), tmp_path / "plain.onnx")
    for name in ("float", "plain"):
        celosia.quantize(tmp_path / f"{name}.onnx", {"image": images()}, tmp_path / f"{name}-int8.onnx", config="tiny")
    assert_exact(tmp_path / "float-int8.onnx", images(2))
    feed = {"image": images(1)}
    results = [celosia.Runtime(tmp_path / f"{name}-int8.onnx", config="tiny").run(feed) for name in ("float", "plain")]
    np.testing.assert_array_equal(results[0].outputs["logits"], results[1].outputs["logits"])


def test_models_that_are_refused(tmp_path: Path, model: Path) -> None:
    samples = {"image": images()}
    celosia.quantize(model, samples, tmp_path / "int8.onnx", config="tiny")
    with pytest.raises(QuantizeError, match="quantised already"):
        celosia.quantize(tmp_path / "int8.onnx", samples, tmp_path / "out.onnx")
    with pytest.raises(OutputError, match="float model"):
        celosia.quantize(model, samples, model)
    with pytest.raises(ModelError, match="there is no model"):
        celosia.quantize(tmp_path / "nowhere.onnx", samples, tmp_path / "out.onnx")
    with pytest.raises(QuantizeError, match="'conv9' to exclude"):
        celosia.quantize(model, samples, tmp_path / "out.onnx", exclude=["conv9"])
    with pytest.raises(ValueError, match="minmax"):
        celosia.quantize(model, samples, tmp_path / "out.onnx", method="best")
    nothing = helper.make_graph(
        [helper.make_node("Erf", ["image"], ["y"], "erf")], "g", network().graph.input,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3, 16, 16])],
    )  # fmt: skip
    onnx.save(helper.make_model(nothing, opset_imports=network().opset_import, ir_version=8), tmp_path / "e.onnx")
    with pytest.raises(QuantizeError, match="no operator"):
        celosia.quantize(tmp_path / "e.onnx", samples, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_the_command(tmp_path: Path, model: Path) -> None:
    np.savez(tmp_path / "samples.npz", image=images())
    out, report = str(tmp_path / "int8.onnx"), str(tmp_path / "report.json")
    command = ["quantize", str(model), "--calibration", str(tmp_path / "samples.npz"), "-o"]
    done = CliRunner().invoke(app, [*command, out, "--report", report, "--samples", "4"])
    assert done.exit_code == 0, done.output
    assert "SQNR" in done.output and "100.0% of" in done.output
    assert json.loads(Path(report).read_text())["samples_calibration"] == 4
    refused = CliRunner().invoke(app, [*command, str(model)])
    assert refused.exit_code == WRONG_INPUT and "it is an input, too" in refused.output


def test_without_onnxruntime(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization.shape_inference", None)
    with pytest.raises(MissingLibrary, match=r"pip install 'celosia\[quantize\]'"):
        celosia.quantize(model, {"image": images()}, tmp_path / "out.onnx")
    done = CliRunner().invoke(app, ["quantize", str(model), "--calibration", str(tmp_path), "-o", str(tmp_path / "o")])
    assert done.exit_code == NO_TOOL
