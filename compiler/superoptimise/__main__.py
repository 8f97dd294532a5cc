"""python -m celosia.compiler.superoptimise [--check]: prove every rule, and write proofs.json or compare with it."""

from __future__ import annotations

import sys

from celosia.compiler.program.files import write_text
from celosia.compiler.superoptimise.proofs import FILE, RuleError, text_of
from celosia.compiler.superoptimise.rules import RULES


def main(arguments: list[str]) -> int:
    """Exit code: 1 where a rule is not proved, or the file differs with --check."""
    if any(each != "--check" for each in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        text = text_of(RULES)
    except RuleError as error:
        print(f"celosia: error: {error}", file=sys.stderr)
        return 1
    if not arguments:
        write_text(FILE, text)
        print(f"{len(RULES)} rules proved; {FILE}")
        return 0
    if text == FILE.read_text(encoding="utf-8"):
        print(f"{len(RULES)} rules proved, as {FILE} says")
        return 0
    print(f"celosia: error: {FILE} is not what the proofs say; run it without --check", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
