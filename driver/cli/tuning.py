"""`celosia tune`."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from celosia.driver.cli.errors import Debug, Quiet, command
from celosia.driver.cli.options import (
    WITH_CYCLES,
    Address,
    ConfigOption,
    Memory,
    NoCheck,
    ShapeOption,
    Sudo,
    address_options,
    check_destinations,
    check_source,
    memory_options,
    progress_stages,
    shapes_of,
)


class SearchName(StrEnum):
    """What `--search` takes."""

    descent = "descent"
    guided = "guided"
    coordinates = "coordinates"
    beam = "beam"
    evolution = "evolution"
    annealing = "annealing"
    random = "random"
    exhaustive = "exhaustive"


class LearnerName(StrEnum):
    """What `--learner` takes."""

    ridge = "ridge"
    trees = "trees"


@command
def tune(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The model: int8, or with QDQ nodes.")],
    records: Annotated[
        Path, typer.Option(metavar="FILE", help="Where trials are kept, for `compile --records` and to go on later.")
    ],
    config: ConfigOption = "pynq",
    device: Annotated[
        str,
        typer.Option(
            metavar="timed|rtl|ssh://USER@BOARD",
            help="Who says how many cycles a layer takes: the timing model, the RTL, or a board over ssh.",
        ),
    ] = "timed",
    memory: Memory = None,
    trials: Annotated[int, typer.Option(min=1, metavar="N", help="The most schedules of layers to try.")] = 1000,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes that measure, by default one a processor.")
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(metavar="dask://HOST:PORT", help="Workers of Dask measure; needs the extra fleet."),
    ] = None,
    sudo: Sudo = False,
    address: Address = None,
    deadline: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For one trial.")] = 600.0,
    search: Annotated[SearchName, typer.Option(help="How layers are searched; see docs/tuning.md.")] = (
        SearchName.descent
    ),
    learner: Annotated[
        LearnerName, typer.Option(help="What learns from trials; trees need the extra `tune`.")
    ] = LearnerName.ridge,
    seed: Annotated[int, typer.Option(min=0, help="Of what is random in a search.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PROGRAM", help="Write the tuned Program.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="REPORT.json", help="Write the report.")] = None,
    shape: ShapeOption = None,
    no_check: NoCheck = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Look for schedules of a model's layers that take fewer cycles than those that the compiler takes.

    Ctrl-C ends it and loses nothing: the same command goes on where it was.

    \b
    Examples:
      celosia tune model.onnx --config zcu104 --records tuned.jsonl
      celosia compile model.onnx --config zcu104 --records tuned.jsonl -o model.celosia
      celosia tune model.onnx --device rtl --trials 100 --records tuned.jsonl
      celosia tune model.onnx --device ssh://root@pynq --records tuned.jsonl
      celosia tune model.onnx --pool dask://big:8786 --records tuned.jsonl
    """
    board = device.startswith("ssh://")
    if device not in WITH_CYCLES and not board:
        raise typer.BadParameter(f"there is no device {device!r}; take {', '.join(WITH_CYCLES)} or ssh://USER@BOARD")
    behind = memory_options(memory, "timed" if board else device)
    base = address_options(address).get("base")
    with progress_stages(quiet) as stages:
        shapes = shapes_of(shape)
        check_source(model)
        check_destinations([model], output, report)
        check_destinations([model], records)
        from celosia.driver import show
        from celosia.driver import tune as tuning
        from celosia.driver.progress import Live

        jobs = jobs or os.cpu_count() or 1
        with stages.paused(), Live(quiet) as live:
            found = tuning.tune(
                model, config, trials=trials, records=records, device=device, pool=pool, sudo=sudo, base=base,
                memory=behind["memory"].name if behind else "zynq-hp", jobs=jobs, search=search.value,
                learner=learner.value, seed=seed, deadline=deadline, check=not no_check, shapes=shapes,
                told=lambda state: live(show.tuning_line(state), lambda: show.tuning(state)),
            )  # fmt: skip
        if output is not None:
            stages("writing the Program")
            found.program.save(output)
    if report is not None:
        from celosia.compiler.files import write_text

        write_text(report, json.dumps(found.report, indent=1) + "\n")
    if not quiet:
        for each in show.tuned(found.report):
            show.console().print(each)
