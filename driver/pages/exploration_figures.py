"""Bokeh figures of an exploration, for `exploration_page.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import ColumnDataSource, CustomJSTickFormatter, FixedTicker, Range1d
from bokeh.palettes import Cividis256

from celosia.driver.pages.names import NAME, NAMES, UNITS, short
from celosia.driver.pages.run_figures import COLOURS, Figure, hover, new_figure, wide_hover

SHADES = Cividis256[70:230]
"""Colours of Configs by time, visible on light and dark ground; the last is the earliest."""
FRONT, PRESET = COLOURS["store"], COLOURS["cpu"]
"""Colours of Configs on the front, and of the preset."""
MAX_LINES = 400
"""Dominated Configs that `plot_parallel_coordinates` draws at most."""
TICK_FORMAT = "return tick >= 1 ? tick.toLocaleString('en', {maximumSignificantDigits: 3}) : tick.toPrecision(2)"
"""JavaScript that formats the numbers of a logarithmic axis."""


def plot_front(
    points: Sequence[Mapping[str, Any]], first: str, second: str, preset: Mapping[str, Any] | None, joined: bool
) -> Figure:
    """Plot two objectives of all measured Configs, as dots.

    points: of front.json. first, second: objectives of the x and y axis. preset: None without. joined: draw a line
    through the front.
    """
    plot = new_figure(
        420, "pan,box_zoom,wheel_zoom,", x_axis_type="log", y_axis_type="log", x_axis_label=UNITS.get(first, first),
        y_axis_label=UNITS.get(second, second), active_scroll="wheel_zoom",
    )  # fmt: skip
    front_values = sorted((p["objectives"][first], p["objectives"][second]) for p in points if p["front"])
    if joined:
        plot.line([x for x, _ in front_values], [y for _, y in front_values], line_width=2, color=FRONT)
    order = sorted(range(len(points)), key=lambda n: (points[n]["front"], points[n]["at"]))
    time_rank = {n: position for position, n in enumerate(sorted(range(len(points)), key=lambda n: points[n]["at"]))}
    shades = [SHADES[-1 - time_rank[n] * (len(SHADES) - 1) // max(1, len(points) - 1)] for n in order]
    rows = [points[n] for n in order]
    source = ColumnDataSource({
        "x": [row["objectives"][first] for row in rows], "y": [row["objectives"][second] for row in rows],
        "color": [FRONT if row["front"] else shade for row, shade in zip(rows, shades)],
        "size": [11 if row["front"] else 6 for row in rows], "digest": [row["digest"][:6] for row in rows],
        "fields": [_changed_fields_text(row["set"], preset) for row in rows], "how": [row["how"] for row in rows],
        "shares": [_shares_text(row) for row in rows], "at": [round(row["at"]) for row in rows],
    })  # fmt: skip
    dots = plot.scatter("x", "y", size="size", color="color", fill_alpha=0.8, source=source)
    plot.add_tools(wide_hover([dots], [
        ("Config", "@digest"), (UNITS.get(first, first), "@x{0,0.[000]}"), (UNITS.get(second, second), "@y{0,0.[000]}"),
        ("device", "@shares"), ("unlike the preset" if preset else "fields", "@fields"), ("tried for", "@how"),
        ("after", "@at s"),
    ]))  # fmt: skip
    if preset is not None:
        preset_source = ColumnDataSource({
            "x": [preset["objectives"][first]], "y": [preset["objectives"][second]],
            "name": [short(preset["name"], NAME)], "shares": [_shares_text(preset)],
        })  # fmt: skip
        star = plot.scatter(
            "x", "y", size=15, marker="diamond", fill_color=PRESET, line_color="#ffffff", source=preset_source,
        )  # fmt: skip
        plot.add_tools(wide_hover([star], [("the preset", "@name"), ("device", "@shares")]))
    for axis in (plot.xaxis, plot.yaxis):
        axis.formatter = CustomJSTickFormatter(code=TICK_FORMAT)
    return plot


def _changed_fields_text(fields: Mapping[str, Any], preset: Mapping[str, Any] | None = None) -> str:
    """Return the fields of a Config, with their values, that differ from the preset; all without a preset."""
    preset_fields = {} if preset is None else preset["set"]
    changed_fields = {
        name: value for name, value in fields.items() if name not in preset_fields or preset_fields[name] != value
    }
    return ", ".join(f"{name} {str(value).lower()}" for name, value in changed_fields.items()) or "no difference"


def _shares_text(row: Mapping[str, Any]) -> str:
    """Return a Config's shares of the device's resources as text; "-" for reports of older versions."""
    shares = row.get("shares", {})
    return ", ".join(f"{label} {shares[name]:.0%}" for name, label in NAMES.items() if name in shares) or "-"


def plot_hypervolume(steps: Sequence[tuple[int, float]]) -> Figure:
    """Plot the hypervolume over the number of measured Configs. steps: (number of Configs, hypervolume)."""
    plot = new_figure(240, "", x_axis_label="Configs measured", y_axis_label="share dominated")
    plot.step([n for n, _ in steps], [v for _, v in steps], mode="after", line_width=3, color=COLOURS["gemm"])
    return plot


def plot_parallel_coordinates(points: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Figure:
    """Plot each Config as a line through the values of its fields (parallel coordinates); the front in colour."""
    values = {name: sorted({point["set"][name] for point in points}) for name in fields}
    dominated = [point for point in points if not point["front"]]
    shown = [*dominated[:: max(1, len(dominated) // MAX_LINES)], *(point for point in points if point["front"])]

    def height(name: str, value: Any) -> float:
        """Return the height of a field's value in the plot: 0 for the smallest, 1 for the largest."""
        return values[name].index(value) / max(1, len(values[name]) - 1)

    plot = new_figure(
        380, "", y_range=Range1d(start=-0.12, end=1.12), x_range=Range1d(start=-0.4, end=len(fields) - 0.6)
    )
    for on_front, colour, alpha, width in ((False, COLOURS["latency"], 0.25, 1), (True, COLOURS["gemm"], 0.85, 2)):
        rows = [point for point in shown if point["front"] == on_front]
        source = ColumnDataSource({
            "xs": [list(range(len(fields)))] * len(rows), "digest": [row["digest"][:6] for row in rows],
            "ys": [[height(name, row["set"][name]) for name in fields] for row in rows],
            "fields": [_changed_fields_text(row["set"]) for row in rows],
        })  # fmt: skip
        lines = plot.multi_line("xs", "ys", color=colour, line_alpha=alpha, line_width=width, source=source)
        if on_front:
            plot.add_tools(wide_hover([lines], [("Config", "@digest"), ("fields", "@fields")]))
    ends = [(number, name, end) for number, name in enumerate(fields) for end in (0, -1)]
    plot.text(
        [number for number, _, _ in ends], [-0.05 if end == 0 else 1.05 for _, _, end in ends],
        text=[str(values[name][end]).lower() for _, name, end in ends], text_align="center", text_baseline="middle",
        text_font_size="10px", text_color=COLOURS["latency"], name="note",
    )  # fmt: skip
    plot.xaxis.ticker = FixedTicker(ticks=list(range(len(fields))))
    plot.xaxis.formatter = CustomJSTickFormatter(args={"names": list(fields)}, code="return names[tick] ?? ''")
    plot.xaxis.major_label_orientation = 0.9
    plot.yaxis.visible = False
    plot.ygrid.visible = False
    return plot


EFFECT_COLOURS = (COLOURS["gemm"], COLOURS["load"])
"""Colours of the bars of two objectives."""


def plot_effects(effects_of: Mapping[str, Mapping[str, float]]) -> Figure:
    """Plot for each field and objective how much, in percent, the objective changes at the field's next larger value.

    effects_of: by objective and field, the factor (`exploration_page.sensitivity`).
    """
    names = list(effects_of)
    fields = sorted(
        effects_of[names[0]], key=lambda field: max(abs(_percent_change(effects_of[name][field])) for name in names)
    )
    plot = new_figure(
        max(180, 30 * len(fields) + 90), "", x_axis_label="percent more at the field's next value",
        y_range=Range1d(start=-0.7, end=len(fields) - 0.3),
    )  # fmt: skip
    for number, name in enumerate(names):
        source = ColumnDataSource({
            "y": [row + 0.2 - 0.4 * number for row in range(len(fields))], "field": fields,
            "right": [_percent_change(effects_of[name][field]) for field in fields],
        })  # fmt: skip
        colour = EFFECT_COLOURS[number]
        bars = plot.hbar("y", right="right", height=0.36, color=colour, source=source)
        plot.add_tools(hover([bars], [("field", "@field"), (name, "@right{+0.0} %")]))
    plot.yaxis.ticker = FixedTicker(ticks=list(range(len(fields))))
    plot.yaxis.formatter = CustomJSTickFormatter(args={"names": fields}, code="return names[tick] ?? ''")
    plot.ygrid.visible = False
    return plot


def _percent_change(factor: float) -> float:
    """Return the change in percent that a factor is: 10 for 1.1."""
    return 100 * (factor - 1)
