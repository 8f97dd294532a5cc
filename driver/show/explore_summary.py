"""Summary of an exploration: its progress, and the front that it has found."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from celosia.driver.explore.exploration_result import ENDED
from celosia.driver.explore.explorer import ExploreState
from celosia.driver.explore.records import FAILURES
from celosia.driver.pages.exploration_page import (
    format_number,
    models_with_cycle_column,
    preset_caption,
    rewritten_caption,
    rows_of,
    watts_of,
)
from celosia.driver.pages.names import MARKS, NAMES, UNITS, resource
from celosia.driver.show.text_table import add_row, new_table
from celosia.driver.show.tune_summary import excluded_devices_text


def line(state: ExploreState) -> str:
    """Return one line on the progress, and on Configs that were left out."""
    text = f"exploring: {state.points:,} Configs measured, {state.rate:.2f} a second, {state.looked:,} looked at"
    if state.known:
        text += f", {state.known:,} known"
    text += f"; {state.front} on the front, hypervolume {state.volume:.4f}"
    text += f"; {timedelta(seconds=round(state.left))} left" if state.left is not None else ""
    return text + failures(state.failed)


def failures(failed: dict[str, int]) -> str:
    """Return text on the numbers of Configs that failed, by reason; "" without any."""
    return "".join(f"; {count:,}: {FAILURES[kind]}" for kind, count in failed.items())


def front(report: dict[str, Any], folder: Path | None = None) -> Iterator[RenderableType]:
    """Yield a table of the front, and sentences on the exploration and on which Config to take.

    folder: where it was written; None if it was not.
    """
    names, models = list(report["objectives"]), models_with_cycle_column(report)
    title = f"{', '.join(report['models'])} on {report['board']}, memory {report['memory']}"
    table = new_table(title, "Config", *(f">{UNITS[name]}" for name in names), *(f">cycles, {name}" for name in models),
                      *(f">{name}" for name in NAMES.values()), ">W", "known by", "clock")  # fmt: skip
    for row in rows_of(report):
        area = row["area"]
        add_row(
            table, row["label"], *(format_number(row["objectives"][name]) for name in names),
            *(row["models"][name]["rtl"] or row["models"][name]["cycles"] for name in models),
            *(f"{resource(area, name)} {row['shares'][name]:.0%}" for name in NAMES), f"~{watts_of(row)}", row["rung"],
            f"{row['clock_mhz']:.0f} MHz, {row['clock'].split(' ')[0]}",
        )  # fmt: skip
    yield table
    state = report["state"]
    text = f"{state['points']:,} Configs measured now, {state['known']:,} known before, {state['looked']:,} looked at, "
    text += f"of {state['space']:,}, in {state['seconds']:,.0f} s{failures(state['failed'])}"
    if state["damaged"]:
        text += f"; {state['damaged']:,} damaged lines of {(folder or Path()) / 'points.jsonl'} left out"
    yield Text(text + excluded_devices_text(state["left_out"]))
    yield from map(Text, filter(None, [rewritten_caption(report)]))
    yield Text(f"Percents are of a {report['device']}. {MARKS}")
    yield Text(f"Watts are those of logic and device, without the processors. {report['power']}")
    if report["preset"]:
        yield Text(preset_caption(report))
    yield Text(report["take"] + (f" All in {folder}." if folder else ""))
    if state["ended"] and ENDED[state["ended"]] not in report["take"]:
        yield Text(ENDED[state["ended"]])
