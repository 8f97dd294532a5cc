"""`celosia explore`."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from celosia.driver.cli.errors import INTERRUPTED, Debug, Quiet, command
from celosia.driver.cli.options import InsecurePool, Jobs, Pool, check_source, progress_stages


class Objective(StrEnum):
    """What `--objective` takes."""

    cycles = "cycles"
    latency = "latency"
    period = "period"
    fps = "fps"
    area = "area"
    energy = "energy"


class Way(StrEnum):
    """What `--confirm` takes."""

    yosys = "yosys"
    rtl = "rtl"


class SearchName(StrEnum):
    """What `--search` takes."""

    bottleneck = "bottleneck"
    nsga2 = "nsga2"
    random = "random"


@command
def explore(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL.onnx", help="The models that the accelerator is for.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The folder of points and front; go on with it later.")
    ],
    board: Annotated[str, typer.Option(metavar="NAME", help="The board that it must fit.")] = "pynq-z2",
    objective: Annotated[
        list[Objective] | None,
        typer.Option(
            help="What is wanted, by default cycles and area; repeat it for several. fps means period, the time from "
            "image to image; energy is a proxy."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of all runs together, as 90s, 30m or 2h; by default 10m.")
    ] = None,
    points: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most Configs to measure, of all runs together.")
    ] = None,
    space: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Values of Config fields, each one or a list of them.")
    ] = None,
    left: Annotated[
        float, typer.Option(min=0, max=99, metavar="PERCENT", help="Of each resource of the device, to stay free.")
    ] = 5.0,
    memory: Annotated[
        str | None, typer.Option(metavar="NAME", help="The memory of the timing model, by default the board's.")
    ] = None,
    search: Annotated[SearchName, typer.Option(help="How to look; see docs/explore.md.")] = SearchName.bottleneck,
    confirm: Annotated[
        list[Way] | None,
        typer.Option(
            help="In the end count the front by yosys, or run it on rtl; minutes a point. Repeat it for both."
        ),
    ] = None,
    jobs: Jobs = None,
    pool: Pool = None,
    insecure_pool: InsecurePool = False,
    deadline: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For a model on a Config.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of what is random in a search.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print front.json instead of a table.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Search for the accelerators that are best for some models on a board, and write a front of Configs.

    Cycles are by the timing model, area by a model of what Yosys counts. Ctrl-C ends it, writes the front so far and
    loses nothing: the same command goes on where it was.

    \b
    Examples:
      celosia explore model.onnx --budget 30m -o front
      celosia explore a.onnx b.onnx --board ultra96 --objective latency --objective energy -o front
      celosia explore model.onnx --space mine.toml --confirm yosys -o front
      celosia run model.onnx --random --config front/03-1x16x16-8a83ab.toml
    """
    from celosia.driver import explore as exploring  # noqa: F401 - says at once where a part is missing
    from celosia.driver.explore import explore as explorer
    from celosia.driver.fleet import insecure
    from celosia.driver.show import explore as show_explore

    interrupted = False
    with progress_stages(quiet) as stages:
        for model in models:
            check_source(model)
        given = None if budget is None else explorer.seconds(budget)
        if given is None and points is None:
            given = explorer.seconds("10m")
        stages("reading the models")
        try:
            found = explorer.explore(
                models, board, objective=[each.value for each in objective or (Objective.cycles, Objective.area)],
                budget=given, points=points, space=space, folder=output, memory=memory, left=left / 100,
                search=search.value, jobs=jobs or os.cpu_count() or 1, deadline=deadline,
                pool=insecure(pool) if insecure_pool else pool,
                confirmed=[each.value for each in confirm or ()], seed=seed, progress=stages,
                told=lambda state: stages.now(show_explore.line(state)),
            )  # fmt: skip
        except explorer.Interrupted as end:
            found, interrupted = end.found, True
    if as_json:
        typer.echo(json.dumps(found.report, indent=1))
    elif not quiet:
        from celosia.driver.show.table import console

        for each in show_explore.front(found.report, output):
            console().print(each, highlight=False)
    if interrupted:
        typer.secho(f"celosia: interrupted; the front so far is in {output}, the same command goes on", err=True)
        raise typer.Exit(INTERRUPTED)
