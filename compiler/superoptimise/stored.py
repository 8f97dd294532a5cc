"""Rules as plain data, and those of generated.json, which the command in __main__.py writes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from celosia.compiler.superoptimise.proofs import GENERATED
from celosia.compiler.superoptimise.rule import Absorbs, Condition, Monotone, RewriteRule, SameByte
from celosia.compiler.superoptimise.sizes import OneOf, OpenSize, SizeOf
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term

CONDITIONS = {"monotone": Monotone, "absorbs": Absorbs, "same": SameByte}


@cache
def generated_rules() -> tuple[RewriteRule, ...]:
    """The generated ones that those by hand do not make already."""
    rows = json.loads(GENERATED.read_text(encoding="utf-8"))["rules"]
    return tuple(rule_of(name, row["says"], row["rule"]) for name, row in rows.items() if not row["by_hand"])


def data_of(rule: RewriteRule) -> dict[str, Any]:
    """`rule` without its name and sentence; those with hints for a proof have no form here."""
    assert not rule.shifts and not rule.cuts
    leaves = {each.name: [_value(each.shape), each.constant] for each in rule.leaves}
    sizes = {each.name: each.least for each in rule.sizes}
    return {
        "before": [_term(each) for each in rule.before], "after": [_term(each) for each in rule.after],
        "leaves": leaves, "sizes": sizes, "where": [_condition(each) for each in rule.where],
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


def _condition(each: Condition) -> Any:
    match each:
        case Absorbs(f, g):
            return ["absorbs", f.name, g.name]
        case Monotone(f):
            return ["monotone", f.name]
        case SameByte(f):
            return ["same", f.name]
    return _value(each)


def rule_of(name: str, says: str, data: dict[str, Any]) -> RewriteRule:
    """The rule that `data_of` wrote."""
    least = data["sizes"]

    def value(each: Any) -> Any:
        match each:
            case list():
                return tuple(map(value, each))
            case str():
                return OpenSize(each, least[each])
            case {"one": of, "of": among}:
                return OneOf(of, tuple(map(value, among)))
            case {"function": of}:
                return ByteFunction(of)
            case {"size": [operation, left, right]}:
                return SizeOf(operation, value(left), value(right))
        return each

    leaves = {of: Leaf(of, value(shape), constant) for of, (shape, constant) in data["leaves"].items()}

    def term(each: Any) -> Term:
        if isinstance(each, str):
            return leaves[each]
        op, args, attributes = each
        return Composed(op, tuple(map(term, args)), tuple((of, value(given)) for of, given in attributes.items()))

    def condition(each: Any) -> Any:
        if isinstance(each, list):
            return CONDITIONS[each[0]](*map(ByteFunction, each[1:]))
        return value(each)

    before, after = (tuple(map(term, data[side])) for side in ("before", "after"))
    return RewriteRule(name, says, before, after, tuple(map(condition, data["where"])))
