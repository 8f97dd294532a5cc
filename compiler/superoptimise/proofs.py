"""The proofs of the rules: a file that `python -m celosia.compiler.superoptimise` writes, and what it is good for.

Who optimises needs no prover: a rule is used where the file has its proof, which is of the text of the rule and of the
sources that give it its meaning. A rule of a user's own is proved when it is given.
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
GENERATED = FOLDER / "generated.json"
"""Proofs of rules that nobody wrote, with the rules themselves (stored.py)."""
FLOATS_FILE = FOLDER / "float_proofs.json"
"""Proofs of rules of floats."""
WINDOWS_FILE = FOLDER / "window_proofs.json"
"""Proofs of rules of averages, and of the largest of windows in two steps."""
FILES = FILE, FLOATS_FILE, WINDOWS_FILE, GENERATED
REALS_FILE = FOLDER / "real_proofs.json"
"""Proofs of rules of fast-math, which hold in real numbers: used where they are asked for, never else."""
MEANING = ("sizes.py", "terms.py", "elements.py", "operators.py", "legal.py", "meaning.py", "rule.py", "prover.py")
"""Sources that say what a rule's text means, and what a proof is."""
BESIDE = {
    FLOATS_FILE: ("floats.py", "float_meaning.py"), WINDOWS_FILE: ("windows.py", "window_meaning.py"),
    REALS_FILE: ("floats.py", "reals.py", "real_meaning.py"),
}  # fmt: skip
"""Sources, beside these, that rules of floats, of windows and of real numbers depend on."""


class RuleError(Sentence, ValueError):
    """A rule that may not be used; one sentence that names it, why, and the way out."""


def meaning(of: Path = FILE) -> str:
    """Digest of the sources that the proofs in this file are under."""
    found = hashlib.sha256()
    for name in (*MEANING, *BESIDE.get(of, ())):
        found.update((FOLDER / name).read_bytes())
    return found.hexdigest()[:24]


def text_of(rules: Iterable[RewriteRule], file: Path = FILE) -> str:
    """Prove every rule anew and give the text of `file`. RuleError for one that is not proved, or a name used twice."""
    rows: dict[str, Any] = {}
    for rule in rules:
        if rule.name in rows:
            raise RuleError(f"two rules are called {rule.name!r}; give each a name of its own")
        rows[rule.name] = row_of(rule, file)
    return json.dumps({"meaning": meaning(file), "rules": rows}, indent=1) + "\n"


def row_of(rule: RewriteRule, file: Path = FILE) -> dict[str, Any]:
    """Prove a rule and give its row of the file; in real numbers for REALS_FILE. RuleError."""
    found = _verdict(rule, file == REALS_FILE)
    sides = [f"{before}  ->  {after}" for before, after in zip(rule.before, rule.after)]
    return {"digest": rule.digest, "cases": found.cases, "questions": found.asked, "says": rule.says, "sides": sides}


def _verdict(rule: RewriteRule, reals: bool = False) -> Any:
    try:
        import celosia.compiler.superoptimise.float_meaning  # for rules of floats
        import celosia.compiler.superoptimise.window_meaning  # noqa: F401  and for those of windows
        from celosia.compiler.superoptimise import prover, real_meaning
    except ImportError:
        raise RuleError(
            f"to prove the rule {rule.name!r}, z3 is needed: pip install 'celosia[superoptimise]'"
        ) from None
    found = (real_meaning if reals else prover).verdict(rule)
    if not found.proved:
        raise RuleError(
            f"the rule {rule.name!r} is not proved, and so not used: {found.why}; correct it, or leave it out"
        )
    return found


@cache
def _rows() -> dict[str, tuple[str, dict[str, Any]]]:
    files = {file.name: json.loads(file.read_text(encoding="utf-8"))["rules"] for file in (*FILES, REALS_FILE)}
    return {name: (file, row) for file, rows in files.items() for name, row in rows.items()}


def proof_of(name: str) -> str:
    """Name the file that has the proof of this rule, and say how large the proof is."""
    if name not in _rows():
        return "proved when it was given"
    file, row = _rows()[name]
    return f"{file}: {row['cases']} case{'s' * (row['cases'] > 1)}, {row['questions']} questions to z3"


def changes_values(name: str) -> bool:
    """Whether the rule of this name holds in real numbers alone, so that floats are rounded elsewhere behind it."""
    return name in _rows() and _rows()[name][0] == REALS_FILE.name


def require_proved(rules: Sequence[RewriteRule], own: Sequence[RewriteRule] = (), reals: bool = False) -> None:
    """RuleError where `rules` are not those whose proofs are in the file, or one of `own` cannot be proved now.

    reals: whether those that hold in real numbers alone may be used."""
    among = (*FILES, REALS_FILE) if reals else FILES
    files = {file: json.loads(file.read_text(encoding="utf-8")) for file in among}
    current = [each["rules"] for file, each in files.items() if each["meaning"] == meaning(file)]
    proved = {name: row["digest"] for found in current for name, row in found.items()}
    for rule in rules:
        if proved.get(rule.name) != rule.digest:
            raise RuleError(
                f"the rule {rule.name!r} has no proof in {', '.join(file.name for file in among)}, or it is of "
                "another text; run `python -m celosia.compiler.superoptimise`, or with --generate"
            )
    for rule in own:
        _verdict(rule)
