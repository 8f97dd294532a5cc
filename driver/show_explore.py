"""An exploration on a terminal: how far it is, and the front that it has found."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from celosia.bitstreams.synthesis import RESOURCES
from celosia.driver.explore.explorer import State
from celosia.driver.explore.records import FAILURES
from celosia.driver.pages.names import resource
from celosia.driver.show import add_row, left_out_text, new_table

UNITS = {"cycles": "cycles", "latency": "ms", "fps": "ms an image", "area": "% of the device", "energy": "uJ, a proxy"}
FORMATS = {"cycles": "{:,.0f}", "area": "{:.1f}"}


def line(state: State) -> str:
    """How far it is, in a line."""
    text = f"exploring: {state.points:,} Configs measured, {state.rate:.2f} a second, {state.looked:,} looked at"
    if state.known:
        text += f", {state.known:,} known before"
    text += f"; {state.front} on the front, hypervolume {state.volume:.4f}"
    return text + (f"; {timedelta(seconds=round(state.left))} left" if state.left is not None else "")


def moving(state: State) -> RenderableType:
    """The same, and what was left out."""
    return Text(line(state) + failures(state.failed))


def failures(failed: dict[str, int]) -> str:
    """How many Configs failed, by why."""
    return "".join(f"; {count:,}: {FAILURES[kind]}" for kind, count in failed.items())


def front(report: dict[str, Any], folder: Path) -> Iterator[RenderableType]:
    """The front, and which of it to take."""
    names = list(report["objectives"])
    models = list(report["models"])
    title = f"{', '.join(models)} on {report['board']}, memory {report['memory']}"
    table = new_table(title, "Config", *(f">{UNITS[name]}" for name in names), *(f">cycles, {name}" for name in models),
                      ">LUT", ">flip-flops", ">DSP", ">block RAM", "known by", "clock")  # fmt: skip
    for row in report["front"]:
        area = row["area"]
        add_row(
            table, row["name"], *(FORMATS.get(name, "{:,.3g}").format(row["objectives"][name]) for name in names),
            *(row["models"][name]["rtl"] or row["models"][name]["cycles"] for name in models),
            *(resource(area, name) for name in RESOURCES), row["rung"],
            f"{row['clock_mhz']:.0f} MHz, {row['clock'].split(' ')[0]}",
        )  # fmt: skip
    yield table
    state = report["state"]
    text = f"{state['points']:,} Configs measured now, {state['known']:,} known before, {state['looked']:,} looked at, "
    text += f"of {state['space']:,}, in {state['seconds']:,.0f} s{failures(state['failed'])}"
    if state["damaged"]:
        text += f"; {state['damaged']:,} damaged lines of {folder / 'points.jsonl'} left out"
    yield Text(text + left_out_text(state["left_out"]))
    if any(row["area"]["extrapolated"] for row in report["front"]):
        yield Text("? nothing like it was synthesised, the model of LUTs and flip-flops may be off: --confirm yosys.")
    yield Text(f"{report['take']} All in {folder}.")
