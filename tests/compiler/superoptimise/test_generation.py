"""Rules that nobody wrote: found again, right in numbers, refused where they are wrong, used where they help."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mutants import mutants
from quantised_models import Quantised
from test_rules import first_difference

from celosia.compiler.pricing import pricing
from celosia.compiler.superoptimise.equal import difference as bytes_that_differ
from celosia.compiler.superoptimise.optimise import Optimised, optimise
from celosia.compiler.superoptimise.proofs import GENERATED, require_proved
from celosia.compiler.superoptimise.rules import RULES
from celosia.compiler.superoptimise.rules.merging import C, N
from celosia.compiler.superoptimise.stored import data_of, generated_rules, rule_of
from celosia.compiler.superoptimise.trial import NoTrial, difference

MUTANTS = 60
FILE = json.loads(GENERATED.read_text(encoding="utf-8"))
EVERY = [rule_of(name, row["says"], row["rule"]) for name, row in FILE["rules"].items()]


def test_the_file_has_what_was_asked() -> None:
    assert len(EVERY) >= 150 and len(generated_rules()) == sum(not row["by_hand"] for row in FILE["rules"].values())
    require_proved(generated_rules())
    for rule, row in zip(EVERY, FILE["rules"].values()):
        assert rule.digest == row["digest"] and data_of(rule) == row["rule"], rule.name
    assert len({rule.digest for rule in EVERY}) == len(EVERY)


def test_the_page_says_how_many() -> None:
    page = (Path(__file__).parents[3] / "docs" / "superoptimiser.md").read_text(encoding="utf-8")
    by_hand = sum(row["by_hand"] for row in FILE["rules"].values())
    assert f"That gives {len(EVERY)} rules" in page and f"the rules by hand make {by_hand} already" in page
    counted = [
        f"{sum(each[name] for each in FILE['vocabularies'].values()):,}" for name in ("terms", "equations", "left")
    ]
    assert "of {} terms {} seemed equal to earlier ones, {} of these".format(*counted) in page


@pytest.mark.thorough
def test_a_vocabulary_gives_its_rules_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one; the command does all."""
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.generation import file
    from celosia.compiler.superoptimise.generation.generating import OutOfTime

    phases = [each for each in file.vocabularies() if each.name == "phases"]
    monkeypatch.setattr(file, "vocabularies", lambda: phases)
    monkeypatch.setattr(file, "SECONDS", 0.5)
    said: list[str] = []
    again = json.loads(file.text_of_all(300, said.append))
    assert again["meaning"] == FILE["meaning"] and again["rules"]
    assert again["vocabularies"]["phases"] == FILE["vocabularies"]["phases"]
    known = {row["digest"]: row for row in FILE["rules"].values()}
    for row in again["rules"].values():
        rule = rule_of("", "", row["rule"])
        assert known.get(rule.digest) == row or any(file.is_case(rule, other) for other in EVERY), row["sides"]
    assert sum(row["digest"] in known for row in again["rules"].values()) > 5
    assert re.fullmatch(r"\d+ of about 101 equations tried, about \d+ s more", said[0])
    assert said[-1].startswith("phases: 484 terms, ")
    with pytest.raises(OutOfTime, match="phases is not done"):
        file.text_of_all(0, said.append)


def test_generated_rules_hold_in_onnxruntimes_arithmetic() -> None:
    tried = 0
    for rule in EVERY:
        try:
            assert not difference(rule, 1), rule.name
            tried += 1
        except NoTrial:
            pass
    assert tried > 0.7 * len(EVERY)


def test_mutants_of_generated_rules_are_refused() -> None:
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.prover import verdict

    every = [mutant for rule in EVERY for mutant in mutants(rule)]
    wrong = 0
    for mutant in random.Random(27).sample(every, 4 * MUTANTS):
        if wrong < MUTANTS and (what := first_difference(mutant)):
            wrong += 1
            assert not verdict(mutant).proved, f"{mutant.name}: {what}"
    assert wrong == MUTANTS


def test_what_only_looks_equal_is_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints that see no function and no order: what is equal then is not proved."""
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.generation import enumeration
    from celosia.compiler.superoptimise.generation.enumeration import AlgebraVocabulary, Enumeration
    from celosia.compiler.superoptimise.generation.generating import Generation
    from celosia.compiler.superoptimise.generation.makers import cutting, function, turning
    from celosia.compiler.superoptimise.generation.vocabularies import P, drawn
    from celosia.compiler.superoptimise.terms import Leaf

    monkeypatch.setattr(enumeration, "function_of", lambda name: lambda *values: values[0])
    x, y = (Leaf(name, (N, C)) for name in "xy")
    one = (function("f"), function("g"), cutting(1, P), turning((1, 0)))
    vocabulary = AlgebraVocabulary("planted", (x, y), one, (function("h"),), drawn((C, N), cuts=(P,)), 2)
    seeming = [f"{a.term} = {b.term}" for a, b in Enumeration(vocabulary).equations()]
    assert "map(x, f=f) = x" in seeming and "map(x, y, f=h) = x" in seeming
    generation = Generation(vocabulary)
    for rule in generation.run():
        assert not first_difference(rule), rule.text
    assert generation.counted.unproved >= 4


def rows_that_nobody_reads(qdq: bool) -> onnx.ModelProto:
    """A convolution of 16 rows, of which a Slice takes four."""
    m = Quantised((1, 64, 16, 16), qdq)
    y = m.conv("x", 64, 64, 0.05)
    places = [m.constant([each], np.int64) for each in (4, 8, 2)]
    given = [m.floats(y), *places] if qdq else [y, *places]
    cut = m.node("Slice", given)
    return m.model(m.quantised(cut, *m.meant[y]) if qdq else cut)


def found(model: onnx.ModelProto, **given: Any) -> Optimised:
    from celosia.driver.host.oracle import open_model

    return optimise(model, pricing(model), 20, open_model, **given)


@pytest.mark.parametrize("qdq", [True, False], ids=["QDQ", "QLinearConv"])
def test_what_no_rule_by_hand_does(qdq: bool) -> None:
    pytest.importorskip("onnxruntime")
    from celosia.driver.host.oracle import open_model

    model = rows_that_nobody_reads(qdq)
    by_hand, all_of_them = found(model, further=()), found(model)
    assert not by_hand.steps and by_hand.before.cycles / all_of_them.after.cycles > 1.5
    assert [step.rule for step in all_of_them.steps] == [
        each.name for each in generated_rules() if each.name == all_of_them.steps[0].rule
    ]
    assert not bytes_that_differ(model, all_of_them.model, open_model)


def test_rules_by_hand_come_first() -> None:
    """Where they leave nothing, generated ones take a share of the time more; what is found is no less."""
    pytest.importorskip("onnxruntime")
    m = Quantised((1, 64, 16, 16))
    model = m.model(*(m.conv("x", 64, 8, scale) for scale in (0.04, 0.05, 0.06)))
    by_hand, all_of_them = found(model, further=()), found(model)
    assert by_hand.state.ended == "nothing left" and all_of_them.state.ended in ("nothing left", "nothing better")
    assert all_of_them.after.total <= by_hand.after.total
    assert {step.rule for step in all_of_them.steps} <= {rule.name for rule in RULES}
