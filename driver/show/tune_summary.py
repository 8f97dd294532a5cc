"""Summary of tuning: its progress and its result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from celosia.driver.show.text_table import add_row, new_table, percent

if TYPE_CHECKING:
    from celosia.compiler.tune.network_tuner import NetworkState
    from celosia.compiler.tune.records import Progress


def trials_line(state: Progress, name: str) -> str:
    """Return the progress of a tuning's trials."""
    time_left = timedelta(seconds=round((state.trials - state.spent) / state.rate)) if state.rate else "?"
    text = f"{name}: {state.spent:,} of {state.trials:,} trials, {state.known:,} of them known"
    return text + f", {state.rate:,.1f} a second, at most {time_left} left"


def tuning_line(state: NetworkState) -> str:
    """Return one line on the progress of a tuning."""
    text = trials_line(state, state.stage)
    if math.isfinite(state.regret):
        text += f"; layers at most {state.regret:.1%} from the best"
    if state.untuned:
        text += f"; whole network {state.tuned:,} cycles, {state.untuned:,} untuned"
    return text + excluded_devices_text(state.excluded_devices)


def excluded_devices_text(reasons: Mapping[str, str]) -> str:
    """Return text on devices that get no more trials. reasons: why, by device name."""
    return "".join(f"; {name} left out: {reason}" for name, reason in reasons.items())


def tuning_progress(state: NetworkState, limit: int = 16) -> RenderableType:
    """Return the progress of a tuning, and the layers that take the most cycles."""
    table = new_table("", "layer", ">count", ">points", ">trials", ">compiler's", ">best", ">saved", ">regret at most")
    heavy = sorted(state.subjects, key=lambda s: -s.occurrence.count * min(s.best, 1e18))[:limit]
    for s in heavy:
        saved = percent(1 - s.best / s.usual) if math.isfinite(s.best) and math.isfinite(s.usual) else "-"
        cycles = [f"{value:,.0f}" if math.isfinite(value) else "-" for value in (s.usual, s.best)]
        regret = percent(s.search.regret) if math.isfinite(s.search.regret) else "-"
        add_row(table, s.name, s.occurrence.count, len(s.space), s.trials, *cycles, saved, regret)
    return Group(Text(tuning_line(state)), table)


def tuning_result(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a summary of a tuning's result."""
    table = new_table(
        "Layers; cycles are of two successive runs of a layer", "layer", ">count", ">points", ">trials",
        ">compiler's", ">best", ">saved", ">regret at most", "taken",
    )  # fmt: skip
    for row in report["layers"]:
        saved = percent(1 - row["best"] / row["usual"]) if row["best"] and row["usual"] else "-"
        cycles = ["-" if row[name] is None else f"{row[name]:,.0f}" for name in ("usual", "best")]
        decided = "yes" if row["decided"] else ""
        add_row(table, row["layer"], row["count"], row["points"], row["trials"], *cycles, saved, percent(row["regret"]),
             decided)  # fmt: skip
    yield table
    text = (
        f"{report['cycles']:,} cycles, {report['untuned']:,} untuned: {report['untuned'] / report['cycles']:.3f} times"
    )
    yield Text(f"{text} as fast{trials_text(report)}")


def trials_text(report: dict[str, Any]) -> str:
    """Return a sentence on a tuning's trials."""
    text = f"; {report['measured']:,} measured, {report['known']:,} known, in {report['seconds']:,.0f} s"
    if report["failed"]:
        text += f"; {report['failed']:,} trials failed"
    if report["damaged"]:
        text += f"; {report['damaged']:,} damaged lines of the records left out"
    return text + excluded_devices_text(report["left_out"])
