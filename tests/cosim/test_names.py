"""Names of nodes and tensors change no byte: the compiler identifies them by object, not by name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import onnx
import pytest
from small_models import Builder, detector, twins
from thorough import some

pytest.importorskip("onnxruntime")

import many_models
from agreement import CONFIGS, check, expected, feed_of
from many_models import Count

import celosia
from celosia.sim.functional.fsim import FunctionalDevice


def branches(b: Builder) -> None:
    """Add equal branches over one tensor with many readers, two outputs, a concatenation and residuals."""
    x = b.conv(b.input([2, 8, 9, 7]), 16, (1, 1))
    parts = [b.conv(x, 16, (3, 3), pads=(1, 1, 1, 1)) for _ in range(3)]
    total = b.binary("Add", parts[0], parts[1])
    b.output(parts[2])
    b.output(b.concat([total, parts[2], x], False))


NAMES = ["none", "same", "hostile"]


ALL_CASES = [*product(CONFIGS, NAMES, [twins, branches], [False, True])]
QUICK_CASES = [
    (config, NAMES[n % 3], (twins, branches)[n % 2], n // 3 % 2 == 1)
    for n, config in enumerate(["tiny", "batch2-8x4", "4x16", "tight"])
]
"""Four Configs; the other parameters alternate."""


@pytest.mark.parametrize(("config", "names", "build", "tensors"), some(ALL_CASES, QUICK_CASES))
def test_names_do_not_matter(config: str, names: str, build: Callable[[Builder], None], tensors: bool) -> None:
    b = Builder("qoperator", np.int8, seed=3)
    b.node_names, b.hostile_tensors = names, tensors
    build(b)
    program = check(b, FunctionalDevice(CONFIGS[config]))
    reported = [row["name"] for row in program.placements]
    assert all(reported) and len(set(reported)) == len(reported)


@pytest.mark.parametrize("form", some(["qdq", "qoperator"], ["qoperator"]))
def test_a_network_without_names(form: str) -> None:
    b = Builder(form, np.int8, seed=6)
    b.node_names = "none"
    detector(b)
    program = check(b, FunctionalDevice(CONFIGS["8x8"]))
    assert len(program.placements) > 70


def test_one_refused_layer_sends_no_other_to_the_cpu() -> None:
    """A convolution that fits no scratchpad goes to the CPU alone, although no node has a name."""
    b = Builder("qoperator", np.int8, seed=4)
    b.node_names = "none"
    x = b.conv(b.input([1, 8, 40, 40]), 16, (3, 3))
    x = b.conv(x, 4, (37, 37), dilations=(1, 1))
    b.output(b.conv(x, 8, (1, 1)))
    program = check(b, FunctionalDevice(CONFIGS["tight"]))
    places = [row["place"] for row in program.placements if row["op"] == "QLinearConv"]
    assert places == ["accelerator", "cpu", "accelerator"]


def test_names_of_nodes_are_kept_where_they_are_unique() -> None:
    b = Builder("qoperator", np.int8, seed=5)
    twins(b)
    model = b.model()
    convs = [node for node in model.graph.node if node.op_type == "QLinearConv"]
    convs[0].name, convs[1].name, convs[2].name = "stem", "body", "body"
    names = [row["name"] for row in celosia.compile(model, "tiny").placements if row["op"] == "QLinearConv"]
    assert names == ["stem", *(f"QLinearConv:{node.output[0]}" for node in convs[1:])]


def test_names_in_reports_are_unique_where_passes_make_operators() -> None:
    """Operators that a pass makes get new names, and those of the model keep theirs."""
    text = """g (float[1, 32, 8, 8] x) => (float[1, 32, 6, 6] y) {
        a = Conv(x, w)  b = Relu(a)  c = Conv<pads = [1, 1, 1, 1]>(b, w)  y = Add(c, a) }"""
    graph = onnx.parser.parse_graph(text)
    weights = np.random.default_rng(0).standard_normal((32, 32, 3, 3)).astype(np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    for node, name in zip(graph.node, ("stem", "activation", "a.block", "sum")):
        node.name = name
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    names = [row["name"] for row in celosia.compile(model, "tiny").placements]
    assert len(set(names)) == len(names)
    assert {"stem", "activation", "sum"} < {*names}


def test_many_models_count_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two planted faults are counted: a changed byte of onnxruntime's output, and an output of a wrong shape."""
    monkeypatch.setattr(many_models, "CONFIGS", {name: CONFIGS[name] for name in ("tiny", "tight")})
    b = Builder("qoperator", np.int8, seed=3)
    twins(b)
    wanted = expected(b.model(), feed_of(b.model()))
    wanted[0][0, 0, 0, 0] ^= 1
    count = Count()
    count.run("planted", b, wanted)
    assert (count.models, count.programs, count.different) == (1, 2, 2)
    assert len(count.failures) == 2 and "planted on tiny" in count.failures[0]
    count.run("shape", b, [wanted[0][:, 1:]])
    assert "AssertionError" in count.failures[-1]
