"""Draw a graph: a box for each operator, below all that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from celosia.driver.pages.names import short

WIDTH, HEIGHT, ACROSS, DOWN = 226, 38, 14, 34
"""Size of a box, and distances between boxes; pixels."""
LETTERS = 28
"""Letters that fit into a box."""


def picture(nodes: Sequence[Mapping[str, Any]], title: str) -> str:
    """Draw nodes as SVG; each has name, what, reads (names of nodes before it) and changed, which are in colour."""
    places = _place_boxes(nodes)
    width = max((x for x, _ in places.values()), default=0) + WIDTH + 2
    height = max((y for _, y in places.values()), default=0) + HEIGHT + 2
    lines = "".join(
        _draw_edge(places[read], places[node["name"]]) for node in nodes for read in node["reads"] if read in places
    )
    boxes = "".join(_draw_box(node, *places[node["name"]]) for node in nodes)
    return (
        f'<svg class="layers-of" width="{width:.0f}" height="{height}" role="img" aria-label="{escape(title)}">'
        f"{lines}{boxes}</svg>"
    )


def _place_boxes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Left and top of each box: rows by the longest path from an input, in them by the middle of their operands."""
    rank: dict[str, int] = {}
    for node in nodes:
        rank[node["name"]] = 1 + max((rank[read] for read in node["reads"] if read in rank), default=-1)
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for node in nodes:
        rows.setdefault(rank[node["name"]], []).append(node)
    widest = max(map(len, rows.values()), default=0)
    places: dict[str, tuple[float, int]] = {}
    for number in sorted(rows):
        middles = [_middle_of_operands(node, places) for node in rows[number]]
        row = [rows[number][place] for place in sorted(range(len(middles)), key=middles.__getitem__)]
        left = (widest - len(row)) * (WIDTH + ACROSS) / 2 + 1
        places |= {
            node["name"]: (left + place * (WIDTH + ACROSS), number * (HEIGHT + DOWN) + 1)
            for place, node in enumerate(row)
        }
    return places


def _middle_of_operands(node: Mapping[str, Any], places: Mapping[str, tuple[float, int]]) -> float:
    read = [places[name][0] for name in node["reads"] if name in places]
    return sum(read) / len(read) if read else 0


def _draw_box(node: Mapping[str, Any], x: float, y: int) -> str:
    """SVG of the box of a node."""
    kind = "changed" if node["changed"] else "same"
    name, label = (escape(short(node[part], LETTERS)) for part in ("name", "what"))
    return (
        f'<g class="{kind}"><title>{escape(node["name"])}: {escape(node["what"])}</title>'
        f'<rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x + 8:.0f}" y="{y + 16}"><tspan>{name}</tspan>'
        f'<tspan class="what" x="{x + 8:.0f}" dy="15">{label}</tspan></text></g>'
    )


def _draw_edge(start: tuple[float, int], end: tuple[float, int]) -> str:
    (x, y), (to_x, to_y) = (start[0] + WIDTH / 2, start[1] + HEIGHT), (end[0] + WIDTH / 2, end[1])
    bend = (y + to_y) / 2
    return f'<path d="M{x:.0f} {y}C{x:.0f} {bend:.0f} {to_x:.0f} {bend:.0f} {to_x:.0f} {to_y}"/>'
