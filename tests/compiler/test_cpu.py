"""Kernels of the CPU backend give onnxruntime's results, operator by operator; the cache of kernels works."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from onnx import TensorProto, helper, numpy_helper
from oracle import opened
from thorough import one_each, paired

from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import CpuFunction, compile_op, fuse_nodes, saved_traffic
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.llvm import compile_loops as llvm
from celosia.compiler.cpu.schedule import schedule
from celosia.compiler.ops import Unsupported
from celosia.compiler.ops.registry import CpuNode, InputType
from celosia.compiler.program.host.kernel import CompiledKernel, address_of

RNG = np.random.default_rng(0)


MICROSOFT = frozenset(
    ("QGemm", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearGlobalAveragePool", "QLinearAveragePool",
     "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "MatMulIntegerToFloat", "SkipLayerNormalization",
     "BiasGelu", "FastGelu", "QuickGelu")
)  # fmt: skip


def onnxruntime_op(
    op: str, attrs: dict[str, Any], inputs: list[np.ndarray | None], outputs: int = 1, opset: int = 21,
    constants: tuple[int, ...] = (),
) -> list[np.ndarray]:  # fmt: skip
    """Return the outputs of one node. `constants` are inputs passed as initialisers."""
    inputs = [None if v is None else np.asarray(v) for v in inputs]
    names = [f"i{k}" if v is not None else "" for k, v in enumerate(inputs)]
    domain = "com.microsoft" if op in MICROSOFT else ""
    node = helper.make_node(op, names, [f"o{k}" for k in range(outputs)], domain=domain, **attrs)
    fed = {n: v for k, (n, v) in enumerate(zip(names, inputs)) if v is not None and k not in constants}
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in fed.items()],
        [helper.make_tensor_value_info(f"o{k}", TensorProto.UNDEFINED, None) for k in range(outputs)],
        [numpy_helper.from_array(inputs[k], f"i{k}") for k in constants],
    )  # fmt: skip
    for value in graph.output:
        value.ClearField("type")
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)], ir_version=10
    )
    session = opened(model)
    return session.run(None, fed)


def f(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(low: int, high: int, *shape: int, dtype: str = "int64") -> np.ndarray:
    return RNG.integers(low, high, shape).astype(dtype)


def q(*shape: int, dtype: str = "int8") -> np.ndarray:
    info = np.iinfo(dtype)
    return ints(info.min, info.max + 1, *shape, dtype=dtype)


def s(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def z(value: int, dtype: str = "int8") -> np.ndarray:
    return np.array(value, dtype)


def vec(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def bools(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2, shape).astype(bool)


Case = tuple[str, dict[str, Any], list[Any], dict[str, Any]]


def case(op: str, attrs: dict[str, Any], *inputs: Any, **how: Any) -> Any:
    """Return a pytest parameter. how: consts (numbers of constant inputs), outputs, opset, tol."""
    label = "-".join([op, *(str(v) for v in attrs.values())])
    return pytest.param(op, attrs, list(inputs), how, id=label)


ELEMENTWISE = [
    *(case(op, {}, f(3, 50) * 3) for op in (
        "Abs", "Neg", "Reciprocal", "Round", "Sign", "Relu", "Sigmoid", "Softplus", "Softsign", "LeakyRelu", "Elu",
        "Selu", "Celu", "HardSigmoid", "HardSwish", "Exp", "Tanh", "Erf", "Floor", "Ceil", "Sin", "Cos", "Atan", "Gelu",
        "Mish", "ThresholdedRelu", "IsNaN", "IsInf", "Identity",
    )),
    *(case(op, {}, abs(f(3, 50)) * 3) for op in ("Log", "Sqrt")),
    *(case(op, {}, (f(3, 50) * 3).astype(np.float64)) for op in ("Exp", "Tanh", "Sigmoid")),
    *(case(op, {}, abs(f(2, 1, 5)) + 0.1, f(3, 1)) for op in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")),
    *(case(op, {}, ints(-50, 50, 2, 1, 5), ints(1, 9, 3, 1)) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min")),
    case("Pow", {}, ints(-5, 5, 2, 5), ints(0, 5, 5)),
    case("Pow", {}, f(3, 4), s(2.0), consts=(1,)),
    case("Mod", {}, ints(-50, 50, 2, 5), vec(3, -4, 5, -6, 7)),
    case("Mod", {"fmod": 1}, ints(-50, 50, 2, 5), vec(3, -4, 5, -6, 7)),
    case("Mod", {"fmod": 1}, f(2, 5), f(5)),
    *(case(op, {}, ints(0, 3, 4, 5), ints(0, 3, 5)) for op in (
        "Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")),
    *(case(op, {}, bools(4, 5), bools(5)) for op in ("And", "Or", "Xor")),
    case("Not", {}, bools(4, 5)),
    case("Where", {}, bools(4, 5), f(5), f(1, 1)),
    case("PRelu", {}, f(2, 3, 4), f(3, 1)),
    case("BitShift", {"direction": "LEFT"}, ints(0, 99, 5, dtype="uint32"), ints(0, 9, 5, dtype="uint32")),
    case("Clip", {}, f(4, 5), s(-0.5), None),
    case("Clip", {}, f(4, 5), s(-0.5), s(0.3)),
    case("Sum", {}, f(4, 5), f(5), f(4, 1)),
    case("Mean", {}, f(4, 5), f(5), f(4, 1)),
    *(case("Cast", {"to": to}, abs(f(4, 5)) * 3) for to in (1, 2, 3, 6, 7, 9, 10, 11)),
    *(case("Cast", {"to": to}, ints(0, 9, 4, 5)) for to in (1, 2, 3, 6, 7, 9, 10, 11)),
]  # fmt: skip

REDUCTIONS = [
    *(case(op, {"keepdims": 0}, f(4, 5, 33), vec(1), consts=(1,)) for op in (
        "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare",
        "ReduceLogSumExp", "ReduceProd")),
    *(case(op, {}, f(4, 5, 70), vec(-1, 0), consts=(1,), tol=1e-4) for op in (
        "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceLogSumExp")),
    case("ReduceSum", {}, ints(-9, 9, 3, 37), vec(1), consts=(1,)),
    case("ReduceMax", {"axes": [1]}, q(3, 37), opset=12),
    case("ArgMax", {"axis": 1, "keepdims": 0}, f(3, 5, 7)),
    case("ArgMin", {"axis": -1, "select_last_index": 1}, ints(0, 3, 3, 7).astype(np.float32)),
    case("Softmax", {}, f(4, 100)),
    case("Softmax", {"axis": 1}, f(4, 10, 33)),
    case("Softmax", {"axis": 1}, f(2, 3, 4), opset=11),
    case("LogSoftmax", {}, f(3, 77)),
    case("LayerNormalization", {}, f(4, 20, 64), f(64), f(64), tol=1e-4),
    case("SkipLayerNormalization", {"epsilon": 1e-5}, f(2, 4, 32), f(2, 4, 32), f(32), f(32), tol=1e-4),
    case("BatchNormalization", {}, f(2, 5, 7, 7), f(5), f(5), f(5), abs(f(5)) + 0.1, tol=1e-4),
    case("InstanceNormalization", {}, f(2, 4, 5, 5), f(4), f(4), tol=1e-4),
    case("LRN", {"size": 5}, f(2, 8, 3, 3)),
    case("GlobalAveragePool", {}, f(2, 5, 7, 7)),
    case("GlobalMaxPool", {}, f(2, 5, 7, 7)),
]  # fmt: skip

WINDOWS = [
    case("Conv", {"pads": [1, 1, 1, 1]}, f(1, 16, 14, 14), f(32, 16, 3, 3), f(32), tol=1e-4),
    case("Conv", {"pads": [0, 1, 2, 1]}, f(2, 3, 7, 7), f(5, 3, 3, 3), f(5), tol=1e-4),
    case("Conv", {"pads": [1, 1, 1, 1], "strides": [2, 2]}, f(1, 3, 33, 40), f(7, 3, 3, 3), f(7), tol=1e-4),
    case("Conv", {"group": 16, "dilations": [2, 1]}, f(2, 16, 14, 14), f(16, 1, 3, 3), tol=1e-4),
    case("Conv", {"group": 2}, f(2, 16, 9, 9), f(6, 8, 1, 1), tol=1e-4),
    case("Conv", {"strides": [3, 2], "auto_pad": "SAME_LOWER"}, f(1, 4, 11, 13), f(6, 4, 3, 4), tol=1e-4),
    # Windows that move by more than one element, over lines that fill less than half a vector.
    case("Conv", {"pads": [1, 1, 1, 1], "strides": [2, 2], "group": 8}, f(1, 8, 14, 14), f(8, 1, 3, 3), f(8), tol=1e-4),
    case("Conv", {"pads": [0, 2, 1, 0], "strides": [3, 2], "dilations": [2, 3], "group": 2}, f(2, 6, 16, 14),
         f(4, 3, 3, 2), tol=1e-4),
    case("Conv", {"strides": [2, 1, 3]}, f(1, 2, 7, 5, 11), f(3, 2, 3, 2, 4), f(3), tol=1e-4),
    case("Conv", {"pads": [2, 2]}, f(1, 4, 40), f(6, 4, 5), tol=1e-4),
    case("Conv", {}, f(1, 2, 6, 7, 8), f(3, 2, 2, 3, 3), tol=1e-4),
    case("ConvTranspose", {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
         f(1, 4, 5, 5), f(4, 3, 3, 3), f(3), tol=1e-4),
    case("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, f(1, 5, 14, 15)),
    case("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, f(1, 5, 14, 15)),
    case("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]}, q(1, 5, 14, 15), opset=12),
    case("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, f(1, 5, 14, 15)),
    case("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 0, 2], "count_include_pad": 1}, f(1, 5, 14, 15)),
    case("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, f(1, 5, 14, 15)),
    case("AveragePool", {"kernel_shape": [3], "strides": [2], "auto_pad": "SAME_UPPER"}, f(1, 5, 14)),
    case("ConvInteger", {"pads": [1, 1, 1, 1]}, q(1, 4, 8, 8, dtype="uint8"), q(6, 4, 3, 3, dtype="uint8"),
         z(7, "uint8"), z(100, "uint8")),
]  # fmt: skip

PRODUCTS = [
    case("Gemm", {"transB": 1, "alpha": 0.5}, f(1, 64), f(10, 64), f(10), tol=1e-4),
    case("Gemm", {"transA": 1, "beta": 0.5}, f(64, 20), f(64, 33), f(20, 1), tol=1e-4),
    case("Gemm", {"transB": 1}, f(20, 64), f(33, 64), tol=1e-4),
    case("MatMul", {}, f(2, 3, 20, 30), f(30, 40), tol=1e-4),
    case("MatMul", {}, f(2, 1, 20, 30), f(3, 30, 40), tol=1e-4),
    case("MatMul", {}, f(30), f(30, 40), tol=1e-4),
    case("MatMul", {}, f(4, 30), f(30), tol=1e-4),
    case("MatMulInteger", {}, q(20, 30), q(30, 40), z(3), z(-2)),
]

SHAPES = [
    case("Reshape", {}, f(2, 3, 4), vec(0, -1), consts=(1,)),
    case("Flatten", {"axis": 2}, f(2, 3, 4)),
    case("Squeeze", {}, f(2, 1, 4), vec(1), consts=(1,)),
    case("Unsqueeze", {}, f(2, 4), vec(0, -1), consts=(1,)),
    case("Transpose", {"perm": [0, 2, 3, 1]}, f(2, 3, 4, 5)),
    case("Transpose", {}, f(2, 3, 4)),
    case("Concat", {"axis": 1}, f(2, 3, 4), f(2, 5, 4), f(2, 1, 4)),
    case("Slice", {}, f(6, 7, 8), vec(1, -1), vec(5, -100), vec(0, 2), vec(2, -2), consts=(1, 2, 3, 4)),
    *(case("Pad", {"mode": mode}, f(4, 5, 6), vec(0, 1, 2, 0, 2, 1), consts=(1,)) for mode in (
        "constant", "reflect", "edge", "wrap")),
    case("Pad", {}, f(4, 5), vec(-1, 2, 1, -2), s(3.0), consts=(1,)),
    case("Gather", {"axis": 1}, f(3, 5, 4), np.array([[0, -1], [2, 3]])),
    case("GatherElements", {"axis": 1}, f(3, 5), ints(-5, 5, 3, 4)),
    case("GatherND", {}, f(3, 5, 4), np.array([[0, -1], [2, 3]])),
    case("Split", {"axis": 1}, f(3, 6, 4), vec(2, 4), consts=(1,), outputs=2),
    case("Expand", {}, f(3, 1), vec(2, 1, 5), consts=(1,)),
    case("Tile", {}, f(3, 2), vec(2, 3), consts=(1,)),
    case("DepthToSpace", {"blocksize": 2}, f(1, 8, 3, 3)),
    case("DepthToSpace", {"blocksize": 2, "mode": "CRD"}, f(1, 8, 3, 3)),
    case("SpaceToDepth", {"blocksize": 2}, f(1, 2, 4, 6)),
    case("Trilu", {}, f(4, 5), np.array(1), consts=(1,)),
]  # fmt: skip

QUANTISE = [
    case("QuantizeLinear", {}, f(2, 3, 17) * 50, s(0.37), z(3)),
    case("QuantizeLinear", {}, f(2, 3, 17) * 50, s(0.37)),
    case("QuantizeLinear", {"axis": 1}, f(2, 3, 17) * 50, np.float32([0.37, 0.1, 0.2]), np.uint8([3, 1, 2])),
    case("QuantizeLinear", {"axis": 2}, f(2, 3, 4), np.float32([1e-9, 0.1, 1e9, 1]), np.int8([3, 1, 2, -128])),
    case("DequantizeLinear", {"axis": 1}, q(2, 3, 17), np.float32([0.37, 0.1, 0.2]), np.int8([3, 1, 2])),
    case("DequantizeLinear", {}, q(40, dtype="uint8"), s(0.37), z(200, "uint8")),
    case("DequantizeLinear", {}, ints(-(2**31), 2**31, 40, dtype="int32"), s(0.37)),
    case("DynamicQuantizeLinear", {}, f(5, 40), outputs=3),
]


def integer_operators(dtype: str) -> list[Any]:
    a = 5 if dtype == "int8" else 130

    def x(*shape: int) -> np.ndarray:
        return q(*shape, dtype=dtype)

    def zero(value: int) -> np.ndarray:
        return z(value, dtype)

    scales = abs(f(12)) * 0.01 + 0.001
    every = np.arange(256, dtype=np.uint8).view(dtype)
    bottom = 0 if dtype == "uint8" else -128
    return [  # weights of 7 bits: with 8 onnxruntime saturates sums on processors without VNNI
        case("QLinearConv", {"pads": [1, 1, 1, 1]}, x(1, 8, 13, 13), s(0.02), zero(a), q(12, 8, 3, 3) // 2, scales,
             np.zeros(12, np.int8), s(0.5), zero(a - 3), ints(-999, 999, 12, dtype="int32")),
        case("QLinearConv", {"group": 8, "strides": [2, 2]}, x(1, 8, 13, 13), s(0.02), zero(a), q(8, 1, 3, 3) // 2,
             s(0.01), z(0), s(0.05), zero(a - 3)),
        case("QLinearMatMul", {}, x(2, 7, 30), s(0.02), zero(a), x(30, 20), s(0.03), zero(a), s(0.5), zero(a)),
        case("QGemm", {"transB": 1}, x(5, 30), s(0.02), zero(a), q(12, 30) // 2, scales, np.zeros(12, np.int8),
             ints(-999, 999, 12, dtype="int32"), s(0.1), zero(a)),
        case("QGemm", {}, x(1, 30), s(0.02), zero(a), q(30, 12) // 2, s(0.01), z(0),
             ints(-999, 999, 12, dtype="int32")),
        case("QLinearAdd", {}, x(40, 50), s(0.02), zero(a), x(40, 50), s(0.03), zero(a // 2), s(0.04), zero(a)),
        case("QLinearAdd", {}, x(1), s(0.02), zero(a), x(4, 50), s(0.03), zero(a), s(0.04), zero(a)),
        case("QLinearMul", {}, x(40, 5, 60), s(0.02), zero(a), x(5, 1), s(0.03), zero(a), s(0.04), zero(a)),
        case("QLinearGlobalAveragePool", {"channels_last": 0}, x(2, 50, 7, 7), s(0.02), zero(a), s(0.005), zero(a - 2)),
        case("QLinearAveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}, x(2, 50, 9, 9),
             s(0.02), zero(a), s(0.005), zero(a - 2)),
        case("QLinearConcat", {"axis": 1}, s(0.1), zero(a), x(2, 5, 7), s(0.07), zero(a), x(2, 3, 7), s(0.1), zero(a),
             x(2, 3, 7), s(0.11), zero(a - 3)),
        case("QLinearSigmoid", {}, every, s(0.05), zero(a), s(1 / 256), zero(0)),
        case("QLinearLeakyRelu", {"alpha": 0.1}, every, s(0.05), zero(a), s(0.03), zero(a)),
        case("QLinearSoftmax", {"axis": -1, "opset": 13}, x(8, 100), s(0.05), zero(a), s(1 / 256), zero(bottom)),
        case("QLinearSoftmax", {"axis": 1, "opset": 13}, x(8, 5, 7), s(0.1), zero(a), s(1 / 256), zero(bottom)),
    ]  # fmt: skip


SIZES = vec(1, 2, 7, 3)
RESIZE = [
    *(case("Resize", {"mode": mode, "coordinate_transformation_mode": where}, f(1, 2, 4, 5), None, None, SIZES,
           consts=(3,), tol=1e-4)
      for mode in ("nearest", "linear", "cubic")
      for where in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")),
    case("Resize", {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}, f(1, 2, 4, 5), None,
         np.float32([1, 1, 2, 2]), consts=(2,)),
    # 100 * 2.3 is 230 in float32; channels that share the places of what they gather.
    case("Resize", {"mode": "linear"}, f(1, 1, 100, 5), None, np.float32([1, 1, 2.3, 1]), consts=(2,)),
    case("Resize", {"mode": "linear"}, f(1, 20, 6, 7), None, np.float32([1, 1, 2, 2]), consts=(2,)),
    case("Resize", {"mode": "linear", "antialias": 1}, f(1, 2, 14, 15), None, np.float32([1, 1, 0.6, 0.4]), consts=(2,),
         tol=1e-4),
]  # fmt: skip

EDGES = [
    case("Shape", {"start": 1}, f(2, 3, 4)),
    case("Hardmax", {}, f(3, 7)),
    case("Shrink", {"lambd": 0.5, "bias": 0.2}, f(3, 7)),
    case("MeanVarianceNormalization", {}, f(2, 3, 4, 5), tol=1e-4),
    case("LpNormalization", {"axis": 1}, f(2, 3, 4)),
    case("EyeLike", {"k": 1}, f(3, 5)),
    case("Range", {}, s(1), s(9), s(3), consts=(0, 1, 2)),
    case("MatMul", {}, f(5, 300).astype(np.float16), f(300, 7).astype(np.float16), tol=2e-2),
    case("Add", {}, s(2.0), s(3.0)),
    case("Add", {}, f(3, 0, 2), f(2)),
    case("Concat", {"axis": 0}, f(0, 3), f(2, 3)),
    case("ReduceSum", {}, f(3, 0), vec(1), consts=(1,)),
    case("Slice", {}, f(6), vec(4), vec(2), consts=(1, 2)),
    case("Softmax", {}, f(3, 1)),
    case("MatMul", {}, f(3, 0), f(0, 4)),
    case("Add", {}, f(33).astype(np.float16), f(33).astype(np.float16), tol=1e-3),
    case("Sigmoid", {}, f(33).astype(np.float16), tol=2e-3),
    case("Add", {}, q(40), q(40)),
    case("Relu", {}, q(40)),
    case("Max", {}, np.float32([1, np.nan, 3]), np.float32([np.nan, 2, 2])),
]


ALL = [*ELEMENTWISE, *REDUCTIONS, *WINDOWS, *PRODUCTS, *SHAPES, *QUANTISE, *RESIZE, *EDGES,
       *integer_operators("int8"), *integer_operators("uint8")]  # fmt: skip


def kind(case: ParameterSet) -> tuple[Any, ...]:
    """Return an operator's name, the names of its attributes, and the ranks of its inputs."""
    op, attrs, inputs, _ = case.values
    return op, *sorted(attrs), *(None if x is None else x.ndim for x in inputs)


@pytest.mark.parametrize("op, attrs, inputs, how", one_each(ALL, kind))
def test_operator(op: str, attrs: dict[str, Any], inputs: list[Any], how: dict[str, Any]) -> None:
    """Integers are equal to onnxruntime's, and floats are close."""
    consts, outputs, opset = how.get("consts", ()), how.get("outputs", 1), how.get("opset", 21)
    types = [None if x is None else x if k in consts else (x.shape, x.dtype.name) for k, x in enumerate(inputs)]
    compiled = compile_op(op, attrs, types, outputs=outputs, opset=opset)
    actual = compiled(*(x for x in inputs if x is not None))
    for g, expected in zip(actual, onnxruntime_op(op, attrs, inputs, outputs, opset, consts), strict=True):
        assert (g.shape, g.dtype) == (expected.shape, expected.dtype)
        tolerance = how.get("tol", 1e-5) if g.dtype.kind == "f" else 0
        np.testing.assert_allclose(g, expected, rtol=tolerance, atol=tolerance)


def qdq(op: str, **attrs: Any) -> CpuFunction:
    nodes = (
        CpuNode("DequantizeLinear", ("x", "sx", "zx"), ("a",)),
        CpuNode(op, ("a",), ("b",), attrs),
        CpuNode("QuantizeLinear", ("b", "sy", "zy"), ("y",)),
    )
    scale, zero = InputType((), "float32"), InputType((), "int8")
    types = {"x": InputType((4, 60), "int8"), "sx": scale, "zx": zero, "sy": scale, "zy": zero}
    return CpuFunction(nodes, types, ("y",))


def test_a_chain_between_dequantise_and_quantise_is_one_loop() -> None:
    function, names = qdq("HardSigmoid").lower()
    assert str(function).count("for ") == 1 and "workspace" not in str(function)
    assert names == ("x", "sx", "zx", "sy", "zy")
    arrays = q(4, 60), s(0.05), z(3), s(0.01), z(-5)
    compiled, _, _ = qdq("HardSigmoid").compile()
    a = onnxruntime_op("DequantizeLinear", {}, list(arrays[:3]))[0]
    b = onnxruntime_op("HardSigmoid", {}, [a])[0]
    expected = onnxruntime_op("QuantizeLinear", {}, [b, arrays[3], arrays[4]])[0]
    np.testing.assert_array_equal(compiled(*arrays)[0], expected)


TURNED = [(16, 16), (17, 5), (4, 33), (40, 24, 3), (3, 21, 6, 18), (5, 1, 7), (2, 50, 19)]


@pytest.mark.parametrize(("shape", "dtype"), paired(TURNED, ["float32", "float64", "float16", "int8", "bool"], 2))
def test_transpositions(shape: tuple[int, ...], dtype: str) -> None:
    """Transpositions use square tiles, which overlap at the ends, for every element size."""
    x = RNG.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    perms = list(itertools.permutations(range(len(shape))))
    for perm in perms[1 :: -(-len(perms) // 5)]:
        (y,) = compile_op("Transpose", {"perm": list(perm)}, [(shape, dtype)])(x)
        np.testing.assert_array_equal(y, x.transpose(perm))


def test_transposed_operands_of_a_chain() -> None:
    """A chain reads one operand along rows and another along columns."""
    a, b = T.placeholder((20, 36), "float32", "a"), T.placeholder((36, 20), "float32", "b")
    y = T.compute((36, 20), lambda i, j: a[j, i] * 2 + b[i, j] * a[j, i], "y")
    arrays = f(20, 36), f(36, 20)
    (actual,) = compile_function(T.lower(schedule([y]), [a, b]))(*arrays)
    np.testing.assert_array_equal(actual, arrays[0].T * 2 + arrays[1] * arrays[0].T)


@pytest.mark.parametrize("op", ["Softmax", "Sigmoid", "LeakyRelu"])
def test_llvm_agrees_with_the_interpreter(op: str) -> None:
    function, _ = qdq(op).lower()
    arrays = q(4, 60), s(0.05), z(3), s(0.01), z(-5)
    (expected,) = T.interpret(function, *(np.array(a) for a in arrays))
    (actual,) = llvm.compile_function(function)(*arrays)
    assert np.abs(actual.astype(int) - expected).max() <= 1  # exp may differ by an ulp, which may move a tie


def test_outputs_may_be_inputs_and_have_several_readers() -> None:
    nodes = (CpuNode("Relu", ("x",), ("a",)), CpuNode("Add", ("a", "x"), ("b",)))
    function = CpuFunction(nodes, {"x": InputType((5,), "float32")}, ("b", "a", "x", "a"))
    x = f(5)
    actual = function.compile()[0](x)
    for g, expected in zip(actual, (np.maximum(x, 0) + x, np.maximum(x, 0), x, np.maximum(x, 0)), strict=True):
        np.testing.assert_array_equal(g, expected)


def test_errors_name_operator_node_and_reason() -> None:
    with pytest.raises(Unsupported, match="NonZero 'n7'"):
        compile_op("NonZero", {}, [((3,), "float32")], name="n7")
    with pytest.raises(Unsupported, match=r"Reshape 'r'.*input 1"):
        compile_op("Reshape", {}, [((3,), "float32"), ((1,), "int64")], name="r")
    with pytest.raises(Unsupported, match="do not multiply"):
        compile_op("MatMul", {}, [((3, 4), "float32"), ((5, 6), "float32")])
    with pytest.raises(Unsupported, match="do not broadcast"):
        compile_op("Add", {}, [((3, 4), "float32"), ((5,), "float32")])
    with pytest.raises(ValueError, match="which nothing before it produces"):
        CpuFunction((CpuNode("Relu", ("x",), ("y",)),), {}, ("y",)).compile()


def test_a_kernel_checks_its_arrays() -> None:
    relu = compile_op("Relu", {}, [((3, 4), "float32")])
    with pytest.raises(ValueError, match=r"array 0.*\(4, 3\).*\(3, 4\)"):
        relu(f(4, 3))
    with pytest.raises(ValueError, match="2 inputs"):
        relu(f(3, 4), f(3, 4))
    with pytest.raises(ValueError, match="output 0 is not C-contiguous"):
        relu.run([f(3, 4)], [f(4, 3).T])
    x = f(4, 3).T
    np.testing.assert_array_equal(relu(x)[0], np.maximum(x, 0))


def test_addresses_are_those_of_numpy() -> None:
    base = np.arange(24, dtype=np.int16).reshape(4, 6)
    for array in (base, base[1:], base[:, 2:], base[3, 5:], np.empty((0, 3)), base.view(np.uint8)):
        assert address_of(array) == array.ctypes.data


def test_a_saved_kernel_runs_and_a_damaged_one_is_refused() -> None:
    relu = compile_op("Relu", {}, [((3, 4), "float32")])
    data = relu.to_bytes()
    x = f(3, 4)
    np.testing.assert_array_equal(CompiledKernel.from_bytes(data)(x)[0], np.maximum(x, 0))
    for at in (0, 20, len(data) // 2, len(data) - 1):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(ValueError, match="damaged"):
            CompiledKernel.from_bytes(bytes(bad))
    with pytest.raises(ValueError, match="damaged"):
        CompiledKernel.from_bytes(data[:30])


def test_the_cache_is_used_and_damaged_entries_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    compiles = []
    original = llvm.optimise
    monkeypatch.setattr(llvm, "optimise", lambda text, **_: compiles.append(text) or original(text))
    x = f(6)

    def once() -> None:
        llvm._kernels.clear()  # as in a new process
        np.testing.assert_array_equal(compile_op("Relu", {}, [((6,), "float32")])(x)[0], np.maximum(x, 0))

    once()
    once()
    assert len(compiles) == 1
    (entry,) = (tmp_path / "kernels").iterdir()
    whole = entry.read_bytes()
    for damaged in (whole[:100], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        entry.write_bytes(damaged)
        once()
        assert entry.read_bytes() == whole
    assert len(compiles) == 4
    entry.unlink()
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("not a folder")
    once()


def test_what_fuses() -> None:
    def fused(*ops: str) -> list[list[str]]:
        nodes = [CpuNode(op, (f"t{i}",), (f"t{i + 1}",)) for i, op in enumerate(ops)]
        return [[n.op for n in members] for members in fuse_nodes(nodes, [f"t{len(ops)}"])]

    assert fused("Relu", "Neg", "ReduceSum", "Exp") == [["Relu", "Neg", "ReduceSum", "Exp"]]
    assert fused("Conv", "Relu", "Conv") == [["Conv", "Relu"], ["Conv"]]
    assert fused("ReduceSum", "Softmax") == [["ReduceSum"], ["Softmax"]]
    assert fused("Relu", "OneHot", "Relu") == [["Relu"], ["OneHot"], ["Relu"]]
    assert fused("Relu", "Unknown") == [["Relu"], ["Unknown"]]


def test_saved_traffic() -> None:
    """Fusion saves a write and two reads of h; its view v costs nothing, and y is written in any case."""
    members = [
        CpuNode("Conv", ("x", "w"), ("h",)), CpuNode("Reshape", ("h", "s"), ("v",)), CpuNode("Relu", ("v",), ("r",)),
        CpuNode("Add", ("r", "v"), ("y",)),
    ]  # fmt: skip
    sizes = {"h": 100, "v": 100, "r": 100, "y": 100}
    assert saved_traffic(members, sizes, {"v"}) == 100 + 2 * 100 + 2 * 100
    assert saved_traffic(members[:1], sizes, set()) == 0


def test_groups_are_chains_with_one_heavy_operator() -> None:
    def node(op: str, inputs: str, output: str) -> CpuNode:
        return CpuNode(op, tuple(inputs.split()), (output,))

    nodes = [
        node("DequantizeLinear", "x s z", "a"), node("Conv", "a w", "b"), node("Relu", "b", "c"),
        node("MatMul", "c v", "d"), node("Sigmoid", "d", "e"), node("Mul", "d e", "f"), node("Exp", "f", "g"),
        node("Neg", "f", "h"), node("Add", "g h", "i"),
    ]  # fmt: skip
    actual = [[n.op for n in members] for members in fuse_nodes(nodes, ["i", "c"])]
    assert actual == [["DequantizeLinear", "Conv", "Relu"], ["MatMul", "Sigmoid", "Mul", "Exp", "Neg", "Add"]]
    done = {"x", "s", "z", "w", "v"}
    for members in fuse_nodes(nodes, ["i", "c"]):
        for member in members:
            assert set(member.inputs) <= done
            done |= set(member.outputs)
