"""Summary of the superoptimiser: its progress, and the derivation of its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from celosia.compiler.superoptimise.derivation import distance, is_measured, rule_in, tidied, total
from celosia.compiler.superoptimise.search import SearchState
from celosia.driver.show.text_table import add_row, new_table
from celosia.driver.show.tune_summary import excluded_devices_text
from celosia.plain import printable


def line(state: SearchState) -> str:
    """Return one line on the progress of a search."""
    text = f"searching: {state.weighed:,} steps weighed, {state.priced:,} graphs priced, {state.waiting:,} waiting"
    return f"{text}; {state.best}, {state.original} at first"


def derivation(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a summary of an optimisation: each step with its rule and gain, refused rules, and the total."""
    yield from steps(report)
    if len(report["tuned"]) > 1:
        first, *later = report["tuned"]
        cycles = ", ".join(f"{count:,.0f}" for count in later)
        yield Text(f"tuned, the original takes {first:,.0f} cycles, the best of the search {cycles}")
    for sentence in report["refused"]:
        yield Text(sentence)
    for row in report["rules"]:
        saves = "not weighed" if row["saves"] is None else f"saves {row['saves']:,.0f} at most, by estimate"
        yield Text(
            printable(f"{row['rule']}: fits in {row['matched']:,} places, {saves}; {row['taken']:,} steps of it")
        )
    ended = f"{report['weighed']:,} steps weighed, {report['priced']:,} graphs priced in {report['seconds']:.1f} s, "
    ended += f"ended by: {report['ended']}{excluded_devices_text(report['left_out'])}"
    if not report["steps"]:
        measured = is_measured(report)
        cost = f"{report['host_before'] / 1e6:,.3f} ms" if measured else f"{report['cycles_before']:,.0f} cycles"
        yield Text(f"{cost}; no rule saves any ({ended})")
        if not measured and not report["cycles_before"]:
            yield Text("no operator of the model runs on the accelerator; --cpu looks for less time of this processor")
        return
    check_text = "" if distance(report) else "the same bytes under onnxruntime for random inputs; "
    yield Text(f"{check_text}{ended}")


def steps(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield what a saved derivation knows, for `inspect --derivation`, too; nothing without steps.

    This is a table of the steps, each with its rule, proof and gain, the total, and how far outputs may differ.
    """
    if not report["steps"]:
        return
    unit, cost = ("ns", "host") if is_measured(report) else ("cycles", "cycles")
    table = new_table("Derivation", "rule", "proof", "at", "tidied up by", f">{unit}", ">saved")
    for row in report["steps"]:
        cells = rule_in(row), row["proof"], ", ".join(row["where"]), tidied(row)
        add_row(table, *cells, f"{row[cost]:,.0f}", f"{row['gain']:,.0f}")
    yield table
    yield Text(total(report))
    if distance_text := distance(report):
        yield Text(distance_text)
