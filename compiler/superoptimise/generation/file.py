"""generated.json: the rules of all vocabularies, with their proofs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from celosia.compiler.superoptimise.generation.byhand import makes
from celosia.compiler.superoptimise.generation.generating import Generation, running
from celosia.compiler.superoptimise.generation.instances import rewritten_once
from celosia.compiler.superoptimise.generation.vocabularies import vocabularies
from celosia.compiler.superoptimise.proofs import GENERATED, meaning, row_of
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules import RULES
from celosia.compiler.superoptimise.stored import data_of, rule_of
from celosia.compiler.superoptimise.terms import Composed, Term

PROCESSES = 2
SECONDS = 20.0
"""After which it is said how far it is."""
Say = Callable[[str], None]
Found = dict[str, tuple[dict[str, int], list[dict[str, Any]]]]
"""Of each vocabulary: what was counted, and a row for each rule."""


def text_of_all(budget: float, say: Say) -> str:
    """The file: all vocabularies enumerated and their rules proved anew, in `budget` seconds. OutOfTime."""
    names = [each.name for each in vocabularies()]
    found = _found(names, budget, say)
    rows = merged({name: found[name][1] for name in names})
    counted = {name: found[name][0] for name in names}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    head = f' "meaning": "{meaning()}",\n "vocabularies": {json.dumps(counted)},\n "rules": '
    return f"{{\n{head}{{\n{lines}\n }}\n}}\n"


def _found(names: Sequence[str], budget: float, say: Say) -> Found:
    """Each in a new process, so that what z3 is asked there depends on no other; the dearest first. OutOfTime."""
    before = json.loads(GENERATED.read_text(encoding="utf-8"))["vocabularies"]
    proofs = {name: before.get(name, {"left": 0})["left"] for name in names}
    started, found, context = time.time(), Found(), get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(PROCESSES, context, max_tasks_per_child=1) as pool:
        tried = manager.dict(dict.fromkeys(names, 0))
        dearest = sorted(names, key=lambda name: -proofs[name])
        running = {pool.submit(rows_of, name, started + budget, tried): name for name in dearest}
        left = set(running)
        while left:
            ended, left = wait(left, SECONDS, FIRST_COMPLETED)
            for each in ended:
                name = running[each]
                found[name] = each.result()
                say(f"{name}: {found[name][0]['terms']:,} terms, {len(found[name][1])} rules")
            done = sum(min(tried[name], proofs[name]) for name in names)
            if left and done:
                more = (time.time() - started) * (sum(proofs.values()) / done - 1)
                say(f"{done} of about {sum(proofs.values())} equations tried, about {more:.0f} s more")
    return found


def merged(found: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """The rows of all vocabularies, numbered, without those that are cases of others."""
    kept: dict[str, list[RewriteRule]] = {}
    rows: dict[str, Any] = {}
    for name, of_one in found.items():
        new = 0
        for row in of_one:
            rule = rule_of("", "", row["rule"])
            top = rule.before[0].op if isinstance(rule.before[0], Composed) else ""
            if not any(is_case(rule, other) for other in kept.get(top, [])):
                new += 1
                rows[f"{name}, {new}"] = row
                kept.setdefault(top, []).append(rule)
    return rows


def is_case(rule: RewriteRule, other: RewriteRule) -> bool:
    """Whether `other` makes what `rule` makes, wherever that fits and with no more conditions."""
    if len(rule.before) > 1 or len(other.before) > 1 or other.where:
        return rule.digest == other.digest
    return rewritten_once(other.before[0], other.after[0], rule.before[0], {}) == rule.after[0]


def rows_of(
    name: str, ends: float = float("inf"), tried: MutableMapping[str, int] | None = None
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """(what was counted, a row for each rule) of the vocabulary `name`. ends: the time of time.time() at which it is
    over. tried: where it says how far it is. OutOfTime."""
    (vocabulary,) = (each for each in vocabularies() if each.name == name)
    say = partial(({} if tried is None else tried).__setitem__, name)
    generation = Generation(vocabulary, ends, say)
    rows = [_row(replace(rule, says=_sentence(rule))) for rule in generation.run()]
    return asdict(generation.counted), rows


def _row(rule: RewriteRule) -> dict[str, Any]:
    return {**row_of(rule), "by_hand": makes(RULES, rule), "rule": data_of(rule)}


def _sentence(rule: RewriteRule) -> str:
    """By the operators of both sides."""
    return f"{_side(rule.before)} is the same as {_side(rule.after)}"


def _side(terms: Sequence[Term]) -> str:
    return " beside ".join(" of ".join(_operators(term)) or "the tensor itself" for term in terms)


def _operators(term: Term) -> Iterator[str]:
    if isinstance(term, Composed):
        if term.op != "requantise":
            yield term.op
        for arg in running(term):
            yield from _operators(arg)
