"""Tables as text, on a terminal or in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from celosia.plain import printable
from celosia.terminal import Console

if TYPE_CHECKING:
    pass

TOP_LAYERS = 8
"""Layers that are shown where not all of them are asked for."""


def console() -> Console:
    """Return a console on standard output; wide enough for a table where it is not a terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=160)


def new_table(title: str, *columns: str) -> Table:
    """Create a table; a column whose name begins with ">" is aligned to the right."""
    table = Table(
        title=printable(title), title_justify="left", box=None, pad_edge=False, header_style="bold", title_style="bold"
    )
    for column in columns:
        table.add_column(
            printable(column.lstrip(">")), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def add_row(table: Table, *cells: object) -> None:
    """Add a row; integers get thousands' commas, and no cell is taken for markup."""
    table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else printable(str(cell))) for cell in cells))


def percent(value: float | None) -> str:
    """Format a share with one decimal, "-" for None."""
    return "-" if value is None else f"{100 * value:.1f}%"


def megabytes(size: int) -> str:
    """Format bytes as MB or kB."""
    return f"{size / 1e6:.2f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
