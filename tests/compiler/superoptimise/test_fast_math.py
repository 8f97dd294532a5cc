"""Fast-math rules hold in real numbers, are used only on request, and report how far outputs differ."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.branches import Branchy
from mutants import mutants
from thorough import some
from typer.testing import CliRunner

import celosia
from celosia.compiler.superoptimise import optimise as searching
from celosia.compiler.superoptimise import proofs
from celosia.compiler.superoptimise.compare_outputs import bound_of, measure_distance
from celosia.compiler.superoptimise.derivation import checked, derivation_of, distance
from celosia.compiler.superoptimise.matching import matches, rewrite
from celosia.compiler.superoptimise.operators import OPERATORS
from celosia.compiler.superoptimise.operators.reals import in_reals
from celosia.compiler.superoptimise.optimise import Optimised, graph_of, optimise
from celosia.compiler.superoptimise.price import Price, Pricing
from celosia.compiler.superoptimise.rule import Leaf, OpenSize, RewriteRule, Term, apply
from celosia.compiler.superoptimise.rules import REALS, RULES
from celosia.compiler.superoptimise.rules.floats import convolved
from celosia.compiler.superoptimise.rules.movement import F, function_of
from celosia.compiler.superoptimise.rules.products import IMAGE, KERNEL, C
from celosia.compiler.superoptimise.search import BudgetError
from celosia.compiler.superoptimise.trial import NoTrial, difference
from celosia.compiler.superoptimise.writing import AlgebraWriter
from celosia.driver.cli import app
from celosia.driver.tune.optimise import optimise as driver
from celosia.driver.workstation.oracle import open_model

pytest.importorskip("onnxruntime")
BY_NAME = {rule.name: rule for rule in REALS}


def test_rules_hold_in_numbers() -> None:
    for rule in REALS:
        assert not difference(in_reals(rule), 1), rule.name


def test_the_proofs_are_of_these_rules_and_are_not_used_unasked() -> None:
    proofs.require_proved(REALS, reals=True)
    known = json.loads(proofs.REALS_FILE.read_text(encoding="utf-8"))["rules"]
    assert list(known) == list(BY_NAME) and not set(BY_NAME) & {rule.name for rule in RULES}
    with pytest.raises(proofs.RuleError, match=r"proof.*proofs\.json"):
        proofs.require_proved(REALS)
    pytest.importorskip("z3")
    light = [rule for rule in REALS if known[rule.name]["questions"] <= 40]
    assert len(light) > 30
    for rule in light:
        row = proofs.row_of(rule, reals=True)
        assert row["digest"] == known[rule.name]["digest"] and row["cases"] == known[rule.name]["cases"]


def _wrong() -> Iterator[RewriteRule]:
    """Yield wrong rules: of each kind one that holds for nearly all values, or for integers that wrap."""

    def after(name: str, change: Callable[[Term], Term]) -> RewriteRule:
        rule = BY_NAME[name]
        return replace(rule, name=f"{rule.name}, wrong", after=tuple(map(change, rule.after)))

    def put(attribute: str, value: Any, op: str) -> Callable[[Term], Term]:
        def change(term: Term) -> Term:
            if isinstance(term, Leaf):
                return term
            attributes = dict(term.attributes)
            if term.op == op and attribute in attributes:
                attributes[attribute] = value
            return apply(term.op, *map(change, term.args), **attributes)

        return change

    def without(op: str) -> Callable[[Term], Term]:
        def change(term: Term) -> Term:
            if isinstance(term, Leaf):
                return term
            return (
                change(term.args[0])
                if term.op == op
                else apply(term.op, *map(change, term.args), **dict(term.attributes))
            )

        return change

    yield after("sum of a convolution and its input", put("value", 0, "real_filled"))
    yield after("an average before a convolution of pixels, biased", put("value", 1, "real_filled"))
    yield after("an average before a convolution of pixels, biased", without("real_shift"))
    yield after("a normalisation of channels", without("real_minus"))
    yield after("a convolution of pixels before another", without("transpose"))
    w, b, m = Leaf("w", (C, C, *KERNEL), True), Leaf("b", (C,), True), Leaf("m", (C,), True)
    more, square = apply("real_carried", m, w), Leaf("v", (C, C, *KERNEL), True)
    behind = apply("real_scale", convolved([w, b]), m, axis=1)
    attributes = {**dict(convolved([w]).attributes), "pads": (1, 1, 1, 1)}  # type: ignore[union-attr]
    scaled = apply("real_scale", b, m, axis=0)
    sides: dict[str, tuple[Term, Term]] = {
        "a scale that leaves the bias": (behind, convolved([apply("real_scale", w, m, axis=0), b])),
        "a scale of inputs": (behind, convolved([apply("real_scale", w, m, axis=1), scaled])),
        "constants before padding": (
            apply("float_convolve", apply("real_shift", IMAGE, m, axis=1), w, b, **attributes),
            apply("float_convolve", IMAGE, w, apply("real_plus", b, more), **attributes),
        ),
        "a scale across a function": (
            apply("real_scale", function_of(F, IMAGE), m, axis=1), function_of(F, apply("real_scale", IMAGE, m, axis=1))
        ),
        "the sum of one": (apply("real_plus", convolved([w]), convolved([square])), convolved([w])),
        "what wraps": (apply("real_plus", IMAGE, apply("real_filled", IMAGE, value=1 << 32)), IMAGE),
    }  # fmt: skip
    for name, (before, wrong) in sides.items():
        yield RewriteRule(name, name, (before,), (wrong,))
    k = OpenSize("k")
    x, a, d = Leaf("x", (OpenSize("rows"), k)), Leaf("a", (k, k), True), Leaf("d", (k, k), True)
    inner = apply("float_multiply", apply("float_multiply", x, a), d)
    yield RewriteRule("exchanged", "", (inner,), (apply("float_multiply", x, apply("real_multiply", d, a)),))


WRONG = list(_wrong())
QUICK = [rule for rule in WRONG if rule.name != "constants before padding"]
"""All but a rule whose refutation takes seconds."""


@pytest.mark.parametrize("rule", some(WRONG, QUICK), ids=lambda rule: rule.name)
def test_what_is_wrong_is_refused(rule: RewriteRule) -> None:
    pytest.importorskip("z3")
    with pytest.raises(proofs.RuleError, match="is not proved"):
        proofs.row_of(rule, reals=True)
    assert any(difference(in_reals(rule), seed) for seed in range(8)), "it is not wrong"


def differs(rule: RewriteRule) -> bool:
    """Return whether the sides differ in numbers; False if a mutant has strides of 0."""
    try:
        return any(difference(in_reals(rule), seed) for seed in range(6))
    except (NoTrial, ValueError):
        return False


@pytest.mark.parametrize("count", some([40, 400], [40]))
def test_mutants_are_refused(count: int) -> None:
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.prover import verdict

    known = json.loads(proofs.REALS_FILE.read_text(encoding="utf-8"))["rules"]
    light = [rule for rule in REALS if known[rule.name]["questions"] < 40 * known[rule.name]["cases"]]
    every = random.Random(27).sample([mutant for rule in light for mutant in mutants(rule)], 4 * count // 3)
    wrong = [mutant for mutant in every if differs(mutant)][:count]
    assert len(wrong) == count
    assert not [mutant.name for mutant in wrong if verdict(mutant, reals=True).proved]


def test_what_holds_in_real_numbers_alone_is_refused_of_floats() -> None:
    pytest.importorskip("z3")
    for name in ("a product of a product of rank 2", "sum of convolutions of one input"):
        with pytest.raises(proofs.RuleError, match="is not proved"):
            proofs.require_proved([], [BY_NAME[name]])


# On models -----------------------------------------------------------------------------------------------------------


def normalised(m: Branchy, x: str, channels: int) -> str:
    rows = [m.constant(m.random.uniform(0.5, 2, channels)) for _ in range(4)]
    return m.op("BatchNormalization", x, *rows, epsilon=1e-3)


def plain(m: Branchy, x: str, inputs: int, outputs: int, kernel: int = 1) -> str:
    """Append a convolution without bias and Relu."""
    w = m.constant(m.random.normal(size=(outputs, inputs, kernel, kernel)) / kernel)
    return m.op("Conv", x, w, pads=[kernel // 2] * 4)


def mixed() -> onnx.ModelProto:
    """Return a model with places for each kind of rule, with and without biases."""
    m = Branchy((1, 6, 9, 9))
    channels = {c: m.constant(m.random.normal(size=(1, c, 1, 1))) for c in (5, 6)}

    def scaled(x: str, c: int) -> str:
        return m.op("Mul", channels[c], m.op("Sub", x, channels[c]))

    outputs = [scaled(x, 5) for x in (m.conv("x", 6, 5, 3, relu=False), plain(m, "x", 6, 5, 3))]
    outputs += [m.conv(scaled("x", 6), 6, 5, 3, pad=0, relu=False), plain(m, scaled("x", 6), 6, 5)]
    outputs += [m.conv("x", 6, 5, 3, relu=False), m.conv("x", 6, 5, 1, relu=False)]
    sums = [m.op("Add", outputs[i], outputs[j]) for i, j in ((4, 5), (0, 1))]
    three = normalised(m, m.conv("x", 6, 6, 3, relu=False), 6)
    one, same = normalised(m, plain(m, "x", 6, 6), 6), normalised(m, "x", 6)
    sums.append(m.op("Relu", m.op("Add", m.op("Add", one, three), same)))
    sums.append(m.op("Add", m.conv(m.op("Relu", sums[0]), 5, 6, 1, relu=False), m.conv(sums[2], 6, 6, 1, relu=False)))
    sums.append(
        m.op(
            "Add", m.conv(m.conv("x", 6, 8, 3, relu=False), 8, 4, 1, relu=False), plain(m, plain(m, "x", 6, 8), 8, 4, 1)
        )
    )
    sums.append(plain(m, plain(m, "x", 6, 3), 3, 4, 3))
    padded = m.op("Pad", "x", m.constant([0, 0, 1, 0, 0, 0, 0, 1], np.int64))
    averages = [m.pool(padded, kind="AveragePool"), m.op("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1])]
    sums += [m.conv(averages[0], 6, 4), plain(m, averages[1], 6, 4), m.conv(padded, 6, 4, 3, pad=0)]
    flat = m.op("Flatten", m.pool("x", 9, kind="AveragePool", pad=0))
    row, weights = m.constant(m.random.normal(size=7)), m.constant(m.random.normal(size=(7, 6)))
    y = m.op("Gemm", flat, weights, row, transB=1)
    sums += [
        m.linear(m.op("Mul", y, row), 7, 3),
        m.linear(m.op("Add", m.linear("x", 9, 4), m.constant([1.0, 2, 3, 4])), 4, 9),
    ]
    return m.model(*outputs, *sums)


def test_onnxruntime_gives_numbers_as_near_as_rounding_brings_them() -> None:
    """After up to 100 steps of all rules, onnxruntime's outputs differ only by roundings."""
    model = mixed()
    first = graph = graph_of(model, floats=True, reals=True)
    assert not {operation.op for operation in graph.operations} & {"onnx"}
    unchanged = measure_distance(model, AlgebraWriter(graph, model).write(), bound_of(graph, graph), open_model)
    assert not unchanged.why and unchanged.outputs  # onnxruntime fuses a Mul into a Conv, but not a Sub
    used: list[str] = []
    for rule in REALS[::-1] * 2:
        while len(used) < 100 and (match := next(matches(rule, graph), None)):
            graph = rewrite(graph, match)
            used.append(rule.name)
    comparison = measure_distance(model, AlgebraWriter(graph, model).write(), bound_of(first, graph), open_model)
    assert (
        not comparison.why
        and 0 < max(row["relative"] for row in comparison.outputs.values()) <= comparison.bound < 1e-3
    )
    assert len(set(used)) >= 18 and len(used) < 100, sorted(set(used))


def two_behind_each_other(m: Branchy | None = None) -> onnx.ModelProto:
    m = m or Branchy((1, 16, 9, 9))
    return m.model(m.conv(m.conv("x", 16, 32, 3, relu=False), 32, 8, 1))


def convolutions(model: onnx.ModelProto) -> Price:
    return Price(0, 1e6 * sum(node.op_type == "Conv" for node in model.graph.node), True)


def searched(model: onnx.ModelProto, **given: Any) -> Optimised:
    def anew(before: onnx.ModelProto, after: onnx.ModelProto) -> float:
        return convolutions(before).total - convolutions(after).total

    pricing = Pricing(convolutions, convolutions, anew)
    return optimise(model, pricing, 20, open_model, rules=RULES, way="greedy", floats=True, **given)


def test_steps_that_change_values_are_marked_and_how_far_outputs_differ_is_said() -> None:
    model = two_behind_each_other()
    found = searched(model, fast_math=True)
    (step,) = found.report["steps"]
    assert step["changes_values"] and step["proof"].startswith("real_proofs.json")
    ((_, row),) = found.report["fast_math"]["outputs"].items()
    terms = 16 * 9 + 1, 32 + 1, 1  # of a sum of each convolution, and of Relu
    assert 0 < row["relative"] <= found.report["fast_math"]["bound"] == (sum(terms) + terms[0] + terms[2]) * 2**-24
    kept = derivation_of(found.model, "it")
    assert kept is not None and kept["fast_math"] == found.report["fast_math"]
    assert f"by {row['absolute']:.2g} at most" in distance(kept)
    broken = {**kept, "fast_math": {"bound": 0.1, "outputs": {"y": {"absolute": "none"}}}}
    with pytest.raises(ValueError, match=r"'y'.*no number"):
        checked(broken)


def test_values_are_not_changed_for_what_may_be_noise() -> None:
    """A rewrite that saves one convolution of 36 is not used: the saving may be noise."""
    m, x = Branchy((1, 16, 9, 9)), "x"
    for _ in range(34):
        x = m.conv(x, 16, 16)
    found = searched(m.model(m.conv(m.conv(x, 16, 32, 3, relu=False), 32, 8, 1)), fast_math=True)
    assert not found.steps and "takes more than 97% of its time, for which no values" in found.refused[0]


def test_without_being_asked_for_nothing_changes() -> None:
    found = searched(two_behind_each_other())
    assert not found.steps and "fast_math" not in found.report and not distance(found.report)


def test_constants_that_are_not_finite_are_not_made() -> None:
    """A rewrite with infinite constants is not used: here two weights of 1e30, and a variance of 0 without epsilon."""
    for op, *args in (("real_scale", 1e30, 1e30), ("real_deviation", 1.0, 0.0, 0.0)):
        rows = [np.full(1, each, np.float32) for each in args[:2]] + [np.float32(each) for each in args[2:]]
        with pytest.raises(ValueError, match="would not be finite"):
            OPERATORS[op].evaluate(rows, {"axis": 0})


def test_steps_that_change_no_value_say_so() -> None:
    m = Branchy((1, 33, 9, 9))
    found = searched(m.model(m.conv("x", 33, 24), m.conv("x", 33, 40)), fast_math=True)
    assert found.steps and not any(step["changes_values"] for step in found.report["steps"])
    assert "differ from the original's by 0 at most" in distance(found.report)


def test_a_wrong_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison refuses a step that loses a bias, a tenth as large as other biases."""
    right = BY_NAME["a convolution of pixels behind another, biased, with a bias"]
    (conv,) = right.after
    assert not isinstance(conv, Leaf)
    last = conv.args[2]
    assert not isinstance(last, Leaf)
    wrong = replace(right, after=(apply(conv.op, *conv.args[:2], last.args[1], **dict(conv.attributes)),))
    monkeypatch.setattr(searching, "REALS", (wrong,))
    monkeypatch.setattr(searching, "require_proved", lambda *given: None)
    optimised = searched(two_behind_each_other(), fast_math=True)
    assert not optimised.steps and optimised.refused
    assert "differs by" in optimised.refused[0] and "of its largest value, and rounding is" in optimised.refused[0]


def test_fast_math_is_of_the_cpu_alone(tmp_path: Path) -> None:
    model = two_behind_each_other()
    with pytest.raises(proofs.RuleError, match=r"accelerator.*fast-math"):
        driver(model, budget=1, fast_math=True)
    with pytest.raises(proofs.RuleError, match=r"accelerator.*fast-math"):
        celosia.compile(model, optimise=1, fast_math=True)
    with pytest.raises(BudgetError, match="fast_math is of a search"):
        celosia.compile(model, accelerator=False, fast_math=True)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    found = CliRunner().invoke(app, ["optimise", str(path), "-o", str(tmp_path / "out.onnx"), "--fast-math"])
    assert found.exit_code == 2 and "give --cpu" in found.output


def test_the_command_says_how_far_outputs_differ(tmp_path: Path) -> None:
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    m = Branchy((1, 64, 28, 28))
    onnx.save(m.model(m.conv(m.conv("x", 64, 128, 3, relu=False), 128, 4, 1)), path)
    options = ["--cpu", "--fast-math", "--search", "greedy", "--budget", "5s"]
    found = CliRunner().invoke(app, ["optimise", str(path), "-o", str(out), *options])
    assert found.exit_code == 0 and "changes values" in found.output and "outputs differ" in found.output
    page = CliRunner().invoke(app, ["report", str(out), "-o", str(tmp_path / "page.html")])
    assert page.exit_code == 0
    assert "outputs differ from the original" in (tmp_path / "page.html").read_text(encoding="utf-8")
