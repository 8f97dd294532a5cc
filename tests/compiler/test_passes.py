"""The pass pipeline keeps its order, reports each pass, and verifies the graph between two passes."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
from graph_text import after, lines, model

from celosia.compiler.graph.passes import RULES, BrokenGraph, GraphPass, Pipeline, check
from celosia.compiler.graph.pipeline import PASSES
from celosia.compiler.graph.shapes import infer_shapes
from celosia.compiler.graph.simplify.fold import fold

CHAIN = """
g (float[1,4] x) => (float[1,4] y) <float[4] w = {1, 2, 3, 4}> {
  h = Add(x, w)
  t = Relu(h)
  y = Sqrt(t)
}
"""


def nothing(_: ir.Model) -> None:
    pass


def test_a_graph_as_text() -> None:
    source = """
    g (float[2,8] x, bool c) => (float[2,8] y) <float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}, float lim = {6}> {
      h = Transpose<perm = [0, 1]>(x)
      k = Add(h, w)
      y = If (c) <
        then_branch = yes () => (float[2,8] a) { a = Identity(k) },
        else_branch = no () => (float[2,8] b) { b = Clip(k, , lim) }
      >
    }
    """
    assert after(nothing, source) == lines("""
    (x float32[2,8], c bool[]) -> (y float32[2,8])
      h float32[2,8] = Transpose(x) perm=[0, 1]
      k float32[2,8] = Add(h, %w float32[8])
      y float32[2,8] = If(c)
        yes () -> (a float32[2,8])
          a float32[2,8] = Identity(k)
        no () -> (b float32[2,8])
          b float32[2,8] = Clip(k, -, 6)
    """)


def test_shapes_as_text() -> None:
    source = "g (float[2,3] x) => (float[?,?] y) { h = com.microsoft.FastGelu(x) y = Neg(h) }"
    before = """
    (x float32[2,3]) -> (y float32[?,?])
      h = com.microsoft.FastGelu(x)
      y float32[?,?] = Neg(h)
    """
    assert after(nothing, source) == lines(before)
    assert after(infer_shapes, source) == lines("""
    (x float32[2,3]) -> (y float32[2,3])
      h float32[2,3] = com.microsoft.FastGelu(x)
      y float32[2,3] = Neg(h)
    """)


def test_folding_as_text() -> None:
    source = """
    g (float[2,3] x) => (float[?,?] z) <int64[1] start = {0}, int64[1] end = {1}, int64[1] rest = {-1}> {
      s = Shape(x)
      n = Slice(s, start, end)
      dims = Concat<axis = 0>(n, rest)
      z = Reshape(x, dims)
    }
    """
    assert after(fold, source) == lines("""
    (x float32[2,3]) -> (z float32[2,3])
      z float32[2,3] = Reshape(x, [2, -1])
    """)


def test_passes_run_in_order_and_are_watched() -> None:
    def drop_relu(graph: ir.Model) -> None:
        node = next(node for node in graph.graph if node.op_type == "Relu")
        ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]
        graph.graph.remove(node, safe=True)

    seen: list[tuple[str, int]] = []
    pipeline = Pipeline(GraphPass("first", "nothing", nothing), GraphPass("second", "no Relu", drop_relu))
    infos = pipeline.run(model(CHAIN), lambda name, graph: seen.append((name, graph.graph.num_nodes())))
    assert seen == [("import", 3), ("first", 3), ("second", 2)]
    assert [(info.name, info.before, info.after) for info in infos] == [("first", 3, 3), ("second", 3, 2)]


def test_names_of_passes_are_unique_and_documented() -> None:
    with pytest.raises(ValueError, match="same name"):
        Pipeline(GraphPass("a", "", nothing), GraphPass("a", "", nothing))
    assert all(graph_pass.doc and "\n" not in graph_pass.doc for graph_pass in PASSES)


def _swap(graph: ir.Graph) -> None:
    first, second, *_ = list(graph)
    graph.remove(second)
    graph.insert_before(first, second)


def _remove_read(graph: ir.Graph) -> None:
    graph.remove(next(iter(graph)), safe=False)


def _same_name(graph: ir.Graph) -> None:
    first, second, *_ = list(graph)
    second.outputs[0].name = first.outputs[0].name


def _wrong_constant(graph: ir.Graph) -> None:
    graph.initializers["w"].shape = ir.Shape([5])


def _wrong_type(graph: ir.Graph) -> None:
    graph.initializers["w"].type = ir.TensorType(ir.DataType.INT8)


def _no_type(graph: ir.Graph) -> None:
    graph.outputs[0].type = None


def _no_name(graph: ir.Graph) -> None:
    next(iter(graph)).outputs[0].name = None


def _wrong_shape(graph: ir.Graph) -> None:
    next(iter(graph)).outputs[0].shape = ir.Shape([1, 5])


def _other_type(graph: ir.Graph) -> None:
    next(iter(graph)).outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)


FAULTS: list[tuple[str, Callable[[ir.Graph], None]]] = [
    ("no value of a removed operator is read", _remove_read),
    ("every value is defined before it is used", _swap),
    ("constants are what their types say", _wrong_constant),
    ("constants are what their types say", _wrong_type),
    ("types of inputs and outputs are known", _no_type),
    ("shapes are those that operators make", _wrong_shape),
    ("shapes are those that operators make", _other_type),
]


NAMELESS = [_same_name, _no_name]
"""What the pipeline mends after each pass."""


@pytest.mark.parametrize("fault", NAMELESS, ids=[fault.__name__.strip("_") for fault in NAMELESS])
def test_names_are_mended_after_each_pass(fault: Callable[[ir.Graph], None]) -> None:
    broken = model(CHAIN)
    fault(broken.graph)
    with pytest.raises(BrokenGraph, match="names are unique"):
        check(broken.graph, "nothing")
    mended = model(CHAIN)
    Pipeline(GraphPass("bad", "", lambda graph: fault(graph.graph))).run(mended)
    check(mended.graph, "nothing")


@pytest.mark.parametrize(("rule", "fault"), FAULTS, ids=[fault.__name__.strip("_") for _, fault in FAULTS])
def test_a_pass_that_breaks_the_graph_is_named(rule: str, fault: Callable[[ir.Graph], None]) -> None:
    pipeline = Pipeline(GraphPass("good", "", nothing), GraphPass("bad", "", lambda graph: fault(graph.graph)))
    with pytest.raises(BrokenGraph, match=f"after pass bad: {rule}"):
        pipeline.run(model(CHAIN))


def test_every_rule_has_a_planted_fault() -> None:
    assert {"names are unique", *(rule for rule, _ in FAULTS)} == set(RULES)
    check(model(CHAIN).graph, "nothing")
