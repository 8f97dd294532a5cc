"""Rules as plain data, and generated.json: the generated rules with their proofs and the networks that they win on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from celosia.compiler.superoptimise.proofs import GENERATED, meaning, row_of
from celosia.compiler.superoptimise.rule import Monotone, RewriteRule
from celosia.compiler.superoptimise.sizes import OneOf, OpenSize, SizeOf
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term


@cache
def generated_rules() -> tuple[RewriteRule, ...]:
    """The rules of generated.json."""
    rows = json.loads(GENERATED.read_text(encoding="utf-8"))["rules"]
    return tuple(rule_of(name, row["says"], row["rule"]) for name, row in rows.items())


def stored_wins() -> dict[str, dict[str, float]]:
    """For each rule of generated.json the networks that it wins on, and their price without generated rules over that
    with them."""
    rows = json.loads(GENERATED.read_text(encoding="utf-8"))["rules"]
    return {name: row["wins"] for name, row in rows.items()}


def stored_text(rules: Sequence[RewriteRule], wins: Mapping[str, Mapping[str, float]]) -> str:
    """Prove `rules` anew and give the text of generated.json. wins: by the name of the rule. RuleError."""
    rows = {rule.name: {**row_of(rule), "wins": wins[rule.name], "rule": data_of(rule)} for rule in rules}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f'{{\n "meaning": "{meaning()}",\n "rules": {{\n{lines}\n }}\n}}\n'


def data_of(rule: RewriteRule) -> dict[str, Any]:
    """`rule` as plain data, without its name and sentence; the generator makes no other conditions than Monotone."""
    assert not rule.cuts and all(isinstance(each, Monotone) for each in rule.where)
    return {
        "before": [_term(each) for each in rule.before], "after": [_term(each) for each in rule.after],
        "leaves": {each.name: [_value(each.shape), each.constant] for each in rule.leaves},
        "sizes": {each.name: each.least for each in rule.sizes},
        "monotone": [each.function.name for each in rule.where if isinstance(each, Monotone)],
        "shifts": [_value(each) for each in rule.shifts],
    }  # fmt: skip


def _term(term: Term) -> Any:
    if isinstance(term, Leaf):
        return term.name
    return [term.op, [_term(arg) for arg in term.args], {name: _value(value) for name, value in term.attributes}]


def _value(value: Any) -> Any:
    match value:
        case tuple():
            return [_value(each) for each in value]
        case OpenSize():
            return value.name
        case OneOf():
            return {"one": value.name, "of": [_value(each) for each in value.among]}
        case ByteFunction():
            return {"function": value.name}
        case SizeOf():
            return {"size": [value.operation, _value(value.left), _value(value.right)]}
    return value


def rule_of(name: str, says: str, data: dict[str, Any]) -> RewriteRule:
    """The rule that `data_of` wrote."""
    least = data["sizes"]

    def value(plain: Any) -> Any:
        match plain:
            case list():
                return tuple(map(value, plain))
            case str():
                return OpenSize(plain, least[plain])
            case {"one": choice, "of": among}:
                return OneOf(choice, tuple(map(value, among)))
            case {"function": function}:
                return ByteFunction(function)
            case {"size": [operation, left, right]}:
                return SizeOf(operation, value(left), value(right))
        return plain

    leaves = {leaf: Leaf(leaf, value(shape), constant) for leaf, (shape, constant) in data["leaves"].items()}

    def term(plain: Any) -> Term:
        if isinstance(plain, str):
            return leaves[plain]
        op, args, attributes = plain
        return Composed(op, tuple(map(term, args)), tuple((key, value(of)) for key, of in attributes.items()))

    before, after = (tuple(map(term, data[side])) for side in ("before", "after"))
    where = tuple(Monotone(ByteFunction(function)) for function in data["monotone"])
    return RewriteRule(name, says, before, after, where, tuple(map(value, data["shifts"])))
