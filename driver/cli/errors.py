"""Exit codes of commands, and errors as one sentence on standard error."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from celosia.plain import printable, printable_lines, shorten

OK, WRONG_INPUT, USAGE, RUN_FAILED, NO_TOOL, FAULT, DOES_NOT_FIT, DIFFERS, UNCHECKED = range(9)
"""Exit codes; `EXIT_CODES` explains them to the user."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it: 128 and the number of SIGINT."""
EXIT_CODES = """\b
Exit codes:
  0  done
  1  a model, Program, Config, input or output file is wrong
  2  the command line is wrong
  3  the run failed: an error or a time limit of the accelerator, or a board that cannot be reached
  4  a tool is missing or failed (C++ compiler, Verilator, Yosys, ziglang, Vivado)
  5  a fault of Celosia itself
  6  the accelerator does not fit the device
  7  a tensor or output differs from onnxruntime's
  8  the self-check could not run to its end, so the Program is not checked
  130  interrupted
  143  ended by SIGTERM
"""

Debug = Annotated[bool, typer.Option("--debug", help="Print the Python traceback of an error.")]


def _error_classes_by_exit_code() -> dict[int, tuple[type[Exception], ...]]:
    """Return the exception classes whose text is a sentence for users, by exit code."""
    from celosia.bitstreams.project import ProjectError, ToolError
    from celosia.bitstreams.synthesis import SynthesisError
    from celosia.compiler.cpu.llvm import LinkError
    from celosia.compiler.graph.errors import ModelError
    from celosia.compiler.program import InputError, ProgramError
    from celosia.compiler.program.host.op import HostError
    from celosia.compiler.program.host.thread_team import ThreadsError
    from celosia.compiler.program.safe_files import OutputError
    from celosia.compiler.superoptimise.proofs import RuleError
    from celosia.compiler.superoptimise.search import BudgetError
    from celosia.compiler.target import TargetError
    from celosia.compiler.tensorize.plan import DecisionsError
    from celosia.compiler.tune.device_pool import FleetError
    from celosia.compiler.tune.records import RecordsError
    from celosia.compiler.tune.search import MissingLearner
    from celosia.driver.explore.configs import SpaceError
    from celosia.driver.explore.records import ExploreError
    from celosia.driver.export.memory_map import NotExportable
    from celosia.driver.pages.names import ReportError
    from celosia.driver.quantize.quantize import QuantizeError
    from celosia.driver.remote.ssh import SshError
    from celosia.driver.tune.fleet import PoolError
    from celosia.driver.workstation.oracle import MissingLibrary, OracleError
    from celosia.hw.boards.board import BoardError
    from celosia.hw.manifest import ManifestError
    from celosia.hw.spec.config import ConfigError
    from celosia.hw.verilog import VerilogError
    from celosia.sim.device import DeviceError
    from celosia.sim.rtl.build import BuildError

    wrong_input = (
        ModelError, BoardError, BudgetError, DecisionsError, ConfigError, NotExportable, HostError, ProgramError,
        InputError, OutputError, QuantizeError, ExploreError, OracleError, ManifestError, ProjectError, RecordsError,
        ReportError, RuleError, SpaceError, TargetError, ThreadsError,
    )  # fmt: skip
    no_tool = (
        BuildError,
        LinkError,
        SynthesisError,
        VerilogError,
        MissingLearner,
        MissingLibrary,
        ToolError,
    )
    return {WRONG_INPUT: wrong_input, RUN_FAILED: (DeviceError, FleetError, PoolError, SshError), NO_TOOL: no_tool}


def exit_code_and_message(error: Exception) -> tuple[int, str]:
    """Return the exit code of a command that ended with `error`, and the sentence to print."""
    from celosia.compiler.selfcheck.check_launches import CheckFailed, SelfCheckError

    for code, classes in _error_classes_by_exit_code().items():
        if isinstance(error, classes):
            return code, str(error)
    if isinstance(error, OSError):
        file_name = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not file_name:
            file_name = f"a disk is full, perhaps that of {tempfile.gettempdir()} (TMPDIR) or {Path.cwd()}: "
        return WRONG_INPUT, f"{file_name}{error.strerror or error}"
    if isinstance(error, MemoryError):
        return RUN_FAILED, "there is not enough memory for this model"
    if isinstance(error, SelfCheckError):
        return FAULT, f"a fault of celosia: {error}; report it with the model (--no-check compiles nevertheless)"
    if isinstance(error, CheckFailed):
        return UNCHECKED, f"{error}; go on without it with --no-check (check=False in Python), and report the model"
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    return FAULT, f"a fault of celosia: {summary}; run the command again with --debug and report what it prints"


def say(text: str, error: bool = False) -> None:
    """Print lines on standard output or standard error, with control characters escaped."""
    typer.echo(printable_lines(text), err=error)


def end_output() -> None:
    """Flush standard output. If its reader is gone, redirect it to /dev/null, so that Python ends without a message."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """Print a warning as one sentence on standard error; replaces `warnings.showwarning`."""
    say(f"celosia: warning: {printable(str(message))}", error=True)


class Commands(TyperGroup):
    """Group of commands that escapes control characters in errors of the command line.

    A shell pattern may put file names with such characters there.
    """

    def invoke(self, ctx: Any) -> Any:
        """Invoke the command as typer does, and escape the message of an error."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(message := getattr(error, "message", None), str):
                error.message = printable(message)  # type: ignore[attr-defined]
            raise


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap `function` as a command whose errors are one sentence and an exit code, with an option `--debug`."""
    signature = inspect.signature(function, eval_str=True)
    debugging = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)

    @functools.wraps(function)
    def run_command(*args: Any, debug: bool = False, **options: Any) -> None:
        """Run the command; turn its errors into a sentence and an exit code."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _say_warning
                function(*args, **options)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            say("celosia: interrupted", error=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `celosia inspect ... | head` is not an error
            end_output()
            raise typer.Exit(OK) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            code, sentence = exit_code_and_message(error)
            text = shorten(
                printable_lines(sentence) if code == NO_TOOL else printable(sentence)
            )  # a tool's output has lines
            typer.secho(f"celosia: error: {text}", fg="red" if sys.stderr.isatty() else None, err=True)
            raise typer.Exit(code) from None

    run_command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), debugging])  # type: ignore[attr-defined]
    return run_command
