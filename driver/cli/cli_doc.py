"""Print docs/cli.md: each command with its arguments, options and examples. `python -m celosia.driver.cli.cli_doc`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from celosia.driver.cli import app
from celosia.driver.cli.errors import EXIT_CODES

HEAD = """# Command line

`python -m celosia.driver.cli.cli_doc` prints this page from the help texts of the commands; do not edit it.
`celosia COMMAND --help` prints the same text.
"""


def page() -> str:
    """Return the whole page as Markdown."""
    return "\n".join([HEAD, *_commands("celosia", typer.main.get_command(app)), "## Exit codes\n", *_exit_codes(), ""])


def _commands(name: str, command: Any) -> Iterator[str]:
    """Yield the sections of a command, or those of all commands of a group, in the order of `--help`."""
    for child_name, child in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {child_name}", child)
    if not hasattr(command, "commands"):
        yield from _section(name, command)


def _section(name: str, command: Any) -> Iterator[str]:
    """Yield the section of one command: what it does, its usage, its parameters, and examples."""
    text, _, examples = inspect.cleandoc(command.help or "").replace("\b\n", "").partition("Examples:\n")
    context = typer.Context(command, info_name=name)
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    yield f"## {name}\n\n{text.strip()}\n\n```\n{usage}\n```\n"
    yield "| parameter | meaning |\n|---|---|"
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":
            spelling, meaning = (_cell(" ".join(cell.split())) for cell in record)
            yield f"| `{spelling}` | {meaning} |"
    if examples.strip():
        yield f"\nExamples:\n\n```\n{inspect.cleandoc(examples)}\n```"
    yield ""


def _cell(text: str) -> str:
    """Escape what would end a cell of a Markdown table."""
    return text.replace("|", "\\|")


def _exit_codes() -> Iterator[str]:
    """Yield the table of exit codes, which holds for each command."""
    yield "| code | meaning |\n|---|---|"
    for code, meaning in re.findall(r"^\s+(\d+)\s+(.+)$", EXIT_CODES, re.MULTILINE):
        yield f"| {code} | {meaning} |"


if __name__ == "__main__":
    print(page(), end="")
