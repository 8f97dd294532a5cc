"""Simplification passes give the expected graphs as text, and no rewrite changes a result."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graph_text import after, lines, proto
from oracle import opened

import celosia
from celosia.compiler.graph.passes import Pipeline
from celosia.compiler.graph.pipeline import PASSES
from celosia.compiler.graph.simplify.convolutions import fold_batchnorm
from celosia.compiler.graph.simplify.redundant import RULES, merge_equal, remove_dead, simplify
from celosia.driver.runtime import Runtime

KINDS = {"float": np.float32, "int32": np.int32, "uint8": np.uint8, "bool": np.bool_, "double": np.float64}
F = "float z = {0.0}, float nz = {-0.0}, float one = {1.0}, float[1,1,1] ones = {1.0}"
I = "int64[2] perm = {3, 2}, int64[2] zeros = {0, 0}, int64[4] nopads = {0, 0, 0, 0}, int64[2] ends = {9, 9}"
CLIPS = "float lo = {-1.0}, float hi = {6.0}, float c2 = {0.0}, float far = {9.0}, int32 i0 = {0}, int32 i1 = {1}"

# (element type of x[2,3], its operators, what is left of them); values that pass on a rule's border stay.
CASES: dict[str, tuple[str, str, str]] = {
    "identity": ("float", "h = Identity(x)  y = Neg(h)", "y = Neg(x)"),
    "returned": ("float", "y = Identity(x)", "y = Identity(x)"),
    "x + 0.0": ("float", "h = Add(x, z)  y = Neg(h)", "h = Add(x, 0)\ny = Neg(h)"),
    "x + -0.0": ("float", "h = Add(x, nz)  y = Neg(h)", "y = Neg(x)"),
    "x - 0.0": ("float", "h = Sub(x, z)  y = Neg(h)", "y = Neg(x)"),
    "x - -0.0": ("float", "h = Sub(x, nz)  y = Neg(h)", "h = Sub(x, -0)\ny = Neg(h)"),
    "0.0 - x": ("float", "h = Sub(z, x)  y = Neg(h)", "h = Sub(0, x)\ny = Neg(h)"),
    "1 * x": ("float", "h = Mul(one, x)  y = Neg(h)", "y = Neg(x)"),
    "x / 1": ("float", "h = Div(x, one)  y = Neg(h)", "y = Neg(x)"),
    "1 / x": ("float", "h = Div(one, x)  y = Neg(h)", "h = Div(1, x)\ny = Neg(h)"),
    "a larger shape": ("float", "h = Mul(x, ones)  y = Neg(h)", "h = Mul(x, [[[1]]])\ny = Neg(h)"),
    "integers": ("int32", "h = Add(x, i0)  k = Mul(h, i1)  y = Neg(k)", "y = Neg(x)"),
    "Relu twice": ("float", "h = Relu(x)  y = Relu(h)", "y = Relu(x)"),
    "Neg twice": ("float", "h = Neg(x)  k = Neg(h)  y = Relu(k)", "y = Relu(x)"),
    "Not twice": ("bool", "h = Not(x)  k = Not(h)  y = Not(k)", "y = Not(x)"),
    "Transpose back": ("float", "h = Transpose(x)  k = Transpose(h)  y = Neg(k)", "y = Neg(x)"),
    "Transpose of nothing": ("float", "h = Transpose<perm = [0, 1]>(x)  y = Neg(h)", "y = Neg(x)"),
    "Reshape twice": ("float", "h = Reshape(x, perm)  k = Flatten<axis = 0>(h)  y = Neg(k)",
                      "k = Reshape(x, [1, 6])\ny = Neg(k)"),
    "Reshape back": ("float", "h = Flatten<axis = 0>(x)  k = Squeeze(h)  y = Neg(k)",
                     "k = Reshape(x, [6])\ny = Neg(k)"),
    "Cast to itself": ("float", "h = Cast<to = 1>(x)  y = Neg(h)", "y = Neg(x)"),
    "Cast and back": ("float", "h = Cast<to = 11>(x)  k = Cast<to = 1>(h)  y = Neg(k)", "y = Neg(x)"),
    "Cast that loses": ("double", "h = Cast<to = 1>(x)  k = Cast<to = 11>(h)  y = Neg(k)",
                        "h = Cast(x) to=1\nk = Cast(h) to=11\ny = Neg(k)"),
    "Cast over a wider integer": ("uint8", "h = Cast<to = 6>(x)  y = Cast<to = 3>(h)", "y = Cast(x) to=3"),
    "Cast over a float": ("int32", "h = Cast<to = 11>(x)  y = Cast<to = 3>(h)",
                          "h = Cast(x) to=11\ny = Cast(h) to=3"),
    "Clip twice": ("float", "h = Clip(x, lo, hi)  y = Clip(h, c2)", "y = Clip(x, 0, 6)"),
    "Clips apart": ("float", "h = Clip(x, lo, hi)  y = Clip(h, far)", "h = Clip(x, -1, 6)\ny = Clip(h, 9)"),
    "Dropout": ("float", "h = Dropout(x)  y = Neg(h)", "y = Neg(x)"),
    "Pad by nothing": ("float", "h = Pad(x, nopads)  y = Neg(h)", "y = Neg(x)"),
    "Slice of all": ("float", "h = Slice(x, zeros, ends)  y = Neg(h)", "y = Neg(x)"),
    "Concat of one": ("float", "h = Concat<axis = 0>(x)  y = Neg(h)", "y = Neg(x)"),
    "Max of one": ("float", "h = Max(x)  y = Neg(h)", "y = Neg(x)"),
}  # fmt: skip


def source(kind: str, operators: str) -> str:
    return f"g ({kind}[2,3] x) => (y) <{F}, {I}, {CLIPS}> {{ {operators} }}"


@pytest.mark.parametrize("name", CASES)
def test_identities(name: str) -> None:
    kind, operators, expected = CASES[name]
    made = after(simplify, source(kind, operators)).splitlines()[1:]
    untyped = [f"{line.split()[0]} = {line.split(' = ', 1)[1]}" for line in made]
    assert untyped == expected.splitlines()


def special(kind: str) -> np.ndarray:
    """Return six elements at the limits of a type."""
    dtype = np.dtype(KINDS[kind])
    if dtype.kind == "f":
        return np.array([[np.nan, -0.0, 0.0], [np.inf, -np.inf, 7.5]], dtype)
    if dtype.kind == "b":
        return np.array([[True, False, True], [False, True, False]])
    info = np.iinfo(dtype)
    return np.array([[info.min, info.max, 0], [1, 100, 5]], dtype)


@pytest.mark.parametrize("name", CASES)
def test_identities_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, operators, _ = CASES[name]
    model, feed = proto(source(kind, operators)), {"x": special(kind)}
    output = Runtime(celosia.compile(model, "tiny")).run(feed).outputs["y"]
    monkeypatch.setattr(
        "celosia.compiler.graph.pipeline.PASSES",
        Pipeline(*(graph_pass for graph_pass in PASSES if graph_pass.name != "identities")),
    )
    plain = Runtime(celosia.compile(model, "tiny")).run(feed).outputs["y"]
    assert (output.dtype, output.shape, output.tobytes()) == (plain.dtype, plain.shape, plain.tobytes())


def test_every_rule_has_a_case() -> None:
    tested = {
        node.op_type for kind, operators, _ in CASES.values() for node in proto(source(kind, operators)).graph.node
    }
    same = {"Sum", "Min", "Mean", "Expand", "Tile", "Abs", "Ceil", "Floor", "Round", "Sign", "BitwiseNot", "Unsqueeze"}
    assert set(RULES) - tested == same  # which share a rule with one that is tested


def test_what_is_computed_twice() -> None:
    text = """
    g (float[2,3] x) => (float[2,3] y, float[2,3] e) <float a = {2.0}, float b = {2.0}, float c = {3.0}> {
      p = Mul(x, a)
      q = Mul(x, b)
      r = Mul(x, c)
      s = Add(p, q)
      t = Sub(s, r)
      d = Exp(x)
      e = Exp(x)
      u = RandomNormalLike<seed = 1.0>(x)
      v = RandomNormalLike<seed = 1.0>(x)
      w = Sum(t, d, u, v)
      y = Neg(w)
    }
    """
    assert after(merge_equal, text) == lines("""
    (x float32[2,3]) -> (y float32[2,3], e float32[2,3])
      p float32[2,3] = Mul(x, 2)
      r float32[2,3] = Mul(x, 3)
      s float32[2,3] = Add(p, p)
      t float32[2,3] = Sub(s, r)
      d float32[2,3] = Exp(x)
      e float32[2,3] = Exp(x)
      u float32[2,3] = RandomNormalLike(x) seed=1
      v float32[2,3] = RandomNormalLike(x) seed=1
      w float32[2,3] = Sum(t, d, u, v)
      y float32[2,3] = Neg(w)
    """)


def test_what_nothing_reads() -> None:
    text = "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { h = Add(x, w)  k = Neg(h)  y = Relu(x) }"
    assert after(remove_dead, text) == "(x float32[2]) -> (y float32[2])\n  y float32[2] = Relu(x)"


NORM = "float[2] s = {2.0, 0.5}, float[2] o = {1.0, -1.0}, float[2] m = {0.5, 0.25}, float[2] v = {1.0, 4.0}"
CONV = "float[2,2,1,1] w = {1.0, 2.0, 3.0, 4.0}, float[2,1,1] c = {2.0, 3.0}, float[2,2] g = {1.0, 2.0, 3.0, 4.0}"
FOLDED = {
    "Conv": ("h = Conv(x, w)  y = BatchNormalization<epsilon = 0.0>(h, s, o, m, v)", ["Conv"]),
    "ConvTranspose": ("h = ConvTranspose(x, w)  y = BatchNormalization(h, s, o, m, v)", ["ConvTranspose"]),
    "Gemm": ("f = Flatten(x)  h = Gemm<beta = 0.5>(f, g, s)  y = BatchNormalization(h, s, o, m, v)",
             ["Flatten", "Gemm"]),
    "Gemm turned": ("f = Flatten(x)  h = Gemm<transB = 1>(f, g)  y = BatchNormalization(h, s, o, m, v)",
                    ["Flatten", "Gemm"]),
    "Mul and Add": ("h = Conv(x, w, s)  k = Mul(h, c)  l = Add(c, k)  d = Div(l, c)  y = Sub(c, d)", ["Conv"]),
    "read twice": ("h = Conv(x, w)  k = BatchNormalization(h, s, o, m, v)  y = Add(h, k)",
                   ["Conv", "BatchNormalization", "Add"]),
    "grouped": ("h = ConvTranspose<group = 2>(x, t)  y = BatchNormalization(h, s, o, m, v)", ["ConvTranspose"]),
    "along rows": ("h = Conv(x, w)  y = Mul(h, r)", ["Conv", "Mul"]),
    "quantised": ("q = QuantizeLinear(x, qs, qz)  p = DequantizeLinear(q, qs, qz)  h = Conv(p, w)  "
                  "y = BatchNormalization(h, s, o, m, v)",
                  ["QuantizeLinear", "DequantizeLinear", "Conv", "BatchNormalization"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_batch_normalisation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operators, left = FOLDED[name]
    size = 1 if "Gemm" in name else 3
    more = "float[2,1,1,1] t = {1.0, 2.0}, float[3,1] r = {1.0, 2.0, 3.0}, float qs = {0.1}, int8 qz = {0}"
    model = proto(f"g (float[1,2,{size},{size}] x) => (y) <{NORM}, {CONV}, {more}> {{ {operators} }}")
    seen: list[str] = []

    def watch(name: str, graph: object) -> None:
        if name == "batch-norm":
            seen.extend(node.op_type for node in graph.graph)  # type: ignore[attr-defined]

    x = np.random.default_rng(0).standard_normal((1, 2, size, size)).astype(np.float32)
    output = Runtime(celosia.compile(model, "tiny", watch=watch)).run({"x": x}).outputs["y"]
    assert seen == left
    monkeypatch.setattr(
        "celosia.compiler.graph.pipeline.PASSES",
        Pipeline(*(graph_pass for graph_pass in PASSES if graph_pass.name != "batch-norm")),
    )
    plain = Runtime(celosia.compile(model, "tiny")).run({"x": x}).outputs["y"]
    np.testing.assert_allclose(output, plain, rtol=1e-5, atol=1e-6)


def test_batch_normalisation_as_text() -> None:
    text = f"g (float[1,2,3,3] x) => (float[1,2,3,3] y) <{NORM}, {CONV}> {{ {FOLDED['Conv'][0]} }}"
    assert after(fold_batchnorm, text) == lines("""
    (x float32[1,2,3,3]) -> (y float32[1,2,3,3])
      y float32[1,2,3,3] = Conv(x, [[[[2]], [[4]]], [[[0.75]], [[1]]]], [0, -1.0625])
    """)


def test_what_overflows_stays() -> None:
    text = "g (float[1,1,1,1] x) => (y) <float[1,1,1,1] w = {1e30}, float c = {1e30}> { h = Conv(x, w)  y = Mul(h, c) }"
    assert "Mul" in after(fold_batchnorm, text)


def test_models_without_shapes_keep_their_operators() -> None:
    """A rule that needs shapes does not apply to a graph without shapes."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[4] x, int64[1] n) => (float[?] y) '
        "{ h = Reshape(x, n)  k = Expand(h, n)  y = Neg(k) }"
    )
    output = Runtime(celosia.compile(model, "tiny")).run({"x": np.ones(4, np.float32), "n": np.array([4])}).outputs["y"]
    assert output.tolist() == [-1] * 4


def test_what_several_views_read_stays_bytes() -> None:
    """Redundant quantisation pairs after several views of one tensor all cancel.

    Some quantisers write a view and a pair for each product.
    """
    text = """<ir_version: 8, opset_import: ["" : 17]> g (int8[1, 8, 16] x8) => (int8[8, 16] y8)
    <float s = {0.05}, int8 z = {1}, float ws = {0.01}, int8 wz = {0}, int64[2] rows = {-1, 16}>
    {
        x = DequantizeLinear(x8, s, z)
        r = Relu(x)
        r8 = QuantizeLinear(r, s, z)
        rf = DequantizeLinear(r8, s, z)
        a = Reshape(rf, rows)
        b = Reshape(rf, rows)
        a8 = QuantizeLinear(a, s, z)
        b8 = QuantizeLinear(b, s, z)
        af = DequantizeLinear(a8, s, z)
        bf = DequantizeLinear(b8, s, z)
        w = DequantizeLinear(w8, ws, wz)
        v = DequantizeLinear(v8, ws, wz)
        p = MatMul(af, w)
        q = MatMul(bf, v)
        p8 = QuantizeLinear(p, s, z)
        q8 = QuantizeLinear(q, s, z)
        pf = DequantizeLinear(p8, s, z)
        qf = DequantizeLinear(q8, s, z)
        y = Add(pf, qf)
        y8 = QuantizeLinear(y, s, z)
    }"""
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name in ("w8", "v8"):
        array = random.integers(-128, 128, (16, 16)).astype(np.int8)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    program = celosia.compile(model, "tiny")
    assert not any(row["place"] == "cpu" for row in program.placements)
    x = random.integers(-128, 128, (1, 8, 16)).astype(np.int8)
    (expected,) = opened(model, int8=True).run(None, {"x8": x})
    np.testing.assert_array_equal(celosia.Runtime(program).run({"x8": x}).outputs["y8"], expected)
