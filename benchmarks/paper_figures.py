"""The figures of the papers' charts, by Bokeh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from bokeh.models import ColumnDataSource, FactorRange, FixedTicker, NumeralTickFormatter

from celosia.driver.pages.run_figures import COLOURS, LAYER_COLOURS, Figure, hover, new_figure, roofline

OFF = COLOURS["latency"]
ACROSS = 4
"""Entries of a legend side by side."""


def two_rooflines(
    on: Sequence[Mapping[str, Any]], off: Sequence[Mapping[str, Any]], peak: int, roofs: Mapping[str, float]
) -> Figure:
    """Each layer twice, and a line from where it is without (a ring) to where it is with latency hiding."""
    made = roofline(on, {f"{peak:,} multipliers": peak}, roofs)
    x = [row["macs"] / (row["bytes_loaded"] + row["bytes_stored"]) for row in on]
    before, after = ([row["macs"] / row["cycles"] for row in rows] for rows in (off, on))
    most = max(row["cycles"] for row in on)
    made.segment(x, before, x, after, color=OFF, line_width=1)
    source = ColumnDataSource({
        "x": x, "y": before, "name": [row["name"] for row in on], "cycles": [row["cycles"] for row in off],
        "size": [7 + 20 * sqrt(row["cycles"] / most) for row in on],
    })  # fmt: skip
    rings = made.scatter("x", "y", size="size", fill_alpha=0, line_color=OFF, line_width=1.5, source=source)
    made.add_tools(hover([rings], [("without", "@name"), ("cycles", "@cycles{0,0}")]))
    return made


def bars(
    groups: Sequence[str], series: Mapping[str, Sequence[float | None]], what: str, one: bool = False, log: bool = False
) -> Figure:  # fmt: skip
    """Bars side by side: a group of them for each of `groups`, in it one for each of `series`. one: a line at 1."""
    factors = [(group, name) for group in groups for name in series]
    tops = [values[number] for number in range(len(groups)) for values in series.values()]
    kept = [(factor, top) for factor, top in zip(factors, tops) if top is not None]
    colour = dict(zip(series, LAYER_COLOURS))
    made = new_figure(
        380, "xpan,xwheel_zoom,", x_range=FactorRange(factors=factors, group_padding=0.6), y_axis_label=what,
        y_axis_type="log" if log else "linear",
    )  # fmt: skip
    if not log:
        made.y_range.start = 0
    low = min(top for _, top in kept) / 2 if log else 0
    for name in series:
        own = [(factor, top) for factor, top in kept if factor[1] == name]
        source = ColumnDataSource({
            "x": [factor for factor, _ in own], "top": [top for _, top in own], "of": [factor[0] for factor, _ in own],
        })  # fmt: skip
        drawn = made.vbar("x", top="top", bottom=low, width=0.9, color=colour[name], legend_label=name, source=source)
        made.add_tools(hover([drawn], [(name, "@of"), (what, "@top{0,0.[000]}")]))
    if one:
        made.line([factors[0], factors[-1]], [1, 1], color=OFF, line_dash="dashed")
    made.xaxis.major_label_text_font_size = "0px"
    made.xaxis.major_tick_line_color = None
    made.xaxis.group_label_orientation = 1.1
    made.xgrid.visible = False
    _legend_above(made)
    return made


def curves(lines: Mapping[str, Sequence[float]], x: str, y: str) -> Figure:
    """A line for each name: its value, above 0, after 1, 2, ... of `x`."""
    made = new_figure(380, "pan,wheel_zoom,", x_axis_label=x, y_axis_label=y, x_axis_type="log", y_axis_type="log")
    for number, (name, values) in enumerate(lines.items()):
        colour = LAYER_COLOURS[number % len(LAYER_COLOURS)]
        source = ColumnDataSource({"x": list(range(1, len(values) + 1)), "y": list(values)})
        drawn = made.line("x", "y", line_width=2, color=colour, legend_label=name, source=source)
        made.add_tools(hover([drawn], [(name, "@y{0,0.[0000]}"), (x, "@x")]))
    made.xaxis.ticker = FixedTicker(ticks=[1, 2, 4, 8, 16, 32, 64])
    made.xaxis.formatter = NumeralTickFormatter(format="0")
    made.yaxis.formatter = NumeralTickFormatter(format="0.[00]")
    _legend_above(made)
    return made


def front(points: Sequence[tuple[float, float, str]], other: tuple[float, float]) -> Figure:
    """Configs, (area over the smallest's, times fewer cycles, name) each; a cross where another's front ends."""
    made = new_figure(
        380, "pan,wheel_zoom,", x_axis_label="LUTs over those of the smallest", y_axis_label="times fewer cycles",
        x_axis_type="log", y_axis_type="log",
    )  # fmt: skip
    best, edge = 0.0, list[tuple[float, float]]()
    for area, times, _ in sorted(points):
        if times > best:
            best, edge = times, [*edge, (area, times)]
    made.step(*zip(*edge), mode="after", line_width=2, color=LAYER_COLOURS[0], legend_label="front")
    source = ColumnDataSource(dict(zip(("x", "y", "name"), map(list, zip(*points)))))
    drawn = made.scatter(
        "x", "y", size=5, color=LAYER_COLOURS[0], fill_alpha=0.5, source=source, legend_label="Configs"
    )
    made.add_tools(hover([drawn], [("Config", "@name"), ("LUTs", "@x{0.0}"), ("times fewer cycles", "@y{0.0}")]))
    made.scatter(
        *([each] for each in other), marker="x", size=12, color=OFF, line_width=2, legend_label="VTA++, published"
    )
    _legend_above(made)
    return made


def _legend_above(made: Any) -> None:
    legend = made.legend[0]
    made.add_layout(legend, "above")
    legend.orientation, legend.click_policy = "horizontal", "hide"
    legend.ncols = ACROSS
    legend.background_fill_alpha, legend.border_line_color = 0, None
