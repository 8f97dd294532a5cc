"""Float weights between quantised tensors become onnxruntime's bytes, together with operators fused into them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from oracle import opened

import celosia

BETWEEN = {
    "a factor": "last = Mul(product, factor)",
    "an offset": "last = Add(product, factor)",
    "both and a wire": "scaled = Mul(product, factor) wire = Identity(scaled) last = Add(factor, wire)",
    "a factor and bounds": "scaled = Mul(product, factor) bound = Relu(scaled) last = Relu(bound)",
}


def model(body: str, **constants: np.ndarray) -> onnx.ModelProto:
    """Return a model with `body`, which computes `last` from `real`, between bytes of x [1, 8, 5, 5] and y."""
    graph = onnx.parser.parse_graph(f"""g (uint8[1, 8, 5, 5] x) => (uint8 y) {{
        real = DequantizeLinear(x, sx, zx)
        {body}
        y = QuantizeLinear(last, sy, zy)
    }}""")
    arrays = {"sx": np.float32(0.02), "zx": np.uint8(120), "sy": np.float32(0.03), "zy": np.uint8(0), **constants}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def assert_onnxruntimes(proto: onnx.ModelProto) -> None:
    x = np.random.default_rng(2).integers(0, 256, (1, 8, 5, 5)).astype(np.uint8)
    (expected,) = opened(proto, int8=True).run(None, {"x": x})
    np.testing.assert_array_equal(celosia.Runtime(celosia.compile(proto, "tiny")).run({"x": x}).outputs["y"], expected)


@pytest.mark.parametrize("shape", [(5, 1, 1), (1, 5, 1, 1)])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_scales_channels_becomes_part_of_them(between: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.3, (5, 8, 3, 3)).astype(np.float32)
    body = f"product = Conv(real, weights) {BETWEEN[between]}"
    assert_onnxruntimes(model(body, weights=weights, factor=rng.uniform(0.5, 1.5, shape).astype(np.float32)))


def test_softmax_in_front_of_bounds_that_change_nothing() -> None:
    assert_onnxruntimes(model("soft = Softmax(real) bound = Relu(soft) last = Relu(bound)"))


@pytest.mark.parametrize("axis", ["of each channel", "of all"])
@pytest.mark.parametrize("bias_scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("op", ["Conv", "Gemm"])
def test_float16_biases_become_integers(op: str, bias_scale: float, axis: str) -> None:
    """Float16 biases between quantised tensors become integers; quotients that exceed float16 overflow as in
    onnxruntime."""
    rng = np.random.default_rng(3)
    half = np.float16
    scales = rng.uniform(0.002, 0.004, 5).astype(half) if axis == "of each channel" else half(0.003)
    weights = rng.integers(-128, 128, (5, 8, 3, 3) if op == "Conv" else (5, 200)).astype(np.int8)
    product = "Conv(real, w, bias)" if op == "Conv" else "Gemm<transB = 1>(flat, w, bias)"
    graph = onnx.parser.parse_graph(f"""g (uint8[1, 8, 5, 5] x) => (uint8 y) {{
        moved = BitwiseNot(x) real = DequantizeLinear(moved, sx, zx) flat = Flatten(real)
        w = DequantizeLinear<axis = 0>(weights, sw, zw)
        product = {product}
        last = Relu(product) y = QuantizeLinear(last, sy, zy)
    }}""")
    arrays = {
        "sx": half(0.02), "zx": np.uint8(120), "sy": half(0.2), "zy": np.uint8(0), "sw": scales,
        "zw": np.zeros(np.shape(scales), np.int8), "weights": weights,
        "bias": (rng.normal(size=5) * bias_scale).astype(half),
    }  # fmt: skip
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    assert_onnxruntimes(proto)
