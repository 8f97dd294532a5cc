"""Summary of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from celosia.driver.rehearse import Rehearsal
from celosia.driver.show.text_table import add_row, new_table
from celosia.plain import printable


def steps(rehearsal: Rehearsal) -> Iterator[RenderableType]:
    """Yield a table of the steps, and of what a real board needs in addition."""
    name = rehearsal.board.name
    table = new_table(f"Rehearsal for {name}, simulated here", "step", ">seconds", "result", "a real board needs")
    for step in rehearsal.steps:
        add_row(table, step.name, f"{step.seconds:.1f}", step.said, step.needs)
    yield table
    yield Text("")
    left_out = f"Not rehearsed: the login by ssh, Vivado, and the time that {rehearsal.board.machine} takes."
    following = f"celosia bitstream project --board {rehearsal.board_option}"
    yield Text(printable(f"{left_out} Next: {following}; docs/board.md has every step."))
