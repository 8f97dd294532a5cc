"""Files with the proofs of the rules, and the check that each rule that is used has its proof there.

`python -m celosia.compiler.superoptimise` writes the files. Optimising a model needs no prover: a rule is used if the
file holds the digest of its text, proved under the present sources of its meaning. Rules that a caller hands in are
proved on the spot.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.plain import Sentence

FOLDER = Path(__file__).parent
FILE = FOLDER / "proofs.json"
"""Proofs of rules of integers."""
GENERATED = FOLDER / "generated.json"
"""Proofs of generated rules, with the rules themselves (generated_rules.py)."""
FLOATS_FILE = FOLDER / "float_proofs.json"
"""Proofs of rules of floats (rules/floats.py)."""
WINDOWS_FILE = FOLDER / "window_proofs.json"
"""Proofs of rules of pooling (rules/windows.py)."""
FILES = FILE, FLOATS_FILE, WINDOWS_FILE, GENERATED
"""The files whose rules keep every bit of a result."""
REALS_FILE = FOLDER / "real_proofs.json"
"""Proofs of fast-math's rules (rules/reals.py), which hold in real numbers only and need the user's consent."""
MEANING = (
    "sizes.py",
    "terms.py",
    "elements.py",
    "operators.py",
    "shape_demands.py",
    "meaning.py",
    "rule.py",
    "prover.py",
)
"""Sources that define what the text of a rule means, and what a proof is. Proofs become invalid when one changes."""
FURTHER_MEANING = {
    FLOATS_FILE: ("floats.py", "float_meaning.py"), WINDOWS_FILE: ("windows.py", "window_meaning.py"),
    REALS_FILE: ("floats.py", "reals.py", "real_meaning.py"),
}  # fmt: skip
"""Sources that define operators which only the rules of these files have."""


class RuleError(Sentence, ValueError):
    """A rule that may not be used. The message is one sentence: its name, why, and what to do."""


def meaning(file: Path = FILE) -> str:
    """Return a digest of the sources on which the proofs in `file` depend."""
    digest = hashlib.sha256()
    for name in (*MEANING, *FURTHER_MEANING.get(file, ())):
        digest.update((FOLDER / name).read_bytes())
    return digest.hexdigest()[:24]


def proof_file_text(rules: Iterable[RewriteRule], file: Path = FILE) -> str:
    """Prove every rule anew and return the text of `file`. RuleError for one that is not proved, or a name used
    twice.
    """
    rows: dict[str, Any] = {}
    for rule in rules:
        if rule.name in rows:
            raise RuleError(f"two rules are called {rule.name!r}; give each a name of its own")
        rows[rule.name] = row_of(rule, file)
    return json.dumps({"meaning": meaning(file), "rules": rows}, indent=1) + "\n"


def row_of(rule: RewriteRule, file: Path = FILE) -> dict[str, Any]:
    """Prove a rule and return its row of `file`: digest, size of the proof, law, and both sides. Raises RuleError.
    Rules of REALS_FILE are proved in real numbers.
    """
    judgement = _prove(rule, file == REALS_FILE)
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
        import celosia.compiler.superoptimise.float_meaning  # adds the meaning of float operators
        import celosia.compiler.superoptimise.window_meaning  # noqa: F401  and that of averages
        from celosia.compiler.superoptimise import prover, real_meaning
    except ImportError:
        raise RuleError(
            f"to prove the rule {rule.name!r}, z3 is needed: pip install 'celosia[superoptimise]'"
        ) from None
    judgement = (real_meaning if reals else prover).verdict(rule)
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
    valid_rows = [content["rules"] for file, content in contents.items() if content["meaning"] == meaning(file)]
    proved = {name: row["digest"] for rows in valid_rows for name, row in rows.items()}
    for rule in rules:
        if proved.get(rule.name) != rule.digest:
            raise RuleError(
                f"the rule {rule.name!r} has no proof in {', '.join(file.name for file in files)}, or it is of "
                "another text; run `python -m celosia.compiler.superoptimise`, or with --generate"
            )
    for rule in own:
        _prove(rule)
