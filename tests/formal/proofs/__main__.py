"""make prove: python -m proofs [NAME ...] [--jobs N]."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from proofs.declare import Method, all_properties
from proofs.run import ProofError, Row, run_all, summary

COUNTS = (
    "{proved} of {properties} properties are proved, and {caught} of {mutants} mutants (planted faults) are caught. "
    "The proofs took {seconds:.0f} s of processor time"
)
CONSOLE = Console(width=None if sys.stdout.isatty() else 150)


def prove(
    names: Annotated[list[str] | None, typer.Argument(help="Parts of the properties' names; none: all.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once.")] = os.cpu_count() or 1,
    output: Annotated[Path | None, typer.Option("--json", help="Write the counts here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here, as Markdown.")] = None,
) -> None:
    """Prove the properties of the hardware, and that each one finds the faults planted for it."""
    proofs = [p for p in all_properties().values() if not names or any(name in p.name for name in names)]
    if not proofs:
        raise SystemExit(f"no property is called {' or '.join(names or [])}")
    table = Table("property", "method", "depth", "CPU s", "mutant", "caught", title="Proofs")
    began, rows = time.monotonic(), []
    try:
        for row in run_all(proofs, jobs):
            rows.append(row)
            CONSOLE.print(f"{'proved' if row.proved else '[red]FAILED[/]':8} {row.proof.name}", highlight=False)
            _add(table, row)
    except ProofError as error:
        raise SystemExit(str(error)) from None
    CONSOLE.print(table)
    for row in rows:
        if not row.proved:
            CONSOLE.print(row.result.found, markup=False, highlight=False)
    counts = summary(rows)
    if markdown is not None:
        markdown.write_text(_markdown(rows, counts), encoding="utf-8")
    if output is not None:
        output.write_text(json.dumps(counts) + "\n", encoding="utf-8")
    CONSOLE.print(f"{COUNTS.format(**counts)}, {time.monotonic() - began:.0f} s now")
    sys.exit(0 if all(row.good for row in rows) else 1)


def _depth(row: Row) -> str:
    return "" if row.proof.method is Method.NETLIST else str(row.result.depth)


def _markdown(rows: list[Row], counts: dict[str, float]) -> str:
    lines = [
        "# Proved", "",
        "`python -m proofs --markdown FILE` writes this page; [proofs.md](proofs.md) explains the properties.",
        f"{COUNTS.format(**counts)}.", "",
        "| property | method | depth | CPU s | mutants, all caught |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        method = row.proof.method.value if row.proved else "**not proved**"
        mutants = [
            f"`{mutant}`".replace("|", "\\|") + ("" if caught else " **not caught**")
            for mutant, caught in zip(row.proof.mutants, row.caught)
        ]
        lines.append(f"| {row.proof.name} | {method} | {_depth(row)} | {row.seconds:.1f} | {'<br>'.join(mutants)} |")
    return "\n".join(lines) + "\n"


def _add(table: Table, row: Row) -> None:
    depth = _depth(row)
    method = row.proof.method.value if row.proved else "[red]not proved[/]"
    for i, (mutant, caught) in enumerate(zip(row.proof.mutants, row.caught)):
        first = (row.proof.name, method, depth, f"{row.seconds:.1f}") if i == 0 else ("", "", "", "")
        table.add_row(*first, str(mutant).replace("[", r"\["), "yes" if caught else "[red]NO[/]")


if __name__ == "__main__":
    typer.run(prove)
