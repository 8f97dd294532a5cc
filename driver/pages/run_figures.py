"""Bokeh figures of a run. Colours of data are decided here; those of text and lines in page.js."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
    VSpan,
)
from bokeh.plotting import figure

from celosia.driver.pages.activity import Activity, Occupancy
from celosia.driver.pages.names import LABEL, NAME, short
from celosia.driver.run.explain import UNITS

Figure = Any
"""A Bokeh LayoutDOM; Bokeh's own types are too narrow."""

COLOURS = {
    "gemm": "#0072b2", "vector": "#009e73", "load": "#e69f00", "store": "#cc79a7", "latency": "#8c8c8c",
    "kept": "#56b4e9", "cpu": "#d55e00",
}  # fmt: skip
"""Colours of units and bounds: Okabe and Ito's, which the colour-blind can tell apart."""
LAYER_COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#edc948", "#ff9da7", "#9c755f",
)  # fmt: skip
"""Colours of layers, in turn."""
ROOFS = ("loads and stores", "loads alone")
"""Labels of the sloping roofs; the text above the figure names them, too."""
MAX_CURVE_STEPS = 8_000
"""Steps of a scratchpad's curve that are drawn at most."""
AXIS_TICKS = 4
"""Numbers along an axis: few, so that they do not overlap on a phone."""
LEFT_BORDER = 72
"""Pixels left of figures that share one axis of time, so that they are aligned."""
MAX_LABELS = 40
"""Layers that get a label at the axis at most; of more layers every second, third, ... gets one."""


def new_figure(height: int, tools: str = "", **options: Any) -> Any:
    """Create a figure `height` pixels high and as wide as the page. tools: Bokeh's names, each followed by a comma."""
    plot = figure(
        height=height, sizing_mode="stretch_width", tools=f"{tools}reset", toolbar_location="above",
        background_fill_alpha=0, border_fill_alpha=0, outline_line_color=None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.autohide = False
    return plot


def _layer_axis(plot: Any, names: Sequence[str]) -> None:
    """Label the rows of a plot, from the top, with the names of layers; only some where there are more than
    MAX_LABELS."""
    step = -(-len(names) // MAX_LABELS)
    plot.yaxis.ticker = FixedTicker(ticks=list(range(0, len(names), step)))
    plot.yaxis.formatter = CustomJSTickFormatter(
        args={"names": [_escape_formula(short(name, LABEL)) for name in names]}, code="return names[tick] ?? ''"
    )
    plot.ygrid.visible = False


def _escape_formula(name: str) -> str:
    """Replace $ and \\ in a name by similar characters, as Bokeh would render it as a formula with another library."""
    return name.replace("$", "\N{FULLWIDTH DOLLAR SIGN}").replace("\\", "\N{FULLWIDTH REVERSE SOLIDUS}")


def _height(count: int) -> int:
    """Return the height in pixels of a figure with a row for each of `count` layers."""
    return min(1200, max(150, 22 * count + 70))


# Layers -----------------------------------------------------------------------------------------------------


def roofline(rows: Sequence[Mapping[str, Any]], flat: Mapping[str, int], roofs: Mapping[str, float]) -> Figure:
    """Plot each layer as a point: MACs per byte moved, and MACs per cycle.

    rows: of a report, with MACs, bytes and cycles. flat: MACs per cycle of the flat roofs, by label. roofs: bytes per
    cycle of the sloping roofs, by ROOFS.
    """
    moved = [row["bytes_loaded"] + row["bytes_stored"] for row in rows]
    intensity = [row["macs"] / size for row, size in zip(rows, moved)]
    speed = [row["macs"] / row["cycles"] for row in rows]
    max_cycles = max(row["cycles"] for row in rows)
    text_style = {"text_font_size": "11px", "text_color": COLOURS["latency"], "name": "note"}
    peak = max(flat.values())
    low_x = min(min(intensity) / 3, peak / max(roofs.values()) / 8)
    high_x = max(*intensity, peak / min(roofs.values())) * 3
    low_y, high_y = min(min(speed) / 2.5, peak / 10), peak * 2.2
    plot = new_figure(
        420, "pan,box_zoom,wheel_zoom,", x_axis_type="log", y_axis_type="log", x_range=(low_x, high_x),
        y_range=(low_y, high_y), active_scroll="wheel_zoom", x_axis_label="MACs for each byte of DRAM",
        y_axis_label="MACs a cycle",
    )  # fmt: skip
    for label, rate in roofs.items():
        is_combined = label == ROOFS[0]
        ends = np.array([low_x, peak / rate, high_x])
        dash, text_position = ("solid", _ABOVE) if is_combined else ("dashed", _BELOW)
        plot.line(ends, np.minimum(ends * rate, peak), line_width=2, line_dash=dash, color=COLOURS["latency"])
        y = sqrt(max(low_y, low_x * rate) * peak)
        plot.text([y / rate], [y], text=[f"{rate:g} B a cycle"], **text_position, **text_style)
    for height in flat.values():
        if height < peak:
            plot.line(
                [height / max(roofs.values()), high_x], [height] * 2, line_dash="dashed", color=COLOURS["latency"]
            )
    plot.text([high_x / 1.1], [peak], text=["; ".join(flat)], text_align="right", y_offset=-4, **text_style)
    for axis in (plot.xaxis, plot.yaxis):
        axis.formatter = CustomJSTickFormatter(
            code="return tick >= 1 ? tick.toLocaleString('en') : tick.toPrecision(1)"
        )
    source = ColumnDataSource({
        **_tooltip_columns(rows), "x": intensity, "y": speed, "moved": [_bytes_text(size) for size in moved],
        "size": [7 + 20 * sqrt(row["cycles"] / max_cycles) for row in rows],
    })  # fmt: skip
    points = plot.scatter("x", "y", size="size", fill_color="color", fill_alpha=0.75, line_color="color", source=source)
    plot.add_tools(
        hover([points], [*_LAYER_TOOLTIP, ("moved", "@moved"), ("MACs a byte", "@x{0.0}"), ("loops", "@loops")])
    )
    return plot


_ABOVE = {"text_align": "right", "text_baseline": "bottom", "x_offset": -8}
_BELOW = {"text_align": "left", "text_baseline": "top", "x_offset": 8, "y_offset": 4}
"""Position of the text of a sloping roof, relative to a point on it."""
_LAYER_TOOLTIP = [
    ("layer", "@name"), ("what", "@what"), ("cycles", "@cycles{0,0}"), ("array", "@array"), ("bound by", "@bound"),
]  # fmt: skip
"""Lines of the tooltip of a layer; `_tooltip_columns` has the data."""


def _tooltip_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data columns that tooltips of layers show. rows: of a report."""
    return {
        "name": [short(row["name"], NAME) for row in rows],
        "what": [short(row["what"], 2 * NAME) for row in rows],
        "cycles": [row["cycles"] for row in rows],
        "array": ["-" if row["utilization"] is None else f"{row['utilization']:.1%}" for row in rows],
        "bound": [row["bound"] or "-" for row in rows],
        "color": [COLOURS.get(row["bound"], COLOURS["latency"]) for row in rows],
        "loops": [short(row.get("loops") or "-", 3 * NAME) for row in rows],
    }


def hover(renderers: Sequence[Any], tooltips: Sequence[tuple[str, str]], **options: Any) -> HoverTool:
    """Return a tooltip for the glyphs of `renderers` under the pointer, three at most. tooltips: (label, value)."""
    return HoverTool(renderers=list(renderers), tooltips=list(tooltips), limit=3, **options)


def wide_hover(renderers: Sequence[Any], tooltips: Sequence[tuple[str, str]]) -> HoverTool:
    """Return a tooltip as `hover` does, in which long values are wrapped, for two glyphs at most."""
    rows = "".join(
        f"<div style='color:#26aae1;text-align:right'>{name}:</div><div style='white-space:normal'>{value}</div>"
        for name, value in tooltips
    )
    grid = "display:grid;grid-template-columns:auto 1fr;gap:0 6px;max-width:min(360px,80vw);overflow-wrap:anywhere"
    return HoverTool(renderers=list(renderers), tooltips=f"<div style='{grid}'>{rows}</div>", limit=2)


def cycles(rows: Sequence[Mapping[str, Any]], roof: Sequence[float]) -> Figure:
    """Plot the cycles of each layer as a bar, with a mark at their lower bound. roof: lower bound of each row, in
    cycles."""
    plot = new_figure(
        _height(len(rows)), "ypan,", y_range=Range1d(start=len(rows) - 0.4, end=-0.6),
        x_range=_range_from_zero(_axis_maximum(rows, roof)), x_axis_label="cycles",
    )  # fmt: skip
    source = ColumnDataSource(_tooltip_columns(rows) | {
        "y": list(range(len(rows))), "roof": roof,
        "top": [number - 0.42 for number in range(len(rows))],
        "bottom": [number + 0.42 for number in range(len(rows))],
        "times": [f"{row['cycles'] / least:.2f} x" if least else "-" for row, least in zip(rows, roof)],
    })  # fmt: skip
    bars = plot.hbar("y", right="cycles", height=0.8, color="color", source=source)
    plot.segment("roof", "top", "roof", "bottom", line_width=3, color="#000000", source=source, name="ink")
    plot.add_tools(hover(
        [bars], [*_LAYER_TOOLTIP, ("at least", "@roof{0,0} cycles"), ("of that", "@times"), ("loops", "@loops")],
        mode="hline" if len(rows) <= MAX_LABELS else "mouse",
    ))  # fmt: skip
    _layer_axis(plot, [row["name"] for row in rows])
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[0]a")
    plot.xaxis.ticker.desired_num_ticks = AXIS_TICKS
    return plot


def _axis_maximum(rows: Sequence[Mapping[str, Any]], roof: Sequence[float]) -> float:
    """Return the largest number of cycles that a bar or mark shows, at least 1."""
    return float(max([1, *(row["cycles"] for row in rows), *roof]))


def _range_from_zero(limit: float) -> Range1d:
    """Return an axis range from 0 to a little more than `limit`."""
    return Range1d(start=0, end=limit * 1.04)


def traffic(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the bytes of each layer as stacked bars: loaded, stored, and kept on chip by a block."""
    kinds = {"load": "bytes_loaded", "store": "bytes_stored", "kept": "bytes_kept"}
    columns = {kind: [row[key] for row in rows] for kind, key in kinds.items()}
    highest = max(1, *(sum(column) for column in zip(*columns.values())))
    plot = new_figure(
        _height(len(rows)), "ypan,", y_range=Range1d(start=len(rows) - 0.4, end=-0.6),
        x_range=_range_from_zero(highest), x_axis_label="bytes",
    )  # fmt: skip
    source = ColumnDataSource({
        "name": [short(row["name"], NAME) for row in rows], "what": [short(row["what"], 2 * NAME) for row in rows],
        "y": list(range(len(rows))), **columns,
        **{f"{kind}_text": [_bytes_text(size) for size in sizes] for kind, sizes in columns.items()},
    })  # fmt: skip
    bars = plot.hbar_stack(list(kinds), y="y", height=0.8, color=[COLOURS[kind] for kind in kinds], source=source)
    plot.add_tools(hover(
        bars[:1] if len(rows) <= MAX_LABELS else bars,
        [("layer", "@name"), ("what", "@what"), ("loaded", "@load_text"), ("stored", "@store_text"),
         ("kept on chip", "@kept_text")],
        mode="hline" if len(rows) <= MAX_LABELS else "mouse",
    ))  # fmt: skip
    _layer_axis(plot, [row["name"] for row in rows])
    plot.xaxis.formatter = CustomJSTickFormatter(
        code="return tick >= 1e6 ? tick / 1e6 + ' MB' : tick >= 1e3 ? tick / 1e3 + ' kB' : tick"
    )
    plot.xaxis.ticker.desired_num_ticks = AXIS_TICKS
    return plot


def _bytes_text(size: int) -> str:
    """Return a number of bytes as text in kB or MB."""
    return f"{size / 1e6:.2f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


# Time -------------------------------------------------------------------------------------------------------


def timeline(activity: Activity, names: Sequence[str], clock_mhz: float) -> Figure:
    """Draw the work and waits of each unit, and below them the use of each scratchpad; all on one axis of cycles."""
    total = activity.launches[-1]
    time = Range1d(start=0, end=total, bounds=(0, total), min_interval=20, name="time")
    return column(
        [_plot_units(activity, names, clock_mhz, time), _plot_scratchpads(activity, time)], sizing_mode="stretch_width"
    )


TIME_TOOLS = "xpan,xbox_zoom,xwheel_zoom,xzoom_in,xzoom_out,"
"""Bokeh's tools of figures over time."""


def layer_colour(number: int) -> str:
    """Return the colour of layer `number`, equal in all figures."""
    return LAYER_COLOURS[number % len(LAYER_COLOURS)]


def _plot_units(activity: Activity, names: Sequence[str], clock_mhz: float, time: Range1d) -> Any:
    """Plot the work and the waits of each unit over time, as bars.

    names: of layers. time: the shared axis of cycles.
    """
    plot = new_figure(
        230, TIME_TOOLS, x_range=time, y_range=Range1d(start=len(UNITS) - 0.45, end=-0.5), min_border_left=LEFT_BORDER,
        active_scroll="xwheel_zoom",
    )  # fmt: skip
    bars, waits = activity.bars, activity.waits
    bar_source = ColumnDataSource({
        "left": _ints(bars.drawn), "right": _ints(bars.end), "top": _offset_rows(bars.unit, -0.4),
        "bottom": _offset_rows(bars.unit, 0.16), "layer": _ints(bars.layer), "index": _ints(bars.index),
        "count": _ints(bars.count), "unit": _ints(bars.unit), "cycles": _ints(bars.end - bars.drawn),
        "color": [layer_colour(layer) for layer in bars.layer.tolist()],
    })  # fmt: skip
    wait_source = ColumnDataSource({
        "left": _ints(waits.since), "right": _ints(waits.until), "top": _offset_rows(waits.unit, 0.22),
        "bottom": _offset_rows(waits.unit, 0.4), "unit": _ints(waits.unit), "of": _ints(waits.of),
        "cycles": _ints(waits.until - waits.since),
        "color": [COLOURS[UNITS[of]] for of in waits.of.tolist()],
    })  # fmt: skip
    launch_source = ColumnDataSource({"x": list(activity.launches[1:-1])})
    bar_glyphs = plot.quad("left", "right", "top", "bottom", fill_color="color", line_color=None, source=bar_source)
    wait_glyphs = plot.quad("left", "right", "top", "bottom", fill_color="color", line_color=None, source=wait_source)
    layer_format = CustomJSHover(args={"names": [short(name, NAME) for name in names]}, code="return names[value]")
    unit_format = CustomJSHover(args={"names": list(UNITS)}, code="return names[value]")
    duration_format = CustomJSHover(args={"mhz": clock_mhz}, code=_DURATION)
    count_format = CustomJSHover(code="return value == 1 ? '' : 'and ' + (value - 1).toLocaleString('en') + ' more'")
    plot.add_tools(
        HoverTool(
            renderers=[bar_glyphs], limit=1,
            tooltips=[("unit", "@unit{custom}"), ("instruction", "@index @count{custom}"), ("layer", "@layer{custom}"),
                      ("from cycle", "@left{0,0}"), ("for", "@cycles{custom}")],
            formatters={"@unit": unit_format, "@layer": layer_format, "@cycles": duration_format,
                        "@count": count_format},
        ),
        HoverTool(
            renderers=[wait_glyphs], limit=1,
            tooltips=[("unit", "@unit{custom}"), ("waits for", "@of{custom}"), ("from cycle", "@left{0,0}"),
                      ("for", "@cycles{custom}")],
            formatters={"@unit": unit_format, "@of": unit_format, "@cycles": duration_format},
        ),
    )  # fmt: skip
    plot.add_glyph(launch_source, VSpan(x="x", line_dash="dotted", line_color=COLOURS["cpu"]))
    plot.yaxis.ticker = FixedTicker(ticks=list(range(len(UNITS))))
    plot.yaxis.formatter = CustomJSTickFormatter(args={"names": list(UNITS)}, code="return names[tick]")
    plot.ygrid.visible = False
    plot.xaxis.visible = False
    return plot


_DURATION = """
const us = value / mhz
return value.toLocaleString('en') + ' cycles, ' + (us < 1000 ? us.toFixed(2) + ' us' : (us / 1000).toFixed(2) + ' ms')
"""
"""JavaScript that shows cycles and their time at `mhz`."""


def _plot_scratchpads(activity: Activity, time: Range1d) -> Any:
    """Plot the occupancy of each scratchpad over time, one below the other. time: the shared axis of cycles."""
    used = {name: occupancy for name, occupancy in activity.scratchpads.items() if len(occupancy.time)}
    plot = new_figure(
        60 + 42 * len(used), TIME_TOOLS, x_range=time, y_range=Range1d(start=len(used) - 0.05, end=-0.15),
        x_axis_label="cycles", min_border_left=LEFT_BORDER, active_scroll="xwheel_zoom",
    )  # fmt: skip
    for number, (name, occupancy) in enumerate(used.items()):
        times, share = thin_out(occupancy, MAX_CURVE_STEPS)
        source = ColumnDataSource({
            "x": _ints(times), "low": np.full(len(times), number + 0.9, np.float32),
            "high": (number + 0.9 - 0.85 * share).astype(np.float32),
        })  # fmt: skip
        color = _SCRATCHPAD[name]
        plot.varea_step("x", "low", "high", step_mode="after", color=color, alpha=0.8, source=source)
        plot.line([0, activity.launches[-1]], [number + 0.05] * 2, color=color, alpha=0.4, line_dash="dotted")
    labels = [f"{name} {occupancy.share.max():.0%}" for name, occupancy in used.items()]
    plot.yaxis.ticker = FixedTicker(ticks=[number + 0.5 for number in range(len(used))])
    plot.yaxis.formatter = CustomJSTickFormatter(args={"names": labels}, code="return names[Math.floor(tick)]")
    plot.ygrid.visible = False
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[000]a")
    plot.xaxis.ticker.desired_num_ticks = AXIS_TICKS
    return plot


_SCRATCHPAD = {
    "inp": COLOURS["load"], "wgt": COLOURS["gemm"], "acc": COLOURS["gemm"], "vin": COLOURS["vector"],
    "out": COLOURS["store"], "par": COLOURS["vector"], "lut": COLOURS["vector"], "tap": COLOURS["vector"],
    "book": COLOURS["load"], "exp": COLOURS["vector"],
}  # fmt: skip
"""Colour of each scratchpad: that of the unit that accesses it most."""


def thin_out(occupancy: Occupancy, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (times, shares) of an occupancy with at most `points` steps; each is the maximum of those that it
    replaces."""
    if len(occupancy.time) <= points:
        return occupancy.time, occupancy.share
    first = np.linspace(0, len(occupancy.time), points, endpoint=False).astype(np.int64)
    return occupancy.time[first], np.maximum.reduceat(occupancy.share, first)


def _ints(values: np.ndarray) -> np.ndarray:
    """Convert to int32, which takes half the room in the page."""
    return values.astype(np.int32)


def _offset_rows(rows: np.ndarray, offset: float) -> np.ndarray:
    """Return row numbers plus an offset, as float32: the y of an edge of bars."""
    return (rows + offset).astype(np.float32)
