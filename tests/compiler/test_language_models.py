"""ONNX models have kernels of the tile language as operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.language import linear
from language_kernels import interpreted
from onnx import TensorProto, helper, numpy_helper

import celosia
import celosia.language as cl

PRODUCT = cl.jit(linear, config="tiny")


@cl.op("my.domain", "Linear", shape=lambda x, w, par, zero_point=0: ((x.shape[0], w.shape[0]), "int8"))
def linear_operator(x: Any, w: Any, par: Any, y: Any, zero_point: int = 0) -> None:
    (m, k), n = x.shape, w.shape[0]
    PRODUCT[(cl.cdiv(m, 16), cl.cdiv(n, 16))](cl.quantised(x, 3), w, par, cl.quantised(y, zero_point), m, n, k, 16, 16)


@cl.jit(target="cpu")
def scaled(x, y, factor, BLOCK: cl.constexpr):
    at = cl.program_id(0) * BLOCK + cl.arange(0, BLOCK)
    cl.store(y + at, cl.load(x + at).to(cl.float32) * factor)


@cl.op("my.domain", "Scaled", shape=lambda x, factor=1.0: (x.shape, "float32"))
def scaled_operator(x: Any, y: Any, factor: float = 1.0) -> None:
    scaled[(x.size,)](x, y, factor, 1)


def model(varying: str = "") -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.integers(-128, 128, (40, 24)).astype(np.int8), "v": rng.integers(-128, 128, (10, 40)).astype(np.int8),
        "p": cl.parameters(rng.integers(-500, 500, 40), rng.random(40) / 200),
        "q": cl.parameters(rng.integers(-500, 500, 10), rng.random(10) / 200),
    }  # fmt: skip
    nodes = [
        helper.make_node("Linear", ["x", "w", "p"], ["h"], domain="my.domain", zero_point=-4),
        helper.make_node("Linear", ["h", "v", "q"], ["i"], domain="my.domain"),
        helper.make_node("Scaled", ["i"], ["y"], domain="my.domain", factor=0.25),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.INT8, [5, 24])]
    if varying:
        dtype = helper.np_dtype_to_tensor_dtype(arrays[varying].dtype)
        inputs.append(helper.make_tensor_value_info(varying, dtype, arrays[varying].shape))
    fixed = [numpy_helper.from_array(a, n) for n, a in arrays.items() if n != varying]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, 10])]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("my.domain", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, fixed), opset_imports=opsets), arrays


def meant(x: np.ndarray, arrays: dict[str, np.ndarray]) -> np.ndarray:
    h, i = np.zeros((5, 40), np.int8), np.zeros((5, 10), np.int8)
    with interpreted():
        linear_operator(x, arrays["w"], arrays["p"], h, -4)
        linear_operator(h, arrays["v"], arrays["q"], i)
    return i.astype(np.float32) * np.float32(0.25)


@pytest.mark.parametrize("varying", ["", "w", "p"])
def test_a_model_of_own_operators(varying: str) -> None:
    """Variable weights of an own operator are activations; variable parameters keep it on the CPU."""
    graph, arrays = model(varying)
    program = celosia.compile(graph, config="tiny")
    placed = {row["op"] + row["name"]: row for row in program.placements}
    places = [row["place"] for row in placed.values()]
    assert places == (["cpu", "accelerator", "cpu"] if varying == "p" else ["accelerator", "accelerator", "cpu"])
    whats = [layer.what for launch in program.launches for layer in launch.layers]
    assert ("product of two activations" in whats[0]) == (varying == "w")
    assert varying != "p" or "par of its kernel varies" in program.placements[0]["reason"]
    assert "target 'cpu'" in program.placements[2]["reason"]
    x = np.random.default_rng(1).integers(-128, 128, (5, 24)).astype(np.int8)
    feed = {"x": x} | ({varying: arrays[varying]} if varying else {})
    output = celosia.Runtime(program).run(feed).outputs["y"]
    assert np.array_equal(output, meant(x, arrays)) and len(np.unique(output)) > 10


def test_an_unknown_operator_is_refused() -> None:
    graph, _ = model()
    graph.graph.node[0].op_type = "Nothing"
    graph.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.INT8, [5, 40]))
    with pytest.raises(celosia.compiler.graph.errors.ModelError, match=r"Nothing of domain 'my.domain'"):
        celosia.compile(graph, config="tiny")
