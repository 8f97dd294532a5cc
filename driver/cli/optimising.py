"""`celosia optimise`: rewrite a model by proved rules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from celosia.driver.choices import SUPEROPTIMISERS
from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import INTERRUPTED, command, say

if TYPE_CHECKING:
    from celosia.compiler.superoptimise.optimise import Optimised

Written = Annotated[Path, typer.Option("--output", "-o", metavar="OUT.onnx", help="The file to write.")]
Budget = Annotated[str, typer.Option(metavar="TIME", help="Time limit of the search: 60s, 10m or 2h.")]
Search = Annotated[
    str,
    opt.one_of(
        names=SUPEROPTIMISERS,
        help="queue also continues from graphs that cost a little more than the best. greedy continues from the best "
        "only.",
    ),
]


NotOffloadable = Annotated[
    bool,
    typer.Option(
        "--cpu", help="Minimise the time on one thread of this processor, without an accelerator. Allows float models."
    ),
]
FastMath = Annotated[
    bool,
    typer.Option(
        "--fast-math",
        help="With --cpu: also use rules that round floats differently, and show by how much outputs differ.",
    ),
]
Records = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File that keeps the results, from which the next search continues."),
]
Trials = Annotated[
    int,
    typer.Option(
        "--tune", min=0, metavar="N",
        help="After the search, tune the five best models with N schedules each, as `celosia tune` does, and keep the "
        "best.",
    ),
]  # fmt: skip

Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of processes that estimate rewrites. Default: one; with --tune, one for each processor.",
    ),
]


@command
def optimise(
    model: opt.OnnxModel,
    output: Written,
    budget: Budget = "60s",
    config: opt.ConfigOption = "pynq",
    search: Search = SUPEROPTIMISERS[0],
    shape: opt.ShapeOption = None,
    cpu: NotOffloadable = False,
    fast_math: FastMath = False,
    records: Records = None,
    tune: Trials = 0,
    jobs: Jobs = None,
    pool: opt.Pool = None,
    insecure_pool: opt.InsecurePool = False,
    report: opt.Report = None,
    quiet: opt.Quiet = False,
) -> None:
    """Rewrite a model by proved rules into one that computes the same bytes in fewer cycles.

    Cycles are those of the whole model by the timing model. With --cpu, the cost is the time on this processor. Ctrl-C
    ends the search. The command writes the best model so far, or the original if none is better, as ONNX for any
    runtime. With --jobs or --pool, several processes estimate rewrites at the same time.

    \b
    Examples:
      celosia optimise model.onnx -o faster.onnx
      celosia optimise model.onnx -o faster.onnx --budget 10m --config zcu104
      celosia optimise float.onnx -o faster.onnx --cpu --search greedy
      celosia optimise float.onnx -o faster.onnx --cpu --fast-math
      celosia optimise model.onnx -o faster.onnx --tune 200 --records tuned.jsonl
      celosia optimise model.onnx -o faster.onnx --pool dask://127.0.0.1:8786
      celosia optimise encoder.onnx -o faster.onnx --shape mel=1,80,400 --report derivation.json
    """
    from celosia.compiler.superoptimise.search import parse_seconds
    from celosia.driver.show import optimise_summary as show
    from celosia.driver.tune.optimise import optimise as driver

    _refuse_exclusive_options(cpu, fast_math, tune, bool(jobs or pool))
    with common.progress_stages(quiet) as stages:
        common.check_source(model)
        common.check_destinations([model], output, report, records)
        optimised = driver(
            model, config, budget=parse_seconds(budget), shapes=common.parse_shapes(shape), search=search,
            progress=stages, accelerator=not cpu, fast_math=fast_math, records=records, tune=tune,
            jobs=jobs or (os.cpu_count() or 1 if tune else 0),
            pool=common.pool_address(pool, insecure_pool), told=lambda state: stages.describe(show.line(state)),
        )  # fmt: skip
        stages("writing the model")
        _save_model(optimised, output)
    common.write_json(report, optimised.report)
    if not quiet:
        common.show(show.derivation(optimised.report))
    if optimised.state.ended == "interrupted":
        say(f"celosia: interrupted; the best so far is in {output}", error=True)
        raise typer.Exit(INTERRUPTED)


def _refuse_exclusive_options(cpu: bool, fast_math: bool, trials: int, other_processes: bool) -> None:
    """Raise BadParameter for options that exclude each other, before the long search.

    trials: N of --tune. other_processes: whether --jobs or --pool is given.
    """
    if cpu and trials:
        raise typer.BadParameter("--tune is of the accelerator's schedules; leave it out, or --cpu")
    if fast_math and not cpu:
        raise typer.BadParameter("--fast-math is of floats on the CPU; give --cpu, too, or leave it out")
    if cpu and other_processes:
        raise typer.BadParameter(
            "what counts with --cpu is the time of this process alone; leave out --jobs and --pool"
        )


def _save_model(optimised: Optimised, output: Path) -> None:
    """Write the rewritten model to `output`, completely or not at all. OutputError."""
    from celosia.compiler.program.safe_files import replacing

    with replacing(output) as temporary:
        temporary.write_bytes(optimised.model.SerializeToString(deterministic=True))
