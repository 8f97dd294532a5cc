"""Fuzz the hardware, Program files and the compiler: `make fuzz N=20000 SEED=1`."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import Unit
from celosia.hw.spec.regs import ERROR_TEXT
from celosia.sim.rtl.build import BuildError, build_library
from fuzz.harness import Journal
from fuzz.run import HARDWARE, KINDS, Results, chunks, configs, run

STATES = ("idle", "busy", "memory", "token")
DEFAULT = ("legal", "garbage", "damaged", "forged")
"""Kinds of cases that run by default, without `model`: a random model takes a second or more."""
ANY = Config(name="any")
"""A stand-in Config for kinds whose cases draw their own Configs."""
console = Console()


def main(
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Cases of each kind.")] = 2000,
    seed: Annotated[int, typer.Option(help="Another seed, other cases and other Configs.")] = 1,
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Only these of {', '.join(KINDS)} (default: all but model).")
    ] = None,
    hardware: Annotated[int, typer.Option("--configs", min=0, help="Random Configs, each a simulator.")] = 6,
    preset: Annotated[list[str] | None, typer.Option(help="These presets, too, as ultra96.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1)] = os.cpu_count() or 1,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Keep results in this file, and do not run again what it has of the same sources."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the smallest models of findings.")] = Path("findings"),
) -> None:
    """Run COUNT random cases of each kind; exit code 1 if a case fails."""
    for name in kind or ():
        if name not in KINDS:
            raise typer.BadParameter(f"no kind of case is called {name!r}; there are {', '.join(KINDS)}")
    for name in preset or ():
        if name not in PRESETS:
            raise typer.BadParameter(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    kinds = kind or DEFAULT
    machines = [*configs(hardware, seed), *(PRESETS[name] for name in preset or ())]
    if not machines:
        raise typer.BadParameter("without random Configs there must be a preset")
    journal = Journal(resume) if resume is not None else None
    if set(kinds) & set(HARDWARE):
        _build(machines)
    failed, figures = False, {}
    for name in kinds:
        columns = TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console) as progress:
            results = run(
                chunks(name, count, seed, [ANY] if name == "model" else machines),
                jobs,
                partial(_advance, progress, progress.add_task(name, total=count)),
                journal,
            )
        _report(name, results)
        figures[name] = summary(results)
        if name == "model" and results.causes:
            _minimise(results, out, jobs)
        failed = failed or bool(results.failures)
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(int(failed))


def _build(machines: list[Config]) -> None:
    """Build the simulators, each of which takes a minute the first time."""
    try:
        for number, cfg in enumerate(machines, 1):
            console.print(f"Simulator {number} of {len(machines)}: {_describe(cfg)}", highlight=False)
            build_library(cfg)
    except BuildError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(3) from None


def _minimise(results: Results, folder: Path, jobs: int) -> None:
    """Write the smallest model of each finding, and print a line about it."""
    from fuzz.models.campaign import findings  # imports onnxruntime's quantiser, which takes a second

    for finding in findings(results.causes, folder, jobs, lambda text: console.print(text, highlight=False)):
        console.print(f"[red]{folder / str(finding)}", highlight=False)


def _advance(progress: Progress, task: TaskID, results: Results) -> None:
    progress.update(task, completed=results.cases)


def summary(results: Results) -> dict[str, object]:
    """Return the results of a run as plain data."""
    reached = results.coverage.reached()
    pairs = results.coverage.pairs()
    return {
        "cases": results.cases, "failures": len(results.failures), "seconds": round(results.seconds, 1),
        "cpu_seconds": round(results.cpu, 1),
        "endings": dict(sorted(results.endings.items())),
        "field_values": {opcode: f"{used} of {possible}" for opcode, (used, possible) in reached.items()},
        "state_pairs": int((pairs > 0).sum()),
    }  # fmt: skip


def _describe(cfg: object) -> str:
    names = ("batch", "block_in", "block_out", "bus_bytes", "queue_depth", "token_bits")
    return ", ".join(f"{name} {getattr(cfg, name)}" for name in names)


def _report(name: str, results: Results) -> None:
    table = Table(title=f"{name}: {results.cases} cases, {len(results.failures)} failed; {results.cpu:.0f} s of CPU")
    table.add_column("ending")
    table.add_column("cases", justify="right")
    for ending, number in sorted(results.endings.items(), key=lambda item: -item[1]):
        table.add_row(ending, str(number))
    console.print(table)
    for failure in results.failures[:20]:
        console.print(f"[red]{failure}", highlight=False, markup=True)
    if name == "legal":
        _report_coverage(results)


def _report_coverage(results: Results) -> None:
    text = ", ".join(f"{op} {used} of {possible}" for op, (used, possible) in results.coverage.reached().items())
    console.print(f"Ranges of values that fields took: {text}")
    pairs = results.coverage.pairs()
    table = Table(title="Cycles in each pair of states (row: state of the first unit, columns: of the second)")
    for column in ("units", "", *STATES):
        table.add_column(column, justify="right" if column in STATES else "left")
    for a in Unit:
        for b in Unit:
            if a >= b:
                continue
            for state, name in enumerate(STATES):
                cells = [f"{int(n):,}" if n else "-" for n in pairs[a, b, state]]
                table.add_row(f"{a.name}, {b.name}" if state == 0 else "", name, *cells, end_section=state == 3)
    console.print(table)
    console.print(f"{int(np.count_nonzero(pairs))} of {6 * 16} pairs; errors that can be reported: {len(ERROR_TEXT)}")


if __name__ == "__main__":
    typer.run(main)
