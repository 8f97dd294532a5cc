"""Read and write generated.json: the generated rules as plain data, with their proofs and the networks that they win
on.
"""

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
    """Return the rules of generated.json."""
    rows = json.loads(GENERATED.read_text(encoding="utf-8"))["rules"]
    return tuple(rule_of(name, row["says"], row["rule"]) for name, row in rows.items())


def stored_wins() -> dict[str, dict[str, float]]:
    """Return, for each rule of generated.json, the networks that it wins on: price without generated rules over price
    with them.
    """
    rows = json.loads(GENERATED.read_text(encoding="utf-8"))["rules"]
    return {name: row["wins"] for name, row in rows.items()}


def stored_text(rules: Sequence[RewriteRule], wins: Mapping[str, Mapping[str, float]]) -> str:
    """Prove `rules` anew and return the text of generated.json. Raises RuleError. wins: by the name of the rule, as
    `stored_wins` returns them.
    """
    rows = {rule.name: {**row_of(rule), "wins": wins[rule.name], "rule": data_of(rule)} for rule in rules}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f'{{\n "meaning": "{meaning()}",\n "rules": {{\n{lines}\n }}\n}}\n'


def data_of(rule: RewriteRule) -> dict[str, Any]:
    """Return `rule` as plain data, without its name and law. The generator makes no other conditions than Monotone, and
    no cuts.
    """
    assert not rule.cuts and all(isinstance(condition, Monotone) for condition in rule.where)
    return {
        "before": [_term_data(term) for term in rule.before], "after": [_term_data(term) for term in rule.after],
        "leaves": {leaf.name: [_value_data(leaf.shape), leaf.constant] for leaf in rule.leaves},
        "sizes": {size.name: size.least for size in rule.sizes},
        "monotone": [condition.function.name for condition in rule.where if isinstance(condition, Monotone)],
        "shifts": [_value_data(shift) for shift in rule.shifts],
    }  # fmt: skip


def _term_data(term: Term) -> Any:
    """Return a term as plain data: the name of a leaf, or [operator, operands, attributes]."""
    if isinstance(term, Leaf):
        return term.name
    return [
        term.op,
        [_term_data(arg) for arg in term.args],
        {name: _value_data(value) for name, value in term.attributes},
    ]


def _value_data(value: Any) -> Any:
    """Return an attribute or a size as plain data."""
    match value:
        case tuple():
            return [_value_data(element) for element in value]
        case OpenSize():
            return value.name
        case OneOf():
            return {"one": value.name, "of": [_value_data(element) for element in value.among]}
        case ByteFunction():
            return {"function": value.name}
        case SizeOf():
            return {"size": [value.operation, _value_data(value.left), _value_data(value.right)]}
    return value


def rule_of(name: str, says: str, data: dict[str, Any]) -> RewriteRule:
    """Return the rule that `data_of` turned into plain data."""
    least_values = data["sizes"]

    def value(plain: Any) -> Any:
        """Return the attribute or size that `_value_data` turned into plain data."""
        match plain:
            case list():
                return tuple(map(value, plain))
            case str():
                return OpenSize(plain, least_values[plain])
            case {"one": choice, "of": among}:
                return OneOf(choice, tuple(map(value, among)))
            case {"function": function}:
                return ByteFunction(function)
            case {"size": [operation, left, right]}:
                return SizeOf(operation, value(left), value(right))
        return plain

    leaves = {leaf: Leaf(leaf, value(shape), constant) for leaf, (shape, constant) in data["leaves"].items()}

    def term(plain: Any) -> Term:
        """Return the term that `_term_data` turned into plain data."""
        if isinstance(plain, str):
            return leaves[plain]
        op, args, attributes = plain
        return Composed(
            op, tuple(map(term, args)), tuple((key, value(attribute)) for key, attribute in attributes.items())
        )

    before, after = (tuple(map(term, data[side])) for side in ("before", "after"))
    where = tuple(Monotone(ByteFunction(function)) for function in data["monotone"])
    return RewriteRule(name, says, before, after, where, tuple(map(value, data["shifts"])))
