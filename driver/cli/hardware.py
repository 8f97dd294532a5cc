"""`celosia verilog`, `configs`, `boards`, `sweep`, `doctor` and `cache`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import command, say


@command
def verilog(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="TOP.v", help="The file to write.")],
    config: opt.ConfigOption = "pynq",
    quiet: opt.Quiet = False,
) -> None:
    """Write the Verilog of one accelerator.

    \b
    Examples:
      celosia verilog -o top.v
      celosia verilog --config my_accelerator.toml -o top.v
    """
    with common.progress_stages(quiet) as stages:
        common.check_destinations([], output)
        from celosia.compiler.program.safe_files import write_text
        from celosia.hw.spec.config import Config

        cfg = Config.load(config)
        stages(f"elaborating {cfg.name}")
        from celosia.hw.verilog import TOP
        from celosia.hw.verilog import verilog as verilog_text

        text = verilog_text(cfg)
        write_text(output, text)
    if not quiet:
        say(f"{output}: module {TOP}, {text.count(chr(10)):,} lines")


@command
def configs(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|FILE]", help="Print this one as TOML.")] = None,
) -> None:
    """List the presets of the accelerator, or print one as a TOML file.

    \b
    Examples:
      celosia configs
      celosia configs pynq > mine.toml
    """
    from celosia.driver.show import hardware_summary as show
    from celosia.driver.show.text_table import console
    from celosia.hw.spec.config import PRESETS, Config

    if name is not None:
        from celosia.hw.spec.config_doc import commented_toml

        typer.echo(commented_toml(Config.load(name)), nl=False)
        return
    console().print(show.configs(PRESETS.values()))


@command
def boards(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|FILE]", help="Print this one as TOML.")] = None,
) -> None:
    """List the supported boards, or print one as a TOML file. docs/boards.md explains the file.

    \b
    Examples:
      celosia boards
      celosia boards pynq-z2 > my_board.toml
      celosia bitstream project --board my_board.toml -o build/my_board
    """
    from celosia.driver.show import hardware_summary as show
    from celosia.driver.show.text_table import console
    from celosia.hw.boards.boards import BOARDS, find_board

    if name is not None:
        typer.echo(find_board(name).to_toml(), nl=False)
        return
    console().print(show.boards(BOARDS.values()))


@command
def sweep(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The model.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=V1,V2", help="Values of a Config field to try. Repeat it for other fields."
        ),
    ] = None,
    config: opt.ConfigOption = "pynq",
    memory: opt.Memory = None,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write an HTML page with a plot and the table.")
    ] = None,
    report: opt.Report = None,
    quiet: opt.Quiet = False,
) -> None:
    """Compile a model for many Configs, and compare their cycles by the timing model and their FPGA resources.

    Block RAM and DSP blocks follow from the Config. LUTs and flip-flops are counts of Yosys, or estimates of a model
    that was fitted to such counts.

    \b
    Examples:
      celosia sweep model.onnx --set inp_depth=1024,4096 --set bus_bytes=8,16
      celosia sweep model.onnx --config tiny --set block_in=4,8,16 --set taps=0,3 --html sweep.html
    """
    if not settings:
        raise typer.BadParameter("--set names what to try, as in --set bus_bytes=8,16")
    memory_args = common.parse_memory(memory, "timed")
    with common.progress_stages(quiet) as stages:
        common.check_source(model)
        common.check_destinations([model], html, report)
        from celosia.driver.explore import sweep as sweeping
        from celosia.driver.show import hardware_summary as show
        from celosia.driver.show.text_table import console
        from celosia.hw.spec.config import ConfigError

        rows = sweeping.sweep(model, sweeping.parse_settings(settings), config, progress=stages, **memory_args)
    title = f"{model.name} on {config}; cycles by the timing model, memory {memory_args.get('memory', 'zynq-hp')}"
    if html is not None:
        sweeping.page(f"celosia sweep {model.name}", rows, f"{title}. {sweeping.resource_note(rows)}").save(html)
    common.write_json(report, rows)
    if not quiet:
        console().print(show.swept(title, rows))
        console().print(sweeping.resource_note(rows), highlight=False)
    if all(row["cycles"] is None for row in rows):
        raise ConfigError(f"none of the {len(rows)} Configs runs {model.name}; the first: {rows[0]['error']}")


@command
def doctor() -> None:
    """List the external programs that Celosia runs, with their versions.

    Celosia uses a program on PATH if it is new enough, else that of a Python package, if there is one.

    \b
    Examples:
      celosia doctor
    """
    from celosia import tools
    from celosia.driver.show import hardware_summary as show
    from celosia.driver.show.text_table import console

    console().print(show.tools([tools.choose(tool) for tool in tools.TOOLS]))


@command
def cache(
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Remove the least recently used files until the rest fits into SIZE, such as 500MB."
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all files.")] = False,
) -> None:
    """Show the cache on disk: simulators, Verilog, kernels and predicted cycles, which later runs use again.

    After each new simulator, the least recently used files are removed until the rest takes at most 2 GB. The variable
    CELOSIA_CACHE_LIMIT sets another limit, and CELOSIA_CACHE another folder.

    \b
    Examples:
      celosia cache
      celosia cache --limit 500MB
    """
    from celosia import cache as cache_files
    from celosia.driver.show import hardware_summary as show
    from celosia.driver.show.text_table import console, megabytes

    if limit is not None and clear:
        raise typer.BadParameter("--clear leaves nothing for --limit; give one of them")
    if limit is not None or clear:
        try:
            removed = cache_files.shrink(0 if limit is None else cache_files.parse_size(limit))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        say(f"{len(removed)} removed, {megabytes(sum(entry.size for entry in removed))}")
    console().print(show.cache_contents(cache_files.cached_files()))
