"""`celosia bitstream`: make the files that an FPGA loads from a Config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from celosia.bitstreams.designs import Design
from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import DOES_NOT_FIT, EXIT_CODES, command, say

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


@app.callback(epilog=EXIT_CODES)
def bitstream() -> None:
    """Make the hardware of a Config for a board.

    \b
    Examples:
      celosia bitstream report --board pynq-z2
      celosia bitstream timing --board pynq-z2
      celosia bitstream project --board pynq-z2 -o build/pynq-z2
      celosia bitstream build build/pynq-z2
    """


@app.command(epilog=EXIT_CODES)
@command
def project(
    board: opt.Board,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write, which must be new.")
    ],
    config: opt.BoardConfig = None,
    clock: Annotated[
        int | None, typer.Option(metavar="MHZ", help="Clock of the accelerator. Default: that of the board.")
    ] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write a Vivado project: Verilog, constraints, and the block design as Tcl.

    \b
    Examples:
      celosia bitstream project --board pynq-z2 -o build/pynq-z2
      celosia bitstream build build/pynq-z2
    """
    from celosia.bitstreams.project import COMMAND, write_project
    from celosia.hw.boards.boards import find_board
    from celosia.hw.spec.config import Config

    target_board, cfg = find_board(board), None if config is None else Config.load(config)
    with common.progress_stages(quiet) as stages:
        stages("writing the Verilog")
        write_project(target_board, output, cfg, clock)
    if not quiet:
        name = (cfg or target_board.config).name
        say(f"{output}: project for {target_board.name} ({target_board.part}), Config {name}")
        say(f"next: celosia bitstream build {output}   (where Vivado is: {' '.join(COMMAND)})")


@app.command(epilog=EXIT_CODES)
@command
def build(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `celosia bitstream project` wrote.")],
    quiet: opt.Quiet = False,
) -> None:
    """Run Vivado on a project, which writes a .bit file, a .hwh file and a manifest to DIR.

    \b
    Examples:
      celosia bitstream build build/pynq-z2
    """
    from celosia.bitstreams.project import build_project

    manifest = build_project(folder)
    if not quiet:
        say(f"{folder}: {manifest.part} at {manifest.clock_mhz} MHz, {manifest.slack_ns} ns to spare")


@app.command(epilog=EXIT_CODES)
@command
def report(
    board: opt.Board,
    config: opt.BoardConfig = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Count the LUTs, flip-flops, DSP blocks and block RAM of a Config on a board's device, and estimate its power.

    The command first shows the estimate of the resource model. Then Yosys counts, which takes two to three minutes of
    processor time for `tiny` and five to ten for `pynq`; later runs use the stored counts. Ctrl-C after the first table
    keeps the estimate. The exit code is 6 if the Config does not fit.

    \b
    Examples:
      celosia bitstream report --board pynq-z2
      celosia bitstream report --board ultra96 --config my_accelerator.toml --json
    """
    from celosia.bitstreams.power import ALL_BUSY, Cells, caveat, estimate
    from celosia.bitstreams.synthesis import cached_usage, measure_usage
    from celosia.driver.show import bitstream_summary as show
    from celosia.driver.show.text_table import console
    from celosia.hw.boards.boards import find_board
    from celosia.hw.spec.config import Config

    target_board = find_board(board)
    cfg, device = target_board.config if config is None else Config.load(config), target_board.device
    if 8 * cfg.bus_bytes > target_board.bus_bits:
        text = f"celosia: {cfg.name} has bus_bytes = {cfg.bus_bytes}, the memory ports of {target_board.name} have "
        say(f"{text}{target_board.bus_bits // 8}; choose a narrower bus", error=True)
        raise typer.Exit(DOES_NOT_FIT)
    if not quiet and not as_json and cached_usage(cfg, device) is None:
        from celosia.driver.explore.resource_use import Resources

        console().print(
            show.estimated(Resources.of(cfg, device), device, f"{cfg.name} on {target_board.name}, by the model")
        )
    with common.progress_stages(quiet) as stages:
        used = measure_usage(cfg, device, lambda step: stages(f"synthesis of {cfg.name} for {device.name}: {step}"))
    left, fits = used.free_percent(device), used.fits(device)
    cells = Cells.from_counts(cfg, used.lut, used.ff, used.dsp, used.ram)
    mhz = target_board.clock_mhz
    working, resting = (estimate(cfg, cells, target_board, mhz, busy) for busy in (ALL_BUSY, None))
    if as_json:
        resources = {
            name: {"used": getattr(used, name), "available": getattr(device, name), "left_percent": round(percent, 1)}
            for name, percent in left.items()
        }
        about = {"board": target_board.name, "device": device.name, "config": cfg.name, "digest": cfg.digest}
        power = {
            "mhz": mhz, "working": dict(working.watts), "resting": dict(resting.watts),
            "stand_ins": working.stand_ins, "caveat": caveat(target_board),
        }  # fmt: skip
        estimates = {"resources": resources, "fits": fits, "tool": used.tool, "power": power}
        typer.echo(json.dumps(about | estimates, indent=1))
    else:
        console().print(show.resources(used, device, f"{cfg.name} on {target_board.name} ({device.name}), {used.tool}"))
        title = f"Watts at {mhz} MHz, an estimate"
        console().print(show.power(working, resting, title, caveat(target_board)))
    if not fits:
        short = ", ".join(name for name, percent in left.items() if percent < 0)
        text = f"celosia: {cfg.name} does not fit {device.name}: not enough of {short}; choose a smaller Config"
        say(text, error=True)
        raise typer.Exit(DOES_NOT_FIT)


@app.command(epilog=EXIT_CODES)
@command
def timing(
    board: opt.Board,
    config: opt.BoardConfig = None,
    paths: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Number of paths to list, the longest first.")
    ] = 20,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Estimate the clock at which a Config runs on a board's device, and list its longest paths, without Vivado.

    The estimate is a static timing analysis of Yosys' netlist with published delays of cells. The delay of a net
    depends on its fan-out. Use the estimate to compare designs; it does not replace Vivado's. The first run takes
    minutes. Supported device: xc7z020, speed grade -1.

    \b
    Examples:
      celosia bitstream timing --board pynq-z2
      celosia bitstream timing --board pynq-z2 --config tiny --paths 5
    """
    from dataclasses import asdict

    from celosia.bitstreams import timing as sta
    from celosia.driver.show import bitstream_summary as show
    from celosia.driver.show.text_table import console
    from celosia.hw.boards.boards import find_board
    from celosia.hw.spec.config import Config

    chosen = find_board(board)
    cfg, device = chosen.config if config is None else Config.load(config), sta.timed_device(chosen)
    with common.progress_stages(quiet) as stages:
        timing = sta.estimate(cfg, paths, lambda step: stages(f"timing of {cfg.name} on {device}: {step}"))
    if as_json:
        about = {"board": chosen.name, "device": device, "config": cfg.name, "digest": cfg.digest}
        longest = [asdict(path) for path in timing.paths]
        clock = {"mhz": round(timing.mhz, 1), "ns": round(timing.ns, 3), "caveat": sta.CAVEAT}
        clock |= {"array_mhz": round(2 * timing.mhz, 1)} if timing.pumped else {}
        typer.echo(json.dumps(about | clock | {"ends": timing.ends, "paths": longest}, indent=1))
    else:
        console().print(show.timing(timing, f"{cfg.name} on {chosen.name} ({device})"))


@app.command(epilog=EXIT_CODES)
@command
def ecp5(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the bitstream.")],
    config: Annotated[str, typer.Option("--config", metavar="NAME|FILE", help="The accelerator.")] = "tiny",
    design: Annotated[
        Design, typer.Option(help="The whole accelerator, or only GEMM with its scratchpads.")
    ] = Design.accelerator,
    clock: Annotated[float, typer.Option(metavar="MHZ", min=1, max=500, help="Clock to aim for.")] = 100,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of placements to try; the fastest is kept.")
    ] = 1,
    quiet: opt.Quiet = False,
) -> None:
    """Make a bitstream for an ECP5-85F with open tools, to measure size and timing.

    It does not run on a board, because its ports end in registers.

    \b
    Examples:
      celosia bitstream ecp5 --config tiny --design gemm -o build/ecp5
    """
    from celosia.bitstreams.ecp5 import build
    from celosia.hw.spec.config import Config

    cfg = Config.load(config)
    with common.progress_stages(quiet) as stages:
        stages(f"building {cfg.name} ({design.value}) for the ECP5, minutes")
        result = build(cfg, design, output, clock, lambda step: stages(step, line=False), seeds)
    if not quiet:
        met = "met" if result.fmax_mhz >= clock else "missed"
        say(f"{output / result.bit}: {result.fmax_mhz} MHz ({clock:g} MHz {met}), {result.device}")
        routed = sum(step.ns for step in result.longest if step.kind == "routing")
        ends = f"from {result.longest[0].of} to {result.longest[-1].of}" if result.longest else "none"
        say(f"longest path: {ends}, {routed:.1f} ns of it on nets; its steps are in the .json file")
