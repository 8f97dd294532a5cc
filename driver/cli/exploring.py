"""`celosia explore`: search for accelerators for models on a board."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from celosia.compiler.tune.tuner_options import DEADLINE
from celosia.driver.choices import ALSO, BUDGET, DEFAULT_OBJECTIVES, OBJECTIVES, SEARCH_NAMES, WAYS
from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import INTERRUPTED, command, say

Models = Annotated[list[Path], typer.Argument(metavar="MODEL.onnx", help="Models for which to search.")]
Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="DIR", help="Folder for measured points and front. A later run with it continues."
    ),
]
Objective = Annotated[
    list[str] | None,
    opt.one_of(
        names=(*OBJECTIVES, *ALSO),
        help=f"Objective to minimise; repeat it for several. Default: {' and '.join(DEFAULT_OBJECTIVES)}. fps means "
        "period, the time from image to image. energy is an estimate.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="TIME", help=f"Limit of the time of all runs together: 90s, 30m or 2h. Default: {BUDGET}."),
]
Points = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Largest number of Configs to measure in all runs together.")
]
Space = Annotated[
    Path | None,
    typer.Option(metavar="FILE.toml", help="Search space: for each Config field a value, or a list of values."),
]
Left = Annotated[
    float, typer.Option(min=0, max=99, metavar="PERCENT", help="Share of each resource of the device that stays free.")
]
Memory = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="Memory model of the timing model. Default: that of the board.")
]
Search = Annotated[str, opt.one_of(names=SEARCH_NAMES, help="Search algorithm: see docs/explore.md.")]
Confirm = Annotated[
    list[str] | None,
    opt.one_of(
        names=WAYS,
        help="After the search, count the front's resources with Yosys, or run it on the RTL. Takes minutes for each "
        "Config. Repeat it for both.",
    ),
]
Deadline = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit for one model on one Config.")]
Optimise = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="After the search, rewrite the models for the front's Configs as `celosia optimise` does. TIME limits all "
        "rewriting, and is not part of --budget.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print front.json instead of a table.")]


@command
def explore(
    models: Models,
    output: Output,
    board: opt.Board = "pynq-z2",
    objective: Objective = None,
    budget: Budget = None,
    points: Points = None,
    space: Space = None,
    left: Left = 5.0,
    memory: Memory = None,
    search: Search = SEARCH_NAMES[0],
    confirm: Confirm = None,
    optimise: Optimise = None,
    jobs: opt.Jobs = None,
    pool: opt.Pool = None,
    insecure_pool: opt.InsecurePool = False,
    deadline: Deadline = DEADLINE,
    seed: opt.Seed = 0,
    as_json: AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Search for the best accelerators for some models on a board, and write the Pareto front of Configs.

    Cycles come from the timing model. Area comes from a model that was fitted to counts of Yosys. Ctrl-C ends the
    search and writes the front so far. The same command continues the search.

    \b
    Examples:
      celosia explore model.onnx --budget 30m -o front
      celosia explore a.onnx b.onnx --board ultra96 --objective latency --objective energy -o front
      celosia explore model.onnx --optimise 60s -o front
      celosia explore model.onnx --space mine.toml --confirm yosys -o front
      celosia run model.onnx --random --config front/03-1x16x16-8a83ab.toml
    """
    from celosia.compiler.superoptimise.search import parse_seconds

    options: dict[str, Any] = {
        "optimise": 0.0 if optimise is None else parse_seconds(optimise), "objective": objective or DEFAULT_OBJECTIVES,
        "points": points, "space": space, "folder": output,
        "memory": memory, "left": left / 100, "search": search, "jobs": jobs or os.cpu_count() or 1,
        "pool": common.pool_address(pool, insecure_pool), "deadline": deadline, "confirmed": confirm or (),
        "seed": seed,
    }  # fmt: skip
    if budget is None and points is None:
        budget = BUDGET
    report, interrupted = _run_exploration(models, board, budget, quiet, options)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    elif not quiet:
        from celosia.driver.show import explore_summary as show

        common.show(show.front(report, output), highlight=False)
    if interrupted:
        say(f"celosia: interrupted; the front so far is in {output}, the same command goes on", error=True)
        raise typer.Exit(INTERRUPTED)


def _run_exploration(
    models: list[Path], board: str, budget: str | None, quiet: bool, options: dict[str, Any]
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """Explore, and return (the report, whether Ctrl-C ended the exploration)."""
    from celosia.compiler.superoptimise.search import SearchState
    from celosia.driver.explore import explore as explorer
    from celosia.driver.show import explore_summary as show
    from celosia.driver.show import optimise_summary as search

    with common.progress_stages(quiet) as stages:
        for model in models:
            common.check_source(model)
        seconds = None if budget is None else explorer.parse_seconds(budget)
        stages("reading the models")
        try:
            on_state = lambda state: stages.describe((search if isinstance(state, SearchState) else show).line(state))  # noqa: E731
            exploration = explorer.explore(models, board, budget=seconds, progress=stages, told=on_state, **options)
        except explorer.Interrupted as end:
            return end.found.report, True
    return exploration.report, False
