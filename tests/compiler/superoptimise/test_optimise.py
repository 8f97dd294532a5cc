"""Models before and after: the same bytes under onnxruntime, fewer cycles, in the form that they came in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import celosia
from celosia.compiler.compile import price
from celosia.compiler.superoptimise.equal import difference
from celosia.compiler.superoptimise.graph import Written
from celosia.compiler.superoptimise.matching import NotTaken, matches, rewritten
from celosia.compiler.superoptimise.optimise import Optimised, graph_of, optimise
from celosia.compiler.superoptimise.rules import RULES
from celosia.compiler.superoptimise.scales import realised, weights_of
from celosia.compiler.superoptimise.search import Searching
from celosia.compiler.superoptimise.writing import OnnxWriter, Unwritable
from celosia.driver.optimise import optimise as driver

pytest.importorskip("onnxruntime")


class Quantised:
    """An int8 model in the making, with QDQ or onnxruntime's operators. x: int8 [shape], with scale 0.05 and zero 3."""

    def __init__(self, shape: tuple[int, ...], qdq: bool = True, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.qdq, self.nodes = qdq, list[onnx.NodeProto]()
        self.constants: list[onnx.TensorProto] = []
        self.shape = shape
        self.meant: dict[str, tuple[float, int]] = {"x": (0.05, 3)}

    def constant(self, values: Any, dtype: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def pair(self, name: str) -> list[str]:
        scale, zero = self.meant[name]
        return [self.constant(scale, np.float32), self.constant(zero, np.int8)]

    def node(self, op: str, inputs: list[str], domain: str = "", **given: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", domain=domain, **given))
        return name

    def floats(self, name: str) -> str:
        return self.node("DequantizeLinear", [name, *self.pair(name)])

    def quantised(self, floats: str, scale: float, zero: int) -> str:
        name = self.node("QuantizeLinear", [floats, self.constant(scale, np.float32), self.constant(zero, np.int8)])
        self.meant[name] = scale, zero
        return name

    def conv(
        self, x: str, inputs: int, outputs: int, scale: float, zero: int = -128, kernel: int = 1, **given: Any
    ) -> str:
        sx = self.meant[x][0]
        group = given.get("group", 1)
        w = self.constant(self.rng.integers(-127, 128, (outputs, inputs // group, kernel, kernel)), np.int8)
        sw = self.rng.uniform(0.002, 0.01, outputs).astype(np.float32)
        b = self.constant(self.rng.integers(-500, 500, outputs), np.int32)
        given = {"pads": [kernel // 2] * 4, **given}
        scales, zeros = self.constant(sw, np.float32), self.constant(np.zeros(outputs), np.int8)
        if not self.qdq:
            self.meant["y"] = scale, zero
            y = self.node("QLinearConv", [x, *self.pair(x), w, scales, zeros, *self.pair("y"), b], **given)
            self.meant[y] = scale, zero
            return y
        weights = self.node("DequantizeLinear", [w, scales, zeros], axis=0)
        steps = self.constant(np.float32(sx) * sw, np.float32)
        bias = self.node("DequantizeLinear", [b, steps, self.constant(np.zeros(outputs), np.int32)], axis=0)
        return self.quantised(self.node("Conv", [self.floats(x), weights, bias], **given), scale, zero)

    def both(self, op: str, x: list[str], **given: Any) -> str:
        """On bytes; with QDQ around it where the model is so."""
        if not self.qdq:
            y = self.node(op, x, **given)
            self.meant[y] = self.meant[x[0]]
            return y
        return self.quantised(self.node(op, [self.floats(each) for each in x], **given), *self.meant[x[0]])

    def model(self, *outputs: str) -> onnx.ModelProto:
        given = helper.make_tensor_value_info("x", TensorProto.INT8, self.shape)
        made = [helper.make_tensor_value_info(name, TensorProto.INT8, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "test", [given], made, self.constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def found(model: onnx.ModelProto, budget: float = 20, **given: Any) -> Optimised:
    return optimise(model, lambda each: price(each, "pynq"), budget, difference, **given)


def branches(qdq: bool, scales: tuple[float, ...] = (0.04, 0.05, 0.06, 0.07), seed: int = 0) -> onnx.ModelProto:
    m = Quantised((1, 64, 16, 16), qdq, seed)
    return m.model(*(m.conv("x", 64, 8, scale) for scale in scales))


@pytest.mark.parametrize("qdq", [True, False], ids=["QDQ", "QLinearConv"])
def test_four_convolutions_become_one(qdq: bool) -> None:
    optimised = found(branches(qdq))
    assert optimised.before.cycles / optimised.after.cycles >= 3.0
    assert {step.rule for step in optimised.steps} == {"merge convolutions"} and not optimised.refused
    operators = [node.op_type for node in optimised.model.graph.node]
    assert operators.count("Conv" if qdq else "QLinearConv") == 1
    assert ("DequantizeLinear" in operators) is qdq
    assert [out.name for out in optimised.model.graph.output] == [out.name for out in branches(qdq).graph.output]
    onnx.checker.check_model(optimised.model)


def test_concat_of_what_was_merged_goes() -> None:
    m = Quantised((1, 64, 8, 8))
    y = m.both("Concat", [m.conv("x", 64, 8, 0.05) for _ in range(3)], axis=1)
    optimised = found(m.model(y))
    operators = [node.op_type for node in optimised.model.graph.node]
    assert operators.count("Conv") == 1 and not {"Concat", "Slice"} & set(operators)


def test_convolutions_of_other_zero_points_stay() -> None:
    m = Quantised((1, 64, 16, 16))
    optimised = found(m.model(m.conv("x", 64, 8, 0.05, zero=-128), m.conv("x", 64, 8, 0.05, zero=0)))
    assert not optimised.steps and optimised.after == optimised.before


def every_rewriting(model: onnx.ModelProto, tidy: bool = True) -> dict[str, onnx.ModelProto]:
    """What each rule makes of a model, at the first place where it may."""
    graph, made = graph_of(model), dict[str, onnx.ModelProto]()
    tidier = Searching(RULES, lambda each: pytest.fail(), lambda a, b: None, 0)
    for rule in RULES:
        for match in matches(rule, graph):
            try:
                after = rewritten(graph, match)
                made[rule.name] = OnnxWriter(tidier.tidied(after)[0] if tidy else after, model).write()
                break
            except (NotTaken, Unwritable):
                continue
    return made


def mixed(qdq: bool, seed: int) -> onnx.ModelProto:
    """Most of what rules are of."""
    m = Quantised((1, 8, 12, 12), qdq, seed)
    a = m.conv("x", 8, 8, 0.05, kernel=3)
    b = m.conv("x", 8, 8, 0.05, kernel=1)
    both = m.both("Concat", [a, b], axis=1)
    pooled = m.both("MaxPool", [both], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
    grouped = m.conv(pooled, 16, 16, 0.06, kernel=3, group=4)
    strided = m.conv(grouped, 16, 8, 0.06, kernel=3, strides=[2, 2])
    turned = m.both("Transpose", [m.both("Transpose", [strided], perm=[0, 2, 3, 1])], perm=[0, 3, 1, 2])
    cut = m.node("Split", [grouped, m.constant([6, 10], np.int64)], axis=1)
    m.meant[cut] = m.meant[grouped]
    m.nodes[-1].output.append(f"{cut}_rest")
    m.meant[f"{cut}_rest"] = m.meant[grouped]
    last = m.conv(f"{cut}_rest", 10, 8, 0.06)
    relu = m.quantised(m.node("Relu", [m.floats(last)]), 0.06, -128)
    return m.model(turned, relu, m.conv(cut, 6, 8, 0.07))


@pytest.mark.parametrize("qdq", [True, False], ids=["QDQ", "QLinearConv"])
def test_each_rule_leaves_every_byte(qdq: bool) -> None:
    model = mixed(qdq, 3)
    assert not difference(model, OnnxWriter(graph_of(model), model).write())
    made = every_rewriting(model)
    for name, other in made.items():
        assert not difference(model, other), name
    kinds = "merge a", "strides into", "split groups", "channels of a slice", "largest of joined", "transpose 0"
    assert all(any(name.startswith(kind) for name in made) for kind in kinds), sorted(made)


def test_constants_are_added_once() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (int32[2, 3] x) => (int32[2, 3] y, int32[2, 3] z) {
            three = Constant <value = int32[1] {3}> ()
            four = Constant <value = int32 {4}> ()
            a = Add(x, three)
            y = Add(four, a)
            z = Add(x, y)
        }"""
    model = onnx.parser.parse_model(text)
    graph = graph_of(model)
    tidied, names = Searching(RULES, lambda each: pytest.fail(), lambda a, b: None, 0).tidied(graph)
    assert names == ("sums of numbers of rank 2",) and len(tidied.operations) == 2
    assert not difference(model, OnnxWriter(tidied, model).write())


def test_padding_goes_into_the_convolution() -> None:
    m = Quantised((1, 8, 6, 6))
    padded = m.node("Pad", [m.floats("x"), m.constant([0, 0, 1, 2, 0, 0, 0, 1], np.int64)])
    model = m.model(m.conv(m.quantised(padded, 0.05, 3), 8, 8, 0.05, kernel=3))
    tidied, names = Searching(RULES, lambda each: pytest.fail(), lambda a, b: None, 0).tidied(graph_of(model))
    assert names == ("padding into a convolution",)
    (made,) = [each for each in tidied.operations if each.op == "convolve"]
    assert made["pads"] == (2, 3, 1, 2)
    assert not difference(model, OnnxWriter(tidied, model).write())


@pytest.mark.parametrize("seed", range(3))
def test_all_of_a_search_leaves_every_byte(seed: int) -> None:
    model = mixed(seed % 2 == 0, seed)
    optimised = found(model, budget=3)
    assert not optimised.refused and not difference(model, optimised.model)
    assert optimised.after.total <= optimised.before.total


def test_greedy_takes_no_step_that_costs() -> None:
    optimised = found(branches(True), greedy=True)
    gains = [row["gain"] for row in optimised.report["steps"]]
    assert gains and min(gains) > 0


def test_what_differs_is_refused_in_a_sentence() -> None:
    model = branches(True)
    told = []

    def differs(original: onnx.ModelProto, other: onnx.ModelProto) -> str:
        told.append(other)
        return "output 't3' differs in 1 of 2 elements"

    optimised = optimise(model, lambda each: price(each, "pynq"), 20, differs)
    assert optimised.model.SerializeToString() == model.SerializeToString() and not optimised.steps
    assert optimised.after == optimised.before and len(told) == len(optimised.refused) > 0
    assert "the step 'merge convolutions' at " in optimised.refused[0] and "differs in 1 of 2" in optimised.refused[0]


def test_ctrl_c_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(state: Any) -> None:
        if state.best.total < state.original.total and not state.ended:
            raise KeyboardInterrupt

    optimised = found(branches(True), told=interrupt)
    assert optimised.state.ended == "interrupted" and len(optimised.steps) == 1
    assert optimised.after.cycles < optimised.before.cycles


def test_compile_takes_a_budget() -> None:
    model = branches(True)
    program = celosia.compile(model, "pynq", optimise="20s", check=False)
    assert program.name == "model" and [len(launch.layers) for launch in program.launches] == [1]
    with pytest.raises(ValueError, match="'soon' is no time; write it as 90s, 30m or 2h"):
        celosia.compile(model, "pynq", optimise="soon")


def test_ones_own_rule_is_used_or_refused() -> None:
    from celosia.compiler.superoptimise.proofs import RuleError

    pytest.importorskip("z3")
    wrong = RULES[0].__class__("mine", "", RULES[0].before, RULES[0].after[::-1])
    with pytest.raises(RuleError, match="'mine' is not proved, and so not used"):
        driver(branches(True), "pynq", budget=1, rules=[wrong])


def test_scales_of_any_multipliers_are_found() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        m = rng.uniform(1e-6, 1.0, 64).astype(np.float32)
        note = Written("Conv", True, float(np.float32(rng.uniform(0.001, 0.1))), (0.1,), 0.03, True)
        made = realised(m, [note])
        assert made is not None and len(made.w) == 64
        from celosia.compiler.numerics import conv_scale

        assert np.array_equal(conv_scale(made.x, np.array(made.w, np.float32), made.y), m)
    assert weights_of(np.array([1e38], np.float32), 1e-3, 1e3) is None


def test_the_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from celosia.driver.cli import app

    model, out, report = tmp_path / "four.onnx", tmp_path / "out.onnx", tmp_path / "report.json"
    onnx.save(branches(True), model)
    run = lambda *given: CliRunner().invoke(app, ["optimise", *map(str, given)])  # noqa: E731
    done = run(model, "-o", out, "--budget", "20s", "--report", report)
    assert done.exit_code == 0 and "merge convolutions" in done.output and "times as fast" in done.output
    assert not difference(onnx.load(model), onnx.load(out)) and '"gain"' in report.read_text()
    for given, words in (
        ((model, "-o", model), "it is an input, too; give another name"),
        ((model, "-o", out, "--budget", "0"), "in 0 s nothing can be found; give more, as 60s"),
        ((model, "-o", out, "--budget", "5x"), "'5x' is no time; write it as 90s, 30m or 2h"),
        ((tmp_path / "none.onnx", "-o", out), "there is no model at"),
        ((model, "-o", out, "--config", "pink"), "no preset is called 'pink'; take one of"),
    ):
        failed = run(*given)
        assert failed.exit_code == 1 and words in failed.output, failed.output
