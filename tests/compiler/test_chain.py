"""Float functions between DequantizeLinear and QuantizeLinear become tables with onnxruntime's bytes for all inputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graph_text import model, proto
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import opened
from thorough import tries

import celosia
from celosia.compiler import numerics
from celosia.compiler.graph.quantized import tables
from celosia.compiler.graph.quantized.integerise import Integerise
from celosia.compiler.graph.simplify.fold import fold
from celosia.driver.runtime import Runtime

UNARY = sorted(tables.UNARY_OPS - {"Atan", "BitwiseNot", "Cast", "IsInf", "IsNaN", "Not", "QuickGelu", "Swish"})
"""Functions of floats whose kernels have onnxruntime's bits, in the opset of these models."""
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu", "Mean", "Where")
"""Operators of two tensors; of Where the condition, too."""
SCALES = st.integers(3, 300).map(lambda n: n / 3000)


def source(operators: str, sx: float, zx: int, sy: float, zy: int, kind: str = "int8") -> str:
    """Return a graph from all bytes x8 to y8, with `operators` from x to y."""
    return f"""g ({kind}[1,1,16,16] x8) => ({kind}[1,1,16,16] y8)
        <float sx = {{{sx!r}}}, {kind} zx = {{{zx}}}, float sy = {{{sy!r}}}, {kind} zy = {{{zy}}},
         float c = {{1.5}}, float d = {{-0.75}}> {{
        x = DequantizeLinear(x8, sx, zx)
        {operators}
        y8 = QuantizeLinear(y, sy, zy) }}"""


def all_bytes(kind: str) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(kind).reshape(1, 1, 16, 16)


def expected(proto: onnx.ModelProto, feed: np.ndarray) -> np.ndarray:
    session = opened(proto, int8=True)
    return session.run(None, {"x8": feed})[0]


@st.composite
def chains(draw: st.DrawFn) -> str:
    """Draw operators on earlier values; the last one is never a single quantised operator."""
    lines, known = [], ["x"]
    for number in range(draw(st.integers(1, 4))):
        name = f"h{number}"
        if draw(st.booleans()):
            lines.append(f"{name} = {draw(st.sampled_from(UNARY))}({draw(st.sampled_from(known))})")
        else:
            op, a = draw(st.sampled_from(BINARY)), draw(st.sampled_from(known))
            b = draw(st.sampled_from(["c", "d"])) if op == "Div" else draw(st.sampled_from([*known, "c", "d"]))
            if op == "Where":
                lines.append(f"b{number} = {draw(st.sampled_from(['Less', 'GreaterOrEqual', 'Equal']))}({a}, c)")
                a = f"b{number}, {a}"
            lines.append(f"{name} = {op}({a}, {b})")
        known.append(name)
    return "\n".join([*lines, f"y = Mul({known[-1]}, x)"])


@settings(max_examples=tries(30), deadline=None)
@given(
    chains(), SCALES, st.integers(-128, 127), SCALES,
    st.integers(-128, 127), st.sampled_from(("int8", "uint8")),
)  # fmt: skip
def test_a_chain_is_one_table(operators: str, sx: float, zx: int, sy: float, zy: int, kind: str) -> None:
    shift = 128 if kind == "uint8" else 0
    onnx_model = proto(source(operators, sx, zx + shift, sy, zy + shift, kind))
    program = celosia.compile(onnx_model, "tiny")
    assert [(row["op"], row["place"]) for row in program.placements] == [("Table", "accelerator")]
    output = Runtime(program).run({"x8": all_bytes(kind)}).outputs["y8"]
    np.testing.assert_array_equal(output, expected(onnx_model, all_bytes(kind)))


@pytest.mark.parametrize("sx", [0.01, 0.02, 0.037, 0.05, 0.11])
def test_silu(sx: float) -> None:
    onnx_model = proto(source("s = Sigmoid(x)  y = Mul(x, s)", sx, -3, sx * 0.6, -120))
    output = Runtime(celosia.compile(onnx_model, "tiny")).run({"x8": all_bytes("int8")}).outputs["y8"]
    np.testing.assert_array_equal(output, expected(onnx_model, all_bytes("int8")))


@pytest.mark.parametrize(
    "operators",
    [
        "s = Sigmoid(x)  y = Mul(s, t)",  # of two tensors
        "s = Erf(x)  y = Add(s, wide)",  # of a constant of several elements
        "s = Sigmoid(x)  y = Softmax(s)",  # an operator of several elements
    ],
)
def test_what_is_no_function_of_one_tensor_stays(operators: str) -> None:
    text = source(operators, 0.1, 0, 0.1, 0).replace("int8[1,1,16,16] x8)", "int8[1,1,16,16] x8, float[1,1,16,16] t)")
    graph = model(text.replace("float c =", "float[16] wide = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float c ="))
    Integerise(graph).run()
    assert "Table" not in [node.op_type for node in graph.graph]


def test_a_chain_ends_at_its_longest() -> None:
    lines = ["h0 = Neg(x)", *(f"h{k + 1} = Mul(h{k}, h{k})" for k in range(tables.MAX_CHAIN)), "y = Neg(h1)"]
    graph = model(source("\n".join(lines).replace("y = Neg(h1)", f"y = Neg(h{tables.MAX_CHAIN})"), 0.1, 0, 0.1, 0))
    Integerise(graph).run()
    assert "Table" not in [node.op_type for node in graph.graph]


@settings(max_examples=tries(20), deadline=None)
@given(st.data())
def test_slopes_of_channels(data: st.DataObject) -> None:
    """PRelu of rows, sequences or images has one slope for each channel, of either sign, in floats or in bytes."""
    draw, kind = data.draw, data.draw(st.sampled_from(("int8", "uint8")))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    channels, shift = draw(st.integers(2, 20)), 128 if kind == "uint8" else 0
    sx, sy = draw(SCALES), draw(SCALES)
    zx, zy = (draw(st.integers(-128, 127)) + shift for _ in range(2))
    signs, in_bytes = draw(st.sampled_from(((0, 1), (-1, 1), (-1, 0)))), draw(st.booleans())
    dims, pixels = draw(
        st.sampled_from((((256, channels), ()), ((1, channels, 256), (1,)), ((1, channels, 8, 32), (1, 1))))
    )
    sizes = ",".join(map(str, dims))
    onnx_model = proto(f"""g ({kind}[{sizes}] x8) => ({kind}[{sizes}] y8)
        <float sx = {{{sx!r}}}, {kind} zx = {{{zx}}}, float sy = {{{sy!r}}}, {kind} zy = {{{zy}}},
         float s = {{0.007}}, int8 z = {{0}}> {{
        x = DequantizeLinear(x8, sx, zx)
        {"slope = DequantizeLinear(slope8, s, z)" if in_bytes else ""}
        y = PRelu(x, slope)
        y8 = QuantizeLinear(y, sy, zy) }}""")
    slopes = rng.uniform(*signs, (channels, *pixels)).astype(np.float32)
    array, name = ((slopes * 127).astype(np.int8), "slope8") if in_bytes else (slopes, "slope")
    onnx_model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    columns = np.stack([rng.permutation(all_bytes(kind).reshape(-1)) for _ in range(channels)])
    x = np.ascontiguousarray(columns.T if len(dims) == 2 else columns.reshape(dims))
    program = celosia.compile(onnx_model, "tiny", place={"*": "accelerator"})
    np.testing.assert_array_equal(Runtime(program).run({"x8": x}).outputs["y8"], expected(onnx_model, x))
    floats = array.astype(np.float32) * np.float32(0.007) if in_bytes else array
    if not np.any(array == 0) and numerics.fit_slopes(floats, sx, zx, sy, zy, np.dtype(kind)) is not None:
        assert program.launches and program.macs_accelerator == program.macs_total == 0


@pytest.mark.parametrize("slope", [np.inf, np.nan])
def test_a_slope_that_is_no_number_stays(slope: float) -> None:
    assert numerics.fit_slopes([0.5, slope], 0.1, 0, 0.1, 0, np.int8) is None


@pytest.mark.parametrize("op", ["GlobalMaxPool(x)", *(f"ReduceMax<keepdims = {n}>(x, axes)" for n in (0, 1))])
@pytest.mark.parametrize(("height", "width"), [(1, 5), (7, 7), (15, 15), (16, 15), (40, 3), (61, 67)])
@pytest.mark.parametrize("sy", [0.03, 0.05])
def test_maxima_of_images(op: str, height: int, width: int, sy: float) -> None:
    """MaxPool has windows of any size, with the scale of its input or another one."""
    dims = "2,5" if "keepdims = 0" in op else "2,5,1,1"
    onnx_model = proto(f"""g (int8[2,5,{height},{width}] x8) => (int8[{dims}] y8)
        <float sx = {{0.03}}, int8 zx = {{3}}, float sy = {{{sy}}}, int8 zy = {{3}}, int64[2] axes = {{-1, 2}}> {{
        x = DequantizeLinear(x8, sx, zx)
        y = {op}
        y8 = QuantizeLinear(y, sy, zy) }}""")
    x = np.random.default_rng(height).integers(-128, 100, (2, 5, height, width)).astype(np.int8)
    program = celosia.compile(onnx_model, "tiny")
    assert [row["op"] for row in program.placements if row["place"] == "accelerator"].count("MaxPool") >= 1
    np.testing.assert_array_equal(Runtime(program).run({"x8": x}).outputs["y8"], expected(onnx_model, x))


@pytest.mark.parametrize("perm", [[1, 0], None])
def test_weights_behind_a_transposition(perm: list[int] | None) -> None:
    """Weights may be quantised by rows and then transposed.

    PyTorch's Linear is exported so for three dimensions and more.
    """
    rng = np.random.default_rng(0)
    weights, scales = rng.integers(-127, 128, (6, 8)).astype(np.int8), rng.uniform(0.001, 0.01, 6).astype(np.float32)
    onnx_model = proto(f"""g (int8[2,3,8] x8) => (int8[2,3,6] y8)
        <float sx = {{0.02}}, int8 zx = {{-5}}, float sy = {{0.03}}, int8 zy = {{4}},
         float[6] bias = {{0.3, -2, 1, 0.7, 0, 9}}> {{
        x = DequantizeLinear(x8, sx, zx)
        w = DequantizeLinear<axis = 0>(w8, sw, zw)
        t = Transpose{"<perm = [1, 0]>" if perm else ""}(w)
        p = MatMul(x, t)
        y = Add(p, bias)
        y8 = QuantizeLinear(y, sy, zy) }}""")
    for name, array in ("w8", weights), ("sw", scales), ("zw", np.zeros(6, np.int8)):
        onnx_model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x = rng.integers(-128, 128, (2, 3, 8)).astype(np.int8)
    program = celosia.compile(onnx_model, "tiny")
    assert program.macs_accelerator == program.macs_total > 0
    np.testing.assert_array_equal(Runtime(program).run({"x8": x}).outputs["y8"], expected(onnx_model, x))


def test_a_type_is_known_without_a_value() -> None:
    """CastLike of a constant is folded, as torch.onnx writes the bounds of a clamp."""
    graph = model("g (float[4] x) => (float[4] y) <int64 six = {6}> { c = CastLike(six, x)  y = Min(x, c) }")
    fold(graph)
    assert [node.op_type for node in graph.graph] == ["Min"]
    graph = model("g (float[4] x, int64 six) => (float[4] y) { c = CastLike(six, x)  y = Min(x, c) }")
    fold(graph)
    assert [node.op_type for node in graph.graph] == ["CastLike", "Min"]
