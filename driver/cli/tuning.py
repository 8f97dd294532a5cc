"""`celosia tune`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from celosia.driver.cli.errors import Debug, Quiet, command
from celosia.driver.cli.options import (
    WITH_CYCLES,
    Address,
    ConfigOption,
    InsecurePool,
    Jobs,
    Memory,
    NoCheck,
    Pool,
    ShapeOption,
    Sudo,
    address_options,
    check_destinations,
    check_source,
    memory_options,
    progress_stages,
    shapes_of,
)

if TYPE_CHECKING:
    from celosia.driver.tune import Tuning

CPU = "cpu"
"""The device that is no accelerator."""


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
    climb = "climb"


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
            metavar="timed|rtl|ssh://USER@BOARD|cpu",
            help="Who says how many cycles a layer takes: the timing model, the RTL, or a board over ssh. With cpu, "
            "kernels that run on this processor are tuned instead.",
        ),
    ] = "timed",
    memory: Memory = None,
    trials: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most schedules to try, by default 1000; of cpu 300.")
    ] = None,
    jobs: Jobs = None,
    pool: Pool = None,
    insecure_pool: InsecurePool = False,
    sudo: Sudo = False,
    address: Address = None,
    deadline: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="For one trial; by default ten minutes.")
    ] = None,
    search: Annotated[
        SearchName | None,
        typer.Option(help="How layers are searched, by default descent, kernels climb; see docs/tuning.md."),
    ] = None,
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
      celosia tune model.onnx --device cpu --records tuned.jsonl
    """
    board = device.startswith("ssh://")
    if device not in (*WITH_CYCLES, CPU) and not board:
        from celosia.hw.config import did_you_mean

        known = (*WITH_CYCLES, CPU)
        near = did_you_mean(device, known)
        raise typer.BadParameter(f"there is no device {device!r}{near}; take {', '.join(known)} or ssh://USER@BOARD")
    if device == CPU and (unused := [name for name, given in (("--memory", memory), ("--pool", pool)) if given]):
        raise typer.BadParameter(f"{unused[0]} is of the accelerator; leave it out, or take another device than {CPU}")
    behind = memory_options(memory, "timed" if board or device == CPU else device)
    base = address_options(address).get("base")
    with progress_stages(quiet) as stages:
        shapes = shapes_of(shape)
        check_source(model)
        check_destinations([model], output, report)
        check_destinations([model], records)
        jobs = jobs or os.cpu_count() or 1
        given = {"trials": trials, "search": search and search.value, "deadline": deadline}
        common: dict[str, Any] = {
            "records": records, "jobs": jobs, "learner": learner.value, "seed": seed, "check": not no_check,
            "shapes": shapes, **{name: value for name, value in given.items() if value},
        }  # fmt: skip
        from celosia.driver import tune as tuning
        from celosia.driver import tune_cpu
        from celosia.driver.fleet import insecure
        from celosia.driver.show import tune as show
        from celosia.driver.show import tune_cpu as show_kernels

        with stages.paused():
            if device == CPU:
                found, lines = _found(tune_cpu.tune_cpu, show_kernels, model, config, quiet, common)
            else:
                common |= {
                    "device": device,
                    "pool": insecure(pool) if insecure_pool else pool,
                    "sudo": sudo,
                    "base": base,
                }
                common["memory"] = behind["memory"].name if behind else "zynq-hp"
                found, lines = _found(tuning.tune, show, model, config, quiet, common)
        if output is not None:
            stages("writing the Program")
            found.program.save(output)
    if report is not None:
        from celosia.compiler.program.files import write_text

        write_text(report, json.dumps(found.report, indent=1) + "\n")
    if not quiet:
        from celosia.driver.show.table import console

        for each in lines:
            console().print(each)


def _found(
    search: Callable[..., Tuning], shown: ModuleType, model: Path, config: str, quiet: bool, options: dict[str, Any]
) -> tuple[Tuning, Iterable[RenderableType]]:  # fmt: skip
    """What `search` has found, and how `shown` tells it."""
    from celosia.driver.progress import Live

    with Live(quiet) as live:
        told = lambda state: live(shown.tuning_line(state), lambda: shown.tuning(state))  # noqa: E731
        found = search(model, config, **options, told=told)
    return found, shown.tuned(found.report)
