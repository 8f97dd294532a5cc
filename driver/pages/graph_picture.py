"""Draw a graph of operators as SVG: a box for each operator, below all boxes that it reads. For `derivation.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from celosia.driver.pages.names import short

WIDTH, HEIGHT, GAP_X, GAP_Y = 226, 38, 14, 34
"""Width and height of a box, and horizontal and vertical distances between boxes, in pixels."""
MAX_LETTERS = 28
"""Letters that fit into a box."""


def draw_graph(nodes: Sequence[Mapping[str, Any]], title: str) -> str:
    """Draw nodes as SVG.

    nodes: each with `name`, `what`, `reads` (names of nodes before it) and `changed` (drawn in colour). title: for
    screen readers.
    """
    positions = _place_boxes(nodes)
    width = max((x for x, _ in positions.values()), default=0) + WIDTH + 2
    height = max((y for _, y in positions.values()), default=0) + HEIGHT + 2
    lines = "".join(
        _draw_edge(positions[read], positions[node["name"]])
        for node in nodes
        for read in node["reads"]
        if read in positions
    )
    boxes = "".join(_draw_box(node, *positions[node["name"]]) for node in nodes)
    return (
        f'<svg class="layers-of" width="{width:.0f}" height="{height}" role="img" aria-label="{escape(title)}">'
        f"{lines}{boxes}</svg>"
    )


def _place_boxes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Return (left, top) of each box by name.

    The row is the length of the longest path from an input. In a row, boxes are sorted by the mean of their operands.
    """
    rank: dict[str, int] = {}
    for node in nodes:
        rank[node["name"]] = 1 + max((rank[read] for read in node["reads"] if read in rank), default=-1)
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for node in nodes:
        rows.setdefault(rank[node["name"]], []).append(node)
    widest = max(map(len, rows.values()), default=0)
    positions: dict[str, tuple[float, int]] = {}
    for number in sorted(rows):
        means = [_mean_of_operands(node, positions) for node in rows[number]]
        row = [rows[number][column] for column in sorted(range(len(means)), key=means.__getitem__)]
        left = (widest - len(row)) * (WIDTH + GAP_X) / 2 + 1
        positions |= {
            node["name"]: (left + column * (WIDTH + GAP_X), number * (HEIGHT + GAP_Y) + 1)
            for column, node in enumerate(row)
        }
    return positions


def _mean_of_operands(node: Mapping[str, Any], positions: Mapping[str, tuple[float, int]]) -> float:
    """Return the mean left edge of the boxes that a node reads; 0 where it reads none."""
    lefts = [positions[name][0] for name in node["reads"] if name in positions]
    return sum(lefts) / len(lefts) if lefts else 0


def _draw_box(node: Mapping[str, Any], x: float, y: int) -> str:
    """Return the SVG of the box of a node, at left x and top y."""
    kind = "changed" if node["changed"] else "same"
    name, label = (escape(short(node[part], MAX_LETTERS)) for part in ("name", "what"))
    return (
        f'<g class="{kind}"><title>{escape(node["name"])}: {escape(node["what"])}</title>'
        f'<rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x + 8:.0f}" y="{y + 16}"><tspan>{name}</tspan>'
        f'<tspan class="what" x="{x + 8:.0f}" dy="15">{label}</tspan></text></g>'
    )


def _draw_edge(start: tuple[float, int], end: tuple[float, int]) -> str:
    """Return the SVG curve from the bottom of a box to the top of another; boxes by (left, top)."""
    (x, y), (to_x, to_y) = (start[0] + WIDTH / 2, start[1] + HEIGHT), (end[0] + WIDTH / 2, end[1])
    bend = (y + to_y) / 2
    return f'<path d="M{x:.0f} {y}C{x:.0f} {bend:.0f} {to_x:.0f} {bend:.0f} {to_x:.0f} {to_y}"/>'
