"""Rules hold in numbers, wrong ones are refused, and the file of proofs matches the rules."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from mutants import mutants
from thorough import some
from wrong_rules import WRONG

from celosia.compiler.superoptimise import proofs
from celosia.compiler.superoptimise.proofs import RuleError, require_proved
from celosia.compiler.superoptimise.rule import OpenSize, RewriteRule, bind, value_of
from celosia.compiler.superoptimise.rules import FLOATS, RULES, WINDOWS
from celosia.compiler.superoptimise.trial import NoTrial, difference

TRIALS = 6
QUICK = 3.0
"""Rules whose cases the prover is asked about here; all of them are by `python -m celosia.compiler.superoptimise`."""


def first_difference(rule: RewriteRule) -> str:
    """Return how the rule's sides differ in the first of several trials that differs; "" if none does.

    The result is also "" if there are no sizes to try.
    """
    for seed in range(TRIALS):
        try:
            if text := difference(rule, seed):
                return text
        except NoTrial:
            return ""
    return ""


@pytest.mark.parametrize("part", some(range(4), [0]))
def test_rules_hold_in_onnxruntimes_arithmetic(part: int) -> None:
    tried = 0
    for rule in RULES[part::4]:
        try:
            assert not difference(rule, 1), rule.name
            tried += 1
        except NoTrial:
            assert "reshape" in rule.name  # sizes whose products are equal are seldom drawn
    assert tried > 80


def test_the_proofs_are_of_these_rules() -> None:
    rules = (*RULES, *FLOATS)
    require_proved(rules)
    known = json.loads(proofs.FILE.read_text(encoding="utf-8"))
    assert list(known["rules"]) == [rule.name for rule in rules]


def test_proofs_are_found_again() -> None:
    """Rules of each kind are proved again with the recorded digests; the command proves all rules."""
    pytest.importorskip("z3")
    known = json.loads(proofs.FILE.read_text(encoding="utf-8"))["rules"]
    light = [rule for rule in RULES if known[rule.name]["questions"] < 60]
    for rule in (
        *light[::12],
        *WINDOWS,
        *(rule for rule in RULES if rule.name.startswith(("merge products", "padding into"))),
    ):
        row = proofs.row_of(rule)
        assert row["digest"] == known[rule.name]["digest"] and row["cases"] == known[rule.name]["cases"]


SLOW = (
    "a larger kernel, padded with what is not zero", "groups are given up", "a tap goes that sees some of the image",
    "convolutions that read other zero points",
)  # fmt: skip
"""Rules whose refutation takes seconds."""
QUICK = [rule for rule in WRONG if rule.name not in SLOW]


@pytest.mark.parametrize("rule", some(WRONG, QUICK), ids=lambda rule: rule.name)
def test_what_is_wrong_is_refused(rule: RewriteRule) -> None:
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.prover import verdict

    found = verdict(rule)
    assert not found.proved and found.why
    assert first_difference(rule), "it is not wrong"


@pytest.mark.parametrize("count", some([8, 60, 200], [8]))
def test_mutants_are_refused(count: int) -> None:
    """No mutant of a rule that differs in numbers is proved."""
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.prover import verdict

    every = [mutant for rule in RULES for mutant in mutants(rule)]
    wrong = 0
    for mutant in random.Random(27).sample(every, 2 * count):
        if wrong == count:
            break
        if found_difference := first_difference(mutant):
            wrong += 1
            assert not verdict(mutant).proved, f"{mutant.name}: {found_difference}"
    assert wrong == count


def test_what_z3_does_not_answer_counts_as_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule counts as not proved if z3 reaches its limit. The limit counts steps, not seconds."""
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise import prover

    assert prover.verdict(RULES[0]).proved
    monkeypatch.setattr(prover, "STEPS", 1)
    assert not prover.verdict(RULES[0]).proved
    monkeypatch.setattr(prover, "STEPS", 20_000)
    assert prover.verdict(RULES[0]).proved


def test_a_proof_leaves_waiting_interruptible() -> None:
    """Signals still interrupt system calls after a proof. z3 itself restores Python's handler so that reads restart."""
    pytest.importorskip("z3")
    from celosia.compiler.superoptimise.prover import verdict

    assert verdict(RULES[0]).proved
    waiting, other = os.pipe()
    pressed = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    late = threading.Timer(5, lambda: os.write(other, b"late"))
    pressed.start(), late.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            os.read(waiting, 4)
        assert late.is_alive()
    finally:
        late.cancel()
        late.join()
        os.close(waiting), os.close(other)


def test_a_rule_without_its_proof_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(RULES[0], after=RULES[0].after[::-1])
    with pytest.raises(
        RuleError,
        match=r"'merge convolutions'.*proofs\.json",
    ):
        require_proved([changed])
    known = json.loads(proofs.FILE.read_text(encoding="utf-8")) | {"meaning": "of other sources"}
    (tmp_path / "proofs.json").write_text(json.dumps(known))
    monkeypatch.setattr(proofs, "FILES", (tmp_path / "proofs.json", *proofs.FILES[1:]))
    with pytest.raises(RuleError, match="has no proof"):
        require_proved(RULES)


def test_proofs_stay_valid_when_only_prose_and_imports_change(monkeypatch: pytest.MonkeyPatch) -> None:
    read, before = Path.read_text, proofs.meaning.__wrapped__()

    def meaning_with(old: str, new: str) -> str:
        monkeypatch.setattr(Path, "read_text", lambda path, **how: read(path, **how).replace(old, new))
        return proofs.meaning.__wrapped__()

    assert meaning_with("from __future__", "from collections import abc\nfrom __future__") == before
    assert meaning_with('"""Requantise accumulators', '"""Turn accumulators') == before
    assert meaning_with("z(())", "z((0,))") != before


def test_ones_own_rule_is_proved_when_it_is_given() -> None:
    pytest.importorskip("z3")
    require_proved([], [RULES[1]])
    with pytest.raises(RuleError, match=r"'parts are exchanged' is not proved"):
        require_proved([], [rule for rule in WRONG if rule.name == "parts are exchanged"])


def test_sizes_are_solved() -> None:
    half, other = OpenSize("half"), OpenSize("other", 0)
    values: dict[str, int] = {}
    assert bind(2 * half - 1, 7, values) and values == {"half": 4}
    assert not bind(2 * OpenSize("even"), 7, values)
    assert not bind(half + other, 3, values) and bind(half + other, 4, values) and values["other"] == 0
    assert value_of((half // 3, half * other), values) == (1, 0)
