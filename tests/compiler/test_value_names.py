"""Names of values, in subgraphs too, change no output."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from oracle import opened
from thorough import some

import celosia
from celosia.compiler.graph.values import name_values, value_names, values_of
from celosia.driver.runtime import Runtime

MODELS: dict[str, str] = {
    "a body's input hides what an Identity was of": """g (float[2, 8] x) => (float[2, 8] y) {
        a = Identity(x)  s = Neg(x)
        y = Loop(n, t, s) <body = b (int64 i, bool k, float[2, 8] x) => (bool k2, float[2, 8] v) {
            k2 = Identity(k)  v = Add(x, a) }> }""",
    "so does that of a body inside a body": """g (float[2, 8] x) => (float[2, 8] y) {
        a = Identity(x)  s = Neg(x)
        y = Loop(n, t, s) <body = b (int64 i, bool k, float[2, 8] v) => (bool k2, float[2, 8] w) {
            k2 = Identity(k)
            w = Loop(n, t, v) <body = c (int64 j, bool l, float[2, 8] x) => (bool l2, float[2, 8] u) {
                l2 = Identity(l)  u = Add(x, a) }> }> }""",
    "both branches have one name, for tensors of other ranks": """g (float[2, 8] x) => (float[1, 2, 1, 8] y) {
        y = If(t) <then_branch = p () => (float[1, 2, 1, 8] z) {
            q = Reshape(x, three)  r = RotaryEmbedding<num_heads=2>(q, f, f, o)  z = Reshape(r, four) },
        else_branch = e () => (float[1, 2, 1, 8] z) { q = Reshape(x, four)  z = RotaryEmbedding(q, f, f, o) }> }""",
    "an output that nothing reads is called what a pass calls its table": """g (float[2, 8] x) =>
        (int8[2, 8] y, float[2, 8] u) {
        CLASH, u = Loop(n, t, x, x) <body = b (int64 i, bool k, float[2, 8] v, float[2, 8] w) =>
            (bool k2, float[2, 8] v2, float[2, 8] w2) { k2 = Identity(k)  v2 = Neg(w)  w2 = Exp(v) }>
        q = QuantizeLinear(x, scale, zero)  d = DequantizeLinear(q, scale, zero)  s = Sigmoid(d)
        y = QuantizeLinear(s, scale, zero) }""",
}  # fmt: skip
CONSTANTS: dict[str, Any] = {
    "n": np.int64(3), "t": np.array(True), "three": [1, 1, 16], "four": [1, 2, 1, 8], "o": [[2]],
    "f": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "scale": np.float32(0.1), "zero": np.int8(3),
}  # fmt: skip


def model(text: str) -> onnx.ModelProto:
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in CONSTANTS.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


@pytest.mark.parametrize("case", MODELS)
def test_subgraphs_and_unread_outputs(case: str) -> None:
    made = model(MODELS[case])
    for node in made.graph.node:
        node.output[:] = [name.replace("CLASH", "Sigmoid:s_table") for name in node.output]
    feed = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
    session = opened(made)
    found = Runtime(celosia.compile(made, "tiny", accelerator=False)).run(feed).outputs
    for output, wanted in zip(session.get_outputs(), session.run(None, feed)):
        np.testing.assert_allclose(found[output.name], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["e", "gradient.2.0", "gradient.2.1"])
def test_gradients(name: str) -> None:
    """d(x * x)/dx + exp(x) is right if a tensor has a name that the gradient's tensors might get."""
    proto = model("g (float[2] x) => (float[2] y) { z = Mul(x, x)  CLASH = Exp(x)  y = Add(d, CLASH) }")
    proto.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    gradient = helper.make_node("Gradient", ["x"], ["d"], domain="ai.onnx.preview.training", xs=["x"], y="z")
    proto.graph.node.insert(2, gradient)
    for node in proto.graph.node:
        node.input[:], node.output[:] = (
            [name if each == "CLASH" else each for each in names] for names in (node.input, node.output)
        )
    x = np.array([0.5, -2], np.float32)
    found = Runtime(celosia.compile(proto, "tiny")).run({"x": x}).outputs["y"]
    np.testing.assert_allclose(found, 2 * x + np.exp(x), rtol=1e-6)


def test_new_names_are_not_those_of_later_values() -> None:
    """A constant with the name of an output becomes y_1, unless a later constant has this name."""
    graph = ir.from_proto(model("g (float[2] x) => (float[2] y) { a = Add(x, w)  b = Mul(a, y_1)  y = Neg(b) }")).graph
    array = ir.tensor(np.ones(2, np.float32))
    constants = [ir.Value(name=name, const_value=array) for name in ("y", "y_1")]
    first, second, _ = graph
    first.replace_input_with(1, constants[0])
    second.replace_input_with(1, constants[1])
    for value in constants:
        graph.register_initializer(value)
    name_values(graph)
    names = [value.name for value in values_of(graph)]
    assert len(set(names)) == len(names) and None not in names
    assert [value.name for value in constants] == ["y_2", "y_1"] and graph.outputs[0].name == "y"


QUANTISED = """g (float[1, 4, 6, 6] x) => (int8[1, 4, 6, 6] y, int8[1, 4, 6, 6] z) {
    xq = QuantizeLinear(x, scale, zero)  xd = DequantizeLinear(xq, scale, zero)  wd = DequantizeLinear(w, scale, w0)
    c = Conv<kernel_shape=[1, 1]>(xd, wd)  k = Clip(c, low, high)
    kq = QuantizeLinear(k, scale, zero)  kd = DequantizeLinear(kq, scale, zero)
    s = HardSigmoid(kd)  sq = QuantizeLinear(s, scale, zero)  sd = DequantizeLinear(sq, scale, zero)
    t = Transpose<perm=[0, 1, 3, 2]>(sd)  a = Add(t, kd)  e = Concat<axis=1>(a, sd)
    r = Slice(e, from, to, axis)  y = QuantizeLinear(r, scale, zero)
    m = Mul(kd, sd)  z = QuantizeLinear(m, scale, zero) }"""
QUANTISED_CONSTANTS: dict[str, Any] = {
    "scale": np.float32(0.05), "zero": np.int8(3), "w0": np.int8(0), "low": np.float32(-0.8), "high": np.float32(1.6),
    "w": np.random.default_rng(0).integers(-9, 9, (4, 4, 1, 1)).astype(np.int8), "from": [2], "to": [6], "axis": [1],
}  # fmt: skip


def renamed(proto: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in copy.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return copy


@pytest.mark.parametrize("step", some([1, 3], [3]))
def test_names_that_passes_would_give_their_own_tensors(step: int) -> None:
    """Any tensor of the model may have the name that a pass gives to a new tensor."""
    graph = onnx.parser.parse_graph(QUANTISED)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in QUANTISED_CONSTANTS.items())
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    seen: list[set[str]] = []
    program = celosia.compile(proto, "tiny", records=None, watch=lambda _, graph: seen.append(value_names(graph.graph)))
    imported = {name for node in proto.graph.node for name in node.output} | {*QUANTISED_CONSTANTS, "x"}
    derived = sorted(set().union(*seen) - imported)
    inner = sorted(imported - {*QUANTISED_CONSTANTS, "x", "y", "z"})
    assert len(derived) > 3
    feed = {"x": np.random.default_rng(1).standard_normal((1, 4, 6, 6)).astype(np.float32)}
    expected = Runtime(program).run(feed).outputs
    for shift in range(0, len(inner), step):
        names = dict(zip(inner[shift:] + inner[:shift], derived))
        again = celosia.compile(renamed(proto, names), "tiny", records=None)
        for output, result in Runtime(again).run(feed).outputs.items():
            np.testing.assert_array_equal(result, expected[output])
