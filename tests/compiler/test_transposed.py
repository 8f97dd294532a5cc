"""Transposed convolutions, computed as convolutions by phase, give onnxruntime's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graph_text import after, lines
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from oracle import opened
from thorough import tries

import celosia
from celosia.compiler.graph.simplify.convolutions import convolve_transposed
from celosia.driver.runtime import Runtime

Array = NDArray[Any]


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """Draw (attributes, shape of x, shape of w) with non-empty outputs."""
    rank, group = draw(st.integers(1, 2)), draw(st.sampled_from((1, 1, 2)))
    axes = range(rank)
    strides = [draw(st.integers(1, 3)) for _ in axes] if draw(st.booleans()) else [draw(st.integers(1, 5))] * rank
    kernel = [draw(st.integers(1, 5)) for _ in axes]
    size = [draw(st.integers(1, 7)) for _ in axes]
    pads = [draw(st.integers(0, 2)) for _ in range(2 * rank)]
    more = [draw(st.integers(0, stride - 1)) for stride in strides]
    out = [(size[d] - 1) * strides[d] + kernel[d] - pads[d] - pads[d + rank] + more[d] for d in axes]
    assume(min(out) >= 1)
    attrs: dict[str, Any] = dict(strides=strides, group=group, output_padding=more)
    attrs |= draw(st.sampled_from([
        {"pads": pads}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}, {"auto_pad": "VALID"},
        {"output_shape": out}, {"output_shape": out, "auto_pad": "SAME_UPPER"},
    ]))  # fmt: skip
    return attrs, (draw(st.integers(1, 2)), 4, *size), (4, 6 // group, *kernel)


def model(attrs: dict[str, Any], x: tuple[int, ...], w: Array, b: Array | None, name: str = "") -> onnx.ModelProto:
    inputs = ["x", "w"] + ([] if b is None else ["b"])
    constants = [numpy_helper.from_array(w, "w")] + ([] if b is None else [numpy_helper.from_array(b, "b")])
    nodes = [helper.make_node("ConvTranspose", inputs, ["y"], name=name, **attrs)]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", given, made, constants)
    return onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    )


@settings(max_examples=tries(10))
@given(case=cases(), biased=st.booleans(), seed=st.integers(0, 99))
def test_random_ones(case: tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]], biased: bool, seed: int) -> None:
    attrs, dims, weights = case
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal(dims, np.float32), rng.standard_normal(weights, np.float32)
    bias = rng.standard_normal(6, np.float32) if biased else None
    made = model(attrs, dims, w, bias)
    [expected] = opened(made).run(None, {"x": x})
    program = celosia.compile(made, "tiny")
    assert "ConvTranspose" not in {node.op for step in program.steps for node in step.nodes}
    found = Runtime(program).run({"x": x}).outputs["y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_as_text() -> None:
    source = """
    g (float[1,1,2,2] x) => (float[1,1,4,4] y) <float[1,1,2,2] w = {1, 2, 3, 4}> {
      y = ConvTranspose<strides = [2, 2]>(x, w)
    }
    """
    weights = "[[[[1]]], [[[2]]], [[[3]]], [[[4]]]]"
    assert after(convolve_transposed, source) == lines(f"""
    (x float32[1,1,2,2]) -> (y float32[1,1,4,4])
      y.conv float32[1,4,2,2] = Conv(x, {weights}) pads=[0, 0, 0, 0] kernel_shape=[1, 1] group=1
      y float32[1,1,4,4] = DepthToSpace(y.conv) blocksize=2 mode=CRD
    """)


@pytest.mark.parametrize("attributes", ["dilations = [2, 2]"])
def test_what_stays(attributes: str) -> None:
    source = f"""
    g (float[1,1,3,3] x) => (float[1,1,?,?] y) <float[1,1,2,2] w = {{1, 2, 3, 4}}> {{
      y = ConvTranspose<{attributes}>(x, w)
    }}
    """
    assert "ConvTranspose" in after(convolve_transposed, source)


def quantised(rng: np.random.Generator, by_channel: bool, name: str) -> onnx.ModelProto:
    """Return x, w and y as bytes, and the bias as int32."""
    scale = rng.uniform(0.005, 0.02, 5 if by_channel else ()).astype(np.float32)
    constants = {
        "s": np.float32(0.05), "z": np.int8(3), "sw": scale, "zw": np.zeros(scale.shape, np.int8),
        "w8": rng.integers(-127, 128, (6, 5, 2, 2)).astype(np.int8), "sy": np.float32(0.1), "zy": np.int8(-7),
        "b32": rng.integers(-900, 900, 5).astype(np.int32), "sb": (scale * np.float32(0.05)).astype(np.float32),
        "zb": np.zeros(scale.shape, np.int32),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["x8"], name=name),
        helper.make_node("DequantizeLinear", ["x8", "s", "z"], ["xf"], name=name),
        helper.make_node("DequantizeLinear", ["w8", "sw", "zw"], ["wf"], name=name, axis=1),
        helper.make_node("DequantizeLinear", ["b32", "sb", "zb"], ["bf"], name=name, axis=0),
        helper.make_node("ConvTranspose", ["xf", "wf", "bf"], ["yf"], name=name, strides=[2, 2]),
        helper.make_node("QuantizeLinear", ["yf", "sy", "zy"], ["y8"], name=name),
        helper.make_node("DequantizeLinear", ["y8", "sy", "zy"], ["y"], name=name),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 6, 4, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 5, 8, 6])],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.mark.parametrize("name", ["", "same"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_quantised_ones(by_channel: bool, name: str) -> None:
    """Quantised transposed convolutions differ from onnxruntime's floats by at most one step, next to ties."""
    x = np.random.default_rng(9).standard_normal((1, 6, 4, 3)).astype(np.float32) * 3
    nameless = quantised(np.random.default_rng(by_channel), by_channel, "")
    [expected] = opened(nameless).run(None, {"x": x})
    program = celosia.compile(quantised(np.random.default_rng(by_channel), by_channel, name), "tiny")
    found = Runtime(program, device="functional").run({"x": x}).outputs["y"]
    assert np.abs(found - expected).max() <= 0.1 * 1.001 and np.mean(found != expected) < 0.02
