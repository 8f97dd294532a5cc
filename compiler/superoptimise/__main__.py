"""python -m celosia.compiler.superoptimise [--check]: prove every rule, and write proofs.json and
others like it or compare with them.
python -m celosia.compiler.superoptimise --generate [--check] [--budget 20m]: the same of generated.json, whose rules
are found anew, in two processes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from celosia.compiler.program.safe_files import write_text
from celosia.compiler.superoptimise.budget import BudgetError, seconds
from celosia.compiler.superoptimise.proofs import (
    FILE,
    FLOATS_FILE,
    GENERATED,
    REALS_FILE,
    WINDOWS_FILE,
    RuleError,
    text_of,
)
from celosia.compiler.superoptimise.rules import FLOATS, REALS, RULES, WINDOWS

BUDGET = "20m"


def main(arguments: list[str]) -> int:
    """Exit code: 1 where a rule is not proved, the time is over, or the file differs with --check."""
    parser = argparse.ArgumentParser(prog="python -m celosia.compiler.superoptimise", description=__doc__)
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--budget", default=BUDGET, metavar="TIME")
    options = parser.parse_args(arguments)
    try:
        budget = seconds(options.budget)
        if options.generate:
            return _written(GENERATED, partial(_generated, budget), options.check)
        others = [rule for rule in RULES if rule not in WINDOWS]
        files = (FILE, others), (FLOATS_FILE, FLOATS), (WINDOWS_FILE, WINDOWS), (REALS_FILE, REALS)
        return max(_written(file, partial(text_of, rules, file), options.check) for file, rules in files)
    except (RuleError, BudgetError) as error:
        print(f"celosia: error: {error}", file=sys.stderr)
        return 1


def _written(file: Path, made: Callable[[], str], check: bool) -> int:
    text = made()
    count = text.count('"digest": ')
    if not check:
        write_text(file, text)
        print(f"{count} rules proved; {file}")
    elif text == file.read_text(encoding="utf-8"):
        print(f"{count} rules proved, as {file} says")
    else:
        print(f"celosia: error: {file} is not what the proofs say; run it without --check", file=sys.stderr)
        return 1
    return 0


def _generated(budget: float) -> str:
    """Raises RuleError where the time is over."""
    from celosia.compiler.superoptimise.generation.file import text_of_all
    from celosia.compiler.superoptimise.generation.generating import OutOfTime

    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - started:6.0f} s  {text}", file=sys.stderr, flush=True)

    try:
        return text_of_all(budget, say)
    except OutOfTime as error:
        raise RuleError(f"{error}: give more with --budget") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
