"""`celosia bitstream`: from a Config to what an FPGA loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from celosia.driver.commands import EXIT_CODES, Debug, Quiet, command

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
BoardOption = Annotated[str, typer.Option("--board", metavar="NAME", help="pynq-z1, pynq-z2, ultra96 or zcu104.")]
MaybeConfig = Annotated[
    str | None, typer.Option("--config", metavar="NAME|FILE", help="The accelerator [default: the board's preset].")
]


@app.callback(epilog=EXIT_CODES)
def bitstream() -> None:
    """Make the hardware of a Config for a board."""


@app.command()
@command
def project(
    board: BoardOption,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write, a new one.")],
    config: MaybeConfig = None,
    clock: Annotated[
        int | None, typer.Option(metavar="MHZ", help="Clock of the accelerator [default: the board's].")
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a Vivado project: Verilog, constraints, the block design as Tcl.

    \b
    Example:
      celosia bitstream project --board pynq-z2 -o build/pynq-z2
      celosia bitstream build build/pynq-z2
    """
    from celosia.bitstreams.project import COMMAND, find_board, write_project
    from celosia.driver.progress import Stages
    from celosia.hw.config import Config

    place, cfg = find_board(board), None if config is None else Config.load(config)
    with Stages(quiet) as stages:
        stages("writing the Verilog")
        write_project(place, output, cfg, clock)
    if not quiet:
        typer.echo(f"{output}: project for {place.name} ({place.part}), Config {(cfg or place.config).name}")
        typer.echo(f"next: celosia bitstream build {output}   (where Vivado is: {' '.join(COMMAND)})")


@app.command()
@command
def build(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `celosia bitstream project` wrote.")],
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run Vivado on a project; it leaves a .bit file, a .hwh file and a manifest in DIR.

    \b
    Example:
      celosia bitstream build build/pynq-z2
    """
    from celosia.bitstreams.project import build_project

    manifest = build_project(folder)
    if not quiet:
        typer.echo(f"{folder}: {manifest.part} at {manifest.clock_mhz} MHz, {manifest.slack_ns} ns to spare")
