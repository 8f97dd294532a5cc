"""Generated rules are proved, reproducible, right in numbers, and needed for a saving; wrong ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mutants import mutants
from quantised_models import Quantised
from test_rules import first_difference
from thorough import some

from celosia.compiler.pricing import pricing
from celosia.compiler.superoptimise import proofs as rules_file
from celosia.compiler.superoptimise.compare_outputs import compare_on_random_inputs
from celosia.compiler.superoptimise.optimise import Optimised, optimise
from celosia.compiler.superoptimise.proofs import (
    GENERATED,
    RuleError,
    data_of,
    generated_rules,
    require_proved,
    rule_of,
    stored_text,
)
from celosia.compiler.superoptimise.rule import Leaf, OpenSize, RewriteRule, apply
from celosia.compiler.superoptimise.rules import RULES
from celosia.compiler.superoptimise.rules.movement import F, function_of
from celosia.compiler.superoptimise.rules.products import C, N, concat_of
from celosia.compiler.superoptimise.trial import NoTrial, difference

FILE = json.loads(GENERATED.read_text(encoding="utf-8"))


def test_the_file_holds_proved_rules_that_win() -> None:
    require_proved(generated_rules())
    assert generated_rules() and len({rule.digest for rule in generated_rules()}) == len(generated_rules())
    for rule, row in zip(generated_rules(), FILE["rules"].values(), strict=True):
        assert rule.digest == row["digest"] and data_of(rule) == row["rule"], rule.name
        assert row["wins"] and min(row["wins"].values()) > 1, rule.name


def test_the_page_names_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "superoptimiser.md").read_text(encoding="utf-8")
    assert f"generated.json` holds {len(generated_rules())} rules" in page
    assert all(f"`{rule.name}`" in page for rule in generated_rules())


VOCABULARIES = sorted({rule.name.rpartition(",")[0] for rule in generated_rules()})


@pytest.mark.parametrize("vocabulary", some(VOCABULARIES, ["crops of columns"]))
def test_a_vocabulary_gives_its_rules_again(vocabulary: str) -> None:
    """Each vocabulary yields its rules again.

    Only hand-written rules prune here, so that there may be more rules than the command, which generates all in turn,
    keeps.
    """
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.generator import Generator, anonymous_text
    from celosia.compiler.superoptimise.vocabularies import VOCABULARIES

    generator = Generator(RULES)
    counts = generator.run(next(candidate for candidate in VOCABULARIES if candidate.name == vocabulary))
    texts = {anonymous_text(rule) for rule in generator.rules}
    assert counts["rules"] == len(generator.rules) and counts["candidates"] < counts["terms"]
    for rule in generated_rules():
        assert not rule.name.startswith(f"{vocabulary},") or anonymous_text(rule) in texts, rule.name


def test_generated_rules_hold_in_onnxruntimes_arithmetic() -> None:
    for rule in generated_rules():
        for seed in range(5):
            try:
                assert not difference(rule, seed), rule.name
            except NoTrial:
                continue


def test_mutants_of_generated_rules_are_refused() -> None:
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.prover import verdict

    wrong = 0
    for mutant in (mutant for rule in generated_rules() for mutant in mutants(rule)):
        if what := first_difference(mutant):
            wrong += 1
            assert not verdict(mutant).proved, f"{mutant.name}: {what}"
    assert wrong >= 20


def test_a_wrong_rule_in_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong rule in the file is not used without its own proof, and the command finds none."""
    pytest.importorskip("z3")
    name, row = next(iter(FILE["rules"].items()))
    rule = rule_of(name, row["says"], row["rule"])
    wrong = next(mutant for mutant in mutants(rule) if first_difference(mutant))
    planted = {**FILE, "rules": {name: {**row, "rule": data_of(wrong)}}}
    (tmp_path / "generated.json").write_text(json.dumps(planted), encoding="utf-8")
    monkeypatch.setattr(rules_file, "GENERATED", tmp_path / "generated.json")
    (read,) = rules_file.generated_rules.__wrapped__()
    assert read.digest == wrong.digest
    with pytest.raises(RuleError, match="or it is of another text"):
        require_proved([read])
    with pytest.raises(RuleError, match="is not proved, and so not used"):
        stored_text([read], {name: row["wins"]})


def test_what_only_looks_equal_is_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms with equal fingerprints do not become a rule if they are not proved equal.

    The planted fingerprints ignore functions.
    """
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise import generator
    from celosia.compiler.superoptimise.generator import Generator
    from celosia.compiler.superoptimise.vocabularies import AlgebraVocabulary, G, M, cut, function, permute

    monkeypatch.setattr(generator, "stand_in", lambda function, *values: values[0])
    leaves = tuple(Leaf(name, (N, C)) for name in "xy")
    unary = function(F), function(M), cut(1), permute(1, 0)
    vocabulary = AlgebraVocabulary("planted", leaves, unary, (lambda a, b: function_of(G, a, b),), 2)
    seeming = [f"{a} = {b}" for a, b in generator.Enumeration(vocabulary).equations()]
    assert "map(x, f=f) = x" in seeming and "map(x, y, f=h) = x" in seeming
    generator = Generator(())
    counts = generator.run(vocabulary)
    assert counts["refused"] >= 4 and generator.rules
    for rule in generator.rules:
        assert not first_difference(rule), rule.text


def test_names_and_cases_are_pruned() -> None:
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.generator import anonymous_text, generalise, is_subsumed

    def twice(name: str, size: OpenSize) -> RewriteRule:
        x = Leaf(name, (size, size))
        turned = apply("transpose", apply("transpose", x, perm=(1, 0)), perm=(1, 0))
        return RewriteRule("there and back", "", (turned,), (x,))

    square = twice("x", OpenSize("n"))
    assert anonymous_text(square) == anonymous_text(twice("y", OpenSize("m")))
    assert is_subsumed(square, RULES) and not is_subsumed(square, ())
    a, b = (Leaf(name, (N, C)) for name in "ab")
    rule = RewriteRule(
        "", "", (function_of(F, concat_of(0, a, b)),), (concat_of(0, function_of(F, a), function_of(F, b)),)
    )
    assert len(generalise(rule).sizes) == len(rule.sizes) + 1  # b may have other rows


def stage(qdq: bool) -> onnx.ModelProto:
    """Return a block whose last pixels only a strided convolution reads, as in the first version of ResNet."""
    m = Quantised((1, 64, 16, 16), qdq)
    inner = m.conv(m.conv("x", 64, 32, 0.05), 32, 32, 0.05, kernel=3)
    strided: dict[str, Any] = {"strides": [2, 2], "pads": [0] * 4}
    return m.model(m.conv(m.conv(inner, 32, 128, 0.05), 128, 64, 0.05, **strided))


def cropped(qdq: bool, columns: int = 2) -> onnx.ModelProto:
    """Return a convolution whose padding adds columns that a Slice removes."""
    m = Quantised((1, 32, 16, 16), qdq)
    y = m.conv("x", 32, 64, 0.05, kernel=3, pads=[1, 1, 1, 1 + columns])
    places = [m.constant([bound], np.int64) for bound in (0, 16, 3)]
    cut = m.node("Slice", [m.floats(y) if qdq else y, *places])
    return m.model(m.quantised(cut, *m.parameters[y]) if qdq else cut)


def found(model: onnx.ModelProto, **given: Any) -> Optimised:
    from celosia.driver.workstation.oracle import open_model

    return optimise(model, pricing(model), 20, open_model, **given)


WON = [(stage, False), (cropped, True), (cropped, False), (stage, True)]
"""Networks, each as QDQ or as QLinearConv."""


@pytest.mark.parametrize(("network", "qdq"), some(WON, [(cropped, True)]))
def test_generated_rules_win_where_those_by_hand_do_not(network: Any, qdq: bool) -> None:
    pytest.importorskip("onnxruntime")
    from celosia.driver.workstation.oracle import open_model

    model = network(qdq)
    by_hand, all_of_them = found(model, rules=RULES), found(model)
    assert all_of_them.after.total < by_hand.after.total
    assert {step.rule for step in all_of_them.steps} & {rule.name for rule in generated_rules()}
    assert not compare_on_random_inputs(model, all_of_them.model, open_model)


def test_selection_keeps_the_rules_that_win() -> None:
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.generator import winning_rules

    model, said = cropped(True, columns=8), list[str]()
    x = Leaf("x", (N, C))
    idle = replace(generated_rules()[0], name="idle", before=(apply("transpose", x, perm=(0, 1)),), after=(x,))
    factor, needed = winning_rules(RULES, [*generated_rules(), idle], model, pricing(model), 10, said.append)
    assert factor > 1.1 and needed and idle not in needed
    assert len(said) >= 1 + len(needed)
