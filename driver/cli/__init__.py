"""The command `celosia`. Slow imports wait until a command needs them.

Each command is a function with its options; what it prints comes from `driver/show/`, what it computes from elsewhere.
`driver/choices.py` has choices and defaults of options that the library has, too.

models        compile, inspect, report, quantize
runs          run, demo
checks        compare, eval
deploying     deploy, flash, rehearse
exporting     export
generating    generate
cutting       cut
optimising    optimise
tuning        tune
exploring     explore
hardware      verilog, configs, boards, sweep, doctor (programs: src/celosia/tools.py), cache (src/celosia/cache.py)
bitstream     the commands of `celosia bitstream`
options       options that several commands share
common        checks before long work, and loading or compiling a Program, for several commands
errors        which error has which exit code and sentence
cli_doc       prints docs/cli.md
"""

from __future__ import annotations

from typing import Annotated

import typer

from celosia.driver.cli import bitstream
from celosia.driver.cli.checks import compare, eval_
from celosia.driver.cli.cutting import cut
from celosia.driver.cli.deploying import deploy, flash, rehearse
from celosia.driver.cli.errors import EXIT_CODES, Commands, end_output
from celosia.driver.cli.exploring import explore
from celosia.driver.cli.exporting import export
from celosia.driver.cli.generating import generate
from celosia.driver.cli.hardware import boards, cache, configs, doctor, sweep, verilog
from celosia.driver.cli.models import compile_, inspect, quantize, report
from celosia.driver.cli.optimising import optimise
from celosia.driver.cli.runs import demo, run
from celosia.driver.cli.tuning import tune

app = typer.Typer(
    name="celosia", cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.add_typer(bitstream.app, name="bitstream")


def _version(is_wanted: bool) -> None:
    """Print the version and exit, for the option `--version`."""
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"celosia {version('celosia')}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def celosia(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compile int8 ONNX models for a tensor accelerator described in Python, and run them on its RTL.

    \b
    Examples:
      celosia demo
      celosia run model.onnx --input image=image.npy --device rtl
      celosia COMMAND --help
    """


app.command(name="compile", epilog=EXIT_CODES)(compile_)
app.command(name="eval", epilog=EXIT_CODES)(eval_)
_HARDWARE_COMMANDS = configs, boards, sweep, explore, tune, verilog, doctor, cache
_MODEL_COMMANDS = run, generate, compare, deploy, export, flash, rehearse, inspect, report, quantize, optimise, cut
for function in (*_MODEL_COMMANDS, *_HARDWARE_COMMANDS, demo):
    app.command(epilog=EXIT_CODES)(function)


def main() -> None:
    """Run the command: the entry point of the installed script `celosia`."""
    from celosia.long_running import end_on_sigterm

    end_on_sigterm()
    try:
        app()
    finally:
        end_output()
