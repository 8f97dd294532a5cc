"""Scales and zero points of any shape, and mixed element types, work as in onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from oracle import opened
from thorough import some

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.driver.runtime import Runtime

CONFIGS = ("tiny", "pynq", "wide")


def alone(op: str, x: tuple[int, ...], scale: tuple[int, ...], version: int = 21, **attrs: int) -> ModelProto:
    """Return a model of one QuantizeLinear or DequantizeLinear without a zero point."""
    kinds = [TensorProto.FLOAT, TensorProto.UINT8]
    source, target = kinds if op == "QuantizeLinear" else kinds[::-1]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "s"], ["y"], **attrs)], "g",
        [helper.make_tensor_value_info("x", source, x)], [helper.make_tensor_value_info("y", target, None)],
        [numpy_helper.from_array(np.linspace(0.1, 0.9, int(np.prod(scale)), dtype=np.float32).reshape(scale), "s")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]] = [
    ((8, 4), scale, attrs)
    for scale, attrs in (
        ((), {}), ((1,), {}), ((4,), {}), ((8,), {"axis": 0}), ((8,), {"axis": -2}), ((), {"axis": 5}),
        ((2, 4), {}), ((2, 4), {"axis": 0}), ((8, 4), {}), ((1, 1), {}), ((8, 1), {}), ((1, 4), {}), ((3,), {}),
        ((8,), {}), ((2,), {"axis": 5}),
        ((8, 2), {"block_size": 2}), ((8, 2), {"block_size": 3}), ((8, 4), {"block_size": 1}),
        ((2, 4), {"block_size": 4, "axis": 0}), ((1, 4), {"block_size": 100, "axis": 0}),
        ((8, 2), {"block_size": 1}), ((), {"block_size": 4}), ((4,), {"block_size": 4}), ((1, 1), {"block_size": 8}),
    )
]  # fmt: skip
SHAPES += [
    ((4,), (4,), {}),
    ((4,), (4,), {"axis": 0}),
    ((4,), (1,), {}),
    ((), (1,), {}),
    ((6, 10), (2, 10), {"axis": 0}),
]


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
def test_compiling_takes_the_scales_that_onnxruntime_takes(op: str) -> None:
    for x, scale, attrs in SHAPES:
        for version in (21,) if "block_size" in attrs else (13, 21):
            model = alone(op, x, scale, version, **attrs)
            feed = {"x": np.full(x, 7, np.float32 if op == "QuantizeLinear" else np.uint8)}
            try:
                wanted = opened(model).run(None, feed)[0]
            except Exception:  # onnxruntime has several unrelated classes
                with pytest.raises(ModelError, match=r"(scale|zero point).*along axis"):
                    celosia.compile(model, "tiny")
                continue
            np.testing.assert_array_equal(Runtime(celosia.compile(model, "tiny")).run(feed).outputs["y"], wanted)


def mixed(op: str, x: str, w: str, y: str, seed: int) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Return an operator on bytes of type `x` and weights of type `w`, and its input.

    y: the type of the quantised result; "" leaves it in floats. With an even `seed`, scales are powers of two, so that
    floats are exact and ties common.
    """
    rng = np.random.default_rng(seed)
    steps = 2.0 ** -rng.integers(2, 6, 3) if seed % 2 == 0 else rng.uniform(0.02, 0.1, 3)
    zeros = {"uint8": 120, "int8": -5, "": 0}
    dims, kernel = ((1, 4, 5, 5), (4, 4, 3, 3)) if op == "Conv" else ((3, 8), (8, 5))
    low = 0 if w == "uint8" else -60  # onnxruntime adds two products in 16 bits on processors without VNNI
    known: dict[str, Any] = {
        "sx": np.float32(steps[0]), "zx": np.array(zeros[x], x), "sw": np.float32(steps[1]),
        "zw": np.array(0 if w == "int8" else 60, w), "w": rng.integers(low, low + 120, kernel).astype(w),
        "sy": np.float32(steps[2] * 64), "zy": np.array(zeros[y], y or "int8"),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "sx", "zx"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "sw", "zw"], ["wd"]),
        helper.make_node(op, ["d", "wd"], ["o"]),
        *([helper.make_node("QuantizeLinear", ["o", "sy", "zy"], ["y"])] if y else []),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(y or "float32"))
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y" if y else "o", kind, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in known.items() if name in used],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return model, {"x": (rng.standard_normal(dims) * steps[0] * 60).astype(np.float32)}


BYTES = ("int8", "uint8")
MIXED = [(op, x, w, y) for op in ("Conv", "MatMul", "Gemm") for x in BYTES for w in BYTES for y in (*BYTES, "")]


@pytest.mark.parametrize(
    ("op", "x", "w", "y"), some(MIXED, [case for case in MIXED if case[1:] == ("uint8", "int8", "int8")])
)
def test_bytes_of_several_types(op: str, x: str, w: str, y: str) -> None:
    """Operators with mixed byte types give onnxruntime's results; it multiplies floats for some combinations of
    types."""
    for seed in range(3):
        model, feed = mixed(op, x, w, y, seed)
        wanted = opened(model, int8=True).run(None, feed)[0]
        found = next(iter(Runtime(celosia.compile(model, CONFIGS[seed])).run(feed).outputs.values()))
        if y:
            np.testing.assert_array_equal(found, wanted)
        else:
            np.testing.assert_allclose(found, wanted, 1e-6, 1e-6 * float(np.abs(wanted).max()))
