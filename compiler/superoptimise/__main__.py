"""python -m celosia.compiler.superoptimise [--check]: prove every rule and write the files of proofs, or compare with
them. python -m celosia.compiler.superoptimise --generate: generate rules and print how many there are. To write those
that save cycles on a network to generated.json, run `python -m benchmarks superoptimise --only generate`. python -m
celosia.compiler.superoptimise --rediscover: generate rules without knowing those written by hand, and count how many of
these follow from the generated ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from celosia.compiler.program.safe_files import write_text
from celosia.compiler.superoptimise.proofs import (
    FILE,
    GENERATED,
    REALS_FILE,
    RuleError,
    generated_rules,
    proof_file_text,
    stored_text,
    stored_wins,
)
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules import FLOATS, GROUPS, REALS, RULES


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit code: 1 where a rule is not proved, or a file differs with --check."""
    parser = argparse.ArgumentParser(prog="python -m celosia.compiler.superoptimise", description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--rediscover", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.rediscover:
            return _count_rediscovered()
        if options.generate:
            return 0 if _generate_rules(RULES) else 1
        texts: dict[Path, Callable[[], str]] = {
            FILE: lambda: proof_file_text((*RULES, *FLOATS)),
            REALS_FILE: lambda: proof_file_text(REALS, reals=True),
            GENERATED: lambda: stored_text(generated_rules(), stored_wins()),
        }
        return max(_write_or_compare(file, text(), options.check) for file, text in texts.items())
    except RuleError as error:
        print(f"celosia: error: {error}", file=sys.stderr)
        return 1


def _write_or_compare(file: Path, text: str, check: bool) -> int:
    """Write the proofs `text` to `file`, or with `check` compare them with it. Returns the exit code."""
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


def _generate_rules(known: tuple[RewriteRule, ...]) -> list[RewriteRule]:
    """Generate rules in all vocabularies that do not follow from `known`, and print how many there are."""
    from celosia.compiler.superoptimise.generator import Counts, Generator
    from celosia.compiler.superoptimise.vocabularies import VOCABULARIES

    generator, total = Generator(known), Counts()
    for vocabulary in VOCABULARIES:
        started = time.perf_counter()
        counts = generator.run(vocabulary)
        total += counts
        print(f"{vocabulary.name}: {_format_counts(counts)}, {time.perf_counter() - started:.0f} s", flush=True)
    print(f"all: {_format_counts(total)}")
    return generator.rules


def _format_counts(counts: Mapping[str, int]) -> str:
    """Format counts as a list for the terminal."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _count_rediscovered() -> int:
    """Generate rules from nothing, and print how many of the rules by hand follow from them. Returns the exit code."""
    from celosia.compiler.superoptimise.generator import is_subsumed

    rules = _generate_rules(())
    for name, rules_by_hand in GROUPS.items():
        group = [
            rule for rule in rules_by_hand if rule.before != rule.after
        ]  # rules that share results have equal sides
        follow = [rule for rule in group if is_subsumed(rule, rules)]
        laws = f"{len({rule.says for rule in follow})} of {len({rule.says for rule in group})} laws"
        print(f"{name}: {laws}, {len(follow)} of {len(group)} rules by hand follow from generated ones")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
