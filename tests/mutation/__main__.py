"""Plant random faults in the hardware and report which checks find them: `make mutants N=300 SEED=1`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from celosia.cache import cache_folder
from mutation.campaign import EQUIVALENT, KILLED, ROOT, SURVIVED, UNBUILT, Campaign, Verdict
from mutation.draw import Mutant

CONSOLE = Console(width=None if sys.stdout.isatty() else 150)
REASONS = Path(__file__).with_name("survivors.toml")
"""File with the reasons why known survivors survive."""


VERDICTS = Path(__file__).with_name("verdicts.jsonl")
"""Verdicts of earlier campaigns."""
MOST_UNBUILT = 20
"""If the first so many mutants all give no hardware, the sources are broken, not the mutants."""


def diff(mutant: Mutant) -> str:
    """Return the lines that a mutant changes, as a unified diff."""
    return mutant.diff((ROOT / "hw" / mutant.file).read_text(encoding="utf-8"))


def reasons() -> dict[tuple[str, str], str]:
    """Return the reasons in REASONS, by file and diff."""
    entries = tomllib.loads(REASONS.read_text(encoding="utf-8")).get("survivor", [])
    return {(entry["file"], entry["diff"].strip()): entry["reason"] for entry in entries}


def summary(verdicts: list[tuple[Mutant, Verdict]]) -> dict[str, Any]:
    """Return the counts of a campaign, and its survivors with their reasons, as plain data."""
    counts = Counter(verdict.outcome for _, verdict in verdicts)
    decided = counts[KILLED] + counts[SURVIVED]
    known_reasons = reasons()
    survivors = [
        {"mutant": str(mutant), "diff": diff(mutant), "note": verdict.note,
         "reason": known_reasons.get((mutant.file, diff(mutant)), "")}
        for mutant, verdict in verdicts if verdict.outcome == SURVIVED
    ]  # fmt: skip
    return {
        "mutants": decided, "killed": counts[KILLED],
        "percent": round(100 * counts[KILLED] / decided, 1) if decided else 0.0,
        "by": dict(Counter(verdict.by for _, verdict in verdicts if verdict.outcome == KILLED)),
        "equivalent": counts[EQUIVALENT], "unbuilt": counts[UNBUILT],
        "seconds": round(sum(verdict.seconds for _, verdict in verdicts)),
        "survivors": survivors,
    }  # fmt: skip


def main(
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Mutants that give other hardware.")] = 300,
    seed: Annotated[int, typer.Option(help="Another seed, other mutants.")] = 1,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Mutants at a time.")] = os.cpu_count() or 1,
    resume: Annotated[
        Path | None,
        typer.Option(help="Keep verdicts in this file, and go on from it (default: VERDICTS)."),
    ] = None,
    known: Annotated[bool, typer.Option("--known", help="Try nothing: report what the file has.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write counts and survivors here.")] = None,
) -> None:
    """Try random mutants until COUNT of them gave other hardware; exit code 1 where a survivor has no reason."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # checks end with the campaign
    folder = cache_folder() / "mutants"
    folder.mkdir(parents=True, exist_ok=True)
    say = CONSOLE.print
    campaign = Campaign(folder, resume or VERDICTS, lambda text: say(text, highlight=False))
    verdicts = []
    for mutant, verdict in campaign.known_verdicts(seed) if known else campaign.verdicts(count, seed, jobs):
        verdicts.append((mutant, verdict))
        killer = f" by {verdict.by}: {verdict.check}" if verdict.by else ""
        say(f"{mutant}: {verdict.outcome}{killer}", highlight=False, markup=False)
        if len(verdicts) == MOST_UNBUILT and all(past_verdict.outcome == UNBUILT for _, past_verdict in verdicts):
            say(f"no hardware can be built, with whatever mutant: {verdict.note}", highlight=False, markup=False)
            raise typer.Exit(1)
    counts = summary(verdicts)
    report(counts)
    if output is not None:
        output.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(int(any(not survivor["reason"] for survivor in counts["survivors"])))


def report(counts: dict[str, Any]) -> None:
    """Print survivors and counts."""
    for survivor in counts["survivors"]:
        CONSOLE.print(f"\nsurvived: {survivor['mutant']}", style="red", highlight=False, markup=False)
        CONSOLE.print(survivor["diff"], highlight=False, markup=False)
        CONSOLE.print(survivor["reason"] or "no reason is known", highlight=False, markup=False)
        if survivor["note"]:
            CONSOLE.print(survivor["note"], highlight=False, markup=False)
    kinds = ", ".join(f"{number} by {kind}" for kind, number in counts["by"].items())
    CONSOLE.print(
        f"\n{counts['killed']} of {counts['mutants']} mutants killed ({counts['percent']}%; {kinds}); left out: "
        f"{counts['equivalent']} that change no Verilog, {counts['unbuilt']} that give none; {counts['seconds']} s",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
