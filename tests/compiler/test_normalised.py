"""Normalised rows have onnxruntime's bits: its kernel for AVX2 adds squares in an order of its own."""

from __future__ import annotations

import platform

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import celosia

from ..oracle import opened

LENGTHS = (8, 9, 12, 13, 15, 16, 17, 20, 23, 30, 31, 33, 64, 100, 197, 384, 768)
OPERATORS = {"LayerNormalization": (17, 8), "SimplifiedLayerNormalization": (17, 16), "RMSNormalization": (23, 16)}
"""The opset that has it, and the shortest row that its kernel takes."""
CASES = [(op, length) for op, (_, shortest) in OPERATORS.items() for length in LENGTHS if length >= shortest]


def model(op: str, length: int) -> onnx.ModelProto:
    def tensor(name: str, shape: list[int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    inputs = [tensor("x", [3, 40, length]), tensor("scale", [length])]
    if op == "LayerNormalization":
        inputs.append(tensor("bias", [length]))
    node = helper.make_node(op, [value.name for value in inputs], ["y"], axis=-1, epsilon=1e-5)
    graph = helper.make_graph([node], "rows", inputs, [tensor("y", [3, 40, length])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPERATORS[op][0])], ir_version=10)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors have another kernel")
@pytest.mark.parametrize(("op", "length"), CASES)
def test_rows_have_onnxruntimes_bits(op: str, length: int) -> None:
    proto, random = model(op, length), np.random.default_rng(length)
    feed = {
        value.name: random.normal(size=[dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in proto.graph.input
    }
    feed["x"][0] = np.round(feed["x"][0], 1)  # some rows of few bits
    feed["x"][1] += 100  # and some whose mean is far from 0
    (expected,) = opened(proto).run(None, feed)
    np.testing.assert_array_equal(celosia.Runtime(celosia.compile(proto)).run(feed).outputs["y"], expected)
