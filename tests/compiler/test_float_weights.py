"""Float weights between quantised tensors are onnxruntime's bytes, with what becomes part of them."""

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
    """Between bytes of x [1, 8, 5, 5] and y, `body`, which makes `last` of `real`."""
    graph = onnx.parser.parse_graph(f"""g (uint8[1, 8, 5, 5] x) => (uint8 y) {{
        real = DequantizeLinear(x, sx, zx)
        {body}
        y = QuantizeLinear(last, sy, zy)
    }}""")
    arrays = {"sx": np.float32(0.02), "zx": np.uint8(120), "sy": np.float32(0.03), "zy": np.uint8(0), **constants}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def assert_onnxruntimes(made: onnx.ModelProto) -> None:
    x = np.random.default_rng(2).integers(0, 256, (1, 8, 5, 5)).astype(np.uint8)
    (wanted,) = opened(made, int8=True).run(None, {"x": x})
    np.testing.assert_array_equal(celosia.Runtime(celosia.compile(made, "tiny")).run({"x": x}).outputs["y"], wanted)


@pytest.mark.parametrize("shape", [(5, 1, 1), (1, 5, 1, 1)])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_scales_channels_becomes_part_of_them(between: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.3, (5, 8, 3, 3)).astype(np.float32)
    body = f"product = Conv(real, weights) {BETWEEN[between]}"
    assert_onnxruntimes(model(body, weights=weights, factor=rng.uniform(0.5, 1.5, shape).astype(np.float32)))


def test_softmax_in_front_of_bounds_that_change_nothing() -> None:
    assert_onnxruntimes(model("soft = Softmax(real) bound = Relu(soft) last = Relu(bound)"))
