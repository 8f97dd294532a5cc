"""`celosia tune`: search for better schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from celosia.compiler.tune.tuner_options import DEADLINE, LEARNER_NAMES, SEARCH_NAMES
from celosia.driver.choices import KERNEL_TRIALS, TRIALS
from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import command
from celosia.sim.devices import SSH_PREFIX, WITH_CYCLES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from celosia.driver.tune.tune import Tuning

CPU = "cpu"
"""The value of --device that tunes kernels of this processor instead of layers of the accelerator."""
Records = Annotated[
    Path,
    typer.Option(metavar="FILE", help="File that keeps the trials, for `compile --records` and for a later search."),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="|".join((*WITH_CYCLES, SSH_PREFIX + "USER@BOARD", CPU)),
        help="Device that measures the cycles of layers: the timing model, the RTL, or a board over ssh. With cpu, the "
        "command tunes kernels for this processor instead.",
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=f"Largest number of schedules to try. Default: {TRIALS}; with --device {CPU}, {KERNEL_TRIALS}.",
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(min=1, metavar="SECONDS", help=f"Time limit of one trial. Default: {DEADLINE / 60:g} minutes."),
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Time after which no new trial begins: 60s, 10m or 2h. Default: no limit."),
]
Search = Annotated[
    str | None,
    opt.one_of(
        names=SEARCH_NAMES,
        help=f"Search algorithm: see docs/tuning.md. Default: {SEARCH_NAMES[0]} for layers, climb for kernels.",
    ),
]
Learner = Annotated[
    str, opt.one_of(names=LEARNER_NAMES, help="Cost model that learns from trials; trees needs the extra `tune`.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="PROGRAM", help="Write the tuned Program.")]


@command
def tune(
    model: opt.OnnxModel,
    records: Records,
    config: opt.ConfigOption = "pynq",
    device: Device = "timed",
    memory: opt.Memory = None,
    trials: Trials = None,
    jobs: opt.Jobs = None,
    pool: opt.Pool = None,
    insecure_pool: opt.InsecurePool = False,
    sudo: opt.Sudo = False,
    address: opt.Address = None,
    deadline: Deadline = None,
    budget: Budget = None,
    search: Search = None,
    learner: Learner = LEARNER_NAMES[0],
    seed: opt.Seed = 0,
    output: Output = None,
    report: opt.Report = None,
    shape: opt.ShapeOption = None,
    no_check: opt.NoCheck = False,
    quiet: opt.Quiet = False,
) -> None:
    """Search for schedules of a model's layers that take fewer cycles than the compiler's own.

    Ctrl-C ends the search. The same command continues it.

    \b
    Examples:
      celosia tune model.onnx --config zcu104 --records tuned.jsonl
      celosia compile model.onnx --config zcu104 --records tuned.jsonl -o model.celosia
      celosia tune model.onnx --budget 10m --records tuned.jsonl
      celosia tune model.onnx --device rtl --trials 100 --records tuned.jsonl
      celosia tune model.onnx --device ssh://root@pynq --records tuned.jsonl
      celosia tune model.onnx --pool dask://big:8786 --records tuned.jsonl
      celosia tune model.onnx --device cpu --records tuned.jsonl
    """
    measuring = _measurement_options(device, memory, pool, insecure_pool, sudo, address)
    limits = {"trials": trials, "search": search, "deadline": deadline, "budget": budget}
    options: dict[str, Any] = {
        "records": records, "jobs": jobs or os.cpu_count() or 1, "learner": learner, "seed": seed,
        "check": not no_check, **{name: value for name, value in limits.items() if value}, **measuring,
    }  # fmt: skip
    with common.progress_stages(quiet) as stages:
        options["shapes"] = common.parse_shapes(shape)
        common.check_source(model)
        common.check_destinations([model], output, report)
        common.check_destinations([model], records)
        with stages.paused():
            result, lines = _run_search(device, model, config, quiet, options)
        if output is not None:
            stages("writing the Program")
            result.program.save(output)
    common.write_json(report, result.report)
    if not quiet:
        common.show(lines)


def _measurement_options(
    device: str, memory: str | None, pool: str | None, insecure_pool: bool, sudo: bool, address: str | None
) -> dict[str, Any]:
    """Return the options of `celosia.tune` that say what measures trials; none for kernels of the CPU. BadParameter."""
    known_devices = (*WITH_CYCLES, CPU)
    if device not in known_devices and not device.startswith(SSH_PREFIX):
        common.raise_unknown_device(device, known_devices)
    if device == CPU:
        for name, value in (("--memory", memory), ("--pool", pool)):
            if value:
                raise typer.BadParameter(
                    f"{name} is of the accelerator; leave it out, or take another device than {CPU}"
                )
        return {}
    memory_args = common.parse_memory(memory, device if device in WITH_CYCLES else WITH_CYCLES[0])
    base = common.parse_address(address).get("base")
    from celosia.hw.boards.memory import ZYNQ_HP

    return {
        "device": device, "memory": memory_args.get("memory", ZYNQ_HP), "sudo": sudo, "base": base,
        "pool": common.pool_address(pool, insecure_pool),
    }  # fmt: skip


def _run_search(
    device: str, model: Path, config: str, quiet: bool, options: dict[str, Any]
) -> tuple[Tuning, Iterable[RenderableType]]:  # fmt: skip
    """Search for schedules with a live table, and return the result and what to print of it."""
    from celosia.driver.show import tune_cpu_summary as show_kernels
    from celosia.driver.show import tune_summary as show
    from celosia.driver.show.progress import Live
    from celosia.driver.tune import cpu as tune_cpu
    from celosia.driver.tune import tune

    search: Callable[..., Tuning] = tune_cpu.tune_cpu if device == CPU else tune.tune
    summary: ModuleType = show_kernels if device == CPU else show
    with Live(quiet) as live:
        on_state = lambda state: live(summary.tuning_line(state), lambda: summary.tuning_progress(state))  # noqa: E731
        tuned = search(model, config, **options, told=on_state)
    return tuned, summary.tuning_result(tuned.report)
