"""generated.json: the rules of all vocabularies, with their proofs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from celosia.compiler.superoptimise.generation.byhand import makes
from celosia.compiler.superoptimise.generation.enumeration import AlgebraVocabulary
from celosia.compiler.superoptimise.generation.generating import Generation, running
from celosia.compiler.superoptimise.generation.instances import rewritten_once
from celosia.compiler.superoptimise.generation.vocabularies import vocabularies
from celosia.compiler.superoptimise.proofs import meaning, row_of
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules import RULES
from celosia.compiler.superoptimise.stored import data_of, rule_of
from celosia.compiler.superoptimise.terms import Composed, Term

PROCESSES = 2
Say = Callable[[str], None]


def text_of_all(budget: float, say: Say) -> str:
    """The file: all vocabularies enumerated and their rules proved anew, in `budget` seconds. OutOfTime."""
    names = [each.name for each in vocabularies()]
    ends = time.time() + budget
    with ProcessPoolExecutor(PROCESSES) as pool:
        waiting = {name: pool.submit(rows_of, name, ends - time.time()) for name in names}
        found = {}
        for name, each in waiting.items():
            found[name] = each.result()
            say(f"{name}: {found[name][0]['terms']:,} terms, {len(found[name][1])} rules")
    rows = merged({name: of_one for name, (_, of_one) in found.items()})
    counted = {name: each[0] for name, each in found.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    head = f' "meaning": "{meaning()}",\n "vocabularies": {json.dumps(counted)},\n "rules": '
    return f"{{\n{head}{{\n{lines}\n }}\n}}\n"


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


def rows_of(name: str, budget: float) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """(what was counted, a row for each rule) of the vocabulary `name`. OutOfTime."""
    (vocabulary,) = (each for each in vocabularies() if each.name == name)
    return generated(vocabulary, budget)


def generated(vocabulary: AlgebraVocabulary, budget: float = 3600) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The same of a vocabulary that is given."""
    generation = Generation(vocabulary, ends=time.perf_counter() + budget)
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
