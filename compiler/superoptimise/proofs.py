"""Files with the proofs of the rules, and the check that each rule that is used has its proof there.

`python -m celosia.compiler.superoptimise` writes the files. Optimising a model needs no prover: a rule is used if one
of them holds the digest of its text, proved under the present sources of its meaning. Rules that a caller hands in are
proved on the spot. generated.json also holds the generated rules themselves, as plain data, and the networks that they
win on.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from celosia.compiler.superoptimise.rule import (
    ByteFunction,
    Composed,
    Leaf,
    Monotone,
    OneOf,
    OpenSize,
    RewriteRule,
    SizeOf,
    Term,
)
from celosia.hw.sources import normal_form
from celosia.plain import Sentence

FOLDER = Path(__file__).parent
FILE = FOLDER / "proofs.json"
"""Proofs of the rules written by hand that keep every bit of a result."""
GENERATED = FOLDER / "generated.json"
"""Proofs of generated rules, which keep every bit, too, with the rules themselves."""
FILES = FILE, GENERATED
"""The files whose rules keep every bit of a result."""
REALS_FILE = FOLDER / "real_proofs.json"
"""Proofs of fast-math's rules, which hold in real numbers only and need the user's consent."""
MEANING = ("rule.py", "prover.py", *(
    f"operators/{name}.py"
    for name in ("__init__", "definition", "elements", "products", "movement", "windows", "floats", "reals")
))  # fmt: skip
"""Sources that define what the text of a rule means, and what a proof is. Proofs become invalid when one changes."""


class RuleError(Sentence, ValueError):
    """A rule that may not be used. The message is one sentence: its name, why, and what to do."""


def _without_imports(source: str) -> str:
    """Return a source without its imports: where a name comes from changes when files move, and proves nothing."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [statement for statement in body if not isinstance(statement, ast.Import | ast.ImportFrom)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


@cache
def meaning() -> str:
    """Return a digest of the sources on which the proofs depend, without docstrings, comments and imports."""
    digest = hashlib.sha256()
    for name in MEANING:
        source = (FOLDER / name).read_text(encoding="utf-8")
        digest.update(normal_form(_without_imports(source), keep_names=True).encode())
    return digest.hexdigest()[:24]


def proof_file_text(rules: Iterable[RewriteRule], reals: bool = False) -> str:
    """Prove every rule anew and return the text of a file of proofs. RuleError for one that is not proved, or a name
    used twice. reals: prove them in real numbers.
    """
    rows: dict[str, Any] = {}
    for rule in rules:
        if rule.name in rows:
            raise RuleError(f"two rules are called {rule.name!r}; give each a name of its own")
        rows[rule.name] = row_of(rule, reals)
    return json.dumps({"meaning": meaning(), "rules": rows}, indent=1) + "\n"


def row_of(rule: RewriteRule, reals: bool = False) -> dict[str, Any]:
    """Prove a rule and return its row of a file: digest, size of the proof, law, and both sides. Raises RuleError."""
    judgement = _prove(rule, reals)
    sides = [f"{before}  ->  {after}" for before, after in zip(rule.before, rule.after)]
    return {
        "digest": rule.digest, "cases": judgement.cases, "questions": judgement.questions, "says": rule.says,
        "sides": sides,
    }  # fmt: skip


def _prove(rule: RewriteRule, reals: bool = False) -> Any:
    """Prove a rule and return the prover's Judgement. RuleError where it is not proved, or where z3 is not installed.
    reals: prove it in real numbers.
    """
    try:
        from celosia.compiler.superoptimise.prover import verdict
    except ImportError:
        raise RuleError(
            f"to prove the rule {rule.name!r}, z3 is needed: pip install 'celosia[superoptimise]'"
        ) from None
    judgement = verdict(rule, reals)
    if not judgement.proved:
        raise RuleError(
            f"the rule {rule.name!r} is not proved, and so not used: {judgement.why}; correct it, or leave it out"
        )
    return judgement


@cache
def _rows_by_name() -> dict[str, tuple[str, dict[str, Any]]]:
    """Read all files of proofs: the name of the file and the row of each rule, by the rule's name."""
    files = {file.name: json.loads(file.read_text(encoding="utf-8"))["rules"] for file in (*FILES, REALS_FILE)}
    return {name: (file, row) for file, rows in files.items() for name, row in rows.items()}


def proof_of(name: str) -> str:
    """Name the file that has the proof of the rule `name`, with the size of the proof, for reports."""
    if name not in _rows_by_name():
        return "proved when it was given"
    file, row = _rows_by_name()[name]
    return f"{file}: {row['cases']} case{'s' * (row['cases'] > 1)}, {row['questions']} questions to z3"


def changes_values(name: str) -> bool:
    """Return whether the rule `name` holds in real numbers only, so that it changes how results are rounded."""
    return name in _rows_by_name() and _rows_by_name()[name][0] == REALS_FILE.name


def require_proved(rules: Sequence[RewriteRule], own: Sequence[RewriteRule] = (), reals: bool = False) -> None:
    """Raise RuleError unless each of `rules` has a valid proof in the files, and each of `own` can be proved now.

    own: rules that the caller hands in. reals: whether rules that hold in real numbers only may be among `rules`.
    """
    files = (*FILES, REALS_FILE) if reals else FILES
    contents = {file: json.loads(file.read_text(encoding="utf-8")) for file in files}
    valid_rows = [content["rules"] for content in contents.values() if content["meaning"] == meaning()]
    proved = {name: row["digest"] for rows in valid_rows for name, row in rows.items()}
    for rule in rules:
        if proved.get(rule.name) != rule.digest:
            raise RuleError(
                f"the rule {rule.name!r} has no proof in {', '.join(file.name for file in files)}, or it is of "
                "another text; run `python -m celosia.compiler.superoptimise`, or with --generate"
            )
    for rule in own:
        _prove(rule)


def _stored_rows() -> dict[str, dict[str, Any]]:
    """Read the rows of generated.json."""
    rows: dict[str, dict[str, Any]] = json.loads(GENERATED.read_text(encoding="utf-8"))["rules"]
    return rows


@cache
def generated_rules() -> tuple[RewriteRule, ...]:
    """Return the rules of generated.json."""
    return tuple(rule_of(name, row["says"], row["rule"]) for name, row in _stored_rows().items())


def stored_wins() -> dict[str, dict[str, float]]:
    """Return, for each rule of generated.json, the networks that it wins on: price without generated rules over price
    with them.
    """
    return {name: row["wins"] for name, row in _stored_rows().items()}


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
        "before": _plain(rule.before), "after": _plain(rule.after),
        "leaves": {leaf.name: [_plain(leaf.shape), leaf.constant] for leaf in rule.leaves},
        "sizes": {size.name: size.least for size in rule.sizes},
        "monotone": [condition.function.name for condition in rule.where if isinstance(condition, Monotone)],
        "shifts": _plain(rule.shifts),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """Return a term, an attribute or a size as plain data."""
    match value:
        case tuple():
            return list(map(_plain, value))
        case Leaf() | OpenSize():
            return value.name
        case Composed():
            return [value.op, _plain(value.args), {name: _plain(attribute) for name, attribute in value.attributes}]
        case OneOf():
            return {"one": value.name, "of": _plain(value.among)}
        case ByteFunction():
            return {"function": value.name}
        case SizeOf():
            return {"size": [value.operation, _plain(value.left), _plain(value.right)]}
    return value


def rule_of(name: str, says: str, data: dict[str, Any]) -> RewriteRule:
    """Return the rule that `data_of` turned into plain data."""
    least_values = data["sizes"]

    def value(plain: Any) -> Any:
        """Return the attribute or size that `_plain` turned into plain data."""
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
        """Return the term that `_plain` turned into plain data."""
        if isinstance(plain, str):
            return leaves[plain]
        op, args, attributes = plain
        values = tuple((key, value(attribute)) for key, attribute in attributes.items())
        return Composed(op, tuple(map(term, args)), values)

    before, after = (tuple(map(term, data[side])) for side in ("before", "after"))
    where = tuple(Monotone(ByteFunction(function)) for function in data["monotone"])
    return RewriteRule(name, says, before, after, where, tuple(map(value, data["shifts"])))
