"""Tables and numbers as text, on a terminal or in a file."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from celosia.plain import printable
from celosia.terminal import Console

TOP_LAYERS = 8
"""Number of layers in a table unless an option asks for all."""


def console() -> Console:
    """Return a console on standard output, 160 columns wide where it is not a terminal."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=160)


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table. A column whose name begins with ">" is aligned to the right."""
    table = Table(
        title=printable(title), title_justify="left", box=None, pad_edge=False, header_style="bold", title_style="bold"
    )
    for column in columns:
        table.add_column(
            printable(column.lstrip(">")), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def add_row(table: Table, *cells: object) -> None:
    """Add a row. Integers get thousands separators, and markup of Rich in a cell has no effect."""
    table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else printable(str(cell))) for cell in cells))


def percent(value: float | None) -> str:
    """Format a share with one decimal, "-" for None."""
    return "-" if value is None else f"{100 * value:.1f}%"


def megabytes(size: int) -> str:
    """Format bytes as MB or kB."""
    return f"{size / 1e6:.2f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
