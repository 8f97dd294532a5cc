"""HTML tables for notebooks, with the standard library only, because notebooks run on boards, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table; numbers are aligned to the right, and None is a dash.

    >>> table(["name", "cycles"], [["a<b", 1200]])[-71:]
    '<tr><td>a&lt;b</td><td style="text-align:right">1,200</td></tr></table>'
    """
    first = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{f'<tr>{first}</tr>' if head else ''}{body}</table>"


def _cell(value: object) -> str:
    """Format a cell: a dash for None, right-aligned numbers, percent for floats, escaped text."""
    if value is None:
        return "<td>-</td>"
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
        return f'<td style="text-align:right">{text}</td>'
    return f"<td>{escape(str(value))}</td>"
