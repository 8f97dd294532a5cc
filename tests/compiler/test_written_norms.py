"""rounding="correct" recognises normalisations in single operators by their mathematics; results are the real ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from thorough import some, tries

import celosia
from celosia.compiler.graph.quantized.row_polynomials import (
    ELEMENT,
    NUMBER,
    NotARowError,
    Polynomial,
    add,
    mean,
    multiply,
    normal_form,
    power,
    scale,
)
from celosia.hw.spec.config import PRESETS, Config

from ..configs import CONFIGS
from ..oracle import opened
from .written_norms import Form, real, written

PYNQ = replace(PRESETS["pynq"], norm=8)
ROWS, IMAGE = (1, 9, 24), (1, 24, 3, 4)
FORMS = {
    "RMSNorm of Llama": (Form(is_centred=False, inverse="Reciprocal", is_swapped=True), ROWS),
    "LayerNorm2d of ConvNeXt": (Form(axis=1), IMAGE),
    "quantised RMSNorm": (Form(is_centred=False, inverse="Reciprocal", quantised=True), ROWS),
    "quantised LayerNorm2d": (Form(axis=1, mean="product", subtract="Add", casts=True, quantised=True), IMAGE),
    "variance as a difference": (Form(variance="difference", square="Mul", beta=False), ROWS),
    "gamma in the factor": (Form(inverse="Pow", factors="first", mean="sum"), ROWS),
    "channels last": (Form(axis=1, turned=(0, 2, 3, 1), mean="drop", inverse="root last"), IMAGE),
    "an inner axis": (Form(axis=1, is_centred=False, factors="none"), ROWS),
    "several samples": (Form(quantised=True, mean="drop"), (3, 5, 24)),
}


def bytes_like(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.int8]:
    """Draw rows of different means and deviations, some of which have outliers."""
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) * random.uniform(5, 40, (*shape[:-1], 1)) + random.uniform(-30, 30, shape[0])[0]
    x.reshape(-1)[:: max(1, x.size // 7)] *= 3
    return np.clip(np.rint(x), -128, 127).astype(np.int8)


def require_real_result(
    form: Form, shape: tuple[int, ...], cfg: Config, rounding: str = "correct", check: bool = True
) -> None:
    """Compile and run `form`: it must be one QLinearNorm on the accelerator, with the bytes of the real result."""
    x = bytes_like(shape)
    model, sy, zy = written(form, x)
    program = celosia.compile(model, config=cfg, rounding=rounding, place={"*": "accelerator"}, check=check)
    ops = {row["op"]: row["place"] for row in program.placements if row["op"] not in ("Transpose", "Reshape")}
    assert ops == {"QLinearNorm": "accelerator"}
    y = celosia.Runtime(program, device="functional").run({"x": x}).outputs["y"]
    steps = real(form, x) / sy
    for off, side in ((-(2.0**-12), np.maximum), (2.0**-12, np.minimum)):
        bound = np.clip(np.rint(steps + off) + zy, -128, 127)
        np.testing.assert_array_equal(side(y, bound), y)


@pytest.mark.parametrize("name", FORMS)
def test_a_written_norm_is_one_operator(name: str) -> None:
    require_real_result(*FORMS[name], PYNQ)


@pytest.mark.parametrize("name", some(["4x4-softmax2", "4x8-softmax2"], ["4x4-softmax2"]))
def test_on_other_arrays(name: str) -> None:
    for form in ("quantised RMSNorm", "LayerNorm2d of ConvNeXt"):
        require_real_result(*FORMS[form], CONFIGS[name], "bytes")


@st.composite
def forms(draw: st.DrawFn) -> tuple[Form, tuple[int, ...]]:
    is_image = draw(st.booleans())
    shape = (1, draw(st.integers(2, 20)), 2, 3) if is_image else (1, draw(st.integers(1, 5)), draw(st.integers(2, 40)))
    form = Form(
        axis=1 if is_image else -1, is_centred=draw(st.booleans()),
        mean=draw(st.sampled_from(["reduce", "sum", "product", "drop"])), square=draw(st.sampled_from(["Pow", "Mul"])),
        variance=draw(st.sampled_from(["centred", "difference"])),
        inverse=draw(st.sampled_from(["Div", "Reciprocal", "root last", "Pow"])),
        subtract=draw(st.sampled_from(["Sub", "Add"])), factors=draw(st.sampled_from(["last", "first", "none"])),
        is_swapped=draw(st.booleans()), quantised=draw(st.booleans()), casts=draw(st.booleans()),
        turned=draw(st.sampled_from([(), (0, 2, 3, 1)] if is_image else [(), (1, 0, 2)])), beta=draw(st.booleans()),
    )  # fmt: skip
    return form, shape


@settings(max_examples=tries(15), deadline=None)
@given(forms())
def test_any_order_of_operators(form_and_shape: tuple[Form, tuple[int, ...]]) -> None:
    require_real_result(*form_and_shape, PYNQ, check=False)


@pytest.mark.parametrize("name", ["LayerNorm2d of ConvNeXt", "quantised RMSNorm"])
def test_by_default_all_bytes_are_onnxruntimes(name: str) -> None:
    form, shape = FORMS[name]
    x = bytes_like(shape)
    model, _, _ = written(form, x)
    program = celosia.compile(model, config=PYNQ)
    assert "QLinearNorm" not in {row["op"] for row in program.placements}
    y = celosia.Runtime(program, device="functional").run({"x": x}).outputs["y"]
    np.testing.assert_array_equal(y, opened(model, int8=True).run(None, {"x": x})[0])


def single(body: str, shape: str = "1, 4, 8", outputs: str = "int8 y") -> onnx.ModelProto:
    """Return a model of x = DequantizeLinear of the input, the operators `body`, and y = QuantizeLinear(r)."""
    graph = onnx.parser.parse_graph(f"""g (int8[{shape}] q) => ({outputs}) {{
        x = DequantizeLinear(q, sx, zero) {body} y = QuantizeLinear(r, sy, zero)
    }}""")
    arrays = {
        "sx": np.float32(SX), "sy": np.float32(0.04), "zero": np.int8(0), "low": np.int8(-128), "two": np.float32(2),
        "tiny": np.float32(1e-3), "gamma": np.linspace(0.5, 2, 8).astype(np.float32),
        "mixed": np.linspace(-1, 1, 8).astype(np.float32), "rows": np.ones((4, 1), np.float32) * 2,
        "different": np.linspace(0.1, 0.15, 8).astype(np.float32).reshape(8, 1),
    }  # fmt: skip
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items() if n in used)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


SX = 0.05
ROOT = "v = ReduceMean<axes=[-1]>({}) e = Add(v, tiny) s = Sqrt(e) "
OTHERS = {
    "uncentred over a deviation": "m = ReduceMean<axes=[-1]>(x) c = Sub(x, m) p = Mul(c, c) "
    + ROOT.format("p") + "r = Div(x, s)",
    "centred over a mean square": "m = ReduceMean<axes=[-1]>(x) c = Sub(x, m) p = Mul(x, x) "
    + ROOT.format("p") + "r = Div(c, s)",
    "means of two axes": "m = ReduceMean<axes=[-2]>(x) c = Sub(x, m) p = Mul(c, c) "
    + ROOT.format("p") + "r = Div(c, s)",
    "epsilon behind the root": "p = Mul(x, x) v = ReduceMean<axes=[-1]>(p) t = Sqrt(v) s = Add(t, tiny) r = Div(x, s)",
    "a negative scale": "p = Mul(x, x) " + ROOT.format("p") + "d = Div(x, s) r = Mul(d, mixed)",
    "scales of rows": "p = Mul(x, x) " + ROOT.format("p") + "d = Div(x, s) r = Mul(d, rows)",
    "unequal weights": "p = Mul(x, x) v = MatMul(p, different) e = Add(v, tiny) s = Sqrt(e) r = Div(x, s)",
    "the cube": "p = Mul(x, x) c = Mul(p, x) " + ROOT.format("p") + "r = Div(c, s)",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_norm_keeps_its_bytes(name: str) -> None:
    model, x = single(OTHERS[name]), {"q": bytes_like((1, 4, 8), 3)}
    program = celosia.compile(model, config=PYNQ, rounding="correct")
    assert "QLinearNorm" not in {row["op"] for row in program.placements}
    y = celosia.Runtime(program, device="functional").run(x).outputs["y"]
    np.testing.assert_array_equal(y, opened(model, int8=True).run(None, x)[0])


def test_a_range_without_negative_numbers_is_a_relu() -> None:
    """Quantisers fold a Relu into the range of a pair: the normalisation ends before it."""
    body = "p = Mul(x, x) " + ROOT.format("p") + "d = Div(x, s) b = QuantizeLinear(d, sy, low) "
    model = single(body + "f = DequantizeLinear(b, sy, low) r = Mul(f, gamma)")
    x = {"q": bytes_like((1, 4, 8), 3)}
    program = celosia.compile(model, config=PYNQ, rounding="correct")
    assert "QLinearNorm" in {row["op"] for row in program.placements}
    y, expected = celosia.Runtime(program).run(x).outputs["y"], opened(model, int8=True).run(None, x)[0]
    assert np.abs(y - expected.astype(int)).max() <= 1 and y.min() == 0 and y.max() > 20


def test_a_norm_whose_float_result_is_returned_stays() -> None:
    body = "p = Mul(x, x) " + ROOT.format("p") + "r = Div(x, s)"
    model, x = single(body, outputs="int8 y, float[1, 4, 8] r"), {"q": bytes_like((1, 4, 8), 3)}
    program = celosia.compile(model, config=PYNQ, rounding="correct")
    expected = opened(model, int8=True).run(None, x)
    for name, array in zip("yr", expected):
        np.testing.assert_array_equal(celosia.Runtime(program).run(x).outputs[name], array)


def test_two_readers_of_different_steps_get_a_norm_each() -> None:
    """A result that is read before gamma and behind it is two normalisations of the same bytes."""
    body = "p = Mul(x, x) " + ROOT.format("p") + "r = Div(x, s) t = Mul(gamma, r) z = QuantizeLinear(t, sy, zero)"
    model, x = single(body, outputs="int8 y, int8 z"), bytes_like((1, 4, 8), 3)
    program = celosia.compile(model, config=PYNQ, rounding="correct")
    assert [row["op"] for row in program.placements].count("QLinearNorm") == 2
    outputs = celosia.Runtime(program).run({"q": x}).outputs
    u = x * np.float64(np.float32(SX))
    steps = u / np.sqrt((u**2).mean(-1, keepdims=True) + 1e-3) / np.float32(0.04)
    for name, factor in (("y", 1), ("z", np.linspace(0.5, 2, 8))):
        assert np.abs(outputs[name] - np.clip(steps * factor, -128, 127)).max() < 0.5 + 2.0**-10


# Polynomials ----------------------------------------------------------------------------------------------------------


def number(value: float) -> Polynomial:
    return Polynomial({NUMBER: np.full(1, value)})


X = Polynomial({ELEMENT: np.ones(1)})


@given(st.lists(st.floats(-3, 3).map(lambda v: round(v, 2)), min_size=1, max_size=4))
def test_polynomials_compute_sums_products_and_means(coefficients: list[float]) -> None:
    """A polynomial in x and its mean has the value that numpy computes in the same steps."""
    x = np.random.default_rng(0).normal(size=50)
    value, polynomial = x, X
    for coefficient in coefficients[:1]:
        value, polynomial = (
            value * coefficient + coefficient,
            add(scale(polynomial, np.full(1, coefficient)), number(coefficient)),
        )
    squared, average = multiply(polynomial, polynomial), mean(multiply(polynomial, polynomial))
    values = {ELEMENT: x, NUMBER: 1.0, (2, 0, 0, 0): x**2, (0, 1, 0, 0): x.mean(), (0, 0, 1, 0): (x**2).mean()}
    for p, expected in ((squared, value**2), (average, np.full(50, (value**2).mean()))):
        total = sum((values[exponents] * c for exponents, c in p.terms.items()), np.zeros(50))
        np.testing.assert_allclose(total, expected, atol=1e-9)


def test_roots_are_those_of_variances() -> None:
    square = mean(multiply(X, X))
    assert normal_form(multiply(X, power(square, -0.5))) is not None
    for polynomial in (X, mean(X), add(square, mean(X)), add(square, number(-1)), scale(square, -np.ones(1))):
        with pytest.raises(NotARowError):
            power(polynomial, -0.5)
    with pytest.raises(NotARowError):  # roots of two variances
        add(power(square, -0.5), power(add(square, number(1)), -0.5))
