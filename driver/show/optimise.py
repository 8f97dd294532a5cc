"""What the superoptimiser shows: how far it is, and the derivation of what it has found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from celosia.compiler.superoptimise.search import SearchState
from celosia.driver.show.table import add_row, new_table


def line(state: SearchState) -> str:
    """How far a search is, in a line."""
    text = f"searching: {state.priced:,} graphs priced, {state.waiting:,} waiting"
    return f"{text}; {state.best.cycles:,.0f} cycles, {state.original.cycles:,.0f} at first"


def derivation(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Each step with its rule and gain, what was refused, and what all of it came to."""
    if report["steps"]:
        table = new_table("Derivation; each rule is proved", "rule", "at", "tidied up by", ">cycles", ">saved")
        for row in report["steps"]:
            tidied = ", ".join(f"{name} ({count})" for name, count in _counted(row["tidied"]))
            add_row(table, row["rule"], ", ".join(row["where"]), tidied, f"{row['cycles']:,.0f}", f"{row['gain']:,.0f}")
        yield table
    for sentence in report["refused"]:
        yield Text(sentence)
    before, after = report["cycles_before"], report["cycles"]
    if not report["steps"]:
        yield Text(f"{before:,.0f} cycles; no rule saves any ({_ended(report)})")
        return
    text = f"{after:,.0f} cycles, {before:,.0f} before"
    if after:
        text += f": {before / after:.3f} times as fast"
    yield Text(f"{text}; on the CPU {report['host']:,.0f}, {report['host_before']:,.0f} before, by estimate")
    yield Text(f"the same bytes under onnxruntime for random inputs; {_ended(report)}")


def _ended(report: dict[str, Any]) -> str:
    return f"{report['priced']:,} graphs priced in {report['seconds']:.1f} s, ended by: {report['ended']}"


def _counted(names: list[str]) -> list[tuple[str, int]]:
    return [(name, names.count(name)) for name in dict.fromkeys(names)]
