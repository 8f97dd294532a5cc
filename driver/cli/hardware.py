"""`celosia verilog`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from celosia.driver.cli.errors import Debug, Quiet, command
from celosia.driver.cli.options import (
    ConfigOption,
    check_destinations,
    progress_stages,
)

if TYPE_CHECKING:
    pass


@command
def verilog(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="TOP.v", help="The file to write.")],
    config: ConfigOption = "pynq",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the Verilog of one accelerator.

    \b
    Examples:
      celosia verilog -o top.v
      celosia verilog --config my_accelerator.toml -o top.v
    """
    with progress_stages(quiet) as stages:
        check_destinations([], output)
        from celosia.compiler.files import write_text
        from celosia.hw.config import Config

        cfg = Config.load(config)
        stages(f"elaborating {cfg.name}")
        from celosia.hw.verilog import TOP
        from celosia.hw.verilog import verilog as text_of

        text = text_of(cfg)
        write_text(output, text)
    if not quiet:
        typer.echo(f"{output}: module {TOP}, {text.count(chr(10)):,} lines")
