"""Optimised models give the same bytes under onnxruntime, take fewer cycles, and keep their form."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from thorough import some
from typer.testing import CliRunner

import celosia
from celosia.compiler.compile import compile as compiled
from celosia.compiler.compile import network_of
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.options import Run
from celosia.compiler.pricing import price, pricing
from celosia.compiler.superoptimise.compare_outputs import compare_on_random_inputs
from celosia.compiler.superoptimise.derivation import KEY, derivation_in, derivation_of
from celosia.compiler.superoptimise.graph import OriginalForm, realised, weights_of
from celosia.compiler.superoptimise.matching import NotTaken, matches, rewrite
from celosia.compiler.superoptimise.operators.definition import Unwritable
from celosia.compiler.superoptimise.optimise import Optimised, graph_of, optimise
from celosia.compiler.superoptimise.price import likeness
from celosia.compiler.superoptimise.rules import RULES
from celosia.compiler.superoptimise.search import BudgetError, RuleSearch, SearchState
from celosia.compiler.superoptimise.writing import AlgebraWriter
from celosia.compiler.tune.layer_trial import TIMED
from celosia.compiler.tune.records import Records, decode_line, encode_line
from celosia.driver.cli import app
from celosia.driver.explore.configs import DEFAULT
from celosia.driver.explore.explore import Interrupted
from celosia.driver.tune.optimise import optimise as driver
from celosia.driver.workstation.oracle import OracleError, open_model
from celosia.hw.spec.config import PRESETS, Config

pytest.importorskip("onnxruntime")

from quantised_models import Quantised
from sweep import rewritings


def found(model: onnx.ModelProto, budget: float = 20, **given: Any) -> Optimised:
    return optimise(model, pricing(model), budget, open_model, **given)


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
    y = m.byte_operator("Concat", [m.conv("x", 64, 8, 0.05) for _ in range(3)], axis=1)
    optimised = found(m.model(y))
    operators = [node.op_type for node in optimised.model.graph.node]
    assert operators.count("Conv") == 1 and not {"Concat", "Slice"} & set(operators)


def test_convolutions_of_other_zero_points_stay() -> None:
    m = Quantised((1, 64, 16, 16))
    optimised = found(m.model(m.conv("x", 64, 8, 0.05, zero=-128), m.conv("x", 64, 8, 0.05, zero=0)))
    assert not optimised.steps and optimised.after == optimised.before


def every_rewriting(model: onnx.ModelProto, tidy: bool = True) -> dict[str, onnx.ModelProto]:
    """Return the model after each rule, by the rule's name, applied at the first possible place."""
    graph, rewritten = graph_of(model), dict[str, onnx.ModelProto]()
    tidier = RuleSearch(RULES, lambda each: pytest.fail(), lambda a, b: None, 0)
    for rule in RULES:
        for match in matches(rule, graph):
            try:
                after = rewrite(graph, match)
                rewritten[rule.name] = AlgebraWriter(tidier.tidy(after)[0] if tidy else after, model).write()
                break
            except (NotTaken, Unwritable):
                continue
    return rewritten


def mixed(qdq: bool, seed: int) -> onnx.ModelProto:
    """Return a model to which most rules apply."""
    m = Quantised((1, 8, 12, 12), qdq, seed)
    a = m.conv("x", 8, 8, 0.05, kernel=3)
    b = m.conv("x", 8, 8, 0.05, kernel=1)
    both = m.byte_operator("Concat", [a, b], axis=1)
    pooled = m.byte_operator("MaxPool", [both], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
    grouped = m.conv(pooled, 16, 16, 0.06, kernel=3, group=4)
    strided = m.conv(grouped, 16, 8, 0.06, kernel=3, strides=[2, 2])
    turned = m.byte_operator(
        "Transpose", [m.byte_operator("Transpose", [strided], perm=[0, 2, 3, 1])], perm=[0, 3, 1, 2]
    )
    cut = m.node("Split", [grouped, m.constant([6, 10], np.int64)], axis=1)
    m.parameters[cut] = m.parameters[grouped]
    m.nodes[-1].output.append(f"{cut}_rest")
    m.parameters[f"{cut}_rest"] = m.parameters[grouped]
    last = m.conv(f"{cut}_rest", 10, 8, 0.06)
    relu = m.quantised(m.node("Relu", [m.floats(last)]), 0.06, -128)
    return m.model(turned, relu, m.conv(cut, 6, 8, 0.07))


@pytest.mark.parametrize("qdq", [True, False], ids=["QDQ", "QLinearConv"])
def test_each_rule_leaves_every_byte(qdq: bool) -> None:
    model = mixed(qdq, 3)
    assert not compare_on_random_inputs(model, AlgebraWriter(graph_of(model), model).write(), open_model)
    made = every_rewriting(model)
    for name, other in made.items():
        assert not compare_on_random_inputs(model, other, open_model), name
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
    tidied, names = RuleSearch(RULES, lambda each: pytest.fail(), lambda a, b: None, 0).tidy(graph)
    assert names == ("sums of numbers of rank 2",) and len(tidied.operations) == 2
    assert not compare_on_random_inputs(model, AlgebraWriter(tidied, model).write(), open_model)


def test_what_only_tidies_up_is_taken_where_no_other_rule_fits() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (int32[2, 3] x, string[2] text) => (int32[2, 3] y, string[2] same)
        <int32 three = {3}, int32 four = {4}> {
            a = Add(x, three)
            y = Add(a, four)
            same = Identity(text)
        }""")
    optimised = found(model)
    assert [node.op_type for node in optimised.model.graph.node] == ["Add", "Identity"] and not optimised.refused
    assert [(step["rule"], step["where"]) for step in optimised.report["steps"]] == [
        ("sums of numbers of rank 2", ["a", "y"])
    ]
    assert not compare_on_random_inputs(model, optimised.model, open_model)


def partly(qdq: bool) -> dict[str, onnx.ModelProto]:
    """Return a model of odd size for each kind of partly equivalent rule, by the beginning of the rule's name."""

    def convolved(size: int, outputs: int, kernel: int, **attributes: Any) -> onnx.ModelProto:
        m = Quantised((1, 16, size, size), qdq)
        return m.model(m.conv(m.conv("x", 16, 64, 0.05), 64, outputs, 0.05, kernel=kernel, **attributes))

    dilated = {"pads": [8] * 4, "dilations": [8, 8]}

    def pooled(size: int, counted: int | None = None) -> onnx.ModelProto:
        """Return a model with a MaxPool, or with an AveragePool if `counted` says whether padding counts."""
        m = Quantised((1, 16, size, size), qdq)
        x = m.conv("x", 16, 64, 0.05, zero=5)
        if counted is None:
            y = m.byte_operator("MaxPool", [x], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
        else:
            y = m.average_pool(x, 0.05, 5, [1] * 4, counted)
        return m.model(m.conv(y, 64, 16, 0.05))

    return {
        "largest by rows": pooled(19), "averages inside": pooled(21, 0), "averages with padding": pooled(15, 1),
        "border rows apart": convolved(19, 64, 3, **dilated),
        "border columns that meet": convolved(13, 64, 3, **dilated),
        "no first tap": convolved(7, 64, 3, **dilated), "pixels as channels, 4 x 4": convolved(18, 1, 5),
        "pixels as channels, 2 x 2, of what is beyond 16s": convolved(17, 19, 3),
    }  # fmt: skip


PARTLY = [*product(partly(False), [False, True])]
"""Rules, each on a network of QLinearConv, and of QDQ."""
AS_QDQ = ("averages inside", "border columns that meet")
"""Those that `make test` applies to QDQ: one of averages and one of convolutions."""


@pytest.mark.parametrize(("kind", "qdq"), some(PARTLY, [case for case in PARTLY if case[1] is (case[0] in AS_QDQ)]))
def test_partly_equivalent_rules_save_cycles_and_leave_every_byte(kind: str, qdq: bool) -> None:
    model = partly(qdq)[kind]
    graph = graph_of(model)
    tidier = RuleSearch(RULES, lambda each: pytest.fail(), lambda a, b: None, 0)
    rule = next(each for each in RULES if each.name.startswith(kind))
    after = tidier.tidy(rewrite(graph, next(matches(rule, graph))))[0]
    made = AlgebraWriter(after, model).write()
    assert not compare_on_random_inputs(model, made, open_model)
    assert price(made, "pynq").total < 0.95 * price(model, "pynq").total


def test_parts_alike_are_priced_once() -> None:
    """Parts that differ only in weights are priced once; other shapes and quantisations are other parts."""
    graphs = [graph_of(branches(True, seed=seed)) for seed in (1, 2)]
    other, bytes_alone = graph_of(branches(True, (0.04, 0.05))), graph_of(branches(False))
    assert graphs[0].digest != graphs[1].digest and likeness(graphs[0]) == likeness(graphs[1])
    assert len({likeness(graph) for graph in (graphs[0], other, bytes_alone)}) == 3


def test_what_is_remembered_of_layers_changes_no_price() -> None:
    model = branches(True, (0.04, 0.05))
    first, network = price(model, "pynq", records=None), network_of(model, "pynq", records=None)
    assert first == price(model, "pynq", records=None) and first.cycles == network.cycles(network.image, TIMED)


def test_of_what_was_timed_not_all_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("celosia.compiler.pricing")
    held, model = module._timed_chains(PRESETS["tiny"]), branches(True)
    held["a chain"] = 1.0
    price(model, "tiny")
    assert "a chain" in held
    monkeypatch.setattr(module, "MAX_TIMED_CHAINS", 0)
    price(model, "tiny")
    assert "a chain" not in held
    for number in range(20):
        module._timed_chains(Config(trace_depth=number))
    assert module._timed_chains(PRESETS["tiny"]) is not held


def test_padding_goes_into_the_convolution() -> None:
    m = Quantised((1, 8, 6, 6))
    padded = m.node("Pad", [m.floats("x"), m.constant([0, 0, 1, 2, 0, 0, 0, 1], np.int64)])
    model = m.model(m.conv(m.quantised(padded, 0.05, 3), 8, 8, 0.05, kernel=3))
    tidied, names = RuleSearch(RULES, lambda each: pytest.fail(), lambda a, b: None, 0).tidy(graph_of(model))
    assert names == ("padding into a convolution",)
    (made,) = [each for each in tidied.operations if each.op == "convolve"]
    assert made["pads"] == (2, 3, 1, 2)
    assert not compare_on_random_inputs(model, AlgebraWriter(tidied, model).write(), open_model)


@pytest.mark.parametrize("seed", some(range(3), [0]))
def test_all_of_a_search_leaves_every_byte(seed: int) -> None:
    model = mixed(seed % 2 == 0, seed)
    optimised = found(model, budget=3)
    assert not optimised.refused and not compare_on_random_inputs(model, optimised.model, open_model)
    assert optimised.after.total <= optimised.before.total


@pytest.mark.parametrize("seed", some(range(1000, 1030), range(1000, 1010)))
def test_random_steps_on_random_models_leave_every_byte(seed: int) -> None:
    why, steps = rewritings(seed)
    assert not why, steps


def test_greedy_takes_no_step_that_costs() -> None:
    optimised = found(branches(True), way="greedy")
    gains = [row["gain"] for row in optimised.report["steps"]]
    assert gains and min(gains) > 0


def test_what_differs_is_refused_in_a_sentence() -> None:
    """A step is refused with a sentence if the oracle finds other bytes than the original's."""
    model = branches(True)
    asked = []

    def oracle(other: onnx.ModelProto) -> Run:
        asked.append(other)
        run, more = open_model(other), np.int8(len(asked) % 2 == 0)
        return lambda feed: {name: y + more for name, y in run(feed).items()}

    optimised = optimise(model, pricing(model), 20, oracle)
    assert optimised.model.SerializeToString() == model.SerializeToString() and not optimised.steps
    assert optimised.after == optimised.before and len(asked) == 2 * len(optimised.refused) > 0
    sentence = optimised.refused[0]
    assert "the step 'merge convolutions' at " in sentence and "differs in 2048 of 2048 elements" in sentence


def test_what_the_oracle_does_not_run_is_refused_in_a_sentence() -> None:
    model = branches(True)

    def oracle(other: onnx.ModelProto) -> Run:
        if len(other.graph.node) < len(model.graph.node):
            raise OracleError("onnxruntime cannot run the model: no kernel")
        return open_model(other)

    optimised = optimise(model, pricing(model), 20, oracle)
    assert not optimised.steps and "is refused: onnxruntime cannot run the model: no kernel" in optimised.refused[0]


@pytest.mark.parametrize("name", some(["", "conv"], ["conv"]), ids=["nameless", "equal names"])
def test_nodes_need_no_names_of_their_own(name: str) -> None:
    model = branches(True)
    for node in model.graph.node:
        node.name = name
    optimised = driver(model, "pynq", budget=20)
    assert optimised.before.cycles / optimised.after.cycles >= 3.0 and not optimised.refused


def test_the_compiler_opens_no_runtime_itself() -> None:
    with pytest.raises(BudgetError, match=r"oracle.*celosia\.compile"):
        compiled(branches(True), "pynq", optimise="1s")


def test_ctrl_c_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(state: Any) -> None:
        if state.best.total < state.original.total and not state.ended:
            raise KeyboardInterrupt

    optimised = found(branches(True), told=interrupt)
    assert optimised.state.ended == "interrupted" and optimised.steps
    assert optimised.after.cycles < optimised.before.cycles


def test_compile_takes_a_budget(tmp_path: Path) -> None:
    model = branches(True)
    program = celosia.compile(model, "pynq", optimise="20s", check=False)
    assert program.name == "model" and [len(launch.layers) for launch in program.launches] == [1]
    program.save(tmp_path / "four.celosia")
    told = derivation_in(tmp_path / "four.celosia")
    assert told is not None and {step["rule"] for step in told["steps"]} == {"merge convolutions"}
    program.derivation = "{"
    program.save(tmp_path / "broken.celosia")
    with pytest.raises(ModelError, match=r"derivation.*broken\.celosia"):
        derivation_in(tmp_path / "broken.celosia")
    with pytest.raises(ValueError, match=r"'soon'.*90s, 30m or 2h"):
        celosia.compile(model, "pynq", optimise="soon")


def test_what_was_found_is_kept_and_gone_on_from(tmp_path: Path) -> None:
    model, file = branches(True), tmp_path / "found.jsonl"
    first = driver(model, "pynq", budget=20, records=file)
    lines = file.read_bytes()
    again = driver(model, "pynq", budget=20, records=file)
    assert again.state.ended == "known" and again.state.priced == 2 and file.read_bytes() == lines
    assert again.after == first.after and len(again.steps) == len(first.steps)
    assert not compare_on_random_inputs(model, again.model, open_model) and not compare_on_random_inputs(
        first.model, again.model, open_model
    )
    other = driver(branches(True, seed=1), "pynq", budget=20, records=file)  # other weights are another model
    assert other.state.ended != "known" and len(Records.load(file).trials) == 2
    row = decode_line(lines)
    row["schedule"] |= {"rules": "", "steps": [*row["schedule"]["steps"], ["no rule", ["none"], 1], []]}
    file.write_bytes(encode_line(row))
    assert driver(model, "pynq", budget=20, records=file).state.ended != "known"
    row["schedule"]["steps"].pop()
    file.write_bytes(encode_line(row))
    further = driver(model, "pynq", budget=20, records=file)  # by other rules: gone on from
    assert further.state.bests[1][1] == first.after.total and further.state.ended != "known"


def test_the_best_are_tuned_and_the_one_that_is_best_so_is_taken(tmp_path: Path) -> None:
    model, file = branches(True), tmp_path / "tuned.jsonl"
    tuned = driver(model, "pynq", budget=20, records=file, tune=3)
    first, *others = tuned.state.tuned
    assert others and min(others) < first and 0 < len(others) <= 5 and tuned.steps
    kinds = {key.measurer.split()[0] for key in Records.load(file).trials}
    assert kinds == {"superoptimiser", "timed", "whole"}
    asked: list[int] = []

    def dearer(each: onnx.ModelProto) -> float:
        """Return a price that grows with the number of steps, and is highest for the original."""
        asked.append(len(each.graph.node))
        return 1e6 if len(asked) == 1 else float(len(asked))

    second = optimise(model, pricing(model)._replace(tuned=dearer), 20, open_model)
    assert 0 < len(second.steps) < len(tuned.steps) and not compare_on_random_inputs(model, second.model, open_model)
    kept = optimise(model, pricing(model)._replace(tuned=lambda each: 1.0), 20, open_model)  # none takes less
    assert not kept.steps and kept.model == model


def test_explore_rewrites_for_each_shape_of_array_on_the_front(tmp_path: Path) -> None:
    pytest.importorskip("moocore")
    onnx.save(branches(True), tmp_path / "four.onnx")
    space = {name: getattr(PRESETS["pynq"], name) for name in DEFAULT} | {"block_out": [8, 16]}
    given: Any = {"space": space, "objective": ["cycles", "area"]}
    usual = celosia.explore(tmp_path / "four.onnx", **given)
    folder, states = tmp_path / "front", list[Any]()
    found = celosia.explore(tmp_path / "four.onnx", optimise=40, folder=folder, told=states.append, **given)
    before = {row["digest"]: row["models"]["four"] for row in (*usual.report["front"], usual.report["preset"])}
    after = [*found.report["front"], found.report["preset"]]
    shapes = {tuple(row["set"][name] for name in ("block_in", "block_out")) for row in after}
    assert len(shapes) == 2 and {"ExploreState", "SearchState"} == {type(each).__name__ for each in states}
    for row in after:
        made = row["models"]["four"]
        assert made["cycles"] <= before[row["digest"]]["cycles"]
        assert (made["cycles"] < before[row["digest"]]["cycles"]) == bool(made["file"])
    assert found.report["preset"]["models"]["four"]["cycles"] * 3 < before[after[-1]["digest"]]["cycles"]
    file = found.report["preset"]["models"]["four"]["file"]
    assert not compare_on_random_inputs(onnx.load(tmp_path / "four.onnx"), onnx.load(folder / file), open_model)
    kept = {point.cfg.digest: point for point in found.points}
    assert all(kept[digest].costs["four"].cycles == each["cycles"] for digest, each in before.items())  # as they were
    rows, searches = found.report["front"], (folder / "optimised" / "steps.jsonl").read_bytes()
    fields = "".join(f"{name} = {json.dumps(value)}\n" for name, value in space.items())
    (tmp_path / "space.toml").write_text(fields)
    line = [
        tmp_path / "four.onnx",
        "-o",
        folder,
        "--space",
        tmp_path / "space.toml",
        "--points",
        9,
        "--optimise",
        "40s",
    ]
    again = CliRunner().invoke(app, ["explore", *map(str, line)], env={"COLUMNS": "200"})
    assert again.exit_code == 0 and f"Rewritten models, in the folder of points: {file}" in again.output, again.output
    assert "rewriting four" not in again.output and (folder / "optimised" / "steps.jsonl").read_bytes() == searches
    assert [row["models"] for row in json.loads((folder / "front.json").read_text())["front"]] == [
        row["models"] for row in rows
    ]
    with pytest.raises(ValueError, match="folder of points"):
        celosia.explore(tmp_path / "four.onnx", optimise=20, **given)


def test_ctrl_c_while_explore_rewrites_keeps_the_front(tmp_path: Path) -> None:
    pytest.importorskip("moocore")
    onnx.save(branches(True), tmp_path / "four.onnx")

    def interrupt(state: Any) -> None:
        if isinstance(state, SearchState) and state.best.total < state.original.total and not state.ended:
            raise KeyboardInterrupt

    given: Any = {"folder": tmp_path / "front", "points": 1, "optimise": 40}
    with pytest.raises(Interrupted) as end:
        celosia.explore(tmp_path / "four.onnx", told=interrupt, **given)
    report = json.loads((tmp_path / "front" / "front.json").read_text())
    assert report == json.loads(json.dumps(end.value.found.report)) and report["state"]["ended"] == "interrupted"
    made = report["preset"]["models"]["four"]
    assert made["file"] and made["cycles"] < next(iter(end.value.found.points)).costs["four"].cycles


def test_steps_of_another_config_are_tried_first(tmp_path: Path) -> None:
    model, file = branches(True), tmp_path / "found.jsonl"
    first = driver(model, "pynq", budget=20, records=file)
    other = driver(model, "wide", budget=20, records=file)
    assert [step.rule for step in other.steps[: len(first.steps)]] == [step.rule for step in first.steps]
    assert other.state.bests[1][1] < other.before.total and other.state.ended != "known"
    assert {key.config for key in Records.load(file).trials} == {PRESETS["pynq"].digest, PRESETS["wide"].digest}


def test_ones_own_rule_is_used_or_refused() -> None:
    from celosia.compiler.superoptimise.proofs import RuleError

    pytest.importorskip("z3")
    model = branches(True)
    rule = next(rule for rule in RULES if rule.name == "merge convolutions")
    mine = found(model, rules=[], own=[replace(rule, name="mine")])
    assert {row["rule"] for row in mine.report["steps"]} == {"mine"}
    assert {row["proof"] for row in mine.report["steps"]} == {"proved when it was given"}
    wrong = RULES[0].__class__("mine", "", RULES[0].before, RULES[0].after[::-1])
    with pytest.raises(RuleError, match="'mine' is not proved"):
        driver(branches(True), "pynq", budget=1, rules=[wrong])


def test_scales_of_any_multipliers_are_found() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        m = rng.uniform(1e-6, 1.0, 64).astype(np.float32)
        note = OriginalForm("Conv", True, float(np.float32(rng.uniform(0.001, 0.1))), (0.1,), 0.03, True)
        made = realised(m, [note])
        assert made is not None and len(made.w) == 64
        from celosia.compiler.numerics import conv_scale

        assert np.array_equal(conv_scale(made.x, np.array(made.w, np.float32), made.y), m)
    assert weights_of(np.array([1e38], np.float32), 1e-3, 1e3) is None


def test_the_command(tmp_path: Path) -> None:
    model, out, report = tmp_path / "four.onnx", tmp_path / "out.onnx", tmp_path / "report.json"
    onnx.save(branches(True), model)
    run = lambda *given: CliRunner().invoke(app, ["optimise", *map(str, given)])  # noqa: E731
    done = run(model, "-o", out, "--budget", "20s", "--report", report)
    assert done.exit_code == 0 and "merge convolutions" in done.output and "times as fast" in done.output
    assert not compare_on_random_inputs(onnx.load(model), onnx.load(out), open_model) and '"gain"' in report.read_text()
    told = CliRunner().invoke(app, ["inspect", str(out), "--derivation"], env={"COLUMNS": "250"})
    assert told.exit_code == 0 and "merge convolutions" in told.output and "proofs.json: 8 cases" in told.output
    assert "times as fast" in told.output
    none = CliRunner().invoke(app, ["inspect", str(model), "--derivation"])
    assert none.exit_code == 1 and "holds no derivation; write a model with `celosia optimise`" in none.output
    pytest.importorskip("bokeh")
    for source in (out, report):
        page = tmp_path / f"{source.stem}.html"
        drawn = CliRunner().invoke(app, ["report", str(source), "-o", str(page), "--quiet"])
        text = page.read_text() if drawn.exit_code == 0 else drawn.output
        assert "How the model came to be" in text and "merge convolutions" in text and "8 cases" in text, text[:300]
        before, after = text.split(">Before<")[1].split(">After<")
        assert before.count("Conv 8×64×1×1 → 1×8×16×16</title>") == 4 and before.count('class="same"') == 1
        assert after.count("Conv 32×64×1×1") == 2 and after.count("Slice → 1×8×16×16</title>") == 4
    nothing = tmp_path / "float.onnx"
    onnx.save(
        onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) {y = Abs(x)}'),
        nothing,
    )
    left = run(nothing, "-o", tmp_path / "same.onnx")
    assert left.exit_code == 0 and "no operator of the model runs on the accelerator; --cpu looks" in left.output
    for given, words in (
        ((model, "-o", model), "it is an input, too; give another name"),
        ((model, "-o", out, "--budget", "0"), "in 0 s nothing can be found; give more, as 60s"),
        ((model, "-o", out, "--budget", "5x"), "'5x' is no time; write it as 90s, 30m or 2h"),
        ((tmp_path / "none.onnx", "-o", out), "there is no model at"),
        ((model, "-o", out, "--config", "pink"), "no preset is called 'pink'; take one of"),
    ):
        failed = run(*given)
        assert failed.exit_code == 1 and words in failed.output, failed.output


@pytest.mark.parametrize("text", ["{", "[]", '{"cycles": 1}', '{"cycles": 1, "cycles_before": 2, "host": 0}'])
def test_a_broken_derivation_is_refused_in_a_sentence(text: str) -> None:
    model = branches(True)
    assert derivation_of(model, "m.onnx") is None
    model.metadata_props.append(onnx.StringStringEntryProto(key=KEY, value=text))
    with pytest.raises(ModelError, match=r"derivation.*m\.onnx"):
        derivation_of(model, "m.onnx")


def test_the_last_derivation_is_the_models() -> None:
    optimised = found(branches(True))
    kept = derivation_of(optimised.model, "it")
    assert kept is not None and kept["steps"] == optimised.report["steps"]
    again = found(optimised.model)
    assert not again.steps and derivation_of(again.model, "it") == kept


def test_what_cannot_be_written_is_refused() -> None:
    old = branches(True)
    old.opset_import[0].version = 11
    with pytest.raises(ModelError, match=r"opset 11.*13"):
        found(old)
    opened = branches(True)
    opened.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    with pytest.raises(ModelError, match=r"dimension 0.*--shape x=1,64,16,16"):
        found(opened)
    optimised = found(opened, shapes={"x": (1, 64, 16, 16)})
    assert optimised.steps and optimised.model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    replaced = branches(True)
    for each in replaced.graph.initializer:
        replaced.graph.input.append(onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims))
    with pytest.raises(ModelError, match=r"'c0'.*inputs"):
        found(replaced)
    replaced.ir_version = 3  # where all constants are inputs, and none can be replaced
    optimised = found(replaced)
    assert optimised.steps
    onnx.checker.check_model(optimised.model)
    with pytest.raises(ModelError, match=r"'image'.*'x'"):
        found(opened, shapes={"image": (1, 64, 16, 16)})


def test_what_reads_inside_of_an_operator_keeps_its_name() -> None:
    """A tensor that a subgraph of an If reads keeps its name, though a rule would remove it."""
    m = Quantised((1, 8, 6, 6))
    y = m.byte_operator("Transpose", [m.byte_operator("Transpose", ["x"], perm=[0, 2, 3, 1])], perm=[0, 3, 1, 2])
    condition = m.constant(True, np.bool_)
    inner = [
        onnx.helper.make_graph(
            [onnx.helper.make_node("Identity", [y], [name])], name, [],
            [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT8, (1, 8, 6, 6))],
        ) for name in ("yes", "no")
    ]  # fmt: skip
    m.nodes.append(onnx.helper.make_node("If", [condition], ["z"], then_branch=inner[0], else_branch=inner[1]))
    model = m.model("z")
    tidied, _ = RuleSearch(RULES, lambda each: pytest.fail(), lambda a, b: None, 0).tidy(graph_of(model))
    assert not compare_on_random_inputs(model, AlgebraWriter(tidied, model).write(), open_model)


def test_weights_of_two_types_are_not_put_together() -> None:
    m = Quantised((1, 64, 16, 16), qdq=False)
    names = [m.conv("x", 64, 8, 0.05) for _ in range(2)]
    node = m.nodes[-1]
    w = next(each for each in m.constants if each.name == node.input[3])
    w.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(w).view(np.uint8), w.name))
    zeros = next(each for each in m.constants if each.name == node.input[5])
    zeros.CopyFrom(onnx.numpy_helper.from_array(np.full(8, 128, np.uint8), zeros.name))
    graph = graph_of(m.model(*names))
    (match,) = matches(RULES[0], graph)
    with pytest.raises(NotTaken, match="two types"):
        rewrite(graph, match)
