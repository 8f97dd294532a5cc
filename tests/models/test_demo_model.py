"""The committed demo model is small and integer throughout, and classifies most of the committed images right."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from celosia.models import demo_images, demo_model_path, preprocess

ort = pytest.importorskip("onnxruntime")

INTEGER = {"QLinearConv", "QLinearAdd", "QLinearGlobalAveragePool", "QGemm"}
MOVES_DATA = {"Transpose", "Flatten", "Reshape"}
EXPECTED_LAYERS = {"QLinearConv": 9, "QLinearAdd": 3, "QLinearGlobalAveragePool": 1, "QGemm": 1}


def optimised_operators(tmp_path: Path, level: "ort.GraphOptimizationLevel") -> Counter[str]:
    """Return the number of nodes of each operator that onnxruntime executes for the demo model."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(demo_model_path(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)


def assert_integer_throughout(operators: Counter[str]) -> None:
    """Check that floats occur only before one quantisation at the start and after one dequantisation at the end."""
    assert operators["QuantizeLinear"] == operators["DequantizeLinear"] == 1
    assert set(operators) - {"QuantizeLinear", "DequantizeLinear"} <= INTEGER | MOVES_DATA


def test_files_are_small() -> None:
    assert demo_model_path().stat().st_size < 200_000
    assert demo_model_path().with_name("fashion_test.npz").stat().st_size < 200_000


def test_model_is_valid_and_says_how_to_prepare_its_input() -> None:
    model = onnx.load(demo_model_path())
    onnx.checker.check_model(model, full_check=True)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert "32x32" in properties["preprocessing"]
    assert properties["classes"].split(", ") == demo_images()[2]


def test_model_is_integer_throughout(tmp_path: Path) -> None:
    operators = optimised_operators(tmp_path, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    assert_integer_throughout(operators)
    assert {name: operators[name] for name in EXPECTED_LAYERS} == EXPECTED_LAYERS


def test_float_operators_are_noticed(tmp_path: Path) -> None:
    operators = optimised_operators(tmp_path, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    with pytest.raises(AssertionError):
        assert_integer_throughout(operators)


def test_quantising_a_pixel_loses_nothing() -> None:
    model = onnx.load(demo_model_path())
    (node,) = (node for node in model.graph.node if node.input[0] == "image")
    constants = {c.name: onnx.numpy_helper.to_array(c) for c in model.graph.initializer}
    scale, zero = (constants[name] for name in node.input[1:])
    pixels = np.arange(256, dtype=np.uint8)
    grey = preprocess(np.broadcast_to(pixels[:, None, None], (256, 28, 28)))[:, 0, 16, 16]
    assert (zero, np.rint(grey / scale).tolist()) == (-128, pixels.tolist())


def test_classifies_the_committed_images() -> None:
    images, labels, classes = demo_images()
    assert images.shape == (100, 1, 32, 32) and len(classes) == 10 and set(labels) == set(range(10))
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    model = ort.InferenceSession(demo_model_path(), options, providers=["CPUExecutionProvider"])
    predictions = [model.run(["logits"], {"image": image[None]})[0].argmax() for image in images]
    assert np.mean(np.array(predictions) == labels) >= 0.85


@pytest.mark.parametrize("shape, dtype", [((2, 32, 32), "uint8"), ((2, 28, 28), "float32")])
def test_preprocess_rejects_other_images(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(ValueError, match=r"uint8 \[N, 28, 28\].*" + dtype):
        preprocess(np.zeros(shape, dtype))  # type: ignore[arg-type]
