"""Convolutions compute in blocks of channels: tests of the graph after the pass as text, and of the results."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graph_text import after, lines, proto
from onnx import TensorProto, helper, numpy_helper
from oracle import opened

import celosia
from celosia.compiler.graph.simplify.blocked_layout import use_blocked_layout
from celosia.driver.runtime import Runtime

RNG = np.random.default_rng(0)


def blocks_of_four(model: Any) -> None:
    use_blocked_layout(model, 4)


def test_a_chain_is_converted_once_at_each_end() -> None:
    source = """
    g (float[1,4,8,8] x) => (float[1,8,4,4] y) <float[4,1,3,3] d = {WEIGHTS36}, float[8,4,1,1] w = {WEIGHTS32},
      float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, float[8,1,1] s = {1, 2, 3, 4, 5, 6, 7, 8}> {
      h = Conv<group = 4, pads = [1, 1, 1, 1]>(x, d)
      t = Relu(h)
      u = Conv(t, w, b)
      v = Mul(u, s)
      y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(v)
    }
    """
    for count in (36, 32):
        source = source.replace(f"WEIGHTS{count}", ", ".join(["1"] * count))
    assert after(blocks_of_four, source) == lines("""
    (x float32[1,4,8,8]) -> (y float32[1,8,4,4])
      h.block float32[1,1,8,8,4] = celosia.Block(x) block=4
      h.blockedconv float32[1,1,8,8,4] = celosia.BlockedConv(h.block, %d.blocked float32[1,1,3,3,1,4]) group=4 pads=[1, 1, 1, 1]
      t.relu float32[1,1,8,8,4] = Relu(h.blockedconv)
      u.blockedconv float32[1,2,8,8,4] = celosia.BlockedConv(t.relu, %w.blocked float32[2,1,1,1,4,4], %b float32[8])
      v.mul float32[1,2,8,8,4] = Mul(u.blockedconv, %s.blocked float32[1,2,1,1,4])
      y.blockedmaxpool float32[1,2,4,4,4] = celosia.BlockedMaxPool(v.mul) kernel_shape=[2, 2] strides=[2, 2]
      y float32[1,8,4,4] = celosia.Unblock(y.blockedmaxpool)
    """)  # noqa: E501


def test_a_block_is_filled_with_zeros_up_to_a_global_pool() -> None:
    source = """
    g (float[1,4,8,8] x) => (float[1,6,1,1] y) <float[6,4,1,1] w = {WEIGHTS}, float[6] b = {1, 2, 3, 4, 5, 6}> {
      u = Conv(x, w, b)
      v = Relu(u)
      y = GlobalMaxPool(v)
    }
    """.replace("WEIGHTS", ", ".join(["1"] * 24))
    result = after(blocks_of_four, source)
    assert "Conv" in result and "Block" not in result  # alone it is as fast as it is
    source = source.replace("u = Conv(x", "p = Conv<pads = [1, 1, 1, 1]>(x, q)\n u = Conv(p").replace(
        "float[6] b", f"float[4,4,3,3] q = {{{', '.join(['1'] * 144)}}}, float[6] b"
    )
    result = after(blocks_of_four, source)
    assert "u.blockedconv float32[1,2,8,8,4] = celosia.BlockedConv(" in result and "%b.longer float32[8]" in result
    assert "y.blockedglobalmaxpool float32[1,8,1,1] = " in result and "y float32[1,6,1,1] = Slice(" in result
    shown = source.replace("(float[1,6,1,1] y)", "(float[1,6,1,1] y, float[1,6,8,8] v)")
    result = after(blocks_of_four, shown)  # somebody else reads the channels too, and gets them without the zeros
    assert "v.unblock float32[1,8,8,8] = " in result and "v float32[1,6,8,8] = Slice(" in result


def test_what_does_not_fit_stays() -> None:
    source = """
    g (float[1,3,4,4] x, float[4,3,1,1] w) => (float[1,3,4,4] y, float[1,4,4,4] z) <float[3,3,1,1] odd = {1, 2, 3, 4, 5,
      6, 7, 8, 9}> {
      y = Conv(x, odd)
      z = Conv(x, w)
    }
    """
    assert after(blocks_of_four, source).count("Conv(") == 2
    assert "Block" not in after(blocks_of_four, source)


@pytest.mark.parametrize(("channels", "strides", "blocks"), [(160, 1, True), (159, 1, False), (8, 2, True)])
def test_a_convolution_of_pixels_alone_goes_in_blocks_where_it_is_deep(
    channels: int, strides: int, blocks: bool
) -> None:
    source = f"""
    g (float[1,{channels},6,6] x) => (float[1,4,{6 // strides},{6 // strides}] y)
      <float[4,{channels},1,1] w = {{{", ".join(["1"] * 4 * channels)}}}> {{
      y = Conv<strides = [{strides}, {strides}]>(x, w)
    }}
    """
    assert ("BlockedConv" in after(blocks_of_four, source)) == blocks


@pytest.mark.parametrize(("width", "blocks"), [(1, True), (2, False)])
def test_a_convolution_by_channel_alone_goes_in_blocks_where_lines_are_short(width: int, blocks: bool) -> None:
    source = f"""
    g (float[1,4,6,{width}] x) => (float[1,4,6,{width}] y) <float[4,1,3,1] w = {{{", ".join(["1"] * 12)}}}> {{
      y = Conv<group = 4, pads = [1, 0, 1, 0]>(x, w)
    }}
    """
    assert ("BlockedConv" in after(blocks_of_four, source)) == blocks


Nodes = list[tuple[str, list[str], dict[str, Any]]]
CASES: dict[str, tuple[tuple[int, ...], Nodes]] = {
    "dense, strides and uneven pads": ((2, 3, 13, 11), [
        ("Conv", ["16,3,3,3", "16"], {"strides": [2, 1], "pads": [1, 0, 2, 1]}), ("HardSwish", [], {}),
        ("Conv", ["24,16,1,1"], {}), ("Sigmoid", [], {}),
    ]),
    "groups of whole blocks": ((1, 32, 9, 9), [
        ("Conv", ["32,32,1,1"], {}), ("Conv", ["64,16,3,3", "64"], {"group": 2, "pads": [1, 1, 1, 1]}),
    ]),
    "by channel, dilated": ((1, 48, 12, 10), [
        ("Conv", ["48,1,3,3", "48"], {"group": 48, "dilations": [2, 2], "pads": [2, 2, 2, 2]}), ("Relu", [], {}),
        ("Conv", ["8,48,1,1", "8"], {}),
    ]),
    "pools": ((1, 16, 15, 14), [
        ("Conv", ["16,16,3,3"], {"auto_pad": "SAME_UPPER"}),
        ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        ("AveragePool", [], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]}), ("GlobalAveragePool", [], {}),
        ("Conv", ["32,16,1,1", "32"], {}), ("GlobalMaxPool", [], {}),
    ]),
    "normalised, with constants of several shapes": ((1, 4, 7, 7), [
        ("Conv", ["16,4,2,2"], {}), ("BatchNormalization", ["16", "16", "16", "+16"], {"epsilon": 1e-3}),
        ("Add", ["16,1,1"], {}), ("Mul", ["1,1,6,1"], {}), ("Sub", ["1"], {}), ("PRelu", ["16,1,1"], {}),
        ("Max", ["1,16,6,6"], {}),
    ]),
    "one dimension": ((2, 8, 40), [
        ("Conv", ["16,8,5", "16"], {"pads": [2, 2]}), ("Relu", [], {}), ("MaxPool", [], {"kernel_shape": [2]}),
    ]),
    "blocks that zeros fill, up to a global pool": ((2, 16, 9, 8), [
        ("Conv", ["16,16,3,3"], {}), ("Conv", ["37,16,1,1", "37"], {}), ("HardSwish", [], {}), ("Clip", [], {}),
        ("GlobalAveragePool", [], {}),
    ]),
    "blocks that zeros fill, the largest of each": ((1, 32, 6, 6), [
        ("Conv", ["40,32,3,3"], {}), ("GlobalMaxPool", [], {}), ("Sigmoid", [], {}),
    ]),
    "many channels": ((1, 160, 7, 7), [("Conv", ["96,160,3,3", "96"], {"pads": [1, 1, 1, 1]})]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results(case: str) -> None:
    dims, chain = CASES[case]
    nodes, constants, last = [], [], "x"
    for number, (op, operands, attrs) in enumerate(chain):
        names = [f"c{number}_{k}" for k in range(len(operands))]
        for name, text in zip(names, operands):
            array = RNG.standard_normal([int(n) for n in text.split(",")]).astype(np.float32)
            constants.append(numpy_helper.from_array(abs(array) if text[0] == "+" else array, name))
        nodes.append(helper.make_node(op, [last, *names], [f"t{number}"], name=f"n{number}", **attrs))
        last = f"t{number}"
    check(nodes, constants, dims, last)


def test_branches_that_meet() -> None:
    """Sums, Concats and channel scales combine blocked and plain values."""
    names = ["a", "b", "s"]
    weights = [RNG.standard_normal((16, 16, k, k)).astype(np.float32) for k in (1, 3, 1)]
    nodes = [
        helper.make_node("Conv", ["x", "w_a"], ["a"]),
        helper.make_node("Conv", ["a", "w_b"], ["b"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Concat", ["a", "b", "sum"], ["all"], axis=1),
        helper.make_node("GlobalAveragePool", ["sum"], ["mean"]),
        helper.make_node("Conv", ["mean", "w_s"], ["s"]),
        helper.make_node("HardSigmoid", ["s"], ["scale"]),
        helper.make_node("Mul", ["b", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "x"], ["plain"]),
        helper.make_node("Concat", ["all", "plain", "scaled"], ["y"], axis=1),
    ]
    constants = [numpy_helper.from_array(w, f"w_{name}") for w, name in zip(weights, names)]
    check(nodes, constants, (1, 16, 6, 5), "y")


def check(nodes: list[Any], constants: list[Any], dims: tuple[int, ...], last: str) -> None:
    """Compare the model from `x` to `last` with onnxruntime, and expect blocked operators in it."""
    x = RNG.standard_normal(dims).astype(np.float32)
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, None)], constants,
    )  # fmt: skip
    graph.output[0].type.tensor_type.ClearField("shape")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = onnx.shape_inference.infer_shapes(model)
    session = opened(model)
    (expected,) = session.run(None, {"x": x})
    program = celosia.compile(model)
    assert any("Block" in node.op for step in program.steps for node in step.nodes)
    y = Runtime(program).run({"x": x}).outputs[last]
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * float(abs(expected).max()))


MOVED = """
g (float[2, 8, 6, 9] x) => (float[?, ?, ?, ?] y, float[?, ?, ?, ?] z) <float[8] slope> {
  c = Conv<pads = [1, 1, 1, 1]>(x, w1)
  e = Erf(c)
  one = Constant<value_float = 1.0>()
  zero = Constant<value_float = 0.0>()
  more = Add(e, one)
  gelu = Mul(c, more)
  low = Less(gelu, zero)
  root = Tanh(gelu)
  chosen = Where(low, root, gelu)
  ends = Constant<value_ints = [3]>()
  axis = Constant<value_ints = [-1]>()
  first = Constant<value_ints = [0]>()
  head = Slice(chosen, first, ends, axis)
  joined = Concat<axis = 3>(chosen, head)
  pads = Constant<value_ints = [0, 0, 1, 0, 0, 0, 0, 2]>()
  wider = Pad<mode = "MODE">(joined, pads)
  y = Conv(wider, w2)
  s = Conv<strides = [1, 3]>(chosen, w3)
  t = Sigmoid(s)
  z = Mul(s, t)
}
""".replace(" <float[8] slope>", "")


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
def test_functions_and_movements_stay_in_blocks(mode: str) -> None:
    """Erf, Tanh, Where, Slice, Pad and Concat along rows keep blocks; a strided convolution of 11 channels is
    blocked, too."""
    rng = np.random.default_rng(0)
    model = proto(MOVED.replace("MODE", mode), 17)
    for name, dims in (("w1", (8, 8, 3, 3)), ("w2", (8, 8, 3, 3)), ("w3", (11, 8, 2, 2))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(dims, np.float32), name))
    feed = {"x": rng.standard_normal((2, 8, 6, 9), np.float32)}
    program = celosia.compile(model, accelerator=False)
    outputs = Runtime(program).run(feed).outputs
    for value, expected in zip(outputs.values(), opened(model).run(None, feed), strict=True):
        assert value.shape == expected.shape
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4)
    operators = [node.op for step in program.steps for node in step.nodes]
    assert operators.count("BlockedConv") == 3 and "Conv" not in operators and operators.count("Unblock") == 2
