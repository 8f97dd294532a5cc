"""Passes change the bodies of If and Loop, and results stay onnxruntime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graph_text import proto
from numpy.typing import NDArray
from oracle import opened

import celosia
from celosia.compiler.graph.importer import import_static
from celosia.compiler.graph.pipeline import PASSES
from celosia.driver.runtime import Runtime

QDQ = """
g (bool[1] c, int8[1, 4, 5, 5] x8) => (float[1, 3, 5, 5] y)
<float s = {0.1}, int8 z = {3}, float[3] sw = {0.02, 0.03, 0.01}, int8[3] zw = {0, 0, 0}, float sy = {0.4},
 int8 zy = {-5}, int8[3, 4, 1, 1] w8 = {1, -2, 3, 4, 5, -60, 7, 80, -9, 10, 11, 120}> {
  y = If (c) <
    then_branch = a () => (float[1, 3, 5, 5] p) {
      xf = DequantizeLinear(x8, s, z)
      wf = DequantizeLinear<axis = 0>(w8, sw, zw)
      q = Conv(xf, wf)
      q8 = QuantizeLinear(q, sy, zy)
      p = DequantizeLinear(q8, sy, zy)
    },
    else_branch = b () => (float[1, 3, 5, 5] p) {
      one = Constant<value = float {1.0}>()
      two = Add(one, one)
      wf = DequantizeLinear<axis = 0>(w8, sw, zw)
      k = Mul(wf, two)
      xf = DequantizeLinear(x8, s, z)
      p = Conv(xf, k)
    }
  >
}
"""
OUTSIDE = QDQ.replace("      xf = DequantizeLinear(x8, s, z)\n", "").replace(
    "  y = If", "  xf = DequantizeLinear(x8, s, z)\n  y = If"
)
"""onnxruntime computes this one in floats."""
LOOP = """
g (int64 n, float[2, 3] x) => (float[2, 3] y) <float[3] one = {1, 1, 1}> {
  always = Constant<value = bool {1}>()
  y = Loop (n, always) <body = b (int64 i, bool go, float[2, 3] v) => (bool more, float[2, 3] next) {
    two = Add(one, one)
    half = Div(one, two)
    same = Identity(v)
    twice = Transpose<perm = [1, 0]>(same)
    back = Transpose<perm = [1, 0]>(twice)
    unused = Neg(back)
    next = Mul(back, half)
    more = Identity(go)
  }>
}
"""
LOOP = LOOP.replace("Loop (n, always)", "Loop (n, always, x)")
BYTES = [{"c": np.array([c]), "x8": np.arange(100).reshape(1, 4, 5, 5).astype(np.int8)} for c in (True, False)]
CASES: dict[str, tuple[str, list[dict[str, NDArray[Any]]]]] = {
    "if": (QDQ, BYTES),
    "outside": (OUTSIDE, BYTES),
    "loop": (LOOP, [{"n": np.array(n), "x": np.arange(6, dtype=np.float32).reshape(2, 3)} for n in (0, 1, 5)]),
}


def inside(source: str) -> list[str]:
    """Return the operators in the bodies after all passes."""
    model = import_static(proto(source, 17))
    PASSES.run(model)
    return [node.op_type for graph in model.graph.subgraphs() for node in graph]


def test_patterns_in_a_branch_become_integer_operators() -> None:
    assert "QLinearConv" not in inside(OUTSIDE)
    assert inside(QDQ).count("QLinearConv") == 1 and "QuantizeLinear" not in inside(QDQ)
    assert "Add" not in inside(QDQ) and "Mul" not in inside(QDQ)


def test_a_body_is_folded_and_tidied() -> None:
    assert sorted(set(inside(LOOP)) - {"Identity"}) == ["Mul"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("hostile", [False, True])
def test_against_onnxruntime(name: str, hostile: bool) -> None:
    """Models with subgraphs give onnxruntime's results. hostile: nodes inside of bodies have equal names."""
    source, feeds = CASES[name]
    model = proto(source, 17)
    session = opened(model, int8=True)
    if hostile:
        for node in model.graph.node:
            for body in (attr.g for attr in node.attribute if attr.type == onnx.AttributeProto.GRAPH):
                for inner in body.node:
                    inner.name = "same"
    runtime = Runtime(celosia.compile(model, "tiny"))
    for feed in feeds:
        (wanted,) = session.run(None, feed)
        (found,) = runtime.run(feed).outputs.values()
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_value_from_outside_keeps_its_name() -> None:
    """A branch that returns outer bytes with their own scale returns them under their own name."""
    source = """
    g (bool[1] c, float[4] x) => (int8[4] x8, int8[4] y) <float s = {0.1}, int8 z = {3}> {
      x8 = QuantizeLinear(x, s, z)
      y = If (c) <
        then_branch = a () => (int8[4] p) { f = DequantizeLinear(x8, s, z) p = QuantizeLinear(f, s, z) },
        else_branch = b () => (int8[4] p) { p = Neg(x8) }
      >
    }
    """
    model = import_static(proto(source, 17))
    PASSES.run(model)
    assert [value.name for value in model.graph.outputs] == ["x8", "y"]
    assert isinstance(model.graph, ir.Graph)
    outputs = (
        Runtime(celosia.compile(proto(source, 17), "tiny"))
        .run({"c": np.array([True]), "x": np.array([0.1, 0.25, -3, 40], np.float32)})
        .outputs
    )
    assert np.array_equal(outputs["x8"], outputs["y"])
