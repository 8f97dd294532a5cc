"""Norms, softmax and functions have onnxruntime's bits: the same polynomials and the same order of sums."""

from __future__ import annotations

import platform

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from thorough import some

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


x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors have another kernel")


@x86
@pytest.mark.parametrize(("op", "length"), some(CASES, CASES[::3]))
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


POWERS = [("Softmax", (60, n), -1, 13) for n in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 112, 197, 1000)]
POWERS += [("Softmax", (4, 12, 20, 3), 1, 13), ("Softmax", (3, 12, 20), 1, 11), ("Softmax", (7, 5, 33), 0, 13)]
FUNCTIONS = [(op, (500, 40), 0, 20) for op in ("Erf", "Exp", "Gelu", "Sigmoid", "Tanh")]
FUNCTIONS += [("Gelu", (500, 40), 1, 20), *((op, (500, 40), 0, 1) for op in ("FastGelu", "Gelu", "QuickGelu"))]


@x86
@pytest.mark.parametrize(("op", "shape", "axis", "opset"), some([*POWERS, *FUNCTIONS], [*POWERS, *FUNCTIONS][::2]))
def test_functions_have_onnxruntimes_bits(op: str, shape: tuple[int, ...], axis: int, opset: int) -> None:
    """Functions of rows with small and large spread have onnxruntime's bits; some powers underflow."""
    domain = "com.microsoft" if opset == 1 else ""
    attributes = {"Softmax": {"axis": axis}, "Gelu": {"approximate": "tanh" if axis else "none"}}.get(op, {})
    node = helper.make_node(op, ["x"], ["y"], domain=domain, **({} if domain else attributes))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    proto = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid(domain, opset)], ir_version=10
    )
    random = np.random.default_rng(shape[-1])
    spread = np.exp(random.uniform(-2, 4.5, (shape[0], *[1] * (len(shape) - 1))))
    feed = {"x": (random.normal(size=shape) * spread).astype(np.float32)}
    (expected,) = opened(proto).run(None, feed)
    output = celosia.Runtime(celosia.compile(proto)).run(feed).outputs["y"]
    np.testing.assert_array_equal(output.view(np.uint32), expected.view(np.uint32))
