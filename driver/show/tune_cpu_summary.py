"""Summary of tuning kernels of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from celosia.compiler.tune.kernel_tuner import KernelState
from celosia.driver.show.text_table import add_row, new_table, percent
from celosia.driver.show.tune_summary import excluded_devices_text, trials_line, trials_text

SHOWN = 16
"""Number of kernels in the live table, those that take the most time."""


def tuning_line(state: KernelState) -> str:
    """Return one line on the progress of a tuning."""
    text = trials_line(state, "kernels")
    if state.untuned:
        text += f"; {state.tuned * 1e3:,.3f} ms, {state.untuned * 1e3:,.3f} ms untuned"
    return text + excluded_devices_text(state.excluded_devices)


def tuning_progress(state: KernelState) -> RenderableType:
    """Return the progress of a tuning, and the kernels that take the most time."""
    table = new_table("", "kernel", ">occurrences", ">trials", ">compiler's, us", ">best, us", ">saved")
    for s in sorted(state.subjects, key=lambda s: -s.usual * s.count)[:SHOWN]:
        best = s.final or min(s.usual, s.best)
        add_row(table, s.workload.name, s.count, s.trials, *_microseconds_text(s.usual, best))
    return Group(Text(tuning_line(state)), table)


def tuning_result(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a summary of a tuning's result."""
    table = new_table(
        "Kernels, on one thread", "kernel", ">occurrences", ">trials", ">compiler's, us", ">tuned, us", ">saved"
    )
    for kernel in sorted(report["kernels"], key=lambda kernel: -kernel["own"] * kernel["count"]):
        times = _microseconds_text(kernel["own"], kernel["tuned"])
        add_row(table, kernel["kernel"], kernel["count"], kernel["trials"], *times)
    yield table
    own_ms, best = report["seconds_own"] * 1e3, report["seconds_tuned"] * 1e3
    text = (
        f"{best:,.3f} ms, {own_ms:,.3f} ms untuned: {own_ms / best:.3f} times as fast" if best else "no kernel to tune"
    )
    yield Text(text + trials_text(report))


def _microseconds_text(untuned: float, best: float) -> tuple[str, str, str]:
    """Return the cells of two times in microseconds, from picoseconds, and of the share that is saved."""
    if not untuned:
        return "-", "-", "-"
    return f"{untuned * 1e-6:,.2f}", f"{best * 1e-6:,.2f}", percent(1 - best / untuned)
