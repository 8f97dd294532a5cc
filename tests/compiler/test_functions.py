"""Functions of floats, and conversions, are accurate over the whole range of their arguments."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.schedule import schedule
from celosia.compiler.expr import call, compute, lower, placeholder

Array = np.ndarray[Any, Any]
Wide = np.longdouble  # at least float64: errors of the reference are far below those that are measured

SPECIAL = [
    0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-20, 1.0, -1.0, 88.7, 88.73, 89, 1e10, 3e38, -87.4, -88.73, -103.9, -104.1,
    -1e10, math.inf, -math.inf, math.nan,
]  # fmt: skip


def arguments() -> Array:
    """Return every 40,009th float32, with all magnitudes, infinities and NaNs, and many values near 0."""
    bits = np.arange(0, 2**32, 40_009, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = [np.linspace(-reach, reach, 60_001) for reach in (0.01, 1, 20, 110)]
    return np.concatenate([np.array(SPECIAL, np.float32), bits, *(each.astype(np.float32) for each in near)])


def errors(actual: Array, exact: Array) -> float:
    """Return the largest distance in units of the last place. Infinities and NaNs must be the same."""
    expected = exact.astype(actual.dtype)
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    info = ml_dtypes.finfo(actual.dtype)
    size = np.maximum(np.abs(exact[finite]), Wide(info.smallest_normal))
    ulp = Wide(info.eps) * np.exp2(np.floor(np.log2(size)))
    return float((np.abs(actual[finite].astype(Wide) - exact[finite]) / ulp).max())


def erf(x: Array) -> Array:
    return np.array([math.erf(float(v)) for v in x], Wide)


def softplus(x: Array) -> Array:
    return np.where(x > 0, x, 0) + np.log1p(np.exp(-np.abs(x)))


FUNCTIONS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "Exp": (np.exp, 1), "Log": (np.log, 4), "Tanh": (np.tanh, 128), "Erf": (erf, 2), "Sin": (np.sin, 2.1),
    "Cos": (np.cos, 2.1), "Tan": (np.tan, 2), "Asin": (np.arcsin, 4), "Acos": (np.arccos, 4), "Atan": (np.arctan, 1),
    "Sinh": (np.sinh, 2), "Cosh": (np.cosh, 2), "Asinh": (np.arcsinh, 2), "Acosh": (np.arccosh, 2),
    "Atanh": (np.arctanh, 2), "Sqrt": (np.sqrt, 0.51), "Reciprocal": (lambda x: 1 / x, 0.51),
    "Softplus": (softplus, 4),
}  # fmt: skip
"""Operator -> (reference, bound in ulp). Those with onnxruntime's bits are this far off: Tanh near 0, above all."""
SAME: list[tuple[str, dict[str, float]]] = [
    *((op, {}) for op in ("Acos", "Asin", "Celu", "Cos", "Elu", "Erf", "Exp", "HardSwish", "Log", "Mish", "Selu")),
    *((op, {}) for op in ("Sigmoid", "Sin", "Softplus", "Softsign", "Tanh")),
    ("Celu", {"alpha": 0.3}), ("Elu", {"alpha": 0.3}), ("Selu", {"alpha": 1.3, "gamma": 0.7}),
]  # fmt: skip
"""With onnxruntime's bits, for all floats."""
NEAR = {"Sin": 25_966, "Cos": 18_838}
"""Below this."""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors have another kernel")
@pytest.mark.parametrize(("op", "attributes"), SAME)
def test_float32_functions_have_onnxruntimes_bits(op: str, attributes: dict[str, float]) -> None:
    pytest.importorskip("onnxruntime")
    from oracle import opened

    x = arguments()
    x = x[: x.size // 4 * 4]  # onnxruntime takes four at a time, and by the C library what is left
    x[np.abs(x) >= NEAR.get(op, math.inf)] = 1
    input_info, output_info = (helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], **attributes)], "g", [input_info], [output_info])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    (expected,) = opened(model).run(None, {"x": x})
    (output,) = compile_op(op, attributes, [(x.shape, "float32")])(x)
    assert np.array_equal(np.isnan(output), np.isnan(expected))
    output[np.isnan(output)] = expected[np.isnan(output)]
    np.testing.assert_array_equal(output.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("op", FUNCTIONS)
def test_float32_functions_are_within_their_bounds(op: str) -> None:
    reference, bound = FUNCTIONS[op]
    x = arguments()
    (y,) = compile_op(op, {}, [(x.shape, "float32")])(x)
    with np.errstate(all="ignore"):
        assert errors(y, reference(x.astype(Wide))) <= bound


@pytest.mark.parametrize("dtype, bound", [("float64", 2), ("float16", 0.6)])
@pytest.mark.parametrize("op", ["Exp", "Log", "Tanh", "Sin"])
def test_functions_of_other_widths(op: str, dtype: str, bound: float) -> None:
    with np.errstate(all="ignore"):
        x = arguments()[::5].astype(dtype)
        (y,) = compile_op(op, {}, [(x.shape, dtype)])(x)
        assert errors(y, FUNCTIONS[op][0](x.astype(Wide))) <= bound


def test_powers_are_within_2_ulp() -> None:
    rng = np.random.default_rng(0)
    base = np.exp(rng.uniform(-30, 30, 100_000)).astype(np.float32)
    exponent = rng.uniform(-3, 3, base.shape).astype(np.float32)
    special = np.array([(a, b) for a in SPECIAL for b in (*SPECIAL, 2, 0.5, -3)], np.float32)
    x, y = np.concatenate([base, special[:, 0]]), np.concatenate([exponent, special[:, 1]])
    (z,) = compile_op("Pow", {}, [(x.shape, "float32")] * 2)(x, y)
    with np.errstate(all="ignore"):
        assert errors(z, np.power(x.astype(Wide), y.astype(Wide))) <= 2


def test_a_processor_whose_floats_are_calls_has_the_same_extremes() -> None:
    """Maxima and minima by comparisons give NaN if an operand is NaN, for two floats and for a row.

    Processors without float instructions use comparisons in place of LLVM's functions.
    """
    values = np.array([0.0, 1.5, -2.0, math.inf, -math.inf, math.nan], np.float32)
    x, y = (np.ascontiguousarray(grid) for grid in np.meshgrid(values, values))
    a, b = (placeholder(x.shape, "float32", name) for name in "ab")
    k = T.reduce_axis(len(values), "k")
    for pair, row, reference in ((T.maximum, T.max, np.maximum), (T.minimum, T.min, np.minimum)):
        both = compute(x.shape, lambda i, j, f=pair: f(a[i, j], b[i, j]), "y")
        rows = compute((len(values),), lambda i, f=row: f(a[i, k], k), "y")
        for tensor, given, expected in ((both, (x, y), reference(x, y)), (rows, (x,), reference.reduce(x, axis=1))):
            (output,) = compile_function(lower(schedule([tensor])), frozenset(("m",)))(*given)
            np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("name", ["exp", "tanh", "log", "erf", "unfused_exp", "sin", "acos", "asin"])
def test_a_processor_without_avx512_gives_the_same(name: str) -> None:
    """Two products replace the scaling by a power of two without AVX-512, with the same results."""
    x = arguments()
    a = placeholder(x.shape, "float32", "a")
    function = lower(schedule([compute(x.shape, lambda i: call(name, a[i]), "y")]))
    (plain,), (here,) = (compile_function(function, f)(x) for f in (frozenset(), None))
    np.testing.assert_array_equal(plain, here)


INTEGERS = {f"{sign}int{bits}": f"{sign}INT{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)}


@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
def test_floats_become_integers_towards_zero_and_saturate(source: str, target: str) -> None:
    info = np.iinfo(target)
    edges = [float(edge) + step for edge in (info.min, info.max, 0) for step in (-2, -1, -0.75, 0, 0.75, 1, 2)]
    with np.errstate(all="ignore"):
        x = np.concatenate([np.array([*edges, *SPECIAL]), np.linspace(-300, 300, 1001)]).astype(source)
    (y,) = compile_op("Cast", {"to": getattr(TensorProto, INTEGERS[target])}, [(x.shape, source)])(x)
    expected = [
        0 if math.isnan(v) else info.max if v > info.max else info.min if v < info.min else int(v) for v in x.tolist()
    ]
    assert y.tolist() == expected
