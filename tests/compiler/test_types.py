"""Kernels support each element type."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto
from thorough import paired

from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.ops import Unsupported
from celosia.compiler.ops.registry import ONNX_TYPES

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def numbers(dtype: str, *shape: int) -> Array:
    """Draw integers of their whole range; floats are partly small and partly large."""
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return RNG.integers(info.min, info.max, shape, dtype, endpoint=True)
    return (RNG.standard_normal(shape) * np.exp(RNG.uniform(-5, 5, shape))).astype(dtype)


def compute(op: str, *arrays: Array, attrs: Any = None, opset: int = 21) -> list[Array]:
    return compile_op(op, attrs or {}, [(x.shape, x.dtype.name) for x in arrays], opset=opset)(*arrays)


ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum}


@pytest.mark.parametrize("dtype, op", paired([*INTEGERS, "float16", "float32", "float64"], ARITHMETIC, 2))
def test_arithmetic(dtype: str, op: str) -> None:
    """Integers wrap and floats are rounded once. 37 elements leave a rest for any vector width."""
    a, b = numbers(dtype, 3, 37), numbers(dtype, 37)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(compute(op, a, b)[0], ARITHMETIC[op](a, b))


@pytest.mark.parametrize("dtype", [*INTEGERS, "float16", "float32", "float64"])
def test_comparisons_and_selections(dtype: str) -> None:
    a, b = numbers(dtype, 5, 70), numbers(dtype, 5, 70)
    b[:, ::3] = a[:, ::3]
    np.testing.assert_array_equal(compute("Less", a, b)[0], a < b)
    np.testing.assert_array_equal(compute("Equal", a, b)[0], a == b)
    np.testing.assert_array_equal(compute("Where", a < b, a, b)[0], np.where(a < b, a, b))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("exponent", ["float16", "bfloat16", "float32"])
def test_a_power_has_the_type_of_its_base(dtype: str, exponent: str) -> None:
    x, y = (np.array(values).astype(name) for values, name in (([1.5, 2, 3], dtype), ([2, -1, 3], exponent)))
    (z,) = compute("Pow", x, y)
    assert z.dtype == x.dtype
    np.testing.assert_array_equal(z, np.array([2.25, 0.5, 27]).astype(dtype))


MOVES: list[tuple[str, dict[str, Any], Any]] = [
    ("Transpose", {"perm": [1, 0]}, lambda x: x.T),
    ("Slice", {}, lambda x: x[1:7:2, 3:]),
    ("Concat", {"axis": 1}, lambda x: np.concatenate([x, x], 1)),
    ("Gather", {"axis": 0}, lambda x: x[[3, 0, 8]]),
    ("Expand", {}, lambda x: np.broadcast_to(x, (2, 9, 50))),
]


@pytest.mark.parametrize(
    "dtype, move", paired([*INTEGERS, "bool", "float16", "float32", "float64", "bfloat16"], MOVES, 2)
)
def test_moves(dtype: str, move: tuple[str, dict[str, Any], Any]) -> None:
    op, attrs, how = move
    x = numbers(dtype, 9, 50)
    given: dict[str, list[Any]] = {
        "Slice": [np.array([1, 3]), np.array([7, 50]), np.array([0, 1]), np.array([2, 1])], "Concat": [x],
        "Gather": [np.array([3, 0, 8])], "Expand": [np.array([2, 9, 50])],
    }  # fmt: skip
    arrays = [x, *given.get(op, [])]
    constant = op in ("Slice", "Expand")
    types = [a if constant and k else (a.shape, a.dtype.name) for k, a in enumerate(arrays)]
    (y,) = compile_op(op, attrs, types)(*arrays)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, how(x))


@pytest.mark.parametrize(("dtype", "axis"), paired([*INTEGERS, "float16", "float32", "float64"], [0, 1]))
def test_extremes(dtype: str, axis: int) -> None:
    x = numbers(dtype, 40, 50)
    np.testing.assert_array_equal(
        compute("ReduceMax", x, attrs={"axes": [axis], "keepdims": 0}, opset=13)[0], x.max(axis)
    )
    np.testing.assert_array_equal(compute("ArgMin", x, attrs={"axis": axis, "keepdims": 0})[0], x.argmin(axis))


# bfloat16: stored so, computed in float32, and rounded once


BFLOAT16: list[tuple[str, dict[str, Any], list[tuple[int, ...]]]] = [
    ("Add", {}, [(3, 37), (37,)]), ("Mul", {}, [(3, 37), (3, 37)]), ("Relu", {}, [(50,)]), ("Tanh", {}, [(50,)]),
    ("Sigmoid", {}, [(50,)]), ("Softmax", {"axis": -1}, [(4, 40)]), ("LayerNormalization", {}, [(4, 40), (40,), (40,)]),
    ("MatMul", {}, [(20, 30), (30, 40)]), ("Gemm", {"transB": 1}, [(20, 30), (40, 30), (40,)]),
    ("Conv", {"pads": [1, 1, 1, 1]}, [(1, 3, 9, 9), (5, 3, 3, 3)]), ("ReduceMean", {"axes": [1]}, [(6, 50)]),
    ("MaxPool", {"kernel_shape": [2, 2]}, [(1, 3, 8, 8)]), ("Clip", {}, [(50,), (), ()]), ("Pow", {}, [(50,), (50,)]),
]  # fmt: skip


@pytest.mark.parametrize("op, attrs, shapes", BFLOAT16)
def test_bfloat16(op: str, attrs: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    arrays = [np.abs(numbers("float32", *shape)).astype(BF16) for shape in shapes]
    (wide,) = compute(op, *(x.astype(np.float32) for x in arrays), attrs=attrs, opset=13 if op == "ReduceMean" else 21)
    (y,) = compute(op, *arrays, attrs=attrs, opset=13 if op == "ReduceMean" else 21)
    assert y.dtype == BF16
    np.testing.assert_array_equal(y, wide.astype(BF16))


def test_float32_is_rounded_to_bfloat16_as_everywhere() -> None:
    x = np.arange(0, 2**32, 65_521, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ties = (np.arange(0, 2**16, 7, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    with np.errstate(all="ignore"):
        x = np.concatenate([x, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
        (y,) = compute("Cast", x, attrs={"to": TensorProto.BFLOAT16})
        want = x.astype(BF16)
        assert np.array_equal(np.isnan(y), np.isnan(want))
        np.testing.assert_array_equal(y[~np.isnan(y)].view(np.uint16), want[~np.isnan(y)].view(np.uint16))
        (back,) = compute("Cast", y, attrs={"to": TensorProto.FLOAT})
        np.testing.assert_array_equal(back, y.astype(np.float32))


def test_float64_is_rounded_to_bfloat16_once() -> None:
    x = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, 1 + 2**-8, -1 - 2**-8 - 2**-50, 1e300, -1e300, 1e-60, np.nan])
    (y,) = compute("Cast", x, attrs={"to": TensorProto.BFLOAT16})
    want = [1 + 2**-7, 1, 1, -1 - 2**-7, np.inf, -np.inf, 0, np.nan]
    np.testing.assert_array_equal(y.astype(np.float64), want)


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool", "float16", "float64"])
def test_bfloat16_to_and_from(dtype: str) -> None:
    number = next(n for n, name in ONNX_TYPES.items() if name == dtype)
    x = np.array([0, 1, 2.5, 100, 3e4, 0.007], BF16)
    x = x[x.astype(np.float64) <= (np.iinfo(dtype).max if dtype in INTEGERS else np.inf)]
    np.testing.assert_array_equal(compute("Cast", x, attrs={"to": number})[0], x.astype(np.float32).astype(dtype))
    y = np.abs(numbers(dtype, 300).astype(np.float64)).astype(dtype)
    np.testing.assert_array_equal(
        compute("Cast", y, attrs={"to": TensorProto.BFLOAT16})[0].astype(np.float32),
        y.astype(np.float32).astype(BF16).astype(np.float32),
    )


# TopK: k maxima


TOP_TYPES = ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "uint32", "int16"]
TOP_SHAPES = [((7, 40), -1, 5), ((40, 6), 0, 3), ((3, 9, 4), 1, 9), ((16,), 0, 16), ((4, 3), 1, 1)]


@pytest.mark.parametrize(("dtype", "which"), paired(TOP_TYPES, product([0, 1], TOP_SHAPES)))
def test_top_k(dtype: str, which: tuple[int, tuple[tuple[int, ...], int, int]]) -> None:
    largest, (shape, axis, k) = which
    x = np.round(numbers("float32", *shape)).astype(dtype)  # with many equal elements
    if dtype.startswith("float"):
        x.flat[:3] = (-0.0, np.inf, -np.inf)
    values, places = compile_op("TopK", {"axis": axis, "largest": largest}, [(shape, dtype), np.array([k])], outputs=2)(
        x, np.array([k])
    )
    wide = x.astype(np.float64)
    order = np.argsort(-wide if largest else wide, axis, kind="stable")
    want = np.take(order, np.arange(k), axis)
    np.testing.assert_array_equal(places, want)
    np.testing.assert_array_equal(values, np.take_along_axis(x, want, axis))


def test_top_k_takes_nan_for_the_greatest() -> None:
    x = np.array([[1, np.nan, 3, -np.nan, np.inf]], np.float32)
    values, places = compile_op("TopK", {}, [(x.shape, "float32"), np.array([3])], outputs=2)(x, np.array([3]))
    assert places.tolist() == [[1, 3, 4]] and np.isnan(values[0, :2]).all()


@pytest.mark.parametrize("a, b", [((0, 3), (3, 4)), ((3, 0), (0, 4)), ((2, 3), (3, 0)), ((0, 2, 4, 5), (1, 2, 5, 6))])
def test_products_of_nothing(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = np.ones(a, np.float32), np.ones(b, np.float32)
    np.testing.assert_array_equal(compute("MatMul", x, y)[0], x @ y, strict=True)


@pytest.mark.parametrize("op", ["QLinearConv", "QLinearMatMul"])
def test_an_integer_product_has_the_type_of_its_zero_point(op: str) -> None:
    """A product with uint8 and zero point z equals one with int8 and z - 128."""
    shapes = ((1, 3, 6, 6), (5, 3, 3, 3)) if op == "QLinearConv" else ((8, 9), (9, 7))
    x, w = (numbers("int8", *shape) for shape in shapes)
    before = x, np.float32(0.02), np.int8(3), w, np.float32(0.03), np.int8(0), np.float32(0.5)
    signed, unsigned = (compute(op, *map(np.asarray, (*before, zero)))[0] for zero in (np.int8(-100), np.uint8(28)))
    assert (signed.dtype, unsigned.dtype) == (np.int8, np.uint8) and len(np.unique(signed)) > 20
    np.testing.assert_array_equal(unsigned, signed.astype(np.int16) + 128)


def test_bool_has_no_powers() -> None:
    with pytest.raises(Unsupported, match="bool has no powers"):
        compute("Pow", np.array([True]), np.array([True]))
