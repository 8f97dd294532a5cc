"""Texts that pages and tables share: short names, labels of resources and objectives, legends; and ReportError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from celosia.plain import Sentence

NAME, LABEL = 60, 20
"""Characters of a name in a text, and of a label at an axis."""
NAMES = {"lut": "LUT", "ff": "flip-flops", "dsp": "DSP", "ram": "block RAM"}
"""Labels of the resources of a device, by name."""
UNITS = {
    "cycles": "cycles", "latency": "ms a run", "period": "ms an image", "area": "area, mean %",
    "energy": "mJ (an estimate)",
}  # fmt: skip
"""Labels of objectives at the head of a column or at an axis, by name."""
FULL_SHARE = 0.95
"""A bar is marked as full above this share of a resource: routing becomes hard."""
MARKS = (
    "~ LUTs and flip-flops by a model of Configs that Yosys has counted; ~ and ? where none of those is like it, so "
    "that the model may be off: `--confirm yosys` counts. No mark: counted. DSP blocks and block RAM as declared."
)
"""Explanation of the marks in texts of `resource`."""


class ReportError(Sentence, ValueError):
    """A file is no report that a page can show. The message is one sentence."""


def short(name: str, length: int) -> str:
    """Shorten a name to at most `length` characters, never empty.

    >>> short("a" * 30, 5), short("", 5)
    ('aaaa…', '(no name)')
    """
    name = " ".join(name.split())
    return name if 0 < len(name) <= length else f"{name[: length - 1]}…" if name else "(no name)"


def resource(row: Mapping[str, Any], name: str) -> str:
    """Return the text of a resource: ~ before an estimate, ? behind an extrapolation. row: of a sweep, or a point's
    area.

    >>> row = {"lut": 40449, "ff": 24020, "ram": 10.5, "counted": False, "extrapolated": False}
    >>> resource(row, "lut"), resource(row | {"extrapolated": True}, "ff"), resource(row, "ram")
    ('~40,400', '~24,000?', '10.5')
    """
    value = row[name]
    if value is None:
        return "-"
    if row["counted"] or name not in ("lut", "ff"):
        return f"{value:,}".removesuffix(".0")
    return f"~{round(value, -2):,}{'?' if row['extrapolated'] else ''}"


def resource_cell(row: Mapping[str, Any], name: str, share: float | None) -> str:
    """Return the HTML table cell of a resource, with a bar of its share of the device. share: None where unknown."""
    text = escape(resource(row, name))
    if share is None:
        return f"<td>{text}</td>"
    full = " class=full" if share > FULL_SHARE else ""
    bar = f'<s><i{full} style="width:{100 * min(1, share):.1f}%"></i></s>'
    return f'<td class="bar">{text} <b>{share:.0%}</b>{bar}</td>'


def legend_of(pairs: Sequence[tuple[str, str]]) -> str:
    """Return an HTML legend. pairs: (colour, meaning)."""
    rows = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in pairs)
    return f'<div class="key">{rows}</div>'
