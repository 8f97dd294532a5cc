"""Operators with sizes known at run time give onnxruntime's results, and those of kernels with fixed sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper
from oracle import opened
from thorough import one_each

from celosia.compiler.cpu.parse import parse
from celosia.compiler.program.host.execute import execute
from celosia.compiler.program.host.hostops import sized_function, sized_names
from celosia.compiler.program.host.op import HostError

Array = NDArray[Any]
RNG = np.random.default_rng(0)
OPSET = 18


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: Any) -> Array:
    return np.array(values, np.int64)


def bools(*shape: int) -> Array:
    return RNG.integers(0, 2, shape).astype(bool)


HALVES = np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
SPECIAL = np.float32([np.nan, np.inf, -np.inf, -0.0, 0.0, 3.5, 1e30])
PAIR = [floats(3, 1, 5), floats(4, 1)]
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    *((op, PAIR, {}) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "LessOrEqual", "Greater",
                                "GreaterOrEqual", "Equal")),
    *((op, [bools(3, 4), bools(4)], {}) for op in ("And", "Or", "Xor")),
    ("Not", [bools(5)], {}),
    *((op, [floats(3, 7)], {}) for op in ("Abs", "Ceil", "Cos", "Exp", "Floor", "Neg", "Sign", "Sin", "Tanh", "Relu",
                                          "Sigmoid", "Reciprocal", "Softmax", "LogSoftmax")),
    *((op, [SPECIAL], {}) for op in ("Abs", "Ceil", "Exp", "Floor", "Neg", "Relu", "Round", "Sqrt", "Tanh", "Log",
                                     "Sigmoid", "Reciprocal")),
    *((op, [np.abs(floats(3, 7))], {}) for op in ("Sqrt", "Log")),
    ("Round", [HALVES], {}),
    *((op, [ints(3, -7, 250), ints(-5, 2, 9)], {}) for op in ("Add", "Sub", "Mul", "Div", "Less", "Max", "Min")),
    ("Div", [ints(7, -7, 7, -7, 6, -6), ints(2, 2, -2, -2, 3, 3)], {}),
    ("Div", [np.int32([7, -7]), np.int32([-3, 3])], {}),
    ("Add", [floats(0, 4), floats(4)], {}),
    ("Add", [floats(0, 4), floats(1, 4)], {}),
    ("Max", [floats(3), floats(3), floats(2, 3)], {}),
    ("Clip", [floats(3, 4), np.float32(-0.5), np.float32(0.5)], {}),
    ("Clip", [floats(3, 4), None, np.float32(0.5)], {}),
    ("Clip", [floats(3, 4), np.float32(0.5), np.float32(-0.5)], {}),
    ("Clip", [ints(1, 5, 9), np.int64(2), np.int64(6)], {}),
    ("Where", [bools(3, 1), floats(4), floats(3, 4)], {}),
    ("MatMul", [floats(2, 3, 4), floats(4, 5)], {}),
    ("MatMul", [floats(4), floats(2, 4, 5)], {}),
    ("MatMul", [floats(2, 3, 4), floats(4)], {}),
    ("MatMul", [floats(2, 1, 0, 4), floats(3, 4, 5)], {}),
    ("MatMul", [np.int32([[1, 2], [3, 4]]), np.int32([[5], [-6]])], {}),
    ("Softmax", [floats(2, 3, 4)], {"axis": 1}),
    ("Softmax", [floats(1, 2, 0)], {}),
    *((op, [floats(2, 3, 4)], {"axes": [0, -1], "keepdims": keep, "opset": 17})
      for op in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd") for keep in (0, 1)),
    *((op, [floats(2, 3, 4), ints(0, -1)], {}) for op in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")),
    ("ReduceSum", [floats(2, 3, 4), ints(1)], {"keepdims": 0}),
    ("ReduceSum", [floats(2, 3), ints()], {"noop_with_empty_axes": 1}),
    ("ReduceSum", [np.int32([[1, 2], [3, 4]])], {}),
    ("ReduceMax", [ints(3, 1, 2)], {"keepdims": 0}),
    ("ReduceMean", [floats(2, 3)], {}),
    ("ArgMax", [np.float32([[1, 3, 3], [2, 0, 2]])], {"axis": 1}),
    ("ArgMax", [np.float32([[1, 3, 3], [2, 0, 2]])], {"axis": -1, "select_last_index": 1, "keepdims": 0}),
    ("ArgMin", [floats(3, 5)], {"keepdims": 0}),
    ("Transpose", [floats(2, 3, 4)], {}),
    ("Transpose", [floats(2, 3, 4)], {"perm": [1, 0, 2]}),
    ("Expand", [floats(3, 1), ints(2, 1, 6)], {}),
    ("Expand", [floats(3, 1), ints(1)], {}),
    ("Tile", [floats(2, 3), ints(2, 0)], {}),
    ("Tile", [floats(2, 3), ints(2, 3)], {}),
    ("Gather", [floats(5, 3), ints([0, -1], [4, 2])], {}),
    ("Gather", [floats(5, 3), np.int64(-2)], {"axis": 1}),
    ("Gather", [floats(5, 3), ints()], {}),
    ("GatherElements", [floats(3, 4), ints([0, -1, 2, 1])], {}),
    ("GatherElements", [floats(3, 4), ints([0, -1], [3, 1])], {"axis": 1}),
    ("GatherND", [floats(2, 3, 4), ints([0, 1], [1, -1])], {}),
    ("GatherND", [floats(2, 3, 4), ints([[0, 1, 2]])], {}),
    ("GatherND", [floats(2, 3, 4), ints([1], [0])], {"batch_dims": 1}),
    ("GatherND", [floats(3, 4), np.zeros((0, 2), np.int64)], {}),
    ("Slice", [floats(5, 6), ints(1, -3), ints(4, 100)], {}),
    ("Slice", [floats(5, 6), ints(-1), ints(-100), ints(1), ints(-2)], {}),
    ("Slice", [floats(5, 6), ints(100), ints(0), ints(-2), ints(-1)], {}),
    ("Slice", [floats(5, 6), ints(3), ints(2), ints(0)], {}),
    ("Slice", [floats(5, 6), ints(-100, 0), ints(2, np.iinfo(np.int64).max), ints(0, 1), ints(1, 3)], {}),
    ("Slice", [floats(5), ints(4), ints(np.iinfo(np.int64).min), ints(0), ints(-1)], {}),
    ("Slice", [floats(5), ints(-1), ints(-3), ints(0), ints(-1)], {}),
    ("Split", [floats(6, 2), ints(1, 5)], {"outputs": 2}),
    ("Split", [floats(2, 7)], {"outputs": 3, "axis": 1, "num_outputs": 3}),
    ("Trilu", [floats(2, 4, 5)], {}),
    ("Trilu", [floats(4, 5), np.int64(-1)], {"upper": 0}),
    ("Cast", [ints(0, 5, -300)], {"to": 1}),
    ("Cast", [ints(0, 5, -300)], {"to": 3}),
    ("Cast", [ints(0, 5, -300)], {"to": 9}),
    ("Cast", [np.float32([0.0, 0.5, -3.9, 2.5])], {"to": 7}),
    ("TopK", [np.float32([[3, 1, 3, 2], [0, 0, 1, 1]]), ints(3)], {"outputs": 2}),
    ("QuantizeLinear", [floats(4, 6) * 50, np.float32(0.7), np.int8(-5)], {}),
    ("DequantizeLinear", [np.int8([1, -128, 127]), np.float32(0.7), np.int8(-5)], {}),
]  # fmt: skip


def test_all_of_them_are_tried() -> None:
    assert {op for op, _, _ in CASES} == set(sized_names())


@pytest.mark.parametrize(
    "number",
    one_each(range(len(CASES)), lambda number: CASES[number][0]),
    ids=lambda number: f"{CASES[number][0]}{number}",
)
def test_as_onnxruntime_and_as_a_kernel(number: int) -> None:
    op, args, given = CASES[number]
    attrs = {name: value for name, value in given.items() if name not in ("outputs", "opset")}
    opset = given.get("opset", OPSET)
    names = ["" if arg is None else f"x{k}" for k, arg in enumerate(args)]
    results = [f"y{k}" for k in range(given.get("outputs", 1))]
    node = helper.make_node(op, names, results, **attrs)
    feed = {name: np.asarray(arg) for name, arg in zip(names, args) if arg is not None}
    wanted = onnxruntime_of(node, feed, opset)
    parsed = parse(node, {"": opset})
    for once in (False, True):
        for found, right in zip(execute(parsed, feed, once=once), wanted, strict=True):
            assert (found.shape, found.dtype) == (right.shape, right.dtype), once
            np.testing.assert_allclose(found, right, rtol=2e-6, atol=1e-7)


def onnxruntime_of(node: onnx.NodeProto, feed: dict[str, Array], opset: int) -> list[Array]:
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feed.items()}
    inputs = [helper.make_tensor_value_info(name, kind, [None] * feed[name].ndim) for name, kind in kinds.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = helper.make_graph([node], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    model = onnx.shape_inference.infer_shapes(model)
    return list(opened(model).run(None, feed))


@pytest.mark.parametrize(
    ("op", "args", "attrs", "words"),
    [
        ("Gather", [floats(3), ints(3)], {}, "out of bounds"),
        ("GatherElements", [floats(2, 2), ints([0, 0, 0])], {}, "reach beyond"),
        ("GatherND", [floats(2, 2), ints([0, 2])], {}, "out of bounds"),
        ("Slice", [floats(3), ints(0), ints(1), ints(0), ints(0)], {}, "a step is 0"),
        ("Slice", [floats(3), ints(0), ints(1), ints(1)], {}, "axis 1 of 1 dimensions"),
        ("Split", [floats(3), ints(1, 1)], {"outputs": 2}, r"sizes \[1, 1\] of an axis of 3"),
        ("Add", [floats(2), floats(3)], {}, "could not be broadcast"),
        ("DequantizeLinear", [np.zeros((1, 3), np.int8), floats(3)], {"axis": 0}, r"3 scales .* axis 0 of .*\[1, 3\]"),
        ("QuantizeLinear", [floats(2), floats(2)], {}, r"2 scales .* axis 1 of .*\[2\]"),
        ("Expand", [floats(1), ints(1 << 40, 1 << 20)], {}, "memory"),
        ("Tile", [floats(1, 1), ints(1 << 40, 1 << 20)], {}, "memory"),
    ],
)
def test_what_cannot_be_names_the_operator(op: str, args: list[Array], attrs: dict[str, Any], words: str) -> None:
    names = [f"x{k}" for k in range(len(args))]
    outputs = [f"y{k}" for k in range(attrs.pop("outputs", 1))]
    node = parse(helper.make_node(op, names, outputs, name="here", **attrs), {"": OPSET})
    with pytest.raises(HostError, match=rf"{op} \(here\): .*{words}"):
        execute(node, dict(zip(names, args)))


def test_types_and_versions_of_which_numpy_does_not_know() -> None:
    """Types and versions that numpy does not support are left to kernels."""
    old = parse(helper.make_node("Softmax", ["x"], ["y"]), {"": 11})
    assert sized_function(old) is None
    half = parse(helper.make_node("Exp", ["x"], ["y"]), {"": OPSET})
    function = sized_function(half)
    assert function is not None and function(half, floats(3).astype(np.float16)) is NotImplemented
    assert execute(half, {"x": np.float16([0.0])})[0].tolist() == [1]
